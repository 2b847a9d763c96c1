"""The producer warps of the forward.

A producer warp owns a stream of rows. It loops over the panels of the block, their rows n, and the blocks of keys of a row. It
writes queries, keys, values and biases into shared memory.
"""

from __future__ import annotations

import cutlass
from cutlass import Int32, const_expr, cute, range_constexpr
from cutlass.cute import arch

from evoattn.backends.hopper.kernels.forward_mma import ROW, SLICES, query_slot
from evoattn.backends.hopper.kernels.key_bias import TERMS
from evoattn.backends.hopper.lib.copies import bulk_load
from evoattn.backends.hopper.lib.primitives import broadcast_index
from evoattn.backends.hopper.lib.ring import Slot
from evoattn.backends.hopper.lib.schedule import ForwardSizes, UnitRange, interleaved_row, panel_phase, place, stretch
from evoattn.backends.hopper.tiles import HALVES, KEYS, MMA_M, SLICE, STREAMS, pad_channels


@cute.jit
def produce(
    variant,
    stream: Int32,
    args,
    units: UnitRange,
    sizes: ForwardSizes,
    key_blocks: Int32,
    sWork: cute.Tensor,
    sPair,
    sTerms: cute.Pointer,
    rings,
    copies,
):
    """Load the units of a block for a stream: row after row, one block of keys after another."""
    unit, end_unit = units
    copy_Q, copy_K, copy_V, copy_pair = copies
    panels, N, H = sizes.panels, sizes.n, args.mQ.shape[2]
    slot, query_phase, turn = rings.keys.start(), Int32(0), Int32(0)
    while unit < end_unit:
        panel, p0, p1 = stretch(unit, end_unit, N)
        phase = panel_phase(panel, *sizes)
        i, h, b = place(panel, panels, H)
        pair_b, pair_h = b, h
        if const_expr(variant.streamed):
            pair_b, pair_h = broadcast_index(args.mPair, b, h)
        p = p0 + stream
        limit = p1
        if const_expr(variant.streamed):
            limit = p1 + stream  # both streams make the same number of rounds: the bias is loaded for both
        while p < limit:
            n = interleaved_row(cutlass.min(p, p1 - 1), phase, args.interleave, N)
            slices = 2 * key_blocks
            if const_expr(variant.key_bias):
                end = args.mEnds[b * args.stride_b + n * args.stride_n]
                if const_expr(variant.streamed):  # the bias is streamed for the longer of both rows
                    other = interleaved_row(cutlass.min(p + 1 - 2 * stream, p1 - 1), phase, args.interleave, N)
                    end = cutlass.max(end, args.mEnds[b * args.stride_b + other * args.stride_n])
                slices = cutlass.max((end + SLICE - 1) // SLICE, 1)
                if const_expr(not variant.half_blocks):
                    slices = (slices + 1) // 2 * 2
            free = query_slot(variant, stream, turn, query_phase)
            if const_expr(variant.query_stages == 2):  # the row before releases it at its first step
                free = Slot(free.stage, (turn + 3) // 2 % 2 ^ 1)
            rings.queries.producer_acquire(free)
            with arch.elect_one():
                sWork[stream, turn, ROW] = n
                sWork[stream, turn, SLICES] = slices
                rings.queries.expect(free.stage, HALVES * MMA_M * pad_channels(variant.channels) * 2)
            turn = (turn + 1) & 3
            for x in range_constexpr(HALVES):
                copy_Q.load((i * HALVES + x, h, n, b), free.stage * HALVES + x, rings.queries, free.stage)
            query_phase ^= 1
            for j in cutlass.range((slices + 1) // 2, unroll=1):
                stage = rings.keys.index(slot.stage)
                if const_expr(variant.streamed):
                    if stream == 0:
                        load_pair(variant, args.mPair, j, i, pair_h, pair_b, slot, rings.pair, sPair, copy_pair)
                load_keys(variant, args, (j, h, n, b), slot, stage, rings.keys, sTerms, copy_K, copy_V)
                slot = rings.keys.advance(slot)
            p += STREAMS
        unit += p1 - p0


def load_pair(variant, pair, j, i, h, b, slot, ring, sPair, copy_pair):
    """Load the pair bias of a block of keys, once for both streams."""
    ring.producer_acquire(slot, HALVES * MMA_M * KEYS * (4 if variant.float32_pair else 2))
    for x in range(HALVES):
        if variant.float32_pair:
            with arch.elect_one():
                tile = pair[b, h, i * HALVES + x, j, None]
                bulk_load(tile, sPair[None, slot.stage * HALVES + x], ring, slot.stage)
        else:
            copy_pair.load((i * HALVES + x, j, h, b), slot.stage * HALVES + x, ring, slot.stage)


def load_keys(variant, args, coord, slot, stage, ring, sTerms, copy_K, copy_V):
    """Load keys, values and key bias of a block of keys."""
    width = variant.key_width + pad_channels(variant.channels) + (TERMS if variant.key_bias else 0)
    ring.producer_acquire(slot, 2 * KEYS * width)
    if variant.key_bias:
        j, _, n, b = coord
        terms = cute.local_tile(args.mTerms, (1, KEYS * TERMS), (b * args.stride_b + n * args.stride_n, j))
        to = cute.make_tensor(sTerms + stage * KEYS * TERMS, cute.make_layout((1, KEYS * TERMS)))
        with arch.elect_one():
            bulk_load(terms, to, ring, slot.stage)
    copy_K.load(coord, stage, ring, slot.stage)
    copy_V.load(coord, stage, ring, slot.stage)
