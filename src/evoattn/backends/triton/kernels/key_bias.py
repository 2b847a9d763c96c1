"""The key bias: mask and mask bias as one number a key, with the runs of key tiles and the rows n that are live."""

from __future__ import annotations

import triton
import triton.language as tl

from evoattn.kit.arguments import Constant, Number, Pointer, RowView, kernel
from evoattn.kit.overlap import wait_to_load, wait_to_store
from evoattn.kit.primitives import to_float32


@triton.jit
def key_bias_tile(p_mask, p_bias, o_k, stride_mask, stride_bias, lk, HAS_MASK: tl.constexpr, HAS_BIAS: tl.constexpr):
    """mask_bias of keys that the mask allows, -inf for the others and outside [0, lk). Natural units, not shifted."""
    inside = (o_k >= 0) & (o_k < lk)
    b_key_bias = tl.where(inside, 0.0, float("-inf"))
    if HAS_BIAS:
        b_key_bias += to_float32(tl.load(p_bias + o_k.to(tl.int64) * stride_bias, mask=inside, other=0.0))
    if HAS_MASK:
        b_mask = tl.load(p_mask + o_k.to(tl.int64) * stride_mask, mask=inside, other=0)
        b_key_bias = tl.where(b_mask != 0, b_key_bias, float("-inf"))
    return b_key_bias


@kernel
def key_bias_kernel(
    mask: RowView, mask_bias: RowView, out: Pointer, runs: Pointer, stride_mask: Number, stride_bias: Number, n_rows: Number,
    lk: Number, padded: Number, runs_width: Number, factor: Number,
    HAS_MASK: Constant, HAS_BIAS: Constant, BLOCK_K: Constant, TILES: Constant, WAIT: Constant,
) -> None:  # fmt: skip
    """One program owns one row (b, n) of keys.

    It loops over chunks of keys twice: for the largest entry (only with a mask_bias), then to write.
    It writes the key bias once, padding included, and the runs of live tiles as it meets their two ends.
    """
    wait_to_load(WAIT)
    pid = tl.program_id(0)
    b = (pid // n_rows).to(tl.int64)
    n = (pid % n_rows).to(tl.int64)
    p_mask = mask.p + (b * mask.b + n * mask.n)
    p_bias = mask_bias.p + (b * mask_bias.b + n * mask_bias.n)
    p_out = out + pid.to(tl.int64) * padded
    p_runs = runs + pid.to(tl.int64) * runs_width
    o_tile = tl.arange(0, TILES)
    o_in = o_tile[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]  # [tile,k]

    shift = 0.0
    if HAS_BIAS:
        b_top = tl.full([TILES, BLOCK_K], float("-inf"), tl.float32)  # [tile,k]
        for first in tl.range(0, lk, TILES * BLOCK_K):
            b_top = tl.maximum(
                b_top, key_bias_tile(p_mask, p_bias, first + o_in, stride_mask, stride_bias, lk, HAS_MASK, HAS_BIAS)
            )
        top = tl.max(tl.max(b_top, 1), 0)
        shift = tl.where(tl.abs(top) < float("inf"), top, 0.0)

    wait_to_store(WAIT)
    begun = 0
    ended = 0
    # One tile past the last, which is dead, closes a run that reaches the end.
    for first in tl.range(0, padded + BLOCK_K, TILES * BLOCK_K):
        o_k = first + o_in
        b_key_bias = key_bias_tile(p_mask, p_bias, o_k, stride_mask, stride_bias, lk, HAS_MASK, HAS_BIAS)  # [tile,k]
        tl.store(p_out + o_k, (b_key_bias - shift) * factor, mask=o_k < padded)
        b_before = key_bias_tile(p_mask, p_bias, o_k - BLOCK_K, stride_mask, stride_bias, lk, HAS_MASK, HAS_BIAS)
        # NaN counts as live: it has to reach the output.
        b_live = tl.max((b_key_bias != float("-inf")).to(tl.int32), 1)  # [tile]
        b_lived = tl.max((b_before != float("-inf")).to(tl.int32), 1)
        b_begins = b_live * (1 - b_lived)
        b_ends = b_lived * (1 - b_live)
        o_begin = begun + tl.cumsum(b_begins, 0) - 1
        o_end = ended + tl.cumsum(b_ends, 0) - 1
        b_number = first // BLOCK_K + o_tile
        tl.store(p_runs + 1 + 2 * o_begin, b_number, mask=b_begins != 0)
        tl.store(p_runs + 2 + 2 * o_end, b_number, mask=b_ends != 0)
        begun += tl.sum(b_begins, 0)
        ended += tl.sum(b_ends, 0)
    tl.store(p_runs, begun)


@kernel
def row_spans_kernel(
    key_bias: RowView, spans: Pointer, n_rows: Number, tiles: Number, BLOCK_K: Constant, BLOCK_N: Constant, WAIT: Constant
) -> None:
    """One program owns one key tile of one b.

    It loops over the rows n, BLOCK_N at a time.
    It writes the first row that has a live key in the tile, and the last plus one.
    """
    wait_to_load(WAIT)
    pid = tl.program_id(0)
    o_in = tl.arange(0, BLOCK_N)
    p_tile = key_bias.p + (pid // tiles).to(tl.int64) * key_bias.b + (pid % tiles) * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    b_first = tl.full([BLOCK_N], 2147483647, tl.int32)
    b_end = tl.zeros([BLOCK_N], tl.int32)
    for first in tl.range(0, n_rows, BLOCK_N):
        o_n = first + o_in
        p_rows = p_tile + o_n.to(tl.int64)[:, None] * key_bias.n
        b_key_bias = tl.load(p_rows, mask=o_n[:, None] < n_rows, other=float("-inf"))  # [n,k]
        b_live = tl.max((b_key_bias != float("-inf")).to(tl.int32), 1) != 0  # [n]
        b_first = tl.where(b_live, tl.minimum(b_first, o_n), b_first)
        b_end = tl.where(b_live, o_n + 1, b_end)
    # A tile without a live row spans 0 to 0. From 2**31 - 1 to 0 a pipelined loop would count past 2**31 before its test.
    end = tl.max(b_end, 0)
    wait_to_store(WAIT)
    tl.store(spans + 2 * pid, tl.minimum(tl.min(b_first, 0), end))
    tl.store(spans + 2 * pid + 1, end)
