"""dK, dV and the row-bias gradient: the scores transposed, so that P^T and dS^T go from registers into the next matmul."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from evoattn.backends.triton.arguments import Constant, Number, PairView, Pointer, RowView, View, kernel
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
    natural,
    store_rows,
    wide,
)

__all__ = ["MASK_ADD", "MASK_NONE", "MASK_STORE", "Gradients", "MaskView", "Sizes", "Variant", "dkdv_kernel"]

MASK_NONE = 0
MASK_ADD = 1
MASK_STORE = 2

_NONE = tl.constexpr(MASK_NONE)
_ADD = tl.constexpr(MASK_ADD)


@triton.jit
def transposed_scores(b_k, b_q, b_pair, b_row, unit, T, HAS_PAIR: tl.constexpr, SEED: tl.constexpr):
    """`primitives.scores` as [k,q], from b_k [k,d], b_q [q,d], b_pair [k,q], b_row [k] (divided by unit where FOLD)."""
    if T.FOLD and HAS_PAIR:
        inverse = 1.0 / unit
        b_start = natural(b_pair) * (inverse * LOG2E)  # [k,q]
        if T.HAS_ROW:
            b_start += b_row[:, None]
        return tl.dot(b_k, tl.trans(b_q), b_start, input_precision=T.PRECISION)
    if (T.FOLD and T.HAS_ROW) and SEED:
        b_start = tl.broadcast_to(b_row[:, None], (T.BLOCK_K, T.BLOCK_Q))  # [k,q]
        return tl.dot(b_k, tl.trans(b_q), b_start, input_precision=T.PRECISION)
    b_s = tl.dot(b_k, tl.trans(b_q), input_precision=T.PRECISION)  # [k,q]
    if T.FOLD:
        if T.HAS_ROW:
            b_s += b_row[:, None]
        return b_s
    b_s *= unit
    if HAS_PAIR:
        b_s += natural(b_pair) * LOG2E
    if T.HAS_ROW:
        b_s += b_row[:, None]
    return b_s


class MaskView(NamedTuple):
    """The gradient of the row bias `[b|1,n|1,h|1,k]`, in float32."""

    p: Pointer
    b: Number
    n: Number
    h: Number


class Gradients(NamedTuple):
    """What is written, contiguous."""

    dk: Pointer
    dv: Pointer


class Sizes(NamedTuple):
    """Sizes of a launch."""

    n: Number
    h: Number
    lq: Number
    lk: Number
    blocks: Number
    scale: Number


class Variant(NamedTuple):
    """What the kernel is compiled for, besides `Tile`.

    PAIR_TRANSPOSED: the innermost axis of the pair bias is that of queries.
    SEED: what is subtracted from dP, and added to S, is where their matmuls' accumulators start.
    DISTANT_ONLY: a launch of its own adds what distant queries give (`bwd_preprocess.store_statistics`), if there are any.
    """

    GRAIN_PAIR: Constant
    HAS_PAIR: Constant
    MASK_PAIR: Constant
    PAIR_TRANSPOSED: Constant
    NEED_DK: Constant
    NEED_DV: Constant
    MASK_MODE: Constant
    HEADS_INSIDE: Constant
    SEED: Constant
    DISTANT_ONLY: Constant
    WAIT: Constant = 0


@kernel
def dkdv_kernel(
    q: View, k: View, v: View, dO: View, stats: Stats, row: RowView, pair: PairView, out: Gradients, dmask: MaskView,
    sizes: Sizes, T: Tile, V: Variant,
) -> None:  # fmt: skip
    """One program owns BLOCK_K keys of one (b, n, h).

    It loops over all query tiles, and over none when the mask switches every key of it off.
    It writes dK and dV once, and its part of the row-bias gradient (the sum over its head's queries) once.
    """
    if V.DISTANT_ONLY:
        wait_to_load(V.WAIT)
        wait_to_store(V.WAIT)
        if tl.load(stats.distant) == 0:
            return
    block, n, h, b = decode(tl.program_id(0), sizes.blocks, sizes.n, sizes.h)
    b = b.to(tl.int64)
    n = n.to(tl.int64)
    h = h.to(tl.int64)
    start_k = block * T.BLOCK_K
    start = start_k.to(tl.int64)
    left_k = sizes.lk - start_k
    o_in = tl.arange(0, T.BLOCK_K)
    o_k = wide(o_in, T.WIDE)
    o_in_q = tl.arange(0, T.BLOCK_Q)
    o_q = wide(o_in_q, T.WIDE)
    o_d = wide(tl.arange(0, T.BLOCK_D), T.WIDE)
    o_c = wide(tl.arange(0, T.BLOCK_C), T.WIDE)
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
    p_stats = stats.p + line * (stats.padded_q * T.PAD)

    b_k = load_rows(k.p, k, o_k, o_d, left_k, COLS=T.D, GRAIN=T.GRAIN, MASK=not T.EVEN_K)  # [k,d]
    b_v = load_rows(v.p, v, o_k, o_c, left_k, COLS=T.C, GRAIN=T.GRAIN, MASK=not T.EVEN_K)  # [k,c]
    if not V.DISTANT_ONLY:
        wait_to_load(V.WAIT)
    plane = wide(stats.half, T.WIDE) * T.PAD
    b_row = 0.0
    tiles = tl.cdiv(sizes.lq, T.BLOCK_Q)
    if T.HAS_ROW:
        b_row = load_row_bias(row.p + b * row.b * T.PAD + n * row.n * T.PAD + start_k, o_in)  # [k]
        # NaN counts as live: it has to reach the gradients.
        tiles = tl.where(tl.max((b_row != float("-inf")).to(tl.int32), 0) != 0, tiles, 0)
    b_dk = tl.zeros([T.BLOCK_K, T.BLOCK_D], tl.float32)  # [k,d]
    b_dv = tl.zeros([T.BLOCK_K, T.BLOCK_C], tl.float32)  # [k,c]
    b_dmask = tl.zeros([T.BLOCK_K], tl.float32)  # [k]
    if tiles > 0:  # so that there is no way around the loop itself, see dq_kernel
        for tile in tl.range(0, tiles, num_stages=T.STAGES):
            first = tile * T.BLOCK_Q
            start_q = tl.cast(first, tl.int64)
            left_q = sizes.lq - first
            p_q = q.p + start_q * q.l * T.GRAIN
            b_q = load_rows(p_q, q, o_q, o_d, left_q, COLS=T.D, GRAIN=T.GRAIN, MASK=not T.EVEN_Q)  # [q,d]
            p_do = dO.p + start_q * dO.l * T.GRAIN
            b_do = load_rows(p_do, dO, o_q, o_c, left_q, COLS=T.C, GRAIN=T.GRAIN, MASK=not T.EVEN_Q)  # [q,c]
            b_pair = 0.0
            if V.HAS_PAIR:
                b_pair = load_pair_bias(
                    p_pair + start_q * stride_pair_q, o_k, o_q, stride_pair_k, stride_pair_q, left_k, left_q,
                    MASK_Q=V.MASK_PAIR and not T.EVEN_K, MASK_K=V.MASK_PAIR and not T.EVEN_Q,
                )  # [k,q]  # fmt: skip
            if V.DISTANT_ONLY:
                b_pair = measured(b_pair, tl.load(p_stats + 3 * plane + first + o_in_q)[None, :])
            b_lse = tl.load(p_stats + (2 * plane if V.DISTANT_ONLY else 0) + first + o_in_q)  # [q]
            b_s = transposed_scores(b_k, b_q, b_pair, b_row, unit, T, HAS_PAIR=V.HAS_PAIR, SEED=V.SEED)  # [k,q]
            b_p = tl.math.exp2(b_s * (unit if T.FOLD else 1.0) - b_lse[None, :])  # [k,q]
            if V.NEED_DV:
                b_dv = tl.dot(b_p.to(b_do.dtype), b_do, b_dv, input_precision=T.PRECISION)  # [k,c]
            if V.NEED_DK or V.MASK_MODE != _NONE:
                b_delta = tl.load(p_stats + plane + first + o_in_q)  # [q]
                if V.SEED:
                    b_seed = tl.broadcast_to(-b_delta[None, :], [T.BLOCK_K, T.BLOCK_Q])  # [k,q]
                    b_ds = b_p * tl.dot(b_v, tl.trans(b_do), b_seed, input_precision=T.PRECISION)  # [k,q]
                else:
                    b_ds = b_p * (tl.dot(b_v, tl.trans(b_do), input_precision=T.PRECISION) - b_delta[None, :])  # [k,q]
                if V.NEED_DK:
                    b_dk = tl.dot(b_ds.to(b_q.dtype), b_q, b_dk, input_precision=T.PRECISION)  # [k,d]
                if V.MASK_MODE != _NONE:
                    b_dmask += tl.sum(b_ds, 1)

    if not V.DISTANT_ONLY:
        wait_to_store(V.WAIT)
    begin = line * sizes.lk + start
    stride_out = tl.cast(1, tl.int32)
    if V.HEADS_INSIDE:
        begin = ((b * sizes.n + n) * sizes.lk + start) * sizes.h + h
        stride_out = sizes.h
    if V.NEED_DK:
        p_dk = out.dk + begin * T.D
        b_dk *= sizes.scale
        dk = View(p_dk, 0, 0, 0, stride_out * T.D, 1)
        if V.DISTANT_ONLY:
            b_dk += load_rows(dk.p, dk, o_k, o_d, left_k, COLS=T.D, GRAIN=1, MASK=not T.EVEN_K).to(tl.float32)
        store_rows(dk, b_dk, o_k, o_d, left_k, COLS=T.D, GRAIN=1, MASK=not T.EVEN_K)
    if V.NEED_DV:
        dv = View(out.dv + begin * T.C, 0, 0, 0, stride_out * T.C, 1)
        if V.DISTANT_ONLY:
            b_dv += load_rows(dv.p, dv, o_k, o_c, left_k, COLS=T.C, GRAIN=1, MASK=not T.EVEN_K).to(tl.float32)
        store_rows(dv, b_dv, o_k, o_c, left_k, COLS=T.C, GRAIN=1, MASK=not T.EVEN_K)
    if V.MASK_MODE != _NONE:
        p_dmask = dmask.p + (b * dmask.b + n * dmask.n + h * dmask.h + start)
        if V.MASK_MODE == _ADD:
            tl.atomic_add(p_dmask + o_in, b_dmask, mask=o_in < left_k, sem="relaxed")
        else:
            if V.DISTANT_ONLY:
                b_dmask += tl.load(p_dmask + o_in, mask=o_in < left_k, other=0.0)
            tl.store(p_dmask + o_in, b_dmask, mask=o_in < left_k)
