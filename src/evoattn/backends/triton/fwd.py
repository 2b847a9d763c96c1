"""The forward pass: o, lse and reference of every query."""

from __future__ import annotations

import triton
import triton.language as tl

from evoattn.backends.triton.launch import Kernel
from evoattn.backends.triton.overlap import wait_to_load, wait_to_store
from evoattn.backends.triton.primitives import (
    FLOOR,
    LN2,
    LOG2E,
    NEAR,
    decode,
    finish,
    load_pair_bias,
    load_row_bias,
    load_tile,
    measured,
    natural,
    online_softmax,
    scores,
    sigmoid,
    store_tile,
    wide,
)

__all__ = ["forward_kernel"]

FAR = tl.constexpr(256.0)
"""If a query's largest score, in log2 units, is beyond this, a pair bias may have swallowed them all: they are made again."""


@triton.jit
def _load_pair(
    p_pair, pair_b, pair_h, pair_q, o_pair_q, first_k, start, stride_pair_q, stride_pair_k, left,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, MAP_K: tl.constexpr, TAIL: tl.constexpr, TENSOR_MAP: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """[q,k] of the pair bias from key first_k on, in its own dtype; 0 past the last key."""
    if TENSOR_MAP:
        b_pair = p_pair.load([pair_b, pair_h, pair_q, first_k]).reshape([BLOCK_Q, MAP_K])
        if BLOCK_K < MAP_K:  # a map loads tiles of one size: of two halves the first
            b_pair, _ = tl.split(b_pair.reshape([BLOCK_Q, 2, BLOCK_K]).permute(0, 2, 1))
    else:
        o_k = wide(tl.arange(0, BLOCK_K), WIDE)
        p_tile = p_pair + start * stride_pair_k
        b_pair = load_pair_bias(p_tile, o_pair_q, o_k, stride_pair_q, stride_pair_k, 0, left, False, TAIL)
    return b_pair


@triton.jit
def _step(
    b_q, b_acc, b_max, b_sum, b_ref, p_k, p_v, p_row, p_pair, pair_b, pair_h, pair_q, o_pair_q, first_k, unit,
    stride_k, stride_kd, stride_v, stride_vc, stride_pair_q, stride_pair_k, lk,
    D: tl.constexpr, C: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr, MAP_K: tl.constexpr,
    HAS_PAIR: tl.constexpr, HAS_ROW: tl.constexpr, TAIL: tl.constexpr, TENSOR_MAP: tl.constexpr, FOLD: tl.constexpr,
    PRECISION: tl.constexpr, WIDE: tl.constexpr, SHIFTED: tl.constexpr,
):  # fmt: skip
    """Fold the tile of keys that starts at first_k into (b_acc, b_max, b_sum).

    TAIL: the tile may reach past lk. SHIFTED: the pair bias is measured from b_ref [q].
    """
    o_in = tl.arange(0, BLOCK_K)
    o_k = wide(o_in, WIDE)
    o_d = wide(tl.arange(0, BLOCK_D), WIDE)
    o_c = wide(tl.arange(0, BLOCK_C), WIDE)
    start = tl.cast(first_k, tl.int64) if WIDE else first_k
    left = lk - first_k
    b_k = load_tile(p_k + start * stride_k, o_k, o_d, stride_k, stride_kd, left, D, TAIL, D != BLOCK_D)  # [k,d]
    b_v = load_tile(p_v + start * stride_v, o_k, o_c, stride_v, stride_vc, left, C, TAIL, C != BLOCK_C)  # [k,c]
    b_pair = 0.0
    b_row = 0.0
    if HAS_PAIR:
        b_pair = _load_pair(
            p_pair, pair_b, pair_h, pair_q, o_pair_q, first_k, start, stride_pair_q, stride_pair_k, left,
            BLOCK_Q, BLOCK_K, MAP_K, TAIL, TENSOR_MAP, WIDE,
        )  # [q,k]  # fmt: skip
        if SHIFTED:
            b_pair = measured(b_pair, b_ref[:, None])
    if HAS_ROW:
        b_row = load_row_bias(p_row + first_k, o_in)  # [k]
    b_s = scores(b_q, b_k, b_pair, b_row, unit, FOLD, HAS_PAIR, HAS_ROW, PRECISION, ROW_FOLDED=True)  # [q,k]
    if TAIL and not HAS_ROW:
        b_s = tl.where((o_in < left)[None, :], b_s, float("-inf"))
    factor = unit if FOLD else 1.0
    b_p, b_acc, b_max, b_sum = online_softmax(b_s, b_acc, b_max, b_sum, factor)
    b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc, input_precision=PRECISION)  # [q,c]
    return b_acc, b_max, b_sum


