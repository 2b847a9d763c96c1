"""Few queries and few keys (template pointwise attention, shallow alignments): one launch a pass, many rows a program.

A tensor-core product has 16 queries and 16 keys at least, so one query with four keys would compute 64 scores for each that it
needs, in a program for each (b, n, h). Here a program loads all keys and values of many (b, n, h) into registers, once, and
multiplies on the ALUs in float32, so the time is that of reading and writing. No program adds to what another one writes, so
the order of sums is fixed.
"""

from __future__ import annotations

from collections import namedtuple
from typing import NamedTuple

import triton
import triton.language as tl

from evoattn.backends.triton.kernels.backward import gate_gradient, without_empty_queries
from evoattn.backends.triton.kernels.key_bias import key_bias_tile
from evoattn.kit.arguments import Number, Pointer, Specialised, View, kernel
from evoattn.kit.primitives import FLOOR, LOG2E, finish, load_tile, offsets, sigmoid


class FewSizes(NamedTuple):
    """Sizes of a launch. `total` is b * n * h.

    There are variants for lq: with one query there is no loop, and nothing from query to query needs registers.
    """

    n: Number
    h: Number
    total: Number
    lq: Specialised
    lk: Number
    scale: Number


FewConstants = namedtuple(
    "FewConstants", "D C BLOCK_D BLOCK_C ROWS BLOCK_K EVEN_K GRAIN HAS_MASK HAS_BIAS HAS_GATE HEADS_INSIDE LONG"
)
"""Constants of both kernels. D and C are channels of keys and values, BLOCK_D and BLOCK_C powers of two that hold them."""

Wanted = namedtuple("Wanted", "HAS_DLSE NEED_DQ NEED_DK NEED_DV NEED_DGATE")
"""Constants of the backward: whether lse has a cotangent, and what is written."""


@triton.jit
def _places(sizes, T):
    """The program's rows [r] of all (b, n, h), heads fastest, with their b, n and h; and which of them are inside.

    Those past the end repeat the last one's work: nothing of theirs is stored.
    """
    pid = tl.program_id(0)
    if T.LONG:
        pid = pid.to(tl.int64)
    o_row = pid * T.ROWS + tl.arange(0, T.ROWS)
    inside = o_row < sizes.total
    o_row = tl.minimum(o_row, sizes.total - 1)
    outer = o_row // sizes.h
    return o_row, outer // sizes.n, outer % sizes.n, o_row % sizes.h, inside


@triton.jit
def _offset(x, b, n, h, T):
    """[r] from the start of a view to each row's (b, n, h)."""
    return (b * x.b + n * x.n + h * x.h) * T.GRAIN


@triton.jit
def _load_keys(x, o_first, lk, T, COLS: tl.constexpr, BLOCK_C: tl.constexpr):
    """[r,k,c]: all keys, or values, of each row; 0 outside."""
    step = x.l * T.GRAIN
    o_k = offsets(tl.arange(0, T.BLOCK_K), T.LONG)[None, :, None]
    o_c = offsets(tl.arange(0, BLOCK_C), T.LONG)[None, None, :]
    p_tile = x.p + o_first[:, None, None] + o_k * step + o_c * x.c
    if T.EVEN_K and COLS == BLOCK_C:
        return tl.load(p_tile)
    return tl.load(p_tile, mask=(o_k < lk) & (o_c < COLS), other=0.0)


@triton.jit
def _load_query(x, o_first, query, T, COLS: tl.constexpr, BLOCK_C: tl.constexpr):
    """[r,c] in float32: one query, or its gate or cotangent, of each row; 0 outside."""
    o_first = o_first + query * (x.l * T.GRAIN)
    o_c = offsets(tl.arange(0, BLOCK_C), T.LONG)
    return load_tile(x.p, o_first, o_c, 1, x.c, 0, COLS, MASK_ROWS=False, MASK_COLS=COLS != BLOCK_C).to(tl.float32)


@triton.jit
def _store_query(p_out, o_first, b_query, inside, COLS: tl.constexpr, BLOCK_C: tl.constexpr):
    """Write [r,c] with stride 1, for the rows that are inside."""
    o_c = tl.arange(0, BLOCK_C)[None, :]
    tl.store(p_out + o_first[:, None] + o_c, b_query.to(p_out.dtype.element_ty), mask=inside[:, None] & (o_c < COLS))


