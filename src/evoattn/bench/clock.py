"""Clocks: CUDA events on a GPU, the wall clock elsewhere."""

from __future__ import annotations

import abc
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class TookTooLong(BaseException):
    """Raised inside the block that a clock's `limit` ends. It is no Exception, because a peer that tunes may catch those."""


_AGAIN_S = 1.0
"""Seconds after which the exception is raised again, if something caught it."""


class Clock(abc.ABC):
    """A way to time calls; tests bring their own."""

    target_s: float
    """Seconds that one round of a pass should last: many times the clock's own error."""

    lead = 0
    """Number of calls before those that are counted."""

    @abc.abstractmethod
    def calls(self, call: Callable[[int], object], count: int) -> float:
        """Seconds of `count` consecutive calls. The `lead` calls before them are not counted."""

    @abc.abstractmethod
    def synchronize(self) -> None:
        """Wait until the device has finished what was launched."""

    def latencies(
        self, call: Callable[[int], object], count: int, meet: Callable[[], object] = lambda: None
    ) -> list[tuple[float, float]]:
        """Seconds of calls into an empty queue: until each returns to Python, and until the device is done.

        Args:
            call: takes its number, from 0.
            count: how many.
            meet: called before each, such as to wait for other processes.
        """
        seconds = []
        for number in range(count):
            self.synchronize()
            meet()
            start = time.perf_counter()
            call(number)
            host = time.perf_counter() - start
            self.synchronize()
            seconds.append((host, time.perf_counter() - start))
        return seconds

    def host_s(self, call: Callable[[int], object], count: int) -> float | None:
        """Median seconds of `count` calls until one returns to Python while the device still works. None if a call returns when
        its work is done."""
        return None

    def now(self) -> float:
        """Seconds of the wall clock."""
        return time.perf_counter()

    @contextmanager
    def limit(self, seconds: float | None) -> Iterator[None]:
        """Raise `TookTooLong` in a block that runs longer, at the next line of Python that this thread executes.

        None sets no limit. Outside the main thread, and on systems without a timer such as Windows, there is no limit either.
        Work that autograd runs in a thread of its own, such as the backward of a GPU, is finished first.
        """
        if seconds is None or not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
            yield
            return

        armed = True

        def end(number: int, frame: object) -> None:
            if armed:
                raise TookTooLong

        before = signal.signal(signal.SIGALRM, end)
        try:
            try:
                signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3), _AGAIN_S)
                yield
            finally:
                armed = False  # a signal may come until here, and the outer block still has its turn
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, before)


class WallClock(Clock):
    """The clock of a CPU: a call returns when it is done."""

    target_s = 0.05

    def calls(self, call: Callable[[int], object], count: int) -> float:
        start = time.perf_counter()
        for number in range(count):
            call(number)
        return time.perf_counter() - start

    def synchronize(self) -> None:
        """Return at once: all work is done."""


class CudaClock(Clock):
    """Events around calls that are queued one after the other, as a model queues them, behind another call.

    If the device waits for the host between calls, that is part of the time. The wait of an empty queue for its first call is
    not. The device rests first: after milliseconds at its power limit it lowers its clock, which would slow the next contender.
    """

    target_s = 0.012
    lead = 1
    rest_s = 0.02

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def calls(self, call: Callable[[int], object], count: int) -> float:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.synchronize()  # queued work would hide the host's time
        time.sleep(self.rest_s)
        with torch.cuda.device(self.device):
            for number in range(self.lead):
                call(number)
            first.record()
            for number in range(self.lead, self.lead + count):
                call(number)
            last.record()
            last.synchronize()
        return float(first.elapsed_time(last)) / 1e3

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def host_s(self, call: Callable[[int], object], count: int) -> float | None:
        """One call at a time, so that the queue never fills, whatever the size of the problem."""
        return statistics.median(host for host, _ in self.latencies(call, count))


def clock_for(device: torch.device) -> Clock:
    """The clock that fits a device."""
    return CudaClock(device) if device.type == "cuda" else WallClock()
