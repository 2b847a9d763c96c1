"""Layers that wrappers surround, and the errors of their outputs and gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from evoattn.nn import AttentionPairBias, MSAColumnGlobalAttention, TriangleAttention
from evoattn.testing import relative_error

M, Z, MASK = (1, 5, 6, 16), (1, 6, 6, 16), (1, 6, 6)
LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[tuple[int, ...], ...]]] = {
    "starting node": (lambda: TriangleAttention(16, 8, 2), (Z, MASK)),
    "ending node": (lambda: TriangleAttention(16, 8, 2, starting=False), (Z, MASK)),
    "global columns": (lambda: MSAColumnGlobalAttention(16, 8, 2), (M, (1, 5, 6))),
    "condition": (lambda: AttentionPairBias(16, 8, 8, 2, 12), ((1, 5, 6, 16), (1, 1, 6, 6, 8), (1, 5, 6, 12), (1, 5, 6))),
}
"""How each layer is made, and the shapes of what it takes; the last is its mask."""


TOLERANCE = 1e-12

Leaves = Sequence[Tensor]
Call = Callable[..., Any]


def layer_of(name: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    layer = LAYERS[name][0]().double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.4)
    return layer


def example(name: str, seed: int = 1, dtype: torch.dtype = torch.float64, length: int = 6) -> tuple[list[Tensor], Tensor]:
    """What a layer takes, and a cotangent. One row of the mask has no key."""
    torch.manual_seed(seed)
    *shapes, of_mask = (tuple(length if size == 6 else size for size in shape) for shape in LAYERS[name][1])
    inputs = [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]
    mask = (torch.rand(of_mask) > 0.3).to(dtype)
    mask[..., -1, :] = 0
    return [*inputs, mask], torch.randn(shapes[0], dtype=dtype)


def step(call: Call, leaves: Leaves, inputs: list[Tensor], cotangent: Tensor) -> list[Tensor]:
    """Output, and gradients of the inputs and the leaves."""
    o = call(*inputs)
    return [o.detach(), *torch.autograd.grad(o, [*inputs[:-1], *leaves], cotangent)]


def worst(actual: Leaves, expected: Leaves) -> float:
    return max(relative_error(x, y) for x, y in zip(actual, expected, strict=True))
