"""What the producer warps of the forward kernel bring in: queries, keys, values and biases, by the copy engine."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, const_expr, cute, range_constexpr
from cutlass.cute import arch
from cutlass.cute.nvgpu import cpasync

from evoattn.backends.hopper.forward.mma import HALVES, ForwardMma
from evoattn.backends.hopper.kernels.key_bias import TERMS
from evoattn.backends.hopper.kernels.schedule import Schedule, place, stretch
from evoattn.backends.hopper.kernels.tile_sizes import KEYS, ROWS, SLICE

__all__ = ["STREAMS", "ForwardProducer"]

STREAMS = 2  # rows n at a time


class ForwardProducer(ForwardMma):
    """One warp for each stream of rows; `Forward` says what the attributes are."""

    of_stage: int
    odd: bool
    schedule: Schedule

    @cute.jit
    def produce(
        self,
        s: Int32,
        first: Int32,
        last: Int32,
        sizes,
        interleave: Int32,
        H: Int32,
        NB: Int32,
        pair: Any,
        row: Any,
        ends: Any,
        row_b: Int32,
        row_n: Int32,
        turn: cute.Tensor,
        pR: cute.Pointer,
        bars,
        copies,
    ):
        """Bring in what stream s needs of the units from `first` to `last`: row after row, a block of keys after the other."""
        _, _, panels, N, _ = sizes
        D, ST = self.D, self.stages
        full, empty, pfull, pempty, qfull, qempty = bars
        (aQ, qG, qS), (aK, kG, kS), (aV, vG, vS), (aP, pG, pS) = copies
        bulk = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), self.dtype)
        st, ph, qph, rounds = Int32(0), Int32(0), Int32(0), Int32(0)
        unit = first
        while unit < last:
            pan, p0, p1 = stretch(unit, last, N)
            phase = self.schedule.phase(pan, *sizes)
            ib, h, b = place(pan, panels, H)
            pb, phd = b, h
            if const_expr(self.streamed):
                pb, phd = cutlass.min(b, pair.shape[0] - 1), cutlass.min(h, pair.shape[1] - 1)
            p = p0 + s
            limit = p1
            if const_expr(self.streamed):
                limit = p1 + s  # both streams make the same number of rounds: the bias is loaded for both
            while p < limit:
                nn = self.schedule.row(cutlass.min(p, p1 - 1), phase, interleave, N)
                slices = 2 * NB
                if const_expr(self.row):
                    end = ends[b * row_b + nn * row_n]
                    if const_expr(self.streamed):  # the bias is streamed for the longer of both rows
                        other = self.schedule.row(cutlass.min(p + 1 - 2 * s, p1 - 1), phase, interleave, N)
                        end = cutlass.max(end, ends[b * row_b + other * row_n])
                    slices = cutlass.max((end + SLICE - 1) // SLICE, 1)
                    if const_expr(not self.odd):
                        slices = (slices + 1) // 2 * 2
                slot, _ = self.slot(s, rounds, qph)
                arch.mbarrier_wait(qempty + slot, self.free(rounds, qph))
                with arch.elect_one():
                    turn[s, rounds, 0] = nn
                    turn[s, rounds, 1] = slices
                    arch.mbarrier_arrive_and_expect_tx(qfull + slot, HALVES * ROWS * D * 2)
                rounds = (rounds + 1) & 3
                for x in range_constexpr(HALVES):
                    qTile = qG[None, ib * HALVES + x, h, nn, b]
                    cute.copy(aQ, qTile, qS[None, slot * HALVES + x], tma_bar_ptr=qfull + slot)
                qph ^= 1
                for j in cutlass.range((slices + 1) // 2, unroll=1):
                    i = s * ST + st
                    if const_expr(self.streamed):
                        if s == 0:
                            arch.mbarrier_wait(pempty + st, ph ^ 1)
                            with arch.elect_one():
                                arch.mbarrier_arrive_and_expect_tx(pfull + st, HALVES * ROWS * KEYS * (4 if self.wide else 2))
                            for x in range_constexpr(HALVES):
                                if const_expr(self.wide):
                                    with arch.elect_one():
                                        from_tile = pair[pb, phd, ib * HALVES + x, j, None]
                                        to_tile = pS[None, st * HALVES + x]
                                        g2, s2 = (cute.group_modes(y, 0, 1) for y in (from_tile, to_tile))
                                        cute.copy(aP, g2, s2, mbar_ptr=pfull + st)
                                else:
                                    cute.copy(
                                        aP,
                                        pG[None, ib * HALVES + x, j, phd, pb],
                                        pS[None, st * HALVES + x],
                                        tma_bar_ptr=pfull + st,
                                    )
                    arch.mbarrier_wait(empty + i, ph ^ 1)
                    with arch.elect_one():
                        arch.mbarrier_arrive_and_expect_tx(full + i, 2 * KEYS * self.of_stage)
                    if const_expr(self.row):
                        gR = cute.local_tile(row, (1, KEYS * TERMS), (b * row_b + nn * row_n, j))
                        sR = cute.make_tensor(pR + i * KEYS * TERMS, cute.make_layout((1, KEYS * TERMS)))
                        with arch.elect_one():
                            g1, s1 = cute.group_modes(gR, 0, 2), cute.group_modes(sR, 0, 2)
                            cute.copy(bulk, g1, s1, mbar_ptr=full + i)
                    cute.copy(aK, kG[None, j, h, nn, b], kS[None, i], tma_bar_ptr=full + i)
                    cute.copy(aV, vG[None, j, h, nn, b], vS[None, i], tma_bar_ptr=full + i)
                    st += 1
                    if st == ST:
                        st = Int32(0)
                        ph ^= 1
                p += STREAMS
            unit += p1 - p0
