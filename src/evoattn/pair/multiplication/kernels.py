"""Triangle multiplication in Triton: one kernel for each of its four steps that is not a batched product.

Rows r are the positions (b, i, j) of the padded square, whose sides are multiples of 8. Positions outside z read zeros, and
nothing is written to z for them. The halves, their product and their gradients have channels first, `[d, r]`, as the batched
product wants them. Sums over rows have a fixed order, without atomics: each program writes its own.
"""

from __future__ import annotations

import triton
import triton.language as tl

from evoattn.kit.launch import Kernel
from evoattn.pair.lang import affine, load_columns, load_rows, load_vector, load_weight, normalise, product, sigmoid

_OUTSIDE = tl.constexpr(-(2**31))


@triton.jit
def _rows_of(tile, rows, length, padded, BLOCK_R: tl.constexpr, PADDED: tl.constexpr, NARROW: tl.constexpr):
    """The rows of a tile: its first row, the row of z that its offsets count from, these offsets, and which rows z has.

    Only the first row is divided in 64 bits. The other rows are divided only if the tile is longer than a side of the square:
    with divisions of vectors the kernels took up to twice as long.
    """
    start = tile.to(tl.int64) * BLOCK_R
    o_r = tl.arange(0, BLOCK_R)
    m_r = start + o_r < rows
    start_z, o_z = start, o_r
    if PADDED:
        first = start // padded  # counted over all batches
        batch, first_i = first // padded, (first % padded).to(tl.int32)
        o_j = (start % padded).to(tl.int32) + o_r
        if NARROW:
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
        start_z = (batch * length + first_i) * length
        o_z = tl.where(m_r, (o_b * length + o_i - first_i) * length + o_j, _OUTSIDE)
        m_r = o_z != _OUTSIDE  # so that one vector is kept, not two
    return start, start_z, o_z, m_r


@Kernel
@triton.jit
def gate_in_kernel(
    z, mask, norm_w, norm_b, p_w, p_b, g_w, g_b, ab, rows, length, padded, eps,
    C: tl.constexpr, N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_MASK: tl.constexpr, PADDED: tl.constexpr, NARROW: tl.constexpr, FAST: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One program owns BLOCK_R rows. It normalises them once, loops over the N = 2 D channels of both halves, and writes each
    tile mask * sigmoid(g) * p once.
    """
    start, start_z, o_z, m_r = _rows_of(tl.program_id(0), rows, length, padded, BLOCK_R, PADDED, NARROW)
    z, mask, ab = z + start_z * C, mask + start_z, ab + start
    o_r = tl.arange(0, BLOCK_R)
    o_c = tl.arange(0, BLOCK_C)
    m_rc = m_r[:, None] & (o_c < C)[None, :]
    b_x, _ = normalise(load_rows(z, o_z, m_rc, o_c, C), m_rc, eps, C, 1)  # [r,c]
    b_y = tl.trans(affine(b_x, load_vector(norm_w, o_c, C), load_vector(norm_b, o_c, C), 1).to(p_w.dtype.element_ty))  # [c,r]
    b_m = m_r.to(tl.float32)
    if HAS_MASK:
        b_m = tl.load(mask + o_z, mask=m_r, other=0.0).to(tl.float32)
    m_inside = start + o_r < rows
    for first in range(0, N, BLOCK_N):
        o_n = first + tl.arange(0, BLOCK_N)
        b_p = product(load_weight(p_w, o_n, o_c, N, C), b_y, PRECISION)  # [n,r]
        b_g = product(load_weight(g_w, o_n, o_c, N, C), b_y, PRECISION)
        b_p = b_p + load_vector(p_b, o_n, N)[:, None]
        b_g = b_g + load_vector(g_b, o_n, N)[:, None]
        b_ab = (b_p * sigmoid(b_g, FAST) * b_m[None, :]).to(ab.dtype.element_ty)
        tl.store(ab + o_n[:, None].to(tl.int64) * rows + o_r[None, :], b_ab, mask=(o_n < N)[:, None] & m_inside[None, :])


@Kernel
@triton.jit
def gate_out_kernel(
    z, t, in_w, in_b, out_w, out_b, p_w, p_b, g_w, g_b, out, rows, length, padded, eps,
    C: tl.constexpr, D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr,
    RESIDUAL: tl.constexpr, PADDED: tl.constexpr, NARROW: tl.constexpr, FAST: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One program owns BLOCK_R rows. It reads z and the product t once, and writes the update, or z + update, once."""
    start, start_z, o_z, m_r = _rows_of(tl.program_id(0), rows, length, padded, BLOCK_R, PADDED, NARROW)
    z, t, out = z + start_z * C, t + start, out + start_z * C
    o_r = tl.arange(0, BLOCK_R)
    o_c, o_d = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_D)
    m_rc, m_dr = m_r[:, None] & (o_c < C)[None, :], (o_d < D)[:, None] & (start + o_r < rows)[None, :]
    b_x, _ = normalise(load_columns(t, o_d, m_dr, o_r, rows), m_dr, eps, D, 0)  # [d,r]
    b_n = affine(b_x, load_vector(out_w, o_d, D), load_vector(out_b, o_d, D), 0).to(p_w.dtype.element_ty)
    b_u = product(tl.trans(b_n), tl.trans(load_weight(p_w, o_c, o_d, C, D)), PRECISION)  # [r,c]
    b_x, _ = normalise(load_rows(z, o_z, m_rc, o_c, C), m_rc, eps, C, 1)  # [r,c]
    b_y = affine(b_x, load_vector(in_w, o_c, C), load_vector(in_b, o_c, C), 1).to(p_w.dtype.element_ty)
    b_g = product(b_y, tl.trans(load_weight(g_w, o_c, o_c, C, C)), PRECISION)
    b_u = (b_u + load_vector(p_b, o_c, C)[None, :]) * sigmoid(b_g + load_vector(g_b, o_c, C)[None, :], FAST)
    if RESIDUAL:  # read again: held in registers since the norm, it would halve the programs of a multiprocessor
        b_u += load_rows(z, o_z, m_rc, o_c, C)
    tl.store(out + o_z[:, None] * C + o_c[None, :], b_u.to(out.dtype.element_ty), mask=m_rc)


