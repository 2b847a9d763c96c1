"""Which block of the backward does which rows, and when: the persistent blocks share the units (panel, row n) evenly.

Units lie in a line, panel after panel, and each block takes a stretch of it. Blocks that work on different panels of a head
read the same rows of the other tensors, and find them in the L2 cache if they do so at the same time. So the rows of a panel
are taken in the order of time: a position that its block reaches sooner is a lower row, whichever block that is. All panels
then go through the rows together.
"""

from __future__ import annotations

from typing import Any

from cutlass import max as larger
from cutlass import min as smaller

__all__ = ["opening", "row", "share"]


def share(units: Any, blocks: Any) -> Any:
    """Units of a block; the last blocks may have fewer, or none."""
    return (units + blocks - 1) // blocks


def opening(start: Any, n: Any, each: Any, block: Any, unit: Any) -> tuple[Any, ...]:
    """What `row` wants to know of a panel whose `n` rows begin at unit `start`, and of the block that comes to it with `unit`.

    Up to three kinds of blocks work on a panel: one that came from the panel before, blocks that do nothing else, and one that
    goes on to the next. Of the first it tells the phase, time modulo n, and how many of its rows lie past the turn of the phase
    and before it; then how many blocks do nothing else, the rows of the last, the place of this block among all, and its phase.
    """
    past = start % each
    mine = smaller(n, each - past)
    phase = past % n
    turned = larger(phase + mine - n, 0)
    whole = (past + n) // each
    last = (past + n) % each * _one(whole)
    first = start // each
    return phase, turned, mine - turned, larger(whole - 1, 0), last, block - first, (unit - block * each) % n


def row(position: Any, n: Any, panel: tuple[Any, ...]) -> Any:
    """The row at a position of a block's stretch: how many rows of the panel come sooner, here or elsewhere."""
    phase, turned, straight, between, last, place, start = panel
    time = start + position
    time = time - n * _one(time - n + 1)
    late = time - phase
    sooner = smaller(time, turned) + smaller(larger(late, 0), straight) + between * time + smaller(time, last)
    by_first = larger(_one(turned - time), _one(late + 1) * _one(straight - late))
    return sooner + _one(place) * (place - 1 + by_first)


def _one(x: Any) -> Any:
    """1 where x is positive, else 0."""
    return smaller(larger(x, 0), 1)
