"""The backward without a pair bias in one kernel: dq, dk, dv and each head's part of the gradient of the mask bias.

Nothing is shared between rows n then, so a persistent block takes one (b, n, h) at a time and computes each score once, where
`dq` and `dkdv` compute it twice. All queries of a row stay in shared memory: q, do, what each query brings to the
products, and dq in float32. Three warpgroups take 64 keys each and go through all tiles of 64 queries, on transposed scores as
`dkdv` does; dS goes through shared memory into the product for dq.

The warpgroups begin at different tiles, and add to each tile's dq in turn, always in the same order: warpgroup s after s + 1,
cyclically. Each begins with a third of the tiles of its own, where there are three, to which it is the first to add.
"""

from __future__ import annotations

import dataclasses
from collections import namedtuple
from typing import Any, ClassVar

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, Int64, const_expr, cute, range_constexpr
from cutlass.cute import arch
from cutlass.cute.nvgpu import OperandMajorMode, warp, warpgroup
from cutlass.memory import SmemAllocator

from evoattn.backends.hopper.kernels.dkdv_consumer import (
    dkdv_products,
    fragments,
    gradient,
    load_key_bias,
    load_keys,
    scores,
    store_mask_gradient,
)
from evoattn.backends.hopper.kernels.fused_producer import GROUPS, live_key_tiles, produce, produce_statistics, third
from evoattn.backends.hopper.kernels.statistics import TILE
from evoattn.backends.hopper.launch import Kernel, floats, key_ends, lines, sizes
from evoattn.backends.hopper.lib.copies import TmaTiles, load_tma
from evoattn.backends.hopper.lib.primitives import k_major, mn_major, narrow, padded
from evoattn.backends.hopper.lib.ring import Ring, Slot, release
from evoattn.backends.hopper.lib.schedule import place
from evoattn.backends.hopper.tiles import QUERIES, ROWS

MN = OperandMajorMode.MN
FIRST, LAST = 2, 4  # rounds of a row: flags beside a bit of the number of rounds


@dataclasses.dataclass(frozen=True)
class FusedRings:
    """The rings of tiles of q, dO and statistics, and of keys with values, two stages of each warpgroup.

    values_empty: barriers of the one stage that a warpgroup has for values. added: a warpgroup has added to dq of a tile.
    """

    queries: Ring
    keys: Ring
    values_empty: Any
    added: Any


class FusedArguments(namedtuple("FusedArguments", "o do k row lse dlse dq dk dv dmask ends scale row_b row_n")):
    """The arguments of the kernel, but for q and v, which the copy engine alone reads.

    o, do, k, dq, dk, dv: [b,n,h,l,d]. row: terms of the key-wise bias, [r, keys * TERMS]; row n of batch b has
    r = b * row_b + n * row_n, which must cover whole tiles of 64 keys. lse, dlse: [b,n,h,q]. dmask: float32 [b,n,h,k], or None.
    ends [r]: the number of keys up to the last that is not masked; tiles beyond are cleared, all but the first.
    """


