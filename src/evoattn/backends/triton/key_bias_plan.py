"""The key bias of a call: memory for it, and the launches that fill it and find the rows that are live."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from evoattn.backends.triton.kernels.key_bias import key_bias_kernel, row_spans_kernel
from evoattn.core.numerics import LOG2E
from evoattn.kit.arguments import RowView, row_view
from evoattn.kit.cards import folds
from evoattn.kit.launch import Launch
from evoattn.kit.strides import Strided, contiguous, empty, strided, strides

PADDING = 128
"""The key bias is padded with -inf to a multiple of this, the widest key tile, so that no kernel masks its loads."""

_KEYS_AT_ONCE = 512
_ROWS_AT_ONCE = 256
_WARPS_AT_ONCE = 16


@dataclasses.dataclass(frozen=True)
class KeyBias:
    """A mask and a mask bias in one.

    Args:
        bias: float32 [b|1, n|1, padded], in log2 units over `unit`, measured from each row's largest entry, -inf for keys that
            are off or past the end.
        runs: int32 [b|1, n|1, 1 + 2 * runs]: how many runs of live tiles, then (first tile, last tile + 1) of each.
            A tile of `block_k` keys is live when any of them is above -inf.
        device: of both.
        launch: of (mask, mask_bias, bias, runs). It fills the last two.
    """

    bias: Strided
    runs: Strided
    device: torch.device
    launch: Launch

    def allocate(self) -> tuple[Tensor, Tensor]:
        """Memory for the bias and the runs."""
        return empty(self.bias, self.device), empty(self.runs, self.device)


def key_bias_views(key_bias: KeyBias | None, grain: int = 1) -> dict[str, RowView]:
    """Views of the bias, with strides in units of a grain, and of its runs."""
    bias, runs = (None, None) if key_bias is None else (key_bias.bias, key_bias.runs)
    return {"key_bias": row_view(bias, grain), "runs": row_view(runs)}


def plan_key_bias(
    mask: Tensor | None, mask_bias: Tensor | None, lk: int, device: torch.device, block_k: int, scale: float
) -> KeyBias:
    """Join mask and mask_bias, both [b|1,n|1,k] with any strides; without either, what is -inf past the last of lk keys.

    `block_k` keys are a tile, for the runs of live tiles. If the scale can be folded (`cards.folds`), the bias is divided by
    it.
    """
    b, n = (max([1, *(x.shape[axis] for x in (mask, mask_bias) if x is not None)]) for axis in (0, 1))
    padded = -(-lk // PADDING) * PADDING
    bias = contiguous((b, n, padded), torch.float32)
    runs = contiguous((b, n, 1 + 2 * (padded // block_k // 2 + 1)), torch.int32)
    mask_strides, bias_strides = (None if x is None else strided(x) for x in (mask, mask_bias))
    launch = key_bias_kernel.plan(
        b * n,
        mask=row_view(mask_strides),
        mask_bias=row_view(bias_strides),
        stride_mask=strides(mask_strides, 3)[2],
        stride_bias=strides(bias_strides, 3)[2],
        n_rows=n,
        lk=lk,
        padded=padded,
        runs_width=runs.shape[2],
        factor=LOG2E / (scale * LOG2E if folds(scale) else 1.0),
        HAS_MASK=mask is not None,
        HAS_BIAS=mask_bias is not None,
        BLOCK_K=block_k,
        TILES=_KEYS_AT_ONCE // block_k,
    )
    return KeyBias(bias, runs, device, launch)


class RowSpans(NamedTuple):
    """For each key tile the first row n with a live key in it, and the last plus one: int32 `[b, tiles, 2]`.

    The launch of (key bias, spans) fills it.
    """

    tensor: Strided
    launch: Launch


def plan_row_spans(key_bias: KeyBias, b: int, n: int, block_k: int) -> RowSpans:
    """Plan the rows n that are live, for tiles of `block_k` keys."""
    tiles = key_bias.bias.shape[-1] // block_k
    sizes = {"n_rows": n, "tiles": tiles, "BLOCK_K": block_k, "BLOCK_N": _ROWS_AT_ONCE}
    fill = row_spans_kernel.plan(b * tiles, key_bias=row_view(key_bias.bias), **sizes, num_warps=_WARPS_AT_ONCE)
    return RowSpans(contiguous((b, tiles, 2), torch.int32), fill)
