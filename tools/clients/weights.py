"""Random weights of modules, of sizes that keep activations near 1."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

__all__ = ["drawn_by", "fill"]

Module = TypeVar("Module", bound=nn.Module)


def drawn_by(generator: torch.Generator, dtype: torch.dtype | None = None) -> Callable[[Tensor], Tensor]:
    """Return a function of a parameter that draws standard normal numbers of its shape on the CPU, the same on each machine."""
    return lambda parameter: torch.randn(parameter.shape, generator=generator, dtype=dtype)


@torch.no_grad()
def fill(module: Module, normal: Callable[[Tensor], Tensor]) -> Module:
    """Give every parameter random numbers, also those that models start at 0, and return the module.

    Args:
        module: whose parameters are filled. Matrices keep sizes; vectors are near 1 (weights) or 0 (biases).
        normal: returns standard normal numbers of a parameter's shape.
    """
    for name, parameter in module.named_parameters():
        noise = normal(parameter)
        matrix = parameter.ndim > 1
        parameter.copy_(noise / parameter.shape[-1] ** 0.5 if matrix else 0.1 * noise + name.endswith("weight"))
    return module
