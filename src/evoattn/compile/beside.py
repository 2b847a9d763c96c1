"""Workers that compile kernels beside a program, which goes on without them (`core.attempts`).

A kernel is tried once. If it is not kept after that, because its worker died or failed, its caller compiles it and waits. So
does a process that may have no workers. `listeners` are told why.
"""

from __future__ import annotations

import functools
import os
import queue
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import Future

from evoattn.compile.first_calls import VARIABLE, spare_cores
from evoattn.compile.workers import Report, Task, Worker

_MOST = 16
"""Workers at most. Each holds 400 MB of memory."""

_POLITE = Task("os:nice", (10,))
"""The first task of a worker: the program itself comes first on every core."""

IDLE_S = 20.0
"""Seconds after which a worker without kernels ends."""

listeners: list[Callable[[str], None]] = []
"""Told why a call waits for a compiler."""


class _Pool:
    """Threads, each with a worker of its own. They do not keep the process from ending, and workers end with it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tasks: queue.SimpleQueue[tuple[Task, Future[Report]]] = queue.SimpleQueue()
        self._asked: dict[str, Future[Report]] = {}
        self._threads = 0

    def find(self, key: str) -> Future[Report] | None:
        return self._asked.get(key)

    def submit(self, key: str, task: Task) -> Future[Report]:
        """Have a worker run a task, unless one of this key was submitted before."""
        with self._lock:
            if key in self._asked:
                return self._asked[key]
            future: Future[Report] = Future()
            self._asked[key] = future
            self._tasks.put((task, future))
            unfinished = sum(not x.done() for x in self._asked.values())
            if self._threads < min(most(), unfinished):
                self._threads += 1
                threading.Thread(target=self._work, name="evoattn-compiler", daemon=True).start()
        return future

    def _work(self) -> None:
        worker = Worker()
        worker.run(_POLITE)
        while True:
            try:
                task, future = self._tasks.get(timeout=IDLE_S)
            except queue.Empty:
                with self._lock:
                    if self._tasks.empty():
                        self._threads -= 1
                        break
            else:
                future.set_result(worker.run(task))
        worker.end()


_pool = _Pool()


def forget() -> None:
    """Forget what was asked for, as a new process does."""
    global _pool
    _pool = _Pool()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=forget)  # its threads are not there


def most() -> int:
    """Return how many workers a process may have: half of its cores, or as many as the user says, and one for each spare core.

    Cores are often two threads of one, so a worker on each would take half of the program's speed.
    """
    spare, asked = spare_cores(), os.environ.get(VARIABLE, "")
    return min(_MOST, spare, int(asked) if asked.isdecimal() else (spare + 1) // 2)


def obstacle() -> str:
    """The reason why no kernel is compiled beside a program, or ""."""
    if most() > 0:
        return ""
    return f"{VARIABLE} is {os.environ[VARIABLE]}" if os.environ.get(VARIABLE) == "0" else "there is no core to spare"


def compilation(key: str, task: Task, is_kept: Callable[[], bool]) -> Future[Report] | None:
    """The compilation of a kernel by a worker. It begins now, if it has not.

    Args:
        key: tells the kernel from all others, such as the path of its file.
        task: compiles it into that file.
        is_kept: returns whether it is there.

    Returns:
        None: the kernel is kept, or the caller has to compile it and wait.
    """
    known = _pool.find(key)
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
    return _pool.submit(key, task)


@functools.cache
def tell(why: str) -> None:
    """Say once why calls wait for a compiler."""
    if listeners:
        for listener in listeners:
            listener(why)
    else:
        warnings.warn(f"calls wait for their kernels to be compiled: {why}", stacklevel=3)
