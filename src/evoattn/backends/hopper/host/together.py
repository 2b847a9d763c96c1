"""Kernels that a call is about to need, compiled at once in other processes: two compilers in one process bring it down.

The process itself compiles too, in the order of its launches. So whoever comes to a kernel first compiles it, and the other one
reads the file. Workers take the last first: those are the ones that the process would come to last.
"""

from __future__ import annotations

import importlib
import os
import threading
from pathlib import Path

from evoattn import cache
from evoattn.processes import Task, Worker, cores

__all__ = ["VARIABLE", "begin", "claim", "expect", "ready", "wanted"]

VARIABLE = "EVOATTN_COMPILERS"
"""The environment's name for the number of workers; none unless it is set. On a machine with a GPU they have not been tried
enough: 16 processes with four workers each compiled nothing in two minutes."""

_MOST = 4
"""Workers at most: of the seven kernels of `tri384` and its backward, three small ones take 15% of the time."""

_IDLE_S = 60.0
"""After which a worker ends, which holds 400 MB of memory."""

_PATIENCE_S = 30.0
"""After which a kernel is no longer waited for; the slowest takes 5 s."""

_READY = Task("evoattn.backends.hopper.host.together:ready", ())


def ready() -> None:
    """Import the compiler, in a worker."""
    importlib.import_module("evoattn.backends.hopper.host.launch")


class _Workers:
    """What is to be compiled, and threads that each hand a process one kernel after the other."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.waiting: dict[str, Task] = {}
        self.running: set[str] = set()
        self.threads = 0

    def begin(self, tasks: dict[str, Task], early: bool = False) -> None:
        """Add kernels by name, and start as many workers as they are worth."""
        with self.changed:
            self.waiting.update({name: task for name, task in tasks.items() if name not in self.running})
            wanted = min(_most(), _spare(), _MOST if early else len(self.waiting))
            for _ in range(wanted - self.threads):
                threading.Thread(target=self._work, daemon=True).start()
                self.threads += 1
            self.changed.notify_all()

    def claim(self, name: str) -> None:
        """Return when no worker has the kernel; none will begin it."""
        with self.changed:
            self.waiting.pop(name, None)
            self.changed.wait_for(lambda: name not in self.running, _PATIENCE_S)

    def _work(self) -> None:
        worker = Worker()
        worker.run(_READY)
        while True:
            with self.changed:
                if not self.changed.wait_for(lambda: self.waiting, _IDLE_S):
                    self.threads -= 1
                    break
                name, task = self.waiting.popitem()
                self.running.add(name)
            try:
                worker.run(task)  # what failed has no file: the process itself compiles it, and raises what is wrong
            finally:
                with self.changed:
                    self.running.discard(name)
                    self.changed.notify_all()
        worker.end()


_workers = _Workers()


def _forget() -> None:
    """In a process that was forked: the threads are not there."""
    global _workers
    _workers = _Workers()


os.register_at_fork(after_in_child=_forget)


def begin(tasks: dict[str, Task]) -> None:
    """Have workers compile kernels that are not kept, by name, in the reverse of the order in which they are needed."""
    if len(tasks) > 1 and _may_help():
        _workers.begin(tasks)


def expect() -> None:
    """Start workers if nothing is kept, before it is known what is needed: they import the compiler while this process does."""
    kept = cache.folder()
    if kept is not None and not _any(kept / "hopper") and _may_help():
        _workers.begin({}, early=True)


def claim(name: str) -> None:
    """Leave a kernel to this process: wait for a worker that has begun it, and let none begin it."""
    _workers.claim(name)


def wanted() -> bool:
    """Whether workers are asked for, and there is a core to spare."""
    return _most() > 0 and _spare() > 0


def _any(folder: Path) -> bool:
    try:
        return any(folder.glob("*.o"))
    except OSError:
        return True


def _may_help() -> bool:
    """Whether workers are wanted, and there is a folder through which processes can hand kernels on."""
    kept = cache.folder()
    return wanted() and kept is not None and cache.takes_files(kept / "hopper")


def _most() -> int:
    """How many workers the user wants, up to as many as help."""
    asked = os.environ.get(VARIABLE, "")
    return min(_MOST, int(asked)) if asked.isdecimal() else 0


def _spare() -> int:
    """Cores beside the one of this process; torchrun says how many processes share them."""
    processes = os.environ.get("LOCAL_WORLD_SIZE", "")
    return cores() // (int(processes) if processes.isdecimal() and int(processes) else 1) - 1
