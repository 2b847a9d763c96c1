"""The pair-bias gradient with a fixed order of summation: bit-equal from run to run, and no atomics."""

from __future__ import annotations

import triton
import triton.language as tl

from evoattn.backends.triton.bwd_dq import score_gradient
from evoattn.backends.triton.launch import Kernel
from evoattn.backends.triton.overlap import wait_to_load, wait_to_store
from evoattn.backends.triton.primitives import LOG2E, decode, load_pair_bias, load_row_bias, load_tile, measured, wide

__all__ = ["pair_gradient_kernel"]


@Kernel
@triton.jit(
    do_not_specialize=[
        "stride_qb", "stride_qn", "stride_qh", "stride_ql",
        "stride_kb", "stride_kn", "stride_kh", "stride_kl",
        "stride_vb", "stride_vn", "stride_vh", "stride_vl",
        "stride_dob", "stride_don", "stride_doh", "stride_dol",
        "stride_pair_b", "stride_pair_h", "stride_pair_q",
        "stride_row_b", "stride_row_n", "stride_spans_b", "stride_spans_k",
        "n_rows", "heads", "lq", "lk", "padded_q", "half", "blocks_q", "blocks_k", "splits",
        "units_q", "units_k", "before_q", "before_k", "turn", "rows",
    ]
)  # fmt: skip
def pair_gradient_kernel(
    p_q, p_k, p_v, p_do, p_stats, p_distant, p_row, p_spans, p_pair, p_partial, scale,
    stride_qb, stride_qn, stride_qh, stride_ql, stride_qd,
    stride_kb, stride_kn, stride_kh, stride_kl, stride_kd,
    stride_vb, stride_vn, stride_vh, stride_vl, stride_vc,
    stride_dob, stride_don, stride_doh, stride_dol, stride_doc,
    stride_pair_b, stride_pair_h, stride_pair_q, stride_pair_k,
    stride_row_b, stride_row_n, stride_spans_b, stride_spans_k,
    n_rows, heads, lq, lk, padded_q, half, blocks_q, blocks_k, splits, units_q, units_k, before_q, before_k, turn, rows,
    D: tl.constexpr,
    C: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_K: tl.constexpr,
    GOES_ON: tl.constexpr,
    HAS_SPANS: tl.constexpr,
    STAGES: tl.constexpr,
    GRAIN: tl.constexpr,
    GRAIN_PAIR: tl.constexpr,
    PAD: tl.constexpr,
    MASK_PAIR: tl.constexpr,
    HAS_ROW: tl.constexpr,
    FULL_Q: tl.constexpr,
    FULL_K: tl.constexpr,
    EVEN_Q: tl.constexpr,
    EVEN_K: tl.constexpr,
    FOLD: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
    DISTANT_ONLY: tl.constexpr,
    WAIT: tl.constexpr,
):  # fmt: skip
    """One program owns a tile of queries and keys of one (b, h), and one of `splits` shares of the rows n.

    The tiles of a launch are BLOCK_Q by BLOCK_K and come behind `before_q` and `before_k` tiles of TILE_Q by TILE_K, which are
    another launch's. A program loops over those rows of its share that are this launch's turn, `rows` at most; with HAS_SPANS
    what is shared are the rows from the first to the last where the key tile is live.
    It writes its float32 sum once, with GOES_ON to what the turn before wrote: the tile, or its sum along an axis of size 1,
    which then counts tiles instead.
    DISTANT_ONLY: a launch of its own adds what distant queries give (`bwd_preprocess.store_statistics`), if there are any.
    """
    if DISTANT_ONLY:
        wait_to_load(WAIT)
        wait_to_store(WAIT)
        if tl.load(p_distant) == 0:
            return
    else:
        wait_to_load(WAIT)
    plane = wide(half, WIDE) * PAD
    block_k, block_q, h, rest = decode(tl.program_id(0), blocks_k, blocks_q, heads)
    split = rest % splits
    b = (rest // splits).to(tl.int64)
    panel = (rest * heads + h).to(tl.int64) * units_q * units_k * PAD * PAD
    h = h.to(tl.int64)
    o_in_q = tl.arange(0, BLOCK_Q)
    o_in_k = tl.arange(0, BLOCK_K)
    o_q = wide(o_in_q, WIDE)
    o_k = wide(o_in_k, WIDE)
    o_d = wide(tl.arange(0, BLOCK_D), WIDE)
    o_c = wide(tl.arange(0, BLOCK_C), WIDE)
    first_q = before_q * TILE_Q + block_q * BLOCK_Q
    first_k = before_k * TILE_K + block_k * BLOCK_K
    block_q += before_q
    block_k += before_k
    start_q = tl.cast(first_q, tl.int64)
    start_k = tl.cast(first_k, tl.int64)
    left_q = lq - first_q
    left_k = lk - first_k
    unit = scale * LOG2E
    p_pair += (b * stride_pair_b + h * stride_pair_h + start_q * stride_pair_q) * GRAIN_PAIR
    b_pair = load_pair_bias(
        p_pair + start_k * stride_pair_k, o_q, o_k, stride_pair_q * GRAIN_PAIR, stride_pair_k, left_q, left_k,
        MASK_PAIR and not EVEN_Q, MASK_PAIR and not EVEN_K,
    )  # [q,k]  # fmt: skip
    b_sum = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)  # [q,k]
    p_q += (b * stride_qb + h * stride_qh + start_q * stride_ql) * GRAIN
    p_do += (b * stride_dob + h * stride_doh + start_q * stride_dol) * GRAIN
    p_k += (b * stride_kb + h * stride_kh + start_k * stride_kl) * GRAIN
    p_v += (b * stride_vb + h * stride_vh + start_k * stride_vl) * GRAIN
    p_row += b * stride_row_b * PAD + start_k
    p_spans += b * stride_spans_b + block_k.to(tl.int64) * stride_spans_k
    p_stats += (b * n_rows * heads + h) * (padded_q * PAD) + start_q
    begin = 0
    end = n_rows
    if HAS_SPANS:
        begin = tl.load(p_spans)
        end = tl.load(p_spans + 1)
    share = tl.cdiv(tl.maximum(end - begin, 0), splits)
    begin += split * share
    share = tl.maximum(tl.minimum(share, end - begin), 0)
    before = tl.minimum(turn * rows, share)
    begin += before
    for i in tl.range(begin, begin + tl.minimum(rows, share - before), num_stages=STAGES):
        n = tl.cast(i, tl.int64)
        b_row = 0.0
        if HAS_ROW:
            b_row = load_row_bias(p_row + n * stride_row_n * PAD, o_in_k)  # [k]
        b_q = load_tile(
            p_q + n * stride_qn * GRAIN, o_q, o_d, stride_ql * GRAIN, stride_qd, left_q, D, not EVEN_Q, D != BLOCK_D
        )  # [q,d]
        b_do = load_tile(
            p_do + n * stride_don * GRAIN, o_q, o_c, stride_dol * GRAIN, stride_doc, left_q, C, not EVEN_Q, C != BLOCK_C
        )  # [q,c]
        b_k = load_tile(
            p_k + n * stride_kn * GRAIN, o_k, o_d, stride_kl * GRAIN, stride_kd, left_k, D, not EVEN_K, D != BLOCK_D
        )  # [k,d]
        b_v = load_tile(
            p_v + n * stride_vn * GRAIN, o_k, o_c, stride_vl * GRAIN, stride_vc, left_k, C, not EVEN_K, C != BLOCK_C
        )  # [k,c]
        p_this = p_stats + n * heads * (padded_q * PAD)
        b_lse = tl.load(p_this + (2 * plane if DISTANT_ONLY else 0) + o_in_q)  # [q]
        b_delta = tl.load(p_this + plane + o_in_q)  # [q]
        b_mine = b_pair
        if DISTANT_ONLY:
            b_mine = measured(b_pair, tl.load(p_this + 3 * plane + o_in_q)[:, None])
        b_sum += score_gradient(
            b_q, b_do, b_k, b_v, b_lse, b_delta, b_mine, b_row, unit, True, HAS_ROW, FOLD, PRECISION
        )  # [q,k]

    if not DISTANT_ONLY:
        wait_to_store(WAIT)
    # An axis of size 1 keeps one entry a tile, so that the caller can add those up in a fixed order.
    p_partial += panel
    if FULL_Q and FULL_K:
        p_sum = p_partial + (start_q + o_q)[:, None] * (units_k * PAD) + (start_k + o_k)[None, :]
        b_all = b_sum  # [q,k]
    elif FULL_Q:
        p_sum = p_partial + (start_q + o_q) * (units_k * PAD) + block_k
        b_all = tl.sum(b_sum, 1)  # [q]
    elif FULL_K:
        p_sum = p_partial + block_q.to(tl.int64) * (units_k * PAD) + start_k + o_k
        b_all = tl.sum(b_sum, 0)  # [k]
    else:
        p_sum = p_partial + block_q.to(tl.int64) * (units_k * PAD) + block_k
        b_all = tl.sum(tl.sum(b_sum, 1), 0)
    if GOES_ON or DISTANT_ONLY:
        b_all += tl.load(p_sum)
    tl.store(p_sum, b_all)
