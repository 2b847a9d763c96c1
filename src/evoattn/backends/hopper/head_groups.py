"""Groups of heads, launched one after another if the pair bias streams, so that it stays in the L2 cache.

The blocks of a launch read the pair bias of all their heads for every few rows n. They share it through the L2 cache if it
fits: at 2,048 queries and keys the pair bias of four heads is 67 MB in float32. So a call's main kernels are launched for a few
heads at a time, on parts of the same tensors. If the pair bias stays in shared memory, this gains nothing, and each change of
heads costs time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

_LEAST_ROWS_OF_A_PROCESSOR = 128
"""Rows of a panel that a processor has in a group at least: a launch ends with some idle, as much as a few rows take."""


class HeadGroups(NamedTuple):
    """The (b, h) that are launched together: how many b and h a group has, and the first of each group."""

    b: int
    h: int
    starts: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, q: Tensor, streamed: Tensor | None, units: int, processors: int) -> HeadGroups:
        """For q [b,n,h,q,d] and a pair bias [b|1,h|1,q|1,k|1] that streams.

        units: panels of a (b, h), times rows, which the processors share.
        """
        b, _, h, _, _ = q.shape
        if streamed is None or streamed.shape[1] != h:
            return cls(b, h, ((0, 0),))
        least = -(-_LEAST_ROWS_OF_A_PROCESSOR * processors // units)
        group_h, group_b = divisor(h, least), b
        if streamed.shape[0] == b:
            group_b = divisor(b, -(-least // h)) if group_h == h else 1
        return cls(group_b, group_h, tuple((x, y) for x in range(0, b, group_b) for y in range(0, h, group_h)))

    def cut(self, x: Tensor | None, heads: int | None) -> Tensor | None:
        """The part of the first group of a tensor [b|1,...], whose axis `heads` is of the heads, or of size 1, or None."""
        if x is None:
            return None
        return x[: self.b] if heads is None else x[: self.b].narrow(heads, 0, min(self.h, x.shape[heads]))

    def offsets(self, tensors: Iterable[Tensor | None], axes: Iterable[int | None]) -> tuple[tuple[int, ...], ...]:
        """For each group, the bytes from the start of a tensor [b|1,...] to its part; `axes`: those of the heads."""

        def step(x: Tensor | None, axis: int | None) -> int:
            return 0 if x is None or axis is None or x.shape[axis] == 1 else x.stride(axis) * x.element_size()

        steps = [(step(x, 0), step(x, heads)) for x, heads in zip(tensors, axes, strict=True)]
        return tuple(tuple(b * by_b + h * by_h for by_b, by_h in steps) for b, h in self.starts)


def divisor(count: int, least: int) -> int:
    """The smallest divisor of `count` that is no smaller than `least`, or `count` itself."""
    return next((x for x in range(max(least, 1), count) if count % x == 0), count)


def for_each_group(launch: Callable[..., Any], addresses: Sequence[int | None], offsets: tuple[tuple[int, ...], ...]) -> None:
    """`launch` for each group with the addresses of its parts; an absent one stays None."""
    if len(offsets) == 1:
        launch(*addresses)
        return
    for group in offsets:
        launch(*(None if address is None else address + offset for address, offset in zip(addresses, group, strict=True)))
