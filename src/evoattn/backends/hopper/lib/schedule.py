"""The schedules: persistent blocks share all units (panel, row n) evenly, whatever their numbers are.

A panel is a tile of queries or keys of one (b, h). Units lie in a line, panel after panel. A block takes one stretch of it, so
that it changes panels as seldom as possible. Blocks that work on different panels read the same rows of the other tensors, and
find them in the L2 cache if they do so at the same time.

**Forward.** A panel has 128 queries. Its rows are interleaved: with S blocks to a panel, consecutive positions are rows 0, S,
2S, ..., then 1, S + 1, ..., and each block begins where the panel's first full stretch begins. Rows in order took 36% longer
at 8 heads.

**Backward.** The line counts time in rows. A change to a panel takes time too, which lies before the panel's first row. Each
block starts its stretch at time 0. The blocks of a panel take its rows in the order of their own times: rows 0 and 1 are those
that two blocks reach first. So blocks of all panels read about the same rows at a time. Two panels of 6 rows for 3 blocks:

    time        0     1     2     3
    block 0     A0    A2    A4    A5      A, B: panels, with the row n
    block 1     A1    A3    B2    B4
    block 2     B0    B1    B3    B5
"""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import cutlass
from cutlass import Float32, Int32, cute
from cutlass import max as larger
from cutlass import min as smaller
from cutlass.cute import arch

from evoattn.backends.hopper.tiles import FORWARD_QUERIES, MMA_M

CHANGE = 3
"""Rows in whose time a block of the backward changes to another panel: a pair bias is loaded, and its gradient is stored."""


def stretch(unit: Any, end: Any, n: Any) -> tuple[Any, Any, Any]:
    """The panel of `unit`, and the positions there that a block does before unit `end`: the first, and past the last."""
    panel = unit // n
    first = unit - panel * n
    return panel, first, cutlass.min(n, first + end - unit)


def place(panel: Any, panels: Any, heads: Any) -> tuple[Any, Any, Any]:
    """The number of a panel in its (b, h), its h and its b."""
    head = panel // panels
    return panel % panels, head % heads, head // heads


# ---- forward


class ForwardSizes(namedtuple("ForwardSizes", "blocks heads panels n lq")):
    """The sizes by which blocks share the units: blocks of the launch, all (b, h), panels of a head, rows n, and queries."""


class UnitRange(namedtuple("UnitRange", "first end")):
    """The units that a block does: from `first` on, before `end`."""


def units_of(block: Any, sizes: ForwardSizes) -> UnitRange:
    """The units of a block."""
    return UnitRange(panel_start(block, *sizes), panel_start(block + 1, *sizes))


@cute.jit
def panel_start(index: Int32, blocks: Int32, heads: Int32, panels: Int32, n: Int32, lq: Int32) -> Int32:
    """The first unit of block `index`."""
    weight, full_panels, head_weight = _weights(panels, n, lq)
    each = head_weight * heads // blocks
    position = each * index + (head_weight * heads - each * blocks) * index // blocks
    head = position // head_weight
    inside = position - head * head_weight
    panel = panels - 1
    row = (inside - full_panels + weight - 1) // weight
    if inside < full_panels:
        panel = inside // (8 * n)
        row = (inside - panel * 8 * n + 7) // 8
    return (head * panels + panel) * n + row