@triton.jit
def _key_bias(mask, mask_bias, b, n, lk, T):
    """[r,k] mask and mask bias in log2 units, measured from the row shift (`evoattn.core.numerics`), -inf past the end.

    [1,k] if there is neither.
    """
    o_mask, o_bias = b * mask.b + n * mask.n, b * mask_bias.b + n * mask_bias.n
    o_k = tl.arange(0, T.BLOCK_K)[None, :]
    b_key_bias = key_bias_tile(
        mask.p + o_mask[:, None],
        mask_bias.p + o_bias[:, None],
        o_k,
        mask.c,
        mask_bias.c,
        lk,
        HAS_MASK=T.HAS_MASK,
        HAS_BIAS=T.HAS_BIAS,
    )
    if T.HAS_BIAS:
        b_top = tl.max(b_key_bias, 1)
        b_key_bias -= tl.where(tl.abs(b_top) < float("inf"), b_top, 0.0)[:, None]
    return b_key_bias * LOG2E


@kernel
def forward_few_kernel(
    q: View, k: View, v: View, mask: View, mask_bias: View, out: Pointer, lse: Pointer, ref: Pointer, gate: View,
    sizes: FewSizes, T: FewConstants,
) -> None:  # fmt: skip
    """One program owns all queries and keys of ROWS rows (b, n, h).

    It reads keys and values once, then loops over queries.
    It writes o, gated if there is a gate, lse and reference, which is 0 without a pair bias, once.
    """
    o_row, b, n, h, inside = _places(sizes, T)
    lk = sizes.lk
    o_q = _offset(q, b, n, h, T)
    o_k = _offset(k, b, n, h, T)
    o_v = _offset(v, b, n, h, T)
    o_gate = _offset(gate, b, n, h, T)
    b_k = _load_keys(k, o_k, lk, T, COLS=T.D, BLOCK_C=T.BLOCK_D)  # [r,k,d]
    b_v = _load_keys(v, o_v, lk, T, COLS=T.C, BLOCK_C=T.BLOCK_C)  # [r,k,c]
    b_key_bias = _key_bias(mask, mask_bias, b, n, lk, T)
    b_k = b_k.to(tl.float32)
    b_v = b_v.to(tl.float32)
    o_past = (tl.arange(0, T.BLOCK_K) >= lk)[None, :]  # an infinite query makes NaN of keys that are not there
    for query in range(sizes.lq):
        at = tl.cast(query, tl.int64) if T.LONG else query
        b_q = _load_query(q, o_q, at, T, COLS=T.D, BLOCK_C=T.BLOCK_D)  # [r,d]
        b_s = tl.sum(b_q[:, None, :] * b_k, 2) * (sizes.scale * LOG2E) + b_key_bias  # [r,k]
        if not T.EVEN_K:
            b_s = tl.where(o_past, float("-inf"), b_s)
        b_max = tl.maximum(tl.max(b_s, 1), FLOOR)  # [r]
        b_p = tl.math.exp2(b_s - b_max[:, None])  # [r,k]
        b_sum = tl.sum(b_p, 1)
        b_o, b_lse = finish(tl.sum(b_p[:, :, None] * b_v, 1), b_max, b_sum)  # [r,c], [r]
        if T.HAS_GATE:
            b_o *= sigmoid(_load_query(gate, o_gate, at, T, COLS=T.C, BLOCK_C=T.BLOCK_C))
        o_stat = o_row * sizes.lq + query
        tl.store(lse + o_stat, b_lse, mask=inside)
        tl.store(ref + o_stat, tl.zeros([T.ROWS], tl.float32), mask=inside)
        o_out = ((b * sizes.n + n) * sizes.lq + query) * sizes.h + h if T.HEADS_INSIDE else o_stat
        _store_query(out, o_out * T.C, b_o, inside, COLS=T.C, BLOCK_C=T.BLOCK_C)


