"""Few queries and few keys (template pointwise attention, shallow alignments): one launch a pass, many rows a program.

A tensor-core product has 16 queries and 16 keys at least, so one query with four keys would compute 64 scores for each that it
needs, in a program for each (b, n, h). Here a program takes all keys and values of many (b, n, h) into registers, once, and
multiplies on the ALUs in float32: what is left is the time to read and write. No program adds to what another one writes, so
the order of sums is fixed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from evoattn.backends.triton import launch
from evoattn.backends.triton.bwd_preprocess import gate_gradient, without_empty_rows
from evoattn.backends.triton.launch import Kernel, Strided, contiguous, layout_for, strided
from evoattn.backends.triton.prepare import row_tile
from evoattn.backends.triton.primitives import FLOOR, LOG2E, finish, load_tile, sigmoid, wide
from evoattn.inputs import Cotangents, Inputs, Outputs
from evoattn.tuning.heuristics_few import FewTiles

__all__ = ["backward_few_kernel", "forward_few_kernel", "plan_backward_few", "plan_forward_few"]

# Not lq: with one query there is no loop, and what it would keep from query to query needs no registers.
_SIZES = ["n_rows", "heads", "total", "lk"]
_STRIDES_QKV = [
    "stride_qb", "stride_qn", "stride_qh", "stride_ql", "stride_kb", "stride_kn", "stride_kh", "stride_kl",
    "stride_vb", "stride_vn", "stride_vh", "stride_vl",
]  # fmt: skip
_STRIDES_ROW = ["stride_mask_b", "stride_mask_n", "stride_bias_b", "stride_bias_n"]
_STRIDES_GATE = ["stride_gb", "stride_gn", "stride_gh", "stride_gl"]


@triton.jit
def _places(n_rows, heads, total, ROWS: tl.constexpr, WIDE: tl.constexpr):
    """The program's rows [r] of all (b, n, h), heads fastest, with their b, n and h; and which of them there are.

    Those past the end do the last one's work once more: nothing of theirs is stored.
    """
    pid = tl.program_id(0)
    if WIDE:
        pid = pid.to(tl.int64)
    o_row = pid * ROWS + tl.arange(0, ROWS)
    inside = o_row < total
    o_row = tl.minimum(o_row, total - 1)
    rest = o_row // heads
    return o_row, rest // n_rows, rest % n_rows, o_row % heads, inside


@triton.jit
def _load_keys(
    p_keys,
    o_first,
    stride_l,
    stride_c,
    lk,
    COLS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
    EVEN_K: tl.constexpr,
    WIDE: tl.constexpr,
):
    """[r,k,c]: all keys, or values, of each row; 0 outside."""
    o_k = wide(tl.arange(0, BLOCK_K), WIDE)[None, :, None]
    o_c = wide(tl.arange(0, BLOCK_C), WIDE)[None, None, :]
    p_tile = p_keys + o_first[:, None, None] + o_k * stride_l + o_c * stride_c
    if EVEN_K and COLS == BLOCK_C:
        return tl.load(p_tile)
    return tl.load(p_tile, mask=(o_k < lk) & (o_c < COLS), other=0.0)


@triton.jit
def _load_row(p_row, o_first, stride_c, COLS: tl.constexpr, BLOCK_C: tl.constexpr, WIDE: tl.constexpr):
    """[r,c] in float32: one query, or what belongs to one, of each row; 0 outside."""
    o_c = wide(tl.arange(0, BLOCK_C), WIDE)
    return load_tile(p_row, o_first, o_c, 1, stride_c, 0, COLS, False, COLS != BLOCK_C).to(tl.float32)


@triton.jit
def _store_row(p_row, o_first, b_row, inside, COLS: tl.constexpr, BLOCK_C: tl.constexpr):
    """The way back of `_load_row`, with stride 1, for the rows there are."""
    o_c = tl.arange(0, BLOCK_C)[None, :]
    tl.store(p_row + o_first[:, None] + o_c, b_row.to(p_row.dtype.element_ty), mask=inside[:, None] & (o_c < COLS))


@triton.jit
def _row_bias(
    p_mask, p_bias, o_mask, o_bias, stride_mask, stride_bias, lk,
    BLOCK_K: tl.constexpr, HAS_MASK: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """[r,k] mask and mask bias in log2 units, measured from the row shift (`evoattn.numerics`), -inf past the end.

    [1,k] where neither is given.
    """
    o_k = tl.arange(0, BLOCK_K)[None, :]
    b_row = row_tile(p_mask + o_mask[:, None], p_bias + o_bias[:, None], o_k, stride_mask, stride_bias, lk, HAS_MASK, HAS_BIAS)
    if HAS_BIAS:
        b_top = tl.max(b_row, 1)
        b_row -= tl.where(tl.abs(b_top) < float("inf"), b_top, 0.0)[:, None]
    return b_row * LOG2E


@Kernel
@triton.jit(do_not_specialize=[*_STRIDES_QKV, *_STRIDES_ROW, *_STRIDES_GATE, *_SIZES])
def forward_few_kernel(
    p_q, p_k, p_v, p_mask, p_bias, p_o, p_lse, p_ref, p_gate, scale,
    stride_qb, stride_qn, stride_qh, stride_ql, stride_qd,
    stride_kb, stride_kn, stride_kh, stride_kl, stride_kd,
    stride_vb, stride_vn, stride_vh, stride_vl, stride_vc,
    stride_mask_b, stride_mask_n, stride_mask, stride_bias_b, stride_bias_n, stride_bias,
    n_rows, heads, total, lq, lk,
    stride_gb, stride_gn, stride_gh, stride_gl, stride_gc,
    D: tl.constexpr, C: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr, GRAIN: tl.constexpr, HAS_MASK: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_GATE: tl.constexpr,
    HEADS_INSIDE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One program owns all queries and keys of ROWS rows (b, n, h).

    It reads keys and values once, then loops over queries.
    It writes o, gated if there is a gate, lse and reference, which is 0 without a pair bias, once.
    """
    o_row, b, n, h, inside = _places(n_rows, heads, total, ROWS, WIDE)
    o_q = (b * stride_qb + n * stride_qn + h * stride_qh) * GRAIN
    o_k = (b * stride_kb + n * stride_kn + h * stride_kh) * GRAIN
    o_v = (b * stride_vb + n * stride_vn + h * stride_vh) * GRAIN
    o_gate = (b * stride_gb + n * stride_gn + h * stride_gh) * GRAIN
    b_k = _load_keys(p_k, o_k, stride_kl * GRAIN, stride_kd, lk, D, BLOCK_K, BLOCK_D, EVEN_K, WIDE)  # [r,k,d]
    b_v = _load_keys(p_v, o_v, stride_vl * GRAIN, stride_vc, lk, C, BLOCK_K, BLOCK_C, EVEN_K, WIDE)  # [r,k,c]
    o_mask, o_bias = b * stride_mask_b + n * stride_mask_n, b * stride_bias_b + n * stride_bias_n
    b_row = _row_bias(p_mask, p_bias, o_mask, o_bias, stride_mask, stride_bias, lk, BLOCK_K, HAS_MASK, HAS_BIAS)
    b_k = b_k.to(tl.float32)
    b_v = b_v.to(tl.float32)
    o_past = (tl.arange(0, BLOCK_K) >= lk)[None, :]  # an infinite query makes NaN of keys that are not there
    for query in range(lq):
        at = tl.cast(query, tl.int64) if WIDE else query
        b_q = _load_row(p_q, o_q + at * (stride_ql * GRAIN), stride_qd, D, BLOCK_D, WIDE)  # [r,d]
        b_s = tl.sum(b_q[:, None, :] * b_k, 2) * (scale * LOG2E) + b_row  # [r,k]
        if not EVEN_K:
            b_s = tl.where(o_past, float("-inf"), b_s)
        b_max = tl.maximum(tl.max(b_s, 1), FLOOR)  # [r]
        b_p = tl.math.exp2(b_s - b_max[:, None])  # [r,k]
        b_sum = tl.sum(b_p, 1)
        b_o, b_lse = finish(tl.sum(b_p[:, :, None] * b_v, 1), b_max, b_sum)  # [r,c], [r]
        if HAS_GATE:
            b_o *= sigmoid(_load_row(p_gate, o_gate + at * (stride_gl * GRAIN), stride_gc, C, BLOCK_C, WIDE))
        o_stat = o_row * lq + query
        tl.store(p_lse + o_stat, b_lse, mask=inside)
        tl.store(p_ref + o_stat, tl.zeros([ROWS], tl.float32), mask=inside)
        o_out = ((b * n_rows + n) * lq + query) * heads + h if HEADS_INSIDE else o_stat
        _store_row(p_o, o_out * C, b_o, inside, C, BLOCK_C)


