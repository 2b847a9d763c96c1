"""Clocks: CUDA events on a GPU, the wall clock elsewhere."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Protocol

import torch

__all__ = ["Clock", "CudaClock", "WallClock", "clock_for"]


class Clock(Protocol):
    """How calls are timed; tests bring their own."""

    target_s: float
    """How long one round of one pass should last: many times the clock's own error."""

    def calls(self, call: Callable[[int], object], count: int) -> float:
        """Seconds that `count` calls, call(0), call(1), ..., take one after the other."""

    def host_s(self, call: Callable[[int], object], count: int) -> float | None:
        """Seconds until a call returns to Python while the device still works, the median of `count`; None where calls return
        when all is done."""

    def now(self) -> float:
        """Seconds of the wall clock."""


class WallClock:
    """For the CPU, where a call returns when it is done."""

    target_s = 0.05

    def calls(self, call: Callable[[int], object], count: int) -> float:
        start = time.perf_counter()
        for number in range(count):
            call(number)
        return time.perf_counter() - start

    def host_s(self, call: Callable[[int], object], count: int) -> float | None:
        return None

    def now(self) -> float:
        return time.perf_counter()


class CudaClock:
    """Events around calls that are queued one after the other, as a model queues them.

    Where the device waits for the host, that is part of the time.
    """

    target_s = 0.012

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def calls(self, call: Callable[[int], object], count: int) -> float:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(self.device)  # what is still queued would hide the host's time
        with torch.cuda.device(self.device):
            first.record()
            for number in range(count):
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

    def now(self) -> float:
        return time.perf_counter()


def clock_for(device: torch.device) -> Clock:
    """The clock that fits a device."""
    return CudaClock(device) if device.type == "cuda" else WallClock()
