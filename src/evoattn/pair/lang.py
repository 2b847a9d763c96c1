"""Pieces of the kernels of the pair operators: loads of rows and weights, and the norm of rows."""

from __future__ import annotations

import triton
import triton.language as tl

from evoattn.core.numerics import LOG2E

_UNIT = tl.constexpr(-LOG2E)


@triton.jit
def normalise(x, m, eps, C: tl.constexpr, axis: tl.constexpr):
    """Return x with mean 0 and deviation 1 along an axis of C channels, and 1 / deviation. Entries outside the mask m are 0.

    What rounding left in the mean is subtracted too. Else equal channels would not be 0, but their rounding times 1/sqrt(eps).
    """
    b_mean = tl.sum(x, axis) / C
    b_mean += tl.sum(tl.where(m, x - tl.expand_dims(b_mean, axis), 0.0), axis) / C
    x = tl.where(m, x - tl.expand_dims(b_mean, axis), 0.0)
    rstd = 1 / tl.sqrt(tl.sum(x * x, axis) / C + eps)
    return x * tl.expand_dims(rstd, axis), rstd


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
def sigmoid(x, FAST: tl.constexpr):
    """1 / (1 + exp(-x)). `tl.sigmoid` compiles to 13 instructions of NVIDIA's GPUs, this to 4 if it is fast."""
    b_e = 1 + tl.math.exp2(x * _UNIT)
    if FAST:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [b_e], tl.float32, is_pure=True, pack=1)
    return 1 / b_e


@triton.jit
def _nearest(x):
    """x rounded to TF32, whose numbers have 10 bits after the first; NaN stays NaN."""
    b_bits = (x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000
    return tl.where(x == x, b_bits.to(tl.float32, bitcast=True), x)


@triton.jit
def product(a, b, PRECISION: tl.constexpr, acc=None):
    """a b + acc. Tensor cores cut off what TF32 has no digits for, twice the error of rounding, so this rounds first."""
    if PRECISION == "tf32":
        a, b = _nearest(a), _nearest(b)
    # `tl.dot` of Triton 3.3 does not see that an acc is None if a function passes it on
    return tl.dot(a, b, input_precision=PRECISION) if acc is None else tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def load_weight(p, o_m, o_n, M: tl.constexpr, N: tl.constexpr):
    """Load a weight `[M, N]`, or a part of it, with zeros around it."""
    return tl.load(p + o_m[:, None] * N + o_n[None, :], mask=(o_m < M)[:, None] & (o_n < N)[None, :], other=0.0)


@triton.jit
def load_vector(p, o_c, C: tl.constexpr):
    """Load a bias, or the weight of a norm, `[C]` in float32, with zeros behind it."""
    return tl.load(p + o_c, mask=o_c < C, other=0.0).to(tl.float32)
