"""The exact path of the forward: a query whose sum overflowed, or met NaN, is done again with a running maximum.

One warp takes one query, a lane a key, in float32 from global memory. It is slow and all but never runs: a bfloat16 query
comes here when a later score exceeds the best of its first 32 keys by more than 44, a float16 one when by more than 15.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, cute, range_constexpr
from cutlass.cute import arch

from evoattn.backends.hopper.prepare import TERMS
from evoattn.backends.hopper.primitives import LN2, LOG2E, MASKED

__all__ = ["redo_query"]

LANES = 32


@cute.jit
def redo_query(
    q: cute.Tensor,
    k: cute.Tensor,
    v: cute.Tensor,
    row: Any,
    pair: Any,
    o: cute.Tensor,
    lse: cute.Tensor,
    b: Int32,
    n: Int32,
    h: Int32,
    i: Int32,
    terms_row: Int32,
    scale: Float32,
    has_row: cutlass.Constexpr,
    has_pair: cutlass.Constexpr,
    channels: cutlass.Constexpr,
):
    """Write o[b,n,h,i,:] and lse[b,n,h,i]; called by a whole warp."""
    lane = arch.lane_idx()
    keys = k.shape[3]
    each = (channels + LANES - 1) // LANES
    out = cute.make_rmem_tensor(each, Float32)
    out.fill(0.0)
    best, total = -Float32.inf, Float32(0.0)
    for j0 in cutlass.range(0, keys, LANES, unroll=1):
        j = j0 + lane
        s = -Float32.inf
        if j < keys:
            s = Float32(0.0)
            for x in cutlass.range(channels, unroll=8):
                s += q[b, n, h, i, x].to(Float32) * k[b, n, h, j, x].to(Float32)
            s = s * scale
            if cutlass.const_expr(has_row):
                bias = Float32(0.0)
                for x in range_constexpr(3):
                    bias += row[terms_row, j * TERMS + x].to(Float32)
                s += bias
                if bias <= MASKED * 0.75 or row[terms_row, j * TERMS + 6].to(Float32) < 0.0:
                    s = -Float32.inf
            if cutlass.const_expr(has_pair):
                s += pair[cutlass.min(b, pair.shape[0] - 1), cutlass.min(h, pair.shape[1] - 1), i, j].to(Float32)
        top = arch.fmax(best, arch.warp_reduction_max(s))
        if top != -Float32.inf or arch.vote_any_sync(s != s):
            weight = cute.math.exp2((s - top) * LOG2E, fastmath=True)
            shrink = cute.math.exp2((best - top) * LOG2E, fastmath=True)
            total = total * shrink + arch.warp_reduction_sum(weight)
            for y in range_constexpr(each):
                out[y] = out[y] * shrink
            for kk in cutlass.range(LANES, unroll=8):
                p = arch.shuffle_sync(weight, kk)
                if j0 + kk < keys:
                    for y in range_constexpr(each):
                        x = lane + LANES * y
                        if x < channels:
                            out[y] = out[y] + p * v[b, n, h, j0 + kk, x].to(Float32)
            best = top
    dead = total == 0.0
    for y in range_constexpr(each):
        x = lane + LANES * y
        if x < channels:
            o[b, n, h, i, x] = Float32(cutlass.select_(dead, Float32(0.0), out[y] / total)).to(o.element_type)
    if lane == 0:
        value = best + cute.math.log2(total, fastmath=True) * LN2
        lse[b, n, h, i] = cutlass.select_(dead, -Float32.inf, value)
