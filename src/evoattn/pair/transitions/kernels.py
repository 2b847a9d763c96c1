"""The transition in Triton: a kernel for the forward and one for the backward.

Rows r are those of x `[R, C]`. The hidden channels h are taken in blocks. The hidden tensors `[r, h]` stay on the chip, except
in a backward that needs them for the gradients of the weights. Sums over rows have a fixed order, without atomics: each program
writes its own.
"""

from __future__ import annotations

import triton
import triton.language as tl

from evoattn.kit.launch import Kernel
from evoattn.pair.lang import affine, load_rows, load_vector, load_weight, normalise, product, sigmoid


@triton.jit
def _projection(b_y, b_w, bias, o_h, H: tl.constexpr, HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr):
    """y W^T + bias `[r, h]` for rows y `[r, c]` and a block of a weight `[h, c]`."""
    b_a = product(b_y, tl.trans(b_w), PRECISION)
    if HAS_BIAS:
        b_a += load_vector(bias, o_h, H)[None, :]
    return b_a


@Kernel
@triton.jit
def forward_kernel(
    x, mask, norm_w, norm_b, a_weight, a_bias, b_weight, b_bias, o_weight, o_bias, out, rows, eps,
    C: tl.constexpr, H: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_H: tl.constexpr,
    GATED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr, RESIDUAL: tl.constexpr, FAST: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One program owns BLOCK_R rows. It normalises them once, loops over the hidden channels, and sums the update in registers.
    It writes the update, or x + update, once, after all of its reads: `out` may be x.
    """
    start = tl.program_id(0).to(tl.int64) * BLOCK_R
    o_r, o_c = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_C)
    m_r = start + o_r < rows
    m_rc = m_r[:, None] & (o_c < C)[None, :]
    p_x = x + start * C
    b_x, _ = normalise(load_rows(p_x, o_r, m_rc, o_c, C), m_rc, eps, C, 1)  # [r,c]
    b_y = affine(b_x, load_vector(norm_w, o_c, C), load_vector(norm_b, o_c, C), 1).to(a_weight.dtype.element_ty)
    b_o = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for first in range(0, H, BLOCK_H):
        o_h = first + tl.arange(0, BLOCK_H)
        b_a = _projection(b_y, load_weight(a_weight, o_h, o_c, H, C), a_bias, o_h, H, HAS_BIAS, PRECISION)  # [r,h]
        if GATED:
            b_b = _projection(b_y, load_weight(b_weight, o_h, o_c, H, C), b_bias, o_h, H, HAS_BIAS, PRECISION)
            b_a = b_a * sigmoid(b_a, FAST) * b_b
        else:
            b_a = tl.where(b_a <= 0, 0.0, b_a)
        b_o = product(b_a.to(o_weight.dtype.element_ty), tl.trans(load_weight(o_weight, o_c, o_h, C, H)), PRECISION, b_o)
    b_o += load_vector(o_bias, o_c, C)[None, :]
    if HAS_MASK:
        b_o *= tl.load(mask + start + o_r, mask=m_r, other=0.0).to(tl.float32)[:, None]
    if RESIDUAL:  # read again: held in registers since the norm, it would spill
        b_o += tl.load(p_x + o_r[:, None] * C + o_c[None, :], mask=m_rc, other=0.0, eviction_policy="evict_first").to(
            tl.float32
        )
    tl.store(out + start * C + o_r[:, None] * C + o_c[None, :], b_o.to(out.dtype.element_ty), mask=m_rc)


@Kernel
@triton.jit
def backward_kernel(
    do, x, mask, norm_w, norm_b, a_weight, a_bias, b_weight, b_bias, o_weight, dx, y, d, u, dab, sums, rows, eps,
    C: tl.constexpr, H: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_H: tl.constexpr,
    GATED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr, RESIDUAL: tl.constexpr,
    NEEDS_WEIGHTS: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program owns BLOCK_R rows. It normalises them, loops over the hidden channels, which it computes again, and sums the
    gradient of the norm in registers. It writes dx once. For the weights it writes the operands of their products, y, d = mask
    do, u and (da, db), and its sums over rows of dy * x, of dy and of d.

    More than 60 lines: its parts share the tiles that stay in registers over the loop, and their offsets.
    """
    start = tl.program_id(0).to(tl.int64) * BLOCK_R
    o_r, o_c = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_C)
    m_r, m_c = start + o_r < rows, o_c < C
    m_rc, o_rc = m_r[:, None] & m_c[None, :], o_r[:, None] * C + o_c[None, :]
    p_x, p_do, p_sums = x + start * C, do + start * C, sums + tl.program_id(0).to(tl.int64) * 3 * C + o_c
    b_x, _ = normalise(load_rows(p_x, o_r, m_rc, o_c, C), m_rc, eps, C, 1)  # [r,c]
    b_y = affine(b_x, load_vector(norm_w, o_c, C), load_vector(norm_b, o_c, C), 1).to(a_weight.dtype.element_ty)
    b_d = load_rows(p_do, o_r, m_rc, o_c, C)
    if HAS_MASK:
        b_d *= tl.load(mask + start + o_r, mask=m_r, other=0.0).to(tl.float32)[:, None]
    if NEEDS_WEIGHTS:
        tl.store(p_sums + 2 * C, tl.sum(b_d, 0), mask=m_c)
    b_d = b_d.to(o_weight.dtype.element_ty)
    if NEEDS_WEIGHTS:
        tl.store(y + start * C + o_rc, b_y, mask=m_rc)
        tl.store(d + start * C + o_rc, b_d, mask=m_rc)
    b_dy = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for first in range(0, H, BLOCK_H):
        o_h = first + tl.arange(0, BLOCK_H)
        m_rh, o_rh = m_r[:, None] & (o_h < H)[None, :], o_r[:, None] * H + o_h[None, :]
        b_a_w = load_weight(a_weight, o_h, o_c, H, C)  # [h,c]
        b_a = _projection(b_y, b_a_w, a_bias, o_h, H, HAS_BIAS, PRECISION)  # [r,h]
        b_du = product(b_d, load_weight(o_weight, o_c, o_h, C, H), PRECISION)
        if GATED:
            b_b_w = load_weight(b_weight, o_h, o_c, H, C)
            b_b = _projection(b_y, b_b_w, b_bias, o_h, H, HAS_BIAS, PRECISION)
            b_s = sigmoid(b_a, FAST)
            b_a *= b_s  # silu
            b_u = b_a * b_b
            b_db = (b_du * b_a).to(a_weight.dtype.element_ty)
            b_da = (b_du * b_b * (b_s + b_a * (1 - b_s))).to(a_weight.dtype.element_ty)
        else:
            b_u = tl.where(b_a <= 0, 0.0, b_a)
            b_da = tl.where(b_a <= 0, 0.0, b_du).to(a_weight.dtype.element_ty)
        if NEEDS_WEIGHTS:
            tl.store(u + start * H + o_rh, b_u.to(u.dtype.element_ty), mask=m_rh)
            p_dab = dab + start * (2 * H if GATED else H) + o_r[:, None] * (2 * H if GATED else H) + o_h[None, :]
            tl.store(p_dab, b_da, mask=m_rh)
            if GATED:
                tl.store(p_dab + H, b_db, mask=m_rh)
        b_dy = product(b_da, b_a_w, PRECISION, b_dy)
        if GATED:
            b_dy = product(b_db, b_b_w, PRECISION, b_dy)
    # read and normalised again: held in registers since the norm, it would spill
    b_x = tl.load(p_x + o_rc, mask=m_rc, other=0.0, eviction_policy="evict_first").to(tl.float32)
    b_x, b_rstd = normalise(b_x, m_rc, eps, C, 1)
    if NEEDS_WEIGHTS:
        tl.store(p_sums, tl.sum(b_dy * b_x, 0), mask=m_c)
        tl.store(p_sums + C, tl.sum(b_dy, 0), mask=m_c)
    b_dy *= load_vector(norm_w, o_c, C)[None, :]
    b_dx = b_dy - (tl.sum(b_dy, 1) / C)[:, None] - b_x * (tl.sum(b_dy * b_x, 1) / C)[:, None]
    b_dx *= b_rstd[:, None]
    if RESIDUAL:
        b_dx += tl.load(p_do + o_rc, mask=m_rc, other=0.0, eviction_policy="evict_first").to(tl.float32)
    tl.store(dx + start * C + o_rc, b_dx.to(dx.dtype.element_ty), mask=m_rc)
