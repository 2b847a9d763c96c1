"""Backwards without a second derivative: they raise wherever one would be taken.

`torch.autograd.function.once_differentiable` raises only if a second derivative is taken of everything. If inputs are named, as
`torch.autograd.grad` and `torch.autograd.functional.hessian` do, the engine finds no path to them and returns zeros.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["once_differentiable"]

Backward = Callable[..., Any]


def once_differentiable(backward: Backward) -> Backward:
    """Decorate the `backward` of an autograd function whose gradients have no derivative.

    The gradients depend on all cotangents and saved tensors, as autograd sees it. Their derivative raises RuntimeError.
    """

    @functools.wraps(backward)
    def once(ctx: Any, *cotangents: Any) -> Any:
        if not torch.is_grad_enabled():
            return backward(ctx, *cotangents)
        with torch.no_grad():
            made = backward(ctx, *cotangents)
        sources = [x for x in (*cotangents, *ctx.saved_tensors) if isinstance(x, Tensor) and x.requires_grad]
        if not sources:
            return made
        gradients = made if isinstance(made, tuple) else (made,)
        kept = [x for x in gradients if x is not None]
        ended = iter(_End.apply(len(kept), *kept, *sources))  # type: ignore[no-untyped-call]
        gradients = tuple(None if x is None else next(ended) for x in gradients)
        return gradients if isinstance(made, tuple) else gradients[0]

    return once


class _End(torch.autograd.Function):
    """The first tensors of many, as a function of all of them that has no derivative."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for x in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> None:
        raise RuntimeError(
            "layers and drop-ins of evoattn have no second derivative: their backward recomputes what it needs. "
            "For double backward write the layer densely in torch."
        )
