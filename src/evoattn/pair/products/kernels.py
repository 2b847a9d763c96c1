"""Products of float32 matrices on tensor cores, in Triton: a kernel that splits a matrix, and one that multiplies two.

A row x of a matrix becomes two rows of float16 and a power of two, its unit:

    x = unit * (hi + lo / 2,048)

The unit brings the largest entry of hi to between 2^14 and 2^15. So hi and lo have 22 bits of x, and no entry within 2^28 of
the largest one is subnormal. A product is three products of float16:

    x w = unit_x * unit_w * (hi_x hi_w + (hi_x lo_w + lo_x hi_w) / 2,048)

Tensor cores cut off digits when they add. So the first sum leaves them after each BLOCK_K channels and is added in float32. If
hi alone is multiplied, its 11 bits lose a hundred times more than that, and the sum stays in the tensor core.

A row with an infinity or NaN has the unit 0, and keeps the signs of its other numbers alone: no result of it is finite.
Programs that meet such a row multiply once more, in float32, and so return what float32 returns.

Source of the split: Ootomo and Yokota 2022, "Recovering single precision accuracy from Tensor Cores".
"""

from __future__ import annotations

from collections import namedtuple
from typing import NamedTuple

import triton
import triton.language as tl

from evoattn.kit.arguments import Number, Pointer, Specialised, kernel
from evoattn.kit.halves import exponents, unit_of
from evoattn.kit.norm import Rows
from evoattn.kit.overlap import wait_to_load
from evoattn.kit.primitives import sigmoid
from evoattn.kit.rows import load_vector, normalise_tile


class SplitView(NamedTuple):
    """A split matrix `[R, K]`: hi and lo `[R, K]` in float16, and unit `[R]` in float32.

    All are contiguous. In place of a float32 matrix, the K numbers of lo follow those of hi in each row.
    """

    hi: Pointer
    lo: Pointer
    unit: Pointer


Sharing = namedtuple("Sharing", "positions samples")
"""The sizes by which a row `[b,s,l]` finds its row `[b,l]` of a condition: S samples of L positions."""

SplitVariant = namedtuple(
    "SplitVariant",
    "C BLOCK_R BLOCK_C NORM ADAPT GATE SWIGLU FACTOR LOW IN_PLACE FAST WAIT",
    defaults=[False, False, False, 0, False, True, False, True, 0],
)
"""Constants of `split_kernel`. What is split, of rows x, a and b:

NORM: norm(x). With ADAPT, norm(x) a + b.
GATE: x sigmoid(a).
SWIGLU: 2, silu(x) a; 3, silu(x) a b.
FACTOR: x times a factor for each channel.
LOW: whether lo is wanted. IN_PLACE: hi and lo are written over x. FAST: see `sigmoid`. WAIT: see `overlap`.
"""

ProductVariant = namedtuple(
    "ProductVariant",
    "BLOCK_M BLOCK_N BLOCK_K EVEN LOW BIAS SIGMOID GATE MASK RESIDUAL BATCHED FAST WAIT",
    defaults=[False, False, False, False, False, False, True, 0],
)
"""Constants of `product_kernel`.

EVEN: K is a multiple of BLOCK_K. LOW: whether lo is there, else hi alone is multiplied.
BATCHED: x, w and out are several matrices each, one below the other, and x and w were split in place.
"""


@triton.jit
def _shared_row(o_r, sharing):
    """The row of the condition for a row `[b,s,l]`."""
    return o_r // (sharing.positions * sharing.samples) * sharing.positions + o_r % sharing.positions


