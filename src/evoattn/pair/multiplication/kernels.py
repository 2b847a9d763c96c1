"""Triangle multiplication in Triton: one kernel for each of its four steps that is not a batched product.

Rows r are the positions (b, i, j) of the padded square, whose sides are multiples of 8. Positions outside z read zeros, and
nothing is written to z for them. The halves, their product and their gradients have channels first, `[d, r]`, as the batched
product wants them. Sums over rows have a fixed order, without atomics: each program writes its own.
"""

from __future__ import annotations

from collections import namedtuple
from typing import NamedTuple

import triton
import triton.language as tl

from evoattn.kit.arguments import Affine, Number, Pointer, Specialised, kernel
from evoattn.kit.halves import factor, load_factor, multiply, turn
from evoattn.kit.primitives import sigmoid
from evoattn.kit.rows import (
    affine,
    load_affine,
    load_columns,
    load_rows,
    load_vector,
    load_weight,
    normalise_tile,
    normalise_tile_backward,
    product,
)

_OUTSIDE = tl.constexpr(-(2**31))


class Squares(NamedTuple):
    """Sizes: rows r of all padded squares, the side of z's squares, and that of the padded ones."""

    rows: Specialised
    length: Specialised
    padded: Specialised


class OutOperands(NamedTuple):
    """The operands of the output's weights: the gradient of the product, its input, and sums over rows of dn * x and of dn."""

    du: Pointer
    n: Pointer
    sums: Pointer


class InOperands(NamedTuple):
    """The operands of the input's weights.

    They are the gradients of both products, p then g, the rows that were multiplied, and sums over rows of dy * x and of dy.
    """

    dpg: Pointer
    y: Pointer
    sums: Pointer


Variant = namedtuple(
    "Variant",
    "C D BLOCK_R BLOCK_C BLOCK_D BLOCK_N PADDED NARROW FAST PRECISION TURNED HAS_MASK RESIDUAL NEEDS_WEIGHTS",
    defaults=[False, False, False, False],
)
"""Constants of all kernels.

C and D are the channels of z and of a half, BLOCK_C and BLOCK_D the powers of two that hold them. A loop over the channels of
both halves takes BLOCK_N at a time. PADDED: squares are longer than z's. NARROW: a tile may be longer than a side.
FAST: see `sigmoid`. TURNED: the halves have z[j, i] at (i, j).
"""


@triton.jit
def _rows_of(tile, squares, V):
    """The rows of a tile: its first row, the row of z that its offsets count from, these offsets, and which rows z has.

    Only the first row is divided in 64 bits. The other rows are divided only if the tile is longer than a side of the square:
    with divisions of vectors the kernels took up to twice as long.
    """
    rows, length, padded = squares.rows, squares.length, squares.padded
    start = tile.to(tl.int64) * V.BLOCK_R
    o_r = tl.arange(0, V.BLOCK_R)
    m_r = start + o_r < rows
    start_z, o_z = start, o_r
    if V.PADDED or V.TURNED:
        first = start // padded  # counted over all batches
        batch, first_i = first // padded, (first % padded).to(tl.int32)
        o_j = (start % padded).to(tl.int32) + o_r
        if V.NARROW:
            o_i = first_i + o_j // padded
            o_j = o_j % padded
            o_b = o_i // padded
        else:
            m_next = o_j >= padded
            o_i = first_i + m_next.to(tl.int32)
            o_j = tl.where(m_next, o_j - padded, o_j)
            o_b = (o_i >= padded).to(tl.int32)
        o_i -= o_b * padded
        m_r = m_r & (o_i < length) & (o_j < length)
        if V.TURNED:
            start_z = batch * length * length + first_i
            o_z = tl.where(m_r, (o_b * length + o_j).to(tl.int64) * length + o_i - first_i, _OUTSIDE)
        else:
            start_z = (batch * length + first_i) * length
            o_z = tl.where(m_r, (o_b * length + o_i - first_i) * length + o_j, _OUTSIDE)
        m_r = o_z != _OUTSIDE  # so that one vector is kept, not two
    return start, start_z, o_z, m_r


