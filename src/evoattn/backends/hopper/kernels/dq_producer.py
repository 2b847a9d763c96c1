"""The producer warps of `QueryGradients`.

One warp owns the keys of one or two warpgroups, and one warp the queries. Each loops over the panels of its block and their
rows n. They write tiles into shared memory; the warp of the queries also writes the statistics that `KeyGradients` reads.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, const_expr, cute, range_constexpr
from cutlass.cute import arch

from evoattn.backends.hopper.kernels.dq_consumer import live_tiles
from evoattn.backends.hopper.kernels.dq_sum import DLSE, NEG_DELTA, NEG_LSE, ROW, ROWS_LEFT, TILES, QuerySizes
from evoattn.backends.hopper.kernels.key_bias import TERMS
from evoattn.backends.hopper.kernels.statistics import NO_NEG_LSE, TILE_WORDS, write_statistics
from evoattn.backends.hopper.lib.copies import bulk_load
from evoattn.backends.hopper.lib.live_rows import LiveRows
from evoattn.backends.hopper.lib.ring import Slot
from evoattn.backends.hopper.lib.schedule import Span, first_row, nth_row, panel_times, place, stretch, uniform_row
from evoattn.backends.hopper.tiles import KEYS, MMA_M, pad_channels
from evoattn.core.numerics import LN2, LOG2E


def next_stretch(unit, span: Span, sizes: QuerySizes):
    """The stretch that a block comes to at `unit`.

    Returns the unit after it; i, h and b of its panel; the number of its rows; and the times for `nth_row`.
    """
    _, end, bid, each, change = span
    N, H, NQ, _ = sizes
    panel, p0, p1 = stretch(unit, end, N)
    start = first_row(panel, N, change)
    times = panel_times(start, N, each, bid, start + p0)
    unit += p1 - p0
    return unit, place(panel, NQ, H), p1 - p0, times


@cute.jit
def produce_keys(
    variant, wg: Int32, rank: Int32, lane: Int32, args, span: Span, sizes: QuerySizes, sTerms: cute.Pointer, ring, copies
):
    """Load the keys of warpgroup `wg`, and of `wg` + `key_producers` if there is one, one stage after another."""
    N, WG, second, live = sizes.n, variant.groups, wg + variant.key_producers, LiveRows(args.mOrder, args.mStarts)
    slot, unit = ring.start(), span.begin
    if const_expr(variant.key_bias):
        arch.griddepcontrol_wait()
    if const_expr(variant.skips):
        arch.griddepcontrol_launch_dependents()  # `KeyGradients` reads at once what this kernel has waited for
    while unit < span.end:
        unit, (_, h, b), count, times = next_stretch(unit, span, sizes)
        position = Int32(0)
        while position < count:
            n = uniform_row(position, N, times)
            position = next_row(variant, position, count, N, times, live, b, lane)
            tiles = Int32(variant.tiles)
            if const_expr(len(variant.exits) > 0):
                tiles = live_tiles(variant, tiles_to(variant, live, b, n), rank, wg)
            for j in cutlass.range(tiles, unroll=1):
                bias_row = b * args.stride_b + n * args.stride_n
                tile = key_tile(variant, j, rank * WG + wg)
                load_keys(variant, (tile, h, n, b), slot, args.mTerms, bias_row, sTerms, ring.of(wg, variant.stages), copies)
                if second < WG:
                    tile = key_tile(variant, j, rank * WG + second)
                    load_keys(
                        variant, (tile, h, n, b), slot, args.mTerms, bias_row, sTerms, ring.of(second, variant.stages), copies
                    )
                slot = ring.of(wg, variant.stages).advance(slot)


def load_keys(variant, coord, slot, mTerms, bias_row, sTerms, ring, copies):
    """Load keys, values and key bias of the tile at `coord`, once its stage is empty; `bias_row`: that of the key bias."""
    i, words, (copy_K, copy_V) = ring.index(slot.stage), variant.keys * TERMS, copies
    ring.producer_acquire(slot, 2 * variant.keys * pad_channels(variant.channels) * 2 + (words * 2 if variant.key_bias else 0))
    copy_K.load(coord, i, ring, slot.stage)
    copy_V.load(coord, i, ring, slot.stage)
    if variant.key_bias:
        terms = cute.local_tile(mTerms, (1, words), (bias_row, coord[0]))
        to = cute.make_tensor(sTerms + i * words, cute.make_layout((1, words)))
        with arch.elect_one():
            bulk_load(terms, to, ring, slot.stage)


def key_tile(variant, j, group):
    """The number of tile j of a warpgroup among all tiles of keys."""
    return j * variant.cluster * variant.groups + group if variant.interleave else group * variant.tiles + j


def tiles_to(variant, live: LiveRows, b, n):
    """The tiles of a row's keys up to the end of the last panel that has one that is not masked."""
    return (live.order[b, 1, n] * KEYS + variant.keys - 1) // variant.keys