@kernel
def split_kernel(
    x: Rows, a: Rows, b: Rows, factor: Pointer, out: SplitView, rows: Number, sharing: Sharing, eps: Number, V: SplitVariant
) -> None:
    """One program owns BLOCK_R rows. It reads them once, computes what is split, and writes it once."""
    o_r = tl.program_id(0).to(tl.int64) * V.BLOCK_R + tl.arange(0, V.BLOCK_R)
    o_c = tl.arange(0, V.BLOCK_C)
    m_r = o_r < rows
    m_rc = m_r[:, None] & (o_c < V.C)[None, :]
    wait_to_load(V.WAIT)
    b_x = tl.load(x.p + o_r[:, None] * x.r + o_c[None, :], mask=m_rc, other=0.0).to(tl.float32)  # [r,c]
    if V.NORM:
        b_x, _, _ = normalise_tile(b_x, m_rc, eps, V.C, 1)
    if V.ADAPT:
        o_s = _shared_row(o_r, sharing)
        b_x *= tl.load(a.p + o_s[:, None] * a.r + o_c[None, :], mask=m_rc, other=0.0)
        b_x += tl.load(b.p + o_s[:, None] * b.r + o_c[None, :], mask=m_rc, other=0.0)
    if V.GATE:
        b_x *= sigmoid(tl.load(a.p + o_r[:, None] * a.r + o_c[None, :], mask=m_rc, other=0.0).to(tl.float32), V.FAST)
    if V.SWIGLU:
        b_x *= sigmoid(b_x, V.FAST) * tl.load(a.p + o_r[:, None] * a.r + o_c[None, :], mask=m_rc, other=0.0)
        if V.SWIGLU == 3:
            b_x *= tl.load(b.p + o_r[:, None] * b.r + o_c[None, :], mask=m_rc, other=0.0)
    if V.FACTOR:
        b_x *= load_vector(factor, o_c, V.C)[None, :]
    b_exponent = exponents(b_x, 1)  # [r]
    b_finite = b_exponent < 255
    b_unit, b_scale = unit_of(tl.maximum(b_exponent, 15))
    b_unit = tl.where(b_finite, b_unit, 0.0)
    b_sign = tl.where(b_x > 0, 1.0, tl.where(b_x < 0, -1.0, 0.0))
    b_sign = tl.where((b_x - b_x) == 0, b_sign, b_x)
    b_x = tl.where(b_finite[:, None], b_x * b_scale[:, None], b_sign)
    b_hi = b_x.to(tl.float16)
    p = o_r[:, None] * (2 * V.C if V.IN_PLACE else V.C) + o_c[None, :]
    tl.store(out.hi + p, b_hi, mask=m_rc)
    tl.store(out.unit + o_r, b_unit, mask=m_r)
    if V.LOW:
        b_lo = tl.where(b_finite[:, None], (b_x - b_hi.to(tl.float32)) * 2048.0, 0.0)
        tl.store(out.lo + p, b_lo.to(tl.float16), mask=m_rc)


@triton.jit
def _load(p, o_row, o_k, columns, V):
    """Load a tile of a half. Rows past the end are rows that exist: nothing is stored of them."""
    p = p + o_row + o_k
    return tl.load(p) if V.EVEN else tl.load(p, mask=o_k < columns, other=0.0)


@triton.jit
def _whole(p_hi, p_lo, o_row, o_k, columns, V):
    """hi + lo / 2,048 in float32."""
    b = _load(p_hi, o_row, o_k, columns, V).to(tl.float32)
    return b + _load(p_lo, o_row, o_k, columns, V).to(tl.float32) / 2048.0 if V.LOW else b


@triton.jit
def _batch(x, w, out, batch, m, n, step):
    """The matrices of a batch. step: from row to row of x and w."""
    x = SplitView(x.hi + batch * m * step, x.lo + batch * m * step, x.unit + batch * m)
    w = SplitView(w.hi + batch * n * step, w.lo + batch * n * step, w.unit + batch * n)
    return x, w, Rows(out.p + batch * m * out.r, out.r)


