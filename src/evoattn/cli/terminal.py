"""What every command needs to talk to a person: refusals, extras, progress."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from typing import Protocol

__all__ = ["RefusedError", "Step", "need_extra", "progress"]


class RefusedError(Exception):
    """What the user gave cannot be used; the message is one line that names it and says what was expected."""


def need_extra(*packages: str) -> None:
    """Refuse, naming what to install, unless all these packages are there."""
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise RefusedError(f"needs {' and '.join(missing)}, which are not installed: pip install 'evoattn[cli]'")


class Step(Protocol):
    """Called before each step of a long run with what is about to be done."""

    def __call__(self, what: str) -> None: ...


@contextlib.contextmanager
def progress(total: int) -> Iterator[Step]:
    """A progress bar on stderr where that is a terminal, and one plain line a step where it is not.

    Args:
        total: how many steps there will be at most.
    """
    if not sys.stderr.isatty():
        done = 0

        def line(what: str) -> None:
            nonlocal done
            done += 1
            print(f"[{done}/{total}] {what}", file=sys.stderr, flush=True)

        yield line
        return

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=total)
        begun = False

        def advance(what: str) -> None:
            nonlocal begun
            bar.update(task, advance=1 if begun else 0, description=what)
            begun = True

        yield advance
