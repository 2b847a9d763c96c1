"""A consumer warpgroup of `FusedGradients`: 64 keys at a time, and its turn in the sum of dq of each tile of queries."""

from __future__ import annotations

import dataclasses
from collections import namedtuple
from typing import Any

import cutlass
from cutlass import Float32, Int32, const_expr, cute, range_constexpr
from cutlass.cute import arch
from cutlass.cute.nvgpu import OperandMajorMode, warp, warpgroup

from evoattn.backends.hopper.kernels.dkdv_consumer import (
    dkdv_products,
    fragments,
    gradient,
    load_key_bias,
    load_keys,
    scores,
    store_mask_gradient,
)
from evoattn.backends.hopper.kernels.fused_producer import GROUPS, live_key_tiles, third
from evoattn.backends.hopper.lib.primitives import narrow
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


class FusedShared(namedtuple("FusedShared", "sQ sdO sQt sdOt sS sK sKt sdS sdSt sums books")):
    """Shared memory: q, dO, both transposed, statistics, k with v, k transposed, dS, dS transposed, dq, and notes of warps."""


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
    """Store dS^T of half a tile of queries, a warp's 16 keys, in shared memory."""
    stm = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), variant.dtype)
    for kk in range(2):
        to = cute.local_tile(tile, (1, 8), (lane % 16, 4 * u + 2 * kk + lane // 16))
        cute.copy(stm, cute.make_tensor(dS[kk].iterator, cute.make_layout(8)), to[0, None])


@cute.jit
def add_dq(
    variant, acc_dQ, flags: Int32, s: Int32, j: Int32, NT: Int32, tile, rings, dq: cute.Tensor, book, w: Int32,
    scale: Float32, lane: Int32,
):  # fmt: skip
    """Add to dq of tile j after the warpgroup before; the last one writes it. Then the stage of the tile is released."""
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
    """Store a warp's 16 rows of an accumulator, times factor, 16 bytes a thread, by way of shared memory `room`."""
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


@cute.jit
def consume(
    variant, bid: Int32, blocks: Int32, items: Int32, args, sizes, shared, rings, inverse: Float32, tid: Int32, wid: Int32,
    lane: Int32,
):  # fmt: skip
    """Do this warpgroup's keys of each row.

    More than 60 lines: a part of a loop in a function of its own changes what the compiler carries through the loop.
    """
    N, H, NK, NT, _, thirds = sizes
    scale, row_b, row_n, dmask, dq = args.scale, args.row_b, args.row_n, args.dmask, args.dq
    s, w, wt = wid // 4, wid % 4, tid % 128
    g, t4 = lane // 4, lane % 4
    mma_dQ = dq_multiply(variant, True)
    operands, row = fragments(variant, shared[:6], variant.tiles, wt, t4, lane)
    tdQrS = mma_dQ.make_fragment_A(mma_dQ.get_slice(wt).partition_A(shared.sdSt))
    tdQrK = mma_dQ.make_fragment_B(mma_dQ.get_slice(wt).partition_B(narrow(shared.sKt, 16 * variant.steps)))
    acc_dQ = mma_dQ.make_fragment_C(mma_dQ.partition_shape_C((QUERIES, 16 * variant.steps)))
    mask_sums = cute.make_rmem_tensor(2, Float32)
    begin, _ = third(variant, s, thirds)
    # What the loop over tiles does not need lives in shared memory: the row, how many rows and how many tiles of keys
    # came before, the round, h, n and b, and how many rounds came before.
    book = shared.books[wid, None]
    if lane == 0:
        book[0], book[1], book[2], book[7] = bid, Int32(0), Int32(0), Int32(0)
    arch.sync_warp()
    at = Int32(0)  # tiles of scores so far
    if const_expr(variant.row):
        arch.griddepcontrol_wait()
    while book[0] < items:
        if lane == 0:
            book[3] = Int32(0)
            book[4], book[5], book[6] = place(book[0], H, N)
        arch.sync_warp()
        live = live_key_tiles(variant, book[5], book[6], args, NK)
        rounds = (live + GROUPS - 1) // GROUPS
        while book[3] < rounds:
            r, count, done = book[3], book[1], book[2]
            flags = Int32(cutlass.select_(r == 0, FIRST, 0)) | Int32(cutlass.select_(r == rounds - 1, LAST, 0))
            flags = flags | (book[7] & 1)
            ph = count & 1
            if r * GROUPS + s < live:
                buffer = arch.make_warp_uniform(3 * s + (done & 1))
                if const_expr(variant.row):
                    line, first = book[6] * row_b + book[5] * row_n, (r * GROUPS + s) * ROWS + w * 16 + g
                    load_key_bias(variant, row.terms, args.row, line, first)
                rings.keys.consumer_wait(Slot(2 * s + (done & 1), done >> 1 & 1))
                load_keys(variant, operands, row, (buffer, 3 * s + 2), t4, inverse)
                mask_sums.fill(0.0)
                j = begin
                for t in cutlass.range(NT, unroll=1):
                    j = arch.make_warp_uniform(j)
                    at, buffer = arch.make_warp_uniform(at), arch.make_warp_uniform(buffer)
                    to = shared.sdS[None, None, (2 * s + (at & 1)) * 4 + w]
                    rings.queries.consumer_wait(Slot(j, ph))
                    warpgroup.fence()
                    scores(variant, operands, 0, j)
                    warpgroup.commit_group()
                    warpgroup.wait_group(0)
                    if t == 0:
                        release(rings.values_empty + s, lane)  # a product has used v: only then has it left shared memory
                    # ---- the first half of the tile's queries
                    P, dS = gradient(variant, operands, scale, mask_sums)
                    store_dscores(variant, dS, to, 0, lane)
                    warpgroup.fence()
                    scores(variant, operands, 1, j)
                    warpgroup.commit_group()
                    dkdv_products(variant, operands, P, dS, 0, j, t > 0)
                    warpgroup.commit_group()
                    warpgroup.wait_group(1)
                    # ---- the second half, and dq of the tile
                    P, dS = gradient(variant, operands, scale, mask_sums)
                    store_dscores(variant, dS, to, 1, lane)
                    arch.fence_proxy("async.shared", space="cta")
                    warpgroup.wait_group(0)
                    warpgroup.fence()
                    dkdv_products(variant, operands, P, dS, 1, j, started=True)
                    arch.barrier(barrier_id=1 + s, number_of_threads=128)
                    dq_product(variant, acc_dQ, tdQrS, tdQrK, 2 * s + (at & 1), buffer)
                    warpgroup.commit_group()
                    warpgroup.wait_group(0)
                    tile = shared.sums[None, lane, None, w, j]
                    add_dq(variant, acc_dQ, flags, s, j, NT, tile, rings, dq, book, w, scale, lane)
                    at += 1
                    j += 1
                    if j == NT:
                        j = Int32(0)
                rings.keys.consumer_release(2 * s + (book[2] & 1), lane)
                # ---- dk and dv go through what the next tile's dS will overwrite, and nobody reads any more
                h, n, b = book[4], book[5], book[6]
                first = (book[3] * GROUPS + s) * ROWS + w * 16
                if const_expr(variant.mask_gradient):
                    store_mask_gradient(variant, mask_sums, dmask[b, n, h, None], first + g, t4)
                room = cute.recast_ptr(shared.sdS[None, None, (2 * s + (at & 1)) * 4 + w].iterator, dtype=variant.dtype)
                store_rows_direct(variant, operands.acc_dK, scale, room, args.dk[b, n, h, None, None], first, lane)
                store_rows_direct(variant, operands.acc_dV, Float32(1.0), room, args.dv[b, n, h, None, None], first, lane)
                if lane == 0:
                    book[2] = book[2] + 1
            else:
                # no keys are left for this warpgroup: it adds nothing, in its turn
                j = begin
                for _ in cutlass.range(NT, unroll=1):
                    rings.queries.consumer_wait(Slot(j, ph))
                    tile = shared.sums[None, lane, None, w, j]
                    add_dq(variant, None, flags, s, j, NT, tile, rings, dq, book, w, scale, lane)
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
