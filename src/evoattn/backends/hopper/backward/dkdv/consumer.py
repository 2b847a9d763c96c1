"""A row in the kernel of the keys: a warpgroup goes through its tiles of queries, and on to the next row."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, const_expr, cute, range_constexpr
from cutlass.cute import arch
from cutlass.cute.nvgpu import warpgroup

from evoattn.backends.hopper.backward.dkdv.mma import KeyMma
from evoattn.backends.hopper.kernels.primitives import release

__all__ = ["KeyConsumer"]


class KeyConsumer(KeyMma):
    """What a consumer warpgroup does with a row; `KeyGradients` says what the attributes are."""

    stages: int
    ring: int
    streamed: bool
    run_on: int

    @cute.jit
    def queries_of_row(
        self,
        operands,
        arriving,
        bias: Any,
        sums: cute.Tensor,
        bars,
        scale: Float32,
        more: Boolean,
        s: Int32,
        turn: Int32,
        st: Int32,
        ph: Int32,
        bt: Int32,
        bp: Int32,
        NT: Int32,
        lane: Int32,
    ):
        """All tiles of a row's queries, of which the first scores are there; then those of the next row, if there is `more`.

        `bias` is this thread's part of a pair bias that stays, or the tiles of one that streams and the thread's place there.
        Returns st, ph, bt and bp as they are then: the stage and its phase, those of a pair bias that streams.
        """
        S, T, X, Y, (rK, rV, rR, rD), (fQ, fG, fQt, fGt, f1) = operands
        ldm, rows, own, t4, inverse = arriving
        full, empty, kfull, bfull, bempty = bars
        sums.fill(0.0)
        held = st
        for j in cutlass.range(NT, unroll=1):
            so, st = arch.make_warp_uniform(s * self.stages), arch.make_warp_uniform(st)
            old = st
            for u in range_constexpr(2):
                P, dS = self.gradient(S, T, scale, sums)
                nu = 2 * j + u + 1
                if const_expr(u == 1):
                    st += 1
                    if st == self.stages:
                        st = Int32(0)
                        ph ^= 1
                    last = j + 1 == NT
                    if last:
                        nu = Int32(0)
                        if more:
                            self.take_rows(
                                *(ldm, rows, ((2 * s, rK), (2 * s + 1, rV)), own, rR, t4, inverse),
                                *(kfull + s, (turn + 1) & 1),
                            )
                    if const_expr(self.streamed):
                        release(bempty + bt, lane)
                        bt += 1
                        if bt == self.ring:
                            bt = Int32(0)
                            bp ^= 1
                    if not last or more:
                        arch.mbarrier_wait(full + so + st, ph)
                        if const_expr(self.streamed):
                            arch.mbarrier_wait(bfull + bt, bp)
                if const_expr(u == 1 and self.run_on > 0):
                    warpgroup.wait_group(0)
                elif const_expr(u == 0 and self.run_on == 2):
                    if j > 0:
                        warpgroup.wait_group(0)
                        release(empty + so + held, lane)
                # after the last row both start from what is there, perhaps in the middle of a copy, and nobody
                # looks at the outcome: a branch around this would make each product wait for the one before
                if const_expr(self.streamed):
                    tiles, wt = bias
                    self.preload(S, tiles[None, wt, None, bt], 1 - u, inverse)
                else:
                    self.preload(S, bias, nu, inverse)
                warpgroup.fence()
                self.scores(S, T, rK, rV, rR, rD, fQ, fG, f1, 1 - u, so + st)
                warpgroup.commit_group()
                self.products(P, dS, X, Y, fQt, fGt, u, so + old, j > 0)
                warpgroup.commit_group()
                warpgroup.wait_group(1 if u < self.run_on else 0)
            if const_expr(self.run_on == 2):
                held = old
            else:
                release(empty + so + old, lane)
        if const_expr(self.run_on == 2):
            warpgroup.wait_group(0)
            release(empty + s * self.stages + held, lane)
        return st, ph, bt, bp
