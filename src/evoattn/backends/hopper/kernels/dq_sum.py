"""Sums of `QueryGradients`: dq of a row over warpgroups and clusters, and d(pair bias) over blocks in a fixed order.

Each warpgroup writes its part of dq into shared memory and goes on to the next row. A warp that does nothing else sums the
parts and writes dq: warpgroups that sum in turn wait for one another at the end of every row. They do so if one warp takes
longer than a row (`query_sums`), and always in a cluster, where the sum of a row goes through all blocks before the next.
"""

from __future__ import annotations

import dataclasses
from collections import namedtuple
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Boolean, Float32, Int32, Int64, const_expr, cute, range_constexpr
from cutlass.cute import arch
from cutlass.cute.nvgpu import warpgroup

from evoattn.backends.hopper.launch import KernelVariant, Tensors
from evoattn.backends.hopper.lib.copies import store_accumulator
from evoattn.backends.hopper.lib.primitives import add_four, store_remote
from evoattn.backends.hopper.lib.ring import release, sleep_until
from evoattn.backends.hopper.lib.schedule import Span, change_of, first_row, place, share, stretch
from evoattn.backends.hopper.tiles import MMA_M, SLICE

ROW, ROWS_LEFT, TILES = range(3)
"""Columns of `sWork`, in which the producer tells the consumers of a row its n, how many rows of the panel follow, and its live
tiles of keys.
"""

NEG_LSE, NEG_DELTA, DLSE = range(3)
"""Columns of `sStats`, for each query of a row."""


class QuerySizes(namedtuple("QuerySizes", "n h panels lq")):
    """The sizes of a launch of `QueryGradients`: of n and h, the panels of 64 queries of a head, and the queries."""


class Sums(namedtuple("Sums", "sParts sInbox parts_full parts_empty inbox_full inbox_empty")):
    """The parts of dq of each warpgroup, and dq of the next block of the cluster; the barriers of each, as those of a ring."""


