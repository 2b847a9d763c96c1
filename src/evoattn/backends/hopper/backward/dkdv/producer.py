"""What the producer warps of the kernel of the keys bring in: rows, their queries, and a pair bias that streams."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, cute
from cutlass.cute import arch
from cutlass.cute.nvgpu import cpasync

from evoattn.backends.hopper.backward.common import TILE, row_at, sleep_until
from evoattn.backends.hopper.backward.dkdv.mma import KeyMma
from evoattn.backends.hopper.backward.live_rows import Line
from evoattn.backends.hopper.backward.schedule import opening
from evoattn.backends.hopper.kernels.tile_sizes import QUERIES, ROWS

__all__ = ["QUERIES", "KeyProducer"]


class KeyProducer(Line, KeyMma):
    """One warp for each stream of rows, one for the pair bias; `KeyGradients` says what the attributes are."""

    stages: int
    streams: int
    ring: int
    tile: Any

    @cute.jit
    def produce(
        self,
        s: Int32,
        span,
        sizes,
        live,
        some: Boolean,
        stats: cute.Tensor,
        pS: cute.Pointer,
        bars,
        copies,
        NT: Int32,
        lane: Int32,
        box: cute.Tensor,
    ):
        """Bring in what stream s needs: k and v of a row, then its q, do and statistics, a block of queries after the other.

        In `box` consumers find the number n of each row in turn, and of the one that follows. Four are enough: a warp that
        reads the number of turn t has given k and v back up to turn t + 1 at most, so by then t + 2 and t + 3 are written, and
        t + 1 is written again with the same number.
        """
        begin, end, bid, each, change = span
        full, empty, kfull, kempty = bars
        (aK, kG, kS), (aV, vG, vS), (aQ, qG, qS), (aG, gG, gS) = copies
        D, ST, NS = self.D, self.stages, self.streams
        bulk = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32)
        st, ph, turn, at = Int32(0), Int32(0), Int32(0), begin
        while at < end:
            i, h, b, n0, n1, start, rows = self.come_to(at, end, change, live, sizes, lane)
            known = opening(start, rows, each, bid, start + n0)
            at = cutlass.min(start + rows, end)
            m, count, n = s, n1 - n0, Int32(0)
            if m < count:
                n = self.row_of(row_at(m, rows, known), b, live, some)
            while m < count:
                following = n
                if m + NS < count:
                    following = self.row_of(row_at(m + NS, rows, known), b, live, some)
                sleep_until(kempty + s, (turn & 1) ^ 1)
                with arch.elect_one():
                    box[turn & 3], box[(turn + 1) & 3] = n, following
                    arch.mbarrier_arrive_and_expect_tx(kfull + s, 2 * ROWS * D * 2)
                cute.copy(aK, kG[None, i, h, n, b], kS[None, 2 * s], tma_bar_ptr=kfull + s)
                cute.copy(aV, vG[None, i, h, n, b], vS[None, 2 * s + 1], tma_bar_ptr=kfull + s)
                turn += 1
                arch.griddepcontrol_wait()
                for j in cutlass.range(NT, unroll=1):
                    x = s * ST + st
                    sleep_until(empty + x, ph ^ 1)
                    with arch.elect_one():
                        arch.mbarrier_arrive_and_expect_tx(full + x, 2 * QUERIES * D * 2 + TILE * 4)
                    cute.copy(aQ, qG[None, j, h, n, b], qS[None, x], tma_bar_ptr=full + x)
                    cute.copy(aG, gG[None, j, h, n, b], gS[None, x], tma_bar_ptr=full + x)
                    from_ = cute.local_tile(stats[b, n, h, None], (TILE,), (j,))
                    to = cute.make_tensor(pS + x * TILE, cute.make_layout(TILE))
                    with arch.elect_one():
                        g1, s1 = cute.group_modes(from_, 0, 1), cute.group_modes(to, 0, 1)
                        cute.copy(bulk, g1, s1, mbar_ptr=full + x)
                    st += 1
                    if st == ST:
                        st = Int32(0)
                        ph ^= 1
                m, n = m + NS, following

    @cute.jit
    def produce_bias(
        self,
        span,
        sizes,
        live,
        pair: cute.Tensor,
        ring: cute.Pointer,
        bfull: cute.Pointer,
        bempty: cute.Pointer,
        NT: Int32,
        lane: Int32,
    ):
        """Bring in the tiles of the pair bias, each once for all streams."""
        begin, end, _, _, change = span
        NS, RG = self.streams, self.ring
        st, ph, at = Int32(0), Int32(0), begin
        copy = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), self.tile)
        while at < end:
            i, h, b, n0, n1, start, rows = self.come_to(at, end, change, live, sizes, lane)
            at = cutlass.min(start + rows, end)
            tiles = pair[b % pair.shape[0], h % pair.shape[1], i, None, None]
            for _ in cutlass.range((n1 - n0 + NS - 1) // NS, unroll=1):
                for j in cutlass.range(NT, unroll=1):
                    sleep_until(bempty + st, ph ^ 1)
                    to = cute.make_tensor(ring + st * ROWS * QUERIES, cute.make_layout(ROWS * QUERIES))
                    with arch.elect_one():
                        arch.mbarrier_arrive_and_expect_tx(bfull + st, ROWS * QUERIES * self.tile.width // 8)
                        g2, s2 = cute.group_modes(tiles[j, None], 0, 1), cute.group_modes(to, 0, 1)
                        cute.copy(copy, g2, s2, mbar_ptr=bfull + st)
                    st += 1
                    if st == RG:
                        st = Int32(0)
                        ph ^= 1
