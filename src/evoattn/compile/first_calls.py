"""Helpers: processes that compile kernels of a first call while the process itself compiles the others.

The process compiles in the order of its launches, and helpers begin with the last. Each kernel has a file, and a lock that its
compiler holds (`compile.cache`). So each kernel is compiled once: whoever finds it locked leaves it, or waits for the file.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import select
import subprocess
import sys
from pathlib import Path

from evoattn.compile import cache
from evoattn.compile.workers import Task, cores, start

VARIABLE = "EVOATTN_COMPILERS"
"""The environment variable for the number of helpers at most; 0 for none."""

MOST = 4
"""Helpers at most: of the seven kernels of `tri384` and its backward, three small ones take 15% of the time."""

_ENOUGH = 3
"""With so many cores to spare there are helpers though nobody asks: each takes seconds of a core to start."""

IDLE_S = 60.0
"""Seconds after which a helper without kernels ends. It holds 400 MB of memory."""

running: list[subprocess.Popen[bytes]] = []
"""The helpers of this process that have not ended. One whose input is open has no kernels yet."""


def prestart(backend: str, compiler: str) -> None:
    """Start helpers if no kernel of a backend is kept, before it is known what is needed: they import its compiler's module."""
    if (folder := _shared_folder(backend)) is not None and not any(folder.glob("[!.]*")):
        _start(compiler, MOST)


def begin(backend: str, compiler: str, tasks: list[Task]) -> None:
    """Have helpers run the tasks that compile kernels of a backend by the module `compiler`, the last one first.

    The tasks are in the order in which their kernels are needed. One returns at once if its kernel is kept or locked.
    """
    if len(tasks) < 2 or _shared_folder(backend) is None:
        return
    _start(compiler, len(tasks) - 1)
    data = pickle.dumps(tasks[::-1])
    for helper in running:
        if helper.stdin is not None and not helper.stdin.closed:
            with contextlib.suppress(OSError, ValueError), helper.stdin:  # it has died, or another thread was faster
                helper.stdin.write(data)


def _start(compiler: str, count: int) -> None:
    """Start helpers until as many run, or as many as may."""
    running[:] = [helper for helper in running if helper.poll() is None]
    with contextlib.suppress(OSError):  # there is no Python to start
        while len(running) < min(count, _limit()):
            running.append(start(f"{__name__}:serve", compiler, os.getpid()))


def serve(compiler: str, caller: int) -> None:
    """Live as a helper: import a compiler's module, take tasks, and run them until all are done or the caller has ended."""
    importlib.import_module(compiler)
    if not select.select([sys.stdin], [], [], IDLE_S)[0]:
        return
    with contextlib.suppress(EOFError):  # the caller needs nothing
        for task in pickle.load(sys.stdin.buffer):
            if os.getppid() != caller:
                return
            with contextlib.suppress(Exception):  # the caller compiles it, and raises what it raises
                task.run()


def is_enabled() -> bool:
    """Return whether a call that needs several kernels may have helpers."""
    return _limit() > 0


def _shared_folder(backend: str) -> Path | None:
    """The folder through which processes hand on a backend's kernels; None if helpers are not enabled, or of no use."""
    folder = cache.folder()
    return None if not is_enabled() or folder is None or not cache.takes_files(folder / backend) else folder / backend


def spare_cores() -> int:
    """Return how many cores this process leaves to compilers.

    torchrun says how many processes share the cores. One of their cores is this process's own.
    """
    processes = os.environ.get("LOCAL_WORLD_SIZE", "")
    return cores() // (int(processes) if processes.isdecimal() and int(processes) else 1) - 1


def _limit() -> int:
    """Return how many helpers this process may have: as many as the user says, but no more than help or than spare cores."""
    spare = spare_cores()
    asked = os.environ.get(VARIABLE) or str(MOST if spare >= _ENOUGH else 0)
    return min(MOST, spare, int(asked)) if asked.isdecimal() else 0
