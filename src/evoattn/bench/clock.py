"""Clocks: CUDA events on a GPU, the wall clock elsewhere."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

MOST_CALLS = 200
"""Calls of a pass in a round."""


class Clock:
    """The wall clock, for a CPU: a call returns when it is done. A call takes its number, from 0."""

    target_s = 0.05
    """Seconds that one round of a pass should last: many times the clock's own error."""

    lead = 0
    """Number of calls before those that are counted."""

    def calls(self, call: Callable[[int], object], count: int) -> float:
        """Seconds of `count` consecutive calls. The `lead` calls before them are not counted."""
        start = time.perf_counter()
        for number in range(count):
            call(number)
        return time.perf_counter() - start

    def host_s(self, call: Callable[[int], object], count: int) -> float | None:
        """Median seconds of `count` calls until one returns to Python while the device still works. None if a call returns when
        its work is done."""
        return None

    def calls_in_a_round(self, seconds: float, most: int = MOST_CALLS) -> int:
        """The number of calls of so many seconds in a round."""
        return max(1, min(most, round(self.target_s / max(seconds, 1e-7))))

    def now(self) -> float:
        """Seconds of the wall clock."""
        return time.perf_counter()


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
        torch.cuda.synchronize(self.device)  # queued work would hide the host's time
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
        """One call at a time, so that the queue never fills, whatever the size of the problem."""
        seconds = []
        for number in range(count):
            torch.cuda.synchronize(self.device)
            start = time.perf_counter()
            call(number)
            seconds.append(time.perf_counter() - start)
        torch.cuda.synchronize(self.device)
        return statistics.median(seconds)


def clock_for(device: torch.device) -> Clock:
    """The clock that fits a device."""
    return CudaClock(device) if device.type == "cuda" else Clock()
