"""Launches of the pair operators: tiles, and norms and biases that are None."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from evoattn.core.devices import constant
from evoattn.core.sizes import power_of_two
from evoattn.kit import cards
from evoattn.kit.arguments import StructuredKernel
from evoattn.kit.halves import PRECISION
from evoattn.kit.launch import launch_kernel
from evoattn.pair.checking import Weights
from evoattn.pair.products.steps import packed


class Tile(NamedTuple):
    """The tile of a kernel.

    Args:
        rows: of x or z that one program owns.
        channels: of a weight that a step of the program's loop takes; 0 if it has no loop.
        warps, stages: `num_warps` and `num_stages` of Triton.
    """

    rows: int
    channels: int
    warps: int
    stages: int


FEWEST_ROWS = 2048
"""Rows from which float32 products are worth the launches that split their weights."""


def takes_halves(x: Tensor, dtype: torch.dtype) -> bool:
    """Return whether float32 products of the rows of x are three of float16: in place of three of TF32, if there are many."""
    channels = x.shape[-1]
    return cards.split_precision(dtype, channels) == "tf32x3" and x.numel() >= FEWEST_ROWS * channels


def split_products(weights: Weights) -> Weights:
    """The weights, with those of products split: see `packed`."""
    changed = {name: packed(y) for name, y in zip(type(weights)._fields, weights, strict=True) if y is not None and y.ndim == 2}
    return weights._replace(**changed)  # type: ignore[no-any-return]


def plan_constants(
    tile: Tile, device: torch.device, dtype: torch.dtype, channels: int, *, halves: bool = False
) -> dict[str, Any]:
    """The constants that all kernels have, for rows of so many channels. `dtype` is that of the products.

    halves: whether the weights of the products are split.
    """
    return {
        "C": channels,
        "BLOCK_R": tile.rows,
        "BLOCK_C": power_of_two(channels),
        "FAST": cards.capability(device) is not None,
        "PRECISION": PRECISION if halves else cards.split_precision(dtype, channels),
    }


def launch_rows(kernel: StructuredKernel, tile: Tile, count: int, tensors: tuple[Tensor, ...], **values: Any) -> None:
    """Launch a kernel over so many rows. `values` are its other arguments."""
    launch_kernel(kernel, -(-count // tile.rows), tensors, **values, num_warps=tile.warps, num_stages=tile.stages)


def norm_parameters(weight: Tensor | None, bias: Tensor | None, z: Tensor, channels: int) -> tuple[Tensor, Tensor]:
    """The weight and the bias of a norm: ones and zeros for those that are None."""
    ones = constant(1.0, (channels,), torch.float32, z.device) if weight is None else weight
    return ones, or_zeros(bias, z, channels)


def or_zeros(bias: Tensor | None, z: Tensor, channels: int) -> Tensor:
    """The bias, or zeros if it is None."""
    return constant(0.0, (channels,), torch.float32, z.device) if bias is None else bias