@cute.jit
def panel_phase(panel: Int32, blocks: Int32, heads: Int32, panels: Int32, n: Int32, lq: Int32) -> Int32:
    """Return the position in a panel at which the first block begins that starts inside the panel."""
    _, _, head_weight = _weights(panels, n, lq)
    begin = head_weight * (panel // panels) + 8 * n * (panel % panels)
    each = Float32(head_weight * heads) / Float32(blocks)
    index = Int32(Float32(begin) / each)
    unit = panel_start(index, blocks, heads, panels, n, lq)
    while unit < panel * n:
        index += 1
        unit = panel_start(index, blocks, heads, panels, n, lq)
    return Int32(cutlass.select_(unit - panel * n < n, unit - panel * n, Int32(0)))


@cute.jit
def _weights(panels: Int32, n: Int32, lq: Int32):
    """The time of a row of the last panel, of all other panels of a head, and of a head, in eighths of a full panel's row.

    A last panel with at most 64 queries costs 6/8 of a full one.
    """
    weight = Int32(cutlass.select_((lq - 1) % FORWARD_QUERIES < MMA_M, Int32(6), Int32(8)))
    full_panels = 8 * n * (panels - 1)
    return weight, full_panels, full_panels + weight * n


def interleaved_row(position: Any, phase: Any, interleave: Any, n: Any) -> Any:
    """The row n at a position of a panel, whose rows are interleaved among `interleave` blocks."""
    turned = position - phase
    turned = cutlass.select_(turned < 0, turned + n, turned)
    turned = Int32(turned)
    more = n - n // interleave * interleave
    length = n // interleave + 1
    split = more * length
    late = turned >= split
    length = Int32(cutlass.select_(late, length - 1, length))
    turned = Int32(cutlass.select_(late, turned - split, turned))
    offset = turned // length
    return (turned - offset * length) * interleave + offset + Int32(cutlass.select_(late, more, Int32(0)))


# ---- backward: these also take Python's numbers, in tests


class Span(namedtuple("Span", "begin end block each change")):
    """The stretch of the line that a block does.

    begin, end: the times, or the units, at which it begins and ends. block: the number of the block. each: the time that each
    block has. change: the time of a change to another panel.
    """


def share(time: Any, blocks: Any) -> Any:
    """Time of a block; the last blocks may have less, or none."""
    return (time + blocks - 1) // blocks


def change_of(n: Any, each: Any) -> Any:
    """The time of a change between panels of n rows, where blocks have `each` without: none if no block has to change then."""
    return CHANGE * _one(n % each)


def first_row(panel: Any, n: Any, change: Any) -> Any:
    """The time at which the rows of a panel begin, if each panel has n."""
    return panel * (n + change) + change


def count_units(time: Any, n: Any, change: Any) -> Any:
    """The number of units of a line that come before a time, if each panel has n rows."""
    panel = time // (n + change)
    return panel * n + larger(time - first_row(panel, n, change), 0)


class PanelTimes(namedtuple("PanelTimes", "phase turned straight between last place start")):
    """The times that `nth_row` needs: of a panel, and of one of the blocks that work on it.

    Up to three kinds of blocks work on a panel: the first came from the panel before, the blocks between do nothing else, and
    the last goes on to the next panel. Times count rows of a block, modulo the rows of the panel.

    phase: of the first block, when it comes to the panel. turned, straight: how many rows the first block does after its time
    has passed n, and before. between: the number of blocks between. last: the rows of the last block. place: of this block
    among all of the panel. start: the time of this block, when it comes to the panel.
    """


def panel_times(start: Any, n: Any, each: Any, block: Any, unit: Any) -> PanelTimes:
    """The times of a panel whose `n` rows begin at `start`, and of the block that comes to it at `unit`; blocks have `each`."""
    elapsed = start % each
    first_rows = smaller(n, each - elapsed)
    phase = elapsed % n
    turned = larger(phase + first_rows - n, 0)
    full = (elapsed + n) // each
    last = (elapsed + n) % each * _one(full)
    first = start // each
    return PanelTimes(phase, turned, first_rows - turned, larger(full - 1, 0), last, block - first, (unit - block * each) % n)


def nth_row(position: Any, n: Any, times: PanelTimes) -> Any:
    """The row at a position of a block's stretch: the number of rows of the panel that any block reaches sooner."""
    phase, turned, straight, between, last, place, start = times
    time = start + position
    time = time - n * _one(time - n + 1)
    late = time - phase
    sooner = smaller(time, turned) + smaller(larger(late, 0), straight) + between * time + smaller(time, last)
    by_first = larger(_one(turned - time), _one(late + 1) * _one(straight - late))
    return sooner + _one(place) * (place - 1 + by_first)


def uniform_row(position: Any, n: Any, times: PanelTimes) -> Any:
    """`nth_row`, once: without the shuffle the compiler works it out anew for each copy that a warp starts."""
    return arch.make_warp_uniform(nth_row(position, n, times))


def _one(x: Any) -> Any:
    """1 where x is positive, else 0."""
    return smaller(larger(x, 0), 1)
