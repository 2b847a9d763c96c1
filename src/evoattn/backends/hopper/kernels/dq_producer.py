"""The producer warps of `QueryGradients`: they load tiles, and store statistics for `KeyGradients`."""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, const_expr, cute, range_constexpr
from cutlass.cute import arch

from evoattn.backends.hopper.kernels.dq_consumer import live_tiles
from evoattn.backends.hopper.kernels.key_bias import TERMS
from evoattn.backends.hopper.kernels.statistics import NEVER, TILE, write_statistics
from evoattn.backends.hopper.lib.copies import bulk_load
from evoattn.backends.hopper.lib.ring import Slot
from evoattn.backends.hopper.lib.schedule import first_row, opening, place, row, stretch, uniform_row
from evoattn.backends.hopper.tiles import KEYS, ROWS, padded
from evoattn.core.numerics import LN2, LOG2E


@cute.jit
def produce_keys(variant, s: Int32, rank: Int32, lane: Int32, args, span, sizes, sB: cute.Pointer, ring, copies):
    """Bring in the keys of warpgroup s, and of s + `key_producers` where there is one, a stage after the other."""
    begin, end, bid, each, change = span
    N, H, NQ, _ = sizes
    WG, also, live = variant.groups, s + variant.key_producers, (args.order, args.starts)
    slot, at = ring.start(), begin
    if const_expr(variant.row):
        arch.griddepcontrol_wait()
    if const_expr(variant.skips):
        arch.griddepcontrol_launch_dependents()  # `KeyGradients` reads at once what this kernel has waited for
    while at < end:
        pan, n0, n1 = stretch(at, end, N)
        start = first_row(pan, N, change)
        known = opening(start, N, each, bid, start + n0)
        at += n1 - n0
        _, h, b = place(pan, NQ, H)
        position, count = Int32(0), n1 - n0
        while position < count:
            n = uniform_row(position, N, known)
            position = next_row(variant, position, count, N, known, live, b, lane)
            tiles = Int32(variant.tiles)
            if const_expr(len(variant.exits) > 0):
                tiles = live_tiles(variant, tiles_to(variant, live, b, n), rank, s)
            for j in cutlass.range(tiles, unroll=1):
                line = b * args.row_b + n * args.row_n
                tile = key_tile(variant, j, rank * WG + s)
                load_keys(variant, (tile, h, n, b), slot, args.row, line, sB, ring.of(s, variant.stages), copies)
                if also < WG:
                    tile = key_tile(variant, j, rank * WG + also)
                    load_keys(variant, (tile, h, n, b), slot, args.row, line, sB, ring.of(also, variant.stages), copies)
                slot = ring.of(s, variant.stages).advance(slot)


def load_keys(variant, at, slot, row, line, sB, ring, copies):
    """Load keys, values and key-wise bias of a tile, once its stage is empty; `line`: of the key-wise bias."""
    i, unit, (copy_K, copy_V) = ring.index(slot.stage), variant.keys * TERMS, copies
    ring.producer_acquire(slot, 2 * variant.keys * padded(variant.channels) * 2 + (unit * 2 if variant.row else 0))
    copy_K.load(at, i, ring, slot.stage)
    copy_V.load(at, i, ring, slot.stage)
    if variant.row:
        terms = cute.local_tile(row, (1, unit), (line, at[0]))
        to = cute.make_tensor(sB + i * unit, cute.make_layout((1, unit)))
        with arch.elect_one():
            bulk_load(terms, to, ring, slot.stage)


def key_tile(variant, j, group):
    """The number, among all tiles of keys, of tile j of a warpgroup."""
    return j * variant.cluster * variant.groups + group if variant.interleave else group * variant.tiles + j


def tiles_to(variant, live, b, n):
    """The tiles of a row's keys up to the end of the last panel that has one that is not masked."""
    return (live[0][b, 1, n] * KEYS + variant.keys - 1) // variant.keys


