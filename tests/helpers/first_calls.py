"""Kernels that compile in 0.2 s, and stand-ins for the helpers of a first call."""

import contextlib
import io
import pickle
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cutlass

from evoattn.backends.hopper import launch
from evoattn.backends.hopper.kernels.statistics import Statistics
from evoattn.compile import cache
from evoattn.compile.workers import Task
from tests.helpers.processes import forked

CHANNELS = (8, 16, 24, 32)


def kernels() -> list[launch.KernelVariant]:
    """Four that compile in 0.2 s each."""
    return [Statistics(cutlass.BFloat16, c, dlse=False) for c in CHANNELS]


def until(true: Callable[[], Any]) -> None:
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


class Helper:
    """Stands for the process of a helper, and does nothing with its tasks."""

    def __init__(self, function: str, *arguments: object) -> None:
        self.stdin = _Pipe()

    def poll(self) -> int | None:
        return None

    @property
    def tasks(self) -> list[Task]:
        """The tasks that it was given."""
        return pickle.loads(self.stdin.written) if self.stdin.closed else []


class _Pipe(io.BytesIO):
    written = b""

    def close(self) -> None:
        self.written = self.written or self.getvalue()
        super().close()


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
