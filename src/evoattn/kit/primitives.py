"""Small jitted functions that the forward and the backward kernels share.

Names: `p_` pointer, `o_` offsets along one axis, `b_` tile in registers; the axes of a tile stand in a comment, `# [q,k]`.
`V` has the constants of a kernel, `T` those that kernels of a call share. A tensor with its strides is a `View`.
Scores live in log2 units (a score times log2 e), because the hardware's exponential is exp2.
"""

from __future__ import annotations

import triton
import triton.language as tl

from evoattn.core import numerics
from evoattn.kit import halves
from evoattn.kit.arguments import PairView, RowView, View
from evoattn.kit.halves import multiply, split_tile, turn

LOG2E, LN2, NEAR = tl.constexpr(numerics.LOG2E), tl.constexpr(numerics.LN2), tl.constexpr(numerics.NEAR)
HALVES = tl.constexpr(halves.PRECISION)
DISTANT = tl.constexpr(3e38)
"""Marks a query whose reference is not 0, in place of its lse in the backward's statistics.

Its P becomes 0 in the first launch. A second launch, with DISTANT_ONLY, computes it.
"""
FLOOR = tl.constexpr(-1e38)
"""The start of a running max: below every finite score, yet finite (see online_softmax)."""
ULP = tl.constexpr(2.0**-23)
"""From 1.0 to the next float32 number."""


@triton.jit
def offsets(o, LONG: tl.constexpr):
    """Offsets along an axis, as int64 if its stride is too long for int32 products inside a tile."""
    if LONG:
        o = o.to(tl.int64)
    return o


@triton.jit
def decode(pid, blocks, n_rows, heads):
    """Split a program's number into (block, n, h, b); everything sits on grid axis x, which alone reaches 2**31."""
    block = pid % blocks
    outer = pid // blocks
    n = outer % n_rows
    outer = outer // n_rows
    return block, n, outer % heads, outer // heads


@triton.jit
def at(x, b, h, GRAIN: tl.constexpr, n=None, first=None):
    """The view that begins at (b, h), and at (b, n, h) or line `first` if they are not None."""
    offset = b * x.b
    if n is not None:
        offset += n * x.n
    offset += h * x.h
    if first is not None:
        offset += first.to(tl.int64) * x.l
    return View(x.p + offset * GRAIN, x.b, x.n, x.h, x.l, x.c)


@triton.jit
def pair_at(x, b, h, GRAIN: tl.constexpr, first_q):
    """The view of the pair bias that begins at (b, h) and query first_q."""
    return PairView(x.p + (b * x.b + h * x.h + first_q.to(tl.int64) * x.q) * GRAIN, x.b, x.h, x.q, x.k)


@triton.jit
def row_at(x, b, n):
    """The view of keys that begins at (b, n)."""
    return RowView(x.p + (b * x.b + n * x.n), x.b, x.n)


@triton.jit
def load_view(p, x, o_l, o_c, left, COLS: tl.constexpr, GRAIN: tl.constexpr, MASK: tl.constexpr):
    """[l,c] of the view x from p on; 0 from line `left` on, if there is a MASK, and from column COLS on."""
    return load_tile(p, o_l, o_c, x.l * GRAIN, x.c, left, COLS, MASK_ROWS=MASK, MASK_COLS=o_c.shape[0] != COLS)


@triton.jit
def store_view(x, b_tile, o_l, o_c, left, COLS: tl.constexpr, GRAIN: tl.constexpr, MASK: tl.constexpr):
    """Write [l,c] of the view x, but for lines from `left` on, if there is a MASK, and columns from COLS on."""
    store_tile(x.p, b_tile, o_l, o_c, x.l * GRAIN, x.c, left, COLS, MASK_ROWS=MASK, MASK_COLS=o_c.shape[0] != COLS)


