"""Launches of the pair operators: tiles, and norms and biases that are None."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from evoattn.backends.triton import cards
from evoattn.backends.triton.cards import split_precision
from evoattn.backends.triton.launch import Kernel, launch_kernel
from evoattn.core.devices import constant
from evoattn.core.sizes import power_of_two


class Tile(NamedTuple):
    """Rows of a program, channels of a step of its loop, and what the kernel is compiled with."""

    rows: int
    channels: int
    warps: int
    stages: int


def start(
    kernel: Kernel,
    tile: Tile,
    tensors: tuple[Tensor, ...],
    dtype: torch.dtype,
    *numbers: float,
    channels: int,
    **constants: Any,
) -> None:
    """Launch a kernel over all rows of so many channels: `numbers[0]` of them. `dtype` is that of the products."""
    constants |= {"C": channels, "BLOCK_R": tile.rows, "BLOCK_C": power_of_two(channels)}
    constants |= {"FAST": cards.capability(tensors[0].device) is not None, "PRECISION": split_precision(dtype, channels)}
    constants |= {"num_warps": tile.warps, "num_stages": tile.stages}
    launch_kernel(kernel, -(-int(numbers[0]) // tile.rows), tensors, *numbers, **constants)


def affine(weight: Tensor | None, bias: Tensor | None, z: Tensor, channels: int) -> tuple[Tensor, Tensor]:
    """Weight and bias of a norm: 1 and 0 for those that are None."""
    ones = constant(1.0, (channels,), torch.float32, z.device) if weight is None else weight
    return ones, shift(bias, z, channels)


def shift(bias: Tensor | None, z: Tensor, channels: int) -> Tensor:
    """A bias: 0 for None."""
    return constant(0.0, (channels,), torch.float32, z.device) if bias is None else bias
