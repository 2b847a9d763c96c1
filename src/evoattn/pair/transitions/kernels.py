"""The transition in Triton: a kernel for the forward and one for the backward.

Rows r are those of x `[R, C]`. The hidden channels h are taken in blocks. The hidden tensors `[r, h]` stay on the chip, except
in a backward that needs them for the gradients of the weights. Sums over rows have a fixed order, without atomics: each program
writes its own.
"""

from __future__ import annotations

from collections import namedtuple
from typing import NamedTuple

import triton
import triton.language as tl

from evoattn.kit.arguments import Affine, Number, Pointer, Specialised, kernel
from evoattn.kit.halves import factor, load_factor, multiply, turn
from evoattn.kit.primitives import sigmoid
from evoattn.kit.rows import load_affine, load_rows, load_vector, load_weight, normalise_tile, normalise_tile_backward, product


class Operands(NamedTuple):
    """Operands of the gradients of the weights, for a chunk of rows.

    Shapes: y (the normalised rows) and d (mask times do) `[R, C]`, u `[R, H]`, dab (da, then db if there is one) `[R, 2 H]`,
    and sums `[programs, 3, C]` in float32. Each program sums its rows for the norm's weight and bias and the output's bias.
    """

    y: Pointer
    d: Pointer
    u: Pointer
    dab: Pointer
    sums: Pointer


Variant = namedtuple(
    "Variant",
    "C H BLOCK_R BLOCK_C BLOCK_H GATED HAS_BIAS HAS_MASK RESIDUAL FAST PRECISION NEEDS_WEIGHTS",
    defaults=[False],
)
"""Constants of both kernels. C and H are channels of x and hidden ones. GATED: SwiGLU, else ReLU. FAST: see `sigmoid`."""


@triton.jit
def _projection(b_y, b_w, bias, o_h, V):
    """y W^T + bias `[r, h]` for rows y `[r, c]` and a block of a weight `[h, c]`."""
    b_a = multiply(b_y, turn(b_w, V.PRECISION), V.PRECISION)
    if V.HAS_BIAS:
        b_a += load_vector(bias, o_h, V.H)[None, :]
    return b_a


@kernel
def forward_kernel(
    x: Pointer, mask: Pointer, norm: Affine, a: Affine, b: Affine, o: Affine, out: Pointer, rows: Specialised, eps: Number,
    V: Variant,
) -> None:  # fmt: skip
    """One program owns BLOCK_R rows. It normalises them once, loops over the hidden channels, and sums the update in registers.
    It writes the update, or x + update, once, after all of its reads: `out` may be x.
    """
    start = tl.program_id(0).to(tl.int64) * V.BLOCK_R
    o_r, o_c = tl.arange(0, V.BLOCK_R), tl.arange(0, V.BLOCK_C)
    m_r = start + o_r < rows
    m_rc = m_r[:, None] & (o_c < V.C)[None, :]
    p_x = x + start * V.C
    b_x, _, _ = normalise_tile(load_rows(p_x, o_r, m_rc, o_c, V.C), m_rc, eps, V.C, 1)  # [r,c]
    b_y = factor(load_affine(b_x, norm, o_c, V.C, 1), a.w, 1, V.PRECISION)
    b_o = tl.zeros((V.BLOCK_R, V.BLOCK_C), tl.float32)
    for first in range(0, V.H, V.BLOCK_H):
        o_h = first + tl.arange(0, V.BLOCK_H)
        b_a = _projection(b_y, load_factor(a.w, o_h, o_c, V.H, V.C, V.PRECISION), a.b, o_h, V)  # [r,h]
        if V.GATED:
            b_b = _projection(b_y, load_factor(b.w, o_h, o_c, V.H, V.C, V.PRECISION), b.b, o_h, V)
            b_a = b_a * sigmoid(b_a, V.FAST) * b_b
        else:
            b_a = tl.where(b_a <= 0, 0.0, b_a)
        # o += u W_o^T
        b_u = factor(b_a, o.w, 1, V.PRECISION)
        b_o = multiply(b_u, turn(load_factor(o.w, o_c, o_h, V.C, V.H, V.PRECISION), V.PRECISION), V.PRECISION, b_o)
    b_o += load_vector(o.b, o_c, V.C)[None, :]
    if V.HAS_MASK:
        b_o *= tl.load(mask + start + o_r, mask=m_r, other=0.0).to(tl.float32)[:, None]
    if V.RESIDUAL:  # read again: held in registers since the norm, it would spill
        b_o += tl.load(p_x + o_r[:, None] * V.C + o_c[None, :], mask=m_rc, other=0.0, eviction_policy="evict_first").to(
            tl.float32
        )
    tl.store(out + start * V.C + o_r[:, None] * V.C + o_c[None, :], b_o.to(out.dtype.element_ty), mask=m_rc)


