"""A consumer warpgroup of `FusedGradients`.

It loops over the rows (b, n, h) of its block, and in each over every third tile of 64 keys, which it owns, and all tiles of
queries. It writes dk, dv and d(mask bias) of its keys. The three warpgroups add up dq of each tile of queries in turn.
"""

from __future__ import annotations

import dataclasses
from collections import namedtuple
from typing import Any

import cutlass
from cutlass import Float32, Int32, const_expr, cute, range_constexpr
from cutlass.cute import arch
from cutlass.cute.nvgpu import OperandMajorMode, warp, warpgroup

from evoattn.backends.hopper.kernels.dkdv_consumer import (
    compute_dscores,
    issue_dkdv,
    issue_scores,
    load_key_bias,
    load_keys,
    make_fragments,
    store_mask_gradient,
)
from evoattn.backends.hopper.kernels.fused_producer import GROUPS, FusedSizes, find_third, live_key_tiles
from evoattn.backends.hopper.lib.primitives import narrow
from evoattn.backends.hopper.lib.ring import Ring, Slot, release
from evoattn.backends.hopper.lib.schedule import place
from evoattn.backends.hopper.tiles import MMA_M, QUERIES

MN = OperandMajorMode.MN
FIRST, LAST = 2, 4  # rounds of a row: flags beside a bit of the number of rounds
ITEM, ITEMS_DONE, TILES_DONE, ROUND, HEAD, ROW, BATCH, ROUNDS_DONE = range(8)
"""Numbers that a warp keeps in shared memory (`sState`), since the loop over tiles does not need them: the row (b, n, h), how
many rows and tiles of keys came before, the round, h, n, b, and how many rounds came before."""


@dataclasses.dataclass(frozen=True)
class FusedRings:
    """The rings of tiles of q, dO and statistics, and of keys with values, two stages of each warpgroup.

    values_empty: barriers of the one stage that a warpgroup has for values. added: a warpgroup has added to dq of a tile.
    """

    queries: Ring
    keys: Ring
    values_empty: Any
    added: Any


class FusedShared(namedtuple("FusedShared", "sQ sdO sQt sdOt sStats sK sKt sdS sdSt sdQ sState")):
    """Shared memory: q, dO, both transposed, statistics, k with v, k transposed, dS, dS transposed, dq, state of warps."""


def make_dq_wgmma(variant, accumulate: Any) -> Any:
    """The product for dq: both sides in shared memory, of the left one [q,k] the queries are contiguous."""
    source = warpgroup.OperandSource.SMEM
    operation = warpgroup.MmaF16BF16Op(variant.dtype, Float32, (QUERIES, 16 * variant.steps, 16), source, MN, MN)
    tiled = cute.make_tiled_mma(operation)
    tiled.set(warpgroup.Field.ACCUMULATE, accumulate)
    return tiled


