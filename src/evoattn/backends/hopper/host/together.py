"""Kernels that a call is about to need, compiled at once in other processes: two compilers in one process bring it down.

The process itself compiles too, in the order of its launches. So whoever comes to a kernel first compiles it, and the other one
reads the file. Workers take the last first: those are the ones that the process would come to last.

Workers may help, and never hold anything up:
- There is one for every second core at most, of all processes of the machine together.
- They yield to other work, and hold a kernel only while they compile it.
- A process that has waited in vain once waits for none again.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import threading
from pathlib import Path

from evoattn import cache
from evoattn.processes import Task, Worker, cores

__all__ = ["PATIENCE_S", "VARIABLE", "begin", "claim", "expect", "ready", "wanted"]

VARIABLE = "EVOATTN_COMPILERS"
"""The environment's name for the number of workers at most; 0 for none."""

_MOST = 4
"""Workers at most: of the seven kernels of `tri384` and its backward, three small ones take 15% of the time."""

_ENOUGH = 3
"""With so many cores to spare there are workers though nobody asks: each takes seconds of a core to start."""

_BEHIND = 10
"""How much nicer a worker is than its caller: it gets a tenth of the time of a core that it shares."""

_IDLE_S = 60.0
"""After which a worker ends, which holds 400 MB of memory."""

PATIENCE_S = 10.0
"""After which a kernel is no longer waited for; the slowest takes 5 s."""

_PLACE = "evoattn-compiler-"
"""A worker's name among the sockets of the machine, with the number of a core behind it."""

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
        self.places: set[socket.socket] = set()
        self.useful = True

    def begin(self, tasks: dict[str, Task], early: bool = False) -> None:
        """Add kernels by name, and start as many workers as they are worth and the machine has places for."""
        with self.changed:
            if not self.useful:
                return
            self.waiting.update({name: task for name, task in tasks.items() if name not in self.running})
            wanted = min(_most(), _MOST if early else len(self.waiting))
            while len(self.places) < wanted and (place := _place()) is not None:
                self.places.add(place)
                threading.Thread(target=self._work, args=(place,), daemon=True).start()
            if not self.places:
                self.waiting.clear()
            self.changed.notify_all()

    def claim(self, name: str) -> None:
        """Return when no worker has the kernel, or it is taken over from one that is too slow; no other will begin it."""
        with self.changed:
            self.waiting.pop(name, None)
            if self.useful and not self.changed.wait_for(lambda: name not in self.running, PATIENCE_S):
                self.useful = False
                self.waiting.clear()

    def _work(self, place: socket.socket) -> None:
        worker = Worker(_BEHIND, (place.fileno(),))
        worker.run(_READY)
        while True:
            with self.changed:
                if not self.changed.wait_for(lambda: self.waiting, _IDLE_S):
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
        place.close()
        with self.changed:
            self.places.discard(place)


def _place() -> socket.socket | None:
    """A free place for a worker, one of those for every second core; None if all are taken.

    It is a name that the system gives to one socket at a time. The worker has the socket too. So the place is taken until the
    worker ends, even if its caller was killed before.
    """
    with contextlib.suppress(OSError):  # too many files are open
        place = socket.socket(socket.AF_UNIX)
        for core in sorted(os.sched_getaffinity(0))[::2]:
            with contextlib.suppress(OSError):  # it is taken
                place.bind(f"\0{_PLACE}{core}")  # the zero: a name that is no file
                return place
        place.close()
    return None


_workers = _Workers()


def _forget() -> None:
    """In a process that was forked: the threads are not there, and the places are its parent's."""
    global _workers
    for place in _workers.places:
        place.close()
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
    """Whether a call that needs several kernels may have workers."""
    return _most() > 0


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
    """How many workers this process may have: as many as the user says, up to as many as help and as there are cores for."""
    spare = _spare()
    asked = os.environ.get(VARIABLE) or str(_MOST if spare >= _ENOUGH else 0)
    return min(_MOST, spare, int(asked)) if asked.isdecimal() else 0


def _spare() -> int:
    """Cores beside the one of this process; torchrun says how many processes share them."""
    processes = os.environ.get("LOCAL_WORLD_SIZE", "")
    return cores() // (int(processes) if processes.isdecimal() and int(processes) else 1) - 1
