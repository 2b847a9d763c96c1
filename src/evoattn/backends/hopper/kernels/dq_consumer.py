"""A consumer warpgroup of `QueryGradients`: 64 queries and its keys, slice by slice, row after row."""

from __future__ import annotations

import dataclasses
import itertools
from collections import namedtuple
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, const_expr, cute, range_constexpr
from cutlass.cute import arch
from cutlass.cute.nvgpu import OperandMajorMode, warp, warpgroup

from evoattn.backends.hopper.kernels.dq_sum import add_part, leave_dq, release_queries, slice_key, store_part, sum_in_turn
from evoattn.backends.hopper.kernels.key_bias import TERMS
from evoattn.backends.hopper.lib.primitives import (
    MASKED,
    coefficients,
    exp2,
    finite,
    fma,
    mma_m16n8k16,
    multiply,
    narrow,
    packed,
    unseen,
)
from evoattn.backends.hopper.lib.ring import Ring, Slot, release
from evoattn.backends.hopper.lib.schedule import place, stretch
from evoattn.backends.hopper.tiles import ROWS, SLICE, padded
from evoattn.core.numerics import LOG2E

K, MN = OperandMajorMode.K, OperandMajorMode.MN


@dataclasses.dataclass(frozen=True)
class QueryRings:
    """The rings of keys (with values and key-wise bias), of each warpgroup, and of q, o and dO, one row at a time."""

    keys: Ring
    queries: Ring

    def at(self, first: Any, stages: int) -> QueryRings:
        """The rings of the warpgroup whose first stage has this number."""
        return dataclasses.replace(self, keys=self.keys.at(first, stages))


class QueryOperands(namedtuple("QueryOperands", "acc_S acc_dP acc_dQ tSrQ tdPsdO tSrA tSrK tdPrV tdQrK tSrB")):
    """Accumulators of S, dP and dQ, and the operands of their products as fragments of a thread.

    tSrQ, tSrK; tdPsdO, tdPrV; tdQrK: of Q K^T, dO V^T and dS K. tSrA, tSrB: coefficients and terms of the key-wise bias.
    """


class QueryRow(namedtuple("QueryRow", "copy source tSrQ rdO rO neg_lse neg_delta sN")):
    """The copy of a row's q, dO and o into registers, these registers, and the statistics of a thread's two queries.

    neg_lse, neg_delta: -LSE in powers of two, and -delta. sN: -LSE, -delta and dLSE of all queries, in shared memory.
    """


def live_tiles(variant, tiles, rank, s):
    """The number of tiles that warpgroup s goes through in a row with `tiles` tiles up to the last key that counts."""
    around = variant.cluster * variant.groups
    own = (tiles - rank * variant.groups - s + around - 1) // around
    ends = (*variant.exits, variant.tiles)
    return ends[0] + sum(cutlass.min(cutlass.max(own - x, 0), 1) * (y - x) for x, y in itertools.pairwise(ends))


@cute.jit
def load_queries(variant, row, buffer: Int32, wid: Int32, lane: Int32):
    """Load q and dO of 64 queries into registers, -LSE in powers of two, and -delta."""
    ldm, rows, tSrQ, rdO, rO, nl, nd, sN = row
    for x, to in ((0, tSrQ), (2 + buffer, rdO)) if variant.gate else ((0, tSrQ), (1, rO), (2 + buffer, rdO)):
        cute.copy(ldm, rows[None, None, None, x], ldm.retile(to))
    delta = (Float32(0.0), Float32(0.0)) if variant.gate else row_products(variant.dtype, rO, rdO, lane)
    for x in range_constexpr(2):
        q = wid % 4 * 16 + lane // 4 + 8 * x
        nl[x] = sN[q, 0]
        nd[x] = -delta[x]
        if const_expr(variant.dlse):
            nd[x] = nd[x] + sN[q, 2]
        if wid < 4 and lane % 4 == 0:
            sN[q, 1] = nd[x]


