"""Another process that holds the lock of a file."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

from evoattn.compile import cache
from tests.helpers.processes import forked

__all__ = ["locked_by_another"]


@contextlib.contextmanager
def locked_by_another(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock of a file until it is told to end or is killed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    process = forked(lambda: _hold(path), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None and process.stdout.readline() == "held\n"
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _hold(path: Path) -> None:
    with cache.locked(path):
        print("held", flush=True)
        input()
