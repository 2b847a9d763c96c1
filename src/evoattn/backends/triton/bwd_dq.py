# ruff: noqa: RUF005 (Triton does not unpack tuples with a star)
# mypy: disable-error-code="assignment, var-annotated"
"""dQ and, where one pass is fastest, the pair-bias gradient."""

from __future__ import annotations

import triton
import triton.language as tl

from evoattn.backends.triton.bwd_preprocess import store_statistics
from evoattn.backends.triton.launch import Kernel
from evoattn.backends.triton.overlap import wait_to_load, wait_to_store
from evoattn.backends.triton.primitives import (
    LOG2E,
    load_pair_bias,
    load_row_bias,
    load_tile,
    measured,
    scores,
    store_tile,
    wide,
)

__all__ = ["PAIR_ADD", "PAIR_NONE", "PAIR_STORE", "dq_kernel"]

PAIR_NONE = 0
PAIR_ADD = 1
PAIR_STORE = 2

_NONE = tl.constexpr(PAIR_NONE)
_ADD = tl.constexpr(PAIR_ADD)


@triton.jit
def score_gradient(
    b_q, b_do, b_k, b_v, b_lse, b_delta, b_pair, b_row, unit,
    HAS_PAIR: tl.constexpr, HAS_ROW: tl.constexpr, FOLD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dS [q,k] = P (dP - delta), P recomputed from the saved statistic."""
    b_s = scores(b_q, b_k, b_pair, b_row, unit, FOLD, HAS_PAIR, HAS_ROW, PRECISION, ROW_FOLDED=True)  # [q,k]
    b_dp = tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)  # [q,k]
    b_p = tl.math.exp2(b_s * (unit if FOLD else 1.0) - b_lse[:, None])  # [q,k]
    return b_p * (b_dp - b_delta[:, None])


@triton.jit
def _add_pair_gradient(
    p_dpair, b_ds, o_q, o_k, stride_q, left_q, left_k, live, b_lse,
    MODE: tl.constexpr, EVEN: tl.constexpr, FULL_Q: tl.constexpr, DISTANT_ONLY: tl.constexpr,
):  # fmt: skip
    """One tile of the pair-bias gradient, summed over the axes that the bias broadcasts; MODE says add or store.

    Where not `live`, nothing is, but for whole tiles that are added: p_dpair then points to lines that nobody reads.
    """
    if FULL_Q:
        p_tile = p_dpair + o_q[:, None] * stride_q + o_k[None, :]
        if MODE == _ADD:
            tl.atomic_add(p_tile, b_ds, sem="relaxed")
        elif DISTANT_ONLY:
            inside = (o_q[:, None] < left_q) & (o_k[None, :] < left_k) & (b_lse != float("inf"))[:, None]
            tl.store(p_tile, b_ds.to(p_dpair.dtype.element_ty), mask=inside & live)
        elif EVEN:
            tl.store(p_tile, b_ds.to(p_dpair.dtype.element_ty), mask=live)
        else:
            inside = (o_q[:, None] < left_q) & (o_k[None, :] < left_k)
            tl.store(p_tile, b_ds.to(p_dpair.dtype.element_ty), mask=inside & live)
    else:
        tl.atomic_add(p_dpair + o_k, tl.sum(b_ds, 0), mask=live, sem="relaxed")


@Kernel
@triton.jit(
    do_not_specialize=[
        "stride_qb", "stride_qn", "stride_qh", "stride_ql",
        "stride_kb", "stride_kn", "stride_kh", "stride_kl",
        "stride_vb", "stride_vn", "stride_vh", "stride_vl",
        "stride_dob", "stride_don", "stride_doh", "stride_dol",
        "stride_ob", "stride_on", "stride_oh", "stride_ol",
        "stride_dlse_b", "stride_dlse_n", "stride_dlse_h", "stride_dlse_q",
        "stride_pair_b", "stride_pair_h", "stride_pair_q",
        "stride_dpair_b", "stride_dpair_h", "stride_dpair_q",
        "stride_row_b", "stride_row_n", "stride_runs_b", "stride_runs_n",
        "n_rows", "heads", "lq", "lk", "padded_q", "half", "blocks", "groups", "together",
    ]
)  # fmt: skip
def dq_kernel(
    p_q, p_k, p_v, p_do, p_stats, p_distant, p_o, p_lse, p_ref, p_dlse, p_row, p_runs, p_pair, p_dq, p_dpair, scale,
    stride_qb, stride_qn, stride_qh, stride_ql, stride_qd,
    stride_kb, stride_kn, stride_kh, stride_kl, stride_kd,
    stride_vb, stride_vn, stride_vh, stride_vl, stride_vc,
    stride_dob, stride_don, stride_doh, stride_dol, stride_doc,
    stride_ob, stride_on, stride_oh, stride_ol, stride_oc,
    stride_dlse_b, stride_dlse_n, stride_dlse_h, stride_dlse_q,
    stride_pair_b, stride_pair_h, stride_pair_q, stride_pair_k,
    stride_dpair_b, stride_dpair_h, stride_dpair_q,
    stride_row_b, stride_row_n, stride_runs_b, stride_runs_n,
    n_rows, heads, lq, lk, padded_q, half, blocks, groups, together,
    D: tl.constexpr,
    C: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    PAD: tl.constexpr,
    GRAIN: tl.constexpr,
    GRAIN_PAIR: tl.constexpr,
    GRAIN_DPAIR: tl.constexpr,
    HAS_PAIR: tl.constexpr,
    MASK_PAIR: tl.constexpr,
    HAS_ROW: tl.constexpr,
    MAKE_STATS: tl.constexpr,
    HAS_DLSE: tl.constexpr,
    DO_IS_MADE: tl.constexpr,
    NEED_DQ: tl.constexpr,
    PAIR_MODE: tl.constexpr,
    FULL_Q: tl.constexpr,
    FULL_K: tl.constexpr,
    EVEN_Q: tl.constexpr,
    EVEN_K: tl.constexpr,
    HEADS_INSIDE: tl.constexpr,
    FOLD: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
    DISTANT_ONLY: tl.constexpr,
    WAIT: tl.constexpr,
):  # fmt: skip
    """One program owns BLOCK_Q queries of ROWS neighbouring rows n of one (b, h), which share every tile of pair bias.

    It loops over the key tiles from the first to the last that is live in any of its rows (over the first where none is, for
    nothing), and sums dQ in registers.
    It writes dQ once, each tile of dS summed over its rows once (one addition in memory for ROWS rows), and, with MAKE_STATS,
    the statistics of its queries, which it otherwise reads (a kernel of their own takes .035 ms at tri384 on an H200).
    DO_IS_MADE: the kernel before writes do.
    DISTANT_ONLY: a launch of its own writes what belongs to distant queries (`bwd_preprocess.store_statistics`), and adds their
    dS, if there are any.
    """
    if DISTANT_ONLY:
        wait_to_load(WAIT)
        wait_to_store(WAIT)
        if tl.load(p_distant) == 0:
            return
    # Heads run fastest, then queries, then rows n: programs that run together add to different tiles of the gradient. But only
    # `together` heads at a time, whose pair bias and gradient the cache holds.
    pid = tl.program_id(0)
    h = pid % together
    rest = pid // together
    start_q = (rest % blocks) * BLOCK_Q
    rest = rest // blocks
    group = rest % groups
    rest = rest // groups
    h = (h + rest % (heads // together) * together).to(tl.int64)
    b = (rest // (heads // together)).to(tl.int64)
    left_q = lq - start_q
    o_in = tl.arange(0, BLOCK_Q)
    o_q = wide(o_in, WIDE)
    o_d = wide(tl.arange(0, BLOCK_D), WIDE)
    o_c = wide(tl.arange(0, BLOCK_C), WIDE)
    o_in_k = tl.arange(0, BLOCK_K)
    o_k = wide(o_in_k, WIDE)
    unit = scale * LOG2E
    plane = wide(half, WIDE) * PAD
    start = start_q.to(tl.int64)
    p_q += (b * stride_qb + h * stride_qh + start * stride_ql) * GRAIN
    p_do += (b * stride_dob + h * stride_doh + start * stride_dol) * GRAIN
    p_k += (b * stride_kb + h * stride_kh) * GRAIN
    p_v += (b * stride_vb + h * stride_vh) * GRAIN
    p_row += b * stride_row_b * PAD
    p_pair += (b * stride_pair_b + h * stride_pair_h + start * stride_pair_q) * GRAIN_PAIR
    p_dpair += (b * stride_dpair_b + h * stride_dpair_h) * GRAIN_DPAIR
    p_stats += start
    p_o += (b * stride_ob + h * stride_oh + start * stride_ol) * GRAIN
    p_dlse += b * stride_dlse_b + h * stride_dlse_h + start * stride_dlse_q

    if DO_IS_MADE and not DISTANT_ONLY:
        wait_to_load(WAIT)
        wait_to_store(WAIT)
    # All loads first, so that they are on their way together.
    ns = ()
    b_qs = ()
    b_dos = ()
    b_os = ()
    for r in tl.static_range(ROWS):
        # A group that hangs over the end repeats its last row, with P = 0.
        n = tl.minimum(group * ROWS + r, n_rows - 1).to(tl.int64)
        ns = ns + (n,)
        p_this = p_q + n * stride_qn * GRAIN
        b_qs = b_qs + (load_tile(p_this, o_q, o_d, stride_ql * GRAIN, stride_qd, left_q, D, not EVEN_Q, D != BLOCK_D),)  # [q,d]
        p_this = p_do + n * stride_don * GRAIN
        b_do = load_tile(p_this, o_q, o_c, stride_dol * GRAIN, stride_doc, left_q, C, not EVEN_Q, C != BLOCK_C)  # [q,c]
        b_dos = b_dos + (b_do,)
        if MAKE_STATS:
            p_this = p_o + n * stride_on * GRAIN
            b_o = load_tile(p_this, o_q, o_c, stride_ol * GRAIN, stride_oc, left_q, C, not EVEN_Q, C != BLOCK_C)  # [q,c]
            b_os = b_os + (b_o,)
    if not DO_IS_MADE and not DISTANT_ONLY:
        wait_to_load(WAIT)
        wait_to_store(WAIT)  # the statistics are stored soon, and then each tile of the pair-bias gradient
    b_lses = ()
    b_deltas = ()
    b_dqs = ()
    for r in tl.static_range(ROWS):
        if MAKE_STATS:
            row = (b * n_rows + ns[r]) * heads + h
            stat = row * lq + start
            store_statistics(
                p_stats + row * (padded_q * PAD), p_distant, p_lse + stat, p_ref + stat, p_dlse + ns[r] * stride_dlse_n,
                b_os[r], b_dos[r], o_in, left_q, True, stride_dlse_q, plane, HAS_DLSE, HAS_PAIR, False,
            )  # fmt: skip
    if MAKE_STATS:
        # Read back what was written, in the layout of the loop.
        tl.debug_barrier()
    for r in tl.static_range(ROWS):
        p_this = p_stats + ((b * n_rows + ns[r]) * heads + h) * (padded_q * PAD) + o_in
        b_lse = tl.load(p_this + (2 * plane if DISTANT_ONLY else 0))  # [q]
        b_delta = tl.load(p_this + plane)  # [q]
        if ROWS > 1:
            b_lse = tl.where(group * ROWS + r < n_rows, b_lse, float("inf"))
        b_lses = b_lses + (b_lse,)
        b_deltas = b_deltas + (b_delta,)
        b_dqs = b_dqs + (tl.zeros([BLOCK_Q, BLOCK_D], tl.float32),)  # [q,d]
    b_dpair_q = tl.zeros([BLOCK_Q], tl.float32)  # [q]

    # One loop over the span of live tiles, holes included: a loop over runs of them around it takes 34 more registers.
    begin = 0
    end = tl.cdiv(lk, BLOCK_K)
    if HAS_ROW:
        begin = end
        end = 0
        for r in tl.static_range(ROWS):
            p_this = p_runs + b * stride_runs_b + ns[r] * stride_runs_n
            count = tl.load(p_this)
            begin = tl.where(count > 0, tl.minimum(begin, tl.load(p_this + 1)), begin)
            end = tl.where(count > 0, tl.maximum(end, tl.load(p_this + 2 * tl.maximum(count, 1))), end)
    # At least one tile, and nothing of it goes out where none is live. Were there a way around the loop, it would bring zeros
    # to where the last product of the loop may still run, and ptxas then serialises all products (C7515).
    live = True
    if HAS_ROW:
        live = end > 0
    end = tl.maximum(end, 1)
    begin = tl.minimum(begin, end - 1)
    tl.assume(begin < end)
    # Sums have a tile of lines past the last queries for what is not live: a condition on each addition costs registers.
    p_dpair += tl.where(live, start, (blocks * BLOCK_Q).to(tl.int64)) * stride_dpair_q * GRAIN_DPAIR
    for tile in tl.range(begin, end, num_stages=STAGES):
        first = tile * BLOCK_K
        start_k = tl.cast(first, tl.int64)
        left_k = lk - first
        b_pair = 0.0
        if HAS_PAIR:
            b_pair = load_pair_bias(
                p_pair + start_k * stride_pair_k, o_q, o_k, stride_pair_q * GRAIN_PAIR, stride_pair_k,
                left_q, left_k, MASK_PAIR and not EVEN_Q, MASK_PAIR and not EVEN_K,
            )  # [q,k]  # fmt: skip
        b_new = ()
        for r in tl.static_range(ROWS):
            p_k_tile = p_k + (ns[r] * stride_kn + start_k * stride_kl) * GRAIN
            p_v_tile = p_v + (ns[r] * stride_vn + start_k * stride_vl) * GRAIN
            b_k = load_tile(p_k_tile, o_k, o_d, stride_kl * GRAIN, stride_kd, left_k, D, not EVEN_K, D != BLOCK_D)  # [k,d]
            b_v = load_tile(p_v_tile, o_k, o_c, stride_vl * GRAIN, stride_vc, left_k, C, not EVEN_K, C != BLOCK_C)  # [k,c]
            b_row = 0.0
            if HAS_ROW:
                b_row = load_row_bias(p_row + ns[r] * stride_row_n * PAD + first, o_in_k)  # [k]
            b_mine = b_pair
            if DISTANT_ONLY:
                p_origin = p_stats + 3 * plane + ((b * n_rows + ns[r]) * heads + h) * (padded_q * PAD)
                b_mine = measured(b_pair, tl.load(p_origin + o_in)[:, None])
            b_ds = score_gradient(
                b_qs[r], b_dos[r], b_k, b_v, b_lses[r], b_deltas[r], b_mine, b_row, unit, HAS_PAIR, HAS_ROW, FOLD, PRECISION
            )  # [q,k]
            if NEED_DQ:
                b_new = b_new + (tl.dot(b_ds.to(b_k.dtype), b_k, b_dqs[r], input_precision=PRECISION),)  # [q,d]
            if r == 0:
                b_ds_all = b_ds
            else:
                b_ds_all += b_ds
        if NEED_DQ:
            b_dqs = b_new
        if PAIR_MODE != _NONE:
            if FULL_K:
                _add_pair_gradient(
                    p_dpair + start_k, b_ds_all, o_q, o_k, stride_dpair_q * GRAIN_DPAIR, left_q, left_k, live, b_lse,
                    PAIR_MODE, EVEN_Q and EVEN_K, FULL_Q, DISTANT_ONLY,
                )  # fmt: skip
            else:
                b_dpair_q += tl.sum(b_ds_all, 1)

    if PAIR_MODE != _NONE and not FULL_K:
        b_dpair_q = tl.where(live, b_dpair_q, 0.0)
        if FULL_Q:
            tl.atomic_add(p_dpair + o_q * stride_dpair_q * GRAIN_DPAIR, b_dpair_q, sem="relaxed")
        else:
            tl.atomic_add(p_dpair, tl.sum(b_dpair_q, 0), sem="relaxed")
    if NEED_DQ:
        for r in tl.static_range(ROWS):
            n = group * ROWS + r
            b_dq = b_dqs[r]
            if HAS_ROW:
                b_dq = tl.where((b_lses[r] == float("inf"))[:, None], 0.0, b_dq)
            stride_dq = D
            p_out = p_dq + (((b * n_rows + n) * heads + h) * lq + start) * D
            if HEADS_INSIDE:
                stride_dq = D * heads
                p_out = p_dq + (((b * n_rows + n) * lq + start) * heads + h) * D
            rows = tl.where(n < n_rows, left_q, 0)
            if DISTANT_ONLY:
                p_tile = p_out + o_q[:, None] * stride_dq + o_d[None, :]
                inside = ((o_q < rows) & (b_lses[r] != float("inf")))[:, None] & (o_d < D)[None, :]
                tl.store(p_tile, (b_dq * scale).to(p_dq.dtype.element_ty), mask=inside)
            else:
                store_tile(p_out, b_dq * scale, o_q, o_d, stride_dq, 1, rows, D, ROWS > 1 or not EVEN_Q, D != BLOCK_D)
