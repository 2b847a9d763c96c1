"""Pieces of the kernels of the pair operators: loads of rows and weights, and the norm of rows."""

from __future__ import annotations

import triton
import triton.language as tl

from evoattn.core.numerics import LOG2E

_UNIT = tl.constexpr(-LOG2E)


@triton.jit
def standard(x, m, eps, C: tl.constexpr, axis: tl.constexpr):
    """x with mean 0 and deviation 1 along an axis of C channels, and 1 / the deviation. Other entries, where m is 0, are 0."""
    x = tl.where(m, x - tl.expand_dims(tl.sum(x, axis) / C, axis), 0.0)
    rstd = 1 / tl.sqrt(tl.sum(x * x, axis) / C + eps)
    return x * tl.expand_dims(rstd, axis), rstd


@triton.jit
def load_rows(p, o_r, m_rc, o_c, C: tl.constexpr):
    """Rows `[r, c]` of a tensor `[*, C]`."""
    return tl.load(p + o_r[:, None] * C + o_c[None, :], mask=m_rc, other=0.0).to(tl.float32)


@triton.jit
def load_columns(p, o_d, m_dr, o_r, rows):
    """Columns `[d, r]` of a tensor `[D, rows]`."""
    return tl.load(p + o_d[:, None].to(tl.int64) * rows + o_r[None, :], mask=m_dr, other=0.0).to(tl.float32)


@triton.jit
def scaled(x, w, b, axis: tl.constexpr):
    """x w + b, with w and b along an axis."""
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
def matrix(p, o_m, o_n, M: tl.constexpr, N: tl.constexpr):
    """A weight `[M, N]`, or a part of it, with zeros around it."""
    return tl.load(p + o_m[:, None] * N + o_n[None, :], mask=(o_m < M)[:, None] & (o_n < N)[None, :], other=0.0)


@triton.jit
def vector(p, o_c, C: tl.constexpr):
    return tl.load(p + o_c, mask=o_c < C, other=0.0).to(tl.float32)