@kernel
def gate_in_kernel(
    z: Pointer, mask: Pointer, norm: Affine, p: Affine, g: Affine, ab: Pointer, squares: Squares, eps: Number, V: Variant
) -> None:
    """One program owns BLOCK_R rows. It normalises them once, loops over the N = 2 D channels of both halves, and writes each
    tile mask * sigmoid(g) * p once.
    """
    start, start_z, o_z, m_r = _rows_of(tl.program_id(0), squares, V)
    N: tl.constexpr = 2 * V.D
    z, mask, ab = z + start_z * V.C, mask + start_z, ab + start
    o_r = tl.arange(0, V.BLOCK_R)
    o_c = tl.arange(0, V.BLOCK_C)
    m_rc = m_r[:, None] & (o_c < V.C)[None, :]
    b_x, _, _ = normalise_tile(load_rows(z, o_z, m_rc, o_c, V.C), m_rc, eps, V.C, 1)  # [r,c]
    b_y = factor(load_affine(b_x, norm, o_c, V.C, 1), p.w, 1, V.PRECISION)
    b_y = turn(b_y, V.PRECISION)  # [c,r]
    b_m = m_r.to(tl.float32)
    if V.HAS_MASK:
        b_m = tl.load(mask + o_z, mask=m_r, other=0.0).to(tl.float32)
    m_inside = start + o_r < squares.rows
    for first in range(0, N, V.BLOCK_N):
        o_n = first + tl.arange(0, V.BLOCK_N)
        # p = W_p y^T, g = W_g y^T
        b_p = multiply(load_factor(p.w, o_n, o_c, N, V.C, V.PRECISION), b_y, V.PRECISION)  # [n,r]
        b_g = multiply(load_factor(g.w, o_n, o_c, N, V.C, V.PRECISION), b_y, V.PRECISION)
        b_p = b_p + load_vector(p.b, o_n, N)[:, None]
        b_g = b_g + load_vector(g.b, o_n, N)[:, None]
        b_ab = (b_p * sigmoid(b_g, V.FAST) * b_m[None, :]).to(ab.dtype.element_ty)
        m_nr = (o_n < N)[:, None] & m_inside[None, :]
        tl.store(ab + o_n[:, None].to(tl.int64) * squares.rows + o_r[None, :], b_ab, mask=m_nr)


@kernel
def gate_out_kernel(
    z: Pointer, t: Pointer, norm_in: Affine, norm_out: Affine, p: Affine, g: Affine, out: Pointer, squares: Squares,
    eps: Number, V: Variant,
) -> None:  # fmt: skip
    """One program owns BLOCK_R rows. It reads z and the product t once, and writes the update, or z + update, once."""
    start, start_z, o_z, m_r = _rows_of(tl.program_id(0), squares, V)
    z, t, out = z + start_z * V.C, t + start, out + start_z * V.C
    o_r = tl.arange(0, V.BLOCK_R)
    o_c, o_d = tl.arange(0, V.BLOCK_C), tl.arange(0, V.BLOCK_D)
    m_rc, m_dr = m_r[:, None] & (o_c < V.C)[None, :], (o_d < V.D)[:, None] & (start + o_r < squares.rows)[None, :]
    b_x, _, _ = normalise_tile(load_columns(t, o_d, m_dr, o_r, squares.rows), m_dr, eps, V.D, 0)  # [d,r]
    b_n = factor(load_affine(b_x, norm_out, o_d, V.D, 0), p.w, 0, V.PRECISION)
    # u = n W_p^T
    b_n = turn(b_n, V.PRECISION)  # [r,d]
    b_u = multiply(b_n, turn(load_factor(p.w, o_c, o_d, V.C, V.D, V.PRECISION), V.PRECISION), V.PRECISION)  # [r,c]
    b_x, _, _ = normalise_tile(load_rows(z, o_z, m_rc, o_c, V.C), m_rc, eps, V.C, 1)  # [r,c]
    b_y = factor(load_affine(b_x, norm_in, o_c, V.C, 1), p.w, 1, V.PRECISION)
    # g = y W_g^T
    b_g = multiply(b_y, turn(load_factor(g.w, o_c, o_c, V.C, V.C, V.PRECISION), V.PRECISION), V.PRECISION)
    b_u = (b_u + load_vector(p.b, o_c, V.C)[None, :]) * sigmoid(b_g + load_vector(g.b, o_c, V.C)[None, :], V.FAST)
    if V.RESIDUAL:  # read again: held in registers since the norm, it would halve the programs of a multiprocessor
        b_u += load_rows(z, o_z, m_rc, o_c, V.C)
    tl.store(out + o_z[:, None] * V.C + o_c[None, :], b_u.to(out.dtype.element_ty), mask=m_rc)


