"""Triangle multiplications with random weights, and their float64 truth."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from evoattn.pair.multiplication import reference
from evoattn.pair.values import Options, Weights

__all__ = ["differentiated", "inputs", "truth", "weights"]


def weights(channels: int, hidden: int, *, bias: bool, dtype: torch.dtype = torch.float64, device: str = "cpu") -> Weights:
    """Weights of norms near 1, and products that keep the size of their input. Without biases the norms are plain, too."""
    rng = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        drawn = torch.randn(shape, generator=rng, dtype=torch.float64)
        return (drawn / shape[-1] ** 0.5 if len(shape) == 2 else 0.3 * drawn).to(device, dtype)

    made: Any = {
        "norm_in_weight": 1 + draw(channels),
        "norm_in_bias": draw(channels),
        "p_in_weight": draw(2 * hidden, channels),
        "p_in_bias": draw(2 * hidden),
        "g_in_weight": draw(2 * hidden, channels),
        "g_in_bias": draw(2 * hidden),
        "norm_out_weight": 1 + draw(hidden),
        "norm_out_bias": draw(hidden),
        "p_out_weight": draw(channels, hidden),
        "p_out_bias": draw(channels),
        "g_out_weight": draw(channels, channels),
        "g_out_bias": draw(channels),
    }
    if not bias:
        made |= {name: None for name in made if name.endswith("bias") or "norm" in name}
    return Weights(**{name: None if x is None else x.requires_grad_() for name, x in made.items()})


def inputs(
    lead: tuple[int, ...], length: int, channels: int, dtype: torch.dtype = torch.float64, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor]:
    """z, a mask of 0 and 1, and a cotangent."""
    rng = torch.Generator().manual_seed(2)
    shape = (*lead, length, length, channels)
    z, do = (torch.randn(shape, generator=rng, dtype=torch.float64).to(device, dtype) for _ in range(2))
    mask = (torch.rand(shape[:-1], generator=rng) > 0.2).to(device, torch.float32)
    return z.requires_grad_(), mask, do


def differentiated(out: Tensor, z: Tensor, given: Weights, do: Tensor) -> list[Tensor]:
    """The output, and the gradients of z and of all weights."""
    leaves = [z, *[x for x in given if x is not None]]
    return [out, *torch.autograd.grad(out, leaves, do.to(out.dtype))]


def truth(z: Tensor, mask: Tensor | None, given: Weights, options: Options, do: Tensor) -> list[Tensor]:
    """The same by dense torch in float64, from the very numbers that are given."""
    z = z.detach().double().requires_grad_()
    wide: Any = [None if x is None else x.detach().double().requires_grad_() for x in given]
    out = reference(z, None if mask is None else mask.double(), Weights(*wide), options)
    return differentiated(out, z, Weights(*wide), do)
