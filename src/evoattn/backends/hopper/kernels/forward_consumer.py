"""A consumer warpgroup of the forward: 64 queries go through the keys of a row, and on to the next; o and LSE leave."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import cutlass
from cutlass import BFloat16, Boolean, Float32, Int32, const_expr, cute, range_constexpr
from cutlass.cute import arch
from cutlass.cute.nvgpu import OperandMajorMode, warp, warpgroup

from evoattn.backends.hopper.kernels import forward_mma as mma
from evoattn.backends.hopper.kernels.repair import WARP_QUERIES, repair_queries
from evoattn.backends.hopper.lib.copies import load_panel
from evoattn.backends.hopper.lib.primitives import DEAD, LOWEST, VETO, coefficients, fma, multiply, pin_registers
from evoattn.backends.hopper.lib.ring import Slot
from evoattn.backends.hopper.lib.schedule import interleaved_row, panel_phase, panel_start, place, stretch
from evoattn.backends.hopper.tiles import CHAIN, CONSUMERS, HALVES, KEYS, ROWS, SLICE, STREAMS, padded
from evoattn.core.numerics import LOG2E

K, MN = OperandMajorMode.K, OperandMajorMode.MN


class Thread(namedtuple("Thread", "s half w wt lane g t4 tid wid wg")):
    """A thread's place.

    s, half, w, wt: its stream, its warpgroup of the stream, its warp and its number there. lane, g, t4: its number, row and
    column in the warp. tid, wid, wg: its number, its warp's and its warpgroup's in
    the block.
    """


class ForwardTiles(namedtuple("ForwardTiles", "sQ sK sV sP sI sB sO")):
    """Tiles in shared memory: of q, k, v, the pair bias, the identity over scale, the terms of the key-wise bias, and o."""


@cute.jit
def consume(
    variant, thread, bid: Int32, args, span, sizes, blocks: Int32, tiles, copy_O, rings, turns: cute.Tensor,
    all_notes: cute.Tensor, origins: cute.Tensor,
):  # fmt: skip
    """Do the rows of this warpgroup's stream, panel after panel.

    `turn` is the number of a row in its stream, modulo 4: `turns` [stream, turn] has its n and its slices of keys. `notes`
    are numbers of a warp in shared memory: the next unit, the end, the tile, h, b and whether the last row is repeated.
    `repairs`: whether a query of this thread needs `repair_rows`.

    More than 60 lines: a part of a loop in a function of its own changes what the compiler carries through the loop.
    """
    s, half, w, _, lane, _, _, tid, wid, wg = thread
    _, _, panels, N, LQ = sizes
    scale, shifts = args.scale, args.shifts
    applied, inverse, excess = scale, Float32(1.0) / scale, Float32(0.0)
    if const_expr(variant.twice):
        inverse = inverse.to(variant.dtype).to(Float32)
        applied, excess = Float32(1.0) / inverse, fma(scale, inverse, Float32(-1.0))
    c = applied * LOG2E
    floor = Float32(DEAD) if const_expr(variant.dtype is BFloat16) else c * (-VETO * VETO)
    operands, row, copy = fragments(variant, tiles, thread, inverse, excess)
    # What the loop over rows does not need at every step lives in shared memory: registers decide its speed.
    slot, query_phase, repairs, turn = rings.keys.start(), Int32(0), Boolean(False), Int32(0)
    notes = all_notes[wid, None]
    if lane == 0:
        notes[0], notes[1] = span
    arch.sync_warp()
    while notes[0] < notes[1]:
        unit, stop = notes[0], notes[1]
        panel, p0, p1 = stretch(unit, stop, N)
        ib, h, b = place(panel, panels, args.q.shape[2])
        count = p1 - p0 + STREAMS - 1
        if const_expr(not variant.streamed):
            count = count - s
        count = count // STREAMS
        arch.sync_warp()
        if lane == 0:
            notes[0] = unit + p1 - p0
            notes[2] = (ib * HALVES + half) * (ROWS // 16) + w  # tiles of 16 queries
            notes[3] = h
            notes[4] = b
            if const_expr(variant.streamed):
                notes[5] = (p1 - p0) % STREAMS * s
        if const_expr(variant.pair):
            if const_expr(variant.streamed):
                arch.griddepcontrol_wait()
            if lane < WARP_QUERIES:
                i = cutlass.min(((ib * HALVES + half) * (ROWS // WARP_QUERIES) + w) * WARP_QUERIES + lane, LQ - 1)
                origins[lane, wid] = shifts[cutlass.min(b, shifts.shape[0] - 1), cutlass.min(h, shifts.shape[1] - 1), i]
        arch.sync_warp()
        if const_expr(variant.pair and variant.resident):
            arch.barrier(barrier_id=1, number_of_threads=CONSUMERS * 128)
            load_panel(args.pair, tiles.sP, b, h, ib * HALVES * ROWS, HALVES * ROWS, blocks, tid, CONSUMERS * 128)
            arch.fence_proxy("async.shared", space="cta")
            arch.barrier(barrier_id=1, number_of_threads=CONSUMERS * 128)
        if (ib * HALVES + half) * ROWS < LQ:
            if count > 0:
                mma.load_queries(variant, rings, copy, operands.tSrQ, s, half, turn, query_phase)
                query_phase ^= 1
                mma.wait_keys(variant, rings, slot)
                warpgroup.fence()
                queries = mma.query_operand(variant, operands, s, half, turn)
                mma.scores(
                    variant,
                    queries,
                    operands,
                    row.acc_S0,
                    0,
                    mma.pair_tile(variant, 0, slot, half),
                    rings.keys.index(slot.stage),
                )
                warpgroup.wait_group(0)
                mma.release_registers(variant, rings, s, lane)
            while count > 0:
                slot, query_phase, count = row_keys(
                    variant, operands, row, copy, turns, rings, c, thread, turn, slot, query_phase, count, blocks
                )
                tile, h, b, n = notes[2], notes[3], notes[4], turns[s, turn, 0]
                output = wg * 4 + w
                if const_expr(variant.slots == 2):
                    output = (mma.query_slot(variant, s, turn, query_phase).stage * HALVES + half) * 4 + w
                turn = (turn + 1) & 3
                target = (tile, h, n, b, output)
                repairs = store_row(
                    variant, row, args, target, tiles.sO, copy_O, floor, repairs, count, notes, origins[None, wid], thread
                )
        else:
            turn, slot, query_phase = skip_rows(variant, turns, rings, thread, turn, slot, query_phase, count)
    arch.cp_async_bulk_wait_group(0)
    if arch.vote_any_sync(repairs):
        if const_expr(variant.prepared):
            arch.griddepcontrol_wait()
        repair_rows(variant, args, arch.make_warp_uniform(bid), sizes, thread)


def fragments(variant, tiles, thread, inverse, excess):
    """The operands of the products, the registers of a row, and the copy of queries into registers."""
    sQ, sK, sV, sP, sI, sB, _ = tiles
    wt = thread.wt
    mma_QK = multiply(variant.dtype, False, K, SLICE)
    mma_PI = multiply(variant.dtype, True, K, SLICE)
    mma_PV = multiply(variant.dtype, False, MN, 16 * variant.steps)
    thr_QK, thr_PI, thr_PV = mma_QK.get_slice(wt), mma_PI.get_slice(wt), mma_PV.get_slice(wt)
    # A key's terms fill 8 of 16 channels; the other 8 read the same numbers again and meet zeros of A. So do 8 channels
    # of K, which meet the other half of q (`load_queries`).
    eights = cute.make_layout(((8, 4), (8, 2), 2, STREAMS * variant.stages), stride=((8, 64), (1, 0), 256, 512))
    keys = cute.local_tile(sK, (SLICE, padded(variant.channels)), (None, 0, None))
    if variant.twice:
        keys = cute.make_tensor(sK.iterator, eights)
    tSrK = mma_QK.make_fragment_B(thr_QK.partition_B(keys))  # (., 1, step, slice, stage)
    if variant.wide:
        tSrP = sP[None, wt, None, None]  # (four numbers, of 8 keys, tile)
    else:
        tSrP = mma_PI.make_fragment_A(thr_PI.partition_A(sP))  # (., 1, step, tile)
    tSrI = mma_PI.make_fragment_B(thr_PI.partition_B(sI))  # (., 1, step, 1)
    values = cute.local_tile(sV, (16 * variant.steps, KEYS), (0, 0, None))
    tOrV = mma_PV.make_fragment_B(thr_PV.partition_B(values))  # (., 1, step, stage)
    tSrB = mma_QK.make_fragment_B(thr_QK.partition_B(cute.make_tensor(sB, eights)))
    acc_S0, acc_S1 = (mma_QK.make_fragment_C(mma_QK.partition_shape_C((ROWS, SLICE))) for _ in range(2))
    acc_O = mma_PV.make_fragment_C(mma_PV.partition_shape_C((ROWS, 16 * variant.steps)))
    tSrQ = mma_QK.make_fragment_A(mma_QK.partition_shape_A((ROWS, padded(variant.channels))))
    tSsQ = mma_PI.make_fragment_A(thr_PI.partition_A(sQ))  # (., 1, step, tile)
    tSrA = mma_QK.make_fragment_A(mma_QK.partition_shape_A((ROWS, 16)))
    tSrA.fill(variant.dtype(0.0))
    coefficients(tSrA, inverse, thread.t4, variant.dtype)
    pin_registers(tSrA, thread.lane)
    ldmatrix = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), variant.dtype)
    loads = cute.make_tiled_copy_A(ldmatrix, mma_QK).get_slice(wt)
    copy = mma.QueryCopy(loads, loads.partition_S(sQ), loads.retile(tSrQ), excess)
    m, l = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(4, Float32)
    return (
        mma.ForwardOperands(tSrQ, tSsQ, tSrA, tSrK, tSrB, tSrP, tSrI, tOrV),
        mma.ForwardRow(acc_S0, acc_S1, acc_O, m, l),
        copy,
    )


@cute.jit
def row_keys(
    variant, operands, row, copy, turns: cute.Tensor, rings, c: Float32, thread, turn: Int32, slot, query_phase: Int32,
    count: Int32, blocks: Int32,
):  # fmt: skip
    """Do all keys of the row that is `turn` in a stream; then the next row's first scores are on their way.

    Returns the slots of keys and queries to come, and how many rows are left. More than 60 lines: see `consume`.
    """
    s, half, _, _, lane, *_ = thread
    # A shuffle hides that these do not change (or, the stage, cycle) over the loop: otherwise the compiler hoists
    # some 50 matrix descriptors out of it, cannot keep them in uniform registers, and spills.
    hf, first = arch.make_warp_uniform(half), arch.make_warp_uniform(s * variant.stages)
    slot = Slot(arch.make_warp_uniform(slot.stage), slot.phase)
    for x in range_constexpr(4):
        row.l[x] = Float32(0.0)
    for x in range_constexpr(2):
        row.m[x] = Float32(-3e38)
    slices, full = 2 * blocks, blocks
    if const_expr(variant.row):
        slices = turns[s, turn, 1]
        # With 48 channels, which of the two a shuffle hides decides whether ptxas serialises the products.
        if const_expr(variant.odd or variant.pair):
            slices = arch.make_warp_uniform(slices)
        full = cutlass.max(slices >> 1, 1)
        if const_expr(not (variant.odd or variant.pair)):
            full = arch.make_warp_uniform(full)
    left = full
    before = slot.stage
    output = mma.query_slot(variant, s, turn + 1, query_phase).stage
    queries = mma.query_operand(variant, operands, s, half, turn)
    count -= 1
    if const_expr(variant.resident):
        stream = rings.at(first)
        slot, before = mma.chain_steps(
            variant, 0, left, full, queries, operands, row, c, hf, slot, before, output, stream, lane
        )
    else:
        while left > 0:
            hf, first = arch.make_warp_uniform(hf), arch.make_warp_uniform(first)
            slot = Slot(arch.make_warp_uniform(slot.stage), slot.phase)
            stream = rings.at(first)
            slot, before = mma.chain_steps(
                variant, 0, left, full, queries, operands, row, c, hf, slot, before, output, stream, lane
            )
            left -= CHAIN
            if left > 0:
                mma.wait_keys(variant, stream, slot)
                warpgroup.fence()
                tile, stage = mma.pair_tile(variant, 0, slot, hf), stream.keys.index(slot.stage)
                mma.scores(variant, queries, operands, row.acc_S0, 0, tile, stage)
                mma.softmax(variant, row, operands, c, row.acc_S1, 1, stream.keys.index(before))
                warpgroup.wait_group(0)
                mma.release_keys(variant, stream, before, lane)
    rings = rings.at(first)
    tail = Int32(1) if const_expr(variant.odd) else 1
    if const_expr(variant.odd):
        if slices & 1 == 1 and slices > 1:  # a last block of one slice
            mma.wait_keys(variant, rings, slot)
            mma.softmax(variant, row, operands, c, row.acc_S1, 1, rings.keys.index(before))
            mma.scores(
                variant,
                queries,
                operands,
                row.acc_S1,
                0,
                mma.pair_tile(variant, slices >> 1, slot, hf),
                rings.keys.index(slot.stage),
            )
            warpgroup.wait_group(0)
            mma.release_keys(variant, rings, before, lane)
            tail = Int32(0)
            before, slot = slot.stage, rings.keys.advance(slot)
    # the row's last slice; the first scores of the next row are on their way meanwhile
    if count > 0:
        mma.load_queries(variant, rings, copy, operands.tSrQ, s, half, turn + 1, query_phase)
        query_phase ^= 1
        mma.wait_keys(variant, rings, slot)
    warpgroup.fence()
    queries = mma.query_operand(variant, operands, s, hf, turn + 1)
    mma.scores(variant, queries, operands, row.acc_S0, 0, mma.pair_tile(variant, 0, slot, hf), rings.keys.index(slot.stage))
    mma.softmax(variant, row, operands, c, row.acc_S1, tail, rings.keys.index(before))
    warpgroup.wait_group(0)
    mma.release_keys(variant, rings, before, lane)
    if count > 0:
        mma.release_registers(variant, rings, s, lane)
    return slot, query_phase, count


@cute.jit
def skip_rows(variant, turns: cute.Tensor, rings, thread, turn: Int32, slot, query_phase: Int32, count: Int32):
    """Release what comes for `count` rows, for a warpgroup that has no queries of a last panel.

    Returns the turn and the slots of keys and queries to come.
    """
    s, _, _, _, lane, *_ = thread
    while count > 0:
        rings.queries.consumer_wait(mma.query_slot(variant, s, turn, query_phase))
        query_phase ^= 1
        slices = turns[s, turn, 1]
        turn = (turn + 1) & 3
        arch.sync_warp()
        if const_expr(variant.slots == 1):
            mma.release_registers(variant, rings, s, lane)
        else:
            mma.release_output(variant, rings, mma.query_slot(variant, s, turn, query_phase).stage, lane)
        for _ in cutlass.range((slices + 1) // 2, unroll=1):
            rings.keys.consumer_wait(slot)
            # not by `release`: with it ptxas gives other registers to some kernels
            if lane == 0:
                arch.mbarrier_arrive(rings.keys.emptied(slot.stage))
            if const_expr(variant.streamed):
                rings.pair.consumer_wait(slot)
                if lane == 0:
                    arch.mbarrier_arrive(rings.pair.emptied(slot.stage))
            slot = rings.keys.advance(slot)
        count -= 1
    return turn, slot, query_phase


@cute.jit
def store_row(
    variant, row, args, target, sO: cute.Tensor, copy, floor: Float32, repairs: Boolean, count: Int32, notes: Any,
    origins: cute.Tensor, thread,
):  # fmt: skip
    """Write a row's o, LSE and reference, but for queries that `repair` does again.

    More than 60 lines: 20 of them are this docstring.

    Their LSE is NaN if what scores were measured from was wrong, and +inf if biases may have swallowed them.

    Args:
        row: acc_O, m and l.
        args: arguments of the kernel.
        target: the tile of 16 queries, h, n, b, and the tile of shared memory from which o leaves.
        sO, copy: those tiles, and the copy of o to global memory.
        floor: queries with a lower reference attend to nothing.
        repairs: whether a row before has to be done again.
        count: how many rows come after.
        notes: see `consume`.
        origins: what the pair bias of the warp's queries is measured from.

    Returns:
        Whether this row, or one before, has to be done again.
    """
    (_, _, acc_O, m, l), (tile, h, n, b, output), (_, _, _, _, lane, g, t4, *_) = row, target, thread
    lse, reference = args.lse, args.reference
    for x in range_constexpr(2):
        l[x] = arch.warp_reduction_sum(l[2 * x] + l[2 * x + 1], threads_in_group=4)
    arch.cp_async_bulk_wait_group(0, read=True)
    arch.sync_warp()
    stmatrix = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), variant.dtype)
    dead = (m[0] < floor, m[1] < floor)
    factors = [cutlass.select_(dead[x], Float32(0.0), arch.rcp_approx(l[x])) for x in range(2)]
    for x in range_constexpr(variant.steps):
        scaled = cute.make_rmem_tensor(8, Float32)
        for y in range_constexpr(8):
            scaled[y] = acc_O[8 * x + y] * factors[y // 2 % 2]
        short = cute.make_rmem_tensor(8, variant.dtype)
        short.store(scaled.load().to(variant.dtype))
        target = cute.local_tile(sO[None, None, output], (1, 8), (lane % 16, 2 * x + lane // 16))
        cute.copy(stmatrix, short, target[0, None])
    arch.fence_proxy("async.shared", space="cta")
    arch.sync_warp()
    # The second stream repeats the last of an odd number of rows, to stay in step, and writes nothing.
    limit = args.q.shape[3]
    if const_expr(variant.streamed):
        if count == 0 and notes[5] == 1:
            limit = Int32(0)
        if limit > 0:
            copy.store(output, (tile, h, n, b))
    else:
        copy.store(output, (tile, h, n, b))
    arch.cp_async_bulk_commit_group()
    for x in range_constexpr(2):
        i = tile * 16 + g + 8 * x
        good = l[x] < (2.0**64 if variant.dtype is BFloat16 else 2.0**15)
        far = Boolean(False)
        if const_expr(variant.pair):
            far = (m[x] < LOWEST) & (m[x] >= floor)
        repairs = repairs | (not good) | far
        if t4 == 0 and i < limit:
            value = m[x] + cute.math.log2(l[x], fastmath=True)
            value = cutlass.select_(dead[x], -Float32.inf, value)
            origin = Float32(0.0)
            if const_expr(variant.pair):
                origin = origins[g + 8 * x]
                value = cutlass.select_(far, Float32.inf, value)
            lse[b, n, h, i] = cutlass.select_(good, value, Float32.nan)
            reference[b, n, h, i] = origin
    return repairs


@cute.jit
def repair_rows(variant, args, block: Int32, sizes, thread):
    """Do the queries again that this warp marked with an LSE of NaN or +inf."""
    _, _, panels, N, LQ = sizes
    s, half, w, *_ = thread
    arch.sync_warp()
    unit, last = panel_start(block, *sizes), panel_start(block + 1, *sizes)
    while unit < last:
        panel, p0, p1 = stretch(unit, last, N)
        phase = panel_phase(panel, *sizes)
        ib, h, b = place(panel, panels, args.q.shape[2])
        i0 = (ib * HALVES + half) * ROWS + w * WARP_QUERIES
        i = cutlass.min(i0 + arch.lane_idx() % WARP_QUERIES, LQ - 1)
        p = p0 + s
        while p < p1:
            n = interleaved_row(p, phase, args.interleave, N)
            value = args.lse[b, n, h, i]
            if i0 < LQ and arch.vote_any_sync(value != value or value == Float32.inf):
                repair_queries(variant, args, b, n, h, i0)
            p += STREAMS
        unit += p1 - p0
