"""What the producer warps of the kernel of whole rows bring in, and what each query brings to the products."""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, const_expr, cute, range_constexpr
from cutlass.cute import arch

from evoattn.backends.hopper.backward.common import NEVER, TILE, clear_numbers, clear_rows, sleep_until, write_statistics
from evoattn.backends.hopper.backward.fused.mma import GROUPS, FusedMma
from evoattn.backends.hopper.kernels.primitives import LN2, LOG2E, release
from evoattn.backends.hopper.kernels.schedule import place
from evoattn.backends.hopper.kernels.tile_sizes import QUERIES, ROWS

__all__ = ["FusedProducer"]


class FusedProducer(FusedMma):
    """One warp for keys and queries, three for statistics; `FusedGradients` says what the attributes are."""

    dlse: bool
    gated: bool
    row: bool

    def third(self, z, ends):
        """the first tile of a third of them, where warpgroup z begins, and past the last"""
        first, second, third = ends
        start = Int32(cutlass.select_(z == 0, Int32(0), cutlass.select_(z == 1, first, second)))
        return start, Int32(cutlass.select_(z == 0, first, cutlass.select_(z == 1, second, third)))

    @cute.jit
    def live_tiles(self, n: Int32, b: Int32, where, tiles: Int32) -> Int32:
        """Tiles of 64 keys of a row that are done: up to the last key that is not masked, or one."""
        if const_expr(self.row):
            ends, row_b, row_n = where
            tiles = cutlass.min(cutlass.max((ends[b * row_b + n * row_n] + ROWS - 1) // ROWS, 1), tiles)
        return tiles

    @cute.jit
    def produce(self, bid: Int32, blocks: Int32, items: Int32, sizes, where, copies, bars):
        """Bring in the keys and values of each warpgroup, and the tiles of queries of each row."""
        N, H, NK, NT, _, thirds = sizes
        (aK, kG, kS), (aV, vG, vS), (aQ, qG, qS), (aG, gG, gS) = copies
        full, empty, kfull, kempty, vempty = bars
        D = self.D
        item, count = bid, Int32(0)
        before = cute.make_rmem_tensor(GROUPS, Int32)  # tiles of keys so far, of each warpgroup
        before.fill(0)
        if const_expr(self.row):
            arch.griddepcontrol_wait()
        while item < items:
            h, n, b = place(item, H, N)
            live = self.live_tiles(n, b, where, NK)
            for r in cutlass.range((live + GROUPS - 1) // GROUPS, unroll=1):
                for s in range_constexpr(GROUPS):
                    i = r * GROUPS + s
                    if i < live:
                        done = before[s]
                        before[s] = done + 1
                        x, ph = done & 1, done >> 1 & 1
                        sleep_until(kempty + 2 * s + x, ph ^ 1)
                        sleep_until(vempty + s, (done & 1) ^ 1)
                        with arch.elect_one():
                            arch.mbarrier_arrive_and_expect_tx(kfull + 2 * s + x, 2 * ROWS * D * 2)
                        cute.copy(aK, kG[None, i, h, n, b], kS[None, 3 * s + x], tma_bar_ptr=kfull + 2 * s + x)
                        cute.copy(aV, vG[None, i, h, n, b], vS[None, 3 * s + 2], tma_bar_ptr=kfull + 2 * s + x)
                if r == 0:
                    # each third's first tiles first
                    for y in cutlass.range(3 * (NT - thirds[1]), unroll=1):
                        start, stop = self.third(y % 3, thirds)
                        j = start + y // 3
                        if j < stop:
                            sleep_until(empty + j, (count & 1) ^ 1)
                            with arch.elect_one():
                                arch.mbarrier_arrive_and_expect_tx(full + j, 2 * QUERIES * D * 2)
                            cute.copy(aQ, qG[None, j, h, n, b], qS[None, j], tma_bar_ptr=full + j)
                            cute.copy(aG, gG[None, j, h, n, b], gS[None, j], tma_bar_ptr=full + j)
            item += blocks
            count += 1

    @cute.jit
    def produce_statistics(
        self,
        s: Int32,
        bid: Int32,
        blocks: Int32,
        items: Int32,
        sizes,
        where,
        o: cute.Tensor,
        do: cute.Tensor,
        lse: cute.Tensor,
        dlse: cute.Tensor,
        gradients,
        inverse: Float32,
        pS: cute.Pointer,
        full: cute.Pointer,
        empty: cute.Pointer,
        lane: Int32,
    ):
        """What each query of a third of the tiles brings to the products: terms of -lse / scale, and of -delta.

        Of tiles of keys that are not done, a third each, it clears the gradients.
        """
        N, H, NK, _, LQ, thirds = sizes
        dk, dv, dmask = gradients
        start, stop = self.third(s, thirds)
        if const_expr(self.row):
            arch.griddepcontrol_wait()
        item, count = bid, Int32(0)
        while item < items:
            h, n, b = place(item, H, N)
            for j in cutlass.range(start, stop, unroll=1):
                low, delta = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
                for x in range_constexpr(2):
                    q = j * QUERIES + x * 32 + lane
                    low[x], delta[x] = Float32(NEVER), Float32(0.0)
                    if q < LQ:
                        value = lse[b, n, h, q]
                        for y in range_constexpr(0 if self.gated else self.channels // 8):
                            one, two = cute.make_rmem_tensor(8, self.dtype), cute.make_rmem_tensor(8, self.dtype)
                            cute.autovec_copy(cute.local_tile(o[b, n, h, q, None], (8,), (y,)), one)
                            cute.autovec_copy(cute.local_tile(do[b, n, h, q, None], (8,), (y,)), two)
                            for z in range_constexpr(8):
                                delta[x] = delta[x] - one[z].to(Float32) * two[z].to(Float32)
                        if value > Float32(-float("inf")):
                            low[x] = -value * LN2
                            if const_expr(self.dlse):
                                delta[x] = delta[x] + dlse[b, n, h, q] * LOG2E
                # while the tile's last readers are still at it, these are on their way
                sleep_until(empty + j, (count & 1) ^ 1)
                to = cute.make_tensor(pS + j * TILE, cute.make_layout(TILE))
                for x in range_constexpr(2):
                    write_statistics(to, x * 32 + lane, low[x], delta[x], inverse, self.dtype)
                arch.fence_proxy("async.shared", space="cta")
                arch.sync_warp()
                release(full + j, lane)
            for i in cutlass.range(self.live_tiles(n, b, where, NK) + s, NK, GROUPS, unroll=1):
                clear_rows(dk[b, n, h, None, None], i * ROWS, lane)
                clear_rows(dv[b, n, h, None, None], i * ROWS, lane)
                if const_expr(self.mask_gradient):
                    clear_numbers(dmask[b, n, h, None], i * ROWS, lane)
            item += blocks
            count += 1