@kernel
def backward_few_kernel(
    q: View, k: View, v: View, mask: View, mask_bias: View, dO: View, o: View, lse: Pointer, dlse: View, gate: View,
    dq: Pointer, dk: Pointer, dv: Pointer, dgate: Pointer, sizes: FewSizes, T: FewConstants, W: Wanted,
) -> None:  # fmt: skip
    """One program owns all queries and keys of ROWS rows (b, n, h).

    It reads keys and values once, then loops over queries, whose delta it makes on the way.
    It writes dq and dgate once a query, and dk and dv once.
    """
    o_row, b, n, h, inside = _places(sizes, T)
    lk = sizes.lk
    o_q = _offset(q, b, n, h, T)
    o_k = _offset(k, b, n, h, T)
    o_v = _offset(v, b, n, h, T)
    o_gate = _offset(gate, b, n, h, T)
    o_do = _offset(dO, b, n, h, T)
    o_o = _offset(o, b, n, h, T)
    o_dlse = b * dlse.b + n * dlse.n + h * dlse.h
    b_k = _load_keys(k, o_k, lk, T, COLS=T.D, BLOCK_C=T.BLOCK_D)  # [r,k,d]
    b_v = _load_keys(v, o_v, lk, T, COLS=T.C, BLOCK_C=T.BLOCK_C)  # [r,k,c]
    b_key_bias = _key_bias(mask, mask_bias, b, n, lk, T)
    o_past = (tl.arange(0, T.BLOCK_K) >= lk)[None, :]  # an infinite query makes NaN of keys that are not there
    b_dk = tl.zeros([T.ROWS, T.BLOCK_K, T.BLOCK_D], tl.float32)  # [r,k,d]
    b_dv = tl.zeros([T.ROWS, T.BLOCK_K, T.BLOCK_C], tl.float32)  # [r,k,c]
    for query in range(sizes.lq):
        at = tl.cast(query, tl.int64) if T.LONG else query
        b_q = _load_query(q, o_q, at, T, COLS=T.D, BLOCK_C=T.BLOCK_D)  # [r,d]
        b_do = _load_query(dO, o_do, at, T, COLS=T.C, BLOCK_C=T.BLOCK_C)  # [r,c]
        b_o = _load_query(o, o_o, at, T, COLS=T.C, BLOCK_C=T.BLOCK_C)  # [r,c]
        o_stat = o_row * sizes.lq + query
        b_lse = tl.load(lse + o_stat)  # [r]
        b_delta = tl.sum(b_o * b_do, 1)  # [r]
        if W.HAS_DLSE:
            b_delta -= tl.load(dlse.p + o_dlse + at * dlse.l) * LOG2E
        b_lse, b_delta = without_empty_queries(b_lse, b_delta)
        o_out = ((b * sizes.n + n) * sizes.lq + query) * sizes.h + h if T.HEADS_INSIDE else o_stat
        if T.HAS_GATE:
            b_gate = _load_query(gate, o_gate, at, T, COLS=T.C, BLOCK_C=T.BLOCK_C)  # [r,c]
            if W.NEED_DGATE:
                _store_query(dgate, o_out * T.C, gate_gradient(b_o, b_do, b_gate), inside, COLS=T.C, BLOCK_C=T.BLOCK_C)
            b_do *= sigmoid(b_gate)
        b_s = tl.sum(b_q[:, None, :] * b_k.to(tl.float32), 2) * (sizes.scale * LOG2E) + b_key_bias  # [r,k]
        if not T.EVEN_K:
            b_s = tl.where(o_past, float("-inf"), b_s)
        b_p = tl.math.exp2(b_s - b_lse[:, None])  # [r,k]
        b_dp = tl.sum(b_do[:, None, :] * b_v.to(tl.float32), 2)  # [r,k]
        b_ds = b_p * (b_dp - b_delta[:, None]) * sizes.scale  # [r,k]
        if W.NEED_DQ:
            b_dq = tl.sum(b_ds[:, :, None] * b_k.to(tl.float32), 1)  # [r,d]
            _store_query(dq, o_out * T.D, b_dq, inside, COLS=T.D, BLOCK_C=T.BLOCK_D)
        if W.NEED_DK:
            b_dk += b_ds[:, :, None] * b_q[:, None, :]
        if W.NEED_DV:
            b_dv += b_p[:, :, None] * b_do[:, None, :]
    stride_l = 1
    o_first = o_row * lk
    if T.HEADS_INSIDE:
        stride_l = sizes.h
        o_first = (b * sizes.n + n) * lk * sizes.h + h
    if W.NEED_DK:
        _store_keys(dk, o_first, stride_l, b_dk, inside, lk, COLS=T.D, BLOCK_K=T.BLOCK_K, BLOCK_C=T.BLOCK_D)
    if W.NEED_DV:
        _store_keys(dv, o_first, stride_l, b_dv, inside, lk, COLS=T.C, BLOCK_K=T.BLOCK_K, BLOCK_C=T.BLOCK_C)


@triton.jit
def _store_keys(
    p_keys, o_first, stride_l, b_keys, inside, lk, COLS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr
):
    """[r,k,c] to memory that is contiguous but for the order of keys and heads, for the rows and keys there are."""
    o_k = tl.arange(0, BLOCK_K)[None, :, None]
    o_c = tl.arange(0, BLOCK_C)[None, None, :]
    p_tile = p_keys + (o_first[:, None, None] + o_k * stride_l) * COLS + o_c
    tl.store(p_tile, b_keys.to(p_keys.dtype.element_ty), mask=inside[:, None, None] & (o_k < lk) & (o_c < COLS))