@kernel
def gate_out_backward_kernel(
    do: Pointer, z: Pointer, t: Pointer, norm_in: Affine, norm_out: Affine, p: Affine, g: Affine, dt: Pointer, dg: Pointer,
    operands: OutOperands, squares: Squares, eps: Number, V: Variant,
) -> None:  # fmt: skip
    """One program owns BLOCK_R rows. It reads do, z and t once. It writes the gradients of t and of the gate's product g once,
    and for the weights the gradient of the output product u, its input n, and its sums over rows of dn * x and of dn.
    """
    start, start_z, o_z, m_r = _rows_of(tl.program_id(0), squares, V)
    z, do, t, dt, n = z + start_z * V.C, do + start_z * V.C, t + start, dt + start, operands.n + start
    dg, du = dg + start * V.C, operands.du + start * V.C
    o_r = tl.arange(0, V.BLOCK_R)
    o_c, o_d = tl.arange(0, V.BLOCK_C), tl.arange(0, V.BLOCK_D)
    m_rc, m_inside = m_r[:, None] & (o_c < V.C)[None, :], start + o_r < squares.rows
    m_rows, m_dr = m_inside[:, None] & (o_c < V.C)[None, :], (o_d < V.D)[:, None] & m_inside[None, :]
    o_rc, o_dr = o_r[:, None] * V.C + o_c[None, :], o_d[:, None].to(tl.int64) * squares.rows + o_r[None, :]
    b_x, _, _ = normalise_tile(load_rows(z, o_z, m_rc, o_c, V.C), m_rc, eps, V.C, 1)  # [r,c]
    b_y = load_affine(b_x, norm_in, o_c, V.C, 1).to(p.w.dtype.element_ty)
    # g = y W_g^T
    b_g = product(b_y, tl.trans(load_weight(g.w, o_c, o_c, V.C, V.C)), V.PRECISION)
    b_s = sigmoid(b_g + load_vector(g.b, o_c, V.C)[None, :], V.FAST)
    b_p, b_w = load_weight(p.w, o_c, o_d, V.C, V.D), load_vector(norm_out.w, o_d, V.D)
    b_x, _, b_rstd = normalise_tile(load_columns(t, o_d, m_dr, o_r, squares.rows), m_dr, eps, V.D, 0)  # [d,r]
    b_n = affine(b_x, b_w, load_vector(norm_out.b, o_d, V.D), 0).to(p.w.dtype.element_ty)
    # u = n W_p^T
    b_u = product(tl.trans(b_n), tl.trans(b_p), V.PRECISION) + load_vector(p.b, o_c, V.C)[None, :]  # [r,c]
    b_du = load_rows(do, o_z, m_rc, o_c, V.C) * b_s
    tl.store(dg + o_rc, (b_du * b_u * (1 - b_s)).to(dg.dtype.element_ty), mask=m_rows)
    b_du = b_du.to(p.w.dtype.element_ty)
    # dn^T = W_p^T du^T
    b_dn = product(tl.trans(b_p), tl.trans(b_du), V.PRECISION)  # [d,r]
    if V.NEEDS_WEIGHTS:
        tl.store(du + o_rc, b_du, mask=m_rows)
        tl.store(n + o_dr, b_n, mask=m_dr)
        p_sums = operands.sums + tl.program_id(0).to(tl.int64) * 2 * V.D + o_d
        tl.store(p_sums, tl.sum(b_dn * b_x, 1), mask=o_d < V.D)
        tl.store(p_sums + V.D, tl.sum(b_dn, 1), mask=o_d < V.D)
    b_dt = normalise_tile_backward(b_dn * b_w[:, None], b_x, V.D, 0)
    tl.store(dt + o_dr, (b_dt * b_rstd[None, :]).to(dt.dtype.element_ty), mask=m_dr)


