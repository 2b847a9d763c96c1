"""Kernels that compile in 0.2 s, a stand-in for a worker, and the slots of a machine."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import cutlass

from evoattn.backends.hopper import launch
from evoattn.backends.hopper.kernels.statistics import Statistics
from evoattn.compile import first_calls
from evoattn.compile.workers import Report, Task

CHANNELS = (8, 16, 24, 32)


def kernels() -> list[launch.KernelVariant]:
    """Four that compile in 0.2 s each."""
    return [Statistics(cutlass.BFloat16, c, dlse=False) for c in CHANNELS]


def until(true: Callable[[], Any]) -> None:
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


class Hand:
    """Stands for a worker: takes a task, and does it when it is let go."""

    def __init__(self, niceness: int, sockets: tuple[socket.socket, ...]) -> None:
        assert niceness > 0 and len(sockets) == 1
        self.sockets = sockets

    taken: ClassVar[list[str]] = []
    go: ClassVar[threading.Event] = threading.Event()
    do: Callable[[Task], Any] = staticmethod(lambda task: None)

    def run(self, task: Task) -> Report:
        if task.function.endswith(":keep"):
            Hand.taken.append(task.arguments[0].name)
            Hand.go.wait(60)
            Hand.do(task)
        return Report(task, None, None, 0.0)

    def end(self) -> None: ...


def slot() -> socket.socket | None:
    """A slot of the machine, taken; None if all are."""
    worker = first_calls.helper()
    return None if worker is None else worker.sockets[0]


def held_by_workers() -> list[str]:
    """The kernels that workers compile."""
    return [name for name, future in first_calls.helpers.begun.items() if future.running()]


def waiting() -> list[str]:
    """The kernels that no worker has begun, and that one may begin."""
    return [name for name, future in first_calls.helpers.begun.items() if not future.running() and not future.done()]


@contextlib.contextmanager
def all_places() -> Iterator[int]:
    """Hold all places that are free, of which there are so many."""
    with contextlib.ExitStack() as stack:
        yield sum(1 for taken in iter(slot, None) if stack.enter_context(taken))


def free_places() -> int:
    with all_places() as count:
        return count