@Kernel
@triton.jit
def gate_out_backward_kernel(
    do, z, t, in_w, in_b, out_w, out_b, p_w, p_b, g_w, g_b, dt, dg, du, n, sums, rows, length, padded, eps,
    C: tl.constexpr, D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr,
    NEEDS_WEIGHTS: tl.constexpr, PADDED: tl.constexpr, NARROW: tl.constexpr, FAST: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One program owns BLOCK_R rows. It reads do, z and t once. It writes the gradients of t and of the gate's product g once,
    and for the weights the gradient of the output product u, its input n, and its sums over rows of dn * x and of dn.
    """
    start, start_z, o_z, m_r = _rows_of(tl.program_id(0), rows, length, padded, BLOCK_R, PADDED, NARROW)
    z, do, t, dt, n = z + start_z * C, do + start_z * C, t + start, dt + start, n + start
    dg, du = dg + start * C, du + start * C
    o_r = tl.arange(0, BLOCK_R)
    o_c, o_d = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_D)
    m_rc, m_inside = m_r[:, None] & (o_c < C)[None, :], start + o_r < rows
    m_rows, m_dr = m_inside[:, None] & (o_c < C)[None, :], (o_d < D)[:, None] & m_inside[None, :]
    o_rc, o_dr = o_r[:, None] * C + o_c[None, :], o_d[:, None].to(tl.int64) * rows + o_r[None, :]
    b_x, _ = normalise(load_rows(z, o_z, m_rc, o_c, C), m_rc, eps, C, 1)  # [r,c]
    b_y = affine(b_x, load_vector(in_w, o_c, C), load_vector(in_b, o_c, C), 1).to(p_w.dtype.element_ty)
    b_g = product(b_y, tl.trans(load_weight(g_w, o_c, o_c, C, C)), PRECISION)
    b_s = sigmoid(b_g + load_vector(g_b, o_c, C)[None, :], FAST)
    b_p, b_w = load_weight(p_w, o_c, o_d, C, D), load_vector(out_w, o_d, D)
    b_x, b_rstd = normalise(load_columns(t, o_d, m_dr, o_r, rows), m_dr, eps, D, 0)  # [d,r]
    b_n = affine(b_x, b_w, load_vector(out_b, o_d, D), 0).to(p_w.dtype.element_ty)
    b_u = product(tl.trans(b_n), tl.trans(b_p), PRECISION) + load_vector(p_b, o_c, C)[None, :]  # [r,c]
    b_du = load_rows(do, o_z, m_rc, o_c, C) * b_s
    tl.store(dg + o_rc, (b_du * b_u * (1 - b_s)).to(dg.dtype.element_ty), mask=m_rows)
    b_du = b_du.to(p_w.dtype.element_ty)
    b_dn = product(tl.trans(b_p), tl.trans(b_du), PRECISION)  # [d,r]
    if NEEDS_WEIGHTS:
        tl.store(du + o_rc, b_du, mask=m_rows)
        tl.store(n + o_dr, b_n, mask=m_dr)
        p_sums = sums + tl.program_id(0).to(tl.int64) * 2 * D + o_d
        tl.store(p_sums, tl.sum(b_dn * b_x, 1), mask=o_d < D)
        tl.store(p_sums + D, tl.sum(b_dn, 1), mask=o_d < D)
    b_dn = b_dn * b_w[:, None]
    b_dt = b_dn - (tl.sum(b_dn, 0) / D)[None, :] - b_x * (tl.sum(b_dn * b_x, 0) / D)[None, :]
    tl.store(dt + o_dr, (b_dt * b_rstd[None, :]).to(dt.dtype.element_ty), mask=m_dr)


@Kernel
@triton.jit
def gate_in_backward_kernel(
    dab, dg_out, do, z, mask, norm_w, norm_b, p_w, p_b, g_w, g_b, g_out_w, dz, dpg, y, sums, rows, length, padded, eps,
    C: tl.constexpr, N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_MASK: tl.constexpr, RESIDUAL: tl.constexpr, NEEDS_WEIGHTS: tl.constexpr, PADDED: tl.constexpr, NARROW: tl.constexpr,
    FAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program owns BLOCK_R rows. It normalises them, loops over the N = 2 D channels of both halves, and sums the gradient
    of the norm in registers. It writes dz once. For the weights it writes dp and dg, the normalised rows y, and its sums over
    rows of dy * x and of dy.
    """
    start, start_z, o_z, m_r = _rows_of(tl.program_id(0), rows, length, padded, BLOCK_R, PADDED, NARROW)
    z, do, dz, mask = z + start_z * C, do + start_z * C, dz + start_z * C, mask + start_z
    dab, dpg, dg_out, y = dab + start, dpg + start, dg_out + start * C, y + start * C
    o_r = tl.arange(0, BLOCK_R)
    o_c = tl.arange(0, BLOCK_C)
    m_c, m_inside = o_c < C, start + o_r < rows
    m_rc, m_rows = m_r[:, None] & m_c[None, :], m_inside[:, None] & m_c[None, :]
    o_rc = o_r[:, None] * C + o_c[None, :]
    b_w = load_vector(norm_w, o_c, C)
    b_x, b_rstd = normalise(load_rows(z, o_z, m_rc, o_c, C), m_rc, eps, C, 1)  # [r,c]
    b_y = affine(b_x, b_w, load_vector(norm_b, o_c, C), 1).to(p_w.dtype.element_ty)
    if NEEDS_WEIGHTS:
        tl.store(y + o_rc, b_y, mask=m_rows)
    b_y = tl.trans(b_y)  # [c,r]
    b_dg_out = tl.load(dg_out + o_rc, mask=m_rows, other=0.0)
    b_dy = product(b_dg_out, load_weight(g_out_w, o_c, o_c, C, C), PRECISION)  # [r,c]
    b_m = m_r.to(tl.float32)
    if HAS_MASK:
        b_m = tl.load(mask + o_z, mask=m_r, other=0.0).to(tl.float32)
    for first in range(0, N, BLOCK_N):
        o_n = first + tl.arange(0, BLOCK_N)
        m_nr = (o_n < N)[:, None] & m_inside[None, :]
        o_nr = o_n[:, None].to(tl.int64) * rows + o_r[None, :]
        b_p_w, b_g_w = load_weight(p_w, o_n, o_c, N, C), load_weight(g_w, o_n, o_c, N, C)  # [n,c]
        b_p = product(b_p_w, b_y, PRECISION) + load_vector(p_b, o_n, N)[:, None]  # [n,r]
        b_s = sigmoid(product(b_g_w, b_y, PRECISION) + load_vector(g_b, o_n, N)[:, None], FAST)
        b_dp = tl.load(dab + o_nr, mask=m_nr, other=0.0).to(tl.float32) * b_m[None, :] * b_s  # [n,r]
        b_dg = (b_dp * b_p * (1 - b_s)).to(p_w.dtype.element_ty)
        b_dp = b_dp.to(p_w.dtype.element_ty)
        if NEEDS_WEIGHTS:
            tl.store(dpg + o_nr, b_dp, mask=m_nr)
            tl.store(dpg + o_nr + tl.cast(rows, tl.int64) * N, b_dg, mask=m_nr)
        b_dy = product(tl.trans(b_dp), b_p_w, PRECISION, b_dy)
        b_dy = product(tl.trans(b_dg), b_g_w, PRECISION, b_dy)
    if NEEDS_WEIGHTS:
        p_sums = sums + tl.program_id(0).to(tl.int64) * 2 * C + o_c
        tl.store(p_sums, tl.sum(b_dy * b_x, 0), mask=m_c)
        tl.store(p_sums + C, tl.sum(b_dy, 0), mask=m_c)
    b_dy = b_dy * b_w[None, :]
    b_dz = b_dy - (tl.sum(b_dy, 1) / C)[:, None] - b_x * (tl.sum(b_dy * b_x, 1) / C)[:, None]
    b_dz = b_dz * b_rstd[:, None]
    if RESIDUAL:
        b_dz += load_rows(do, o_z, m_rc, o_c, C)
    tl.store(dz + o_z[:, None] * C + o_c[None, :], b_dz.to(dz.dtype.element_ty), mask=m_rc)
