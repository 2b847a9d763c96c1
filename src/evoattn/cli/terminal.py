"""What every command needs to talk to a person: refusals, extras, progress."""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib.util
import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

__all__ = [
    "Count",
    "RefusedError",
    "Step",
    "WholeNumber",
    "check_output",
    "count_progress",
    "need_extra",
    "pick",
    "problem_progress",
    "progress",
    "refusing",
    "try_to_write_in",
]


class RefusedError(Exception):
    """Raised for what cannot be used; the message is one line that names it and says what was expected."""


def need_extra(*packages: str) -> None:
    """Refuse, naming what to install, unless all these packages are there."""
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise RefusedError(f"needs {' and '.join(missing)}, which {verb} not installed: pip install 'evoattn[cli]'")


class WholeNumber:
    """Turns an option's text into a whole number from `least` up."""

    def __init__(self, least: int) -> None:
        self.least = least

    def __call__(self, text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = self.least - 1
        if not self.least <= value < 1 << 31:
            raise argparse.ArgumentTypeError(f"expected a whole number from {self.least} up, got {text!r}")
        return value


@contextlib.contextmanager
def refusing(option: str, path: Path, what: str = "written") -> Iterator[None]:
    """Refuse, naming the option and the file, if what runs in this block cannot read or write it."""
    try:
        yield
    except OSError as error:
        raise RefusedError(f"{option} {str(path)!r}: cannot be {what}: {error.strerror or error}") from None


def pick(wish: str) -> torch.device:
    """The device for "auto", "cpu" or "cuda".

    Raises:
        RefusedError: there is no GPU that torch can use.
    """
    if wish == "auto":
        wish = "cuda" if torch.cuda.is_available() else "cpu"
    if wish == "cuda" and not torch.cuda.is_available():
        raise RefusedError("--device cuda: torch finds no GPU here; expected one, or --device cpu (evoattn doctor tells more)")
    return torch.device(wish)


def try_to_write_in(folder: Path) -> None:
    """Make a file in a folder and remove it: what permissions say is not the whole truth, to root least of all.

    Raises:
        OSError: it cannot be made.
    """
    with tempfile.NamedTemporaryFile(prefix=".evoattn-", dir=folder):
        pass


def check_output(output: Path, option: str, *suffixes: str) -> Path:
    """The path, if a file can be written there.

    Raises:
        RefusedError: its directory does not exist or is not writable, it is a directory, or its name does not end as it should.
    """
    shown = repr(str(output))
    kind = suffixes[0].removeprefix(".").upper()
    if output.is_dir():
        raise RefusedError(f"{option} {shown}: is a directory; expected the name of a {kind} file")
    if output.suffix.lower() not in suffixes:
        raise RefusedError(f"{option} {shown}: expected a name that ends in {' or '.join(suffixes)}")
    if not output.parent.is_dir():
        raise RefusedError(f"{option} {shown}: there is no directory {str(output.parent)!r}; expected one that exists")
    try:
        try_to_write_in(output.parent)
    except OSError as error:
        why = f" ({error.strerror})" if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS) else ""
        raise RefusedError(f"{option} {shown}: the directory {str(output.parent)!r} is not writable{why}") from None
    return output


Bar = Callable[[int, "int | None", str], None]
"""Told how many steps are done, of how many (None if time decides), and what is going on."""


@contextlib.contextmanager
def _bar(*, elapsed: bool = True) -> Iterator[Bar | None]:
    """A bar on stderr that goes away at the end; None without a terminal or without rich, if lines are printed instead."""
    if not sys.stderr.isatty() or importlib.util.find_spec("rich") is None:
        yield None
        return

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(bar_width=24), MofNCompleteColumn(), *([TimeElapsedColumn()] if elapsed else []))
    what = TextColumn("{task.description}", markup=False)
    with Progress(*columns, what, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda done, total, what: bar.update(task, total=total, completed=done, description=what)


def _print(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


Step = Callable[[str], None]
"""Called before each step of a long run with what is about to be done."""


@contextlib.contextmanager
def progress(total: int) -> Iterator[Step]:
    """A progress bar on stderr; without a terminal, a line a step.

    Args:
        total: how many steps there will be at most.
    """
    numbers = itertools.count()
    with _bar() as bar:

        def step(what: str) -> None:
            done = next(numbers)
            if bar is None:
                _print(f"[{done + 1}/{total}] {what}")
            else:
                bar(done, total, what)

        yield step


@contextlib.contextmanager
def problem_progress(budget_s: float | None) -> Iterator[Callable[[int, int, str], None]]:
    """A bar over problems on stderr with what is being measured and the time left; without a terminal, a line a problem.

    The function is called before each step of a run, with the number of the problem, from 1, and of all problems.

    Args:
        budget_s: after which the run ends whatever is left, or None.
    """
    start = time.perf_counter()
    shown = 0

    def left(problem: int, problems: int) -> str:
        passed = time.perf_counter() - start
        if problem <= 1 and budget_s is None:
            return ""
        rest = float("inf") if problem <= 1 else passed / (problem - 1) * (problems - problem + 1)
        if budget_s is not None:
            rest = min(rest, budget_s - passed)
        return f"{max(0, round(rest)) // 60}:{max(0, round(rest)) % 60:02d} left"

    with _bar(elapsed=False) as bar:

        def step(problem: int, problems: int, what: str) -> None:
            nonlocal shown
            if bar is not None:
                bar(problem - 1, problems, f"{left(problem, problems):>10}  {what}")
            elif problem != shown:
                shown = problem
                _print(f"[{problem}/{problems}] {what.partition(':')[0]}  {left(problem, problems)}")

        yield step


Count = Callable[[int, str], None]
"""Called with how many steps are done and what there is to say about them."""


@contextlib.contextmanager
def count_progress(total: int | None, every_s: float = 5.0) -> Iterator[Count]:
    """A bar with counts on stderr; without a terminal, a line every few seconds.

    Args:
        total: how many steps there will be, or None if time decides.
        every_s: seconds between two lines.
    """
    shown = time.monotonic()
    with _bar() as bar:

        def count(done: int, what: str) -> None:
            nonlocal shown
            if bar is not None:
                bar(done, total, what)
            elif time.monotonic() - shown >= every_s:
                shown = time.monotonic()
                _print(f"[{done}{'' if total is None else f'/{total}'}] {what}")

        yield count
