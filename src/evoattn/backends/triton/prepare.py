"""What is made once a call and read by every kernel: the row bias with its live tiles, and rows of pair bias that load wide."""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor

from evoattn.backends.triton.launch import Kernel, Launch, Strided, contiguous, empty, strided, strides
from evoattn.backends.triton.overlap import wait_to_load, wait_to_store
from evoattn.backends.triton.primitives import natural

__all__ = [
    "PADDING",
    "RowBias",
    "copied",
    "loads_wide",
    "needs_copy",
    "plan_rows",
    "row_tile",
]

PADDING = 128
"""row_bias is padded with -inf to a multiple of this, the widest key tile, so that no kernel masks its loads."""

_LOG2E = 1.4426950408889634
_CHUNK = 512
_ALIGNMENT = 16
"""Elements that rows of a copied pair bias start on a multiple of."""

_ROWS_WORTH_A_COPY = 4
"""A copy moves each bias element twice; a kernel that cannot load it wide pays more than that on every row n."""


@dataclasses.dataclass(frozen=True)
class RowBias:
    """How mask and mask_bias of a call become what the kernels read. Call it with both tensors, or None, for bias and runs.

    Args:
        bias: float32 [b|1, n|1, padded], in log2 units over `unit`, measured from each row's largest entry, -inf where a key is
            off or past the end.
        runs: int32 [b|1, n|1, 1 + 2 * runs]: how many runs of live tiles, then (first tile, last tile + 1) of each.
            A tile of `block_k` keys is live when any of them is above -inf.
        strides: of bias and then of runs over b and n, 0 along a broadcast axis, in the order in which kernels take them.
        device: where both are made.
        launch: fills them.
    """

    bias: Strided
    runs: Strided
    strides: tuple[int, ...]
    device: torch.device
    launch: Launch

    def __call__(self, mask: Tensor | None, mask_bias: Tensor | None) -> tuple[Tensor, Tensor]:
        bias, runs = empty(self.bias, self.device), empty(self.runs, self.device)
        self.launch(bias if mask is None else mask, bias if mask_bias is None else mask_bias, bias, runs)
        return bias, runs


@triton.jit
def row_tile(p_mask, p_bias, o_k, stride_mask, stride_bias, lk, HAS_MASK: tl.constexpr, HAS_BIAS: tl.constexpr):
    """mask_bias where the mask allows, else -inf; -inf outside [0, lk). Natural units, not shifted."""
    inside = (o_k >= 0) & (o_k < lk)
    b_row = tl.where(inside, 0.0, float("-inf"))
    if HAS_BIAS:
        b_row += natural(tl.load(p_bias + o_k.to(tl.int64) * stride_bias, mask=inside, other=0.0))
    if HAS_MASK:
        b_mask = tl.load(p_mask + o_k.to(tl.int64) * stride_mask, mask=inside, other=0)
        b_row = tl.where(b_mask != 0, b_row, float("-inf"))
    return b_row


