"""A row in the kernel of the queries: a warpgroup goes through its tiles of keys, and on to the next row."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, const_expr, cute, range_constexpr
from cutlass.cute import arch
from cutlass.cute.nvgpu import warpgroup

from evoattn.backends.hopper.backward.dq.mma import QueryMma
from evoattn.backends.hopper.kernels.ring import Slot

__all__ = ["QueryConsumer"]


class QueryConsumer(QueryMma):
    """A consumer warpgroup's way through a row; `QueryGradients` explains the attributes."""

    stages: int

    @cute.jit
    def tiles_of_row(
        self, j: cutlass.Constexpr, tiles: Int32, more: Boolean, operands, row, db: cute.Tensor, mine: Any, rings, c: Float32,
        slot, qp: Int32, LQ: Int32, wid: Int32, lane: Int32,
    ):  # fmt: skip
        """Do a row's tiles of keys from j on, up to the last of `tiles`; then the next row's first scores are on their way.

        Returns the slot of keys and the phase of queries to come.
        """
        SL, last = self.stage, (j + 1) * self.stage - 1
        for u in range_constexpr(j * SL, last):
            dS = self.gradient(operands, row, c, db, u)
            buffer = arch.make_warp_uniform(qp ^ 1)
            self.preload(operands.acc_S, self.late(mine, dS, LQ), u + 1)
            self.issue(operands, dS, u, (u + 1) % SL, buffer, rings.keys, slot.stage, slot.stage)
            warpgroup.wait_group(0)
        dS = self.gradient(operands, row, c, db, last)
        old, slot = slot.stage, rings.keys.advance(slot)
        if const_expr(j + 1 == self.tiles):
            if more:
                qp = self.next_queries(row, rings, qp, wid, lane)
                rings.keys.consumer_wait(slot)
            buffer = arch.make_warp_uniform(qp ^ 1)
            self.preload(operands.acc_S, self.late(mine, dS, LQ), 0)
            self.issue(operands, dS, last, 0, buffer, rings.keys, old, slot.stage, two_groups=True)
            warpgroup.wait_group(1)
            rings.keys.consumer_release(old, lane)
        elif const_expr(j + 1 not in self.exits):
            rings.keys.consumer_wait(slot)
            buffer = arch.make_warp_uniform(qp ^ 1)
            self.preload(operands.acc_S, self.late(mine, dS, LQ), last + 1)
            self.issue(operands, dS, last, 0, buffer, rings.keys, old, slot.stage)
            warpgroup.wait_group(0)
            rings.keys.consumer_release(old, lane)
            slot, qp = self.tiles_of_row(j + 1, tiles, more, operands, row, db, mine, rings, c, slot, qp, LQ, wid, lane)
        else:  # the row may end here: what follows is its next tile, or the first of the next row
            over = tiles == j + 1
            if over and more:
                qp = self.next_queries(row, rings, qp, wid, lane)
            if more or not over:
                rings.keys.consumer_wait(slot)
            buffer = arch.make_warp_uniform(qp ^ 1)
            self.preload(operands.acc_S, self.late(mine, dS, LQ), last + 1, not over)
            self.issue(operands, dS, last, 0, buffer, rings.keys, old, slot.stage, two_groups=True)
            warpgroup.wait_group(1)
            rings.keys.consumer_release(old, lane)
            if not over:
                warpgroup.wait_group(0)
                slot, qp = self.tiles_of_row(j + 1, tiles, more, operands, row, db, mine, rings, c, slot, qp, LQ, wid, lane)
        return slot, qp

    def issue(self, operands, dS, u, part, buffer, ring, old, stage, *, two_groups=False):
        """Issue dQ += dS K of slice u, in stage `old`, and the scores of slice `part` of a stage.

        two_groups: commit the two as wgmma groups of their own, so that dQ can be waited for alone.
        """
        warpgroup.fence()
        self.products(operands, dS, u, ring.index(old))
        if two_groups:
            warpgroup.commit_group()
        self.scores(operands, buffer, part, ring, stage)
        warpgroup.commit_group()

    @cute.jit
    def next_queries(self, row, rings, qp: Int32, wid: Int32, lane: Int32):
        """Load the queries of the next row, once they are there; returns the phase of those to come."""
        rings.queries.consumer_wait(Slot(0, qp))
        self.load_queries(row, qp, wid, lane)
        arch.sync_warp()
        return qp ^ 1

    @cute.jit
    def release_queries(self, rings, more: Boolean, lane: Int32):
        """Release the queries of the next row, if there is one, once its scores are there: only then has q been read."""
        warpgroup.wait_group(0)
        if more:
            rings.queries.consumer_release(0, lane)
