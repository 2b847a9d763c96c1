"""Launches of the pair operators: tiles, and norms and biases that are None."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from evoattn.core.devices import constant
from evoattn.core.sizes import power_of_two
from evoattn.kit import cards
from evoattn.kit.arguments import StructuredKernel
from evoattn.kit.launch import launch_kernel


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


def plan_constants(tile: Tile, device: torch.device, dtype: torch.dtype, channels: int) -> dict[str, Any]:
    """The constants that all kernels have, for rows of so many channels. `dtype` is that of the products."""
    return {
        "C": channels,
        "BLOCK_R": tile.rows,
        "BLOCK_C": power_of_two(channels),
        "FAST": cards.capability(device) is not None,
        "PRECISION": cards.split_precision(dtype, channels),
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
