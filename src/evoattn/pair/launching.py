"""What the launches of the pair operators share: tiles, and norms and biases that are not given."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from evoattn.core.devices import constant
from evoattn.core.sizes import power_of_two

__all__ = ["Tile", "affine", "narrowed", "shift"]


class Tile(NamedTuple):
    """Rows of a program, channels of a step of its loop, and what the kernel is compiled with."""

    rows: int
    channels: int
    warps: int
    stages: int


@functools.cache
def narrowed(tile: Tile, channels: int, dtype: torch.dtype) -> Tile:
    """A tile that suits 128 channels in 16 bits, or a smaller one if a row takes more registers."""
    wider = max(1, power_of_two(channels) // 128) * (dtype.itemsize // 2)
    return Tile(max(16, tile.rows // wider), max(16, tile.channels // wider), tile.warps, tile.stages if wider == 1 else 1)


def affine(weight: Tensor | None, bias: Tensor | None, z: Tensor, channels: int) -> tuple[Tensor, Tensor]:
    """Weight and bias of a norm: 1 and 0 for those that are None."""
    ones = constant(1.0, (channels,), torch.float32, z.device) if weight is None else weight
    return ones, shift(bias, z, channels)


def shift(bias: Tensor | None, z: Tensor, channels: int) -> Tensor:
    """A bias: 0 for None."""
    return constant(0.0, (channels,), torch.float32, z.device) if bias is None else bias
