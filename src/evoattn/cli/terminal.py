"""Shared by all commands: options, refusals, files, progress."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from evoattn.compile import cache

if TYPE_CHECKING:
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


class Parser(argparse.ArgumentParser):
    """An argument parser that shows its texts as they are, and whose errors are one line."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


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


def kept_folder() -> Path:
    """The folder of what evoattn keeps on this machine.

    Raises:
        RefusedError: nothing is to be kept, or no folder is known.
    """
    place = cache.folder()
    if place is None and cache.VARIABLE in os.environ:
        raise RefusedError(
            f"{cache.VARIABLE} is empty, which means that nothing is kept; expected a folder, or the variable unset"
        )
    if place is None:
        raise RefusedError(f"no home folder is known: name a folder in {cache.VARIABLE}")
    return place


def refusing_place(place: Path, variable: str = cache.VARIABLE) -> contextlib.AbstractContextManager[None]:
    """Refuse if this block cannot write a file or folder that an environment variable may move."""
    return refusing(f"{place}: cannot be written", f"; {variable} names another folder")


def pick(name: str) -> torch.device:
    """The device for "auto", "cpu" or "cuda".

    Raises:
        RefusedError: there is no GPU that torch can use.
    """
    import torch  # `evoattn run` starts its program without it

    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise RefusedError("--device cuda: torch finds no GPU here; expected one, or --device cpu (evoattn doctor tells more)")
    return torch.device("cuda" if has_gpu and name != "cpu" else "cpu")


def check_json(output: Path) -> None:
    """Refuse the name of a file of JSON if no file can be written there."""
    shown, folder = f"--json {str(output)!r}", output.parent
    if output.suffix.lower() != ".json" or output.is_dir():
        raise RefusedError(f"{shown}: expected the name of a file that ends in .json")
    if not folder.is_dir():
        raise RefusedError(f"{shown}: there is no directory {str(folder)!r}; expected one that exists")
    with refusing(f"{shown}: the directory {str(folder)!r} is not writable"):
        cache.try_to_write(folder)


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