@Kernel
@triton.jit(
    do_not_specialize=[
        *_STRIDES_QKV, *_STRIDES_ROW, *_STRIDES_GATE, *_SIZES,
        "stride_dob", "stride_don", "stride_doh", "stride_dol", "stride_ob", "stride_on", "stride_oh", "stride_ol",
        "stride_dlse_b", "stride_dlse_n", "stride_dlse_h", "stride_dlse_q",
    ]
)  # fmt: skip
def backward_few_kernel(
    p_q, p_k, p_v, p_mask, p_bias, p_do, p_o, p_lse, p_dlse, p_gate, p_dq, p_dk, p_dv, p_dgate, scale,
    stride_qb, stride_qn, stride_qh, stride_ql, stride_qd,
    stride_kb, stride_kn, stride_kh, stride_kl, stride_kd,
    stride_vb, stride_vn, stride_vh, stride_vl, stride_vc,
    stride_dob, stride_don, stride_doh, stride_dol, stride_doc,
    stride_ob, stride_on, stride_oh, stride_ol, stride_oc,
    stride_dlse_b, stride_dlse_n, stride_dlse_h, stride_dlse_q,
    stride_mask_b, stride_mask_n, stride_mask, stride_bias_b, stride_bias_n, stride_bias,
    n_rows, heads, total, lq, lk,
    stride_gb, stride_gn, stride_gh, stride_gl, stride_gc,
    D: tl.constexpr, C: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr, GRAIN: tl.constexpr, HAS_MASK: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_GATE: tl.constexpr,
    HAS_DLSE: tl.constexpr, NEED_DQ: tl.constexpr, NEED_DK: tl.constexpr, NEED_DV: tl.constexpr, NEED_DGATE: tl.constexpr,
    HEADS_INSIDE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One program owns all queries and keys of ROWS rows (b, n, h).

    It reads keys and values once, then loops over queries, whose delta it makes on the way.
    It writes dq and dgate once a query, and dk and dv once.
    """
    o_row, b, n, h, inside = _places(n_rows, heads, total, ROWS, WIDE)
    o_q = (b * stride_qb + n * stride_qn + h * stride_qh) * GRAIN
    o_k = (b * stride_kb + n * stride_kn + h * stride_kh) * GRAIN
    o_v = (b * stride_vb + n * stride_vn + h * stride_vh) * GRAIN
    o_gate = (b * stride_gb + n * stride_gn + h * stride_gh) * GRAIN
    o_do = (b * stride_dob + n * stride_don + h * stride_doh) * GRAIN
    o_o = (b * stride_ob + n * stride_on + h * stride_oh) * GRAIN
    o_dlse = b * stride_dlse_b + n * stride_dlse_n + h * stride_dlse_h
    b_k = _load_keys(p_k, o_k, stride_kl * GRAIN, stride_kd, lk, D, BLOCK_K, BLOCK_D, EVEN_K, WIDE)  # [r,k,d]
    b_v = _load_keys(p_v, o_v, stride_vl * GRAIN, stride_vc, lk, C, BLOCK_K, BLOCK_C, EVEN_K, WIDE)  # [r,k,c]
    o_mask, o_bias = b * stride_mask_b + n * stride_mask_n, b * stride_bias_b + n * stride_bias_n
    b_row = _row_bias(p_mask, p_bias, o_mask, o_bias, stride_mask, stride_bias, lk, BLOCK_K, HAS_MASK, HAS_BIAS)
    o_past = (tl.arange(0, BLOCK_K) >= lk)[None, :]  # an infinite query makes NaN of keys that are not there
    b_dk = tl.zeros([ROWS, BLOCK_K, BLOCK_D], tl.float32)  # [r,k,d]
    b_dv = tl.zeros([ROWS, BLOCK_K, BLOCK_C], tl.float32)  # [r,k,c]
    for query in range(lq):
        at = tl.cast(query, tl.int64) if WIDE else query
        b_q = _load_row(p_q, o_q + at * (stride_ql * GRAIN), stride_qd, D, BLOCK_D, WIDE)  # [r,d]
        b_do = _load_row(p_do, o_do + at * (stride_dol * GRAIN), stride_doc, C, BLOCK_C, WIDE)  # [r,c]
        b_o = _load_row(p_o, o_o + at * (stride_ol * GRAIN), stride_oc, C, BLOCK_C, WIDE)  # [r,c]
        o_stat = o_row * lq + query
        b_lse = tl.load(p_lse + o_stat)  # [r]
        b_delta = tl.sum(b_o * b_do, 1)  # [r]
        if HAS_DLSE:
            b_delta -= tl.load(p_dlse + o_dlse + at * stride_dlse_q) * LOG2E
        b_lse, b_delta = without_empty_rows(b_lse, b_delta)
        o_out = ((b * n_rows + n) * lq + query) * heads + h if HEADS_INSIDE else o_stat
        if HAS_GATE:
            b_gate = _load_row(p_gate, o_gate + at * (stride_gl * GRAIN), stride_gc, C, BLOCK_C, WIDE)  # [r,c]
            if NEED_DGATE:
                _store_row(p_dgate, o_out * C, gate_gradient(b_o, b_do, b_gate), inside, C, BLOCK_C)
            b_do *= sigmoid(b_gate)
        b_s = tl.sum(b_q[:, None, :] * b_k.to(tl.float32), 2) * (scale * LOG2E) + b_row  # [r,k]
        if not EVEN_K:
            b_s = tl.where(o_past, float("-inf"), b_s)
        b_p = tl.math.exp2(b_s - b_lse[:, None])  # [r,k]
        b_dp = tl.sum(b_do[:, None, :] * b_v.to(tl.float32), 2)  # [r,k]
        b_ds = b_p * (b_dp - b_delta[:, None]) * scale  # [r,k]
        if NEED_DQ:
            b_dq = tl.sum(b_ds[:, :, None] * b_k.to(tl.float32), 1)  # [r,d]
            _store_row(p_dq, o_out * D, b_dq, inside, D, BLOCK_D)
        if NEED_DK:
            b_dk += b_ds[:, :, None] * b_q[:, None, :]
        if NEED_DV:
            b_dv += b_p[:, :, None] * b_do[:, None, :]
    stride_l = 1
    o_first = o_row * lk
    if HEADS_INSIDE:
        stride_l = heads
        o_first = (b * n_rows + n) * lk * heads + h
    if NEED_DK:
        _store_keys(p_dk, o_first, stride_l, b_dk, inside, lk, D, BLOCK_K, BLOCK_D)
    if NEED_DV:
        _store_keys(p_dv, o_first, stride_l, b_dv, inside, lk, C, BLOCK_K, BLOCK_C)


@triton.jit
def _store_keys(
    p_keys, o_first, stride_l, b_keys, inside, lk, COLS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr
):
    """[r,k,c] to memory that is contiguous but for the order of keys and heads, for the rows and keys there are."""
    o_k = tl.arange(0, BLOCK_K)[None, :, None]
    o_c = tl.arange(0, BLOCK_C)[None, None, :]
    p_tile = p_keys + (o_first[:, None, None] + o_k * stride_l) * COLS + o_c
    tl.store(p_tile, b_keys.to(p_keys.dtype.element_ty), mask=inside[:, None, None] & (o_k < lk) & (o_c < COLS))


def plan_forward_few(inputs: Inputs, tiles: FewTiles, *, scale: float, layout: str) -> Callable[..., None]:
    """What computes o, lse and reference of tensors that lie in memory like these, which `heuristics_few` has tiles for."""
    strides, sizes, constants = _common(inputs, tiles, layout, ())
    programs = -(-math.prod(inputs.q.shape[:3]) // tiles.rows)
    start = forward_few_kernel.plan(programs, scale, *strides, *sizes, **constants)

    def run(inputs: Inputs, outputs: Outputs) -> None:
        q, k, v, mask, mask_bias, _, gate = inputs
        lse = outputs.lse
        # What is not given is never read: any tensor stands in for it.
        mask, mask_bias, gate = (lse if x is None else x for x in (mask, mask_bias, gate))
        start(q, k, v, mask, mask_bias, *outputs, gate)

    return run


def plan_backward_few(
    cotangents: Cotangents,
    inputs: Inputs,
    outputs: Outputs,
    tiles: FewTiles,
    *,
    scale: float,
    layout: str,
    needs: tuple[bool, bool, bool, bool],
) -> Callable[..., tuple[None, None]]:
    """What computes dq, dk, dv and dgate, of which `needs` says which are wanted, likewise."""
    (do, dlse), (o, lse, _) = cotangents, outputs
    of_do = Strided(tuple(o.shape), (0,) * 5, o.dtype) if do is None else strided(do)
    of_dlse = None if dlse is None else strided(dlse)
    strides, sizes, constants = _common(inputs, tiles, layout, (of_do, strided(o)), of_dlse)
    constants.update(zip(("NEED_DQ", "NEED_DK", "NEED_DV", "NEED_DGATE"), needs, strict=True), HAS_DLSE=dlse is not None)
    programs = -(-math.prod(inputs.q.shape[:3]) // tiles.rows)
    gathers = not lse.is_contiguous()  # as hooks on saved tensors may give it back
    start = backward_few_kernel.plan(programs, scale, *strides, *sizes, **constants)

    def run(cotangents: Cotangents, inputs: Inputs, outputs: Outputs, results: tuple[Tensor | None, ...]) -> tuple[None, None]:
        (do, dlse), (q, k, v, mask, mask_bias, _, gate), (o, lse, _) = cotangents, inputs, outputs
        do = torch.zeros((), dtype=o.dtype, device=o.device) if do is None else do
        lse = lse.contiguous() if gathers else lse
        mask, mask_bias, dlse, gate = (lse if x is None else x for x in (mask, mask_bias, dlse, gate))
        start(q, k, v, mask, mask_bias, do, o, lse, dlse, gate, *(o if x is None else x for x in results))
        return None, None

    return run


def _common(
    inputs: Inputs, tiles: FewTiles, layout: str, more: tuple[Strided, ...], dlse: Strided | None = None
) -> tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]:
    """Strides (of dlse too where there are more tensors), sizes with the gate's strides, and constants of a launch."""
    (q, k, v), mask, mask_bias = map(strided, inputs[:3]), inputs.mask, inputs.mask_bias
    gate = () if inputs.gate is None else (strided(inputs.gate),)
    b, n, h, lq, d = q.shape
    lk, c = k.shape[-2], v.shape[-1]
    of_all = layout_for(q, k, v, *more, *gate)
    count = 5 * (3 + len(more))
    of_mask = launch.strides(None if mask is None else strided(mask), 3)
    of_bias = launch.strides(None if mask_bias is None else strided(mask_bias), 3)
    of_dlse = launch.strides(dlse, 4) if more else ()
    results = (contiguous((b, n, h, max(lq, lk), max(d, c)), torch.float32),)
    biases = (strided(x) for x in (mask, mask_bias) if x is not None)
    constants = {
        "D": d,
        "C": c,
        "BLOCK_D": triton.next_power_of_2(d),
        "BLOCK_C": triton.next_power_of_2(c),
        "ROWS": tiles.rows,
        "BLOCK_K": tiles.block_k,
        "EVEN_K": lk == tiles.block_k,
        "GRAIN": of_all.grain,
        "HAS_MASK": mask is not None,
        "HAS_BIAS": mask_bias is not None,
        "HAS_GATE": bool(gate),
        "HEADS_INSIDE": layout == "bnlhd",
        "WIDE": any(
            _extent(x) >= 1 << 31 for x in (q, k, v, *more, *gate, *results, *biases, *(() if dlse is None else (dlse,)))
        ),
        "num_warps": tiles.num_warps,
    }
    sizes = (n, h, b * n * h, lq, lk, *(of_all.strides[count:] or (0,) * 5))
    return (*of_all.strides[:count], *of_dlse, *of_mask, *of_bias), sizes, constants


def _extent(tensor: Strided) -> int:
    """Elements from the tensor's first to its last."""
    return sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride, strict=True))
