"""A consumer warpgroup of the forward.

It owns 64 queries of each panel of its block, loops over the rows n of its stream and the keys of each row, and writes o, the
LSE and the reference of its queries.
"""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import cutlass
from cutlass import BFloat16, Boolean, Float32, Int32, const_expr, cute, range_constexpr
from cutlass.cute import arch
from cutlass.cute.nvgpu import OperandMajorMode, warp, warpgroup

from evoattn.backends.hopper.kernels import forward_mma as mma
from evoattn.backends.hopper.kernels.repair import WARP_QUERIES, repair_queries
from evoattn.backends.hopper.lib.copies import load_panel, store_accumulator
from evoattn.backends.hopper.lib.primitives import (
    DEAD,
    LOWEST,
    VETO,
    broadcast_load,
    fill_coefficients,
    fma,
    make_wgmma,
    pin_registers,
)
from evoattn.backends.hopper.lib.ring import Slot
from evoattn.backends.hopper.lib.schedule import (
    ForwardSizes,
    UnitRange,
    interleaved_row,
    panel_phase,
    place,
    stretch,
    units_of,
)
from evoattn.backends.hopper.tiles import CHAIN, CONSUMERS, HALVES, KEYS, MMA_M, SLICE, STREAMS, pad_channels
from evoattn.core.numerics import LOG2E

K, MN = OperandMajorMode.K, OperandMajorMode.MN


class Thread(namedtuple("Thread", "stream half wg_warp wg_tid lane g t4 tid warp_idx wg")):
    """The place of a thread.

    stream, half: its stream, and its warpgroup of the stream. wg_warp, wg_tid: its warp and its number in the warpgroup.
    lane, g, t4: its number in the warp, lane // 4 and lane % 4. tid, warp_idx, wg: its number, its warp and its warpgroup
    in the block.
    """


class ForwardTiles(namedtuple("ForwardTiles", "sQ sK sV sPair sIdentity sTerms sO")):
    """Tiles in shared memory: of q, k, v, the pair bias, the identity over scale, the terms of the key bias, and o."""


NEXT_UNIT, END_UNIT, QUERY_TILE, HEAD, BATCH, REPEATS = range(6)
"""Numbers that a warp keeps in shared memory (`sState`): its next unit, the end of its units, its tile of 16 queries, h, b, and
whether it repeats the last row. The loop over rows does not need them at every step, and registers decide its speed."""


