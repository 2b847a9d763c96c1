"""The producer warps of the forward, one for each stream of rows: they load queries, keys, values and biases."""

from __future__ import annotations

import dataclasses
from typing import Any

import cutlass
from cutlass import Int32, const_expr, cute, range_constexpr
from cutlass.cute import arch

from evoattn.backends.hopper.kernels.forward_mma import query_slot
from evoattn.backends.hopper.kernels.key_bias import TERMS
from evoattn.backends.hopper.lib.copies import TmaTiles, bulk_load
from evoattn.backends.hopper.lib.ring import Slot
from evoattn.backends.hopper.lib.schedule import interleaved_row, panel_phase, place, stretch
from evoattn.backends.hopper.tiles import HALVES, KEYS, ROWS, SLICE, STREAMS, padded


@dataclasses.dataclass(frozen=True)
class ForwardCopies:
    """The copies into shared memory; `pair` is None if the pair bias does not stream in 16 bits."""

    q: TmaTiles
    k: TmaTiles
    v: TmaTiles
    pair: Any


@cute.jit
def produce(variant, s: Int32, args, span, sizes, blocks: Int32, turns: cute.Tensor, sP, sB: cute.Pointer, rings, copies):
    """Bring in the units of a span for stream s: row after row, a block of keys after the other."""
    unit, last = span
    _, _, panels, N, _ = sizes
    H = args.q.shape[2]
    slot, query_phase, turn = rings.keys.start(), Int32(0), Int32(0)
    while unit < last:
        panel, p0, p1 = stretch(unit, last, N)
        phase = panel_phase(panel, *sizes)
        ib, h, b = place(panel, panels, H)
        pair_b, pair_h = b, h
        if const_expr(variant.streamed):
            pair_b, pair_h = cutlass.min(b, args.pair.shape[0] - 1), cutlass.min(h, args.pair.shape[1] - 1)
        p = p0 + s
        limit = p1
        if const_expr(variant.streamed):
            limit = p1 + s  # both streams make the same number of rounds: the bias is loaded for both
        while p < limit:
            n = interleaved_row(cutlass.min(p, p1 - 1), phase, args.interleave, N)
            slices = 2 * blocks
            if const_expr(variant.row):
                end = args.ends[b * args.row_b + n * args.row_n]
                if const_expr(variant.streamed):  # the bias is streamed for the longer of both rows
                    other = interleaved_row(cutlass.min(p + 1 - 2 * s, p1 - 1), phase, args.interleave, N)
                    end = cutlass.max(end, args.ends[b * args.row_b + other * args.row_n])
                slices = cutlass.max((end + SLICE - 1) // SLICE, 1)
                if const_expr(not variant.odd):
                    slices = (slices + 1) // 2 * 2
            free = free_slot(variant, s, turn, query_phase)
            rings.queries.producer_acquire(free)
            with arch.elect_one():
                turns[s, turn, 0] = n
                turns[s, turn, 1] = slices
                rings.queries.expect(free.stage, HALVES * ROWS * padded(variant.channels) * 2)
            turn = (turn + 1) & 3
            for x in range_constexpr(HALVES):
                tile = (ib * HALVES + x, h, n, b)
                copies.q.load(tile, free.stage * HALVES + x, rings.queries, free.stage)
            query_phase ^= 1
            for j in cutlass.range((slices + 1) // 2, unroll=1):
                stage = rings.keys.index(slot.stage)
                if const_expr(variant.streamed):
                    if s == 0:
                        load_pair(variant, args.pair, j, ib, pair_h, pair_b, slot, rings.pair, sP, copies)
                load_keys(variant, args, j, h, n, b, slot, stage, rings.keys, sB, copies)
                slot = rings.keys.advance(slot)
            p += STREAMS
        unit += p1 - p0


def free_slot(variant, s, turn, phase):
    """The slot for the queries of row `turn`. With two slots the row before releases it at its first step."""
    slot = query_slot(variant, s, turn, phase)
    return slot if variant.slots == 1 else Slot(slot.stage, (turn + 3) // 2 % 2 ^ 1)


def load_pair(variant, pair, j, ib, h, b, slot, ring, sP, copies):
    """Load the pair bias of a block of keys, once for both streams."""
    ring.producer_acquire(slot, HALVES * ROWS * KEYS * (4 if variant.wide else 2))
    for x in range(HALVES):
        if variant.wide:
            with arch.elect_one():
                tile = pair[b, h, ib * HALVES + x, j, None]
                bulk_load(tile, sP[None, slot.stage * HALVES + x], ring, slot.stage)
        else:
            copies.pair.load((ib * HALVES + x, j, h, b), slot.stage * HALVES + x, ring, slot.stage)


def load_keys(variant, args, j, h, n, b, slot, stage, ring, sB, copies):
    """Load keys, values and key-wise bias of a block of keys."""
    width = variant.key_width + padded(variant.channels) + (TERMS if variant.row else 0)
    ring.producer_acquire(slot, 2 * KEYS * width)
    if variant.row:
        terms = cute.local_tile(args.row, (1, KEYS * TERMS), (b * args.row_b + n * args.row_n, j))
        to = cute.make_tensor(sB + stage * KEYS * TERMS, cute.make_layout((1, KEYS * TERMS)))
        with arch.elect_one():
            bulk_load(terms, to, ring, slot.stage)
    copies.k.load((j, h, n, b), stage, ring, slot.stage)
    copies.v.load((j, h, n, b), stage, ring, slot.stage)
