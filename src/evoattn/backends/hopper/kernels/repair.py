"""The exact path of the forward: queries whose sum overflowed, or met NaN, are done again with a running maximum.

So are those whose scores a pair bias may have swallowed: all keys that they attend to lie far below the largest of the query,
and are brought to LOWEST, as they are in the backward.

A warp takes its 16 queries, 16 keys at a time, by the tensor cores' small products, straight from global memory. A bfloat16
query comes here when a later score exceeds the best of its first 32 keys by more than 44, a float16 one when by more than 15.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, const_expr, cute, range_constexpr
from cutlass.cute import arch

from evoattn.backends.hopper.kernels.key_bias import TERMS
from evoattn.backends.hopper.lib.primitives import LOWEST, LOWEST_KEY, MASKED, mma_m16n8k16, packed
from evoattn.core.numerics import LOG2E

WARP_QUERIES = 16
"""Queries of a warp."""

_KEYS = 16  # at a time
_ROUNDING = 2.0**-18  # of a score: less than an LSE is allowed to be off, more than two ways to add it up differ


@cute.jit
def repair_queries(variant, args, b: Int32, n: Int32, h: Int32, first: Int32):
    """Write o and lse of those of 16 queries from `first` on whose lse is NaN or +inf.

    Biases far below 0 are raised here, so that scores keep their digits. What that adds to the largest score goes from the
    reference.

    More than 60 lines: its parts share the sums that stay in registers over the loop.
    """
    q, k, v, o, lse, reference = args.q, args.k, args.v, args.o, args.lse, args.reference
    shifts, r = args.shifts, b * args.row_b + n * args.row_n
    g, t = arch.lane_idx() // 4, arch.lane_idx() % 4
    queries, keys = q.shape[3], k.shape[3]
    steps, tiles = (variant.channels + 15) // 16, variant.channels // 8
    at = (first + g, first + g + 8)
    lines = tuple(cutlass.min(x, queries - 1) for x in at)
    rQ = tuple(_words(variant, q[b, n, h, lines[x % 2], None], 8 * (x // 2) + 2 * t) for x in range(4 * steps))
    best, total = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
    out = cute.make_rmem_tensor((4, tiles), Float32)
    best.fill(-Float32.inf)
    total.fill(0.0)
    out.fill(0.0)
    origins = cute.make_rmem_tensor(2, Float32)
    origins.fill(0.0)
    if const_expr(variant.pair):
        for x in range_constexpr(2):
            origins[x] = shifts[cutlass.min(b, shifts.shape[0] - 1), cutlass.min(h, shifts.shape[1] - 1), lines[x]]
    real = cute.make_rmem_tensor(2, Float32)  # the largest scores with the biases as they are
    real.fill(-Float32.inf)
    for j0 in cutlass.range(0, keys, _KEYS, unroll=1):
        S = [_scores(variant, rQ, args, origins, real, (b, n, h), lines, j0 + 8 * x, r, g, t) for x in range(2)]
        p = cute.make_rmem_tensor((2, 2, 2), Float32)  # key of a pair, query, tile
        for x in range_constexpr(2):
            top = arch.fmax(arch.fmax(S[0][2 * x], S[0][2 * x + 1]), arch.fmax(S[1][2 * x], S[1][2 * x + 1]))
            top = arch.fmax(best[x], arch.warp_reduction_max(top, threads_in_group=4))
            # Subtract first, so that equal scores give 1. Multiplying first leaves the product's rounding error in every
            # step (a fused multiply-add keeps it), and the sum over keys gathers it.
            origin = Float32(cutlass.select_(top == -Float32.inf, Float32(0.0), top))
            shrink = cute.math.exp2((best[x] - origin) * LOG2E, fastmath=True)
            best[x] = top
            total[x] = total[x] * shrink
            for z in range_constexpr(2):
                for y in range_constexpr(2):
                    p[y, x, z] = cute.math.exp2((S[z][2 * x + y] - origin) * LOG2E, fastmath=True)
                    total[x] = total[x] + p[y, x, z]
            for y in range_constexpr(tiles):
                out[2 * x, y] = out[2 * x, y] * shrink
                out[2 * x + 1, y] = out[2 * x + 1, y] * shrink
        short = cute.make_rmem_tensor(8, variant.dtype)
        short.store(p.load().to(variant.dtype))
        P = [packed(short)[x] for x in range(4)]
        for y in range_constexpr(tiles):
            B = cute.make_rmem_tensor(4, variant.dtype)
            for x in range_constexpr(4):
                key = j0 + 2 * t + x % 2 + 8 * (x // 2)
                B[x] = variant.dtype(0.0)
                if key < keys:
                    B[x] = v[b, n, h, key, 8 * y + g]
            sums = mma_m16n8k16(variant.dtype, [out[x, y] for x in range(4)], P, [packed(B)[0], packed(B)[1]])
            for x in range_constexpr(4):
                out[x, y] = sums[x]
    for x in range_constexpr(2):
        row_sum = arch.warp_reduction_sum(total[x], threads_in_group=4)
        if const_expr(variant.pair):
            real[x] = arch.warp_reduction_max(real[x], threads_in_group=4)
        dead = row_sum == 0.0
        again = Float32(0.0)
        if at[x] < queries:
            again = lse[b, n, h, at[x]]
        arch.sync_warp()  # all have read before one writes
        if again != again or again == Float32.inf:
            for y in range_constexpr(tiles):
                for z in range_constexpr(2):
                    value = Float32(cutlass.select_(dead, Float32(0.0), out[2 * x + z, y] / row_sum))
                    o[b, n, h, at[x], 8 * y + 2 * t + z] = value.to(variant.dtype)
            if t == 0:
                value = best[x] * LOG2E + cute.math.log2(row_sum, fastmath=True)
                lse[b, n, h, at[x]] = cutlass.select_(dead, -Float32.inf, value)
                if const_expr(variant.pair):
                    raised = best[x] - real[x]
                    if cute.math.absf(raised) > cute.math.absf(real[x]) * _ROUNDING and not dead:
                        reference[b, n, h, at[x]] = reference[b, n, h, at[x]] - raised


@cute.jit
def _scores(variant, rQ, args, origins: cute.Tensor, real: cute.Tensor, at, lines, j0: Int32, r: Int32, g: Int32, t: Int32):
    """Scores of this thread's two queries and two of 8 keys from j0 on, as an accumulator holds them; -inf past the end.

    With a pair bias, biases are raised to LOWEST and LOWEST_KEY, and `real` grows to the largest score of each query
    without that.
    """
    (b, n, h), row, deep, raw_pair, scale, keys = at, args.row, args.deep, args.raw_pair, args.scale, args.k.shape[3]
    line = args.k[b, n, h, cutlass.min(j0 + g, keys - 1), None]
    S = [Float32(0.0)] * 4
    for step in range_constexpr((variant.channels + 15) // 16):
        B = [_words(variant, line, 16 * step + 8 * x + 2 * t) for x in range(2)]
        S = mma_m16n8k16(variant.dtype, S, rQ[4 * step : 4 * step + 4], B)
    out = cute.make_rmem_tensor(4, Float32)
    for y in range_constexpr(2):
        j = j0 + 2 * t + y
        key = cutlass.min(j, keys - 1)
        bias, dead = Float32(0.0), j >= keys
        if const_expr(variant.row):
            terms = [row[r, key * TERMS + x].to(Float32) for x in (0, 1, 2, 6)]
            held = terms[0] + terms[1] + terms[2]
            dead = dead | (held <= MASKED * 0.75) | (terms[3] < 0.0)
            bias = Float32(cutlass.select_(held < LOWEST_KEY, Float32(LOWEST_KEY), held)) if variant.pair else held
        for x in range_constexpr(2):
            s, gone = S[2 * x + y] * scale + bias, dead
            if const_expr(variant.pair):
                more = raw_pair[cutlass.min(b, raw_pair.shape[0] - 1), cutlass.min(h, raw_pair.shape[1] - 1), lines[x], key]
                more = more.to(Float32)
                gone = dead | (more == -Float32.inf)
                more -= origins[x]
                score = S[2 * x + y] * scale + more
                if const_expr(variant.row):
                    score += deep[r, key]
                real[x] = arch.fmax(real[x], cutlass.select_(gone, -Float32.inf, score))
                s += cutlass.select_(more < LOWEST, Float32(LOWEST), more)
            out[2 * x + y] = cutlass.select_(gone, -Float32.inf, s)
    return out


def _words(variant, line: cute.Tensor, channel: Any) -> Any:
    """Two channels of a row as a word, zero past the last."""
    held = cute.recast_tensor(line, Int32)[cutlass.min(channel, variant.channels - 2) // 2]
    return Int32(cutlass.select_(channel < variant.channels, held, Int32(0)))
