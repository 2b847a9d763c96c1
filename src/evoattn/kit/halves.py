"""Small jitted functions for products of float32 tiles on tensor cores, as three products of float16.

    x = unit * (hi + lo / 2,048),    hi and lo in float16, and a power of two for each row

`pair.products` has the same for whole matrices. Its docstring says what the split loses.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from evoattn.kit.arguments import Pointer
from evoattn.kit.rows import load_weight, product

PRECISION = "float16x3"
"""The name of such products among the values of PRECISION."""

_NAME = tl.constexpr(PRECISION)


class Halves(NamedTuple):
    """A factor: hi and lo in float16, and unit in float32 for each entry of the axis that is not summed over."""

    hi: Pointer
    lo: Pointer
    unit: Pointer


@triton.jit
def exponents(x, axis: tl.constexpr):
    """The largest exponent of a float32 tile along an axis, 255 if there is an infinity or NaN."""
    return tl.max((x.to(tl.int32, bitcast=True) & 0x7FFFFFFF) >> 23, axis)


@triton.jit
def unit_of(b_exponent):
    """The unit of a row with this largest exponent, which is from 15 to 254, and 1 / unit."""
    return ((b_exponent - 14) << 23).to(tl.float32, bitcast=True), ((268 - b_exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def split_tile(x, axis: tl.constexpr):
    """Split a float32 tile whose axis is summed over. All results of a row with an infinity or NaN are NaN."""
    b_unit, b_scale = unit_of(tl.minimum(tl.maximum(exponents(x, axis), 15), 254))
    x *= tl.expand_dims(b_scale, axis)
    b_hi = x.to(tl.float16)
    return Halves(b_hi, ((x - b_hi.to(tl.float32)) * 2048.0).to(tl.float16), b_unit)


@triton.jit
def factor(x, like, axis: tl.constexpr, PRECISION: tl.constexpr):
    """A float32 tile as a factor of `multiply`, in the dtype of the weight `like`. The axis is summed over."""
    if PRECISION == _NAME:
        return split_tile(x, axis)
    else:  # Triton compiles one branch alone
        return x.to(like.dtype.element_ty)


@triton.jit
def load_factor(p, o_m, o_n, M: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr):
    """Load a weight `[M, N]`, or a part of it, as a factor. N is summed over.

    A split weight is float32 by its pointer. Its M N numbers are the bits of hi and of lo, and unit comes after them.
    """
    if PRECISION == _NAME:
        b_unit = tl.load(p + M * N + o_m, mask=o_m < M, other=0.0)
        p_hi = p.to(tl.pointer_type(tl.float16))
        return Halves(load_weight(p_hi, o_m, o_n, M, N), load_weight(p_hi + M * N, o_m, o_n, M, N), b_unit)
    else:  # Triton compiles one branch alone
        return load_weight(p, o_m, o_n, M, N)


@triton.jit
def turn(x, PRECISION: tl.constexpr):
    """A factor with its axes exchanged."""
    if PRECISION == _NAME:
        return Halves(tl.trans(x.hi), tl.trans(x.lo), x.unit)
    else:  # Triton compiles one branch alone
        return tl.trans(x)


@triton.jit
def multiply(a, b, PRECISION: tl.constexpr, acc=None):
    """a b + acc of two factors. The sum with acc is outside of the tensor core, which cuts off digits.

    At most 128 numbers are added up inside of it. With 64, as in `pair.products`, rows would be in registers and spill.
    """
    if PRECISION == _NAME:
        b_y = tl.dot(a.hi, b.lo)
        b_y = tl.dot(a.lo, b.hi, b_y)
        b_y = tl.dot(a.hi, b.hi, b_y * (1.0 / 2048.0)) * (a.unit[:, None] * b.unit[None, :])
        return b_y if acc is None else acc + b_y
    else:
        return product(a, b, PRECISION, acc)
