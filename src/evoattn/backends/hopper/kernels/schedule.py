"""The schedule of the forward: persistent blocks share the units (panel, row) evenly, whatever their numbers are.

A unit is one panel of queries of one (b, h) with one row n; panels are numbered p = (b * heads + h) * panels + panel. Units lie
in a line, panel after panel, and a block takes one stretch of it, so that it changes panels as seldom as can be.

Blocks that work on different panels read the keys and values of the same rows, and find them in the L2 cache if they are there
at the same time. So the rows of a panel are interleaved: with S blocks to a panel, consecutive positions are rows 0, S, 2S,
..., then 1, S + 1, ..., and each block begins where the panel's first whole block begins. Rows in order took 36% longer at 8
heads.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, cute

__all__ = ["Schedule", "place", "stretch"]


def stretch(unit: Any, end: Any, n: Any) -> tuple[Any, Any, Any]:
    """The panel that a block comes to with `unit`, and the positions there that it takes before `end`: first, past the last."""
    panel = unit // n
    first = unit - panel * n
    return panel, first, cutlass.min(n, first + end - unit)


def place(panel: Any, panels: Any, heads: Any) -> tuple[Any, Any, Any]:
    """The number of a panel in its (b, h), its h and its b."""
    of_head = panel // panels
    return panel % panels, of_head % heads, of_head // heads


class Schedule:
    """Sizes of one launch, and where each block's stretch begins.

    Args:
        queries: queries of a panel.
        half: a last panel with at most this many queries costs 6/8 of a whole one.
    """

    def __init__(self, queries: int, half: int):
        self.queries, self.half = queries, half

    @cute.jit
    def start(self, index: Int32, blocks: Int32, heads: Int32, panels: Int32, n: Int32, lq: Int32) -> Int32:
        """The first unit of block `index`; `heads` counts (b, h)."""
        weight, whole, of_head = self.weights(panels, n, lq)
        each = of_head * heads // blocks
        position = each * index + (of_head * heads - each * blocks) * index // blocks
        head = position // of_head
        inside = position - head * of_head
        panel = panels - 1
        row = (inside - whole + weight - 1) // weight
        if inside < whole:
            panel = inside // (8 * n)
            row = (inside - panel * 8 * n + 7) // 8
        return (head * panels + panel) * n + row

    @cute.jit
    def phase(self, panel: Int32, blocks: Int32, heads: Int32, panels: Int32, n: Int32, lq: Int32) -> Int32:
        """The position in a panel at which the first stretch begins that does not come from the panel before."""
        _, _, of_head = self.weights(panels, n, lq)
        begin = of_head * (panel // panels) + 8 * n * (panel % panels)
        each = Float32(of_head * heads) / Float32(blocks)
        index = Int32(Float32(begin) / each)
        at = self.start(index, blocks, heads, panels, n, lq)
        while at < panel * n:
            index += 1
            at = self.start(index, blocks, heads, panels, n, lq)
        return Int32(cutlass.select_(at - panel * n < n, at - panel * n, Int32(0)))

    @cute.jit
    def weights(self, panels: Int32, n: Int32, lq: Int32):
        """Of a row of the last panel, of all whole panels of a head, and of a head; a row of a whole panel weighs 8."""
        weight = Int32(cutlass.select_((lq - 1) % self.queries < self.half, Int32(6), Int32(8)))
        whole = 8 * n * (panels - 1)
        return weight, whole, whole + weight * n

    def row(self, position: Any, phase: Any, interleave: Any, n: Any) -> Any:
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
