"""The best rigid motion of points onto others, in one launch.

One program owns a structure. It reads the points three times: for their centres, for the covariance, and to move them. It
computes in float64. `evoattn.nn.alignment.rotation` says how the rotation follows from the covariance.
"""

from __future__ import annotations

from collections import namedtuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from evoattn.kit.arguments import Number, Pointer, kernel
from evoattn.kit.launch import launch_kernel
from evoattn.nn.alignment import BETWEEN, SQUARINGS

_POINTS = 1024
"""Points that a program reads at a time."""

Variant = namedtuple("Variant", "BLOCK_N TURNS BETWEEN TINY")
"""Constants: points of a tile, rounds of so many squarings, and the smallest float64 that is normal."""


@triton.jit
def _load(p, o_n, m_n):
    """The coordinates [n] of points in float64, each on its own."""
    b_x = tl.load(p + 3 * o_n, mask=m_n, other=0.0).to(tl.float64)
    b_y = tl.load(p + 3 * o_n + 1, mask=m_n, other=0.0).to(tl.float64)
    b_z = tl.load(p + 3 * o_n + 2, mask=m_n, other=0.0).to(tl.float64)
    return b_x, b_y, b_z


@triton.jit
def _centres(x, y, weights, count, BLOCK_N: tl.constexpr):
    """The weighted means of x and of y."""
    b_sum = tl.zeros((BLOCK_N,), tl.float64)
    b_x0, b_x1, b_x2, b_y0, b_y1, b_y2 = b_sum, b_sum, b_sum, b_sum, b_sum, b_sum
    for first in range(0, count, BLOCK_N):
        o_n = first + tl.arange(0, BLOCK_N)
        m_n = o_n < count
        b_w = tl.load(weights + o_n, mask=m_n, other=0.0).to(tl.float64)
        x0, x1, x2 = _load(x, o_n, m_n)
        y0, y1, y2 = _load(y, o_n, m_n)
        b_sum += b_w
        b_x0 += b_w * x0
        b_x1 += b_w * x1
        b_x2 += b_w * x2
        b_y0 += b_w * y0
        b_y1 += b_w * y1
        b_y2 += b_w * y2
    total = tl.sum(b_sum, 0)
    x0, x1, x2 = tl.sum(b_x0, 0) / total, tl.sum(b_x1, 0) / total, tl.sum(b_x2, 0) / total
    return x0, x1, x2, tl.sum(b_y0, 0) / total, tl.sum(b_y1, 0) / total, tl.sum(b_y2, 0) / total


@triton.jit
def _squared(a00, a01, a02, a03, a11, a12, a13, a22, a23, a33):
    """The square of a symmetric matrix, by its upper half."""
    return (
        a00 * a00 + a01 * a01 + a02 * a02 + a03 * a03,
        a00 * a01 + a01 * a11 + a02 * a12 + a03 * a13,
        a00 * a02 + a01 * a12 + a02 * a22 + a03 * a23,
        a00 * a03 + a01 * a13 + a02 * a23 + a03 * a33,
        a01 * a01 + a11 * a11 + a12 * a12 + a13 * a13,
        a01 * a02 + a11 * a12 + a12 * a22 + a13 * a23,
        a01 * a03 + a11 * a13 + a12 * a23 + a13 * a33,
        a02 * a02 + a12 * a12 + a22 * a22 + a23 * a23,
        a02 * a03 + a12 * a13 + a22 * a23 + a23 * a33,
        a03 * a03 + a13 * a13 + a23 * a23 + a33 * a33,
    )


@triton.jit
def _better(best, w, x, y, z, other, other_w, other_x, other_y, other_z):
    """The row of the larger number on a diagonal, behind that number."""
    found = other > best
    w, x = tl.where(found, other_w, w), tl.where(found, other_x, x)
    return tl.where(found, other, best), w, x, tl.where(found, other_y, y), tl.where(found, other_z, z)


@triton.jit
def _quaternion(c00, c01, c02, c10, c11, c12, c20, c21, c22, V):
    """The unit quaternion (w, x, y, z) of the best rotation for a covariance."""
    a00, a01, a02, a03 = c00 + c11 + c22, c21 - c12, c02 - c20, c10 - c01
    a11, a12, a13 = c00 - c11 - c22, c01 + c10, c02 + c20
    a22, a23, a33 = c11 - c00 - c22, c12 + c21, c22 - c00 - c11
    size = a00 * a00 + a11 * a11 + a22 * a22 + a33 * a33
    size = tl.sqrt(size + 2 * (a01 * a01 + a02 * a02 + a03 * a03 + a12 * a12 + a13 * a13 + a23 * a23))
    a00, a11, a22, a33 = a00 + size + V.TINY, a11 + size, a22 + size, a33 + size  # a covariance of 0 gets the unit
    for _ in range(V.TURNS):
        trace = a00 + a11 + a22 + a33
        a00, a01, a02, a03, a11 = a00 / trace, a01 / trace, a02 / trace, a03 / trace, a11 / trace
        a12, a13, a22, a23, a33 = a12 / trace, a13 / trace, a22 / trace, a23 / trace, a33 / trace
        for _ in tl.static_range(V.BETWEEN):
            a00, a01, a02, a03, a11, a12, a13, a22, a23, a33 = _squared(a00, a01, a02, a03, a11, a12, a13, a22, a23, a33)
    best, w, x, y, z = a00, a00, a01, a02, a03
    best, w, x, y, z = _better(best, w, x, y, z, a11, a01, a11, a12, a13)
    best, w, x, y, z = _better(best, w, x, y, z, a22, a02, a12, a22, a23)
    best, w, x, y, z = _better(best, w, x, y, z, a33, a03, a13, a23, a33)
    size = tl.sqrt(w * w + x * x + y * y + z * z)
    return w / size, x / size, y / size, z / size


