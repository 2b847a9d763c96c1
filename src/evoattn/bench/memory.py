"""Peak memory of a call, beyond what was held before it."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from evoattn.bench import machine

_SHARE = 0.6
"""A call that would hold a larger share of the free memory than this is not begun."""


def release(device: torch.device) -> None:
    """Free unused memory."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def too_much(needed: int, device: torch.device, suffix: str = "") -> str | None:
    """Say so if so many bytes are more than a call may hold of the free memory."""
    free = machine.free_bytes(device)
    if needed <= _SHARE * free:
        return None
    return f"about {needed / 2**30:.1f} GiB{suffix}; {free / 2**30:.1f} GiB are free"


def peak_bytes(call: Callable[[], object], device: torch.device) -> int:
    """Bytes of tensors that a call holds at the most, beyond what was held before.

    On the GPU from torch's allocator statistics, on the CPU from every allocation and release that the profiler saw. It sees
    those of this thread, so the call has one thread; with several, each holds blocks of its own.
    """
    gc.collect()  # what others left behind in cycles would go back meanwhile
    if device.type == "cuda":
        machine.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        machine.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
    with _no_native_chatter():
        profiler.start()
    try:
        with machine.threads(1):
            call()
    finally:
        with _no_native_chatter():
            profiler.stop()
    results: Any = profiler.profiler
    events = [event for event in results.kineto_results.events() if event.name() == "[memory]"]
    changes = [int(event.nbytes()) for event in sorted(events, key=lambda event: event.start_ns())]
    return max(itertools.accumulate(changes, initial=0))


@contextlib.contextmanager
def _no_native_chatter() -> Iterator[None]:
    """Send file descriptor 2 nowhere for a moment.

    torch 2.13's profiler writes a trace line there at start and at stop, below Python, that no setting silences.
    """
    sys.stderr.flush()
    try:
        stderr = os.dup(2)
    except OSError:  # the program was started without a stderr
        yield
        return
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
