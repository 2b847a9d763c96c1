"""Small jitted pieces that the forward and the backward kernels are made of.

Names: `p_` pointer, `o_` offsets along one axis, `b_` tile in registers; the axes of a tile stand in a comment, `# [q,k]`.
`V` has the constants of a kernel, `T` those that kernels of a call share. A tensor with its strides is a `View`.
Scores live in log2 units (a score times log2 e), because the hardware's exponential is exp2.

    LOG2E, LN2                     constants (tl.constexpr)
    wide(o, WIDE)                  offsets as int64 where a stride is so long that int32 would overflow inside a tile
    decode(pid, blocks, n, h)      a program's number -> (block, n, h, b); blocks run fastest, then n: neighbours share K and V,
                                   then the bias panel
    at(x, b, h), pair_at, row_at   a view that begins there
    load_rows(...), store_rows     the same of a view
    load_tile(...)                 [row, col] through two strides; rows and columns outside are 0 and are never read
    store_tile(...)                the same way back, cast to the pointer's dtype
    load_pair_bias(...)            [q,k] tile at the bias's own dtype and strides (0 for a size-1 axis); outside is 0
    natural(...), measured(...)    a tile of pair bias in float32; the same, measured from its queries' references
    load_row_bias(...)             [k] of the prepared row_bias: float32, log2 units, -inf past the end, so never masked
    scores(...)                    [q,k] in log2 units divided by `unit`: q k^T + biases
    online_softmax(...)            one step of the running max, sum and rescaled accumulator
    finish(...)                    o and lse of a block of rows, with the convention for rows that attend to nothing
    sigmoid(b_gate)                in float32, of a tile in any dtype
"""

from __future__ import annotations

import triton
import triton.language as tl

from evoattn.backends.triton.arguments import PairView, RowView, View

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
DISTANT = tl.constexpr(3e38)
"""In place of an lse in the backward's statistics: a query with a reference, whose P is then 0, comes in a loop of its own."""
NEAR = tl.constexpr(64.0)
"""Biases up to this size cost a float32 score no digit that counts: float32 numbers are 4e-6 apart there."""
FLOOR = tl.constexpr(-1e38)
"""Where a running max starts: below every finite score, yet finite (see online_softmax)."""
ULP = tl.constexpr(2.0**-23)
"""From 1.0 to the next float32 number."""


@triton.jit
def wide(o_row, WIDE: tl.constexpr):
    """Offsets along an axis, as int64 when the launcher found its stride too long for int32 products inside a tile."""
    if WIDE:
        o_row = o_row.to(tl.int64)
    return o_row


@triton.jit
def decode(pid, blocks, n_rows, heads):
    """Split a program's number into (block, n, h, b); everything sits on grid axis x, which alone reaches 2**31."""
    block = pid % blocks
    rest = pid // blocks
    n = rest % n_rows
    rest = rest // n_rows
    return block, n, rest % heads, rest // heads


@triton.jit
def at(x, b, h, GRAIN: tl.constexpr, n=None, first=None):
    """The view that begins at (b, h), and at (b, n, h) or row `first` if they are given."""
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
def load_rows(p, x, o_l, o_c, left, COLS: tl.constexpr, GRAIN: tl.constexpr, MASK: tl.constexpr):
    """[l,c] of the view x from p on; 0 from row `left` on, if there is a MASK, and from column COLS on."""
    return load_tile(p, o_l, o_c, x.l * GRAIN, x.c, left, COLS, MASK_ROWS=MASK, MASK_COLS=o_c.shape[0] != COLS)


@triton.jit
def load_tile(
    p_base, o_row, o_col, stride_row, stride_col, rows, COLS: tl.constexpr, MASK_ROWS: tl.constexpr, MASK_COLS: tl.constexpr
):
    """[row, col] from p_base + o_row * stride_row + o_col * stride_col; 0 where o_row >= rows or o_col >= COLS."""
    p_tile = p_base + o_row[:, None] * stride_row + o_col[None, :] * stride_col
    if MASK_ROWS and MASK_COLS:
        return tl.load(p_tile, mask=(o_row[:, None] < rows) & (o_col[None, :] < COLS), other=0.0)
    if MASK_ROWS:
        return tl.load(p_tile, mask=o_row[:, None] < rows, other=0.0)
    if MASK_COLS:
        return tl.load(p_tile, mask=o_col[None, :] < COLS, other=0.0)
    return tl.load(p_tile)


@triton.jit
def store_tile(
    p_base,
    b_tile,
    o_row,
    o_col,
    stride_row,
    stride_col,
    rows,
    COLS: tl.constexpr,
    MASK_ROWS: tl.constexpr,
    MASK_COLS: tl.constexpr,
):
    """Write [row, col], cast to the pointer's dtype; rows and columns outside are left alone."""
    p_tile = p_base + o_row[:, None] * stride_row + o_col[None, :] * stride_col
    b_tile = b_tile.to(p_base.dtype.element_ty)
    if MASK_ROWS and MASK_COLS:
        tl.store(p_tile, b_tile, mask=(o_row[:, None] < rows) & (o_col[None, :] < COLS))
    elif MASK_ROWS:
        tl.store(p_tile, b_tile, mask=o_row[:, None] < rows)
    elif MASK_COLS:
        tl.store(p_tile, b_tile, mask=o_col[None, :] < COLS)
    else:
        tl.store(p_tile, b_tile)


@triton.jit
def store_rows(x, b_tile, o_l, o_c, left, COLS: tl.constexpr, GRAIN: tl.constexpr, MASK: tl.constexpr):
    """Write [l,c] of the view x, but for rows from `left` on, if there is a MASK, and columns from COLS on."""
    store_tile(x.p, b_tile, o_l, o_c, x.l * GRAIN, x.c, left, COLS, MASK_ROWS=MASK, MASK_COLS=o_c.shape[0] != COLS)


