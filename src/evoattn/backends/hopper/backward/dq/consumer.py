"""A row in the kernel of the queries: a warpgroup goes through its tiles of keys, and on to the next row."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, const_expr, cute, range_constexpr
from cutlass.cute import arch
from cutlass.cute.nvgpu import warpgroup

from evoattn.backends.hopper.backward.dq.mma import QueryMma
from evoattn.backends.hopper.kernels.primitives import release

__all__ = ["QueryConsumer"]


class QueryConsumer(QueryMma):
    """What a consumer warpgroup does with a row; `QueryGradients` says what the attributes are."""

    stages: int

    @cute.jit
    def tiles_of_row(
        self,
        j: cutlass.Constexpr,
        tiles: Int32,
        more: Boolean,
        operands,
        arriving,
        db: cute.Tensor,
        mine: Any,
        bars,
        c: Float32,
        so: Int32,
        st: Int32,
        ph: Int32,
        qp: Int32,
        LQ: Int32,
        wid: Int32,
        lane: Int32,
    ):
        """A row's tiles of keys from j on, up to the last of `tiles`; then the next row's first scores are on their way."""
        S, T, *_ = operands
        full, empty, qfull = bars
        nl, nd = arriving[-3:-1]
        SL, last = self.stage, (j + 1) * self.stage - 1
        for u in range_constexpr(j * SL, last):
            dS = self.gradient(S, T, nl, nd, c, db, u)
            go = arch.make_warp_uniform(qp ^ 1)
            self.preload(S, self.late(mine, dS, LQ), u + 1)
            self.ask(operands, dS, u, (u + 1) % SL, go, so, st, st)
            warpgroup.wait_group(0)
        dS = self.gradient(S, T, nl, nd, c, db, last)
        old = st
        st += 1
        if st == self.stages:
            st = Int32(0)
            ph ^= 1
        if const_expr(j + 1 == self.tiles):
            if more:
                qp = self.next_rows(arriving, qfull, qp, wid, lane)
                arch.mbarrier_wait(full + so + st, ph)
            go = arch.make_warp_uniform(qp ^ 1)
            self.preload(S, self.late(mine, dS, LQ), 0)
            self.ask(operands, dS, last, 0, go, so, old, st, two_groups=True)
            warpgroup.wait_group(1)
            release(empty + so + old, lane)
        elif const_expr(j + 1 not in self.exits):
            arch.mbarrier_wait(full + so + st, ph)
            go = arch.make_warp_uniform(qp ^ 1)
            self.preload(S, self.late(mine, dS, LQ), last + 1)
            self.ask(operands, dS, last, 0, go, so, old, st)
            warpgroup.wait_group(0)
            release(empty + so + old, lane)
            st, ph, qp = self.tiles_of_row(
                j + 1, tiles, more, operands, arriving, db, mine, bars, c, so, st, ph, qp, LQ, wid, lane
            )
        else:  # the row may end here: what follows is its next tile, or the first of the next row
            over = tiles == j + 1
            if over and more:
                qp = self.next_rows(arriving, qfull, qp, wid, lane)
            if more or not over:
                arch.mbarrier_wait(full + so + st, ph)
            go = arch.make_warp_uniform(qp ^ 1)
            self.preload(S, self.late(mine, dS, LQ), last + 1, not over)
            self.ask(operands, dS, last, 0, go, so, old, st, two_groups=True)
            warpgroup.wait_group(1)
            release(empty + so + old, lane)
            if not over:
                warpgroup.wait_group(0)
                st, ph, qp = self.tiles_of_row(
                    j + 1, tiles, more, operands, arriving, db, mine, bars, c, so, st, ph, qp, LQ, wid, lane
                )
        return st, ph, qp

    def ask(self, operands, dS, u, part, go, so, old, st, two_groups=False):
        """Issue dq += dS K of slice u, in stage `old`, and the scores of slice `part` of stage `st`.

        two_groups: commit the two as wgmma groups of their own, so that dq can be waited for alone.
        """
        S, T, R, rQ, fG, ones, fK, fV, fKt, fR = operands
        warpgroup.fence()
        self.products(dS, R, fKt, u, so + old)
        if two_groups:
            warpgroup.commit_group()
        self.scores(S, T, rQ, fG[None, None, None, 2 + go], ones, fK, fV, fR, part, so + st)
        warpgroup.commit_group()

    @cute.jit
    def next_rows(self, arriving, qfull: cute.Pointer, qp: Int32, wid: Int32, lane: Int32):
        """Take the queries of the next row, once they are there."""
        ldm, rows, rQ, rG, rO, nl, nd, sN = arriving
        arch.mbarrier_wait(qfull, qp)
        self.take_rows(ldm, rows, qp, rQ, rG, rO, nl, nd, sN, wid, lane)
        arch.sync_warp()
        return qp ^ 1

    @cute.jit
    def give_back_queries(self, qempty: cute.Pointer, more: Boolean, lane: Int32):
        """Once the scores of the next row are there, if there is one: only then has its q left shared memory."""
        warpgroup.wait_group(0)
        if more:
            release(qempty, lane)
