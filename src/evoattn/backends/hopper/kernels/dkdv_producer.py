"""The producer warps of `KeyGradients`: they load rows, their queries, and a pair bias that streams."""

from __future__ import annotations

import cutlass
from cutlass import Boolean, Int32, cute
from cutlass.cute import arch

from evoattn.backends.hopper.kernels.statistics import TILE
from evoattn.backends.hopper.lib.copies import bulk_load
from evoattn.backends.hopper.lib.live_rows import next_panel, row_at_rank
from evoattn.backends.hopper.lib.ring import Slot
from evoattn.backends.hopper.lib.schedule import opening, uniform_row
from evoattn.backends.hopper.tiles import QUERIES, ROWS, padded


@cute.jit
def produce(
    variant, s: Int32, args, span, sizes, skips_rows: Boolean, sS: cute.Pointer, rings, copies, NT: Int32, lane: Int32,
    row_numbers: cute.Tensor,
):  # fmt: skip
    """Bring in what stream s needs: k and v of a row, then its q, do and statistics, a block of queries after the other.

    `row_count` is how many rows the stream has begun. `row_numbers` [4] tells consumers the number n of row t of a stream, at
    t % 4, and that of the next. Four entries are enough: a warp that reads entry t has given k and v back up to row t + 1 at
    most. By then t + 2 and t + 3 are written, and t + 1 is written again with the same number.

    skips_rows: whether any row is left out of any panel. `time` counts as in `schedule`.
    """
    begin, end, bid, each, change = span
    copy_K, copy_V, copy_Q, copy_dO = copies
    NS, live, stats = variant.streams, (args.order, args.starts), args.stats
    ring = rings.queries.of(s, variant.stages)
    slot, row_count, time = ring.start(), Int32(0), begin
    while time < end:
        i, h, b, n0, n1, start, rows = next_panel(variant, time, end, change, live, sizes, lane)
        panel_times = opening(start, rows, each, bid, start + n0)
        time = cutlass.min(start + rows, end)
        m, count, n = s, n1 - n0, Int32(0)
        if m < count:
            n = row_at_rank(variant, uniform_row(m, rows, panel_times), b, live, skips_rows)
        while m < count:
            following = n
            if m + NS < count:
                following = row_at_rank(variant, uniform_row(m + NS, rows, panel_times), b, live, skips_rows)
            rings.keys.producer_acquire(Slot(s, row_count & 1))
            with arch.elect_one():
                row_numbers[row_count & 3], row_numbers[(row_count + 1) & 3] = n, following
                rings.keys.expect(s, 2 * ROWS * padded(variant.channels) * 2)
            copy_K.load((i, h, n, b), 2 * s, rings.keys, s)
            copy_V.load((i, h, n, b), 2 * s + 1, rings.keys, s)
            row_count += 1
            arch.griddepcontrol_wait()
            for j in cutlass.range(NT, unroll=1):
                x = ring.index(slot.stage)
                ring.producer_acquire(slot, 2 * QUERIES * padded(variant.channels) * 2 + TILE * 4)
                copy_Q.load((j, h, n, b), x, ring, slot.stage)
                copy_dO.load((j, h, n, b), x, ring, slot.stage)
                tile = cute.local_tile(stats[b, n, h, None], (TILE,), (j,))
                to = cute.make_tensor(sS + x * TILE, cute.make_layout(TILE))
                with arch.elect_one():
                    bulk_load(tile, to, ring, slot.stage)
                slot = ring.advance(slot)
            m, n = m + NS, following


@cute.jit
def produce_bias(variant, args, span, sizes, sP: cute.Pointer, ring, NT: Int32, lane: Int32):
    """Bring in the tiles of the pair bias, each once for all streams."""
    begin, end, _, _, change = span
    NS, pair, live = variant.streams, args.pair, (args.order, args.starts)
    slot, time = ring.start(), begin
    while time < end:
        i, h, b, n0, n1, start, rows = next_panel(variant, time, end, change, live, sizes, lane)
        time = cutlass.min(start + rows, end)
        tiles = pair[b % pair.shape[0], h % pair.shape[1], i, None, None]
        for _ in cutlass.range((n1 - n0 + NS - 1) // NS, unroll=1):
            for j in cutlass.range(NT, unroll=1):
                ring.producer_acquire(slot)
                to = cute.make_tensor(sP + slot.stage * ROWS * QUERIES, cute.make_layout(ROWS * QUERIES))
                with arch.elect_one():
                    ring.expect(slot.stage, ROWS * QUERIES * variant.tile.width // 8)
                    bulk_load(tiles[j, None], to, ring, slot.stage)
                slot = ring.advance(slot)