@kernel
def backward_kernel(
    do: Pointer, x: Pointer, mask: Pointer, norm: Affine, a: Affine, b: Affine, o_weight: Pointer, dx: Pointer,
    operands: Operands, rows: Specialised, eps: Number, V: Variant,
) -> None:  # fmt: skip
    """One program owns BLOCK_R rows. It normalises them, loops over the hidden channels, which it computes again, and sums the
    gradient of the norm in registers. It writes dx once. For the weights it writes the operands of their products, y, d = mask
    do, u and (da, db), and its sums over rows of dy * x, of dy and of d.

    More than 60 lines: its parts share the tiles that stay in registers over the loop, and their offsets.
    """
    start = tl.program_id(0).to(tl.int64) * V.BLOCK_R
    o_r, o_c = tl.arange(0, V.BLOCK_R), tl.arange(0, V.BLOCK_C)
    m_r, m_c = start + o_r < rows, o_c < V.C
    m_rc, o_rc = m_r[:, None] & m_c[None, :], o_r[:, None] * V.C + o_c[None, :]
    p_x, p_do, p_sums = x + start * V.C, do + start * V.C, operands.sums + tl.program_id(0).to(tl.int64) * 3 * V.C + o_c
    b_x, _, _ = normalise_tile(load_rows(p_x, o_r, m_rc, o_c, V.C), m_rc, eps, V.C, 1)  # [r,c]
    b_y = load_affine(b_x, norm, o_c, V.C, 1).to(a.w.dtype.element_ty)
    b_d = load_rows(p_do, o_r, m_rc, o_c, V.C)
    if V.HAS_MASK:
        b_d *= tl.load(mask + start + o_r, mask=m_r, other=0.0).to(tl.float32)[:, None]
    if V.NEEDS_WEIGHTS:
        tl.store(p_sums + 2 * V.C, tl.sum(b_d, 0), mask=m_c)
    b_d = b_d.to(o_weight.dtype.element_ty)
    if V.NEEDS_WEIGHTS:
        tl.store(operands.y + start * V.C + o_rc, b_y, mask=m_rc)
        tl.store(operands.d + start * V.C + o_rc, b_d, mask=m_rc)
    b_dy = tl.zeros((V.BLOCK_R, V.BLOCK_C), tl.float32)
    width: tl.constexpr = 2 * V.H if V.GATED else V.H
    for first in range(0, V.H, V.BLOCK_H):
        o_h = first + tl.arange(0, V.BLOCK_H)
        m_rh, o_rh = m_r[:, None] & (o_h < V.H)[None, :], o_r[:, None] * V.H + o_h[None, :]
        b_a_w = load_weight(a.w, o_h, o_c, V.H, V.C)  # [h,c]
        b_a = _projection(b_y, b_a_w, a.b, o_h, V)  # [r,h]
        # du = d W_o
        b_du = product(b_d, load_weight(o_weight, o_c, o_h, V.C, V.H), V.PRECISION)
        if V.GATED:
            b_b_w = load_weight(b.w, o_h, o_c, V.H, V.C)
            b_b = _projection(b_y, b_b_w, b.b, o_h, V)
            b_s = sigmoid(b_a, V.FAST)
            b_a *= b_s  # silu
            b_u = b_a * b_b
            b_db = (b_du * b_a).to(a.w.dtype.element_ty)
            b_da = (b_du * b_b * (b_s + b_a * (1 - b_s))).to(a.w.dtype.element_ty)
        else:
            b_u = tl.where(b_a <= 0, 0.0, b_a)
            b_da = tl.where(b_a <= 0, 0.0, b_du).to(a.w.dtype.element_ty)
        if V.NEEDS_WEIGHTS:
            tl.store(operands.u + start * V.H + o_rh, b_u.to(operands.u.dtype.element_ty), mask=m_rh)
            p_dab = operands.dab + start * width + o_r[:, None] * width + o_h[None, :]
            tl.store(p_dab, b_da, mask=m_rh)
            if V.GATED:
                tl.store(p_dab + V.H, b_db, mask=m_rh)
        # dy += da W_a + db W_b
        b_dy = product(b_da, b_a_w, V.PRECISION, b_dy)
        if V.GATED:
            b_dy = product(b_db, b_b_w, V.PRECISION, b_dy)
    # read and normalised again: held in registers since the norm, it would spill
    b_x = tl.load(p_x + o_rc, mask=m_rc, other=0.0, eviction_policy="evict_first").to(tl.float32)
    b_x, _, b_rstd = normalise_tile(b_x, m_rc, eps, V.C, 1)
    if V.NEEDS_WEIGHTS:
        tl.store(p_sums, tl.sum(b_dy * b_x, 0), mask=m_c)
        tl.store(p_sums + V.C, tl.sum(b_dy, 0), mask=m_c)
    b_dx = normalise_tile_backward(b_dy * load_vector(norm.w, o_c, V.C)[None, :], b_x, V.C, 1) * b_rstd[:, None]
    if V.RESIDUAL:
        b_dx += tl.load(p_do + o_rc, mask=m_rc, other=0.0, eviction_policy="evict_first").to(tl.float32)
    tl.store(dx + start * V.C + o_rc, b_dx.to(dx.dtype.element_ty), mask=m_rc)
