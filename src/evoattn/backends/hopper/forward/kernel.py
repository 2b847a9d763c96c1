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

from collections import namedtuple

import cuda.bindings.driver as cuda
import cutlass
from cutlass import BFloat16, Boolean, Float32, Int32, const_expr, cute, range_constexpr
from cutlass.cute import arch
from cutlass.cute.nvgpu import OperandMajorMode, warp, warpgroup
from cutlass.memory import SmemAllocator

from evoattn.backends.hopper.forward.consumer import Thread
from evoattn.backends.hopper.forward.exact import WARP_QUERIES
from evoattn.backends.hopper.forward.mma import CHAIN, HALVES, Operands, QueryCopy, Rings, Row
from evoattn.backends.hopper.forward.producer import STREAMS, Copies
from evoattn.backends.hopper.forward.variant import CONSUMERS, Arguments, ForwardVariant
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
from evoattn.backends.hopper.kernels.ring import Ring
from evoattn.backends.hopper.kernels.schedule import place, stretch
from evoattn.backends.hopper.kernels.tile_sizes import KEYS, ROWS, SLICE
from evoattn.backends.hopper.kernels.tma import TmaTiles, load_tma, store_tma

__all__ = ["CHAIN", "HALVES", "KEYS", "ROWS", "Forward"]

K, MN = OperandMajorMode.K, OperandMajorMode.MN
THREADS = (CONSUMERS + 1) * 128


class Tiles(namedtuple("Tiles", "sQ sK sV sP sI sB sO")):
    """Tiles in shared memory: of q, k, v, the pair bias, the identity over scale, the terms of the key-wise bias, and o."""