def load_pair_bias(variant, mine, pair, b, h, q0, first_key, LQ, LK, inverse):
    """Load this thread's part of the pair bias, as the accumulators of the scores hold it."""
    lines = [pair[b, h, cutlass.min(q0 + 8 * r, LQ - 1), None] for r in range(2)]
    for u in range(variant.slices):
        held = cute.make_rmem_tensor((4, 4), variant.bias)
        for x in range(4):
            for r in range(2):
                key = first_key + slice_key(variant, u) + 8 * x
                if variant.vector:
                    two = cute.local_tile(lines[r], (2,), (cutlass.min(key, (LK - 1) // 2 * 2) // 2,))
                    cute.autovec_copy(two, cute.make_tensor(held.iterator + 4 * x + 2 * r, cute.make_layout(2)))
                else:
                    for y in range(2):
                        held[2 * r + y, x] = lines[r][cutlass.min(key + y, LK - 1)]
        for x in range(4):
            values = cute.make_rmem_tensor(4, Float32)
            for y in range(4):
                bias = finite(held[y, x].to(Float32)) * inverse
                values[y] = cutlass.select_(first_key + slice_key(variant, u) + 8 * x + y % 2 < LK, bias, Float32(MASKED))
            cute.autovec_copy(values, mine[None, 4 * u + x])


def delayed(variant, mine, dS, LQ):
    """The same panel, which the compiler cannot read before dS is made: 16 registers less, 6% of the time."""
    if not variant.pair:
        return mine
    return cute.make_tensor(mine.iterator + (packed(dS[1])[3] & (LQ >> 31)) * 4, mine.layout)


def load_bias(variant, S, mine, u, some=None):
    """Start the accumulators from the pair bias of slice u, or of slice 0 if `some` is given and false."""
    if variant.pair:
        if some is not None:
            mine, u = cute.make_tensor(mine.iterator + cutlass.select_(some, Int32(u * 2048), Int32(0)), mine.layout), 0
        for x in range(4):
            cute.autovec_copy(mine[None, 4 * u + x], cute.make_tensor(S.iterator + 4 * x, cute.make_layout(4)))


def scores(variant, operands, buffer, part, ring, stage):
    """Issue S = Q K^T + biases and dP = dO V^T of slice `part` of a stage of a ring."""
    acc_S, acc_dP, _, tSrQ, tdPsdO, tSrA, tSrK, tdPrV, _, tSrB = operands
    tdPsdO, stage = tdPsdO[None, None, None, 2 + buffer], ring.index(stage)
    for kk in range(variant.steps):
        op = multiply(variant.dtype, False, K, SLICE, kk > 0 or variant.pair)
        cute.gemm(op, acc_S, tSrQ[None, None, kk], tSrK[None, None, kk, part, stage], acc_S)
    if variant.row:
        op = multiply(variant.dtype, False, K, SLICE)
        cute.gemm(op, acc_S, tSrA[None, None, 0], tSrB[None, None, 0, (part, stage)], acc_S)
    for kk in range(variant.steps):
        op = multiply(variant.dtype, True, K, SLICE, kk > 0)
        cute.gemm(op, acc_dP, tdPsdO[None, None, kk], tdPrV[None, None, kk, part, stage], acc_dP)


def dq_product(variant, operands, dS, u, stage):
    """Issue dQ += dS K of slice u."""
    acc_dQ, tdQrK = operands.acc_dQ, operands.tdQrK
    for kk in range(2):
        op = multiply(variant.dtype, False, MN, 16 * variant.steps, u > 0 or kk > 0)
        cute.gemm(op, acc_dQ, dS[kk][None, None, 0], tdQrK[None, None, (u % variant.stage) * 2 + kk, stage], acc_dQ)


def gradient(variant, operands, row, c, db, u):
    """dS of slice u, in the dtype of a product's left side; its sum over rows n stays in float32."""
    S, T, nl, nd = operands.acc_S, operands.acc_dP, row.neg_lse, row.neg_delta
    P_D = multiply(variant.dtype, False, MN, 16 * variant.steps)
    p = cute.make_rmem_tensor(16, Float32)
    for y in range(16):
        p[y] = exp2(fma(S[y], c, nl[y // 2 % 2]))
    out = []
    for kk in range(2):
        d = cute.make_rmem_tensor(8, Float32)
        for y in range(8):
            z = 8 * kk + y
            d[y] = p[z] * (T[z] + nd[y // 2 % 2])
            if variant.bias_gradient:
                db[z, u] = db[z, u] + d[y]
        a = P_D.make_fragment_A(P_D.partition_shape_A((ROWS, 16)))
        cute.make_tensor(a.iterator, cute.make_layout(8)).store(d.load().to(variant.dtype))
        out.append(a)
    return out


@cute.jit
def row_tiles(
    variant, j: cutlass.Constexpr, tiles: Int32, more: Boolean, operands, row, db: cute.Tensor, mine: Any, rings, c: Float32,
    slot, qp: Int32, LQ: Int32, wid: Int32, lane: Int32,
):  # fmt: skip
    """Do a row's tiles of keys from j on, up to the last of `tiles`; then the next row's first scores are on their way.

    Returns the slot of keys and the phase of queries to come.
    """
    SL, last = variant.stage, (j + 1) * variant.stage - 1
    for u in range_constexpr(j * SL, last):
        dS = gradient(variant, operands, row, c, db, u)
        buffer = arch.make_warp_uniform(qp ^ 1)
        load_bias(variant, operands.acc_S, delayed(variant, mine, dS, LQ), u + 1)
        issue_products(variant, operands, dS, u, (u + 1) % SL, buffer, rings.keys, slot.stage, slot.stage)
        warpgroup.wait_group(0)
    dS = gradient(variant, operands, row, c, db, last)
    old, slot = slot.stage, rings.keys.advance(slot)
    if const_expr(j + 1 == variant.tiles):
        if more:
            qp = next_queries(variant, row, rings, qp, wid, lane)
            rings.keys.consumer_wait(slot)
        buffer = arch.make_warp_uniform(qp ^ 1)
        load_bias(variant, operands.acc_S, delayed(variant, mine, dS, LQ), 0)
        issue_products(variant, operands, dS, last, 0, buffer, rings.keys, old, slot.stage, two_groups=True)
        warpgroup.wait_group(1)
        rings.keys.consumer_release(old, lane)
    elif const_expr(j + 1 not in variant.exits):
        rings.keys.consumer_wait(slot)
        buffer = arch.make_warp_uniform(qp ^ 1)
        load_bias(variant, operands.acc_S, delayed(variant, mine, dS, LQ), last + 1)
        issue_products(variant, operands, dS, last, 0, buffer, rings.keys, old, slot.stage)
        warpgroup.wait_group(0)
        rings.keys.consumer_release(old, lane)
        slot, qp = row_tiles(variant, j + 1, tiles, more, operands, row, db, mine, rings, c, slot, qp, LQ, wid, lane)
    else:  # the row may end here: what follows is its next tile, or the first of the next row
        over = tiles == j + 1
        if over and more:
            qp = next_queries(variant, row, rings, qp, wid, lane)
        if more or not over:
            rings.keys.consumer_wait(slot)
        buffer = arch.make_warp_uniform(qp ^ 1)
        load_bias(variant, operands.acc_S, delayed(variant, mine, dS, LQ), last + 1, not over)
        issue_products(variant, operands, dS, last, 0, buffer, rings.keys, old, slot.stage, two_groups=True)
        warpgroup.wait_group(1)
        rings.keys.consumer_release(old, lane)
        if not over:
            warpgroup.wait_group(0)
            slot, qp = row_tiles(variant, j + 1, tiles, more, operands, row, db, mine, rings, c, slot, qp, LQ, wid, lane)
    return slot, qp


def issue_products(variant, operands, dS, u, part, buffer, ring, old, stage, *, two_groups=False):
    """Issue dQ += dS K of slice u, in stage `old`, and the scores of slice `part` of a stage.

    two_groups: commit the two as wgmma groups of their own, so that dQ can be waited for alone.
    """
    warpgroup.fence()
    dq_product(variant, operands, dS, u, ring.index(old))
    if two_groups:
        warpgroup.commit_group()
    scores(variant, operands, buffer, part, ring, stage)
    warpgroup.commit_group()


@cute.jit
def next_queries(variant, row, rings, qp: Int32, wid: Int32, lane: Int32):
    """Load the queries of the next row, once they are there; returns the phase of those to come."""
    rings.queries.consumer_wait(Slot(0, qp))
    load_queries(variant, row, qp, wid, lane)
    arch.sync_warp()
    return qp ^ 1


def fragments(variant, shared, inverse, wt, t4):
    """The operands of the products, and what of a `QueryRow` copies a row into registers."""
    sQ, sK, sV, sKt, sB = shared
    mma_S, mma_dQ = multiply(variant.dtype, False, K, SLICE), multiply(variant.dtype, False, MN, 16 * variant.steps)
    mma_dP = multiply(variant.dtype, True, K, SLICE)
    thr_S = mma_S.get_slice(wt)
    tSrK = mma_S.make_fragment_B(thr_S.partition_B(cute.local_tile(sK, (SLICE, padded(variant.channels)), (None, 0, None))))
    tdPsdO = mma_dP.make_fragment_A(mma_dP.get_slice(wt).partition_A(sQ))
    tdPrV = mma_S.make_fragment_B(thr_S.partition_B(cute.local_tile(sV, (SLICE, padded(variant.channels)), (None, 0, None))))
    tdQrK = mma_dQ.make_fragment_B(mma_dQ.get_slice(wt).partition_B(narrow(sKt, 16 * variant.steps)))
    tSrB = None
    if variant.row:
        # a key's terms fill 8 of 16 channels; the other 8 read the same numbers again and meet zeros
        shape = ((8, 4), (8, 2), (variant.stage, variant.groups * variant.stages))
        stride = ((TERMS, 8 * TERMS), (1, 0), (SLICE * TERMS, variant.keys * TERMS))
        tSrB = mma_S.make_fragment_B(thr_S.partition_B(cute.make_tensor(sB, cute.make_layout(shape, stride=stride))))
    acc_S, acc_dP = (mma_S.make_fragment_C(mma_S.partition_shape_C((ROWS, SLICE))) for _ in range(2))
    acc_dQ = mma_dQ.make_fragment_C(mma_dQ.partition_shape_C((ROWS, 16 * variant.steps)))
    tSrQ, rdO, rO = (mma_S.make_fragment_A(mma_S.partition_shape_A((ROWS, padded(variant.channels)))) for _ in range(3))
    tSrA = mma_S.make_fragment_A(mma_S.partition_shape_A((ROWS, 16)))
    coefficients(tSrA, inverse, t4, variant.dtype)
    # a zero that the compiler cannot see through: a shared known zero costs 3 instructions a slice in another product
    words = packed(tSrA)
    words[2] = words[3] = unseen(Int32(0))
    ldmatrix = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), variant.dtype)
    loads = cute.make_tiled_copy_A(ldmatrix, mma_S).get_slice(wt)
    operands = QueryOperands(acc_S, acc_dP, acc_dQ, tSrQ, tdPsdO, tSrA, tSrK, tdPrV, tdQrK, tSrB)
    return operands, (loads, loads.partition_S(sQ), tSrQ, rdO, rO)


def row_products(dtype: Any, x: Any, y: Any, lane: Any) -> Any:
    """Return sum_d x * y of this thread's rows g and g + 8: the diagonal of x y^T.

    x and y are A fragments [rows, k] of the same 16 rows a warp; 4 small products instead of 60 instructions."""
    xs, ys = packed(x), packed(y)
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


class QueryShared(namedtuple("QueryShared", "sQ sK sV sKt sB sX pN panel")):
    """Shared memory: q with o and dO, k, v, k transposed, terms of the key-wise bias, dq, statistics, and the pair bias."""


@cute.jit
def consume(
    variant, args, begin: Int32, end: Int32, sizes, shared, sN: cute.Tensor, rings, sums, work: cute.Tensor, copy_dQ,
    inverse: Float32, rank: Int32, bid: Int32, LK: Int32, tid: Int32, wid: Int32, lane: Int32,
):  # fmt: skip
    """Do the rows of a block with this warpgroup's keys, panel after panel.

    More than 60 lines: a part of a loop in a function of its own changes what the compiler carries through the loop.
    """
    ST, WG, (N, H, NQ, LQ) = variant.stages, variant.groups, sizes
    scale, pair, dpair = args.scale, args.pair, args.dpair
    s, w, wt = wid // 4, wid % 4, tid % 128
    g, t4 = lane // 4, lane % 4
    operands, (copy, source, tSrQ, rdO, rO) = fragments(variant, shared[:5], inverse, wt, t4)
    db = cute.make_rmem_tensor((16, variant.slices if variant.bias_gradient else 1), Float32)
    neg_lse, neg_delta = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
    row = QueryRow(copy, source, tSrQ, rdO, rO, neg_lse, neg_delta, sN)
    slot, qp, it, turn, at = rings.keys.start(), Int32(0), Int32(0), Int32(0), begin
    mine = shared.panel[None, wt, None, s] if const_expr(variant.pair) else None
    first_key = slice_key(variant, 0, rank * WG + s) + 2 * t4
    while at < end:
        pan, n0, n1 = stretch(at, end, N)
        at += n1 - n0
        i, h, b = place(pan, NQ, H)
        q0 = i * ROWS + w * 16 + g
        if const_expr(variant.pair):
            load_pair_bias(variant, mine, pair, b % pair.shape[0], h % pair.shape[1], q0, first_key, LQ, LK, inverse)
        if const_expr(variant.bias_gradient):
            db.fill(0.0)
        here = rings.at(s * ST, ST)
        qp = next_queries(variant, row, rings, qp, wid, lane)
        here.keys.consumer_wait(slot)
        load_bias(variant, operands.acc_S, mine, 0)
        warpgroup.fence()
        scores(variant, operands, qp ^ 1, 0, here.keys, slot.stage)
        warpgroup.commit_group()
        warpgroup.wait_group(0)
        rings.queries.consumer_release(0, lane)  # a product has used q: only then has it left shared memory
        more, rows_left = Boolean(True), n1 - n0
        while more:
            if const_expr(variant.skips):
                more = work[it % 4, 1] > 0
            else:
                rows_left -= 1
                more = rows_left > 0
            here = rings.at(arch.make_warp_uniform(s * ST), ST)
            slot = Slot(arch.make_warp_uniform(slot.stage), slot.phase)
            tiles = Int32(variant.tiles)
            if const_expr(len(variant.exits) > 0):
                tiles = arch.make_warp_uniform(live_tiles(variant, work[it % 4, 2], rank, s))
            c = scale * LOG2E
            slot, qp = row_tiles(variant, 0, tiles, more, operands, row, db, mine, here, c, slot, qp, LQ, wid, lane)
            if const_expr(variant.warp_sums_dq):
                leave_dq(variant, operands.acc_dQ, sums, s, it, wt)
                release_queries(variant, rings, more, lane)
                arch.sync_warp()
                release(sums.left, lane)
            else:
                to, acc_dQ = (i * 4 + w, h, work[it % 4, 0], b), operands.acc_dQ
                sum_in_turn(variant, acc_dQ, sums, rings, shared.sX, copy_dQ, to, scale, s, turn, it, more, rank, wid, wt, lane)
                turn += 1
                if turn == WG:
                    turn = Int32(0)
            it += 1
        if const_expr(variant.bias_gradient):
            if const_expr(variant.partial):
                store_part(variant, db, dpair, (bid + pan) * variant.cluster + rank, tid)
            else:
                add_part(variant, db, dpair, b % dpair.shape[0], h % dpair.shape[1], q0, first_key, LQ, LK, t4)
    if const_expr(not variant.warp_sums_dq):
        arch.cp_async_bulk_wait_group(0)
