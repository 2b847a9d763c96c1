"""Triangle multiplications with random weights, and their float64 truth."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from evoattn.pair import triangle_multiplication
from evoattn.pair.checking import by_name
from evoattn.pair.operators import Operator
from evoattn.pair.values import MultiplicationOptions as Options
from evoattn.pair.values import MultiplicationWeights as Weights
from evoattn.testing import relative_error


def drawer(dtype: torch.dtype, device: str) -> Callable[..., Tensor]:
    """A function that draws a weight of a shape: a product that keeps the size of its input, or a vector near 0."""
    rng = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        drawn = torch.randn(shape, generator=rng, dtype=torch.float64)
        return (drawn / shape[-1] ** 0.5 if len(shape) == 2 else 0.3 * drawn).to(device, dtype)

    return draw


def weights(channels: int, hidden: int, *, bias: bool, dtype: torch.dtype = torch.float64, device: str = "cpu") -> Weights:
    """Weights of norms near 1, and products that keep the size of their input. Without biases the norms are plain, too."""
    draw = drawer(dtype, device)
    tensors: Any = {
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
        tensors |= {name: None for name in tensors if name.endswith("bias") or "norm" in name}
    return Weights(**{name: None if x is None else x.requires_grad_() for name, x in tensors.items()})


def inputs(
    lead: tuple[int, ...], length: int, channels: int, dtype: torch.dtype = torch.float64, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor]:
    """z, a mask of 0 and 1, and a cotangent."""
    rng = torch.Generator().manual_seed(2)
    shape = (*lead, length, length, channels)
    z, do = (torch.randn(shape, generator=rng, dtype=torch.float64).to(device, dtype) for _ in range(2))
    mask = (torch.rand(shape[:-1], generator=rng) > 0.2).to(device, torch.float32)
    return z.requires_grad_(), mask, do


def call(z: Tensor, mask: Tensor | None, parameters: Weights, options: Options) -> Tensor:
    """The public call."""
    direction = "outgoing" if options.outgoing else "incoming"
    named: Any = by_name(parameters)
    return triangle_multiplication(z, mask, direction=direction, residual=options.residual, eps=options.eps, **named)


def differentiated(out: Tensor, z: Tensor, parameters: Any, do: Tensor) -> list[Tensor]:
    """The output, and the gradients of z and of all weights."""
    leaves = [z, *[x for x in parameters if x is not None]]
    return [out, *torch.autograd.grad(out, leaves, do.to(out.dtype))]


def dense(z: Tensor, mask: Tensor | None, w: Weights, options: Options) -> Tensor:
    """As the paper writes it, one half after the other."""

    def norm(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        x = x - x.mean(-1, keepdim=True)
        x = x / (x.square().mean(-1, keepdim=True) + options.eps).sqrt()
        return (x if weight is None else x * weight) + (0 if bias is None else bias)

    def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.einsum("...c,dc->...d", x, weight) + (0 if bias is None else bias)

    y = norm(z, w.norm_in_weight, w.norm_in_bias)
    ab = product(y, w.p_in_weight, w.p_in_bias) / (1 + torch.exp(-product(y, w.g_in_weight, w.g_in_bias)))
    ab = ab if mask is None else ab * mask[..., None]
    a, b = ab.split(ab.shape[-1] // 2, -1)
    t = torch.einsum("...ikd,...jkd->...ijd" if options.outgoing else "...kid,...kjd->...ijd", a, b)
    n = product(norm(t, w.norm_out_weight, w.norm_out_bias), w.p_out_weight, w.p_out_bias)
    update = n / (1 + torch.exp(-product(y, w.g_out_weight, w.g_out_bias)))
    return z + update if options.residual else update


def worst(actual: list[Tensor], expected: list[Tensor]) -> float:
    """The largest relative error; all must be finite."""
    assert all(x.isfinite().all() for x in actual)
    return max(relative_error(x, y) for x, y in zip(actual, expected, strict=True))


def truth(
    x: Tensor, mask: Tensor | None, parameters: Any, options: Any, do: Tensor, dense: Callable[..., Tensor] = dense
) -> list[Tensor]:
    """The same by dense torch in float64, from the very numbers that are given."""
    x = x.detach().double().requires_grad_()
    expected = type(parameters)(*[None if y is None else y.detach().double().requires_grad_() for y in parameters])
    return differentiated(dense(x, None if mask is None else mask.double(), expected, options), x, expected, do)


def watch_steps(monkeypatch: pytest.MonkeyPatch, steps: ModuleType, *names: str) -> list[str]:
    """Let kernels take tensors of the CPU, and return the list of those steps that run."""
    ran: list[str] = []

    def watched(name: str) -> Callable[..., Any]:
        step = getattr(steps, name)

        def run(*arguments: Any, **named: Any) -> Any:
            ran.append(name)
            return step(*arguments, **named)

        return run

    for name in names:
        monkeypatch.setattr(steps, name, watched(name))
    monkeypatch.setattr(Operator, "has_kernels", lambda *_: True)
    return ran