@cute.jit
def next_row(variant, position: Int32, count: Int32, n: Int32, known, live, b: Int32, lane: Int32) -> Int32:
    """The position after this one of a row that is not left out, or `count`: a warp looks at 32 together.

    Only for warps that have waited for what `live` says.
    """
    position += 1
    if const_expr(variant.skips):
        order, starts = live
        if starts[b, 1] < n:
            there = Int32(0)
            while position < count and there == 0:
                mine = position + lane
                some = order[b, 1, row(cutlass.min(mine, count - 1), n, known)] > 0
                there = arch.vote_ballot_sync(mine < count and some)
                position += Int32(cutlass.select_(there == 0, Int32(32), arch.popc((there & -there) - 1)))
            position = cutlass.min(position, count)
    return position


@cute.jit
def produce_rows(
    variant, rank: Int32, lane: Int32, args, span, sizes, inverse: Float32, sN: cute.Tensor, work: cute.Tensor, ring, copies
):
    """Bring in q, o, do and lse of each row, and leave the statistics of the row before for the other kernel."""
    begin, end, bid, each, change = span
    N, H, NQ, LQ = sizes
    copy_Q, copy_O, copy_dO = copies
    lse, dlse, stats, live = args.lse, args.dlse, args.stats, (args.order, args.starts)
    ph, at = Int32(0), begin
    own, old, extra = (cute.make_rmem_tensor(2, Float32) for _ in range(3))
    pb, pn, pt, pi, count = Int32(0), Int32(0), Int32(0), Int32(0), Int32(0)
    if const_expr(variant.skips):
        arch.griddepcontrol_wait()
    while at < end:
        pan, n0, n1 = stretch(at, end, N)
        start = first_row(pan, N, change)
        known = opening(start, N, each, bid, start + n0)
        at += n1 - n0
        i, h, b = place(pan, NQ, H)
        position, rows = Int32(0), n1 - n0
        while position < rows:
            n = uniform_row(position, N, known)
            following = next_row(variant, position, rows, N, known, live, b, lane)
            for x in range_constexpr(2):
                q = i * ROWS + x * 32 + lane
                value = lse[b, n, h, cutlass.min(q, LQ - 1)]
                real = q < LQ and value > Float32(-float("inf"))
                own[x] = cutlass.select_(real, -value, Float32(NEVER))
                if const_expr(variant.dlse):
                    extra[x] = cutlass.select_(real, dlse[b, n, h, cutlass.min(q, LQ - 1)] * LOG2E, Float32(0.0))
            ring.producer_acquire(Slot(0, ph))
            if count > 0 and rank == 0:
                store_statistics(variant, stats[pb, pn, pt, None], sN, old, pi, inverse, lane)
            pb, pn, pt, pi = b, n, h, i
            for x in range_constexpr(2):
                sN[x * 32 + lane, 0] = own[x]
                if const_expr(variant.dlse):
                    sN[x * 32 + lane, 2] = extra[x]
                old[x] = own[x] * LN2
            arch.sync_warp()
            with arch.elect_one():
                work[count % 4, 0] = n
                if const_expr(variant.skips):
                    work[count % 4, 1] = rows - following
                if const_expr(len(variant.exits) > 0):
                    work[count % 4, 2] = tiles_to(variant, live, b, n)
                ring.expect(0, (2 if variant.gate else 3) * ROWS * padded(variant.channels) * 2)
            copy_Q.load((i, h, n, b), 0, ring, 0)
            if const_expr(not variant.gate):
                copy_O.load((i, h, n, b), 1, ring, 0)
            copy_dO.load((i, h, n, b), 2 + ph, ring, 0)
            count += 1
            ph ^= 1
            position = following
    if count > 0:
        ring.producer_acquire(Slot(0, ph))
        if rank == 0:
            store_statistics(variant, stats[pb, pn, pt, None], sN, old, pi, inverse, lane)


@cute.jit
def store_statistics(variant, stats: cute.Tensor, sN: cute.Tensor, low: cute.Tensor, i: Int32, inverse: Float32, lane: Int32):
    """Write the statistics of 64 queries for the other kernel."""
    for x in range_constexpr(2):
        q = x * 32 + lane
        to = cute.local_tile(stats, (TILE,), (i,))
        write_statistics(to, q, low[x], sN[q, 1], inverse, variant.dtype)
