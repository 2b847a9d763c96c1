"""dK, dV and the row-bias gradient: the scores transposed, so that P^T and dS^T go from registers into the next matmul."""

from __future__ import annotations

import triton
import triton.language as tl

from evoattn.backends.triton.launch import Kernel
from evoattn.backends.triton.overlap import wait_to_load, wait_to_store
from evoattn.backends.triton.primitives import (
    LOG2E,
    decode,
    load_pair_bias,
    load_row_bias,
    load_tile,
    measured,
    natural,
    store_tile,
    wide,
)

__all__ = ["MASK_ADD", "MASK_NONE", "MASK_STORE", "dkdv_kernel"]

MASK_NONE = 0
MASK_ADD = 1
MASK_STORE = 2

_NONE = tl.constexpr(MASK_NONE)
_ADD = tl.constexpr(MASK_ADD)


@triton.jit
def transposed_scores(
    b_k, b_q, b_pair, b_row, unit, SHAPE: tl.constexpr,
    HAS_PAIR: tl.constexpr, HAS_ROW: tl.constexpr, SEED: tl.constexpr, FOLD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`primitives.scores` as [k,q], from b_k [k,d], b_q [q,d], b_pair [k,q], b_row [k] (divided by unit where FOLD)."""
    if FOLD and HAS_PAIR:
        inverse = 1.0 / unit
        b_start = natural(b_pair) * (inverse * LOG2E)  # [k,q]
        if HAS_ROW:
            b_start += b_row[:, None]
        return tl.dot(b_k, tl.trans(b_q), b_start, input_precision=PRECISION)
    if (FOLD and HAS_ROW) and SEED:
        b_start = tl.broadcast_to(b_row[:, None], SHAPE)  # [k,q]
        return tl.dot(b_k, tl.trans(b_q), b_start, input_precision=PRECISION)
    b_s = tl.dot(b_k, tl.trans(b_q), input_precision=PRECISION)  # [k,q]
    if FOLD:
        if HAS_ROW:
            b_s += b_row[:, None]
        return b_s
    b_s *= unit
    if HAS_PAIR:
        b_s += natural(b_pair) * LOG2E
    if HAS_ROW:
        b_s += b_row[:, None]
    return b_s


@Kernel
@triton.jit(
    do_not_specialize=[
        "stride_qb", "stride_qn", "stride_qh", "stride_ql",
        "stride_kb", "stride_kn", "stride_kh", "stride_kl",
        "stride_vb", "stride_vn", "stride_vh", "stride_vl",
        "stride_dob", "stride_don", "stride_doh", "stride_dol",
        "stride_pair_b", "stride_pair_h", "stride_pair_outer",
        "stride_dmask_b", "stride_dmask_n", "stride_dmask_h",
        "stride_row_b", "stride_row_n",
        "n_rows", "heads", "lq", "lk", "padded_q", "half", "blocks",
    ]
)  # fmt: skip
def dkdv_kernel(
    p_q, p_k, p_v, p_do, p_stats, p_distant, p_row, p_pair, p_dk, p_dv, p_dmask, scale,
    stride_qb, stride_qn, stride_qh, stride_ql, stride_qd,
    stride_kb, stride_kn, stride_kh, stride_kl, stride_kd,
    stride_vb, stride_vn, stride_vh, stride_vl, stride_vc,
    stride_dob, stride_don, stride_doh, stride_dol, stride_doc,
    stride_pair_b, stride_pair_h, stride_pair_outer, stride_pair_inner,
    stride_dmask_b, stride_dmask_n, stride_dmask_h,
    stride_row_b, stride_row_n,
    n_rows, heads, lq, lk, padded_q, half, blocks,
    D: tl.constexpr,
    C: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PAD: tl.constexpr,
    GRAIN: tl.constexpr,
    GRAIN_PAIR: tl.constexpr,
    HAS_PAIR: tl.constexpr,
    MASK_PAIR: tl.constexpr,
    PAIR_TRANSPOSED: tl.constexpr,
    HAS_ROW: tl.constexpr,
    NEED_DK: tl.constexpr,
    NEED_DV: tl.constexpr,
    MASK_MODE: tl.constexpr,
    EVEN_Q: tl.constexpr,
    EVEN_K: tl.constexpr,
    HEADS_INSIDE: tl.constexpr,
    SEED: tl.constexpr,
    FOLD: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
    DISTANT_ONLY: tl.constexpr,
    WAIT: tl.constexpr,
):  # fmt: skip
    """One program owns BLOCK_K keys of one (b, n, h).

    It loops over all query tiles, and over none when the mask switches every key of it off.
    It writes dK and dV once, and its part of the row-bias gradient (the sum over its head's queries) once.
    SEED: what is subtracted from dP, and added to S, is where their matmuls' accumulators start.
    DISTANT_ONLY: a launch of its own adds what distant queries give (`bwd_preprocess.store_statistics`), if there are any.
    """
    if DISTANT_ONLY:
        wait_to_load(WAIT)
        wait_to_store(WAIT)
        if tl.load(p_distant) == 0:
            return
    block, n, h, b = decode(tl.program_id(0), blocks, n_rows, heads)
    b = b.to(tl.int64)
    n = n.to(tl.int64)
    h = h.to(tl.int64)
    start_k = block * BLOCK_K
    start = start_k.to(tl.int64)
    left_k = lk - start_k
    o_in = tl.arange(0, BLOCK_K)
    o_k = wide(o_in, WIDE)
    o_in_q = tl.arange(0, BLOCK_Q)
    o_q = wide(o_in_q, WIDE)
    o_d = wide(tl.arange(0, BLOCK_D), WIDE)
    o_c = wide(tl.arange(0, BLOCK_C), WIDE)
    unit = scale * LOG2E
    stride_pair_q = stride_pair_outer * GRAIN_PAIR
    stride_pair_k = stride_pair_inner
    if PAIR_TRANSPOSED:
        stride_pair_q = stride_pair_inner
        stride_pair_k = stride_pair_outer * GRAIN_PAIR
    row = (b * n_rows + n) * heads + h
    p_q += (b * stride_qb + n * stride_qn + h * stride_qh) * GRAIN
    p_do += (b * stride_dob + n * stride_don + h * stride_doh) * GRAIN
    p_k += (b * stride_kb + n * stride_kn + h * stride_kh + start * stride_kl) * GRAIN
    p_v += (b * stride_vb + n * stride_vn + h * stride_vh + start * stride_vl) * GRAIN
    p_pair += (b * stride_pair_b + h * stride_pair_h) * GRAIN_PAIR + start * stride_pair_k
    p_stats += row * (padded_q * PAD)

    b_k = load_tile(p_k, o_k, o_d, stride_kl * GRAIN, stride_kd, left_k, D, not EVEN_K, D != BLOCK_D)  # [k,d]
    b_v = load_tile(p_v, o_k, o_c, stride_vl * GRAIN, stride_vc, left_k, C, not EVEN_K, C != BLOCK_C)  # [k,c]
    if not DISTANT_ONLY:
        wait_to_load(WAIT)
    plane = wide(half, WIDE) * PAD
    b_row = 0.0
    tiles = tl.cdiv(lq, BLOCK_Q)
    if HAS_ROW:
        b_row = load_row_bias(p_row + b * stride_row_b * PAD + n * stride_row_n * PAD + start_k, o_in)  # [k]
        # NaN counts as live: it has to reach the gradients.
        tiles = tl.where(tl.max((b_row != float("-inf")).to(tl.int32), 0) != 0, tiles, 0)
    b_dk = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)  # [k,d]
    b_dv = tl.zeros([BLOCK_K, BLOCK_C], tl.float32)  # [k,c]
    b_dmask = tl.zeros([BLOCK_K], tl.float32)  # [k]
    if tiles > 0:  # so that there is no way around the loop itself, see dq_kernel
        for tile in tl.range(0, tiles, num_stages=STAGES):
            first = tile * BLOCK_Q
            start_q = tl.cast(first, tl.int64)
            left_q = lq - first
            b_q = load_tile(
                p_q + start_q * stride_ql * GRAIN, o_q, o_d, stride_ql * GRAIN, stride_qd, left_q, D, not EVEN_Q, D != BLOCK_D
            )  # [q,d]
            b_do = load_tile(
                p_do + start_q * stride_dol * GRAIN, o_q, o_c, stride_dol * GRAIN, stride_doc, left_q, C,
                not EVEN_Q, C != BLOCK_C,
            )  # [q,c]  # fmt: skip
            b_pair = 0.0
            if HAS_PAIR:
                b_pair = load_pair_bias(
                    p_pair + start_q * stride_pair_q, o_k, o_q, stride_pair_k, stride_pair_q, left_k, left_q,
                    MASK_PAIR and not EVEN_K, MASK_PAIR and not EVEN_Q,
                )  # [k,q]  # fmt: skip
            if DISTANT_ONLY:
                b_pair = measured(b_pair, tl.load(p_stats + 3 * plane + first + o_in_q)[None, :])
            b_lse = tl.load(p_stats + (2 * plane if DISTANT_ONLY else 0) + first + o_in_q)  # [q]
            b_s = transposed_scores(
                b_k, b_q, b_pair, b_row, unit, (BLOCK_K, BLOCK_Q), HAS_PAIR, HAS_ROW, SEED, FOLD, PRECISION
            )  # [k,q]
            b_p = tl.math.exp2(b_s * (unit if FOLD else 1.0) - b_lse[None, :])  # [k,q]
            if NEED_DV:
                b_dv = tl.dot(b_p.to(b_do.dtype), b_do, b_dv, input_precision=PRECISION)  # [k,c]
            if NEED_DK or MASK_MODE != _NONE:
                b_delta = tl.load(p_stats + plane + first + o_in_q)  # [q]
                if SEED:
                    b_seed = tl.broadcast_to(-b_delta[None, :], [BLOCK_K, BLOCK_Q])  # [k,q]
                    b_ds = b_p * tl.dot(b_v, tl.trans(b_do), b_seed, input_precision=PRECISION)  # [k,q]
                else:
                    b_ds = b_p * (tl.dot(b_v, tl.trans(b_do), input_precision=PRECISION) - b_delta[None, :])  # [k,q]
                if NEED_DK:
                    b_dk = tl.dot(b_ds.to(b_q.dtype), b_q, b_dk, input_precision=PRECISION)  # [k,d]
                if MASK_MODE != _NONE:
                    b_dmask += tl.sum(b_ds, 1)

    if not DISTANT_ONLY:
        wait_to_store(WAIT)
    out = row * lk + start
    stride_out = tl.cast(1, tl.int32)
    if HEADS_INSIDE:
        out = ((b * n_rows + n) * lk + start) * heads + h
        stride_out = heads
    if NEED_DK:
        p_dk += out * D
        b_dk *= scale
        if DISTANT_ONLY:
            b_dk += load_tile(p_dk, o_k, o_d, stride_out * D, 1, left_k, D, not EVEN_K, D != BLOCK_D).to(tl.float32)
        store_tile(p_dk, b_dk, o_k, o_d, stride_out * D, 1, left_k, D, not EVEN_K, D != BLOCK_D)
    if NEED_DV:
        p_dv += out * C
        if DISTANT_ONLY:
            b_dv += load_tile(p_dv, o_k, o_c, stride_out * C, 1, left_k, C, not EVEN_K, C != BLOCK_C).to(tl.float32)
        store_tile(p_dv, b_dv, o_k, o_c, stride_out * C, 1, left_k, C, not EVEN_K, C != BLOCK_C)
    if MASK_MODE != _NONE:
        p_dmask += b * stride_dmask_b + n * stride_dmask_n + h * stride_dmask_h + start
        if MASK_MODE == _ADD:
            tl.atomic_add(p_dmask + o_in, b_dmask, mask=o_in < left_k, sem="relaxed")
        else:
            if DISTANT_ONLY:
                b_dmask += tl.load(p_dmask + o_in, mask=o_in < left_k, other=0.0)
            tl.store(p_dmask + o_in, b_dmask, mask=o_in < left_k)
