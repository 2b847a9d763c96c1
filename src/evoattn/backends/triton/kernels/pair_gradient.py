"""The pair-bias gradient in a fixed order of summation: bit-equal from run to run, and no atomics.

One kernel makes shares of it, each of some rows n. Another adds them up and rounds.
"""

from __future__ import annotations

from collections import namedtuple

import triton.language as tl

from evoattn.backends.triton.kernels.backward import DISTANT_LSE, PADDED, REFERENCE, CallConstants, Stats, score_gradient
from evoattn.kit.arguments import Constant, Number, PairView, Pointer, RowView, Sizes, View, kernel
from evoattn.kit.overlap import wait_to_load, wait_to_store
from evoattn.kit.primitives import LOG2E, at, decode, load_tile, load_view, offsets, pair_at, subtract_reference

Grid = namedtuple("Grid", "blocks_q blocks_k splits units_q units_k before_q before_k turn rows")
"""The tiles and shares of a launch, the strides of a share in units of PAD, and the tiles of launches before it."""

Variant = namedtuple(
    "Variant", "TILE_Q TILE_K GOES_ON HAS_SPANS GRAIN_PAIR MASK_PAIR FULL_Q FULL_K DISTANT_ONLY WAIT", defaults=[0]
)
"""Compile-time constants of the kernel, besides `CallConstants`.

FULL_Q, FULL_K: the pair bias has the axis.
DISTANT_ONLY: a launch of its own adds what distant queries give (`backward.store_statistics`), if there are any.
"""