@kernel
def product_kernel(
    x: SplitView, w: SplitView, bias: Pointer, gate: Rows, mask: Pointer, base: Rows, out: Rows,
    m: Number, n: Specialised, k: Specialised, sharing: Sharing, one: Number, V: ProductVariant,
) -> None:  # fmt: skip
    """One program owns a tile `[m, n]` of x w^T, for x `[M, K]` and w `[N, K]`. It writes

        base + mask * gate * y,    y = x w^T + bias, or its sigmoid

    and leaves out what the variant does not have. `one` is 1. A constant would let the compiler add the products of one step to
    those of the step before inside the tensor core.
    """
    tiles_n = tl.cdiv(n, V.BLOCK_N)
    program, step = tl.program_id(0), k
    if V.BATCHED:
        tiles, step = tl.cdiv(m, V.BLOCK_M) * tiles_n, 2 * k
        x, w, out = _batch(x, w, out, (program // tiles).to(tl.int64), m, n, step)
        program %= tiles
    group = 8 * tiles_n  # tiles that run together share rows of x and of w
    first = program // group * 8
    height = tl.minimum(tl.cdiv(m, V.BLOCK_M) - first, 8)
    o_m = (first + program % group % height) * V.BLOCK_M + tl.arange(0, V.BLOCK_M)
    o_n = program % group // height * V.BLOCK_N + tl.arange(0, V.BLOCK_N)
    o_k = tl.arange(0, V.BLOCK_K)
    o_mk, o_nk = (o_m % m).to(tl.int64)[:, None] * step, (o_n % n).to(tl.int64)[None, :] * step
    wait_to_load(V.WAIT)
    b_acc = tl.zeros((V.BLOCK_M, V.BLOCK_N), tl.float32)
    b_low = tl.zeros((V.BLOCK_M, V.BLOCK_N), tl.float32)
    for start in range(0, k, V.BLOCK_K):
        b_xh = _load(x.hi, o_mk, start + o_k[None, :], k, V)
        b_wh = _load(w.hi, o_nk, start + o_k[:, None], k, V)
        if V.LOW:
            b_low = tl.dot(b_xh, _load(w.lo, o_nk, start + o_k[:, None], k, V), b_low)
            b_low = tl.dot(_load(x.lo, o_mk, start + o_k[None, :], k, V), b_wh, b_low)
            b_acc += tl.dot(b_xh, b_wh) * one
        else:
            b_acc = tl.dot(b_xh, b_wh, b_acc)
    b_xu, b_wu = tl.load(x.unit + o_m % m), tl.load(w.unit + o_n % n)
    b_y = (b_acc + b_low / 2048.0) * (b_xu[:, None] * b_wu[None, :])
    if (tl.min(b_xu, 0) == 0) | (tl.min(b_wu, 0) == 0):
        b_acc = tl.zeros((V.BLOCK_M, V.BLOCK_N), tl.float32)
        for start in range(0, k, V.BLOCK_K):
            b_x = _whole(x.hi, x.lo, o_mk, start + o_k[None, :], k, V)
            b_acc = tl.dot(b_x, _whole(w.hi, w.lo, o_nk, start + o_k[:, None], k, V), b_acc, input_precision="ieee")
        b_y = tl.where((b_xu == 0)[:, None] | (b_wu == 0)[None, :], b_acc, b_y)
    m_mn = (o_m < m)[:, None] & (o_n < n)[None, :]
    if V.BIAS:
        b_y += tl.load(bias + o_n % n).to(tl.float32)[None, :]
    if V.SIGMOID:
        b_y = sigmoid(b_y, V.FAST)
    if V.GATE:
        b_y *= tl.load(gate.p + _shared_row(o_m.to(tl.int64), sharing)[:, None] * gate.r + o_n[None, :], mask=m_mn, other=0.0)
    if V.MASK:
        b_y *= tl.load(mask + o_m % m).to(tl.float32)[:, None]
    if V.RESIDUAL:
        b_y += tl.load(base.p + o_m.to(tl.int64)[:, None] * base.r + o_n[None, :], mask=m_mn, other=0.0).to(tl.float32)
    tl.store(out.p + o_m.to(tl.int64)[:, None] * out.r + o_n[None, :], b_y.to(out.p.dtype.element_ty), mask=m_mn)