@triton.jit
def load_pair_bias(p_pair, o_q, o_k, stride_q, stride_k, lq, lk, MASK_Q: tl.constexpr, MASK_K: tl.constexpr):
    """[q,k] of the pair bias at its own dtype; p_pair already points at (b, h). Strides are 0 along size-1 axes."""
    p_tile = p_pair + o_q[:, None] * stride_q + o_k[None, :] * stride_k
    if MASK_Q and MASK_K:
        return tl.load(p_tile, mask=(o_q[:, None] < lq) & (o_k[None, :] < lk), other=0.0)
    if MASK_Q:
        return tl.load(p_tile, mask=o_q[:, None] < lq, other=0.0)
    if MASK_K:
        return tl.load(p_tile, mask=o_k[None, :] < lk, other=0.0)
    return tl.load(p_tile)


@triton.jit
def natural(b_pair):
    """A tile of pair bias in float32; what only float64 can hold becomes the largest float32 number, not infinite."""
    if b_pair.dtype == tl.float64:
        b_near = tl.minimum(tl.maximum(b_pair, -3.4028234e38), 3.4028234e38)
        b_pair = tl.where(tl.abs(b_pair) == float("inf"), b_pair, b_near)
    return b_pair.to(tl.float32)


@triton.jit
def measured(b_pair, b_ref):
    """A tile of pair bias in float32, measured from the references of its queries, which broadcast to it.

    A key that is not attended may be far above the reference. It stays finite, since +inf and a row bias of -inf make NaN.
    """
    return tl.minimum(natural(b_pair) - b_ref, 1e30)


@triton.jit
def load_row_bias(p_row, o_k):
    """[k] of the prepared row_bias; p_row points at (b, n). It is padded with -inf to whole tiles: no mask needed."""
    return tl.load(p_row + o_k)


@triton.jit
def scores(
    b_q,
    b_k,
    b_pair,
    b_row,
    unit,
    FOLD: tl.constexpr,
    HAS_PAIR: tl.constexpr,
    HAS_ROW: tl.constexpr,
    PRECISION: tl.constexpr,
    ROW_FOLDED: tl.constexpr = False,
):
    """[q,k] scores of b_q [q,d], b_k [k,d], b_pair [q,k], b_row [k]; unit = scale * log2 e.

    FOLD: result * unit is in log2 units: the matmul's accumulator starts from bias / unit, one instruction a score less.
    Otherwise the result itself is in log2 units; the launcher asks for that when dividing by the scale is not safe.
    ROW_FOLDED: b_row was divided by unit when it was prepared.
    """
    if FOLD:
        inverse = 1.0 / unit
        if HAS_ROW and not ROW_FOLDED:
            b_row = b_row * inverse
        if HAS_PAIR and HAS_ROW:
            b_start = natural(b_pair) * (inverse * LOG2E) + b_row[None, :]  # [q,k]
            return tl.dot(b_q, tl.trans(b_k), b_start, input_precision=PRECISION)
        if HAS_PAIR:
            b_start = natural(b_pair) * (inverse * LOG2E)  # [q,k]
            return tl.dot(b_q, tl.trans(b_k), b_start, input_precision=PRECISION)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)  # [q,k]
        if HAS_ROW:
            b_s += b_row[None, :]
        return b_s
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * unit  # [q,k]
    if HAS_PAIR:
        b_s += natural(b_pair) * LOG2E
    if HAS_ROW:
        b_s += b_row[None, :]
    return b_s


@triton.jit
def online_softmax(b_s, b_acc, b_max, b_sum, factor):
    """Fold one tile of scores (b_s * factor in log2 units) into the running max and sum, and rescale the accumulator.

    Returns the tile's unnormalised probabilities [q,k] and the new accumulator, max and sum. b_max starts from a finite floor,
    so a row that has seen only -inf gives exp2(-inf - floor) = 0 and never -inf minus -inf.

    The compiler makes one FMA of `b_s * factor - b_new`. It does not round the product, and b_new is rounded: if a tile holds
    nothing but -1e10, their difference may be 512 and its exp2 infinite. So b_new is one step above the largest product.
    """
    b_top = tl.maximum(tl.max(b_s, 1) * factor, FLOOR)  # [q]
    b_new = tl.maximum(b_max, b_top + tl.abs(b_top) * ULP)  # [q]
    b_p = tl.math.exp2(b_s * factor - b_new[:, None])  # [q,k]
    b_fade = tl.math.exp2(b_max - b_new)  # [q]
    return b_p, b_acc * b_fade[:, None], b_new, b_sum * b_fade + tl.sum(b_p, 1)


@triton.jit
def finish(b_acc, b_max, b_sum):
    """Normalised output [q,c] and LSE [q] in log2 units; a query that attends to nothing gets 0 and -inf."""
    b_empty = b_sum == 0.0
    # One division a row and a multiplication an element: a division an element was 5% of the forward at 384 keys.
    b_o = b_acc * (1.0 / tl.where(b_empty, 1.0, b_sum))[:, None]
    b_lse = tl.where(b_empty, float("-inf"), b_max + tl.math.log2(b_sum))
    return b_o, b_lse


@triton.jit
def sigmoid(b_gate):
    """1 / (1 + exp(-gate)) in float32; 0 for -inf, and 1 for +inf."""
    return 1.0 / (1.0 + tl.math.exp2(b_gate.to(tl.float32) * -LOG2E))