@kernel
def pair_gradient_kernel(
    q: View, k: View, v: View, dO: View, stats: Stats, key_bias: RowView, spans: RowView, pair: PairView, partial: Pointer,
    sizes: Sizes, grid: Grid, T: CallConstants, V: Variant,
) -> None:  # fmt: skip
    """One program owns a tile of queries and keys of one (b, h), and one of `splits` shares of the rows n.

    The tiles of a launch are BLOCK_Q by BLOCK_K and come behind `before_q` and `before_k` tiles of TILE_Q by TILE_K, which are
    another launch's. A program loops over those rows of its share that are this launch's turn, `rows` at most; with HAS_SPANS
    the rows are shared from the first to the last one in which the key tile is live.
    It writes its float32 sum once, with GOES_ON to what the turn before wrote: the tile, or its sum along an axis of size 1,
    which then counts tiles instead.

    More than 60 lines: its parts share the tiles that stay in registers over the loop, and their offsets.
    """
    wait_to_load(V.WAIT)
    if V.DISTANT_ONLY:
        wait_to_store(V.WAIT)
        if tl.load(stats.distant) == 0:
            return
    plane = offsets(stats.plane_stride, T.LONG) * PADDED
    block_k, block_q, h, outer = decode(tl.program_id(0), grid.blocks_k, grid.blocks_q, sizes.h)
    split = outer % grid.splits
    b = (outer // grid.splits).to(tl.int64)
    panel = (outer * sizes.h + h).to(tl.int64) * grid.units_q * grid.units_k * PADDED * PADDED
    h = h.to(tl.int64)
    o_in_q = tl.arange(0, T.BLOCK_Q)
    o_in_k = tl.arange(0, T.BLOCK_K)
    o_q = offsets(o_in_q, T.LONG)
    o_k = offsets(o_in_k, T.LONG)
    o_d = offsets(tl.arange(0, T.BLOCK_D), T.LONG)
    o_c = offsets(tl.arange(0, T.BLOCK_C), T.LONG)
    first_q = grid.before_q * V.TILE_Q + block_q * T.BLOCK_Q
    first_k = grid.before_k * V.TILE_K + block_k * T.BLOCK_K
    block_q += grid.before_q
    block_k += grid.before_k
    start_q = tl.cast(first_q, tl.int64)
    start_k = tl.cast(first_k, tl.int64)
    left_q = sizes.lq - first_q
    left_k = sizes.lk - first_k
    unit = sizes.scale * LOG2E
    pair = pair_at(pair, b, h, V.GRAIN_PAIR, first_q=start_q)
    b_pair = load_tile(
        pair.p + start_k * pair.k, o_q, o_k, pair.q * V.GRAIN_PAIR, pair.k, left_q, left_k,
        MASK_ROWS=V.MASK_PAIR and not T.EVEN_Q, MASK_COLS=V.MASK_PAIR and not T.EVEN_K,
    )  # [q,k]  # fmt: skip
    b_sum = tl.zeros([T.BLOCK_Q, T.BLOCK_K], tl.float32)  # [q,k]
    q = at(q, b, h, T.GRAIN, first=start_q)
    dO = at(dO, b, h, T.GRAIN, first=start_q)
    k = at(k, b, h, T.GRAIN, first=start_k)
    v = at(v, b, h, T.GRAIN, first=start_k)
    p_key_bias = key_bias.p + (b * key_bias.b * PADDED + start_k)
    p_spans = spans.p + (b * spans.b + block_k.to(tl.int64) * spans.n)
    p_stats = stats.p + ((b * sizes.n * sizes.h + h) * (stats.padded_q * PADDED) + start_q)
    begin = 0
    end = sizes.n
    if V.HAS_SPANS:
        begin = tl.load(p_spans)
        end = tl.load(p_spans + 1)
    share = tl.cdiv(tl.maximum(end - begin, 0), grid.splits)
    begin += split * share
    share = tl.maximum(tl.minimum(share, end - begin), 0)
    before = tl.minimum(grid.turn * grid.rows, share)
    begin += before
    for i in tl.range(begin, begin + tl.minimum(grid.rows, share - before), num_stages=T.STAGES):
        n = tl.cast(i, tl.int64)
        b_key_bias = 0.0
        if T.HAS_KEY_BIAS:
            b_key_bias = tl.load(p_key_bias + n * key_bias.n * PADDED + o_in_k)  # [k]
        b_q = load_view(q.p + n * q.n * T.GRAIN, q, o_q, o_d, left_q, COLS=T.D, GRAIN=T.GRAIN, MASK=not T.EVEN_Q)  # [q,d]
        b_do = load_view(dO.p + n * dO.n * T.GRAIN, dO, o_q, o_c, left_q, COLS=T.C, GRAIN=T.GRAIN, MASK=not T.EVEN_Q)  # [q,c]
        b_k = load_view(k.p + n * k.n * T.GRAIN, k, o_k, o_d, left_k, COLS=T.D, GRAIN=T.GRAIN, MASK=not T.EVEN_K)  # [k,d]
        b_v = load_view(v.p + n * v.n * T.GRAIN, v, o_k, o_c, left_k, COLS=T.C, GRAIN=T.GRAIN, MASK=not T.EVEN_K)  # [k,c]
        p_stat = p_stats + n * sizes.h * (stats.padded_q * PADDED)
        b_lse = tl.load(p_stat + (DISTANT_LSE * plane if V.DISTANT_ONLY else 0) + o_in_q)  # [q]
        b_delta = tl.load(p_stat + plane + o_in_q)  # [q]
        b_measured = b_pair
        if V.DISTANT_ONLY:
            b_measured = subtract_reference(b_pair, tl.load(p_stat + REFERENCE * plane + o_in_q)[:, None])
        b_sum += score_gradient(b_q, b_do, b_k, b_v, b_lse, b_delta, b_measured, b_key_bias, unit, T, HAS_PAIR=True)  # [q,k]

    if not V.DISTANT_ONLY:
        wait_to_store(V.WAIT)
    # An axis of size 1 has one entry a tile, and the total kernel adds those up in a fixed order.
    p_partial = partial + panel
    if V.FULL_Q and V.FULL_K:
        p_sum = p_partial + (start_q + o_q)[:, None] * (grid.units_k * PADDED) + (start_k + o_k)[None, :]
        b_all = b_sum  # [q,k]
    elif V.FULL_Q:
        p_sum = p_partial + (start_q + o_q) * (grid.units_k * PADDED) + block_k
        b_all = tl.sum(b_sum, 1)  # [q]
    elif V.FULL_K:
        p_sum = p_partial + block_q.to(tl.int64) * (grid.units_k * PADDED) + start_k + o_k
        b_all = tl.sum(b_sum, 0)  # [k]
    else:
        p_sum = p_partial + block_q.to(tl.int64) * (grid.units_k * PADDED) + block_k
        b_all = tl.sum(tl.sum(b_sum, 1), 0)
    if V.GOES_ON or V.DISTANT_ONLY:
        b_all += tl.load(p_sum)
    tl.store(p_sum, b_all)


@kernel
def total_kernel(
    shares: Pointer, result: Pointer, stride_b: Number, stride_split: Number, stride_h: Number, stride_q: Number,
    splits: Number, each_b: Number, each_h: Number, each_q: Number, each_k: Number, heads: Number, size_q: Number,
    size_k: Number, blocks_q: Number, blocks_k: Number, BLOCK_Q: Constant, BLOCK_K: Constant, AT_ONCE: Constant,
    WAIT: Constant,
) -> None:  # fmt: skip
    """One program owns a tile of the gradient of one (b, h) of the bias.

    It loops over the shares of the tile, in order: `splits` (AT_ONCE at most) of each of `each_b` batches, `each_h` heads and
    `each_q` by `each_k` tiles of the problem, which are 1 but along axes that the bias broadcasts.
    It writes their sum once, in the bias's dtype.
    """
    wait_to_load(WAIT)
    block_k, block_q, h, b = decode(tl.program_id(0), blocks_k, blocks_q, heads)
    o_q = (block_q * BLOCK_Q + tl.arange(0, BLOCK_Q)).to(tl.int64)
    o_k = block_k * BLOCK_K + tl.arange(0, BLOCK_K)
    inside = (o_q[:, None] < size_q) & (o_k[None, :] < size_k)
    p_shares = shares + (b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h)
    step = tl.cast(stride_split, tl.int64)
    b_sum = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)  # [q,k]
    for x in range(each_b * each_h * each_q * each_k):
        k, q, h_x, b_x = decode(x, each_k, each_q, each_h)
        p_tile = p_shares + b_x.to(tl.int64) * stride_b + h_x.to(tl.int64) * stride_h + (o_q + q)[:, None] * stride_q
        p_tile += o_k[None, :] + k
        for split in tl.static_range(AT_ONCE):  # loads that are in flight at the same time
            b_sum += tl.load(p_tile + split * step, mask=inside & (split < splits), other=0.0)
    wait_to_store(WAIT)
    p_result = result + (((b * heads + h).to(tl.int64) * size_q + o_q)[:, None] * size_k + o_k[None, :])
    tl.store(p_result, b_sum.to(result.dtype.element_ty), mask=inside)
