"""The producer warps of the kernel of the queries: they load tiles, and leave statistics for the kernel of the keys."""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, const_expr, cute, range_constexpr
from cutlass.cute import arch

from evoattn.backends.hopper.backward.common import NEVER, row_at
from evoattn.backends.hopper.backward.dq.mma import QueryMma
from evoattn.backends.hopper.backward.schedule import first_row, opening, row
from evoattn.backends.hopper.kernels.key_bias import TERMS
from evoattn.backends.hopper.kernels.primitives import LN2, LOG2E
from evoattn.backends.hopper.kernels.ring import Slot
from evoattn.backends.hopper.kernels.schedule import place, stretch
from evoattn.backends.hopper.kernels.tile_sizes import KEYS, ROWS
from evoattn.backends.hopper.kernels.tma import bulk_load

__all__ = ["QueryProducer"]


class QueryProducer(QueryMma):
    """Two or three warps for the keys, one for the rows; `QueryGradients` says what the attributes are."""

    stages: int
    keys: int
    key_producers: int
    skips: bool
    gated: bool

    @cute.jit
    def produce_keys(self, s: Int32, rank: Int32, lane: Int32, args, span, sizes, sB: cute.Pointer, ring, copies):
        """Bring in the keys of warpgroup s, and of s + `key_producers` where there is one, a stage after the other."""
        begin, end, bid, each, change = span
        N, H, NQ, _ = sizes
        WG, also, live = self.groups, s + self.key_producers, (args.order, args.starts)
        slot, at = ring.start(), begin
        if const_expr(self.row):
            arch.griddepcontrol_wait()
        if const_expr(self.skips):
            arch.griddepcontrol_launch_dependents()  # `dkdv` reads at once what this kernel has waited for
        while at < end:
            pan, n0, n1 = stretch(at, end, N)
            start = first_row(pan, N, change)
            known = opening(start, N, each, bid, start + n0)
            at += n1 - n0
            _, h, b = place(pan, NQ, H)
            position, count = Int32(0), n1 - n0
            while position < count:
                n = row_at(position, N, known)
                position = self.next_row(position, count, N, known, live, b, lane)
                tiles = Int32(self.tiles)
                if const_expr(len(self.exits) > 0):
                    tiles = self.live_tiles(self.tiles_to(live, b, n), rank, s)
                for j in cutlass.range(tiles, unroll=1):
                    line = b * args.row_b + n * args.row_n
                    tile = self.tile_of(j, rank * WG + s)
                    self.load_keys((tile, h, n, b), slot, args.row, line, sB, ring.of(s, self.stages), copies)
                    if also < WG:
                        tile = self.tile_of(j, rank * WG + also)
                        self.load_keys((tile, h, n, b), slot, args.row, line, sB, ring.of(also, self.stages), copies)
                    slot = ring.of(s, self.stages).advance(slot)

    def load_keys(self, at, slot, row, line, sB, ring, copies):
        """Load keys, values and key-wise bias of a tile, once its stage is empty; `line`: of the key-wise bias."""
        i, unit, (copy_K, copy_V) = ring.index(slot.stage), self.keys * TERMS, copies
        ring.producer_acquire(slot, 2 * self.keys * self.D * 2 + (unit * 2 if self.row else 0))
        copy_K.load(at, i, ring, slot.stage)
        copy_V.load(at, i, ring, slot.stage)
        if self.row:
            terms = cute.local_tile(row, (1, unit), (line, at[0]))
            to = cute.make_tensor(sB + i * unit, cute.make_layout((1, unit)))
            with arch.elect_one():
                bulk_load(terms, to, ring, slot.stage)

    def tiles_to(self, live, b, n):
        """The tiles of a row's keys up to the end of the last panel that has one that is not masked."""
        return (live[0][b, 1, n] * KEYS + self.keys - 1) // self.keys

    @cute.jit
    def next_row(self, position: Int32, count: Int32, n: Int32, known, live, b: Int32, lane: Int32) -> Int32:
        """The position after this one of a row that is not left out, or `count`: a warp looks at 32 together.

        Only for warps that have waited for what `live` says.
        """
        position += 1
        if const_expr(self.skips):
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
        self, rank: Int32, lane: Int32, args, span, sizes, inverse: Float32, sN: cute.Tensor, work: cute.Tensor, ring, copies
    ):
        """Bring in q, o, do and lse of each row, and leave the statistics of the row before for the other kernel."""
        begin, end, bid, each, change = span
        N, H, NQ, LQ = sizes
        copy_Q, copy_O, copy_dO = copies
        lse, dlse, stats, live = args.lse, args.dlse, args.stats, (args.order, args.starts)
        ph, at = Int32(0), begin
        own, old, extra = (cute.make_rmem_tensor(2, Float32) for _ in range(3))
        pb, pn, pt, pi, count = Int32(0), Int32(0), Int32(0), Int32(0), Int32(0)
        if const_expr(self.skips):
            arch.griddepcontrol_wait()
        while at < end:
            pan, n0, n1 = stretch(at, end, N)
            start = first_row(pan, N, change)
            known = opening(start, N, each, bid, start + n0)
            at += n1 - n0
            i, h, b = place(pan, NQ, H)
            position, rows = Int32(0), n1 - n0
            while position < rows:
                n = row_at(position, N, known)
                following = self.next_row(position, rows, N, known, live, b, lane)
                for x in range_constexpr(2):
                    q = i * ROWS + x * 32 + lane
                    value = lse[b, n, h, cutlass.min(q, LQ - 1)]
                    real = q < LQ and value > Float32(-float("inf"))
                    own[x] = cutlass.select_(real, -value, Float32(NEVER))
                    if const_expr(self.dlse):
                        extra[x] = cutlass.select_(real, dlse[b, n, h, cutlass.min(q, LQ - 1)] * LOG2E, Float32(0.0))
                ring.producer_acquire(Slot(0, ph))
                if count > 0 and rank == 0:
                    self.keep(stats[pb, pn, pt, None], sN, old, pi, inverse, lane)
                pb, pn, pt, pi = b, n, h, i
                for x in range_constexpr(2):
                    sN[x * 32 + lane, 0] = own[x]
                    if const_expr(self.dlse):
                        sN[x * 32 + lane, 2] = extra[x]
                    old[x] = own[x] * LN2
                arch.sync_warp()
                with arch.elect_one():
                    work[count % 4, 0] = n
                    if const_expr(self.skips):
                        work[count % 4, 1] = rows - following
                    if const_expr(len(self.exits) > 0):
                        work[count % 4, 2] = self.tiles_to(live, b, n)
                    ring.expect(0, (2 if self.gated else 3) * ROWS * self.D * 2)
                copy_Q.load((i, h, n, b), 0, ring, 0)
                if const_expr(not self.gated):
                    copy_O.load((i, h, n, b), 1, ring, 0)
                copy_dO.load((i, h, n, b), 2 + ph, ring, 0)
                count += 1
                ph ^= 1
                position = following
        if count > 0:
            ring.producer_acquire(Slot(0, ph))
            if rank == 0:
                self.keep(stats[pb, pn, pt, None], sN, old, pi, inverse, lane)
