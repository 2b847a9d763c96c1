"""Triangle attention at growing lengths, until the length, the memory or the patience ends."""

from __future__ import annotations

import dataclasses
import math
import time

import torch

from evoattn.bench.memory import too_much
from evoattn.cli import measure
from evoattn.cli.evoformer import CHANNELS, TRIANGLE_HEADS, embed, triangle_start
from evoattn.cli.measure import IMPLEMENTATIONS, Cost
from evoattn.cli.terminal import Step

__all__ = ["Growth", "Size", "run", "tiled"]

_PATIENCE = {"evoattn": 60.0, "dense": 8.0}
"""Seconds that one forward + backward may take; more is not begun."""

_LEAST_PASSES = 2
"""One that measures memory and one that measures time."""

_INPUT_BYTES_A_PAIR = 3 * 4 * 128 + 8 * 4 * TRIANGLE_HEADS * CHANNELS
"""Embedding in float32 with its temporaries; q, k, v, the cotangent, the output and three gradients."""


@dataclasses.dataclass(frozen=True)
class Size:
    """How much of an alignment is run, and how long.

    Args:
        sequences, columns: the part of the alignment that is used, from the first.
        lengths: of the sweep.
        repeats, seconds: how often the time of a call is measured, and after how long no more.
        patience: seconds for the whole sweep, or None for as long as it takes.
    """

    sequences: int
    columns: int
    lengths: tuple[int, ...]
    repeats: int
    seconds: float
    patience: float | None


@dataclasses.dataclass(frozen=True)
class Growth:
    """Costs by implementation and length.

    Args:
        lengths: all that were asked for.
        costs: what was measured.
        stopped: for an implementation that did not go through all lengths, from which length and why.
    """

    lengths: tuple[int, ...]
    costs: dict[str, dict[int, Cost]]
    stopped: dict[str, str]


def tiled(query: str, length: int) -> str:
    """The query cut to a length, or repeated up to it."""
    return (query * -(-length // len(query)))[:length]


def run(query: str, size: Size, seed: int, device: torch.device, dtype: torch.dtype, step: Step) -> Growth:
    """Measure every implementation at every length; one that cannot go on is dropped from there."""
    growth = Growth(size.lengths, {name: {} for name in IMPLEMENTATIONS}, {})
    end = math.inf if size.patience is None else time.perf_counter() + size.patience
    for length in size.lengths:
        for name, attention in IMPLEMENTATIONS.items():
            if name in growth.stopped:
                continue
            step(f"triangle, L = {length}, {name}")
            seconds = _expected_seconds(length, growth.costs[name])
            why = _too_long(name, seconds, end - time.perf_counter()) or _too_much_memory(name, length, device, dtype)
            if why is None:
                try:
                    inputs = triangle_start(embed((tiled(query, length),), seed, device), dtype)
                    growth.costs[name][length] = measure.cost(attention, inputs, repeats=size.repeats, seconds=size.seconds)
                except torch.OutOfMemoryError:
                    why = "it ran out of GPU memory"
                    torch.cuda.empty_cache()
            if why is not None:
                growth.stopped[name] = f"at L = {length}: {why}"
    return growth


def _expected_seconds(length: int, costs: dict[int, Cost]) -> float:
    """Of one forward + backward: as many more as there are scores than in the longest measured; 0 before the first."""
    longest = max(costs, default=length)
    return costs[longest].seconds * (length / longest) ** 3 if costs else 0.0


def _too_long(name: str, seconds: float, left: float) -> str | None:
    if seconds > _PATIENCE[name]:
        return f"it would take about {seconds:.0f} s a pass"
    if _LEAST_PASSES * seconds > left:
        return "the time of the demo is over; --max-length gives it more"
    return None


def _too_much_memory(name: str, length: int, device: torch.device, dtype: torch.dtype) -> str | None:
    needed = _INPUT_BYTES_A_PAIR * length**2
    if name == "dense":
        needed += measure.DENSE_SCORE_COPIES * TRIANGLE_HEADS * length**3 * dtype.itemsize
    reason = too_much(needed, device)
    return f"it would take {reason}" if reason else None
