"""The pair-bias gradient with a fixed order of summation: bit-equal from run to run, and no atomics."""

from __future__ import annotations

from typing import NamedTuple

import triton.language as tl

from evoattn.backends.triton.arguments import Constant, Number, PairView, Pointer, RowView, View, kernel
from evoattn.backends.triton.bwd_dq import score_gradient
from evoattn.backends.triton.bwd_plan import Tile
from evoattn.backends.triton.bwd_preprocess import Stats
from evoattn.backends.triton.overlap import wait_to_load, wait_to_store
from evoattn.backends.triton.primitives import (
    LOG2E,
    at,
    decode,
    load_pair_bias,
    load_row_bias,
    load_rows,
    measured,
    pair_at,
    wide,
)

__all__ = ["Partial", "Sizes", "Spans", "Variant", "pair_gradient_kernel"]


class Spans(NamedTuple):
    """The rows with a live key, `[b,tile,2]` (`bwd_preprocess.plan_row_spans`)."""

    p: Pointer
    b: Number
    k: Number


class Partial(NamedTuple):
    """The shares of the gradient, float32."""

    p: Pointer


class Sizes(NamedTuple):
    """Sizes of a launch: its tiles and shares, the strides of a share in units of PAD, and what other launches do before."""

    n: Number
    h: Number
    lq: Number
    lk: Number
    blocks_q: Number
    blocks_k: Number
    splits: Number
    units_q: Number
    units_k: Number
    before_q: Number
    before_k: Number
    turn: Number
    rows: Number
    scale: Number


class Variant(NamedTuple):
    """What the kernel is compiled for, besides `Tile`.

    FULL_Q, FULL_K: the pair bias has the axis.
    DISTANT_ONLY: a launch of its own adds what distant queries give (`bwd_preprocess.store_statistics`), if there are any.
    """

    TILE_Q: Constant
    TILE_K: Constant
    GOES_ON: Constant
    HAS_SPANS: Constant
    GRAIN_PAIR: Constant
    MASK_PAIR: Constant
    FULL_Q: Constant
    FULL_K: Constant
    DISTANT_ONLY: Constant
    WAIT: Constant = 0