@cute.jit
def next_row(variant, position: Int32, count: Int32, n: Int32, times, live: LiveRows, b: Int32, lane: Int32) -> Int32:
    """The position of the next row that is not skipped, or `count`. The lanes of a warp look at 32 rows at a time.

    Call it after the launch that writes `live` is complete.
    """
    position += 1
    if const_expr(variant.skips):
        order, starts = live
        if starts[b, 1] < n:
            live_lanes = Int32(0)
            while position < count and live_lanes == 0:
                candidate = position + lane
                is_live = order[b, 1, nth_row(cutlass.min(candidate, count - 1), n, times)] > 0
                live_lanes = arch.vote_ballot_sync(candidate < count and is_live)
                position += Int32(cutlass.select_(live_lanes == 0, Int32(32), arch.popc((live_lanes & -live_lanes) - 1)))
            position = cutlass.min(position, count)
    return position


@cute.jit
def produce_rows(
    variant, rank: Int32, lane: Int32, args, span: Span, sizes: QuerySizes, inverse: Float32, sStats: cute.Tensor,
    sWork: cute.Tensor, ring, copies,
):  # fmt: skip
    """Load q, o, dO and LSE of each row, and write the statistics of the row before for `KeyGradients`."""
    N, LQ = sizes.n, sizes.lq
    copy_Q, copy_O, copy_dO = copies
    mLSE, mdLSE, mStats, live = args.mLSE, args.mdLSE, args.mStats, LiveRows(args.mOrder, args.mStarts)
    phase, unit = Int32(0), span.begin
    rNegLSE, rOldNegLSE, rdLSE = (cute.make_rmem_tensor(2, Float32) for _ in range(3))
    old_b, old_n, old_h, old_i, count = Int32(0), Int32(0), Int32(0), Int32(0), Int32(0)
    if const_expr(variant.skips):
        arch.griddepcontrol_wait()
    while unit < span.end:
        unit, (i, h, b), rows, times = next_stretch(unit, span, sizes)
        position = Int32(0)
        while position < rows:
            n = uniform_row(position, N, times)
            following = next_row(variant, position, rows, N, times, live, b, lane)
            for x in range_constexpr(2):
                q = i * MMA_M + x * 32 + lane
                value = mLSE[b, n, h, cutlass.min(q, LQ - 1)]
                real = q < LQ and value > Float32(-float("inf"))
                rNegLSE[x] = cutlass.select_(real, -value, Float32(NO_NEG_LSE))
                if const_expr(variant.dlse):
                    rdLSE[x] = cutlass.select_(real, mdLSE[b, n, h, cutlass.min(q, LQ - 1)] * LOG2E, Float32(0.0))
            ring.producer_acquire(Slot(0, phase))
            if count > 0 and rank == 0:
                store_statistics(variant, mStats[old_b, old_n, old_h, None], sStats, rOldNegLSE, old_i, inverse, lane)
            old_b, old_n, old_h, old_i = b, n, h, i
            for x in range_constexpr(2):
                sStats[x * 32 + lane, NEG_LSE] = rNegLSE[x]
                if const_expr(variant.dlse):
                    sStats[x * 32 + lane, DLSE] = rdLSE[x]
                rOldNegLSE[x] = rNegLSE[x] * LN2
            arch.sync_warp()
            with arch.elect_one():
                sWork[count % 4, ROW] = n
                if const_expr(variant.skips):
                    sWork[count % 4, ROWS_LEFT] = rows - following
                if const_expr(len(variant.exits) > 0):
                    sWork[count % 4, TILES] = tiles_to(variant, live, b, n)
                ring.expect(0, (2 if variant.gate else 3) * MMA_M * pad_channels(variant.channels) * 2)
            copy_Q.load((i, h, n, b), 0, ring, 0)
            if const_expr(not variant.gate):
                copy_O.load((i, h, n, b), 1, ring, 0)
            copy_dO.load((i, h, n, b), 2 + phase, ring, 0)
            count += 1
            phase ^= 1
            position = following
    if count > 0:
        ring.producer_acquire(Slot(0, phase))
        if rank == 0:
            store_statistics(variant, mStats[old_b, old_n, old_h, None], sStats, rOldNegLSE, old_i, inverse, lane)


@cute.jit
def store_statistics(
    variant, mStats: cute.Tensor, sStats: cute.Tensor, rNegLSE: cute.Tensor, i: Int32, inverse: Float32, lane: Int32
):
    """Write the statistics of 64 queries for `KeyGradients`."""
    for x in range_constexpr(2):
        q = x * 32 + lane
        to = cute.local_tile(mStats, (TILE_WORDS,), (i,))
        write_statistics(to, q, rNegLSE[x], sStats[q, NEG_DELTA], inverse, variant.dtype)
