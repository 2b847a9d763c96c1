"""Random weights for a whole model, the same on each machine."""

from __future__ import annotations

import torch

__all__ = ["fill"]


@torch.no_grad()
def fill(model: torch.nn.Module) -> None:
    """Fill all parameters, those that models start at 0 too, with sizes that keep activations near 1."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim > 1:
            parameter.copy_(noise * parameter.shape[-1] ** -0.5)
        else:
            parameter.copy_(0.1 * noise + (1 if name.endswith("weight") else 0))  # a norm's weight is near 1
