"""The producer warps of `KeyGradients`.

A warp owns a stream of rows, or the pair bias if it streams. It loops over the panels of its block, the rows n of a panel, and
the tiles of queries of a row. It writes k, v, q, dO, statistics and pair bias into shared memory.
"""

from __future__ import annotations

import cutlass
from cutlass import Boolean, Int32, cute
from cutlass.cute import arch

from evoattn.backends.hopper.kernels.statistics import TILE_WORDS
from evoattn.backends.hopper.lib.copies import bulk_load
from evoattn.backends.hopper.lib.live_rows import LineSizes, LiveRows, next_panel, row_at_rank
from evoattn.backends.hopper.lib.ring import Slot
from evoattn.backends.hopper.lib.schedule import Span, panel_times, uniform_row
from evoattn.backends.hopper.tiles import MMA_M, QUERIES, pad_channels


@cute.jit
def produce(
    variant, stream: Int32, args, span: Span, sizes: LineSizes, skips_rows: Boolean, sStats: cute.Pointer, rings, copies,
    NT: Int32, lane: Int32, sRows: cute.Tensor,
):  # fmt: skip
    """Load the rows of a stream: k and v of a row, then its q, dO and statistics, a tile of queries after the other.

    `row_count` is how many rows the stream has begun. `sRows` [4] tells consumers the number n of row t of a stream, at
    t % 4, and that of the next. Four entries are enough: a warp that reads entry t has given k and v back up to row t + 1 at
    most. By then t + 2 and t + 3 are written, and t + 1 is written again with the same number.

    skips_rows: whether any row is left out of any panel. `time` counts as in `schedule`.
    """
    copy_K, copy_V, copy_Q, copy_dO = copies
    NS, live, mStats = variant.streams, LiveRows(args.mOrder, args.mStarts), args.mStats
    ring = rings.queries.of(stream, variant.stages)
    slot, row_count, time = ring.start(), Int32(0), span.begin
    while time < span.end:
        i, h, b, p0, p1, start, rows = next_panel(variant, time, span, live, sizes, lane)
        times = panel_times(start, rows, span.each, span.block, start + p0)
        time = cutlass.min(start + rows, span.end)
        position, count, n = stream, p1 - p0, Int32(0)
        if position < count:
            n = row_at_rank(variant, uniform_row(position, rows, times), b, live, skips_rows)
        while position < count:
            following = n
            if position + NS < count:
                following = row_at_rank(variant, uniform_row(position + NS, rows, times), b, live, skips_rows)
            rings.keys.producer_acquire(Slot(stream, row_count & 1))
            with arch.elect_one():
                sRows[row_count & 3], sRows[(row_count + 1) & 3] = n, following
                rings.keys.expect(stream, 2 * MMA_M * pad_channels(variant.channels) * 2)
            copy_K.load((i, h, n, b), 2 * stream, rings.keys, stream)
            copy_V.load((i, h, n, b), 2 * stream + 1, rings.keys, stream)
            row_count += 1
            arch.griddepcontrol_wait()
            for j in cutlass.range(NT, unroll=1):
                x = ring.index(slot.stage)
                ring.producer_acquire(slot, 2 * QUERIES * pad_channels(variant.channels) * 2 + TILE_WORDS * 4)
                copy_Q.load((j, h, n, b), x, ring, slot.stage)
                copy_dO.load((j, h, n, b), x, ring, slot.stage)
                tile = cute.local_tile(mStats[b, n, h, None], (TILE_WORDS,), (j,))
                to = cute.make_tensor(sStats + x * TILE_WORDS, cute.make_layout(TILE_WORDS))
                with arch.elect_one():
                    bulk_load(tile, to, ring, slot.stage)
                slot = ring.advance(slot)
            position, n = position + NS, following


@cute.jit
def produce_bias(variant, args, span: Span, sizes: LineSizes, pair_ring: cute.Pointer, ring, NT: Int32, lane: Int32):
    """Load the tiles of the pair bias, each once for all streams."""
    NS, mTiles, live = variant.streams, args.mTiles, LiveRows(args.mOrder, args.mStarts)
    slot, time = ring.start(), span.begin
    while time < span.end:
        i, h, b, p0, p1, start, rows = next_panel(variant, time, span, live, sizes, lane)
        time = cutlass.min(start + rows, span.end)
        tiles = mTiles[b % mTiles.shape[0], h % mTiles.shape[1], i, None, None]
        for _ in cutlass.range((p1 - p0 + NS - 1) // NS, unroll=1):
            for j in cutlass.range(NT, unroll=1):
                ring.producer_acquire(slot)
                to = cute.make_tensor(pair_ring + slot.stage * MMA_M * QUERIES, cute.make_layout(MMA_M * QUERIES))
                with arch.elect_one():
                    ring.expect(slot.stage, MMA_M * QUERIES * variant.tile.width // 8)
                    bulk_load(tiles[j, None], to, ring, slot.stage)
                slot = ring.advance(slot)
