"""dK, dV and the mask-bias gradient: the scores transposed, so that P^T and dS^T go from registers into the next matmul."""

from __future__ import annotations

from collections import namedtuple

import triton.language as tl

from evoattn.backends.triton.kernels.backward import DISTANT_LSE, PADDED, REFERENCE, CallConstants, Stats
from evoattn.kit.arguments import Number, PairView, Pointer, RowView, Sizes, View, kernel
from evoattn.kit.overlap import wait_to_load, wait_to_store
from evoattn.kit.primitives import (
    LOG2E,
    at,
    decode,
    load_tile,
    load_view,
    offsets,
    scores,
    store_view,
    subtract_reference,
)

Variant = namedtuple(
    "Variant",
    "GRAIN_PAIR HAS_PAIR MASK_PAIR PAIR_TRANSPOSED NEED_DK NEED_DV MASK_MODE SEED DISTANT_ONLY WAIT",
    defaults=[0],
)
"""Compile-time constants of the kernel, besides `CallConstants`.

PAIR_TRANSPOSED: the innermost axis of the pair bias is that of queries.
MASK_MODE: the mask-bias gradient is summed in memory ("add"), stored ("store") or dropped ("none").
SEED: the accumulators of S and dP start from what is added to them.
DISTANT_ONLY: a launch of its own adds what distant queries give (`backward.store_statistics`), if there are any.
"""


