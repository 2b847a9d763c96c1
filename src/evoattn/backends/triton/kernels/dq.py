# ruff: noqa: RUF005 (Triton does not unpack tuples with a star)
# mypy: disable-error-code="assignment, var-annotated"
"""dQ and, if one pass is fastest, the pair-bias gradient."""

from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl

from evoattn.backends.triton.kernels.backward import (
    DISTANT_LSE,
    PADDED,
    REFERENCE,
    CallConstants,
    Stats,
    score_gradient,
    store_statistics,
)
from evoattn.kit.arguments import Number, PairView, Pointer, RowView, Sizes, View, kernel
from evoattn.kit.overlap import wait_to_load, wait_to_store
from evoattn.kit.primitives import LOG2E, at, load_tile, load_view, offsets, pair_at, store_tile, subtract_reference

Variant = namedtuple(
    "Variant",
    "ROWS GRAIN_PAIR GRAIN_DPAIR HAS_PAIR MASK_PAIR MAKE_STATS HAS_DLSE WAITS_FOR_DO NEED_DQ PAIR_MODE FULL_Q FULL_K "
    "DISTANT_ONLY WAIT",
    defaults=[0],
)
"""Compile-time constants of the kernel, besides `CallConstants`.

MAKE_STATS: it writes the statistics of its queries, which it otherwise reads.
WAITS_FOR_DO: the kernel before writes dO, so this one waits for it before it loads dO.
PAIR_MODE: dS is summed in memory ("add"), stored ("store") or dropped ("none"). FULL_Q, FULL_K: the pair bias has the axis.
DISTANT_ONLY: a launch of its own writes what belongs to distant queries
(`backward.store_statistics`), and adds their dS, if there are any.
"""


@triton.jit
def _add_pair_gradient(
    p_dpair, b_ds, o_q, o_k, stride_q, left_q, left_k, live, b_lse,
    MODE: tl.constexpr, EVEN: tl.constexpr, FULL_Q: tl.constexpr, DISTANT_ONLY: tl.constexpr,
):  # fmt: skip
    """One tile of the pair-bias gradient, summed over the axes that the bias broadcasts; MODE says add or store.

    If not `live`, nothing is written, except by "add" with FULL_Q: p_dpair then points to the BLOCK_Q spare lines that the
    buffer has after the last query (`pair_plan.plan_pair`), which nobody reads.
    """
    if FULL_Q:
        p_tile = p_dpair + o_q[:, None] * stride_q + o_k[None, :]
        if MODE == "add":
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