@triton.jit
def load_tile(p_base, o_row, o_col, stride_row, stride_col, rows, cols, MASK_ROWS: tl.constexpr, MASK_COLS: tl.constexpr):
    """[row, col] from p_base + o_row * stride_row + o_col * stride_col; 0 from row `rows` and column `cols` on."""
    p_tile = p_base + o_row[:, None] * stride_row + o_col[None, :] * stride_col
    if MASK_ROWS and MASK_COLS:
        return tl.load(p_tile, mask=(o_row[:, None] < rows) & (o_col[None, :] < cols), other=0.0)
    if MASK_ROWS:
        return tl.load(p_tile, mask=o_row[:, None] < rows, other=0.0)
    if MASK_COLS:
        return tl.load(p_tile, mask=o_col[None, :] < cols, other=0.0)
    return tl.load(p_tile)


@triton.jit
def store_tile(
    p_base, b_tile, o_row, o_col, stride_row, stride_col, rows, cols, MASK_ROWS: tl.constexpr, MASK_COLS: tl.constexpr
):
    """Write [row, col], cast to the pointer's dtype, but for rows from `rows` and columns from `cols` on."""
    p_tile = p_base + o_row[:, None] * stride_row + o_col[None, :] * stride_col
    b_tile = b_tile.to(p_base.dtype.element_ty)
    if MASK_ROWS and MASK_COLS:
        tl.store(p_tile, b_tile, mask=(o_row[:, None] < rows) & (o_col[None, :] < cols))
    elif MASK_ROWS:
        tl.store(p_tile, b_tile, mask=o_row[:, None] < rows)
    elif MASK_COLS:
        tl.store(p_tile, b_tile, mask=o_col[None, :] < cols)
    else:
        tl.store(p_tile, b_tile)


@triton.jit
def to_float32(b_pair):
    """A tile of pair bias in float32; what only float64 can hold becomes the largest float32 number, not infinite."""
    if b_pair.dtype == tl.float64:
        b_near = tl.minimum(tl.maximum(b_pair, -3.4028234e38), 3.4028234e38)
        b_pair = tl.where(tl.abs(b_pair) == float("inf"), b_pair, b_near)
    return b_pair.to(tl.float32)


@triton.jit
def subtract_reference(b_pair, b_ref):
    """A tile of pair bias in float32, less the references of its queries, which broadcast to it.

    A key that is not attended may be far above the reference. It stays finite, since +inf and a key bias of -inf make NaN.
    """
    return tl.minimum(to_float32(b_pair) - b_ref, 1e30)


@triton.jit
def _dot_keys(b_q, b_k, PRECISION: tl.constexpr, b_start=None):
    """b_q b_k^T + b_start. For products of float16, b_q is split already."""
    if PRECISION == HALVES:
        return multiply(b_q, turn(split_tile(b_k, 1), PRECISION), PRECISION, b_start)
    else:  # Triton compiles one branch alone
        b_k = tl.trans(b_k)
        # `tl.dot` of Triton 3.3 does not see that an acc is None if a function passes it on
        if b_start is None:
            return tl.dot(b_q, b_k, input_precision=PRECISION)
        else:
            return tl.dot(b_q, b_k, b_start, input_precision=PRECISION)


