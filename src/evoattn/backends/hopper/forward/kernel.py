"""The forward kernel: o and lse of every query.

A persistent block owns a panel, 128 queries of one (b, h), and loops over the rows n: two streams of rows, each with two
warpgroups of 64 queries, fed by one producer warp a stream. What all rows of a panel share, its pair bias, stays in shared
memory where it fits, and is streamed once for two rows where it does not; only keys and values always stream. A row's queries
go on into registers; 64 channels leave no room there, and the tensor cores read them from shared memory at every step.

Scores reach the registers complete: Q K^T, the pair bias (through an identity matrix) and the key-wise bias (as extra
channels) all come from the tensor cores. With 8 channels half of a product's 16 are free; they take what the scale leaves over
where its inverse, which a pair bias meets, is rounded. The softmax measures from the largest score of the first 32 keys instead
of a running maximum. A row for which that overflows is found by its sum and done again, exactly, by `exact`.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, const_expr, cute, range_constexpr
from cutlass.cute import arch
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup
from cutlass.memory import SmemAllocator

from evoattn.backends.hopper.forward.exact import WARP_QUERIES
from evoattn.backends.hopper.forward.mma import CHAIN, HALVES
from evoattn.backends.hopper.forward.producer import STREAMS
from evoattn.backends.hopper.forward.variant import CONSUMERS, ForwardVariant
from evoattn.backends.hopper.kernels.key_bias import TERMS
from evoattn.backends.hopper.kernels.panel import load_panel
from evoattn.backends.hopper.kernels.primitives import (
    DEAD,
    LOG2E,
    VETO,
    coefficients,
    fma,
    keep,
    multiply,
)
from evoattn.backends.hopper.kernels.schedule import place, stretch
from evoattn.backends.hopper.kernels.tile_sizes import KEYS, ROWS, SLICE

__all__ = ["CHAIN", "HALVES", "KEYS", "ROWS", "Forward"]

K, MN = OperandMajorMode.K, OperandMajorMode.MN
THREADS = (CONSUMERS + 1) * 128


class Forward(ForwardVariant):
    """The kernel of a variant."""

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        row: Any,
        ends: Any,
        deep: Any,
        given: Any,
        pair: Any,
        o: cute.Tensor,
        lse: cute.Tensor,
        reference: cute.Tensor,
        shifts: Any,
        row_b: Int32,
        row_n: Int32,
        scale: Float32,
        interleave: Int32,
        blocks: Int32,
        stream: cuda.CUstream,
    ):
        """q, k, v, o [b,n,h,l,d]; row [r, keys * TERMS], ends [r] and deep [r, keys] as `Rows` leaves them; given [b|1,h|1,q,k]
        the pair bias as it is; pair [b|1,h|1,q,k] and shifts [b|1,h|1,q] as `Pairs` leaves them, a wide one in the tiles of
        `Tiles`, of q an even number; lse and reference [b,n,h,q]."""
        lq, lk, lv, lp, _, lo = self.layouts()
        D = self.D
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        view = lambda t, order: cute.make_tensor(t.iterator, cute.select(t.layout, mode=order))
        one = lambda layout: cute.slice_(layout, (None, None, 0))
        order = [3, 4, 2, 1, 0]
        aQ, tQ = cpasync.make_tiled_tma_atom(load, view(q, order), one(lq), (ROWS, D))
        aK, tK = cpasync.make_tiled_tma_atom(load, view(k, order), one(lk), (KEYS, self.of_keys))
        aV, tV = cpasync.make_tiled_tma_atom(load, view(v, [4, 3, 2, 1, 0]), one(lv), (D, KEYS))
        aO, tO = cpasync.make_tiled_tma_atom(store, view(o, order), one(lo), (16, D))
        aP, tP = aQ, tQ
        if const_expr(self.streamed and not self.wide):
            aP, tP = cpasync.make_tiled_tma_atom(load, view(pair, [2, 3, 1, 0]), one(lp), (ROWS, KEYS))
        self.kernel(
            aQ,
            tQ,
            aK,
            tK,
            aV,
            tV,
            aP,
            tP,
            aO,
            tO,
            row,
            ends,
            deep,
            given,
            pair,
            q,
            k,
            v,
            o,
            lse,
            reference,
            shifts,
            row_b,
            row_n,
            scale,
            interleave,
        ).launch(grid=(blocks, 1, 1), block=(THREADS, 1, 1), stream=stream, min_blocks_per_mp=1, use_pdl=self.prepared)

    @cute.kernel
    def kernel(
        self,
        aQ: cute.CopyAtom,
        tQ: cute.Tensor,
        aK: cute.CopyAtom,
        tK: cute.Tensor,
        aV: cute.CopyAtom,
        tV: cute.Tensor,
        aP: cute.CopyAtom,
        tP: cute.Tensor,
        aO: cute.CopyAtom,
        tO: cute.Tensor,
        row: Any,
        ends: Any,
        deep: Any,
        given: Any,
        pair: Any,
        gQ: cute.Tensor,
        gK: cute.Tensor,
        gV: cute.Tensor,
        gO: cute.Tensor,
        lse: cute.Tensor,
        reference: cute.Tensor,
        shifts: Any,
        row_b: Int32,
        row_n: Int32,
        scale: Float32,
        interleave: Int32,
    ):
        D, ST, SLOTS = self.D, self.stages, self.slots
        B, N, H, LQ, _ = gQ.shape
        LK = gK.shape[3]
        NB = (LK + KEYS - 1) // KEYS
        tid, _, _ = arch.thread_idx()
        bid, _, _ = arch.block_idx()
        blocks, _, _ = arch.grid_dim()
        wid = arch.make_warp_uniform(arch.warp_idx())
        lane = arch.lane_idx()
        # ---- shared memory
        smem = SmemAllocator()
        lq, lk, lv, lp, li, lo = self.layouts()
        new = lambda l: smem.allocate_tensor(self.dtype, l.outer, 1024, l.inner)
        if const_expr(self.wide):
            ring = smem.allocate_array(Float32, self.tiles_of_pair * ROWS * KEYS, byte_alignment=1024)
            sP = cute.make_tensor(ring, cute.make_layout((4, 128, 8, self.tiles_of_pair), stride=(1, 4, 512, ROWS * KEYS)))
        else:
            sP = new(lp)
        sK, sV, sQ = new(lk), new(lv), new(lq)
        sO = new(lo) if const_expr(SLOTS == 1) else cute.make_tensor(sQ.iterator, lo.outer)
        sI = new(li)
        pR = smem.allocate_array(self.dtype, STREAMS * ST * KEYS * TERMS, byte_alignment=128)
        full = smem.allocate_array(Int64, STREAMS * ST)
        empty = smem.allocate_array(Int64, STREAMS * ST)
        pfull = smem.allocate_array(Int64, ST)
        pempty = smem.allocate_array(Int64, ST)
        qfull = smem.allocate_array(Int64, STREAMS * SLOTS)
        qempty = smem.allocate_array(Int64, STREAMS * SLOTS)
        book = cute.make_tensor(
            smem.allocate_array(Int32, CONSUMERS * 4 * 8), cute.make_layout((CONSUMERS * 4, 8), stride=(8, 1))
        )
        # What the pair bias of a warp's queries is measured from.
        origins = cute.make_tensor(
            smem.allocate_array(Float32, CONSUMERS * 4 * WARP_QUERIES), cute.make_layout((WARP_QUERIES, CONSUMERS * 4))
        )
        # What a stream's producer tells its consumers of each round: the row n, and how many slices of keys it has.
        turn = cute.make_tensor(
            smem.allocate_array(Int32, STREAMS * 4 * 2), cute.make_layout((STREAMS, 4, 2), stride=(8, 2, 1))
        )
        if tid == 0:
            for i in range_constexpr(STREAMS * ST):
                arch.mbarrier_init(full + i, 1)
                arch.mbarrier_init(empty + i, HALVES * 4)
            for i in range_constexpr(ST):
                arch.mbarrier_init(pfull + i, 1)
                arch.mbarrier_init(pempty + i, CONSUMERS * 4)
            for i in range_constexpr(STREAMS * SLOTS):
                arch.mbarrier_init(qfull + i, 1)
                arch.mbarrier_init(qempty + i, HALVES * 4)
        arch.mbarrier_init_fence()
        zero = self.dtype(0.0)
        if const_expr(self.pair and not self.wide):
            for i in cutlass.range(tid, SLICE * SLICE, THREADS):
                rest = Float32(1.0) / scale
                for y in range_constexpr(self.terms):
                    alpha = rest.to(self.dtype)
                    rest = rest - alpha.to(Float32)
                    sI[i // SLICE, i % SLICE, y] = cutlass.select_(i // SLICE == i % SLICE, alpha, zero)
            arch.fence_proxy("async.shared", space="cta")
        arch.sync_threads()
        # ---- this block's share: units (panel, n) from first to last
        panels = (LQ + HALVES * ROWS - 1) // (HALVES * ROWS)
        sizes = (blocks, B * H, panels, N, LQ)
        first, last = self.schedule.start(bid, *sizes), self.schedule.start(bid + 1, *sizes)

        def part(atom, t, tile, crd, shared):
            g = cute.local_tile(t, tile, crd)
            return cpasync.tma_partition(
                atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 2), cute.group_modes(g, 0, 2)
            )

        qS, qG = part(aQ, tQ, (ROWS, D), (None, 0, None, None, None), sQ)
        kS, kG = part(aK, tK, (KEYS, self.of_keys), (None, 0, None, None, None), sK)
        vS, vG = part(aV, tV, (D, KEYS), (0, None, None, None, None), sV)
        oS, oG = part(aO, tO, (16, D), (None, 0, None, None, None), sO)
        pS, pG = qS, qG
        if const_expr(self.wide):
            aP = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32)
            pS = cute.make_tensor(sP.iterator, cute.make_layout((ROWS * KEYS, self.tiles_of_pair)))
        elif const_expr(self.streamed):
            pS, pG = part(aP, tP, (ROWS, KEYS), (None, None, None, None), sP)
        if wid >= CONSUMERS * 4:
            # ================= producers: one warp a stream
            arch.setmaxregister_decrease(32)
            s = wid - CONSUMERS * 4
            if const_expr(self.prepared):
                arch.griddepcontrol_wait()
            if s < STREAMS:
                barriers = (full, empty, pfull, pempty, qfull, qempty)
                copies = ((aQ, qG, qS), (aK, kG, kS), (aV, vG, vS), (aP, pG, pS))
                self.produce(
                    s, first, last, sizes, interleave, H, NB, pair, row, ends, row_b, row_n, turn, pR, barriers, copies
                )
        else:
            # ================= consumers
            arch.setmaxregister_increase(112)
            wg = wid // 4
            s, half, w = wg // HALVES, wg % HALVES, wid % 4
            wt = tid % 128
            g, t4 = lane // 4, lane % 4
            applied, inverse, excess = scale, Float32(1.0) / scale, Float32(0.0)
            if const_expr(self.twice):
                inverse = inverse.to(self.dtype).to(Float32)
                applied, excess = Float32(1.0) / inverse, fma(scale, inverse, Float32(-1.0))
            c = applied * LOG2E
            floor = Float32(DEAD) if const_expr(self.dtype is BFloat16) else c * (-VETO * VETO)
            mQK = multiply(self.dtype, False, K, SLICE)
            mPI = multiply(self.dtype, True, K, SLICE)
            mPV = multiply(self.dtype, False, MN, 16 * self.steps)
            hQK, hPI, hPV = mQK.get_slice(wt), mPI.get_slice(wt), mPV.get_slice(wt)
            # A key's terms fill 8 of 16 channels; the other 8 read the same numbers again and meet zeros of A. So do 8 channels
            # of K, which meet what `take` makes of q.
            eights = cute.make_layout(((8, 4), (8, 2), 2, STREAMS * ST), stride=((8, 64), (1, 0), 256, 512))
            ofK = cute.local_tile(sK, (SLICE, D), (None, 0, None))
            if const_expr(self.twice):
                ofK = cute.make_tensor(sK.iterator, eights)
            fK = mQK.make_fragment_B(hQK.partition_B(ofK))  # (., 1, step, slice, stage)
            if const_expr(self.wide):
                fP = sP[None, wt, None, None]  # (four numbers, of 8 keys, tile)
            else:
                fP = mPI.make_fragment_A(hPI.partition_A(sP))  # (., 1, step, tile)
            fI = mPI.make_fragment_B(hPI.partition_B(sI))  # (., 1, step, 1)
            fV = mPV.make_fragment_B(
                hPV.partition_B(cute.local_tile(sV, (16 * self.steps, KEYS), (0, 0, None)))
            )  # (., 1, step, stage)
            fR = mQK.make_fragment_B(hQK.partition_B(cute.make_tensor(pR, eights)))
            S0 = mQK.make_fragment_C(mQK.partition_shape_C((ROWS, SLICE)))
            S1 = mQK.make_fragment_C(mQK.partition_shape_C((ROWS, SLICE)))
            O = mPV.make_fragment_C(mPV.partition_shape_C((ROWS, 16 * self.steps)))
            rQ = mQK.make_fragment_A(mQK.partition_shape_A((ROWS, D)))
            fQ = mPI.make_fragment_A(hPI.partition_A(sQ))  # (., 1, step, tile)
            rA = mQK.make_fragment_A(mQK.partition_shape_A((ROWS, 16)))
            rA.fill(zero)
            coefficients(rA, inverse, t4, self.dtype)
            keep(rA, lane)
            ldm = cute.make_tiled_copy_A(cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), self.dtype), mQK).get_slice(wt)
            qSrc, qDst = ldm.partition_S(sQ), ldm.retile(rQ)
            m = cute.make_rmem_tensor(2, Float32)
            l = cute.make_rmem_tensor(4, Float32)
            frags = (rA, fK, fR, fP, fI)
            arriving = (qfull, ldm, qSrc, qDst, rQ, excess)
            # What the loop over rows does not need at every step lives in shared memory: registers decide its speed.
            st, ph, qph, again, rounds = Int32(0), Int32(0), Int32(0), Boolean(False), Int32(0)
            mine = book[wid, None]
            if lane == 0:
                mine[0] = first
                mine[1] = last
            arch.sync_warp()
            while mine[0] < mine[1]:
                unit, stop = mine[0], mine[1]
                pan, p0, p1 = stretch(unit, stop, N)
                ib, h, b = place(pan, panels, H)
                count = p1 - p0 + STREAMS - 1
                if const_expr(not self.streamed):
                    count = count - s
                count = count // STREAMS
                arch.sync_warp()
                if lane == 0:
                    mine[0] = unit + p1 - p0
                    mine[2] = (ib * HALVES + half) * (ROWS // 16) + w  # tiles of 16 queries
                    mine[3] = h
                    mine[4] = b
                    if const_expr(self.streamed):
                        mine[5] = (p1 - p0) % STREAMS * s
                if const_expr(self.pair):
                    if const_expr(self.streamed):
                        arch.griddepcontrol_wait()
                    if lane < WARP_QUERIES:
                        i = cutlass.min(((ib * HALVES + half) * (ROWS // WARP_QUERIES) + w) * WARP_QUERIES + lane, LQ - 1)
                        origins[lane, wid] = shifts[cutlass.min(b, shifts.shape[0] - 1), cutlass.min(h, shifts.shape[1] - 1), i]
                arch.sync_warp()
                if const_expr(self.pair and self.resident):
                    arch.barrier(barrier_id=1, number_of_threads=CONSUMERS * 128)
                    load_panel(pair, sP, b, h, ib * HALVES * ROWS, HALVES * ROWS, NB, tid, CONSUMERS * 128)
                    arch.fence_proxy("async.shared", space="cta")
                    arch.barrier(barrier_id=1, number_of_threads=CONSUMERS * 128)
                if (ib * HALVES + half) * ROWS < LQ:
                    if count > 0:
                        self.take(arriving, s, half, rounds, qph)
                        qph ^= 1
                        self.arrived(full, pfull, s * ST, st, ph)
                        warpgroup.fence()
                        queries = self.queries(rQ, fQ, s, half, rounds)
                        self.scores(queries, frags, S0, 0, self.tile(0, st, half), s * ST + st)
                        warpgroup.wait_group(0)
                        self.taken(qempty + s, lane)
                    while count > 0:
                        bars, operands = (full, empty, pfull, pempty, qempty), (rQ, fQ, frags, S0, S1, O, fV, m, l)
                        st, ph, qph, count = self.keys_of_row(
                            operands, arriving, turn, bars, c, s, half, rounds, st, ph, qph, count, NB, lane
                        )
                        tile, h, b, nn = mine[2], mine[3], mine[4], turn[s, rounds, 0]
                        ot = wg * 4 + w
                        if const_expr(SLOTS == 2):
                            ot = (self.slot(s, rounds, qph)[0] * HALVES + half) * 4 + w
                        rounds = (rounds + 1) & 3
                        at, out = (tile, h, nn, b, ot), (sO, aO, oS, oG)
                        again = self.leave(
                            (O, m, l), at, out, floor, again, LQ, count, mine, (lse, reference, origins[None, wid]), g, t4, lane
                        )
                else:
                    all_bars = (full, empty, pfull, pempty, qfull, qempty)
                    rounds, st, ph, qph = self.pass_by(turn, all_bars, s, rounds, st, ph, qph, count, lane)
            arch.cp_async_bulk_wait_group(0)
            if arch.vote_any_sync(again):
                if const_expr(self.prepared):
                    arch.griddepcontrol_wait()
                block = arch.make_warp_uniform(bid)
                self.repair(
                    gQ,
                    gK,
                    gV,
                    row,
                    deep,
                    given,
                    gO,
                    lse,
                    reference,
                    shifts,
                    row_b,
                    row_n,
                    scale,
                    interleave,
                    block,
                    sizes,
                    s,
                    half,
                    w,
                )