@triton.jit
def _gated(
    b_o, p_gate, o_q, stride_q, stride_c, left, C: tl.constexpr, BLOCK_C: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """b_o [q,c] * sigmoid(gate); p_gate points at the first query."""
    o_c = wide(tl.arange(0, BLOCK_C), WIDE)
    return b_o * sigmoid(load_tile(p_gate, o_q, o_c, stride_q, stride_c, left, C, True, C != BLOCK_C))  # [q,c]


@triton.jit
def _largest_bias(
    b_top, p_row, p_pair, pair_b, pair_h, pair_q, o_pair_q, first_k, unit, stride_pair_q, stride_pair_k, lk,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, HAS_ROW: tl.constexpr, TENSOR_MAP: tl.constexpr, FOLD: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """b_top [q] and the largest sum of pair bias and row bias of the keys from first_k on, in natural units."""
    o_in = tl.arange(0, BLOCK_K)
    start = tl.cast(first_k, tl.int64) if WIDE else first_k
    b_bias = natural(
        _load_pair(
            p_pair, pair_b, pair_h, pair_q, o_pair_q, first_k, start, stride_pair_q, stride_pair_k, lk - first_k,
            BLOCK_Q, BLOCK_K, BLOCK_K, True, TENSOR_MAP, WIDE,
        )
    )  # [q,k]  # fmt: skip
    if HAS_ROW:
        b_bias += (load_row_bias(p_row + first_k, o_in) * ((unit if FOLD else 1.0) * LN2))[None, :]
    return tl.maximum(b_top, tl.max(tl.where((o_in < lk - first_k)[None, :], b_bias, float("-inf")), 1))


# Everything that a new length or a new batch changes is left unspecialised, so nothing is compiled again for it.
@Kernel
@triton.jit(
    do_not_specialize=[
        "stride_qb", "stride_qn", "stride_qh", "stride_ql", "stride_kb", "stride_kn", "stride_kh", "stride_kl",
        "stride_vb", "stride_vn", "stride_vh", "stride_vl", "stride_pair_b", "stride_pair_h", "stride_pair_q",
        "stride_row_b", "stride_row_n", "stride_runs_b", "stride_runs_n", "n_rows", "heads", "lq", "lk", "first_q", "blocks",
        "stride_gb", "stride_gn", "stride_gh", "stride_gl",
    ]
)  # fmt: skip
def forward_kernel(
    p_q, p_k, p_v, p_row, p_runs, p_pair, p_o, p_lse, p_ref, p_gate, scale,
    stride_qb, stride_qn, stride_qh, stride_ql, stride_qd,
    stride_kb, stride_kn, stride_kh, stride_kl, stride_kd,
    stride_vb, stride_vn, stride_vh, stride_vl, stride_vc,
    stride_pair_b, stride_pair_h, stride_pair_q, stride_pair_k,
    stride_row_b, stride_row_n, stride_runs_b, stride_runs_n,
    n_rows, heads, lq, lk, first_q, blocks,
    stride_gb, stride_gn, stride_gh, stride_gl, stride_gc,
    D: tl.constexpr, C: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, TAIL_K: tl.constexpr, STAGES: tl.constexpr,
    GRAIN: tl.constexpr, GRAIN_PAIR: tl.constexpr, GRAIN_GATE: tl.constexpr,
    HAS_PAIR: tl.constexpr, HAS_ROW: tl.constexpr, HAS_GATE: tl.constexpr, EVEN_K: tl.constexpr, HEADS_INSIDE: tl.constexpr,
    TENSOR_MAP: tl.constexpr, FOLD: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """One program owns BLOCK_Q queries of one (b, n, h).

    It loops over the live key tiles of its row, run by run, with the online softmax; a ragged last tile comes after the loop.
    It writes o, gated if there is a gate, lse and reference once. Queries whose pair bias swallows their scores are computed
    and written again.
    """
    block, n, h, b = decode(tl.program_id(0), blocks, n_rows, heads)
    start_q = first_q + block * BLOCK_Q
    left_q = lq - start_q
    pair_b = tl.where(stride_pair_b == 0, 0, b)
    pair_h = tl.where(stride_pair_h == 0, 0, h)
    b = b.to(tl.int64)
    n = n.to(tl.int64)
    h = h.to(tl.int64)
    o_in = tl.arange(0, BLOCK_Q)
    o_q = wide(o_in, WIDE)
    o_d = wide(tl.arange(0, BLOCK_D), WIDE)
    unit = scale * LOG2E

    p_q += (b * stride_qb + n * stride_qn + h * stride_qh + start_q.to(tl.int64) * stride_ql) * GRAIN
    p_k += (b * stride_kb + n * stride_kn + h * stride_kh) * GRAIN
    p_v += (b * stride_vb + n * stride_vn + h * stride_vh) * GRAIN
    p_row += b * stride_row_b + n * stride_row_n
    p_runs += b * stride_runs_b + n * stride_runs_n
    if not TENSOR_MAP:
        p_pair += (b * stride_pair_b + h * stride_pair_h + start_q.to(tl.int64) * stride_pair_q) * GRAIN_PAIR
    # Rows past the end read the last row's bias: nothing of them is stored, and no mask slows the loop down.
    o_pair_q = tl.minimum(o_q, left_q - 1)

    b_q = load_tile(p_q, o_q, o_d, stride_ql * GRAIN, stride_qd, left_q, D, True, D != BLOCK_D)  # [q,d]
    b_acc = tl.zeros([BLOCK_Q, BLOCK_C], tl.float32)  # [q,c]
    b_max = tl.full([BLOCK_Q], FLOOR, tl.float32)
    b_sum = tl.zeros([BLOCK_Q], tl.float32)
    wait_to_load(WAIT)

    whole = lk // BLOCK_K
    runs = 1
    end = tl.cdiv(lk, BLOCK_K)
    if HAS_ROW:
        runs = tl.load(p_runs)
        end = 0
    for run in tl.range(0, runs, num_stages=1):
        begin = 0
        stop = whole
        if HAS_ROW:
            begin = tl.load(p_runs + 1 + 2 * run)
            end = tl.load(p_runs + 2 + 2 * run)
            stop = tl.minimum(end, whole)
        for tile in tl.range(begin, stop, num_stages=STAGES):
            b_acc, b_max, b_sum = _step(
                b_q, b_acc, b_max, b_sum, 0.0, p_k, p_v, p_row, p_pair, pair_b, pair_h, start_q, o_pair_q, tile * BLOCK_K,
                unit, stride_kl * GRAIN, stride_kd, stride_vl * GRAIN, stride_vc, stride_pair_q * GRAIN_PAIR, stride_pair_k, lk,
                D, C, BLOCK_Q, BLOCK_D, BLOCK_C, BLOCK_K, BLOCK_K, HAS_PAIR, HAS_ROW, False, TENSOR_MAP, FOLD, PRECISION,
                WIDE, False,
            )  # fmt: skip
    if not EVEN_K:  # noqa: SIM102 (this one is resolved when the kernel is compiled, the next one when it runs)
        if end > whole:
            b_acc, b_max, b_sum = _step(
                b_q, b_acc, b_max, b_sum, 0.0, p_k, p_v, p_row, p_pair, pair_b, pair_h, start_q, o_pair_q, whole * BLOCK_K,
                unit, stride_kl * GRAIN, stride_kd, stride_vl * GRAIN, stride_vc, stride_pair_q * GRAIN_PAIR, stride_pair_k, lk,
                D, C, BLOCK_Q, BLOCK_D, BLOCK_C, TAIL_K, BLOCK_K, HAS_PAIR, HAS_ROW, True, TENSOR_MAP, FOLD, PRECISION,
                WIDE, False,
            )  # fmt: skip

    wait_to_store(WAIT)
    b_o, b_lse = finish(b_acc, b_max, b_sum)
    if HAS_GATE:
        p_gate += (b * stride_gb + n * stride_gn + h * stride_gh + start_q.to(tl.int64) * stride_gl) * GRAIN_GATE
        b_o = _gated(b_o, p_gate, o_q, stride_gl * GRAIN_GATE, stride_gc, left_q, C, BLOCK_C, WIDE)
    row = (b * n_rows + n) * heads + h
    p_lse += row * lq + start_q
    p_ref += row * lq + start_q
    tl.store(p_lse + o_in, b_lse, mask=o_in < left_q)
    tl.store(p_ref + o_in, tl.zeros([BLOCK_Q], tl.float32), mask=o_in < left_q)
    stride_o = C
    first = row * lq + start_q
    if HEADS_INSIDE:
        stride_o = C * heads
        first = ((b * n_rows + n) * lq + start_q) * heads + h
    o_c = tl.arange(0, BLOCK_C)
    store_tile(p_o + first * C, b_o, o_in, o_c, stride_o, 1, left_q, C, True, C != BLOCK_C)
    if HAS_PAIR:
        # A query that attends to nothing so far may have biases that were infinite only in other units.
        far = tl.max(((tl.abs(b_max) > FAR) & (o_in < left_q)).to(tl.int32), 0)
        if far * runs > 0:
            b_top = tl.full([BLOCK_Q], float("-inf"), tl.float32)  # [q]
            for tile in tl.range(0, tl.cdiv(lk, BLOCK_K), num_stages=1):
                b_top = _largest_bias(
                    b_top, p_row, p_pair, pair_b, pair_h, start_q, o_pair_q, tile * BLOCK_K, unit,
                    stride_pair_q * GRAIN_PAIR, stride_pair_k, lk, BLOCK_Q, BLOCK_K, HAS_ROW, TENSOR_MAP, FOLD, WIDE,
                )  # fmt: skip
            b_size = tl.abs(b_top)
            b_ref = tl.where((b_size > NEAR) & (b_size < float("inf")), b_top, 0.0)  # [q]
            b_acc = tl.zeros([BLOCK_Q, BLOCK_C], tl.float32)  # [q,c]
            b_max = tl.full([BLOCK_Q], FLOOR, tl.float32)
            b_sum = tl.zeros([BLOCK_Q], tl.float32)
            for tile in tl.range(0, tl.cdiv(lk, BLOCK_K), num_stages=1):
                b_acc, b_max, b_sum = _step(
                    b_q, b_acc, b_max, b_sum, b_ref, p_k, p_v, p_row, p_pair, pair_b, pair_h, start_q, o_pair_q, tile * BLOCK_K,
                    unit, stride_kl * GRAIN, stride_kd, stride_vl * GRAIN, stride_vc, stride_pair_q * GRAIN_PAIR, stride_pair_k,
                    lk, D, C, BLOCK_Q, BLOCK_D, BLOCK_C, BLOCK_K, BLOCK_K, HAS_PAIR, HAS_ROW, True, TENSOR_MAP, FOLD, PRECISION,
                    WIDE, True,
                )  # fmt: skip
            b_o, b_lse = finish(b_acc, b_max, b_sum)
            if HAS_GATE:
                b_o = _gated(b_o, p_gate, o_q, stride_gl * GRAIN_GATE, stride_gc, left_q, C, BLOCK_C, WIDE)
            b_again = (b_ref != 0.0) & (o_in < left_q)
            tl.debug_barrier()  # another thread may have stored the same element before
            tl.store(p_lse + o_in, b_lse, mask=b_again)
            tl.store(p_ref + o_in, b_ref, mask=b_again)
            p_tile = p_o + first * C + o_in[:, None] * stride_o + o_c[None, :]
            tl.store(p_tile, b_o.to(p_o.dtype.element_ty), mask=b_again[:, None] & (o_c < C)[None, :])
