"""The exact path of the forward: queries whose sum overflowed, or met NaN, are done again with a running maximum.

So are distant queries, whose scores a pair bias may have swallowed: all keys that they attend to lie far below the largest of
the query. They are raised to LOWEST, as in the backward.

A warp owns 16 queries, loops over all keys, 16 at a time, and writes O and the LSE of the queries that need it. It reads global
memory directly, and multiplies by the small products of the tensor cores. A bfloat16 query comes here if a later score exceeds
the largest of its first 32 keys by more than 44, a float16 query if by more than 15.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, const_expr, cute, range_constexpr
from cutlass.cute import arch

from evoattn.backends.hopper.kernels.key_bias import TERMS
from evoattn.backends.hopper.lib.primitives import LOWEST, LOWEST_KEY, MASKED, broadcast_load, mma_m16n8k16, pack_words
from evoattn.core.numerics import LOG2E

WARP_QUERIES = 16
"""Queries of a warp."""

_KEYS_AT_A_TIME = 16
_ROUNDING = 2.0**-18  # of a score: less than an LSE is allowed to be off, more than two ways to add it up differ


@cute.jit
def repair_queries(variant, args, b: Int32, n: Int32, h: Int32, first: Int32):
    """Write O and the LSE of those of 16 queries from `first` on whose LSE is NaN or +inf.

    Biases far below 0 are raised, so that scores keep their digits. `_store` takes from the reference what that adds to the
    largest score.
    """
    bias_row = b * args.stride_b + n * args.stride_n
    g, t = arch.lane_idx() // 4, arch.lane_idx() % 4
    LQ, LK = args.mQ.shape[3], args.mK.shape[3]
    tiles = variant.channels // 8
    queries = (first + g, first + g + 8)
    lines = tuple(cutlass.min(x, LQ - 1) for x in queries)
    rQ = tuple(_words(variant, args.mQ[b, n, h, lines[x % 2], None], 8 * (x // 2) + 2 * t) for x in range(4 * variant.steps))
    top, total = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
    acc_O = cute.make_rmem_tensor((4, tiles), Float32)
    top.fill(-Float32.inf)
    total.fill(0.0)
    acc_O.fill(0.0)
    references = cute.make_rmem_tensor(2, Float32)
    references.fill(0.0)
    if const_expr(variant.pair):
        for x in range_constexpr(2):
            references[x] = broadcast_load(args.mPairReference, b, h, lines[x])
    true_top = cute.make_rmem_tensor(2, Float32)  # the largest scores with the biases as they are
    true_top.fill(-Float32.inf)
    for j0 in cutlass.range(0, LK, _KEYS_AT_A_TIME, unroll=1):
        S = [_scores(variant, rQ, args, references, true_top, (b, n, h), lines, j0 + 8 * x, bias_row, g, t) for x in range(2)]
        p = cute.make_rmem_tensor((2, 2, 2), Float32)  # key of a pair, query, tile
        for x in range_constexpr(2):
            new_top = arch.fmax(arch.fmax(S[0][2 * x], S[0][2 * x + 1]), arch.fmax(S[1][2 * x], S[1][2 * x + 1]))
            new_top = arch.fmax(top[x], arch.warp_reduction_max(new_top, threads_in_group=4))
            # Subtract first, so that equal scores give 1. Multiplying first leaves the product's rounding error in every
            # step (a fused multiply-add keeps it), and the sum over keys gathers it.
            reference = Float32(cutlass.select_(new_top == -Float32.inf, Float32(0.0), new_top))
            shrink = cute.math.exp2((top[x] - reference) * LOG2E, fastmath=True)
            top[x] = new_top
            total[x] = total[x] * shrink
            for z in range_constexpr(2):
                for y in range_constexpr(2):
                    p[y, x, z] = cute.math.exp2((S[z][2 * x + y] - reference) * LOG2E, fastmath=True)
                    total[x] = total[x] + p[y, x, z]
            for y in range_constexpr(tiles):
                acc_O[2 * x, y] = acc_O[2 * x, y] * shrink
                acc_O[2 * x + 1, y] = acc_O[2 * x + 1, y] * shrink
        short = cute.make_rmem_tensor(8, variant.dtype)
        short.store(p.load().to(variant.dtype))
        P = [pack_words(short)[x] for x in range(4)]
        for y in range_constexpr(tiles):
            B = cute.make_rmem_tensor(4, variant.dtype)
            for x in range_constexpr(4):
                key = j0 + 2 * t + x % 2 + 8 * (x // 2)
                B[x] = variant.dtype(0.0)
                if key < LK:
                    B[x] = args.mV[b, n, h, key, 8 * y + g]
            sums = mma_m16n8k16(variant.dtype, [acc_O[x, y] for x in range(4)], P, [pack_words(B)[0], pack_words(B)[1]])
            for x in range_constexpr(4):
                acc_O[x, y] = sums[x]
    _store(variant, args, (b, n, h), queries, acc_O, top, true_top, total, t)


@cute.jit
def _store(
    variant, args, bnh, queries, acc_O: cute.Tensor, top: cute.Tensor, true_top: cute.Tensor, total: cute.Tensor, t: Int32
):
    """Write O and the LSE of this thread's two queries, if they are to be done again."""
    (b, n, h), mLSE, mReference = bnh, args.mLSE, args.mReference
    for x in range_constexpr(2):
        row_sum = arch.warp_reduction_sum(total[x], threads_in_group=4)
        if const_expr(variant.pair):
            true_top[x] = arch.warp_reduction_max(true_top[x], threads_in_group=4)
        masked = row_sum == 0.0
        old_lse = Float32(0.0)
        if queries[x] < args.mQ.shape[3]:
            old_lse = mLSE[b, n, h, queries[x]]
        arch.sync_warp()  # all have read before one writes
        if old_lse != old_lse or old_lse == Float32.inf:
            for y in range_constexpr(variant.channels // 8):
                for z in range_constexpr(2):
                    value = Float32(cutlass.select_(masked, Float32(0.0), acc_O[2 * x + z, y] / row_sum))
                    args.mO[b, n, h, queries[x], 8 * y + 2 * t + z] = value.to(variant.dtype)
            if t == 0:
                value = top[x] * LOG2E + cute.math.log2(row_sum, fastmath=True)
                mLSE[b, n, h, queries[x]] = cutlass.select_(masked, -Float32.inf, value)
                if const_expr(variant.pair):
                    raised = top[x] - true_top[x]
                    if cute.math.absf(raised) > cute.math.absf(true_top[x]) * _ROUNDING and not masked:
                        mReference[b, n, h, queries[x]] = mReference[b, n, h, queries[x]] - raised


@cute.jit
def _scores(
    variant, rQ, args, references: cute.Tensor, true_top: cute.Tensor, bnh, lines, j0: Int32, bias_row: Int32, g: Int32,
    t: Int32,
):  # fmt: skip
    """Scores of this thread's two queries and two of 8 keys from j0 on, as an accumulator holds them; -inf past the end.

    With a pair bias, biases are raised to LOWEST and LOWEST_KEY, and `true_top` grows to the largest score of each query
    without that.
    """
    (b, n, h), mTerms, mRawPair, scale, LK = bnh, args.mTerms, args.mRawPair, args.scale, args.mK.shape[3]
    line = args.mK[b, n, h, cutlass.min(j0 + g, LK - 1), None]
    S = [Float32(0.0)] * 4
    for step in range_constexpr((variant.channels + 15) // 16):
        B = [_words(variant, line, 16 * step + 8 * x + 2 * t) for x in range(2)]
        S = mma_m16n8k16(variant.dtype, S, rQ[4 * step : 4 * step + 4], B)
    out = cute.make_rmem_tensor(4, Float32)
    for y in range_constexpr(2):
        j = j0 + 2 * t + y
        key = cutlass.min(j, LK - 1)
        bias, key_masked = Float32(0.0), j >= LK
        if const_expr(variant.key_bias):
            terms = [mTerms[bias_row, key * TERMS + x].to(Float32) for x in (0, 1, 2, 6)]
            key_bias = terms[0] + terms[1] + terms[2]
            key_masked = key_masked | (key_bias <= MASKED * 0.75) | (terms[3] < 0.0)
            bias = Float32(cutlass.select_(key_bias < LOWEST_KEY, Float32(LOWEST_KEY), key_bias)) if variant.pair else key_bias
        for x in range_constexpr(2):
            s, masked = S[2 * x + y] * scale + bias, key_masked
            if const_expr(variant.pair):
                pair_bias = broadcast_load(mRawPair, b, h, lines[x], key).to(Float32)
                masked = key_masked | (pair_bias == -Float32.inf)
                pair_bias -= references[x]
                score = S[2 * x + y] * scale + pair_bias
                if const_expr(variant.key_bias):
                    score += args.mKeyBias[bias_row, key]
                true_top[x] = arch.fmax(true_top[x], cutlass.select_(masked, -Float32.inf, score))
                s += cutlass.select_(pair_bias < LOWEST, Float32(LOWEST), pair_bias)
            out[2 * x + y] = cutlass.select_(masked, -Float32.inf, s)
    return out


def _words(variant, line: cute.Tensor, channel: Any) -> Any:
    """Two channels of a row as a word, zero past the last."""
    word = cute.recast_tensor(line, Int32)[cutlass.min(channel, variant.channels - 2) // 2]
    return Int32(cutlass.select_(channel < variant.channels, word, Int32(0)))
