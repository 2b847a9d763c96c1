"""The operators of the transition: schemas, fake functions and autograd for calls that torch has to see."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from evoattn.pair.transitions import autograd
from evoattn.pair.transitions.values import Options, Weights
from evoattn.run.operators import LIBRARY

__all__ = ["backward", "forward"]

_REQUIRED = ("a_weight", "out_weight")
_WEIGHTS = ", ".join(f"Tensor{'' if name in _REQUIRED else '?'} {name}" for name in Weights._fields)
_OPTIONS = "float eps, bool residual"
LIBRARY.define(f"transition(Tensor x, Tensor? mask, {_WEIGHTS}, {_OPTIONS}) -> Tensor")
LIBRARY.define(
    f"transition_backward(Tensor do, Tensor x, Tensor? mask, {_WEIGHTS}, {_OPTIONS}, bool needs_weights)"
    f" -> ({', '.join(['Tensor'] * (1 + len(Weights._fields)))})"
)

forward = torch.ops.evoattn.transition.default
"""(x `[R, C]`, mask `[R]` or None, the fields of Weights, those of Options) -> the result."""

backward = torch.ops.evoattn.transition_backward.default
"""The gradients of x and of all weights. One that is not wanted, or of a weight that is None, has no elements."""

_COUNT = len(Weights._fields)


def _forward(x: Tensor, mask: Tensor | None, *rest: Any) -> Tensor:
    return autograd.forward(x, mask, Weights(*rest[:_COUNT]), Options(*rest[_COUNT:]))


def _backward(do: Tensor, x: Tensor, mask: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    weights, options, needs_weights = Weights(*rest[:_COUNT]), Options(*rest[_COUNT:-1]), rest[-1]
    dx, found = autograd.backward(do.contiguous(), x, mask, weights, options, needs_weights)
    if found is None:
        found = Weights(*[None] * _COUNT)  # type: ignore[arg-type]
    return dx, *[x.new_empty(0) if y is None else y.clone() for y in found]  # the results of an operator share no memory


def _fake_forward(x: Tensor, mask: Tensor | None, *rest: Any) -> Tensor:
    return autograd.outline(x, Weights(*rest[:_COUNT]), Options(*rest[_COUNT:]))


def _fake_backward(do: Tensor, x: Tensor, mask: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    weights, needs_weights = rest[:_COUNT], rest[-1]
    return torch.empty_like(x), *[torch.empty_like(y) if needs_weights and y is not None else x.new_empty(0) for y in weights]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, mask, *rest = inputs
    ctx.save_for_backward(x, mask, *rest[:_COUNT])
    ctx.options = rest[_COUNT:]


def _differentiate(ctx: Any, do: Tensor) -> tuple[Any, ...]:
    x, mask, *weights = ctx.saved_tensors
    needs = [y is not None and y.requires_grad for y in weights]
    dx, *found = backward(do, x, mask, *weights, *ctx.options, any(needs))
    return dx, None, *[y if need else None for y, need in zip(found, needs, strict=True)], None, None


LIBRARY.impl("transition", _forward, "CompositeExplicitAutograd")
LIBRARY.impl("transition_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("evoattn::transition", _fake_forward, lib=LIBRARY)
torch.library.register_fake("evoattn::transition_backward", _fake_backward, lib=LIBRARY)
torch.library.register_autograd("evoattn::transition", _differentiate, setup_context=_save, lib=LIBRARY)