@kernel
def align_kernel(x: Pointer, y: Pointer, weights: Pointer, out: Pointer, count: Number, V: Variant) -> None:
    """Points x `[b,n,3]` of a structure b, turned and moved onto y `[b,n,3]` by their weights `[b,n]`."""
    start = tl.program_id(0).to(tl.int64) * count
    x, y, weights, out = x + 3 * start, y + 3 * start, weights + start, out + 3 * start
    cx0, cx1, cx2, cy0, cy1, cy2 = _centres(x, y, weights, count, V.BLOCK_N)
    b_zero = tl.zeros((V.BLOCK_N,), tl.float64)
    b_00, b_01, b_02 = b_zero, b_zero, b_zero
    b_10, b_11, b_12 = b_zero, b_zero, b_zero
    b_20, b_21, b_22 = b_zero, b_zero, b_zero
    for first in range(0, count, V.BLOCK_N):
        o_n = first + tl.arange(0, V.BLOCK_N)
        m_n = o_n < count
        b_w = tl.load(weights + o_n, mask=m_n, other=0.0).to(tl.float64)
        x0, x1, x2 = _load(x, o_n, m_n)
        y0, y1, y2 = _load(y, o_n, m_n)
        x0, x1, x2 = x0 - cx0, x1 - cx1, x2 - cx2
        y0, y1, y2 = b_w * (y0 - cy0), b_w * (y1 - cy1), b_w * (y2 - cy2)
        b_00, b_01, b_02 = b_00 + y0 * x0, b_01 + y0 * x1, b_02 + y0 * x2
        b_10, b_11, b_12 = b_10 + y1 * x0, b_11 + y1 * x1, b_12 + y1 * x2
        b_20, b_21, b_22 = b_20 + y2 * x0, b_21 + y2 * x1, b_22 + y2 * x2
    c00, c01, c02 = tl.sum(b_00, 0), tl.sum(b_01, 0), tl.sum(b_02, 0)
    c10, c11, c12 = tl.sum(b_10, 0), tl.sum(b_11, 0), tl.sum(b_12, 0)
    c20, c21, c22 = tl.sum(b_20, 0), tl.sum(b_21, 0), tl.sum(b_22, 0)
    w, i, j, k = _quaternion(c00, c01, c02, c10, c11, c12, c20, c21, c22, V)
    r00, r01, r02 = w * w + i * i - j * j - k * k, 2 * (i * j - w * k), 2 * (i * k + w * j)
    r10, r11, r12 = 2 * (i * j + w * k), w * w - i * i + j * j - k * k, 2 * (j * k - w * i)
    r20, r21, r22 = 2 * (i * k - w * j), 2 * (j * k + w * i), w * w - i * i - j * j + k * k
    for first in range(0, count, V.BLOCK_N):
        o_n = first + tl.arange(0, V.BLOCK_N)
        m_n = o_n < count
        x0, x1, x2 = _load(x, o_n, m_n)
        x0, x1, x2 = x0 - cx0, x1 - cx1, x2 - cx2
        tl.store(out + 3 * o_n, (r00 * x0 + r01 * x1 + r02 * x2 + cy0).to(tl.float32), mask=m_n)
        tl.store(out + 3 * o_n + 1, (r10 * x0 + r11 * x1 + r12 * x2 + cy1).to(tl.float32), mask=m_n)
        tl.store(out + 3 * o_n + 2, (r20 * x0 + r21 * x1 + r22 * x2 + cy2).to(tl.float32), mask=m_n)


def align(x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
    """`evoattn.nn.alignment.align` of points in float32 on a GPU."""
    shape = torch.broadcast_shapes(x.shape[:-1], y.shape[:-1], weights.shape)
    x, y = (each.expand(*shape, 3).contiguous() for each in (x, y))
    weights = weights.expand(shape).contiguous()
    out = torch.empty_like(x)
    variant = Variant(_POINTS, SQUARINGS // BETWEEN, BETWEEN, torch.finfo(torch.float64).tiny)
    launch_kernel(align_kernel, shape[:-1].numel(), (x, y, weights, out), count=shape[-1], V=variant, num_warps=8)
    return out