@kernel
def dkdv_kernel(
    q: View, k: View, v: View, dO: View, stats: Stats, key_bias: RowView, pair: PairView, dk: Pointer, dv: Pointer, dmask: View,
    sizes: Sizes, blocks: Number, T: CallConstants, V: Variant,
) -> None:  # fmt: skip
    """One program owns BLOCK_K keys of one (b, n, h).

    It loops over all query tiles, and over none when the mask switches every key of it off.
    It writes dK and dV once, and its part of the mask-bias gradient (the sum over its head's queries) once.

    More than 60 lines: its parts share the tiles that stay in registers over the loop, and their offsets.
    """
    if V.DISTANT_ONLY:
        wait_to_load(V.WAIT)
        wait_to_store(V.WAIT)
        if tl.load(stats.distant) == 0:
            return
    block, n, h, b = decode(tl.program_id(0), blocks, sizes.n, sizes.h)
    b = b.to(tl.int64)
    n = n.to(tl.int64)
    h = h.to(tl.int64)
    start_k = block * T.BLOCK_K
    start = start_k.to(tl.int64)
    left_k = sizes.lk - start_k
    o_in = tl.arange(0, T.BLOCK_K)
    o_k = offsets(o_in, T.LONG)
    o_in_q = tl.arange(0, T.BLOCK_Q)
    o_q = offsets(o_in_q, T.LONG)
    o_d = offsets(tl.arange(0, T.BLOCK_D), T.LONG)
    o_c = offsets(tl.arange(0, T.BLOCK_C), T.LONG)
    unit = sizes.scale * LOG2E
    stride_pair_q = pair.q * V.GRAIN_PAIR
    stride_pair_k = pair.k
    if V.PAIR_TRANSPOSED:
        stride_pair_q = pair.k
        stride_pair_k = pair.q * V.GRAIN_PAIR
    line = (b * sizes.n + n) * sizes.h + h
    q = at(q, b, h, T.GRAIN, n=n)
    dO = at(dO, b, h, T.GRAIN, n=n)
    k = at(k, b, h, T.GRAIN, n=n, first=start)
    v = at(v, b, h, T.GRAIN, n=n, first=start)
    p_pair = pair.p + ((b * pair.b + h * pair.h) * V.GRAIN_PAIR + start * stride_pair_k)
    p_stats = stats.p + line * (stats.padded_q * PADDED)

    b_k = load_view(k.p, k, o_k, o_d, left_k, COLS=T.D, GRAIN=T.GRAIN, MASK=not T.EVEN_K)  # [k,d]
    b_v = load_view(v.p, v, o_k, o_c, left_k, COLS=T.C, GRAIN=T.GRAIN, MASK=not T.EVEN_K)  # [k,c]
    if not V.DISTANT_ONLY:
        wait_to_load(V.WAIT)
    plane = offsets(stats.plane_stride, T.LONG) * PADDED
    b_key_bias = 0.0
    tiles = tl.cdiv(sizes.lq, T.BLOCK_Q)
    if T.HAS_KEY_BIAS:
        b_key_bias = tl.load(key_bias.p + b * key_bias.b * PADDED + n * key_bias.n * PADDED + start_k + o_in)  # [k]
        # NaN counts as live: it has to reach the gradients.
        tiles = tl.where(tl.max((b_key_bias != float("-inf")).to(tl.int32), 0) != 0, tiles, 0)
    b_dk = tl.zeros([T.BLOCK_K, T.BLOCK_D], tl.float32)  # [k,d]
    b_dv = tl.zeros([T.BLOCK_K, T.BLOCK_C], tl.float32)  # [k,c]
    b_dmask = tl.zeros([T.BLOCK_K], tl.float32)  # [k]
    if tiles > 0:  # so that the loop itself runs at least once, see dq_kernel
        for tile in tl.range(0, tiles, num_stages=T.STAGES):
            first = tile * T.BLOCK_Q
            start_q = tl.cast(first, tl.int64)
            left_q = sizes.lq - first
            p_q = q.p + start_q * q.l * T.GRAIN
            b_q = load_view(p_q, q, o_q, o_d, left_q, COLS=T.D, GRAIN=T.GRAIN, MASK=not T.EVEN_Q)  # [q,d]
            p_do = dO.p + start_q * dO.l * T.GRAIN
            b_do = load_view(p_do, dO, o_q, o_c, left_q, COLS=T.C, GRAIN=T.GRAIN, MASK=not T.EVEN_Q)  # [q,c]
            b_pair = 0.0
            if V.HAS_PAIR:
                b_pair = load_tile(
                    p_pair + start_q * stride_pair_q, o_k, o_q, stride_pair_k, stride_pair_q, left_k, left_q,
                    MASK_ROWS=V.MASK_PAIR and not T.EVEN_K, MASK_COLS=V.MASK_PAIR and not T.EVEN_Q,
                )  # [k,q]  # fmt: skip
            if V.DISTANT_ONLY:
                b_pair = subtract_reference(b_pair, tl.load(p_stats + REFERENCE * plane + first + o_in_q)[None, :])
            b_lse = tl.load(p_stats + (DISTANT_LSE * plane if V.DISTANT_ONLY else 0) + first + o_in_q)  # [q]
            b_s = scores(
                b_k, b_q, b_pair, b_key_bias, unit, FOLD=T.FOLD, HAS_PAIR=V.HAS_PAIR, HAS_KEY_BIAS=T.HAS_KEY_BIAS,
                PRECISION=T.PRECISION, KEYS=0, SEED=V.SEED,
            )  # [k,q]  # fmt: skip
            b_p = tl.math.exp2(b_s * (unit if T.FOLD else 1.0) - b_lse[None, :])  # [k,q]
            if V.NEED_DV:
                # dV += P^T dO
                b_dv = tl.dot(b_p.to(b_do.dtype), b_do, b_dv, input_precision=T.PRECISION)  # [k,c]
            if V.NEED_DK or V.MASK_MODE != "none":
                b_delta = tl.load(p_stats + plane + first + o_in_q)  # [q]
                # dS^T = P^T (V dO^T - delta)
                if V.SEED:
                    b_seed = tl.broadcast_to(-b_delta[None, :], [T.BLOCK_K, T.BLOCK_Q])  # [k,q]
                    b_ds = b_p * tl.dot(b_v, tl.trans(b_do), b_seed, input_precision=T.PRECISION)  # [k,q]
                else:
                    b_ds = b_p * (tl.dot(b_v, tl.trans(b_do), input_precision=T.PRECISION) - b_delta[None, :])  # [k,q]
                if V.NEED_DK:
                    # dK += dS^T Q
                    b_dk = tl.dot(b_ds.to(b_q.dtype), b_q, b_dk, input_precision=T.PRECISION)  # [k,d]
                if V.MASK_MODE != "none":
                    b_dmask += tl.sum(b_ds, 1)

    if not V.DISTANT_ONLY:
        wait_to_store(V.WAIT)
    begin = line * sizes.lk + start
    stride_out = tl.cast(1, tl.int32)
    if T.HEADS_INSIDE:
        begin = ((b * sizes.n + n) * sizes.lk + start) * sizes.h + h
        stride_out = sizes.h
    if V.NEED_DK:
        p_dk = dk + begin * T.D
        b_dk *= sizes.scale
        out = View(p_dk, 0, 0, 0, stride_out * T.D, 1)
        if V.DISTANT_ONLY:
            b_dk += load_view(out.p, out, o_k, o_d, left_k, COLS=T.D, GRAIN=1, MASK=not T.EVEN_K).to(tl.float32)
        store_view(out, b_dk, o_k, o_d, left_k, COLS=T.D, GRAIN=1, MASK=not T.EVEN_K)
    if V.NEED_DV:
        out = View(dv + begin * T.C, 0, 0, 0, stride_out * T.C, 1)
        if V.DISTANT_ONLY:
            b_dv += load_view(out.p, out, o_k, o_c, left_k, COLS=T.C, GRAIN=1, MASK=not T.EVEN_K).to(tl.float32)
        store_view(out, b_dv, o_k, o_c, left_k, COLS=T.C, GRAIN=1, MASK=not T.EVEN_K)
    if V.MASK_MODE != "none":
        p_dmask = dmask.p + (b * dmask.b + n * dmask.n + h * dmask.h + start)
        if V.MASK_MODE == "add":
            tl.atomic_add(p_dmask + o_in, b_dmask, mask=o_in < left_k, sem="relaxed")
        else:
            if V.DISTANT_ONLY:
                b_dmask += tl.load(p_dmask + o_in, mask=o_in < left_k, other=0.0)
            tl.store(p_dmask + o_in, b_dmask, mask=o_in < left_k)