def issue_dq(variant, acc_dQ, tdQrS, tdQrK, left, right):
    """Issue dQ = dS K of a tile of queries and this warpgroup's keys."""
    # dQ = dS K
    for step in range(MMA_M // 16):
        op = make_dq_wgmma(variant, step > 0)
        cute.gemm(op, acc_dQ, tdQrS[None, None, step, left], tdQrK[None, None, step, right], acc_dQ)


def store_dscores(variant, dS, tile, u, lane):
    """Store dS^T of half a tile of queries, a warp's 16 keys, in shared memory."""
    stm = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), variant.dtype)
    for step in range(2):
        target = cute.local_tile(tile, (1, 8), (lane % 16, 4 * u + 2 * step + lane // 16))
        cute.copy(stm, cute.make_tensor(dS[step].iterator, cute.make_layout(8)), target[0, None])


@cute.jit
def add_dq(
    variant, acc_dQ, flags: Int32, wg: Int32, j: Int32, NT: Int32, tile, rings, mdQ: cute.Tensor, state, wg_warp: Int32,
    scale: Float32, lane: Int32,
):  # fmt: skip
    """Add to dq of tile j after the warpgroup before; the last one writes it. Then the stage of the tile is released."""
    before = Int32(cutlass.select_(wg == 2, Int32(0), wg + 1))
    # the third that the tile lies in, where this warpgroup begins and where it ends
    tile_third = Int32(cutlass.select_(3 * j + 3 <= NT, Int32(0), cutlass.select_(3 * j + 3 <= 2 * NT, Int32(1), Int32(2))))
    is_own = Int32(cutlass.select_(tile_third == wg, Int32(1), Int32(0)))
    arch.mbarrier_wait(rings.added + before * variant.tiles + j, (flags ^ is_own) & 1)
    total = cute.make_rmem_tensor(4 * (16 * variant.steps // 8), Float32)
    if flags & FIRST == 0 or is_own == 0:
        for x in range_constexpr(16 * variant.steps // 8):
            cute.autovec_copy(tile[None, x], cute.make_tensor(total.iterator + 4 * x, cute.make_layout(4)))
    else:
        total.fill(0.0)
    if const_expr(acc_dQ is not None):
        for x in range_constexpr(cute.size(total)):
            total[x] = total[x] + acc_dQ[x]
    if flags & LAST != 0 and tile_third == Int32(cutlass.select_(wg == 0, Int32(2), wg - 1)):
        arch.sync_warp()
        h, n, b = state[HEAD], state[ROW], state[BATCH]
        room = cute.recast_ptr(tile.iterator - lane * 4, dtype=variant.dtype)
        store_lines(variant, total, scale, room, mdQ[b, n, h, None, None], j * QUERIES + wg_warp * 16, lane)
    else:
        for x in range_constexpr(16 * variant.steps // 8):
            cute.autovec_copy(cute.make_tensor(total.iterator + 4 * x, cute.make_layout(4)), tile[None, x])
    arch.sync_warp()
    release(rings.added + wg * variant.tiles + j, lane)
    if flags & LAST != 0:
        rings.queries.consumer_release(j, lane)


@cute.jit
def store_lines(variant, values, factor: Float32, room: cute.Pointer, mOut: cute.Tensor, first: Int32, lane: Int32):
    """Store a warp's 16 lines of an accumulator, times factor, 16 bytes a thread, by way of shared memory `room`."""
    stm = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), variant.dtype)
    pitch = 16 * variant.steps + 8
    for x in range_constexpr(16 * variant.steps // 16):
        short = cute.make_rmem_tensor(8, variant.dtype)
        for y in range_constexpr(8):
            short[y] = (values[8 * x + y] * factor).to(variant.dtype)
        target = (room + (lane % 16) * pitch + 16 * x + 8 * (lane // 16)).align(16)
        cute.copy(stm, short, cute.make_tensor(target, cute.make_layout(8)))
    arch.sync_warp()
    vectors = variant.channels // 8
    for x in range_constexpr(-(-16 * vectors // 32)):
        vector = x * 32 + lane
        line, part = vector // vectors, vector % vectors
        if line < 16 and first + line < mOut.shape[0]:
            rOut = cute.make_rmem_tensor(8, variant.dtype)
            cute.autovec_copy(cute.make_tensor((room + line * pitch + 8 * part).align(16), cute.make_layout(8)), rOut)
            cute.autovec_copy(rOut, cute.local_tile(mOut[first + line, None], (8,), (part,)))
    arch.sync_warp()


@cute.jit
def consume(
    variant, bid: Int32, blocks: Int32, items: Int32, args, sizes: FusedSizes, shared, rings, inverse: Float32, tid: Int32,
    warp_idx: Int32, lane: Int32,
):  # fmt: skip
    """Do this warpgroup's keys of each row.

    More than 60 lines: a part of a loop in a function of its own changes what the compiler carries through the loop.
    """
    N, H, NK, NT, _, thirds = sizes
    scale = args.scale
    wg, wg_warp, wg_tid = warp_idx // 4, warp_idx % 4, tid % 128
    g, t4 = lane // 4, lane % 4
    mma_dQ = make_dq_wgmma(variant, True)
    operands, row = make_fragments(variant, shared, variant.tiles, wg_tid, t4, lane)
    tdQrS = mma_dQ.make_fragment_A(mma_dQ.get_slice(wg_tid).partition_A(shared.sdSt))
    tdQrK = mma_dQ.make_fragment_B(mma_dQ.get_slice(wg_tid).partition_B(narrow(shared.sKt, 16 * variant.steps)))
    acc_dQ = mma_dQ.make_fragment_C(mma_dQ.partition_shape_C((QUERIES, 16 * variant.steps)))
    mask_sums = cute.make_rmem_tensor(2, Float32)
    begin, _ = find_third(wg, thirds)
    state = shared.sState[warp_idx, None]
    if lane == 0:
        state[ITEM], state[ITEMS_DONE], state[TILES_DONE], state[ROUNDS_DONE] = bid, Int32(0), Int32(0), Int32(0)
    arch.sync_warp()
    tile_count = Int32(0)  # tiles of scores so far
    if const_expr(variant.key_bias):
        arch.griddepcontrol_wait()
    while state[ITEM] < items:
        if lane == 0:
            state[ROUND] = Int32(0)
            state[HEAD], state[ROW], state[BATCH] = place(state[ITEM], H, N)
        arch.sync_warp()
        live = live_key_tiles(variant, state[ROW], state[BATCH], args, NK)
        rounds = (live + GROUPS - 1) // GROUPS
        while state[ROUND] < rounds:
            round_idx, count, done = state[ROUND], state[ITEMS_DONE], state[TILES_DONE]
            flags = Int32(cutlass.select_(round_idx == 0, FIRST, 0)) | Int32(cutlass.select_(round_idx == rounds - 1, LAST, 0))
            flags = flags | (state[ROUNDS_DONE] & 1)
            phase = count & 1
            if round_idx * GROUPS + wg < live:
                buffer = arch.make_warp_uniform(3 * wg + (done & 1))
                if const_expr(variant.key_bias):
                    bias_row = state[BATCH] * args.stride_b + state[ROW] * args.stride_n
                    first_key = (round_idx * GROUPS + wg) * MMA_M + wg_warp * 16 + g
                    load_key_bias(variant, row.rTerms, args.mTerms, bias_row, first_key)
                rings.keys.consumer_wait(Slot(2 * wg + (done & 1), done >> 1 & 1))
                load_keys(variant, operands, row, (buffer, 3 * wg + 2), t4, inverse)
                mask_sums.fill(0.0)
                j = begin
                for t in cutlass.range(NT, unroll=1):
                    j = arch.make_warp_uniform(j)
                    tile_count, buffer = arch.make_warp_uniform(tile_count), arch.make_warp_uniform(buffer)
                    sdS_tile = shared.sdS[None, None, (2 * wg + (tile_count & 1)) * 4 + wg_warp]
                    rings.queries.consumer_wait(Slot(j, phase))
                    warpgroup.fence()
                    issue_scores(variant, operands, 0, j)
                    warpgroup.commit_group()
                    warpgroup.wait_group(0)
                    if t == 0:
                        release(rings.values_empty + wg, lane)  # a product has used v: only then has it left shared memory
                    # ---- the first half of the tile's queries
                    P, dS = compute_dscores(variant, operands, scale, mask_sums)
                    store_dscores(variant, dS, sdS_tile, 0, lane)
                    warpgroup.fence()
                    issue_scores(variant, operands, 1, j)
                    warpgroup.commit_group()
                    issue_dkdv(variant, operands, P, dS, 0, j, t > 0)
                    warpgroup.commit_group()
                    warpgroup.wait_group(1)
                    # ---- the second half, and dq of the tile
                    P, dS = compute_dscores(variant, operands, scale, mask_sums)
                    store_dscores(variant, dS, sdS_tile, 1, lane)
                    arch.fence_proxy("async.shared", space="cta")
                    warpgroup.wait_group(0)
                    warpgroup.fence()
                    issue_dkdv(variant, operands, P, dS, 1, j, started=True)
                    arch.barrier(barrier_id=1 + wg, number_of_threads=128)
                    issue_dq(variant, acc_dQ, tdQrS, tdQrK, 2 * wg + (tile_count & 1), buffer)
                    warpgroup.commit_group()
                    warpgroup.wait_group(0)
                    tile = shared.sdQ[None, lane, None, wg_warp, j]
                    add_dq(variant, acc_dQ, flags, wg, j, NT, tile, rings, args.mdQ, state, wg_warp, scale, lane)
                    tile_count += 1
                    j += 1
                    if j == NT:
                        j = Int32(0)
                rings.keys.consumer_release(2 * wg + (state[TILES_DONE] & 1), lane)
                # ---- dk and dv go through what the next tile's dS will overwrite, and nobody reads any more
                h, n, b = state[HEAD], state[ROW], state[BATCH]
                first_key = (state[ROUND] * GROUPS + wg) * MMA_M + wg_warp * 16
                if const_expr(variant.mask_gradient):
                    store_mask_gradient(mask_sums, args.mdMask[b, n, h, None], first_key + g, t4)
                sdS_tile = shared.sdS[None, None, (2 * wg + (tile_count & 1)) * 4 + wg_warp]
                room = cute.recast_ptr(sdS_tile.iterator, dtype=variant.dtype)
                store_lines(variant, operands.acc_dK, scale, room, args.mdK[b, n, h, None, None], first_key, lane)
                store_lines(variant, operands.acc_dV, Float32(1.0), room, args.mdV[b, n, h, None, None], first_key, lane)
                if lane == 0:
                    state[TILES_DONE] = state[TILES_DONE] + 1
            else:
                # no keys are left for this warpgroup: it adds nothing, in its turn
                j = begin
                for _ in cutlass.range(NT, unroll=1):
                    rings.queries.consumer_wait(Slot(j, phase))
                    tile = shared.sdQ[None, lane, None, wg_warp, j]
                    add_dq(variant, None, flags, wg, j, NT, tile, rings, args.mdQ, state, wg_warp, scale, lane)
                    j += 1
                    if j == NT:
                        j = Int32(0)
            arch.sync_warp()
            if lane == 0:
                state[ROUND] = state[ROUND] + 1
                state[ROUNDS_DONE] = state[ROUNDS_DONE] + 1
            arch.sync_warp()
        if lane == 0:
            state[ITEM] = state[ITEM] + blocks
            state[ITEMS_DONE] = state[ITEMS_DONE] + 1
        arch.sync_warp()