class Forward(ForwardVariant):
    """The kernel of a variant."""

    @cute.jit
    def __call__(
        self, q, k, v, row, ends, deep, given, pair, o, lse, reference, shifts, row_b, row_n, scale, interleave, blocks,
        stream: cuda.CUstream,
    ):  # fmt: skip
        """Launch the kernel; `Arguments` explains the tensors."""
        lq, lk, lv, lp, _, lo = self.layouts()
        tma_Q = load_tma(q, lq, (ROWS, self.D))
        tma_K = load_tma(k, lk, (KEYS, self.key_width))
        tma_V = load_tma(v, lv, (self.D, KEYS), (4, 3, 2, 1, 0))
        tma_O = store_tma(o, lo, (16, self.D))
        tma_P = tma_Q
        if const_expr(self.streamed and not self.wide):
            tma_P = load_tma(pair, lp, (ROWS, KEYS), (2, 3, 1, 0))
        args = Arguments(row, ends, deep, given, pair, q, k, v, o, lse, reference, shifts, row_b, row_n, scale, interleave)
        self.kernel(tma_Q, tma_K, tma_V, tma_P, tma_O, args).launch(
            grid=(blocks, 1, 1), block=(THREADS, 1, 1), stream=stream, min_blocks_per_mp=1, use_pdl=self.prepared
        )

    @cute.kernel
    def kernel(self, tma_Q, tma_K, tma_V, tma_P, tma_O, args):
        """The roles of a block's warps, after its shared memory and its share of the work."""
        D, ST = self.D, self.stages
        B, N, H, LQ, _ = args.q.shape
        key_blocks = (args.k.shape[3] + KEYS - 1) // KEYS
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
            memory = smem.allocate_array(Float32, self.tiles_of_pair * ROWS * KEYS, byte_alignment=1024)
            sP = cute.make_tensor(memory, cute.make_layout((4, 128, 8, self.tiles_of_pair), stride=(1, 4, 512, ROWS * KEYS)))
        else:
            sP = new(lp)
        sK, sV, sQ = new(lk), new(lv), new(lq)
        sO = new(lo) if const_expr(self.slots == 1) else cute.make_tensor(sQ.iterator, lo.outer)
        sI = new(li)
        sB = smem.allocate_array(self.dtype, STREAMS * ST * KEYS * TERMS, byte_alignment=128)
        rings = Rings(Ring.allocate(smem, STREAMS * ST), Ring.allocate(smem, ST), Ring.allocate(smem, STREAMS * self.slots))
        books = cute.make_tensor(
            smem.allocate_array(Int32, CONSUMERS * 4 * 8), cute.make_layout((CONSUMERS * 4, 8), stride=(8, 1))
        )
        # What the pair bias of a warp's queries is measured from.
        origins = cute.make_tensor(
            smem.allocate_array(Float32, CONSUMERS * 4 * WARP_QUERIES), cute.make_layout((WARP_QUERIES, CONSUMERS * 4))
        )
        # What a stream's producer tells its consumers of each turn: the row n, and how many slices of keys it has.
        turns = cute.make_tensor(
            smem.allocate_array(Int32, STREAMS * 4 * 2), cute.make_layout((STREAMS, 4, 2), stride=(8, 2, 1))
        )
        if tid == 0:
            rings.keys.initialize(consumers=HALVES * 4)
            rings.pair.initialize(consumers=CONSUMERS * 4)
            rings.queries.initialize(consumers=HALVES * 4)
        arch.mbarrier_init_fence()
        if const_expr(self.pair and not self.wide):
            self.fill_identity(sI, args.scale, tid)
        arch.sync_threads()
        # ---- this block's share: units (panel, n) from first to last
        panels = (LQ + HALVES * ROWS - 1) // (HALVES * ROWS)
        sizes = (blocks, B * H, panels, N, LQ)
        span = (self.schedule.start(bid, *sizes), self.schedule.start(bid + 1, *sizes))
        copy_Q = TmaTiles.of(tma_Q, (ROWS, D), sQ)
        copy_K = TmaTiles.of(tma_K, (KEYS, self.key_width), sK)
        copy_V = TmaTiles.of(tma_V, (D, KEYS), sV, (0, None, None, None, None))
        copy_O = TmaTiles.of(tma_O, (16, D), sO)
        copy_P = None
        if const_expr(self.streamed and not self.wide):
            copy_P = TmaTiles.of(tma_P, (ROWS, KEYS), sP, (None, None, None, None))
        if wid >= CONSUMERS * 4:
            # ================= producers: one warp a stream
            arch.setmaxregister_decrease(32)
            s = wid - CONSUMERS * 4
            if const_expr(self.prepared):
                arch.griddepcontrol_wait()
            if s < STREAMS:
                tiles_P = cute.make_tensor(sP.iterator, cute.make_layout((ROWS * KEYS, self.tiles_of_pair)))
                copies = Copies(copy_Q, copy_K, copy_V, copy_P)
                self.produce(s, args, span, sizes, key_blocks, turns, tiles_P, sB, rings.stream(s, ST), copies)
        else:
            # ================= consumers
            arch.setmaxregister_increase(112)
            wg = wid // 4
            thread = Thread(wg // HALVES, wg % HALVES, wid % 4, tid % 128, lane, lane // 4, lane % 4, tid, wid, wg)
            shared = Tiles(sQ, sK, sV, sP, sI, sB, sO)
            here = rings.stream(thread.s, ST)
            self.consume(thread, bid, args, span, sizes, key_blocks, shared, copy_O, here, turns, books, origins)

    @cute.jit
    def fill_identity(self, sI: cute.Tensor, scale: Float32, tid: Int32):
        """Write the identity over scale, which a pair bias is multiplied by, in terms of dtype."""
        for i in cutlass.range(tid, SLICE * SLICE, THREADS):
            rest = Float32(1.0) / scale
            for y in range_constexpr(self.terms):
                alpha = rest.to(self.dtype)
                rest = rest - alpha.to(Float32)
                sI[i // SLICE, i % SLICE, y] = cutlass.select_(i // SLICE == i % SLICE, alpha, self.dtype(0.0))
        arch.fence_proxy("async.shared", space="cta")

    def fragments(self, tiles, thread, inverse, excess):
        """The operands of the products, the registers of a row, and the copy of queries into registers."""
        sQ, sK, sV, sP, sI, sB, _ = tiles
        wt = thread.wt
        mma_QK = multiply(self.dtype, False, K, SLICE)
        mma_PI = multiply(self.dtype, True, K, SLICE)
        mma_PV = multiply(self.dtype, False, MN, 16 * self.steps)
        thr_QK, thr_PI, thr_PV = mma_QK.get_slice(wt), mma_PI.get_slice(wt), mma_PV.get_slice(wt)
        # A key's terms fill 8 of 16 channels; the other 8 read the same numbers again and meet zeros of A. So do 8 channels
        # of K, which meet the other half of q (`load_queries`).
        eights = cute.make_layout(((8, 4), (8, 2), 2, STREAMS * self.stages), stride=((8, 64), (1, 0), 256, 512))
        keys = cute.local_tile(sK, (SLICE, self.D), (None, 0, None))
        if self.twice:
            keys = cute.make_tensor(sK.iterator, eights)
        tSrK = mma_QK.make_fragment_B(thr_QK.partition_B(keys))  # (., 1, step, slice, stage)
        if self.wide:
            tSrP = sP[None, wt, None, None]  # (four numbers, of 8 keys, tile)
        else:
            tSrP = mma_PI.make_fragment_A(thr_PI.partition_A(sP))  # (., 1, step, tile)
        tSrI = mma_PI.make_fragment_B(thr_PI.partition_B(sI))  # (., 1, step, 1)
        values = cute.local_tile(sV, (16 * self.steps, KEYS), (0, 0, None))
        tOrV = mma_PV.make_fragment_B(thr_PV.partition_B(values))  # (., 1, step, stage)
        tSrB = mma_QK.make_fragment_B(thr_QK.partition_B(cute.make_tensor(sB, eights)))
        acc_S0, acc_S1 = (mma_QK.make_fragment_C(mma_QK.partition_shape_C((ROWS, SLICE))) for _ in range(2))
        acc_O = mma_PV.make_fragment_C(mma_PV.partition_shape_C((ROWS, 16 * self.steps)))
        tSrQ = mma_QK.make_fragment_A(mma_QK.partition_shape_A((ROWS, self.D)))
        tSsQ = mma_PI.make_fragment_A(thr_PI.partition_A(sQ))  # (., 1, step, tile)
        tSrA = mma_QK.make_fragment_A(mma_QK.partition_shape_A((ROWS, 16)))
        tSrA.fill(self.dtype(0.0))
        coefficients(tSrA, inverse, thread.t4, self.dtype)
        keep(tSrA, thread.lane)
        ldmatrix = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), self.dtype)
        loads = cute.make_tiled_copy_A(ldmatrix, mma_QK).get_slice(wt)
        copy = QueryCopy(loads, loads.partition_S(sQ), loads.retile(tSrQ), excess)
        m, l = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(4, Float32)
        return Operands(tSrQ, tSsQ, tSrA, tSrK, tSrB, tSrP, tSrI, tOrV), Row(acc_S0, acc_S1, acc_O, m, l), copy

    @cute.jit
    def consume(
        self, thread, bid: Int32, args, span, sizes, blocks: Int32, tiles, copy_O, rings, turns: cute.Tensor,
        books: cute.Tensor, origins: cute.Tensor,
    ):  # fmt: skip
        """Do the rows of this warpgroup's stream, panel after panel."""
        s, half, w, _, lane, _, _, tid, wid, wg = thread
        _, _, panels, N, LQ = sizes
        scale, shifts = args.scale, args.shifts
        applied, inverse, excess = scale, Float32(1.0) / scale, Float32(0.0)
        if const_expr(self.twice):
            inverse = inverse.to(self.dtype).to(Float32)
            applied, excess = Float32(1.0) / inverse, fma(scale, inverse, Float32(-1.0))
        c = applied * LOG2E
        floor = Float32(DEAD) if const_expr(self.dtype is BFloat16) else c * (-VETO * VETO)
        operands, row, copy = self.fragments(tiles, thread, inverse, excess)
        # What the loop over rows does not need at every step lives in shared memory: registers decide its speed.
        slot, query_phase, again, turn = rings.keys.start(), Int32(0), Boolean(False), Int32(0)
        book = books[wid, None]
        if lane == 0:
            book[0], book[1] = span
        arch.sync_warp()
        while book[0] < book[1]:
            unit, stop = book[0], book[1]
            panel, p0, p1 = stretch(unit, stop, N)
            ib, h, b = place(panel, panels, args.q.shape[2])
            count = p1 - p0 + STREAMS - 1
            if const_expr(not self.streamed):
                count = count - s
            count = count // STREAMS
            arch.sync_warp()
            if lane == 0:
                book[0] = unit + p1 - p0
                book[2] = (ib * HALVES + half) * (ROWS // 16) + w  # tiles of 16 queries
                book[3] = h
                book[4] = b
                if const_expr(self.streamed):
                    book[5] = (p1 - p0) % STREAMS * s
            if const_expr(self.pair):
                if const_expr(self.streamed):
                    arch.griddepcontrol_wait()
                if lane < WARP_QUERIES:
                    i = cutlass.min(((ib * HALVES + half) * (ROWS // WARP_QUERIES) + w) * WARP_QUERIES + lane, LQ - 1)
                    origins[lane, wid] = shifts[cutlass.min(b, shifts.shape[0] - 1), cutlass.min(h, shifts.shape[1] - 1), i]
            arch.sync_warp()
            if const_expr(self.pair and self.resident):
                arch.barrier(barrier_id=1, number_of_threads=CONSUMERS * 128)
                load_panel(args.pair, tiles.sP, b, h, ib * HALVES * ROWS, HALVES * ROWS, blocks, tid, CONSUMERS * 128)
                arch.fence_proxy("async.shared", space="cta")
                arch.barrier(barrier_id=1, number_of_threads=CONSUMERS * 128)
            if (ib * HALVES + half) * ROWS < LQ:
                if count > 0:
                    self.load_queries(rings, copy, operands.tSrQ, s, half, turn, query_phase)
                    query_phase ^= 1
                    self.wait_keys(rings, slot)
                    warpgroup.fence()
                    queries = self.queries(operands, s, half, turn)
                    self.scores(queries, operands, row.acc_S0, 0, self.pair_tile(0, slot, half), rings.keys.index(slot.stage))
                    warpgroup.wait_group(0)
                    self.release_registers(rings, s, lane)
                while count > 0:
                    slot, query_phase, count = self.keys_of_row(
                        operands, row, copy, turns, rings, c, thread, turn, slot, query_phase, count, blocks
                    )
                    tile, h, b, n = book[2], book[3], book[4], turns[s, turn, 0]
                    output = wg * 4 + w
                    if const_expr(self.slots == 2):
                        output = (self.query_slot(s, turn, query_phase).stage * HALVES + half) * 4 + w
                    turn = (turn + 1) & 3
                    at = (tile, h, n, b, output)
                    again = self.store_row(
                        row, args, at, tiles.sO, copy_O, floor, again, count, book, origins[None, wid], thread
                    )
            else:
                turn, slot, query_phase = self.pass_by(turns, rings, thread, turn, slot, query_phase, count)
        arch.cp_async_bulk_wait_group(0)
        if arch.vote_any_sync(again):
            if const_expr(self.prepared):
                arch.griddepcontrol_wait()
            self.repair(args, arch.make_warp_uniform(bid), sizes, thread)
