"""Shared by all commands: options, refusals, files, progress."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

import torch


class RefusedError(Exception):
    """Raised for an option or file that cannot be used. The message is one line that names it and says what was expected."""


def tell(line: str) -> None:
    """Print a line on stderr. If stderr is closed, full or has no reader, go on: the exit status tells the result."""
    if sys.stderr is None:  # print would take stdout then
        return
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        write_no_more(sys.stderr)


def write_no_more(stream: TextIO) -> None:
    """Send further output of a stream nowhere, so that the flush at exit does not fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def add_command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    run: Callable[[argparse.Namespace], int],
    help_line: str,
    about: str,
    epilog: str,
) -> argparse.ArgumentParser:
    """Add a command that `run` runs, with its texts shown as they are, and return its parser."""
    shown = argparse.RawDescriptionHelpFormatter
    parser = commands.add_parser(name, help=help_line, description=about, epilog=epilog, formatter_class=shown)
    parser.set_defaults(run=run)
    return parser


def whole_number(least: int) -> Callable[[str], int]:
    """Return a function that turns an option's text into a whole number from `least` up."""

    def parse(text: str) -> int:
        with contextlib.suppress(ValueError):
            if least <= (value := int(text)) < 1 << 31:
                return value
        raise argparse.ArgumentTypeError(f"expected a whole number from {least} up, got {text!r}")

    return parse


@contextlib.contextmanager
def refusing(cannot: str, remedy: str = "") -> Iterator[None]:
    """Refuse if this block cannot read or write a file. The message is "`cannot`: the reason" and then the remedy."""
    try:
        yield
    except OSError as error:
        raise RefusedError(f"{cannot}: {error.strerror or error}{remedy}") from None


def refusing_place(place: Path, variable: str) -> contextlib.AbstractContextManager[None]:
    """Refuse if this block cannot write a file or folder that an environment variable may move."""
    return refusing(f"{place}: cannot be written", f"; {variable} names another folder")


def try_to_write(option: str, path: Path, write: Callable[[], None]) -> RefusedError | None:
    """Write a file of an option. Return the refusal if that fails, so that results are shown first."""
    try:
        write()
    except OSError as error:
        return RefusedError(f"{option} {str(path)!r}: cannot be written: {error.strerror or error}")
    return None


def pick(name: str) -> torch.device:
    """The device for "auto", "cpu" or "cuda".

    Raises:
        RefusedError: there is no GPU that torch can use.
    """
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise RefusedError("--device cuda: torch finds no GPU here; expected one, or --device cpu (evoattn doctor tells more)")
    return torch.device("cuda" if has_gpu and name != "cpu" else "cpu")


def try_to_write_in(folder: Path) -> None:
    """Make a folder if it is missing, and a file in it that is removed. Permissions alone do not tell if that works for root.

    Raises:
        OSError: it cannot be made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(prefix=".evoattn-", dir=folder):
        pass


def check_output(output: Path, option: str, suffix: str) -> Path:
    """The path, if a file can be written there.

    Raises:
        RefusedError: its directory does not exist or is not writable, it is a directory, or its name does not end as it should.
    """
    shown, folder = f"{option} {str(output)!r}", output.parent
    if output.is_dir():
        raise RefusedError(f"{shown}: is a directory; expected the name of a file")
    if output.suffix.lower() != suffix:
        raise RefusedError(f"{shown}: expected a name that ends in {suffix}")
    if not folder.is_dir():
        raise RefusedError(f"{shown}: there is no directory {str(folder)!r}; expected one that exists")
    with refusing(f"{shown}: the directory {str(folder)!r} is not writable"):
        try_to_write_in(folder)
    return output


EVERY_S = 5.0
"""Seconds between two lines of progress where there is no bar."""

Count = Callable[[int, str], None]
"""Called with the number of finished steps and a text."""


@contextlib.contextmanager
def count_progress(total: int) -> Iterator[Count]:
    """A bar over so many steps on stderr; without a terminal or without rich, a line every few seconds."""
    if sys.stderr.isatty() and importlib.util.find_spec("rich") is not None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        text = TextColumn("{task.description}", markup=False)
        columns = (BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn(), text)
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("starting", total=total)
            yield lambda done, what: bar.update(task, completed=done, description=what)
        return

    shown = time.monotonic()

    def count(done: int, what: str) -> None:
        nonlocal shown
        if time.monotonic() - shown >= EVERY_S:
            shown = time.monotonic()
            print(f"[{done}/{total}] {what}", file=sys.stderr, flush=True)

    yield count
