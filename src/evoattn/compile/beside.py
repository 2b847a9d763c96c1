"""Workers that compile kernels beside a program.

A program that does not wait goes on without the kernels (`core.attempts`). A kernel is tried once. If it is not kept after
that, because its worker died or failed, its caller compiles it and waits. So does a process that may have no workers.
`listeners` are told why.

A program that waits compiles in the order of its launches, and workers help it: they begin with the last. Each kernel has a
file, and a lock that its compiler holds (`compile.cache`). So each is compiled once: whoever finds it locked leaves it, or
waits for the file.
"""

from __future__ import annotations

import functools
import os
import threading
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

from evoattn.compile import cache
from evoattn.compile.workers import Pool, Report, Task, Worker, cores

VARIABLE = "EVOATTN_COMPILERS"
"""The environment variable for the number of workers at most; 0 for none."""

_MOST = 16
"""Workers at most. Each holds 400 MB of memory."""

HELPERS = 4
"""Helpers at most: of the seven kernels of `tri384` and its backward, three small ones take 15% of the time."""

_ENOUGH = 3
"""With so many cores to spare there are helpers though nobody asks: each takes seconds of a core to start."""

_POLITE = Task("os:nice", (10,))
"""The first task of a worker beside a program, which comes first on every core. A program waits for its helpers."""

IDLE_S = 60.0
"""Seconds after which a worker without kernels ends."""

listeners: list[Callable[[str], None]] = []
"""Told why a call waits for a compiler."""


def forget() -> None:
    """Forget what was asked for, as a new process does."""
    global _pool, _helpers, _submitted, _lock
    _pool, _helpers = Pool(_MOST, make=functools.partial(Worker, first=_POLITE), idle_s=IDLE_S), Pool(HELPERS, idle_s=IDLE_S)
    _submitted, _lock = {}, threading.Lock()


_pool: Pool
_helpers: Pool
_submitted: dict[str, Future[Report]]
_lock: threading.Lock
forget()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=forget)  # its threads are not there


def _asked() -> int | None:
    """The number of workers that the user wants at most, or None. What is no number means none of them."""
    text = os.environ.get(VARIABLE)
    return (int(text) if text.isdecimal() else 0) if text else None


def spare_cores() -> int:
    """Return how many cores this process leaves to compilers.

    torchrun says how many processes share the cores. One of their cores is this process's own.
    """
    processes = os.environ.get("LOCAL_WORLD_SIZE", "")
    return cores() // (int(processes) if processes.isdecimal() and int(processes) else 1) - 1


def most() -> int:
    """Return how many workers a process may have: half of its cores, or as many as the user says, and one for each spare core.

    Cores are often two threads of one, so a worker on each would take half of the program's speed.
    """
    spare, asked = spare_cores(), _asked()
    return min(_MOST, spare, (spare + 1) // 2 if asked is None else asked)


def helpers() -> int:
    """Return how many workers may help a call that compiles kernels itself. Without a user's word few cores are left to it."""
    return 0 if _asked() is None and spare_cores() < _ENOUGH else max(0, min(HELPERS, most()))


def start_helpers(module: str, folder: Path | None) -> None:
    """Start helpers if a folder has no kernel, before it is known what is needed: they import the compiler's module."""
    if (count := helpers()) and folder is not None and cache.takes_files(folder) and not any(folder.glob("[!.]*")):
        for _ in range(count):
            _helpers.submit(Task(module), count)


def help_with(tasks: Sequence[Task], folder: Path | None) -> None:
    """Have helpers compile kernels into a folder, the last one first. The tasks are in the order of need.

    A task returns at once if its kernel is kept or locked. One that fails is of no matter: the caller compiles the kernel, and
    raises what that raises.
    """
    if len(tasks) > 1 and (count := helpers()) and folder is not None and cache.takes_files(folder):
        for task in reversed(tasks):
            _helpers.submit(task, min(count, len(tasks) - 1))


def obstacle() -> str:
    """The reason why no kernel is compiled beside a program, or ""."""
    if most() > 0:
        return ""
    return f"{VARIABLE} is {os.environ[VARIABLE]}" if _asked() == 0 else "there is no core to spare"


def compilation(key: str, task: Task, is_kept: Callable[[], bool]) -> Future[Report] | None:
    """The compilation of a kernel by a worker. It begins now, if it has not.

    Args:
        key: tells the kernel from all others, such as the path of its file.
        task: compiles it into that file.
        is_kept: returns whether it is there.

    Returns:
        None: the kernel is kept, or the caller has to compile it and wait.
    """
    known = _submitted.get(key)
    report = known.result() if known is not None and known.done() else None
    if is_kept():
        return None
    if report is not None:
        tell(f"a worker did not compile a kernel: {report.error or 'it is not where it is looked for'}")
        return None
    return submitted(key, task)


def submitted(key: str, task: Task) -> Future[Report] | None:
    """The task of this key, which a worker runs, has run, or begins now. None: there may be no worker."""
    if why := obstacle():
        tell(why)
        return None
    with _lock:
        if key not in _submitted:
            _submitted[key] = _pool.submit(task, most())
        return _submitted[key]


@functools.cache
def tell(why: str) -> None:
    """Say once why calls wait for a compiler."""
    if listeners:
        for listener in listeners:
            listener(why)
    else:
        warnings.warn(f"calls wait for their kernels to be compiled: {why}", stacklevel=3)