@dataclasses.dataclass(frozen=True)
class FusedGradients(Kernel):
    """One variant of the kernel. Sizes, strides and scale are known when it runs.

    Args:
        dtype: cutlass type of q, k and v.
        channels: D, 32 at most.
        row: whether there is a key-wise bias.
        mask_gradient: whether the gradient of the mask bias is wanted.
        dlse: whether lse has a gradient.
        gate: whether a gate multiplies O. Then `gate.GatePass` has found delta, which comes with dlse, and o is not read.
        tiles: tiles of 64 queries that there is room for.
    """

    dtype: Any
    channels: int
    _: dataclasses.KW_ONLY
    row: bool
    mask_gradient: bool = False
    dlse: bool = False
    gate: bool = False
    tiles: int = 8
    pair: ClassVar[bool] = False

    @property
    def steps(self) -> int:
        """Products of 16 channels."""
        return -(-self.channels // 16)

    def layouts(self):
        return (
            k_major(self.dtype, ROWS, padded(self.channels), 3 * GROUPS),  # k twice and v, of each warpgroup
            mn_major(self.dtype, padded(self.channels), ROWS, 3 * GROUPS),  # the same as right side of dS k
            k_major(self.dtype, QUERIES, padded(self.channels), self.tiles),  # q, do
            mn_major(self.dtype, padded(self.channels), QUERIES, self.tiles),  # the same as right sides of dS^T q and P^T do
            k_major(self.dtype, 16, QUERIES, 2 * GROUPS * 4),  # dS^T, a warp's 16 keys, twice
            mn_major(self.dtype, QUERIES, ROWS, 2 * GROUPS),  # the same as left side of dS k
        )

    @cute.jit
    def __call__(
        self, q, k, v, o, do, row, lse, dlse, dq, dk, dv, dmask, ends, scale, row_b, row_n, blocks, stream: cuda.CUstream
    ):
        """Launch the kernel; `FusedArguments` explains the tensors."""
        lk, _, lq, _, _, _ = self.layouts()
        tma_K, tma_V = (load_tma(x, lk, (ROWS, padded(self.channels))) for x in (k, v))
        tma_Q, tma_dO = (load_tma(x, lq, (QUERIES, padded(self.channels))) for x in (q, do))
        args = FusedArguments(o, do, k, row, lse, dlse, dq, dk, dv, dmask, ends, scale, row_b, row_n)
        self.kernel(tma_K, tma_V, tma_Q, tma_dO, args).launch(
            grid=(blocks, 1, 1), block=((GROUPS + 1) * 128, 1, 1), stream=stream, min_blocks_per_mp=1, use_pdl=self.row
        )

    @cute.kernel
    def kernel(self, tma_K, tma_V, tma_Q, tma_dO, args):
        """The roles of a block's warps, after its shared memory and its share of the work.

        One long function: if its parts move into others, address arithmetic moves too, and ptxas schedules the loops anew.
        """
        D, QT = padded(self.channels), self.tiles
        B, N, H, LQ, _ = args.o.shape
        LK = args.k.shape[3]
        tid, _, _ = arch.thread_idx()
        bid, _, _ = arch.block_idx()
        blocks, _, _ = arch.grid_dim()
        wid = arch.make_warp_uniform(arch.warp_idx())
        lane = arch.lane_idx()
        # ---- shared memory
        smem = SmemAllocator()
        lk, lkt, lq, lqt, ls, lst = self.layouts()
        new = lambda l: smem.allocate_tensor(self.dtype, l.outer, 1024, l.inner)
        sQ, sdO, sK, sdS = new(lq), new(lq), new(lk), new(ls)
        sQt, sdOt = cute.make_tensor(sQ.iterator, lqt.outer), cute.make_tensor(sdO.iterator, lqt.outer)
        sKt, sdSt = cute.make_tensor(sK.iterator, lkt.outer), cute.make_tensor(sdS.iterator, lst.outer)
        across = 16 * self.steps // 8
        # dq of a tile, as the accumulators hold it, each warp's part in one piece
        sums = smem.allocate_tensor(
            Float32, cute.make_layout((4, 32, across, 4, QT), stride=(1, 4, 128, 128 * across, 512 * across)), 128
        )
        sS = smem.allocate_array(Float32, QT * TILE, byte_alignment=128)
        queries, keys = (Ring.allocate(smem, stages, sleeps=True) for stages in (QT, 2 * GROUPS))
        values_empty, added = (smem.allocate_array(Int64, x) for x in (GROUPS, GROUPS * QT))
        rings = FusedRings(queries, keys, values_empty, added)
        books = cute.make_tensor(smem.allocate_array(Int32, GROUPS * 32), cute.make_layout((GROUPS * 4, 8), stride=(8, 1)))
        if tid == 0:
            queries.initialize(producers=2, consumers=GROUPS * 4)
            keys.initialize(consumers=4)
            for i in range_constexpr(GROUPS):
                arch.mbarrier_init(values_empty + i, 4)
            for i in range_constexpr(GROUPS * QT):
                arch.mbarrier_init(added + i, 4)
        arch.mbarrier_init_fence()
        arch.sync_threads()
        scale, row_b, row_n, dmask, dq = args.scale, args.row_b, args.row_n, args.dmask, args.dq
        inverse = Float32(1.0) / scale
        # ---- work: rows (b, n, h), one after the other
        NK = (LK + ROWS - 1) // ROWS
        NT = (LQ + QUERIES - 1) // QUERIES
        items = B * N * H
        thirds = (NT // 3, 2 * NT // 3, NT)  # of the tiles of queries: past the last of each

        copy_K, copy_V = (TmaTiles.of(x, (ROWS, D), sK) for x in (tma_K, tma_V))
        copy_Q, copy_dO = TmaTiles.of(tma_Q, (QUERIES, D), sQ), TmaTiles.of(tma_dO, (QUERIES, D), sdO)
        sizes = (N, H, NK, NT, LQ, thirds)
        if wid >= GROUPS * 4:
            # ================= one warp brings in, three find the statistics of a third of the tiles each
            arch.setmaxregister_decrease(56)
            s = wid - GROUPS * 4
            if s == GROUPS:
                produce(self, bid, blocks, items, args, sizes, (copy_K, copy_V, copy_Q, copy_dO), rings)
            else:
                produce_statistics(self, s, bid, blocks, items, args, sizes, inverse, sS, queries, lane)
        else:
            # ================= consumers
            arch.setmaxregister_increase(152)
            s, w, wt = wid // 4, wid % 4, tid % 128
            g, t4 = lane // 4, lane % 4
            mma_dQ = dq_multiply(self, True)
            operands, row = fragments(self, (sQ, sdO, sQt, sdOt, sS, sK), QT, wt, t4, lane)
            tdQrS = mma_dQ.make_fragment_A(mma_dQ.get_slice(wt).partition_A(sdSt))
            tdQrK = mma_dQ.make_fragment_B(mma_dQ.get_slice(wt).partition_B(narrow(sKt, 16 * self.steps)))
            acc_dQ = mma_dQ.make_fragment_C(mma_dQ.partition_shape_C((QUERIES, 16 * self.steps)))
            of_mask = cute.make_rmem_tensor(2, Float32)
            begin, _ = third(self, s, thirds)
            # What the loop over tiles does not need lives in shared memory: the row, how many rows and how many tiles of keys
            # came before, the round, h, n and b, and how many rounds came before.
            book = books[wid, None]
            if lane == 0:
                book[0], book[1], book[2], book[7] = bid, Int32(0), Int32(0), Int32(0)
            arch.sync_warp()
            at = Int32(0)  # tiles of scores so far
            if const_expr(self.row):
                arch.griddepcontrol_wait()
            while book[0] < items:
                if lane == 0:
                    book[3] = Int32(0)
                    book[4], book[5], book[6] = place(book[0], H, N)
                arch.sync_warp()
                live = live_key_tiles(self, book[5], book[6], args, NK)
                rounds = (live + GROUPS - 1) // GROUPS
                while book[3] < rounds:
                    r, count, done = book[3], book[1], book[2]
                    flags = Int32(cutlass.select_(r == 0, FIRST, 0)) | Int32(cutlass.select_(r == rounds - 1, LAST, 0))
                    flags = flags | (book[7] & 1)
                    ph = count & 1
                    if r * GROUPS + s < live:
                        buffer = arch.make_warp_uniform(3 * s + (done & 1))
                        if const_expr(self.row):
                            line, first = book[6] * row_b + book[5] * row_n, (r * GROUPS + s) * ROWS + w * 16 + g
                            load_key_bias(self, row.terms, args.row, line, first)
                        keys.consumer_wait(Slot(2 * s + (done & 1), done >> 1 & 1))
                        load_keys(self, operands, row, (buffer, 3 * s + 2), t4, inverse)
                        of_mask.fill(0.0)
                        j = begin
                        for t in cutlass.range(NT, unroll=1):
                            j = arch.make_warp_uniform(j)
                            at, buffer = arch.make_warp_uniform(at), arch.make_warp_uniform(buffer)
                            to = sdS[None, None, (2 * s + (at & 1)) * 4 + w]
                            queries.consumer_wait(Slot(j, ph))
                            warpgroup.fence()
                            scores(self, operands, 0, j)
                            warpgroup.commit_group()
                            warpgroup.wait_group(0)
                            if t == 0:
                                release(values_empty + s, lane)  # a product has used v: only then has it left shared memory
                            # ---- the first half of the tile's queries
                            P, dS = gradient(self, operands, scale, of_mask)
                            store_dscores(self, dS, to, 0, lane)
                            warpgroup.fence()
                            scores(self, operands, 1, j)
                            warpgroup.commit_group()
                            dkdv_products(self, operands, P, dS, 0, j, t > 0)
                            warpgroup.commit_group()
                            warpgroup.wait_group(1)
                            # ---- the second half, and dq of the tile
                            P, dS = gradient(self, operands, scale, of_mask)
                            store_dscores(self, dS, to, 1, lane)
                            arch.fence_proxy("async.shared", space="cta")
                            warpgroup.wait_group(0)
                            warpgroup.fence()
                            dkdv_products(self, operands, P, dS, 1, j, started=True)
                            arch.barrier(barrier_id=1 + s, number_of_threads=128)
                            dq_product(self, acc_dQ, tdQrS, tdQrK, 2 * s + (at & 1), buffer)
                            warpgroup.commit_group()
                            warpgroup.wait_group(0)
                            tile = sums[None, lane, None, w, j]
                            add_dq(self, acc_dQ, flags, s, j, NT, tile, rings, dq, book, w, scale, lane)
                            at += 1
                            j += 1
                            if j == NT:
                                j = Int32(0)
                        keys.consumer_release(2 * s + (book[2] & 1), lane)
                        # ---- dk and dv go through what the next tile's dS will overwrite, and nobody reads any more
                        h, n, b = book[4], book[5], book[6]
                        first = (book[3] * GROUPS + s) * ROWS + w * 16
                        if const_expr(self.mask_gradient):
                            store_mask_gradient(self, of_mask, dmask[b, n, h, None], first + g, t4)
                        room = cute.recast_ptr(sdS[None, None, (2 * s + (at & 1)) * 4 + w].iterator, dtype=self.dtype)
                        store_rows_direct(self, operands.acc_dK, scale, room, args.dk[b, n, h, None, None], first, lane)
                        store_rows_direct(self, operands.acc_dV, Float32(1.0), room, args.dv[b, n, h, None, None], first, lane)
                        if lane == 0:
                            book[2] = book[2] + 1
                    else:
                        # no keys are left for this warpgroup: it adds nothing, in its turn
                        j = begin
                        for _ in cutlass.range(NT, unroll=1):
                            queries.consumer_wait(Slot(j, ph))
                            tile = sums[None, lane, None, w, j]
                            add_dq(self, None, flags, s, j, NT, tile, rings, dq, book, w, scale, lane)
                            j += 1
                            if j == NT:
                                j = Int32(0)
                    arch.sync_warp()
                    if lane == 0:
                        book[3] = book[3] + 1
                        book[7] = book[7] + 1
                    arch.sync_warp()
                if lane == 0:
                    book[0] = book[0] + blocks
                    book[1] = book[1] + 1
                arch.sync_warp()

    def arguments(self) -> tuple[Any, ...]:
        B, N, H, LQ, LK = sizes(5)
        lengths = (LQ, LK, LK, LQ, LQ, LQ, LK, LK)
        q, k, v, o, do, dq, dk, dv = (lines(self.dtype, B, N, H, length, self.channels) for length in lengths)
        row, lse, dlse = lines(self.dtype, *sizes(2)), floats(B, N, H, LQ), floats(B, N, H, LQ)
        dmask = floats(B, N, H, LK) if self.mask_gradient else None
        ends = key_ends() if self.row else None
        return q, k, v, o, do, row, lse, dlse, dq, dk, dv, dmask, ends, Float32(0), Int32(0), Int32(0), Int32(0)


def dq_multiply(variant, accumulate: Any) -> Any:
    """The product for dq: both sides in shared memory, of the left one [q,k] the queries are contiguous."""
    source = warpgroup.OperandSource.SMEM
    operation = warpgroup.MmaF16BF16Op(variant.dtype, Float32, (QUERIES, 16 * variant.steps, 16), source, MN, MN)
    tiled = cute.make_tiled_mma(operation)
    tiled.set(warpgroup.Field.ACCUMULATE, accumulate)
    return tiled


def dq_product(variant, acc_dQ, tdQrS, tdQrK, left, right):
    """Issue dQ = dS K of a tile of queries and this warpgroup's keys."""
    for kk in range(ROWS // 16):
        op = dq_multiply(variant, kk > 0)
        cute.gemm(op, acc_dQ, tdQrS[None, None, kk, left], tdQrK[None, None, kk, right], acc_dQ)


def store_dscores(variant, dS, tile, u, lane):
    """dS^T of half a tile of queries, a warp's 16 keys, in shared memory"""
    stm = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), variant.dtype)
    for kk in range(2):
        to = cute.local_tile(tile, (1, 8), (lane % 16, 4 * u + 2 * kk + lane // 16))
        cute.copy(stm, cute.make_tensor(dS[kk].iterator, cute.make_layout(8)), to[0, None])


@cute.jit
def add_dq(
    variant, acc_dQ, flags: Int32, s: Int32, j: Int32, NT: Int32, tile, rings, dq: cute.Tensor, book, w: Int32, scale:
    Float32, lane: Int32,
):  # fmt: skip
    """Add to dq of tile j after the warpgroup before; the last one writes it. Then the tile's queries are given back."""
    before = Int32(cutlass.select_(s == 2, Int32(0), s + 1))
    # the third that the tile lies in, where this warpgroup begins and where it ends
    z = Int32(cutlass.select_(3 * j + 3 <= NT, Int32(0), cutlass.select_(3 * j + 3 <= 2 * NT, Int32(1), Int32(2))))
    own = Int32(cutlass.select_(z == s, Int32(1), Int32(0)))
    arch.mbarrier_wait(rings.added + before * variant.tiles + j, (flags ^ own) & 1)
    total = cute.make_rmem_tensor(4 * (16 * variant.steps // 8), Float32)
    if flags & FIRST == 0 or own == 0:
        for x in range_constexpr(16 * variant.steps // 8):
            cute.autovec_copy(tile[None, x], cute.make_tensor(total.iterator + 4 * x, cute.make_layout(4)))
    else:
        total.fill(0.0)
    if const_expr(acc_dQ is not None):
        for x in range_constexpr(cute.size(total)):
            total[x] = total[x] + acc_dQ[x]
    if flags & LAST != 0 and z == Int32(cutlass.select_(s == 0, Int32(2), s - 1)):
        arch.sync_warp()
        h, n, b = book[4], book[5], book[6]
        room = cute.recast_ptr(tile.iterator - lane * 4, dtype=variant.dtype)
        store_rows_direct(variant, total, scale, room, dq[b, n, h, None, None], j * QUERIES + w * 16, lane)
    else:
        for x in range_constexpr(16 * variant.steps // 8):
            cute.autovec_copy(cute.make_tensor(total.iterator + 4 * x, cute.make_layout(4)), tile[None, x])
    arch.sync_warp()
    release(rings.added + s * variant.tiles + j, lane)
    if flags & LAST != 0:
        rings.queries.consumer_release(j, lane)


@cute.jit
def store_rows_direct(variant, values, factor: Float32, room: cute.Pointer, to: cute.Tensor, first: Int32, lane: Int32):
    """A warp's 16 rows of an accumulator, times factor, to memory in 16 bytes a thread, by way of its own room"""
    stm = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), variant.dtype)
    pitch = 16 * variant.steps + 8
    for x in range_constexpr(16 * variant.steps // 16):
        short = cute.make_rmem_tensor(8, variant.dtype)
        for y in range_constexpr(8):
            short[y] = (values[8 * x + y] * factor).to(variant.dtype)
        at = (room + (lane % 16) * pitch + 16 * x + 8 * (lane // 16)).align(16)
        cute.copy(stm, short, cute.make_tensor(at, cute.make_layout(8)))
    arch.sync_warp()
    each = variant.channels // 8
    for x in range_constexpr(-(-16 * each // 32)):
        c = x * 32 + lane
        line, part = c // each, c % each
        if line < 16 and first + line < to.shape[0]:
            held = cute.make_rmem_tensor(8, variant.dtype)
            cute.autovec_copy(cute.make_tensor((room + line * pitch + 8 * part).align(16), cute.make_layout(8)), held)
            cute.autovec_copy(held, cute.local_tile(to[first + line, None], (8,), (part,)))
    arch.sync_warp()