@cute.jit
def consume(
    variant, thread, bid: Int32, args, units: UnitRange, sizes: ForwardSizes, key_blocks: Int32, tiles, copy_O, rings,
    sWork: cute.Tensor, sState: cute.Tensor, sReference: cute.Tensor,
):  # fmt: skip
    """Do the rows of this warpgroup's stream, panel after panel.

    `turn` is the number of a row in its stream, modulo 4, by which `sWork` [stream, turn] is read. `repairs`: whether a query
    of this thread needs `repair_rows`.

    More than 60 lines: a part of a loop in a function of its own changes what the compiler carries through the loop.
    """
    stream, half, wg_warp, _, lane, _, _, tid, warp_idx, wg = thread
    _, _, panels, N, LQ = sizes
    applied, inverse, excess = args.scale, Float32(1.0) / args.scale, Float32(0.0)
    if const_expr(variant.keys_twice):
        inverse = inverse.to(variant.dtype).to(Float32)
        applied, excess = Float32(1.0) / inverse, fma(args.scale, inverse, Float32(-1.0))
    c = applied * LOG2E
    floor = Float32(DEAD) if const_expr(variant.dtype is BFloat16) else c * (-VETO * VETO)
    operands, row, copy = make_fragments(variant, tiles, thread, inverse, excess)
    slot, query_phase, repairs, turn = rings.keys.start(), Int32(0), Boolean(False), Int32(0)
    state = sState[warp_idx, None]
    if lane == 0:
        state[NEXT_UNIT], state[END_UNIT] = units
    arch.sync_warp()
    while state[NEXT_UNIT] < state[END_UNIT]:
        unit, end = state[NEXT_UNIT], state[END_UNIT]
        panel, p0, p1 = stretch(unit, end, N)
        i, h, b = place(panel, panels, args.mQ.shape[2])
        count = p1 - p0 + STREAMS - 1
        if const_expr(not variant.streamed):
            count = count - stream
        count = count // STREAMS
        arch.sync_warp()
        if lane == 0:
            state[NEXT_UNIT] = unit + p1 - p0
            state[QUERY_TILE] = (i * HALVES + half) * (MMA_M // 16) + wg_warp
            state[HEAD] = h
            state[BATCH] = b
            if const_expr(variant.streamed):
                state[REPEATS] = (p1 - p0) % STREAMS * stream
        if const_expr(variant.pair):
            if const_expr(variant.streamed):
                arch.griddepcontrol_wait()
            if lane < WARP_QUERIES:
                query = cutlass.min(((i * HALVES + half) * (MMA_M // WARP_QUERIES) + wg_warp) * WARP_QUERIES + lane, LQ - 1)
                sReference[lane, warp_idx] = broadcast_load(args.mPairReference, b, h, query)
        arch.sync_warp()
        if const_expr(variant.pair and variant.resident):
            arch.barrier(barrier_id=1, number_of_threads=CONSUMERS * 128)
            load_panel(args.mPair, tiles.sPair, b, h, i * HALVES * MMA_M, HALVES * MMA_M, key_blocks, tid, CONSUMERS * 128)
            arch.fence_proxy("async.shared", space="cta")
            arch.barrier(barrier_id=1, number_of_threads=CONSUMERS * 128)
        if (i * HALVES + half) * MMA_M < LQ:
            if count > 0:
                mma.load_queries(variant, rings, copy, operands.tSrQ, stream, half, turn, query_phase)
                query_phase ^= 1
                mma.wait_keys(variant, rings, slot)
                warpgroup.fence()
                queries = mma.query_operand(variant, operands, stream, half, turn)
                mma.issue_scores(variant, queries, operands, row.acc_S0, 0, 0, slot, half, rings)
                warpgroup.wait_group(0)
                mma.release_registers(variant, rings, stream, lane)
            while count > 0:
                slot, query_phase, count = do_row(
                    variant, operands, row, copy, sWork, rings, c, thread, turn, slot, query_phase, count, key_blocks
                )
                tile, h, b, n = state[QUERY_TILE], state[HEAD], state[BATCH], sWork[stream, turn, mma.ROW]
                output = wg * 4 + wg_warp
                if const_expr(variant.query_stages == 2):
                    output = (mma.query_slot(variant, stream, turn, query_phase).stage * HALVES + half) * 4 + wg_warp
                turn = (turn + 1) & 3
                target = (tile, h, n, b, output)
                repairs = store_row(
                    variant, row, args, target, tiles.sO, copy_O, floor, repairs, count, state, sReference, thread
                )
        else:
            turn, slot, query_phase = skip_rows(variant, sWork, rings, thread, turn, slot, query_phase, count)
    arch.cp_async_bulk_wait_group(0)
    if arch.vote_any_sync(repairs):
        if const_expr(variant.dependent):
            arch.griddepcontrol_wait()
        repair_rows(variant, args, arch.make_warp_uniform(bid), sizes, thread)


def make_fragments(variant, tiles, thread, inverse, excess):
    """The operands of the products, the registers of a row, and the copy of queries into registers."""
    sQ, sK, sV, sPair, sIdentity, sTerms, _ = tiles
    wg_tid = thread.wg_tid
    mma_QK = make_wgmma(variant.dtype, False, K, SLICE)
    mma_PI = make_wgmma(variant.dtype, True, K, SLICE)
    mma_PV = make_wgmma(variant.dtype, False, MN, 16 * variant.steps)
    thr_QK, thr_PI, thr_PV = mma_QK.get_slice(wg_tid), mma_PI.get_slice(wg_tid), mma_PV.get_slice(wg_tid)
    # A key's terms fill 8 of 16 channels; the other 8 read the same numbers again and meet zeros of A. So do 8 channels
    # of K, which meet the other half of q (`load_queries`).
    eights = cute.make_layout(((8, 4), (8, 2), 2, STREAMS * variant.stages), stride=((8, 64), (1, 0), 256, 512))
    keys = cute.local_tile(sK, (SLICE, pad_channels(variant.channels)), (None, 0, None))
    if variant.keys_twice:
        keys = cute.make_tensor(sK.iterator, eights)
    tSrK = mma_QK.make_fragment_B(thr_QK.partition_B(keys))  # (., 1, step, slice, stage)
    if variant.float32_pair:
        tSrPair = sPair[None, wg_tid, None, None]  # (four numbers, of 8 keys, tile)
    else:
        tSrPair = mma_PI.make_fragment_A(thr_PI.partition_A(sPair))  # (., 1, step, tile)
    tSrIdentity = mma_PI.make_fragment_B(thr_PI.partition_B(sIdentity))  # (., 1, step, 1)
    values = cute.local_tile(sV, (16 * variant.steps, KEYS), (0, 0, None))
    tOrV = mma_PV.make_fragment_B(thr_PV.partition_B(values))  # (., 1, step, stage)
    tSrTerms = mma_QK.make_fragment_B(thr_QK.partition_B(cute.make_tensor(sTerms, eights)))
    acc_S0, acc_S1 = (mma_QK.make_fragment_C(mma_QK.partition_shape_C((MMA_M, SLICE))) for _ in range(2))
    acc_O = mma_PV.make_fragment_C(mma_PV.partition_shape_C((MMA_M, 16 * variant.steps)))
    tSrQ = mma_QK.make_fragment_A(mma_QK.partition_shape_A((MMA_M, pad_channels(variant.channels))))
    tSsQ = mma_PI.make_fragment_A(thr_PI.partition_A(sQ))  # (., 1, step, tile)
    tSrAlpha = mma_QK.make_fragment_A(mma_QK.partition_shape_A((MMA_M, 16)))
    tSrAlpha.fill(variant.dtype(0.0))
    fill_coefficients(tSrAlpha, inverse, thread.t4, variant.dtype)
    pin_registers(tSrAlpha, thread.lane)
    ldmatrix = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), variant.dtype)
    loads = cute.make_tiled_copy_A(ldmatrix, mma_QK).get_slice(wg_tid)
    copy = mma.QueryCopy(loads, loads.partition_S(sQ), loads.retile(tSrQ), excess)
    m, l = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(4, Float32)
    return (
        mma.ForwardOperands(tSrQ, tSsQ, tSrAlpha, tSrK, tSrTerms, tSrPair, tSrIdentity, tOrV),
        mma.ForwardRow(acc_S0, acc_S1, acc_O, m, l),
        copy,
    )


@cute.jit
def do_row(
    variant, operands, row, copy, sWork: cute.Tensor, rings, c: Float32, thread, turn: Int32, slot, query_phase: Int32,
    count: Int32, key_blocks: Int32,
):  # fmt: skip
    """Do all keys of the row that is `turn` in a stream; then the next row's first scores are on their way.

    Returns the slots of keys and queries to come, and how many rows are left. More than 60 lines: see `consume`.
    """
    stream, half, _, _, lane, *_ = thread
    # A shuffle hides that these do not change (or, the stage, cycle) over the loop: otherwise the compiler hoists
    # some 50 matrix descriptors out of it, cannot keep them in uniform registers, and spills.
    uniform_half, first_stage = arch.make_warp_uniform(half), arch.make_warp_uniform(stream * variant.stages)
    slot = Slot(arch.make_warp_uniform(slot.stage), slot.phase)
    for x in range_constexpr(4):
        row.l[x] = Float32(0.0)
    for x in range_constexpr(2):
        row.m[x] = Float32(-3e38)
    slices, full = 2 * key_blocks, key_blocks
    if const_expr(variant.key_bias):
        slices = sWork[stream, turn, mma.SLICES]
        # With 48 channels, which of the two a shuffle hides decides whether ptxas serialises the products.
        if const_expr(variant.half_blocks or variant.pair):
            slices = arch.make_warp_uniform(slices)
        full = cutlass.max(slices >> 1, 1)
        if const_expr(not (variant.half_blocks or variant.pair)):
            full = arch.make_warp_uniform(full)
    left = full
    old_stage = slot.stage
    output = mma.query_slot(variant, stream, turn + 1, query_phase).stage
    queries = mma.query_operand(variant, operands, stream, half, turn)
    count -= 1
    if const_expr(variant.resident):
        row_rings = rings.at(first_stage)
        slot, old_stage = mma.do_chain(
            variant, 0, left, full, queries, operands, row, c, uniform_half, slot, old_stage, output, row_rings, lane
        )
    else:
        while left > 0:
            uniform_half, first_stage = arch.make_warp_uniform(uniform_half), arch.make_warp_uniform(first_stage)
            slot = Slot(arch.make_warp_uniform(slot.stage), slot.phase)
            row_rings = rings.at(first_stage)
            slot, old_stage = mma.do_chain(
                variant, 0, left, full, queries, operands, row, c, uniform_half, slot, old_stage, output, row_rings, lane
            )
            left -= CHAIN
            if left > 0:
                mma.wait_keys(variant, row_rings, slot)
                warpgroup.fence()
                mma.issue_scores(variant, queries, operands, row.acc_S0, 0, 0, slot, uniform_half, row_rings)
                mma.softmax(variant, row, operands, c, row.acc_S1, 1, row_rings.keys.index(old_stage))
                warpgroup.wait_group(0)
                mma.release_keys(variant, row_rings, old_stage, lane)
    rings = rings.at(first_stage)
    tail = Int32(1) if const_expr(variant.half_blocks) else 1
    if const_expr(variant.half_blocks):
        if slices & 1 == 1 and slices > 1:  # a last block of one slice
            mma.wait_keys(variant, rings, slot)
            mma.softmax(variant, row, operands, c, row.acc_S1, 1, rings.keys.index(old_stage))
            mma.issue_scores(variant, queries, operands, row.acc_S1, 0, slices >> 1, slot, uniform_half, rings)
            warpgroup.wait_group(0)
            mma.release_keys(variant, rings, old_stage, lane)
            tail = Int32(0)
            old_stage, slot = slot.stage, rings.keys.advance(slot)
    # the row's last slice; the first scores of the next row are on their way meanwhile
    if count > 0:
        mma.load_queries(variant, rings, copy, operands.tSrQ, stream, half, turn + 1, query_phase)
        query_phase ^= 1
        mma.wait_keys(variant, rings, slot)
    warpgroup.fence()
    queries = mma.query_operand(variant, operands, stream, uniform_half, turn + 1)
    mma.issue_scores(variant, queries, operands, row.acc_S0, 0, 0, slot, uniform_half, rings)
    mma.softmax(variant, row, operands, c, row.acc_S1, tail, rings.keys.index(old_stage))
    warpgroup.wait_group(0)
    mma.release_keys(variant, rings, old_stage, lane)
    if count > 0:
        mma.release_registers(variant, rings, stream, lane)
    return slot, query_phase, count


@cute.jit
def skip_rows(variant, sWork: cute.Tensor, rings, thread, turn: Int32, slot, query_phase: Int32, count: Int32):
    """Release what comes for `count` rows, for a warpgroup that has no queries of a last panel.

    Returns the turn and the slots of keys and queries to come.
    """
    stream, _, _, _, lane, *_ = thread
    while count > 0:
        rings.queries.consumer_wait(mma.query_slot(variant, stream, turn, query_phase))
        query_phase ^= 1
        slices = sWork[stream, turn, mma.SLICES]
        turn = (turn + 1) & 3
        arch.sync_warp()
        if const_expr(variant.query_stages == 1):
            mma.release_registers(variant, rings, stream, lane)
        else:
            mma.release_output(rings, mma.query_slot(variant, stream, turn, query_phase).stage, lane)
        for _ in cutlass.range((slices + 1) // 2, unroll=1):
            rings.keys.consumer_wait(slot)
            # not by `release`: with it ptxas gives other registers to some kernels
            if lane == 0:
                arch.mbarrier_arrive(rings.keys.empty_barrier(slot.stage))
            if const_expr(variant.streamed):
                rings.pair.consumer_wait(slot)
                if lane == 0:
                    arch.mbarrier_arrive(rings.pair.empty_barrier(slot.stage))
            slot = rings.keys.advance(slot)
        count -= 1
    return turn, slot, query_phase


@cute.jit
def store_row(
    variant, row, args, target, sO: cute.Tensor, copy, floor: Float32, repairs: Boolean, count: Int32, state: Any,
    sReference: cute.Tensor, thread,
):  # fmt: skip
    """Write a row's o, LSE and reference. Return `repairs`, set if `repair_rows` has to do one of its queries again.

    A query that overflowed has an LSE of NaN, and one whose scores a bias may have rounded away of +inf.

    Args:
        target: the tile of 16 queries, h, n, b, and the tile of `sO` from which o is copied.
        floor: queries with a lower reference attend to nothing.
        repairs: whether a row before has to be done again.
        count: how many rows come after.
    """
    (_, _, acc_O, m, l), (tile, h, n, b, output), (_, _, _, _, lane, g, t4, *_) = row, target, thread
    sReference = sReference[None, thread.warp_idx]
    for x in range_constexpr(2):
        l[x] = arch.warp_reduction_sum(l[2 * x] + l[2 * x + 1], threads_in_group=4)
    arch.cp_async_bulk_wait_group(0, read=True)
    arch.sync_warp()
    dead = (m[0] < floor, m[1] < floor)
    factors = [cutlass.select_(dead[x], Float32(0.0), arch.rcp_approx(l[x])) for x in range(2)]
    store_accumulator(acc_O, factors, sO[None, None, output], lane, variant.dtype)
    arch.fence_proxy("async.shared", space="cta")
    arch.sync_warp()
    # The second stream repeats the last of an odd number of rows, to stay in step, and writes nothing.
    limit = args.mQ.shape[3]
    if const_expr(variant.streamed):
        if count == 0 and state[REPEATS] == 1:
            limit = Int32(0)
        if limit > 0:
            copy.store(output, (tile, h, n, b))
    else:
        copy.store(output, (tile, h, n, b))
    arch.cp_async_bulk_commit_group()
    for x in range_constexpr(2):
        query = tile * 16 + g + 8 * x
        in_range = l[x] < (2.0**64 if variant.dtype is BFloat16 else 2.0**15)
        distant = Boolean(False)
        if const_expr(variant.pair):
            distant = (m[x] < LOWEST) & (m[x] >= floor)
        repairs = repairs | (not in_range) | distant
        if t4 == 0 and query < limit:
            value = m[x] + cute.math.log2(l[x], fastmath=True)
            value = cutlass.select_(dead[x], -Float32.inf, value)
            reference = Float32(0.0)
            if const_expr(variant.pair):
                reference = sReference[g + 8 * x]
                value = cutlass.select_(distant, Float32.inf, value)
            args.mLSE[b, n, h, query] = cutlass.select_(in_range, value, Float32.nan)
            args.mReference[b, n, h, query] = reference
    return repairs


@cute.jit
def repair_rows(variant, args, block: Int32, sizes: ForwardSizes, thread):
    """Do the queries again that this warp marked with an LSE of NaN or +inf."""
    _, _, panels, N, LQ = sizes
    stream, half, wg_warp, *_ = thread
    arch.sync_warp()
    unit, end = units_of(block, sizes)
    while unit < end:
        panel, p0, p1 = stretch(unit, end, N)
        phase = panel_phase(panel, *sizes)
        i, h, b = place(panel, panels, args.mQ.shape[2])
        first_query = (i * HALVES + half) * MMA_M + wg_warp * WARP_QUERIES
        query = cutlass.min(first_query + arch.lane_idx() % WARP_QUERIES, LQ - 1)
        p = p0 + stream
        while p < p1:
            n = interleaved_row(p, phase, args.interleave, N)
            value = args.mLSE[b, n, h, query]
            if first_query < LQ and arch.vote_any_sync(value != value or value == Float32.inf):
                repair_queries(variant, args, b, n, h, first_query)
            p += STREAMS
        unit += p1 - p0
