"""Transitions with random weights, and their float64 truth."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from evoattn.pair import transition
from evoattn.pair.checking import by_name
from evoattn.pair.transitions.call import reference
from evoattn.pair.values import TransitionOptions as Options
from evoattn.pair.values import TransitionWeights as Weights
from evoattn.testing import relative_error
from tests.pair import problems
from tests.pair.problems import differentiated, drawer

_FLOOR = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}


def weights(
    channels: int, hidden: int, *, gated: bool, bias: bool, dtype: torch.dtype = torch.float64, device: str = "cpu"
) -> Weights:
    """Weights of a norm near 1, and products that keep the size of their input. Without biases the norm is plain, too."""
    draw = drawer(dtype, device)
    tensors: Any = {
        "norm_weight": 1 + draw(channels),
        "norm_bias": draw(channels),
        "a_weight": draw(hidden, channels),
        "a_bias": draw(hidden),
        "b_weight": draw(hidden, channels),
        "b_bias": draw(hidden),
        "out_weight": draw(channels, hidden),
        "out_bias": draw(channels),
    }
    missing = {name for name in tensors if not bias and (name.endswith("bias") or "norm" in name)}
    missing |= set() if gated else {"b_weight", "b_bias"}
    return Weights(**{name: None if name in missing else x.requires_grad_() for name, x in tensors.items()})


def inputs(
    shape: tuple[int, ...], channels: int, dtype: torch.dtype = torch.float64, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor]:
    """x, a mask of 0 and 1, and a cotangent."""
    rng = torch.Generator().manual_seed(2)
    x, do = (torch.randn((*shape, channels), generator=rng, dtype=torch.float64).to(device, dtype) for _ in range(2))
    mask = (torch.rand(shape, generator=rng) > 0.2).to(device, torch.float32)
    return x.requires_grad_(), mask, do


def call(x: Tensor, mask: Tensor | None, parameters: Weights, options: Options) -> Tensor:
    """The public call."""
    activation = "relu" if parameters.b_weight is None else "swiglu"
    named: Any = by_name(parameters)
    return transition(x, mask, activation=activation, residual=options.residual, eps=options.eps, **named)


def dense(x: Tensor, mask: Tensor | None, w: Weights, options: Options) -> Tensor:
    """As the papers write it."""

    def product(y: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.einsum("...c,dc->...d", y, weight) + (0 if bias is None else bias)

    y = x - x.mean(-1, keepdim=True)
    y = y / (y.square().mean(-1, keepdim=True) + options.eps).sqrt()
    y = (y if w.norm_weight is None else y * w.norm_weight) + (0 if w.norm_bias is None else w.norm_bias)
    u = product(y, w.a_weight, w.a_bias)
    u = u.clamp(min=0) if w.b_weight is None else u * torch.sigmoid(u) * product(y, w.b_weight, w.b_bias)
    update = product(u, w.out_weight, w.out_bias)
    update = update if mask is None else update * mask[..., None]
    return x + update if options.residual else update


def truth(x: Tensor, mask: Tensor | None, parameters: Weights, options: Options, do: Tensor) -> list[Tensor]:
    """The same by dense torch in float64, from the very numbers that are given."""
    return problems.truth(x, mask, parameters, options, do, dense)


def is_close(actual: list[Tensor], x: Tensor, mask: Tensor | None, parameters: Weights, options: Options, do: Tensor) -> bool:
    """Whether the output and all gradients lose at most twice what plain torch of the dtype loses. All must be finite.

    Plain torch is the measure because ReLU is steep: where rounding moves a hidden number past 0, a gradient is wrong by 100%.
    """
    float64 = truth(x, mask, parameters, options, do)
    plain = differentiated(reference(x, mask, parameters, options), x, parameters, do)
    floor = _FLOOR[parameters.product_dtype()]
    errors = [(relative_error(y, right), relative_error(z, right)) for y, z, right in zip(actual, plain, float64, strict=True)]
    return all(y.isfinite().all() for y in actual) and all(fused <= 2 * max(expected, floor) for fused, expected in errors)
