"""The last step of the pair-bias gradient: float32 shares of it added up in a fixed order, and rounded."""

from __future__ import annotations

import math

import triton
import triton.language as tl

from evoattn.backends.triton.launch import Kernel, Launch, Strided
from evoattn.backends.triton.overlap import wait_to_load, wait_to_store
from evoattn.backends.triton.primitives import decode

__all__ = ["plan_total"]

_AT_ONCE = (1, 8, 16)
_TILE_Q = 16
_TILE_K = 64

_MOST_IN_SERIES = 64
"""Tiles that one program adds up, each of all splits: torch, which adds in parallel, does it for more."""


@Kernel
@triton.jit(
    do_not_specialize=[
        "stride_b", "stride_split", "stride_h", "stride_q", "splits", "each_b", "each_h", "each_q", "each_k",
        "heads", "size_q", "size_k", "blocks_q", "blocks_k",
    ]
)  # fmt: skip
def total_kernel(
    p_shares, p_result, stride_b, stride_split, stride_h, stride_q, splits, each_b, each_h, each_q, each_k,
    heads, size_q, size_k, blocks_q, blocks_k, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, AT_ONCE: tl.constexpr,
    WAIT: tl.constexpr,
):  # fmt: skip
    """One program owns a tile of the gradient of one (b, h) of the bias.

    It loops over the shares of the tile, in order: `splits` (AT_ONCE at most) of each of `each_b` batches, `each_h` heads and
    `each_q` by `each_k` tiles of the problem, which are 1 but along axes that the bias broadcasts.
    It writes their sum once, in the bias's dtype.
    """
    wait_to_load(WAIT)
    block_k, block_q, h, b = decode(tl.program_id(0), blocks_k, blocks_q, heads)
    o_q = (block_q * BLOCK_Q + tl.arange(0, BLOCK_Q)).to(tl.int64)
    o_k = block_k * BLOCK_K + tl.arange(0, BLOCK_K)
    inside = (o_q[:, None] < size_q) & (o_k[None, :] < size_k)
    p_shares += b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h
    step = tl.cast(stride_split, tl.int64)
    b_sum = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)  # [q,k]
    for x in range(each_b * each_h * each_q * each_k):
        k, q, of_h, of_b = decode(x, each_k, each_q, each_h)
        p_tile = p_shares + of_b.to(tl.int64) * stride_b + of_h.to(tl.int64) * stride_h + (o_q + q)[:, None] * stride_q
        p_tile += o_k[None, :] + k
        for split in tl.static_range(AT_ONCE):  # loads that are on their way together
            b_sum += tl.load(p_tile + split * step, mask=inside & (split < splits), other=0.0)
    wait_to_store(WAIT)
    p_result += ((b * heads + h).to(tl.int64) * size_q + o_q)[:, None] * size_k + o_k[None, :]
    tl.store(p_result, b_sum.to(p_result.dtype.element_ty), mask=inside)


def plan_total(shares: Strided, used: tuple[int, ...], result: Strided) -> Launch | None:
    """The launch of (shares, result) that adds up shares [b,splits,h,q,k] to the contiguous gradient [b|1,h|1,q|1,k|1].

    None where a bias that broadcasts has so many that a program would take long.

    used: the part of the shares that holds something; along axes of the result of size 1 all of it is added up.
    """
    b, heads, size_q, size_k = result.shape
    each = [size if axis == 1 else 1 for size, axis in zip((used[0], *used[2:]), result.shape, strict=True)]
    if math.prod(each) > _MOST_IN_SERIES:
        return None
    blocks_q, blocks_k = math.ceil(size_q / _TILE_Q), math.ceil(size_k / _TILE_K)
    stride_b, stride_split, stride_h, stride_q, _ = shares.stride
    sizes = (heads, size_q, size_k, blocks_q, blocks_k)
    return total_kernel.plan(
        blocks_q * blocks_k * heads * b,
        *(stride_b, stride_split, stride_h, stride_q),
        used[1],
        *each,
        *sizes,
        BLOCK_Q=_TILE_Q,
        BLOCK_K=_TILE_K,
        AT_ONCE=next(most for most in _AT_ONCE if used[1] <= most),
        num_warps=4,
    )
