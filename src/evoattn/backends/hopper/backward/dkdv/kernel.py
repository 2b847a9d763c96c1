"""The backward kernel of the keys: dk, dv, and each head's part of the gradient of the mask bias.

A persistent block owns a panel, 64 keys of one (b, h), and loops over rows n in two or three streams, a warpgroup each. It
works on transposed scores, [k,q], so that dk and dv of a row stay in registers. The pair bias of a panel stays in shared memory
in float32, as the accumulators hold it, or streams, a tile for all streams; q, do and the statistics of each query stream. What
a query brings, -lse and -delta, comes by products too: eight channels of it meet the key-wise bias, or constants.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Boolean, Float32, Int32, Int64, const_expr, cute, range_constexpr
from cutlass.cute import arch
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup
from cutlass.memory import SmemAllocator

from evoattn.backends.hopper.backward.common import (
    TILE,
    fake_pair,
    fake_words,
    fill_zeros,
    sleep_until,
    store_rows,
    tile_copy,
    tile_parts,
)
from evoattn.backends.hopper.backward.dkdv.consumer import KeyConsumer
from evoattn.backends.hopper.backward.dkdv.producer import KeyProducer
from evoattn.backends.hopper.backward.schedule import share
from evoattn.backends.hopper.host.launch import Kernel, Stand, channels, even, live_rows, terms
from evoattn.backends.hopper.kernels.primitives import k_major, mn_major, multiply, padded, release
from evoattn.backends.hopper.kernels.tile_sizes import QUERIES, ROWS, SLICE

K, MN = OperandMajorMode.K, OperandMajorMode.MN


class KeyGradients(KeyProducer, KeyConsumer, Kernel):
    """One variant of the kernel. Sizes, strides and scale are known when it runs.

    Args:
        dtype: cutlass type of q, k and v.
        channels: D.
        pair, row: whether there is a pair bias, a key-wise bias.
        bias: cutlass type of the pair bias, if it is not dtype.
        mask_gradient: whether the gradient of the mask bias is wanted.
        rounds: whether a warp that has nothing to bring in rounds d(pair bias), which `dq` added up in float32, to dtype.
        skips: whether it does the rows alone that a mask leaves to each panel, which `live_rows` knows.
        clears: whether it also clears dq of the rows that `dq` leaves out then.
        blocks: blocks of 64 queries whose pair bias fits in shared memory: the longest length it takes, where there is one.
        ring: tiles of a pair bias that streams instead, laid out by `pair_bias.Tiles`, and takes any length.
        wide: whether those are float32, as the accumulators hold it.
        streams, stages: rows n at a time, stages of each.
        timed: whether blocks count the time in which they change to another panel (`schedule`), where the pair bias stays.
        own_tiles: whether dk and dv of a row leave from tiles of their own in shared memory. Else they share one, and dv waits
            until dk has left.
    """

    def __init__(
        self,
        dtype: Any,
        channels: int,
        *,
        pair: bool,
        row: bool,
        bias: Any = None,
        mask_gradient: bool = False,
        rounds: bool = False,
        skips: bool = False,
        clears: bool = False,
        blocks: int = 6,
        ring: int = 0,
        wide: bool = False,
        streams: int = 3,
        stages: int = 3,
        timed: bool = True,
        own_tiles: bool = False,
    ):
        self.dtype, self.channels, self.pair, self.row = dtype, channels, pair, row
        self.bias = dtype if bias is None else bias
        self.mask_gradient, self.rounds, self.skips, self.clears = mask_gradient, rounds, skips, clears
        self.blocks, self.ring, self.streams, self.stages = blocks, ring, streams, stages
        self.D, self.steps = padded(channels), -(-channels // 16)
        self.width = 16 * self.steps
        self.resident, self.streamed = pair and ring == 0, pair and ring > 0
        self.timed, self.own_tiles = timed and self.resident, own_tiles
        self.leaving = streams * 4 * (2 if own_tiles else 1)  # tiles of 16 keys
        self.threads = (streams + 1) * 128
        self.registers = {3: (160, 32), 2: (240, 24)}[streams]
        # Slices of a stage whose products for dk and dv run on in the next slice's arithmetic: that takes registers, and, after
        # the last of a stage, a stage that is given back later.
        self.run_on = 0 if channels == 48 else min(stages - 1, 2)
        self.tile = Float32 if wide else dtype
        if rounds and streams + self.streamed == 4:
            raise ValueError("each warp has something to bring in, none is left to round")
        tiles = {"blocks": blocks, "ring": ring or None, "wide": wide, "streams": streams, "stages": stages}
        tiles["own_tiles"] = own_tiles
        wishes = {"mask_gradient": mask_gradient, "rounds": rounds, "skips": skips, "clears": clears}
        # a pair bias that streams in float32 comes from `pair_bias.Tiles`, whatever it was
        other = None if self.bias is dtype or self.streamed else self.bias
        self.name_after(dtype, channels=channels, pair=pair, row=row, bias=other, **wishes, **tiles, timed=self.timed)

    def layouts(self):
        n = self.streams * self.stages
        return (
            k_major(self.dtype, ROWS, self.D, 2 * self.streams),  # k, v of a row
            k_major(self.dtype, QUERIES, self.D, n),  # q and do
            mn_major(self.dtype, self.D, QUERIES, n),  # the same as right sides of dS^T q and P^T do
            k_major(self.dtype, 16, self.D, self.leaving + self.skips),  # dk, dv, a warp's rows; zeros
        )

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        do: cute.Tensor,
        pair: cute.Tensor,
        row: cute.Tensor,
        stats: cute.Tensor,
        dk: cute.Tensor,
        dv: cute.Tensor,
        dmask: Any,
        added: Any,
        dpair: Any,
        dq: Any,
        order: Any,
        starts: Any,
        scale: Float32,
        row_b: Int32,
        row_n: Int32,
        blocks: Int32,
        stream: cuda.CUstream,
    ):
        """Launch the kernel.

        Args:
            q, k, v, do, dk, dv: [b,n,h,l,d].
            pair: the pair bias, [b|1,h|1,q,k]; or if it streams, [b|1,h|1,tiles of k,tiles of q,64 * 64].
            row, stats: as in `dq`.
            dmask: float32 [b,n,h,k], each head's part of the gradient of the mask bias; or None.
            added: float32 [fours, 4], the gradient of the pair bias as `dq` has summed it; or None.
            dpair: [fours, 4], where `added` is written in its final dtype; or None.
            dq: [b,n,h,l,d], in which the rows that `dq` leaves out are set to zero; or None.
            order, starts: [b,2,n] and [b, panels + 2], as in `live_rows`; or None.
        """
        lk, lq, _, lo = self.layouts()
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        aK, tK = tile_copy(load, k, lk, (ROWS, self.D))
        aV, tV = tile_copy(load, v, lk, (ROWS, self.D))
        aQ, tQ = tile_copy(load, q, lq, (QUERIES, self.D))
        aG, tG = tile_copy(load, do, lq, (QUERIES, self.D))
        aX, tX = tile_copy(store, dk, lo, (16, self.D))
        aY, tY = tile_copy(store, dv, lo, (16, self.D))
        aZ, tZ = tile_copy(store, dq, lo, (16, self.D)) if const_expr(self.clears) else (aX, tX)
        tiles = (aK, tK, aV, tV, aQ, tQ, aG, tG, aX, tX, aY, tY, aZ, tZ)
        self.kernel(*tiles, q, k, pair, row, stats, dmask, added, dpair, order, starts, scale, row_b, row_n).launch(
            grid=(blocks, 1, 1), block=(self.threads, 1, 1), stream=stream, min_blocks_per_mp=1, use_pdl=True
        )

    @cute.kernel
    def kernel(
        self,
        aK: cute.CopyAtom,
        tK: cute.Tensor,
        aV: cute.CopyAtom,
        tV: cute.Tensor,
        aQ: cute.CopyAtom,
        tQ: cute.Tensor,
        aG: cute.CopyAtom,
        tG: cute.Tensor,
        aX: cute.CopyAtom,
        tX: cute.Tensor,
        aY: cute.CopyAtom,
        tY: cute.Tensor,
        aZ: cute.CopyAtom,
        tZ: cute.Tensor,
        gQ: cute.Tensor,
        gK: cute.Tensor,
        pair: cute.Tensor,
        row: cute.Tensor,
        stats: cute.Tensor,
        dmask: Any,
        added: Any,
        dpair: Any,
        order: Any,
        starts: Any,
        scale: Float32,
        row_b: Int32,
        row_n: Int32,
    ):
        D, ST, NS, RG = self.D, self.stages, self.streams, self.ring
        B, N, H, LQ, _ = gQ.shape
        LK = gK.shape[3]
        tid, _, _ = arch.thread_idx()
        bid, _, _ = arch.block_idx()
        blocks, _, _ = arch.grid_dim()
        wid = arch.make_warp_uniform(arch.warp_idx())
        lane = arch.lane_idx()
        # ---- shared memory
        smem = SmemAllocator()
        lk, lq, lqt, lo = self.layouts()
        new = lambda l: smem.allocate_tensor(self.dtype, l.outer, 1024, l.inner)
        sQ, sG, sK = new(lq), new(lq), new(lk)
        # Not at the end: a product reads their 8 channels twice, where memcheck sees it read 16 that lie side by side.
        pS = smem.allocate_array(Float32, NS * ST * TILE, byte_alignment=128)
        sX = new(lo)
        sQt, sGt = cute.make_tensor(sQ.iterator, lqt.outer), cute.make_tensor(sG.iterator, lqt.outer)
        panel: Any = (
            smem.allocate_tensor(Float32, cute.make_layout((4, 128, 8 * self.blocks), stride=(1, 4, 512)), 128)
            if const_expr(self.resident)
            else None
        )
        ring = smem.allocate_array(self.tile, RG * ROWS * QUERIES if self.streamed else 8, byte_alignment=128)
        tiles = cute.make_tensor(ring, cute.make_layout((4, 128, 8, max(RG, 1)), stride=(1, 4, 512, ROWS * QUERIES)))
        full = smem.allocate_array(Int64, NS * ST)
        empty = smem.allocate_array(Int64, NS * ST)
        kfull = smem.allocate_array(Int64, NS)
        kempty = smem.allocate_array(Int64, NS)
        box = cute.make_tensor(smem.allocate_array(Int32, 4 * NS), cute.make_layout((4, NS)))  # rows n, see `produce`
        bfull = smem.allocate_array(Int64, max(RG, 1))
        bempty = smem.allocate_array(Int64, max(RG, 1))
        if tid == 0:
            for i in range_constexpr(NS * ST):
                arch.mbarrier_init(full + i, 1)
                arch.mbarrier_init(empty + i, 4)
            for i in range_constexpr(NS):
                arch.mbarrier_init(kfull + i, 1)
                arch.mbarrier_init(kempty + i, 4)
            for i in range_constexpr(RG):
                arch.mbarrier_init(bfull + i, 1)
                arch.mbarrier_init(bempty + i, NS * 4)
        arch.mbarrier_init_fence()
        if const_expr(self.skips):
            fill_zeros(sX[None, None, self.leaving], tid, self.threads)
        inverse = Float32(1.0) / scale
        arch.sync_threads()
        # ---- work: an equal share of the time that all (panel, n) take
        NK = (LK + ROWS - 1) // ROWS
        NT = (LQ + QUERIES - 1) // QUERIES
        sizes, live = (B, N, H, NK), (order, starts)
        total, change, some = self.measure(live, sizes, blocks)
        each = cutlass.max(Int32(share(total, blocks)), 1)
        begin = Int32(cutlass.min(Int64(bid) * each, total))
        end = Int32(cutlass.min(Int64(bid + 1) * each, total))

        kS, kG = tile_parts(aK, tK, (ROWS, D), sK)
        vS, vG = tile_parts(aV, tV, (ROWS, D), sK)
        qS, qG = tile_parts(aQ, tQ, (QUERIES, D), sQ)
        gS, gG = tile_parts(aG, tG, (QUERIES, D), sG)
        xS, xG = tile_parts(aX, tX, (16, D), sX)
        yS, yG = tile_parts(aY, tY, (16, D), sX)
        zS, zG = tile_parts(aZ, tZ, (16, D), sX)
        if wid >= NS * 4:
            # ================= producers: a warp a stream, one for a pair bias that streams
            arch.setmaxregister_decrease(self.registers[1])
            s = wid - NS * 4
            busy = (NS + int(self.streamed)) % 4  # the others clear what is left out; where there are none, all do it at last
            span = (begin, end, bid, each, change)
            if s < NS:
                bars = (full, empty, kfull, kempty)
                copies = ((aK, kG, kS), (aV, vG, vS), (aQ, qG, qS), (aG, gG, gS))
                self.produce(s, span, sizes, live, some, stats, pS, bars, copies, NT, lane, box[None, s])
            elif const_expr(self.streamed):
                if s == NS:
                    self.produce_bias(span, sizes, live, pair, ring, bfull, bempty, NT, lane)
            if const_expr(self.skips):
                if s >= busy and some:
                    of_queries = (aZ, zS[None, self.leaving], zG) if const_expr(self.clears) else None
                    of_keys = ((aX, xS[None, self.leaving], xG), (aY, yS[None, self.leaving], yG))
                    zeros = (of_keys, of_queries, (LQ + 15) // 16)
                    warps = 4 - busy
                    self.clear(live, sizes, zeros, dmask, bid * warps + 3 - s, blocks * warps, lane)
            if const_expr(self.rounds):
                if s == 3:
                    self.round_off(added, dpair, bid, blocks, lane)
        else:
            # ================= consumers
            arch.setmaxregister_increase(self.registers[0])
            s, w, wt = wid // 4, wid % 4, tid % 128
            g, t4 = lane // 4, lane % 4
            S_K = multiply(self.dtype, False, K, SLICE)
            fQ, fG, fQt, fGt, f1 = self.right_sides(sQ, sG, sQt, sGt, pS, NS * ST, wt)
            S, T, X, Y = self.accumulators()
            rK, rV, rR, rD = self.left_sides(t4, lane)
            ldm = cute.make_tiled_copy_A(cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), self.dtype), S_K).get_slice(wt)
            rows = ldm.partition_S(sK)
            own = cute.make_rmem_tensor(6, Int32)
            own.fill(0)
            st, ph, turn, at, again = Int32(0), Int32(0), Int32(0), begin, Boolean(False)
            numbers = box[None, s]
            mine = panel[None, wt, None] if const_expr(self.resident) else None
            sums = cute.make_rmem_tensor(2, Float32)
            bias = (tiles, wt) if const_expr(self.streamed) else mine
            operands = (S, T, X, Y, (rK, rV, rR, rD), (fQ, fG, fQt, fGt, f1))
            arriving, of_row = (ldm, rows, own, t4, inverse), (full, empty, kfull, bfull, bempty)
            bt, bp = Int32(0), Int32(0)
            while at < end:
                i, h, b, n0, n1, start, length = self.come_to(at, end, change, live, sizes, lane)
                at = cutlass.min(start + length, end)
                k0 = i * ROWS + w * 16 + g
                if const_expr(self.resident):
                    if again:
                        arch.barrier(barrier_id=1, number_of_threads=NS * 128)
                    for u in cutlass.range(s, 2 * NT, NS, unroll=2):
                        self.load_panel(mine, pair, u, b % pair.shape[0], h % pair.shape[1], k0, t4, LQ, LK, inverse)
                    arch.barrier(barrier_id=1, number_of_threads=NS * 128)
                    again = Boolean(True)
                m, count = s, n1 - n0
                if m < count:
                    if const_expr(self.row):
                        arch.griddepcontrol_wait()
                        arch.mbarrier_wait(kfull + s, turn & 1)
                        self.load_row(own, row, b * row_b + numbers[turn & 3] * row_n, k0)
                    self.take_rows(ldm, rows, ((2 * s, rK), (2 * s + 1, rV)), own, rR, t4, inverse, kfull + s, turn & 1)
                    arch.mbarrier_wait(full + s * ST + st, ph)
                    if const_expr(self.streamed):
                        arch.mbarrier_wait(bfull + bt, bp)
                    self.preload(S, tiles[None, wt, None, bt] if const_expr(self.streamed) else mine, 0, inverse)
                    warpgroup.fence()
                    self.scores(S, T, rK, rV, rR, rD, fQ, fG, f1, 0, s * ST + st)
                    warpgroup.commit_group()
                    warpgroup.wait_group(0)
                    release(kempty + s, lane)  # a product has used k and v: only then have they left shared memory
                while m < count:
                    more = m + NS < count
                    if const_expr(self.row):
                        if more:
                            self.load_row(own, row, b * row_b + numbers[(turn + 1) & 3] * row_n, k0)
                    st, ph, bt, bp = self.queries_of_row(
                        operands, arriving, bias, sums, of_row, scale, more, s, turn, st, ph, bt, bp, NT, lane
                    )
                    if more:
                        release(kempty + s, lane)
                    n = numbers[turn & 3]
                    if const_expr(self.mask_gradient):
                        self.store_sums(sums, dmask[b, n, h, None], k0, t4)
                    arch.cp_async_bulk_wait_group(0, read=True)
                    arch.sync_warp()
                    store_rows(X, scale, sX[None, None, wid], lane, self.dtype)
                    self.send(aX, xS[None, wid], xG[None, i * 4 + w, h, n, b])
                    place = wid + NS * 4 if self.own_tiles else wid
                    if const_expr(not self.own_tiles):
                        arch.cp_async_bulk_wait_group(0, read=True)
                        arch.sync_warp()
                    store_rows(Y, Float32(1.0), sX[None, None, place], lane, self.dtype)
                    self.send(aY, yS[None, place], yG[None, i * 4 + w, h, n, b])
                    m, turn = m + NS, turn + 1
                if const_expr(self.streamed):
                    if m < count + s:  # the last round has no row for this stream
                        for _ in cutlass.range(NT, unroll=1):
                            sleep_until(bfull + bt, bp)
                            release(bempty + bt, lane)
                            bt += 1
                            if bt == RG:
                                bt = Int32(0)
                                bp ^= 1
            arch.cp_async_bulk_wait_group(0)

    @cute.jit
    def round_off(self, added: cute.Tensor, dpair: cute.Tensor, bid: Int32, blocks: Int32, lane: Int32):
        """this block's part of d(pair bias), once `dq` is through"""
        arch.griddepcontrol_wait()
        for x in cutlass.range(bid * 32 + lane, added.shape[0], blocks * 32, unroll=4):
            exact, rounded = cute.make_rmem_tensor(4, Float32), cute.make_rmem_tensor(4, self.dtype)
            cute.autovec_copy(added[x, None], exact)
            rounded.store(exact.load().to(self.dtype))
            cute.autovec_copy(rounded, dpair[x, None])

    def arguments(self) -> tuple[Any, ...]:
        """What stands for the arguments of `__call__` when it is compiled, without the stream."""
        size = cute.sym_int
        B, N, H, Q, KL = (size() for _ in range(5))
        dmask = fake_words((B, N, H, KL)) if self.mask_gradient else None
        fours = size()
        added = Stand(Float32, (fours, 4), (4, 1), 16) if self.rounds else None
        dpair = Stand(self.dtype, (fours, 4), (4, 1), 8) if self.rounds else None
        q, k, v, do, dk, dv = (channels(self.dtype, (B, N, H, length), self.channels) for length in (Q, KL, KL, Q, KL, KL))
        dq = channels(self.dtype, (B, N, H, Q), self.channels) if self.clears else None
        pair = fake_pair(self.bias, Q, KL, False)
        if self.streamed:
            pair = Stand(self.tile, (*(size() for _ in range(4)), ROWS * QUERIES), (*(even() for _ in range(4)), 1), 16)
        return (
            *(q, k, v, do, pair, terms(self.dtype)),
            *(fake_words((B, N, H, size()), 16), dk, dv, dmask, added, dpair, dq),
            *(live_rows() if self.skips else (None, None)),
            *(Float32(0), Int32(0), Int32(0), Int32(0)),
        )