@Kernel
@triton.jit(
    do_not_specialize=[
        "stride_mask_b",
        "stride_mask_n",
        "stride_mask",
        "stride_bias_b",
        "stride_bias_n",
        "stride_bias",
        "n_rows",
        "lk",
        "padded",
        "runs_width",
    ]
)
def rows_kernel(
    p_mask,
    p_bias,
    p_out,
    p_runs,
    stride_mask_b,
    stride_mask_n,
    stride_mask,
    stride_bias_b,
    stride_bias_n,
    stride_bias,
    n_rows,
    lk,
    padded,
    runs_width,
    factor,
    HAS_MASK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TILES: tl.constexpr,
    WAIT: tl.constexpr,
):
    """One program owns one row (b, n) of keys.

    It loops over chunks of keys twice: for the largest entry (only with a mask_bias), then to write.
    It writes the row bias once, padding included, and the runs of live tiles as it meets their two ends.
    """
    wait_to_load(WAIT)
    pid = tl.program_id(0)
    b = (pid // n_rows).to(tl.int64)
    n = (pid % n_rows).to(tl.int64)
    p_mask += b * stride_mask_b + n * stride_mask_n
    p_bias += b * stride_bias_b + n * stride_bias_n
    p_out += pid.to(tl.int64) * padded
    p_runs += pid.to(tl.int64) * runs_width
    o_tile = tl.arange(0, TILES)
    o_in = o_tile[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]  # [tile,k]

    shift = 0.0
    if HAS_BIAS:
        b_top = tl.full([TILES, BLOCK_K], float("-inf"), tl.float32)  # [tile,k]
        for first in tl.range(0, lk, TILES * BLOCK_K):
            b_top = tl.maximum(b_top, row_tile(p_mask, p_bias, first + o_in, stride_mask, stride_bias, lk, HAS_MASK, HAS_BIAS))
        top = tl.max(tl.max(b_top, 1), 0)
        shift = tl.where(tl.abs(top) < float("inf"), top, 0.0)

    wait_to_store(WAIT)
    begun = 0
    ended = 0
    # One tile past the last, which is dead, closes a run that reaches the end.
    for first in tl.range(0, padded + BLOCK_K, TILES * BLOCK_K):
        o_k = first + o_in
        b_row = row_tile(p_mask, p_bias, o_k, stride_mask, stride_bias, lk, HAS_MASK, HAS_BIAS)  # [tile,k]
        tl.store(p_out + o_k, (b_row - shift) * factor, mask=o_k < padded)
        b_before = row_tile(p_mask, p_bias, o_k - BLOCK_K, stride_mask, stride_bias, lk, HAS_MASK, HAS_BIAS)
        # NaN counts as live: it has to reach the output.
        b_live = tl.max((b_row != float("-inf")).to(tl.int32), 1)  # [tile]
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


def plan_rows(
    mask: Tensor | None, mask_bias: Tensor | None, lk: int, device: torch.device, block_k: int, unit: float = 1.0
) -> RowBias:
    """Join mask and mask_bias, both [b|1,n|1,k] with any strides; without either, what is -inf past the last of lk keys.

    Args:
        mask: True = attend.
        mask_bias: additive, any float dtype.
        lk: keys.
        device: where the kernels run.
        block_k: keys of a tile, for the runs of live tiles.
        unit: what the bias is divided by, in log2 units: the unit of scores that a kernel's accumulator holds.
    """
    b, n = (max([1, *(x.shape[axis] for x in (mask, mask_bias) if x is not None)]) for axis in (0, 1))
    padded = -(-lk // PADDING) * PADDING
    bias = contiguous((b, n, padded), torch.float32)
    runs = contiguous((b, n, 1 + 2 * (padded // block_k // 2 + 1)), torch.int32)
    launch = rows_kernel.plan(
        b * n,
        *strides(None if mask is None else strided(mask), 3),
        *strides(None if mask_bias is None else strided(mask_bias), 3),
        n,
        lk,
        padded,
        runs.shape[2],
        _LOG2E / unit,
        HAS_MASK=mask is not None,
        HAS_BIAS=mask_bias is not None,
        BLOCK_K=block_k,
        TILES=_CHUNK // block_k,
    )
    return RowBias(bias, runs, strides(bias, 3)[:2] + strides(runs, 3)[:2], device, launch)


COPIED = "pair_bias: its rows are not 16-byte aligned with stride 1, so it is laid out anew once a call"
"""Why a pair bias is copied, as `explain` says it."""


def needs_copy(pair_bias: Strided, n: int) -> bool:
    """Whether copying a pair bias first is cheaper than loading it as it lies.

    An odd length or a permuted bias would be loaded element by element, on every row n.
    """
    return n >= _ROWS_WORTH_A_COPY and pair_bias.shape[-1] > 1 and not loads_wide(pair_bias)


def copied(pair_bias: Strided) -> Strided:
    """The same values, with rows that start on multiples of 16 elements and run with stride 1."""
    _, h, lq, lk = pair_bias.shape
    room = -(-lk // _ALIGNMENT) * _ALIGNMENT
    return Strided(pair_bias.shape, (h * lq * room, lq * room, room, 1), pair_bias.dtype)


def loads_wide(pair_bias: Strided) -> bool:
    """Whether rows of pair_bias start 16-byte aligned and run with stride 1."""
    per_load = 16 // pair_bias.dtype.itemsize
    *outer, inner = pair_bias.stride
    aligned = all(step % per_load == 0 for step, size in zip(outer, pair_bias.shape[:-1], strict=True) if size > 1)
    return inner == 1 and aligned and pair_bias.aligned