@kernel
def gate_in_backward_kernel(
    dab: Pointer, dg_out: Pointer, do: Pointer, z: Pointer, mask: Pointer, norm: Affine, p: Affine, g: Affine,
    g_out_w: Pointer, dz: Pointer, operands: InOperands, squares: Squares, eps: Number, V: Variant,
) -> None:  # fmt: skip
    """One program owns BLOCK_R rows. It normalises them, loops over the N = 2 D channels of both halves, and sums the gradient
    of the norm in registers. It writes dz once. For the weights it writes dp and dg, the normalised rows y, and its sums over
    rows of dy * x and of dy.
    """
    start, start_z, o_z, m_r = _rows_of(tl.program_id(0), squares, V)
    N: tl.constexpr = 2 * V.D
    z, do, dz, mask = z + start_z * V.C, do + start_z * V.C, dz + start_z * V.C, mask + start_z
    dab, dpg, dg_out, y = dab + start, operands.dpg + start, dg_out + start * V.C, operands.y + start * V.C
    o_r = tl.arange(0, V.BLOCK_R)
    o_c = tl.arange(0, V.BLOCK_C)
    m_c, m_inside = o_c < V.C, start + o_r < squares.rows
    m_rc, m_rows = m_r[:, None] & m_c[None, :], m_inside[:, None] & m_c[None, :]
    o_rc = o_r[:, None] * V.C + o_c[None, :]
    b_w = load_vector(norm.w, o_c, V.C)
    b_x, _, b_rstd = normalise_tile(load_rows(z, o_z, m_rc, o_c, V.C), m_rc, eps, V.C, 1)  # [r,c]
    b_y = affine(b_x, b_w, load_vector(norm.b, o_c, V.C), 1).to(p.w.dtype.element_ty)
    if V.NEEDS_WEIGHTS:
        tl.store(y + o_rc, b_y, mask=m_rows)
    b_y = tl.trans(b_y)  # [c,r]
    b_dg_out = tl.load(dg_out + o_rc, mask=m_rows, other=0.0)
    # dy = dg_out W_g_out
    b_dy = product(b_dg_out, load_weight(g_out_w, o_c, o_c, V.C, V.C), V.PRECISION)  # [r,c]
    b_m = m_r.to(tl.float32)
    if V.HAS_MASK:
        b_m = tl.load(mask + o_z, mask=m_r, other=0.0).to(tl.float32)
    for first in range(0, N, V.BLOCK_N):
        o_n = first + tl.arange(0, V.BLOCK_N)
        m_nr = (o_n < N)[:, None] & m_inside[None, :]
        o_nr = o_n[:, None].to(tl.int64) * squares.rows + o_r[None, :]
        b_p_w, b_g_w = load_weight(p.w, o_n, o_c, N, V.C), load_weight(g.w, o_n, o_c, N, V.C)  # [n,c]
        # p = W_p y^T, g = W_g y^T
        b_p = product(b_p_w, b_y, V.PRECISION) + load_vector(p.b, o_n, N)[:, None]  # [n,r]
        b_s = sigmoid(product(b_g_w, b_y, V.PRECISION) + load_vector(g.b, o_n, N)[:, None], V.FAST)
        b_dp = tl.load(dab + o_nr, mask=m_nr, other=0.0).to(tl.float32) * b_m[None, :] * b_s  # [n,r]
        b_dg = (b_dp * b_p * (1 - b_s)).to(p.w.dtype.element_ty)
        b_dp = b_dp.to(p.w.dtype.element_ty)
        if V.NEEDS_WEIGHTS:
            tl.store(dpg + o_nr, b_dp, mask=m_nr)
            tl.store(dpg + o_nr + tl.cast(squares.rows, tl.int64) * N, b_dg, mask=m_nr)
        # dy += dp^T W_p + dg^T W_g
        b_dy = product(tl.trans(b_dp), b_p_w, V.PRECISION, b_dy)
        b_dy = product(tl.trans(b_dg), b_g_w, V.PRECISION, b_dy)
    if V.NEEDS_WEIGHTS:
        p_sums = operands.sums + tl.program_id(0).to(tl.int64) * 2 * V.C + o_c
        tl.store(p_sums, tl.sum(b_dy * b_x, 0), mask=m_c)
        tl.store(p_sums + V.C, tl.sum(b_dy, 0), mask=m_c)
    b_dz = normalise_tile_backward(b_dy * b_w[None, :], b_x, V.C, 1) * b_rstd[:, None]
    if V.RESIDUAL:
        b_dz += load_rows(do, o_z, m_rc, o_c, V.C)
    tl.store(dz + o_z[:, None] * V.C + o_c[None, :], b_dz.to(dz.dtype.element_ty), mask=m_rc)