@kernel
def dq_kernel(
    q: View, k: View, v: View, dO: View, stats: Stats, o: View, lse: Pointer, ref: Pointer, dlse: View, key_bias: RowView,
    runs: RowView, pair: PairView, dq: Pointer, dpair: PairView, sizes: Sizes, blocks: Number, groups: Number,
    heads_at_once: Number, T: CallConstants, V: Variant,
) -> None:  # fmt: skip
    """One program owns BLOCK_Q queries of ROWS neighbouring rows n of one (b, h), which share every tile of pair bias.

    It loops over the key tiles from the first to the last that is live in any of its rows (over the first if none is, for
    nothing), and sums dQ in registers.
    It writes dQ once, each tile of dS summed over its rows once (one addition in memory for ROWS rows), and, with MAKE_STATS,
    the statistics of its queries, which it otherwise reads (their own kernel takes .035 ms at tri384 on an H200).

    More than 60 lines: its parts share the tiles that stay in registers over the loop, and their offsets.
    """
    if V.DISTANT_ONLY:
        wait_to_load(V.WAIT)
        wait_to_store(V.WAIT)
        if tl.load(stats.distant) == 0:
            return
    # Heads run fastest, then queries, then rows n: programs that run at a time add to different tiles of the gradient. But only
    # `heads_at_once` heads run at a time, whose pair bias and gradient the cache holds.
    pid = tl.program_id(0)
    h = pid % heads_at_once
    outer = pid // heads_at_once
    start_q = (outer % blocks) * T.BLOCK_Q
    outer = outer // blocks
    group = outer % groups
    outer = outer // groups
    h = (h + outer % (sizes.h // heads_at_once) * heads_at_once).to(tl.int64)
    b = (outer // (sizes.h // heads_at_once)).to(tl.int64)
    left_q = sizes.lq - start_q
    o_in = tl.arange(0, T.BLOCK_Q)
    o_q = offsets(o_in, T.LONG)
    o_d = offsets(tl.arange(0, T.BLOCK_D), T.LONG)
    o_c = offsets(tl.arange(0, T.BLOCK_C), T.LONG)
    o_in_k = tl.arange(0, T.BLOCK_K)
    o_k = offsets(o_in_k, T.LONG)
    unit = sizes.scale * LOG2E
    plane = offsets(stats.plane_stride, T.LONG) * PADDED
    start = start_q.to(tl.int64)
    q = at(q, b, h, T.GRAIN, first=start)
    dO = at(dO, b, h, T.GRAIN, first=start)
    k = at(k, b, h, T.GRAIN)
    v = at(v, b, h, T.GRAIN)
    p_key_bias = key_bias.p + b * key_bias.b * PADDED
    pair = pair_at(pair, b, h, V.GRAIN_PAIR, first_q=start)
    p_dpair = dpair.p + (b * dpair.b + h * dpair.h) * V.GRAIN_DPAIR
    p_stats = stats.p + start
    o = at(o, b, h, T.GRAIN, first=start)
    p_dlse = dlse.p + (b * dlse.b + h * dlse.h + start * dlse.l)

    if V.WAITS_FOR_DO and not V.DISTANT_ONLY:
        wait_to_load(V.WAIT)
        wait_to_store(V.WAIT)
    # All loads first, so that they are in flight at the same time.
    ns = ()
    b_qs = ()
    b_dos = ()
    b_os = ()
    for r in tl.static_range(V.ROWS):
        # A group that hangs over the end repeats its last row, with P = 0.
        n = tl.minimum(group * V.ROWS + r, sizes.n - 1).to(tl.int64)
        ns = ns + (n,)
        b_q = load_view(q.p + n * q.n * T.GRAIN, q, o_q, o_d, left_q, COLS=T.D, GRAIN=T.GRAIN, MASK=not T.EVEN_Q)  # [q,d]
        b_do = load_view(dO.p + n * dO.n * T.GRAIN, dO, o_q, o_c, left_q, COLS=T.C, GRAIN=T.GRAIN, MASK=not T.EVEN_Q)  # [q,c]
        b_qs = b_qs + (b_q,)
        b_dos = b_dos + (b_do,)
        if V.MAKE_STATS:
            b_o = load_view(o.p + n * o.n * T.GRAIN, o, o_q, o_c, left_q, COLS=T.C, GRAIN=T.GRAIN, MASK=not T.EVEN_Q)  # [q,c]
            b_os = b_os + (b_o,)
    if not V.WAITS_FOR_DO and not V.DISTANT_ONLY:
        wait_to_load(V.WAIT)
        wait_to_store(V.WAIT)  # the statistics are stored soon, and then each tile of the pair-bias gradient
    b_lses = ()
    b_deltas = ()
    b_dqs = ()
    for r in tl.static_range(V.ROWS):
        if V.MAKE_STATS:
            line = (b * sizes.n + ns[r]) * sizes.h + h
            stat = line * sizes.lq + start
            store_statistics(
                p_stats + line * (stats.padded_q * PADDED), stats.distant, lse + stat, ref + stat,
                p_dlse + ns[r] * dlse.n, b_os[r], b_dos[r], o_in, left_q, dlse.l, plane,
                HAS_DLSE=V.HAS_DLSE, HAS_PAIR=V.HAS_PAIR,
            )  # fmt: skip
    if V.MAKE_STATS:
        # Read back what was written, in the layout of the loop.
        tl.debug_barrier()
    for r in tl.static_range(V.ROWS):
        p_stat = p_stats + ((b * sizes.n + ns[r]) * sizes.h + h) * (stats.padded_q * PADDED) + o_in
        b_lse = tl.load(p_stat + (DISTANT_LSE * plane if V.DISTANT_ONLY else 0))  # [q]
        b_delta = tl.load(p_stat + plane)  # [q]
        if V.ROWS > 1:
            b_lse = tl.where(group * V.ROWS + r < sizes.n, b_lse, float("inf"))
        b_lses = b_lses + (b_lse,)
        b_deltas = b_deltas + (b_delta,)
        b_dqs = b_dqs + (tl.zeros([T.BLOCK_Q, T.BLOCK_D], tl.float32),)  # [q,d]
    b_dpair_q = tl.zeros([T.BLOCK_Q], tl.float32)  # [q]

    # One loop over the span of live tiles, holes included: a loop over runs of them around it takes 34 more registers.
    begin = 0
    end = tl.cdiv(sizes.lk, T.BLOCK_K)
    if T.HAS_KEY_BIAS:
        begin = end
        end = 0
        for r in tl.static_range(V.ROWS):
            p_runs = runs.p + b * runs.b + ns[r] * runs.n
            count = tl.load(p_runs)
            begin = tl.where(count > 0, tl.minimum(begin, tl.load(p_runs + 1)), begin)
            end = tl.where(count > 0, tl.maximum(end, tl.load(p_runs + 2 * tl.maximum(count, 1))), end)
    # At least one tile, of which nothing is stored if none is live: if a loop can run zero times, its sums also come from the
    # zeros before it, and ptxas then serialises all products (C7515).
    live = True
    if T.HAS_KEY_BIAS:
        live = end > 0
    end = tl.maximum(end, 1)
    begin = tl.minimum(begin, end - 1)
    tl.assume(begin < end)
    # Sums have a tile of lines past the last queries for what is not live: a condition on each addition costs registers.
    p_dpair += tl.where(live, start, (blocks * T.BLOCK_Q).to(tl.int64)) * dpair.q * V.GRAIN_DPAIR
    for tile in tl.range(begin, end, num_stages=T.STAGES):
        first = tile * T.BLOCK_K
        start_k = tl.cast(first, tl.int64)
        left_k = sizes.lk - first
        b_pair = 0.0
        if V.HAS_PAIR:
            b_pair = load_tile(
                pair.p + start_k * pair.k, o_q, o_k, pair.q * V.GRAIN_PAIR, pair.k, left_q, left_k,
                MASK_ROWS=V.MASK_PAIR and not T.EVEN_Q, MASK_COLS=V.MASK_PAIR and not T.EVEN_K,
            )  # [q,k]  # fmt: skip
        b_new = ()
        for r in tl.static_range(V.ROWS):
            p_k = k.p + (ns[r] * k.n + start_k * k.l) * T.GRAIN
            p_v = v.p + (ns[r] * v.n + start_k * v.l) * T.GRAIN
            b_k = load_view(p_k, k, o_k, o_d, left_k, COLS=T.D, GRAIN=T.GRAIN, MASK=not T.EVEN_K)  # [k,d]
            b_v = load_view(p_v, v, o_k, o_c, left_k, COLS=T.C, GRAIN=T.GRAIN, MASK=not T.EVEN_K)  # [k,c]
            b_key_bias = 0.0
            if T.HAS_KEY_BIAS:
                b_key_bias = tl.load(p_key_bias + ns[r] * key_bias.n * PADDED + first + o_in_k)  # [k]
            b_measured = b_pair
            if V.DISTANT_ONLY:
                p_ref = p_stats + REFERENCE * plane + ((b * sizes.n + ns[r]) * sizes.h + h) * (stats.padded_q * PADDED)
                b_measured = subtract_reference(b_pair, tl.load(p_ref + o_in)[:, None])
            b_ds = score_gradient(
                b_qs[r], b_dos[r], b_k, b_v, b_lses[r], b_deltas[r], b_measured, b_key_bias, unit, T, HAS_PAIR=V.HAS_PAIR
            )  # [q,k]
            if V.NEED_DQ:
                # dQ += dS K
                b_new = b_new + (tl.dot(b_ds.to(b_k.dtype), b_k, b_dqs[r], input_precision=T.PRECISION),)  # [q,d]
            if r == 0:
                b_ds_all = b_ds
            else:
                b_ds_all += b_ds
        if V.NEED_DQ:
            b_dqs = b_new
        if V.PAIR_MODE != "none":
            if V.FULL_K:
                _add_pair_gradient(
                    p_dpair + start_k, b_ds_all, o_q, o_k, dpair.q * V.GRAIN_DPAIR, left_q, left_k, live, b_lse,
                    MODE=V.PAIR_MODE, EVEN=T.EVEN_Q and T.EVEN_K, FULL_Q=V.FULL_Q, DISTANT_ONLY=V.DISTANT_ONLY,
                )  # fmt: skip
            else:
                b_dpair_q += tl.sum(b_ds_all, 1)

    if V.PAIR_MODE != "none" and not V.FULL_K:
        b_dpair_q = tl.where(live, b_dpair_q, 0.0)
        if V.FULL_Q:
            tl.atomic_add(p_dpair + o_q * dpair.q * V.GRAIN_DPAIR, b_dpair_q, sem="relaxed")
        else:
            tl.atomic_add(p_dpair, tl.sum(b_dpair_q, 0), sem="relaxed")
    if V.NEED_DQ:
        for r in tl.static_range(V.ROWS):
            n = group * V.ROWS + r
            b_dq = b_dqs[r]
            if T.HAS_KEY_BIAS:
                b_dq = tl.where((b_lses[r] == float("inf"))[:, None], 0.0, b_dq)
            stride_dq = T.D
            p_out = dq + (((b * sizes.n + n) * sizes.h + h) * sizes.lq + start) * T.D
            if T.HEADS_INSIDE:
                stride_dq = T.D * sizes.h
                p_out = dq + (((b * sizes.n + n) * sizes.lq + start) * sizes.h + h) * T.D
            queries = tl.where(n < sizes.n, left_q, 0)
            if V.DISTANT_ONLY:
                p_tile = p_out + o_q[:, None] * stride_dq + o_d[None, :]
                inside = ((o_q < queries) & (b_lses[r] != float("inf")))[:, None] & (o_d < T.D)[None, :]
                tl.store(p_tile, (b_dq * sizes.scale).to(dq.dtype.element_ty), mask=inside)
            else:
                store_tile(
                    p_out, b_dq * sizes.scale, o_q, o_d, stride_dq, 1, queries, T.D,
                    MASK_ROWS=V.ROWS > 1 or not T.EVEN_Q, MASK_COLS=T.D != T.BLOCK_D,
                )  # fmt: skip