@cute.jit
def write_part(variant, acc_dQ, sums, wg: Int32, row_count: Int32, wg_tid: Int32):
    """Write this warpgroup's part of dq of row `row_count` at place `wg`, once those of the row before have been read."""
    if row_count > 0:
        arch.mbarrier_wait(sums.parts_empty, (row_count - 1) & 1)
    for x in range_constexpr(variant.channels // 8):
        cute.autovec_copy(quad(acc_dQ, x), sums.sParts[None, wg_tid, x, wg])


@cute.jit
def sum_rows(
    variant, sums, sdQ: cute.Tensor, copy_dQ, span: Span, sizes: QuerySizes, sWork: cute.Tensor, scale: Float32, lane: Int32
):
    """Sum and write dq of all rows of a block, always in the same order, by one warp."""
    N, H, NQ, _ = sizes
    row_count, unit = Int32(0), span.begin
    while unit < span.end:
        panel, p0, p1 = stretch(unit, span.end, N)
        unit += p1 - p0
        i, h, b = place(panel, NQ, H)
        more, rows_left = Boolean(True), p1 - p0
        while more:
            sleep_until(sums.parts_full, row_count & 1)
            n = sWork[row_count % 4, ROW]
            if const_expr(variant.skips):
                more = sWork[row_count % 4, ROWS_LEFT] > 0
            else:
                rows_left -= 1
                more = rows_left > 0
            arch.cp_async_bulk_wait_group(0, read=True)
            arch.sync_warp()
            for w in cutlass.range(4, unroll=1):
                for y in range_constexpr(variant.steps):
                    tile = cute.local_tile(sdQ[None, None, w], (16, 16), (0, y))
                    store_accumulator(
                        sum_parts(variant, sums.sParts, w * 32 + lane, y), (scale, scale), tile, lane, variant.dtype
                    )
            arch.sync_warp()
            release(sums.parts_empty, lane)
            arch.fence_proxy("async.shared", space="cta")
            arch.sync_warp()
            for w in range_constexpr(4):
                copy_dQ.store(w, (i * 4 + w, h, n, b))
            arch.cp_async_bulk_commit_group()
            row_count += 1
    arch.cp_async_bulk_wait_group(0)


def sum_parts(variant, parts: cute.Tensor, wg_tid: Any, y: int) -> cute.Tensor:
    """Channels 16 y to 16 y + 15 of dq, as thread `wg_tid` of a warpgroup holds them: 8 numbers, zero past the channels."""
    dq = cute.make_rmem_tensor(8, Float32)
    dq.fill(0.0)
    for x in range(min(2, variant.channels // 8 - 2 * y)):
        cute.autovec_copy(parts[None, wg_tid, 2 * y + x, 0], quad(dq, x))
        for wg in range(1, variant.groups):
            add_quad(dq, x, parts[None, wg_tid, 2 * y + x, wg])
    return dq


def quad(acc, x):
    """Four neighbours of an accumulator."""
    return cute.make_tensor(acc.iterator + 4 * x, cute.make_layout(4))


def add_quad(acc, x, others):
    """Four more numbers of dq."""
    other = cute.make_rmem_tensor(4, Float32)
    cute.autovec_copy(others, other)
    for z in range(4):
        acc[4 * x + z] = acc[4 * x + z] + other[z]


@cute.jit
def sum_in_turn(
    variant, acc_dQ, sums, rings, sdQ: cute.Tensor, copy_dQ, to, scale: Float32, wg: Int32, turn: Int32, row_count: Int32,
    more: Boolean, rank: Int32, thread,
):  # fmt: skip
    """Sum dq in one warpgroup, in turn: the parts of the others of its block, and that of the next block of the cluster."""
    WG, (tid, warp_idx, lane) = variant.groups, thread
    wg_tid = tid % 128
    if wg != turn:
        slot = wg - turn - 1
        if slot < 0:
            slot += WG
        write_part(variant, acc_dQ, sums, slot, row_count, wg_tid)
        release_queries(rings, more, lane)
        arch.barrier_arrive(barrier_id=1 + turn, number_of_threads=WG * 128)
    else:
        release_queries(rings, more, lane)
        arch.barrier(barrier_id=1 + turn, number_of_threads=WG * 128)
        for y in range_constexpr(WG - 1):
            for x in range_constexpr(variant.channels // 8):
                add_quad(acc_dQ, x, sums.sParts[None, wg_tid, x, y])
        arch.cp_async_bulk_wait_group(0, read=True)
        arch.sync_warp()
        release(sums.parts_empty, lane)
        if const_expr(variant.cluster > 1):
            if rank < variant.cluster - 1:
                receive_dq(variant, acc_dQ, sums, rank, row_count, wg_tid, lane)
            if rank > 0:
                send_dq(variant, acc_dQ, sums, rank, row_count, wg_tid)
        if rank == 0:
            store_accumulator(acc_dQ, (scale, scale), sdQ[None, None, warp_idx], lane, variant.dtype)
            arch.fence_proxy("async.shared", space="cta")
            arch.sync_warp()
            copy_dQ.store(warp_idx, to)
            arch.cp_async_bulk_commit_group()


@cute.jit
def receive_dq(variant, acc_dQ, sums, rank: Int32, row_count: Int32, wg_tid: Int32, lane: Int32):
    """Add dq of the next block of the cluster."""
    if wg_tid == 0:
        arch.mbarrier_arrive_and_expect_tx(sums.inbox_full, MMA_M * variant.channels * 4)
    arch.mbarrier_wait(sums.inbox_full, row_count & 1)
    for x in range_constexpr(variant.channels // 8):
        add_quad(acc_dQ, x, cute.make_tensor((sums.sInbox + (x * 128 + wg_tid) * 4).align(16), cute.make_layout(4)))
    arch.sync_warp()
    if lane == 0:
        arch.mbarrier_arrive(sums.inbox_empty, rank + 1)


@cute.jit
def send_dq(variant, acc_dQ, sums, rank: Int32, row_count: Int32, wg_tid: Int32):
    """Send dq to the block before, once it has read the row before."""
    if row_count > 0:
        arch.mbarrier_wait(sums.inbox_empty, (row_count - 1) & 1)
    to = arch.map_dsmem_ptr(sums.sInbox, rank - 1).toint()
    barrier = arch.map_dsmem_ptr(sums.inbox_full, rank - 1).toint()
    for x in range_constexpr(variant.channels // 8):
        store_remote(to + (x * 128 + wg_tid) * 16, [acc_dQ[4 * x + z] for z in range(4)], barrier)


def slice_key(variant, u, group=0):
    """The first key of slice u of a warpgroup in `QueryGradients`. For the first warpgroup it is the offset from slice 0.

    A warpgroup's keys lie side by side if `interleave` is 0. Else warpgroups take `interleave` slices each in turn.
    """
    groups, interleave = variant.cluster * variant.groups, variant.interleave
    if interleave:
        return ((u // interleave * groups + group) * interleave + u % interleave) * SLICE
    return (group * variant.slices + u) * SLICE


@cute.jit
def release_queries(rings, more: Boolean, lane: Int32):
    """Release the queries of the next row, if there is one, once its scores are there: only then has q been read."""
    warpgroup.wait_group(0)
    if more:
        rings.queries.consumer_release(0, lane)


@cute.jit
def add_pair_part(
    variant, acc_dPair, mSums: cute.Tensor, b: Int32, h: Int32, q0: Int32, first_key: Int32, LQ: Int32, LK: Int32, t4: Int32
):
    """Add this block's part of d(pair bias): two neighbours exchange halves, so that each adds four numbers of one query."""
    odd = t4 % 2 == 1
    q = q0 + 8 * (t4 % 2)
    line = mSums[b, h, cutlass.min(q, LQ - 1), None].iterator
    for u in range_constexpr(variant.slices):
        for x in range_constexpr(4):
            key = first_key + slice_key(variant, u) + 8 * x - 2 * (t4 % 2)
            a, e, f, k = (acc_dPair[4 * x + y, u] for y in range(4))
            first = arch.shuffle_sync_bfly(cutlass.select_(odd, a, f), 1)
            second = arch.shuffle_sync_bfly(cutlass.select_(odd, e, k), 1)
            if key < LK and q < LQ:
                add_four(
                    line + key,
                    cutlass.select_(odd, first, a),
                    cutlass.select_(odd, second, e),
                    cutlass.select_(odd, f, first),
                    cutlass.select_(odd, k, second),
                )


@cute.jit
def store_pair_part(variant, acc_dPair, mParts: cute.Tensor, slot: Int32, tid: Int32):
    """Write this block's part of d(pair bias) as it lies in the registers, for `PanelSum`."""
    for u in range_constexpr(variant.slices):
        for x in range_constexpr(4):
            four = cute.make_rmem_tensor(4, Float32)
            for y in range_constexpr(4):
                four[y] = acc_dPair[4 * x + y, u]
            cute.autovec_copy(four, mParts[slot, 4 * u + x, tid, None])


@dataclasses.dataclass(frozen=True)
class PanelSum(KernelVariant):
    """mParts [slot, fragment, thread, 4] -> mSums [b,h,q,k]. A block sums one fragment of a panel of 64 queries.

    n: rows of a (b, h); blocks: clusters that `QueryGradients` was launched with.
    """

    dtype: Any  # cutlass type of d(pair bias)
    _: dataclasses.KW_ONLY
    groups: int = 3  # as the variant of `QueryGradients` that left the parts
    slices: int = 4
    cluster: int = 1
    interleave: int = 0
    vector: bool = True  # whether rows of d(pair bias) start on 4 bytes
    timed: bool = True

    @cute.jit
    def __call__(self, args, stream: cuda.CUstream):
        B, H, LQ, _ = args.mSums.shape
        panels = B * H * ((LQ + MMA_M - 1) // MMA_M)
        self.kernel(args).launch(grid=(panels, 4 * self.slices, self.cluster), block=(self.groups * 128, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, args):
        mParts, mSums, n, blocks = args
        tid, _, _ = arch.thread_idx()
        panel, x, rank = arch.block_idx()
        B, H, LQ, LK = mSums.shape
        NQ = (LQ + MMA_M - 1) // MMA_M
        panels, change = Int64(B * H * NQ), Int32(0)
        each = Int32(share(panels * n, blocks))
        if const_expr(self.timed and self.cluster == 1):
            change = change_of(n, each)
            each = Int32(share(panels * (n + change), blocks))
        start = first_row(panel, n, change)
        first, last = start // each, (start + n - 1) // each
        sums = cute.make_rmem_tensor(4, Float32)
        sums.fill(0.0)
        for c in cutlass.range(first, last + 1):
            part = cute.make_rmem_tensor(4, Float32)
            cute.autovec_copy(mParts[(c + panel) * self.cluster + rank, x, tid, None], part)
            for y in range_constexpr(4):
                sums[y] = sums[y] + part[y]
        wg, wg_tid = tid // 128, tid % 128
        q = panel % NQ * MMA_M + wg_tid // 32 * 16 + wg_tid % 32 // 4
        k = slice_key(self, x // 4, rank * self.groups + wg) + x % 4 * 8 + wg_tid % 4 * 2
        for r in range_constexpr(2):
            if q + 8 * r < LQ and k < LK:
                line = mSums[panel // NQ // H, panel // NQ % H, q + 8 * r, None]
                if const_expr(self.vector):
                    two = cute.make_rmem_tensor(2, self.dtype)
                    two[0], two[1] = sums[2 * r].to(self.dtype), sums[2 * r + 1].to(self.dtype)
                    cute.autovec_copy(two, cute.local_tile(line, (2,), (k // 2,)))
                else:
                    line[k] = sums[2 * r].to(self.dtype)
                    if k + 1 < LK:
                        line[k + 1] = sums[2 * r + 1].to(self.dtype)

    def arguments(self) -> dict[str, Any]:
        t = Tensors()
        parts = t.floats("?", self.slices * 4, self.groups * 128, 4, align=16)
        return {"mParts": parts, "mSums": t.pair_bias(self.dtype, vector=self.vector), "n": Int32(0), "blocks": Int32(0)}
