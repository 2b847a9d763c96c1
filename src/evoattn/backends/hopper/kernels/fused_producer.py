"""The producer warps of `FusedGradients`.

They loop over the rows (b, n, h) of their block. One warp loads keys, values and queries into shared memory. Three warps own a
third of the tiles of queries each, and write their statistics there.
"""

from __future__ import annotations

from collections import namedtuple

import cutlass
from cutlass import Float32, Int32, const_expr, cute, range_constexpr
from cutlass.cute import arch

from evoattn.backends.hopper.kernels.statistics import NO_NEG_LSE, TILE_WORDS, write_statistics
from evoattn.backends.hopper.lib.copies import clear_lines, clear_numbers
from evoattn.backends.hopper.lib.ring import Slot, release, sleep_until
from evoattn.backends.hopper.lib.schedule import place
from evoattn.backends.hopper.tiles import MMA_M, QUERIES, pad_channels
from evoattn.core.numerics import LN2, LOG2E

GROUPS = 3
"""Warpgroups that compute."""


class FusedSizes(namedtuple("FusedSizes", "n h key_tiles query_tiles lq thirds")):
    """The sizes of a launch: of n and h, tiles of keys and of queries, the queries, and where each third of tiles ends."""


def find_third(z, ends):
    """The first tile of third z, with which warpgroup z begins, and the one past the last."""
    first, second, third = ends
    start = Int32(cutlass.select_(z == 0, Int32(0), cutlass.select_(z == 1, first, second)))
    return start, Int32(cutlass.select_(z == 0, first, cutlass.select_(z == 1, second, third)))


@cute.jit
def live_key_tiles(variant, n: Int32, b: Int32, args, tiles: Int32) -> Int32:
    """The tiles of 64 keys of a row up to the last key that is not masked, and at least one."""
    if const_expr(variant.key_bias):
        end = args.mEnds[b * args.stride_b + n * args.stride_n]
        tiles = cutlass.min(cutlass.max((end + MMA_M - 1) // MMA_M, 1), tiles)
    return tiles


@cute.jit
def produce(variant, bid: Int32, blocks: Int32, items: Int32, args, sizes: FusedSizes, copies, rings):
    """Load the keys and values of each warpgroup, and the tiles of queries of each row."""
    N, H, NK, NT, _, thirds = sizes
    copy_K, copy_V, copy_Q, copy_dO = copies
    item, count = bid, Int32(0)
    tiles_done = cute.make_rmem_tensor(GROUPS, Int32)  # tiles of keys so far, of each warpgroup
    tiles_done.fill(0)
    if const_expr(variant.key_bias):
        arch.griddepcontrol_wait()
    while item < items:
        h, n, b = place(item, H, N)
        live = live_key_tiles(variant, n, b, args, NK)
        for r in cutlass.range((live + GROUPS - 1) // GROUPS, unroll=1):
            for wg in range_constexpr(GROUPS):
                i = r * GROUPS + wg
                if i < live:
                    done = tiles_done[wg]
                    tiles_done[wg] = done + 1
                    x, ring = done & 1, rings.keys.of(wg, 2)
                    ring.producer_acquire(Slot(x, done >> 1 & 1))
                    sleep_until(rings.values_empty + wg, (done & 1) ^ 1)
                    with arch.elect_one():
                        ring.expect(x, 2 * MMA_M * pad_channels(variant.channels) * 2)
                    copy_K.load((i, h, n, b), 3 * wg + x, ring, x)
                    copy_V.load((i, h, n, b), 3 * wg + 2, ring, x)
            if r == 0:
                # each third's first tiles first
                for y in cutlass.range(3 * (NT - thirds[1]), unroll=1):
                    start, stop = find_third(y % 3, thirds)
                    j = start + y // 3
                    if j < stop:
                        rings.queries.producer_acquire(Slot(j, count & 1), 2 * QUERIES * pad_channels(variant.channels) * 2)
                        copy_Q.load((j, h, n, b), j, rings.queries, j)
                        copy_dO.load((j, h, n, b), j, rings.queries, j)
        item += blocks
        count += 1


@cute.jit
def produce_statistics(
    variant, wg: Int32, bid: Int32, blocks: Int32, items: Int32, args, sizes: FusedSizes, inverse: Float32,
    sStats: cute.Pointer, ring, lane: Int32,
):  # fmt: skip
    """Find the statistics of the queries of a third of the tiles: terms of -lse / scale, and of -delta.

    The warp also clears the gradients of a third of the tiles of keys that are not done.
    """
    N, H, NK, _, LQ, thirds = sizes
    start, stop = find_third(wg, thirds)
    if const_expr(variant.key_bias):
        arch.griddepcontrol_wait()
    item, count = bid, Int32(0)
    while item < items:
        h, n, b = place(item, H, N)
        for j in cutlass.range(start, stop, unroll=1):
            neg_lse, neg_delta = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
            for x in range_constexpr(2):
                q = j * QUERIES + x * 32 + lane
                neg_lse[x], neg_delta[x] = Float32(NO_NEG_LSE), Float32(0.0)
                if q < LQ:
                    value = args.mLSE[b, n, h, q]
                    for y in range_constexpr(0 if variant.gate else variant.channels // 8):
                        rO, rdO = cute.make_rmem_tensor(8, variant.dtype), cute.make_rmem_tensor(8, variant.dtype)
                        cute.autovec_copy(cute.local_tile(args.mO[b, n, h, q, None], (8,), (y,)), rO)
                        cute.autovec_copy(cute.local_tile(args.mdO[b, n, h, q, None], (8,), (y,)), rdO)
                        for z in range_constexpr(8):
                            neg_delta[x] = neg_delta[x] - rO[z].to(Float32) * rdO[z].to(Float32)
                    if value > Float32(-float("inf")):
                        neg_lse[x] = -value * LN2
                        if const_expr(variant.dlse):
                            neg_delta[x] = neg_delta[x] + args.mdLSE[b, n, h, q] * LOG2E
            # while the tile's last readers are still at it, these are on their way
            ring.producer_acquire(Slot(j, count & 1))
            to = cute.make_tensor(sStats + j * TILE_WORDS, cute.make_layout(TILE_WORDS))
            for x in range_constexpr(2):
                write_statistics(to, x * 32 + lane, neg_lse[x], neg_delta[x], inverse, variant.dtype)
            arch.fence_proxy("async.shared", space="cta")
            arch.sync_warp()
            release(ring.full_barrier(j), lane)
        for i in cutlass.range(live_key_tiles(variant, n, b, args, NK) + wg, NK, GROUPS, unroll=1):
            clear_lines(args.mdK[b, n, h, None, None], i * MMA_M, lane)
            clear_lines(args.mdV[b, n, h, None, None], i * MMA_M, lane)
            if const_expr(variant.mask_gradient):
                clear_numbers(args.mdMask[b, n, h, None], i * MMA_M, lane)
        item += blocks
        count += 1
