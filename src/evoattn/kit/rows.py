"""Small jitted functions for kernels over rows of channels: loads of rows and weights, the norm of a row, products."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def normalise_tile(x, m, eps, C: tl.constexpr, axis: tl.constexpr):
    """Return x with mean 0 and deviation 1 along an axis of C channels, its mean and 1 / deviation.

    Entries outside the mask m are 0. What rounding left in the mean is subtracted too. Else equal channels would not be 0, but
    their rounding times 1/sqrt(eps).
    """
    b_mean = tl.sum(x, axis) / C
    b_mean += tl.sum(tl.where(m, x - tl.expand_dims(b_mean, axis), 0.0), axis) / C
    x = tl.where(m, x - tl.expand_dims(b_mean, axis), 0.0)
    rstd = 1 / tl.sqrt(tl.sum(x * x, axis) / C + eps)
    return x * tl.expand_dims(rstd, axis), b_mean, rstd


@triton.jit
def normalise_tile_backward(b_dy, x, C: tl.constexpr, axis: tl.constexpr):
    """Return the gradient of what was normalised to x, times its deviation, from the gradient of x."""
    return b_dy - tl.expand_dims(tl.sum(b_dy, axis) / C, axis) - x * tl.expand_dims(tl.sum(b_dy * x, axis) / C, axis)


@triton.jit
def load_rows(p, o_r, m_rc, o_c, C: tl.constexpr):
    """Load rows `[r, c]` of a tensor `[*, C]` in float32."""
    return tl.load(p + o_r[:, None] * C + o_c[None, :], mask=m_rc, other=0.0).to(tl.float32)


@triton.jit
def load_columns(p, o_d, m_dr, o_r, rows):
    """Load columns `[d, r]` of a tensor `[D, rows]` in float32."""
    return tl.load(p + o_d[:, None].to(tl.int64) * rows + o_r[None, :], mask=m_dr, other=0.0).to(tl.float32)


@triton.jit
def affine(x, w, b, axis: tl.constexpr):
    """Return x w + b, with vectors w and b along an axis: the weight and the bias of a norm."""
    return x * tl.expand_dims(w, 1 - axis) + tl.expand_dims(b, 1 - axis)


@triton.jit
def load_affine(x, norm, o_c, C: tl.constexpr, axis: tl.constexpr):
    """`affine` with the weight and the bias `[C]` of a norm, which are loaded."""
    return affine(x, load_vector(norm.w, o_c, C), load_vector(norm.b, o_c, C), axis)


@triton.jit
def _round_to_tf32(x):
    """x rounded to TF32, whose numbers have 10 bits after the first; NaN stays NaN."""
    b_bits = (x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000
    return tl.where(x == x, b_bits.to(tl.float32, bitcast=True), x)


@triton.jit
def product(a, b, PRECISION: tl.constexpr, acc=None):
    """a b + acc. Tensor cores cut off what TF32 has no digits for, twice the error of rounding, so this rounds first."""
    if PRECISION == "tf32":
        a, b = _round_to_tf32(a), _round_to_tf32(b)
    # `tl.dot` of Triton 3.3 does not see that an acc is None if a function passes it on
    return tl.dot(a, b, input_precision=PRECISION) if acc is None else tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def load_weight(p, o_m, o_n, M: tl.constexpr, N: tl.constexpr):
    """Load a weight `[M, N]`, or a part of it, with zeros around it."""
    return tl.load(p + o_m[:, None] * N + o_n[None, :], mask=(o_m < M)[:, None] & (o_n < N)[None, :], other=0.0)


@triton.jit
def load_vector(p, o_c, C: tl.constexpr):
    """Load a bias, or the weight of a norm, `[C]` in float32, and zeros past its end."""
    return tl.load(p + o_c, mask=o_c < C, other=0.0).to(tl.float32)
