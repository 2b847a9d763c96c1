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

__all__ = ["Clock", "CudaClock", "TookTooLong", "WallClock", "clock_for"]


class TookTooLong(BaseException):
    """Raised inside what a clock's `limit` ends. No Exception, which a peer that tunes may swallow."""


_AGAIN_S = 1.0
"""After this the exception comes again, where something swallowed it."""


class Clock(abc.ABC):
    """A way to time calls; tests bring their own."""

    target_s: float
    """How long one round of one pass should last: many times the clock's own error."""

    lead = 0
    """Calls that come first and are not counted."""

    @abc.abstractmethod
    def calls(self, call: Callable[[int], object], count: int) -> float:
        """Seconds that `count` calls take one after the other, from call(lead) on; those before are not counted."""

    def host_s(self, call: Callable[[int], object], count: int) -> float | None:
        """Seconds until a call returns to Python while the device still works, the median of `count`; None where calls return
        when all is done."""
        return None

    def now(self) -> float:
        """Seconds of the wall clock."""
        return time.perf_counter()

    @contextmanager
    def limit(self, seconds: float | None) -> Iterator[None]:
        """End what runs in this block for longer by `TookTooLong`, at the next line of Python that this thread comes to.

        None sets no limit; nor is there one outside the main thread and where the system has no timer, as on Windows. What
        autograd runs in a thread of its own, as the backward of a GPU, comes to its end first.
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
    """For the CPU, where a call returns when it is done."""

    target_s = 0.05

    def calls(self, call: Callable[[int], object], count: int) -> float:
        start = time.perf_counter()
        for number in range(count):
            call(number)
        return time.perf_counter() - start


class CudaClock(Clock):
    """Events around calls that are queued one after the other, as a model queues them, behind another call.

    Where the device waits for the host, that is part of the time; what an empty queue waits for its first call is not.
    The device rests first: after milliseconds at its limit of power it lowers its clock, and whoever comes next would pay.
    """

    target_s = 0.012
    lead = 1
    rest_s = 0.02

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def calls(self, call: Callable[[int], object], count: int) -> float:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(self.device)  # what is still queued would hide the host's time
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

    def host_s(self, call: Callable[[int], object], count: int) -> float | None:
        """One call at a time into an empty queue, so that the queue never fills, whatever the size of the problem."""
        found = []
        for number in range(count):
            torch.cuda.synchronize(self.device)
            start = time.perf_counter()
            call(number)
            found.append(time.perf_counter() - start)
        torch.cuda.synchronize(self.device)
        return statistics.median(found)


def clock_for(device: torch.device) -> Clock:
    """The clock that fits a device."""
    return CudaClock(device) if device.type == "cuda" else WallClock()