@triton.jit
def scores(
    b_q, b_k, b_pair, b_key_bias, unit,
    FOLD: tl.constexpr, HAS_PAIR: tl.constexpr, HAS_KEY_BIAS: tl.constexpr, PRECISION: tl.constexpr,
    KEYS: tl.constexpr = 1, SEED: tl.constexpr = False,
):  # fmt: skip
    """[q,k] scores of b_q [q,d], b_k [k,d], b_pair [q,k], b_key_bias [k]; unit = scale * log2 e.

    FOLD: result * unit is in log2 units: the matmul's accumulator starts from bias / unit, one instruction a score less.
    b_key_bias was divided by unit when it was prepared. Otherwise the result itself is in log2 units, since dividing by the
    scale is not safe (`cards.folds`).

    PRECISION: of `tl.dot`, or the name in `kit.halves`; then b_q is split already.
    KEYS: the axis of keys. With 0, b_q is keys, b_k is queries, and b_pair and the result are [k,q].
    SEED: the accumulator starts from the key bias even without a pair bias.
    """
    # S = Q K^T + biases
    if FOLD and HAS_PAIR:
        inverse = 1.0 / unit
        b_start = to_float32(b_pair) * (inverse * LOG2E)  # [q,k]
        if HAS_KEY_BIAS:
            b_start += tl.expand_dims(b_key_bias, 1 - KEYS)
        return _dot_keys(b_q, b_k, PRECISION, b_start)
    if (FOLD and HAS_KEY_BIAS) and SEED:
        b_start = tl.broadcast_to(tl.expand_dims(b_key_bias, 1 - KEYS), (b_q.shape[0], b_k.shape[0]))
        return _dot_keys(b_q, b_k, PRECISION, b_start)
    b_s = _dot_keys(b_q, b_k, PRECISION)  # [q,k]
    if not FOLD:
        b_s *= unit
        if HAS_PAIR:
            b_s += to_float32(b_pair) * LOG2E
    if HAS_KEY_BIAS:
        b_s += tl.expand_dims(b_key_bias, 1 - KEYS)
    return b_s


@triton.jit
def online_softmax(b_s, b_acc, b_max, b_sum, factor):
    """Fold one tile of scores (b_s * factor in log2 units) into the running max and sum, and rescale the accumulator.

    Returns the tile's unnormalised probabilities [q,k] and the new accumulator, max and sum. b_max starts from a finite floor,
    so a query that has seen only -inf gives exp2(-inf - floor) = 0 and never -inf minus -inf.

    The compiler makes one FMA of `b_s * factor - b_new`. It does not round the product, and b_new is rounded: if a tile holds
    nothing but -1e10, their difference may be 512 and its exp2 infinite. So b_new is one step above the largest product.
    """
    b_top = tl.maximum(tl.max(b_s, 1) * factor, FLOOR)  # [q]
    b_new = tl.maximum(b_max, b_top + tl.abs(b_top) * ULP)  # [q]
    b_p = tl.math.exp2(b_s * factor - b_new[:, None])  # [q,k]
    b_fade = tl.math.exp2(b_max - b_new)  # [q]
    return b_p, b_acc * b_fade[:, None], b_new, b_sum * b_fade + tl.sum(b_p, 1)


@triton.jit
def add_values(b_acc, b_p, b_v, PRECISION: tl.constexpr):
    """b_acc + P V, for probabilities b_p [q,k], which are at most 1, and values b_v [k,c].

    float32 values are not split into halves: those of a channel would share a power of two, and a large one of a masked key
    would take the digits of all others.
    """
    return tl.dot(b_p.to(b_v.dtype), b_v, b_acc, input_precision="tf32x3" if PRECISION == HALVES else PRECISION)


@triton.jit
def finish(b_acc, b_max, b_sum):
    """Normalised output [q,c] and LSE [q] in log2 units; a query that attends to nothing gets 0 and -inf."""
    b_empty = b_sum == 0.0
    # One division a query and a multiplication an element: a division an element was 5% of the forward at 384 keys.
    b_o = b_acc * (1.0 / tl.where(b_empty, 1.0, b_sum))[:, None]
    b_lse = tl.where(b_empty, float("-inf"), b_max + tl.math.log2(b_sum))
    return b_o, b_lse


@triton.jit
def sigmoid(x, FAST: tl.constexpr = False):
    """1 / (1 + exp(-x)) in float32; 0 for -inf, and 1 for +inf.

    `tl.sigmoid` compiles to 13 instructions of NVIDIA's GPUs, this to 4 if it is fast.
    """
    b_e = 1.0 + tl.math.exp2(x.to(tl.float32) * -LOG2E)
    if FAST:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [b_e], tl.float32, is_pure=True, pack=1)
    return 1.0 / b_e