@kernel
def pair_gradient_kernel(
    q: View, k: View, v: View, dO: View, stats: Stats, row: RowView, spans: Spans, pair: PairView, partial: Partial,
    sizes: Sizes, T: Tile, V: Variant,
) -> None:  # fmt: skip
    """One program owns a tile of queries and keys of one (b, h), and one of `splits` shares of the rows n.

    The tiles of a launch are BLOCK_Q by BLOCK_K and come behind `before_q` and `before_k` tiles of TILE_Q by TILE_K, which are
    another launch's. A program loops over those rows of its share that are this launch's turn, `rows` at most; with HAS_SPANS
    what is shared are the rows from the first to the last where the key tile is live.
    It writes its float32 sum once, with GOES_ON to what the turn before wrote: the tile, or its sum along an axis of size 1,
    which then counts tiles instead.
    """
    if V.DISTANT_ONLY:
        wait_to_load(V.WAIT)
        wait_to_store(V.WAIT)
        if tl.load(stats.distant) == 0:
            return
    else:
        wait_to_load(V.WAIT)
    plane = wide(stats.half, T.WIDE) * T.PAD
    block_k, block_q, h, rest = decode(tl.program_id(0), sizes.blocks_k, sizes.blocks_q, sizes.h)
    split = rest % sizes.splits
    b = (rest // sizes.splits).to(tl.int64)
    panel = (rest * sizes.h + h).to(tl.int64) * sizes.units_q * sizes.units_k * T.PAD * T.PAD
    h = h.to(tl.int64)
    o_in_q = tl.arange(0, T.BLOCK_Q)
    o_in_k = tl.arange(0, T.BLOCK_K)
    o_q = wide(o_in_q, T.WIDE)
    o_k = wide(o_in_k, T.WIDE)
    o_d = wide(tl.arange(0, T.BLOCK_D), T.WIDE)
    o_c = wide(tl.arange(0, T.BLOCK_C), T.WIDE)
    first_q = sizes.before_q * V.TILE_Q + block_q * T.BLOCK_Q
    first_k = sizes.before_k * V.TILE_K + block_k * T.BLOCK_K
    block_q += sizes.before_q
    block_k += sizes.before_k
    start_q = tl.cast(first_q, tl.int64)
    start_k = tl.cast(first_k, tl.int64)
    left_q = sizes.lq - first_q
    left_k = sizes.lk - first_k
    unit = sizes.scale * LOG2E
    pair = pair_at(pair, b, h, V.GRAIN_PAIR, first_q=start_q)
    b_pair = load_pair_bias(
        pair.p + start_k * pair.k, o_q, o_k, pair.q * V.GRAIN_PAIR, pair.k, left_q, left_k,
        MASK_Q=V.MASK_PAIR and not T.EVEN_Q, MASK_K=V.MASK_PAIR and not T.EVEN_K,
    )  # [q,k]  # fmt: skip
    b_sum = tl.zeros([T.BLOCK_Q, T.BLOCK_K], tl.float32)  # [q,k]
    q = at(q, b, h, T.GRAIN, first=start_q)
    dO = at(dO, b, h, T.GRAIN, first=start_q)
    k = at(k, b, h, T.GRAIN, first=start_k)
    v = at(v, b, h, T.GRAIN, first=start_k)
    p_row = row.p + (b * row.b * T.PAD + start_k)
    p_spans = spans.p + (b * spans.b + block_k.to(tl.int64) * spans.k)
    p_stats = stats.p + ((b * sizes.n * sizes.h + h) * (stats.padded_q * T.PAD) + start_q)
    begin = 0
    end = sizes.n
    if V.HAS_SPANS:
        begin = tl.load(p_spans)
        end = tl.load(p_spans + 1)
    share = tl.cdiv(tl.maximum(end - begin, 0), sizes.splits)
    begin += split * share
    share = tl.maximum(tl.minimum(share, end - begin), 0)
    before = tl.minimum(sizes.turn * sizes.rows, share)
    begin += before
    for i in tl.range(begin, begin + tl.minimum(sizes.rows, share - before), num_stages=T.STAGES):
        n = tl.cast(i, tl.int64)
        b_row = 0.0
        if T.HAS_ROW:
            b_row = load_row_bias(p_row + n * row.n * T.PAD, o_in_k)  # [k]
        b_q = load_rows(q.p + n * q.n * T.GRAIN, q, o_q, o_d, left_q, COLS=T.D, GRAIN=T.GRAIN, MASK=not T.EVEN_Q)  # [q,d]
        b_do = load_rows(dO.p + n * dO.n * T.GRAIN, dO, o_q, o_c, left_q, COLS=T.C, GRAIN=T.GRAIN, MASK=not T.EVEN_Q)  # [q,c]
        b_k = load_rows(k.p + n * k.n * T.GRAIN, k, o_k, o_d, left_k, COLS=T.D, GRAIN=T.GRAIN, MASK=not T.EVEN_K)  # [k,d]
        b_v = load_rows(v.p + n * v.n * T.GRAIN, v, o_k, o_c, left_k, COLS=T.C, GRAIN=T.GRAIN, MASK=not T.EVEN_K)  # [k,c]
        p_this = p_stats + n * sizes.h * (stats.padded_q * T.PAD)
        b_lse = tl.load(p_this + (2 * plane if V.DISTANT_ONLY else 0) + o_in_q)  # [q]
        b_delta = tl.load(p_this + plane + o_in_q)  # [q]
        b_mine = b_pair
        if V.DISTANT_ONLY:
            b_mine = measured(b_pair, tl.load(p_this + 3 * plane + o_in_q)[:, None])
        b_sum += score_gradient(b_q, b_do, b_k, b_v, b_lse, b_delta, b_mine, b_row, unit, T, HAS_PAIR=True)  # [q,k]

    if not V.DISTANT_ONLY:
        wait_to_store(V.WAIT)
    # An axis of size 1 keeps one entry a tile, so that the caller can add those up in a fixed order.
    p_partial = partial.p + panel
    if V.FULL_Q and V.FULL_K:
        p_sum = p_partial + (start_q + o_q)[:, None] * (sizes.units_k * T.PAD) + (start_k + o_k)[None, :]
        b_all = b_sum  # [q,k]
    elif V.FULL_Q:
        p_sum = p_partial + (start_q + o_q) * (sizes.units_k * T.PAD) + block_k
        b_all = tl.sum(b_sum, 1)  # [q]
    elif V.FULL_K:
        p_sum = p_partial + block_q.to(tl.int64) * (sizes.units_k * T.PAD) + start_k + o_k
        b_all = tl.sum(b_sum, 0)  # [k]
    else:
        p_sum = p_partial + block_q.to(tl.int64) * (sizes.units_k * T.PAD) + block_k
        b_all = tl.sum(tl.sum(b_sum, 1), 0)
    if V.GOES_ON or V.DISTANT_ONLY:
        b_all += tl.load(p_sum)
    tl.store(p_sum, b_all)
