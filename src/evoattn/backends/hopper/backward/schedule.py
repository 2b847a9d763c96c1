"""The schedule of the backward: persistent blocks share the time that all rows take evenly.

Units (panel, row n) lie in a line of time, panel after panel, each a row long; before each panel lies the time that a block
takes to change to it. Each block takes a stretch of the line. Blocks that work on different panels of a head read the same
rows of the other tensors, and find them in the L2 cache if they do so at the same time. So the rows of a panel are taken in the
order of time: a position that its block reaches sooner is a lower row, whichever block that is. All panels then go through the
rows together.
"""

from __future__ import annotations

from typing import Any

from cutlass import max as larger
from cutlass import min as smaller

__all__ = ["CHANGE", "change_of", "first_row", "opening", "reached", "row", "share"]

CHANGE = 3
"""Rows in whose time a block changes to another panel: a pair bias is brought in, and its gradient leaves."""


def share(time: Any, blocks: Any) -> Any:
    """Time of a block; the last blocks may have less, or none."""
    return (time + blocks - 1) // blocks


def change_of(n: Any, each: Any) -> Any:
    """The time of a change between panels of n rows, where blocks have `each` without: none if no block has to change then."""
    return CHANGE * _one(n % each)


def first_row(panel: Any, n: Any, change: Any) -> Any:
    """When the rows of a panel begin, where each has n."""
    return panel * (n + change) + change


def reached(time: Any, n: Any, change: Any) -> Any:
    """The number of units of a line that come before a time, if each panel has n rows."""
    panel = time // (n + change)
    return panel * n + larger(time - first_row(panel, n, change), 0)


def opening(start: Any, n: Any, each: Any, block: Any, unit: Any) -> tuple[Any, ...]:
    """The times that `row` needs: of a panel whose `n` rows begin at `start`, and of the block that comes to it at `unit`.

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
