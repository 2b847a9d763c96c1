"""Layers of `evoattn.nn` beside the same in dense torch, with parameters and inputs."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.helpers.dense_layers import MaskedSoftmax

__all__ = ["Dense", "fill_far_from_zero", "leaves_of"]


def leaves_of(layer: nn.Module) -> list[Tensor]:
    """The parameters, but for the shift of the norm before a pair bias: one that is the same for all keys changes nothing."""
    return [x for name, x in layer.named_parameters() if name != "layer_norm_z.bias"]


def fill_far_from_zero(module: nn.Module, dtype: torch.dtype, seed: int = 1) -> None:
    """Draw the parameters: weights of norms near 1, products that keep the size of their input."""
    rng = torch.Generator().manual_seed(seed)
    for name, x in module.named_parameters():
        noise = torch.randn(x.shape, generator=rng, dtype=torch.float64)
        values = 0.3 * noise + name.endswith("weight") if x.ndim == 1 else noise / x.shape[-1] ** 0.5
        x.data = values.to(dtype)


@dataclasses.dataclass(frozen=True)
class Dense:
    """A layer, what it is called with, and the same in dense torch.

    Args:
        name: for the test's name.
        make: makes the layer.
        inputs: shapes of its inputs, which need gradients.
        mask: shape of its mask.
        dense: layer, inputs, mask and weights of rows -> the output.
        masked: what of the mask is 0 everywhere, for rows without a key.
    """

    name: str
    make: Callable[[], nn.Module]
    inputs: tuple[tuple[int, ...], ...]
    mask: tuple[int, ...]
    dense: Callable[..., Tensor]
    masked: tuple[Any, ...] = (0, 0)

    def layer(self, dtype: torch.dtype = torch.float64) -> nn.Module:
        """The layer with parameters that are far from 0."""
        module = self.make()
        fill_far_from_zero(module, dtype)
        return module

    def arguments(self, dtype: torch.dtype = torch.float64, empty: bool = True) -> tuple[list[Tensor], Tensor]:
        """Inputs and the mask, which may leave rows without a key."""
        rng = torch.Generator().manual_seed(2)
        inputs = [torch.randn(shape, generator=rng, dtype=torch.float64).to(dtype).requires_grad_() for shape in self.inputs]
        mask = (torch.rand(self.mask, generator=rng) > 0.3).to(torch.float32)
        mask[..., -1] = 1
        if empty:
            mask[self.masked] = 0
        return inputs, mask

    def reference(self, layer: nn.Module, dtype: torch.dtype, swallowed: bool) -> Callable[..., Tensor]:
        """The same layer in dense torch of a dtype, as a function of the same arguments; its parameters are `parameters`.

        swallowed: whether rows that are masked at every key weigh alike, as in float32.
        """
        same, weights = copy.deepcopy(layer).to(dtype), MaskedSoftmax("mean" if swallowed else "scores")

        def run(*inputs: Tensor, mask: Tensor) -> Tensor:
            return self.dense(same, *inputs, mask=mask, weights=weights)

        run.parameters = leaves_of(same)  # type: ignore[attr-defined]
        return run
