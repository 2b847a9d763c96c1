"""A consumer warpgroup of `QueryGradients`.

It owns a part of the keys of each panel of 64 queries of its block. It loops over the rows n of a panel and its slices of keys.
It writes its part of dq of each row (`dq_sum`), and at the end of a panel its part of d(pair bias).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import namedtuple
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, const_expr, cute, range_constexpr
from cutlass.cute import arch
from cutlass.cute.nvgpu import OperandMajorMode, warp, warpgroup

from evoattn.backends.hopper.kernels import dq_sum
from evoattn.backends.hopper.kernels.dq_sum import DLSE, NEG_DELTA, NEG_LSE, ROW, ROWS_LEFT, TILES, QuerySizes, slice_key
from evoattn.backends.hopper.kernels.key_bias import TERMS
from evoattn.backends.hopper.lib.primitives import (
    MASKED,
    exp2,
    fill_coefficients,
    fma,
    hide,
    make_finite,
    make_wgmma,
    mma_m16n8k16,
    narrow,
    pack_words,
)
from evoattn.backends.hopper.lib.ring import Ring, Slot, release
from evoattn.backends.hopper.lib.schedule import Span, place, stretch
from evoattn.backends.hopper.tiles import MMA_M, SLICE, pad_channels
from evoattn.core.numerics import LOG2E

K, MN = OperandMajorMode.K, OperandMajorMode.MN


@dataclasses.dataclass(frozen=True)
class QueryRings:
    """The rings of keys (with values and key bias), of each warpgroup, and of q, o and dO, one row at a time."""

    keys: Ring
    queries: Ring

    def at(self, first: Any, stages: int) -> QueryRings:
        """The rings of the warpgroup whose first stage has this number."""
        return dataclasses.replace(self, keys=self.keys.at(first, stages))


class QueryOperands(
    namedtuple("QueryOperands", "acc_S acc_dP acc_dQ acc_dPair tSrQ tdPsdO tSrAlpha tSrK tdPrV tdQrK tSrTerms tSsPair")
):
    """Accumulators of S, dP, dQ and d(pair bias), and the operands of the products as fragments of a thread.

    tSrQ, tSrK; tdPsdO, tdPrV; tdQrK: of Q K^T, dO V^T and dS K. tSrAlpha, tSrTerms: coefficients and terms of the key bias.
    tSsPair: this thread's part of the pair bias in shared memory, as the accumulators hold it.
    """


class QueryRow(namedtuple("QueryRow", "copy source tSrQ rdO rO rNegLSE rNegDelta sStats")):
    """The copy of a row's q, dO and o into registers, these registers, and the statistics of a thread's two queries.

    rNegLSE, rNegDelta: -LSE in units of log 2, and -delta. sStats: the numbers of all queries.
    """


def live_tiles(variant, tiles, rank, wg):
    """The number of tiles that warpgroup `wg` goes through in a row with `tiles` tiles up to the last key that counts."""
    around = variant.cluster * variant.groups
    own = (tiles - rank * variant.groups - wg + around - 1) // around
    ends = (*variant.exits, variant.tiles)
    return ends[0] + sum(cutlass.min(cutlass.max(own - x, 0), 1) * (y - x) for x, y in itertools.pairwise(ends))


@cute.jit
def load_queries(variant, row, buffer: Int32, thread):
    """Load q and dO of 64 queries into registers, -LSE in powers of two, and -delta."""
    _, warp_idx, lane = thread
    copy, source, tSrQ, rdO, rO, rNegLSE, rNegDelta, sStats = row
    for x, to in ((0, tSrQ), (2 + buffer, rdO)) if variant.gate else ((0, tSrQ), (1, rO), (2 + buffer, rdO)):
        cute.copy(copy, source[None, None, None, x], copy.retile(to))
    delta = (Float32(0.0), Float32(0.0)) if variant.gate else row_products(variant.dtype, rO, rdO, lane)
    for x in range_constexpr(2):
        q = warp_idx % 4 * 16 + lane // 4 + 8 * x
        rNegLSE[x] = sStats[q, NEG_LSE]
        rNegDelta[x] = -delta[x]
        if const_expr(variant.dlse):
            rNegDelta[x] = rNegDelta[x] + sStats[q, DLSE]
        if warp_idx < 4 and lane % 4 == 0:
            sStats[q, NEG_DELTA] = rNegDelta[x]


def load_pair_bias(variant, tSsPair, mPair, b, h, q0, first_key, LQ, LK, inverse):
    """Load this thread's part of the pair bias, as the accumulators of the scores hold it."""
    lines = [mPair[b, h, cutlass.min(q0 + 8 * r, LQ - 1), None] for r in range(2)]
    for u in range(variant.slices):
        rPair = cute.make_rmem_tensor((4, 4), variant.bias)
        for x in range(4):
            for r in range(2):
                key = first_key + slice_key(variant, u) + 8 * x
                if variant.vector:
                    two = cute.local_tile(lines[r], (2,), (cutlass.min(key, (LK - 1) // 2 * 2) // 2,))
                    cute.autovec_copy(two, cute.make_tensor(rPair.iterator + 4 * x + 2 * r, cute.make_layout(2)))
                else:
                    for y in range(2):
                        rPair[2 * r + y, x] = lines[r][cutlass.min(key + y, LK - 1)]
        for x in range(4):
            values = cute.make_rmem_tensor(4, Float32)
            for y in range(4):
                bias = make_finite(rPair[y, x].to(Float32)) * inverse
                values[y] = cutlass.select_(first_key + slice_key(variant, u) + 8 * x + y % 2 < LK, bias, Float32(MASKED))
            cute.autovec_copy(values, tSsPair[None, 4 * u + x])


def load_bias(variant, operands, u, dS=None, LQ=None, next_tile=None):
    """Start the accumulators from the pair bias of slice u, or of slice 0 if `next_tile` is given and false.

    dS: of the slice before, a false dependency of the address (LQ >> 31 is 0). It keeps ptxas from loading before dS is
    computed, which saves 16 registers and 6% of the time.
    """
    if not variant.pair:
        return
    tSsPair = operands.tSsPair
    if dS is not None:
        tSsPair = cute.make_tensor(tSsPair.iterator + (pack_words(dS[1])[3] & (LQ >> 31)) * 4, tSsPair.layout)
    if next_tile is not None:
        offset = cutlass.select_(next_tile, Int32(u * 2048), Int32(0))
        tSsPair, u = cute.make_tensor(tSsPair.iterator + offset, tSsPair.layout), 0
    for x in range(4):
        four = cute.make_tensor(operands.acc_S.iterator + 4 * x, cute.make_layout(4))
        cute.autovec_copy(tSsPair[None, 4 * u + x], four)


def issue_scores(variant, operands, buffer, part, ring, stage):
    """Issue S and dP of slice `part` of a stage of a ring; with a pair bias acc_S starts from it."""
    acc_S, acc_dP, _, _, tSrQ, tdPsdO, tSrAlpha, tSrK, tdPrV, _, tSrTerms, _ = operands
    tdPsdO, stage = tdPsdO[None, None, None, 2 + buffer], ring.index(stage)
    # S = Q K^T + pair bias
    for step in range(variant.steps):
        op = make_wgmma(variant.dtype, False, K, SLICE, step > 0 or variant.pair)
        cute.gemm(op, acc_S, tSrQ[None, None, step], tSrK[None, None, step, part, stage], acc_S)
    # S += key bias
    if variant.key_bias:
        op = make_wgmma(variant.dtype, False, K, SLICE)
        cute.gemm(op, acc_S, tSrAlpha[None, None, 0], tSrTerms[None, None, 0, (part, stage)], acc_S)
    # dP = dO V^T
    for step in range(variant.steps):
        op = make_wgmma(variant.dtype, True, K, SLICE, step > 0)
        cute.gemm(op, acc_dP, tdPsdO[None, None, step], tdPrV[None, None, step, part, stage], acc_dP)


def issue_dq(variant, operands, dS, u, stage):
    """Issue dQ of slice u."""
    # dQ += dS K
    for step in range(2):
        op = make_wgmma(variant.dtype, False, MN, 16 * variant.steps, u > 0 or step > 0)
        right = operands.tdQrK[None, None, (u % variant.stage_slices) * 2 + step, stage]
        cute.gemm(op, operands.acc_dQ, dS[step][None, None, 0], right, operands.acc_dQ)


def compute_dscores(variant, operands, row, c, u):
    """dS of slice u, in the dtype of a product's left side; its sum over rows n stays in float32."""
    acc_S, acc_dP, _, acc_dPair, *_ = operands
    mma_dQ = make_wgmma(variant.dtype, False, MN, 16 * variant.steps)
    p = cute.make_rmem_tensor(16, Float32)
    for y in range(16):
        p[y] = exp2(fma(acc_S[y], c, row.rNegLSE[y // 2 % 2]))
    operand = []
    for step in range(2):
        d = cute.make_rmem_tensor(8, Float32)
        for y in range(8):
            z = 8 * step + y
            d[y] = p[z] * (acc_dP[z] + row.rNegDelta[y // 2 % 2])
            if variant.bias_gradient:
                acc_dPair[z, u] = acc_dPair[z, u] + d[y]
        a = mma_dQ.make_fragment_A(mma_dQ.partition_shape_A((MMA_M, 16)))
        cute.make_tensor(a.iterator, cute.make_layout(8)).store(d.load().to(variant.dtype))
        operand.append(a)
    return operand


@cute.jit
def do_row(
    variant, j: cutlass.Constexpr, tiles: Int32, more: Boolean, operands, row, rings, c: Float32, slot, query_phase: Int32,
    LQ: Int32, thread,
):  # fmt: skip
    """Do a row's tiles of keys from j on, up to the last of `tiles`; then the next row's first scores are on their way.

    It calls itself for the next tile: recursion unrolls the tiles when the kernel is compiled. Returns the slot of keys and the
    phase of queries to come.
    """
    SL, last, lane = variant.stage_slices, (j + 1) * variant.stage_slices - 1, thread[2]
    for u in range_constexpr(j * SL, last):
        dS = compute_dscores(variant, operands, row, c, u)
        buffer = arch.make_warp_uniform(query_phase ^ 1)
        load_bias(variant, operands, u + 1, dS, LQ)
        issue_products(variant, operands, dS, u, (u + 1) % SL, buffer, rings.keys, slot.stage, slot.stage)
        warpgroup.wait_group(0)
    dS = compute_dscores(variant, operands, row, c, last)
    old_stage, slot = slot.stage, rings.keys.advance(slot)
    if const_expr(j + 1 == variant.tiles):
        if more:
            query_phase = next_queries(variant, row, rings, query_phase, thread)
            rings.keys.consumer_wait(slot)
        buffer = arch.make_warp_uniform(query_phase ^ 1)
        load_bias(variant, operands, 0, dS, LQ)
        issue_products(variant, operands, dS, last, 0, buffer, rings.keys, old_stage, slot.stage, two_groups=True)
        warpgroup.wait_group(1)
        rings.keys.consumer_release(old_stage, lane)
    elif const_expr(j + 1 not in variant.exits):
        rings.keys.consumer_wait(slot)
        buffer = arch.make_warp_uniform(query_phase ^ 1)
        load_bias(variant, operands, last + 1, dS, LQ)
        issue_products(variant, operands, dS, last, 0, buffer, rings.keys, old_stage, slot.stage)
        warpgroup.wait_group(0)
        rings.keys.consumer_release(old_stage, lane)
        slot, query_phase = do_row(variant, j + 1, tiles, more, operands, row, rings, c, slot, query_phase, LQ, thread)
    else:  # the row may end here: what follows is its next tile, or the first of the next row
        row_ends = tiles == j + 1
        if row_ends and more:
            query_phase = next_queries(variant, row, rings, query_phase, thread)
        if more or not row_ends:
            rings.keys.consumer_wait(slot)
        buffer = arch.make_warp_uniform(query_phase ^ 1)
        load_bias(variant, operands, last + 1, dS, LQ, next_tile=not row_ends)
        issue_products(variant, operands, dS, last, 0, buffer, rings.keys, old_stage, slot.stage, two_groups=True)
        warpgroup.wait_group(1)
        rings.keys.consumer_release(old_stage, lane)
        if not row_ends:
            warpgroup.wait_group(0)
            slot, query_phase = do_row(variant, j + 1, tiles, more, operands, row, rings, c, slot, query_phase, LQ, thread)
    return slot, query_phase


def issue_products(variant, operands, dS, u, part, buffer, ring, old_stage, stage, *, two_groups=False):
    """Issue dQ += dS K of slice u, in stage `old_stage`, and the scores of slice `part` of a stage.

    two_groups: commit the two as wgmma groups of their own, so that dQ can be waited for alone.
    """
    warpgroup.fence()
    issue_dq(variant, operands, dS, u, ring.index(old_stage))
    if two_groups:
        warpgroup.commit_group()
    issue_scores(variant, operands, buffer, part, ring, stage)
    warpgroup.commit_group()


@cute.jit
def next_queries(variant, row, rings, query_phase: Int32, thread):
    """Load the queries of the next row, once they are there; returns the phase of those to come."""
    rings.queries.consumer_wait(Slot(0, query_phase))
    load_queries(variant, row, query_phase, thread)
    arch.sync_warp()
    return query_phase ^ 1


def make_fragments(variant, shared, inverse, wg_tid, t4):
    """The operands of the products, and what of a `QueryRow` copies a row into registers."""
    sQ, sK, sV, sKt, sTerms, *_ = shared
    slice_tile = (SLICE, pad_channels(variant.channels))
    mma_S, mma_dQ = make_wgmma(variant.dtype, False, K, SLICE), make_wgmma(variant.dtype, False, MN, 16 * variant.steps)
    mma_dP = make_wgmma(variant.dtype, True, K, SLICE)
    thr_S = mma_S.get_slice(wg_tid)
    tSrK = mma_S.make_fragment_B(thr_S.partition_B(cute.local_tile(sK, slice_tile, (None, 0, None))))
    tdPsdO = mma_dP.make_fragment_A(mma_dP.get_slice(wg_tid).partition_A(sQ))
    tdPrV = mma_S.make_fragment_B(thr_S.partition_B(cute.local_tile(sV, slice_tile, (None, 0, None))))
    tdQrK = mma_dQ.make_fragment_B(mma_dQ.get_slice(wg_tid).partition_B(narrow(sKt, 16 * variant.steps)))
    tSrTerms = None
    if variant.key_bias:
        # a key's terms fill 8 of 16 channels; the other 8 read the same numbers again and meet zeros
        shape = ((8, 4), (8, 2), (variant.stage_slices, variant.groups * variant.stages))
        stride = ((TERMS, 8 * TERMS), (1, 0), (SLICE * TERMS, variant.keys * TERMS))
        tSrTerms = mma_S.make_fragment_B(thr_S.partition_B(cute.make_tensor(sTerms, cute.make_layout(shape, stride=stride))))
    acc_S, acc_dP = (mma_S.make_fragment_C(mma_S.partition_shape_C((MMA_M, SLICE))) for _ in range(2))
    acc_dQ = mma_dQ.make_fragment_C(mma_dQ.partition_shape_C((MMA_M, 16 * variant.steps)))
    tSrQ, rdO, rO = (mma_S.make_fragment_A(mma_S.partition_shape_A((MMA_M, pad_channels(variant.channels)))) for _ in range(3))
    tSrAlpha = mma_S.make_fragment_A(mma_S.partition_shape_A((MMA_M, 16)))
    fill_coefficients(tSrAlpha, inverse, t4, variant.dtype)
    # a zero that the compiler cannot see through: a shared known zero costs 3 instructions a slice in another product
    words = pack_words(tSrAlpha)
    words[2] = words[3] = hide(Int32(0))
    ldmatrix = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), variant.dtype)
    loads = cute.make_tiled_copy_A(ldmatrix, mma_S).get_slice(wg_tid)
    acc_dPair = cute.make_rmem_tensor((16, variant.slices if variant.bias_gradient else 1), Float32)
    operands = QueryOperands(acc_S, acc_dP, acc_dQ, acc_dPair, tSrQ, tdPsdO, tSrAlpha, tSrK, tdPrV, tdQrK, tSrTerms, None)
    return operands, (loads, loads.partition_S(sQ), tSrQ, rdO, rO)


def row_products(dtype: Any, x: Any, y: Any, lane: Any) -> Any:
    """Return sum_d x * y of this thread's rows g and g + 8: the diagonal of x y^T.

    x and y are A fragments [rows, k] of the same 16 rows a warp; 4 small products instead of 60 instructions."""
    xs, ys = pack_words(x), pack_words(y)
    low = high = [Float32(0.0)] * 4
    for k in range(cute.size(xs) // 4):
        a = [xs[4 * k + i] for i in range(4)]
        low = mma_m16n8k16(dtype, low, a, [ys[4 * k], ys[4 * k + 2]])
        high = mma_m16n8k16(dtype, high, a, [ys[4 * k + 1], ys[4 * k + 3]])
    odd = (lane & 4) != 0
    source = (lane & 28) | (lane >> 3)
    first = cutlass.select_(odd, low[1], low[0])
    second = cutlass.select_(odd, high[3], high[2])
    return arch.shuffle_sync(first, source), arch.shuffle_sync(second, source)


def sync_cluster(variant):
    """Synchronize all threads of the cluster."""
    if variant.cluster > 1:
        arch.cluster_arrive()
        arch.cluster_wait()
    else:
        arch.sync_threads()


class QueryShared(namedtuple("QueryShared", "sQ sK sV sKt sTerms sdQ stats sPair")):
    """Shared memory: q with o and dO, k, v, k transposed, terms of the key bias, dq, statistics, and the pair bias."""


@cute.jit
def consume(
    variant, args, span: Span, sizes: QuerySizes, shared, sStats: cute.Tensor, rings, sums, sWork: cute.Tensor, copy_dQ,
    inverse: Float32, rank: Int32, LK: Int32, thread,
):  # fmt: skip
    """Do the rows of a block with this warpgroup's keys, panel after panel.

    More than 60 lines: a part of a loop in a function of its own changes what the compiler carries through the loop.
    """
    ST, WG, (N, H, NQ, LQ), (tid, warp_idx, lane) = variant.stages, variant.groups, sizes, thread
    mPair, mSums = args.mPair, args.mSums
    wg, wg_warp, wg_tid = warp_idx // 4, warp_idx % 4, tid % 128
    g, t4 = lane // 4, lane % 4
    operands, (copy, source, tSrQ, rdO, rO) = make_fragments(variant, shared, inverse, wg_tid, t4)
    rNegLSE, rNegDelta = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
    row = QueryRow(copy, source, tSrQ, rdO, rO, rNegLSE, rNegDelta, sStats)
    slot, query_phase, row_count, turn, unit = rings.keys.start(), Int32(0), Int32(0), Int32(0), span.begin
    tSsPair = shared.sPair[None, wg_tid, None, wg] if const_expr(variant.pair) else None
    operands = operands._replace(tSsPair=tSsPair)
    first_key = slice_key(variant, 0, rank * WG + wg) + 2 * t4
    while unit < span.end:
        panel, p0, p1 = stretch(unit, span.end, N)
        unit += p1 - p0
        i, h, b = place(panel, NQ, H)
        q0 = i * MMA_M + wg_warp * 16 + g
        if const_expr(variant.pair):
            load_pair_bias(
                variant, operands.tSsPair, mPair, b % mPair.shape[0], h % mPair.shape[1], q0, first_key, LQ, LK, inverse
            )
        if const_expr(variant.bias_gradient):
            operands.acc_dPair.fill(0.0)
        own_rings = rings.at(wg * ST, ST)
        query_phase = next_queries(variant, row, rings, query_phase, thread)
        own_rings.keys.consumer_wait(slot)
        load_bias(variant, operands, 0)
        warpgroup.fence()
        issue_scores(variant, operands, query_phase ^ 1, 0, own_rings.keys, slot.stage)
        warpgroup.commit_group()
        warpgroup.wait_group(0)
        rings.queries.consumer_release(0, lane)  # a product has used q: only then has it left shared memory
        more, rows_left = Boolean(True), p1 - p0
        while more:
            if const_expr(variant.skips):
                more = sWork[row_count % 4, ROWS_LEFT] > 0
            else:
                rows_left -= 1
                more = rows_left > 0
            own_rings = rings.at(arch.make_warp_uniform(wg * ST), ST)
            slot = Slot(arch.make_warp_uniform(slot.stage), slot.phase)
            tiles = Int32(variant.tiles)
            if const_expr(len(variant.exits) > 0):
                tiles = arch.make_warp_uniform(live_tiles(variant, sWork[row_count % 4, TILES], rank, wg))
            c = args.scale * LOG2E
            slot, query_phase = do_row(variant, 0, tiles, more, operands, row, own_rings, c, slot, query_phase, LQ, thread)
            if const_expr(variant.warp_sums_dq):
                dq_sum.write_part(variant, operands.acc_dQ, sums, wg, row_count, wg_tid)
                dq_sum.release_queries(rings, more, lane)
                arch.sync_warp()
                release(sums.parts_full, lane)
            else:
                to, acc_dQ = (i * 4 + wg_warp, h, sWork[row_count % 4, ROW], b), operands.acc_dQ
                dq_sum.sum_in_turn(
                    variant, acc_dQ, sums, rings, shared.sdQ, copy_dQ, to, args.scale, wg, turn, row_count, more, rank, thread
                )
                turn += 1
                if turn == WG:
                    turn = Int32(0)
            row_count += 1
        if const_expr(variant.bias_gradient):
            if const_expr(variant.partial):
                part = (span.block + panel) * variant.cluster + rank
                dq_sum.store_pair_part(variant, operands.acc_dPair, args.mParts, part, tid)
            else:
                pair_b, pair_h = b % mSums.shape[0], h % mSums.shape[1]
                dq_sum.add_pair_part(variant, operands.acc_dPair, mSums, pair_b, pair_h, q0, first_key, LQ, LK, t4)
    if const_expr(not variant.warp_sums_dq):
        arch.cp_async_bulk_wait_group(0)
