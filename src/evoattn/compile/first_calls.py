"""Workers that compile kernels of a first call while the process itself compiles the others: its compiler has one thread.

The process compiles in the order of its launches, and workers begin with the last. So whoever comes to a kernel first compiles
it, and the other one reads the file. Workers may help, and never hold anything up:
- A machine has one for every second core at most, of all processes together.
- They yield to other work, and hold a kernel only while they compile it.
- A process that has waited in vain once waits for none again.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import socket
from concurrent.futures import Future
from pathlib import Path

from evoattn.compile import cache
from evoattn.compile.workers import Pool, Report, Task, Worker, cores

VARIABLE = "EVOATTN_COMPILERS"
"""The environment variable for the number of workers at most; 0 for none."""

MOST = 4
"""Workers at most: of the seven kernels of `tri384` and its backward, three small ones take 15% of the time."""

_ENOUGH = 3
"""With so many cores to spare there are workers though nobody asks: each takes seconds of a core to start."""

_NICENESS = 10
"""The niceness of a worker above its caller's: it gets a tenth of the time of a core that it shares."""

IDLE_S = 60.0
"""Seconds without a kernel after which a worker ends. It holds 400 MB of memory."""

PATIENCE_S = 10.0
"""Seconds after which a kernel is no longer waited for; the slowest takes 5 s."""

SLOT = "evoattn-compiler-"
"""A worker's name among the sockets of the machine, followed by the number of a core."""


class Helpers(Pool):
    """The workers of this process, and the kernels that they have been given, by name."""

    def __init__(self) -> None:
        super().__init__(0, helper, idle_s=IDLE_S)
        self.begun: dict[str, Future[Report]] = {}
        self.useful = True

    def drop(self) -> None:
        """Leave all kernels to this process that no worker has begun."""
        for future in self.begun.values():
            future.cancel()


def helper() -> Worker | None:
    """A worker that holds a slot of the machine; None if all slots are taken.

    A slot is a name that the system gives to one socket at a time. There is one for every second core. The worker has the
    socket too, so the slot is taken until the worker ends, even if its caller was killed before.
    """
    with contextlib.suppress(OSError):  # too many files are open
        slot = socket.socket(socket.AF_UNIX)
        for core in sorted(os.sched_getaffinity(0))[::2]:
            with contextlib.suppress(OSError):  # it is taken
                slot.bind(f"\0{SLOT}{core}")  # the zero: a name that is no file
                return Worker(niceness=_NICENESS, sockets=(slot,))
        slot.close()
    return None


helpers = Helpers()


def _forget() -> None:
    """Start anew in a forked process: it has no threads of its parent, and the slots are its parent's."""
    global helpers
    for worker in helpers.workers:
        for slot in worker.sockets:
            slot.close()
    helpers = Helpers()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def begin(backend: str, tasks: dict[str, Task]) -> None:
    """Have workers compile kernels of a backend that are not kept, by name, in the order in which they are needed."""
    if len(tasks) < 2 or _shared_folder(backend) is None:
        return
    for name, task in reversed(tasks.items()):
        if name not in helpers.begun or helpers.begun[name].done():
            helpers.begun[name] = helpers.submit(task)
    if not helpers.workers:
        helpers.drop()


def prestart(backend: str) -> None:
    """Start workers if no kernel of a backend is kept, before it is known what is needed: they import its compiler."""
    if (folder := _shared_folder(backend)) is not None and not any(folder.glob("[!.]*")):
        helpers.grow(MOST)


def take_over(name: str) -> None:
    """Leave a kernel to this process: wait for a worker that has begun it, and let none begin it."""
    future = helpers.begun.get(name)
    if future is None or future.cancel() or not helpers.useful:
        return
    if concurrent.futures.wait([future], PATIENCE_S).not_done:
        helpers.useful = False
        helpers.drop()


def is_enabled() -> bool:
    """Return whether a call that needs several kernels may have workers."""
    return _worker_limit() > 0


def _shared_folder(backend: str) -> Path | None:
    """The folder through which processes hand on a backend's kernels; None if workers are not enabled, or of no use."""
    folder = cache.folder()
    if not helpers.useful or not is_enabled() or folder is None or not cache.takes_files(folder / backend):
        return None
    helpers.jobs, helpers.first = _worker_limit(), Task(f"evoattn.backends.{backend}.ahead")
    return folder / backend


def _worker_limit() -> int:
    """Return how many workers this process may have: as many as the user says, but no more than help or than spare cores.

    torchrun says how many processes share the cores. One of their cores is this process's own.
    """
    processes = os.environ.get("LOCAL_WORLD_SIZE", "")
    spare = cores() // (int(processes) if processes.isdecimal() and int(processes) else 1) - 1
    asked = os.environ.get(VARIABLE) or str(MOST if spare >= _ENOUGH else 0)
    return min(MOST, spare, int(asked)) if asked.isdecimal() else 0
