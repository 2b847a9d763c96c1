"""The operators of triangle multiplication: schemas, fake functions and autograd for calls that torch has to see."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from evoattn.pair.multiplication import autograd
from evoattn.pair.multiplication.values import Options, Weights
from evoattn.run.operators import LIBRARY

__all__ = ["backward", "forward"]

_WEIGHTS = ", ".join(f"Tensor? {name}" for name in Weights._fields)
_OPTIONS = "bool outgoing, float eps, bool residual"
LIBRARY.define(f"triangle_multiplication(Tensor z, Tensor? mask, {_WEIGHTS}, {_OPTIONS}) -> (Tensor, Tensor, Tensor)")
LIBRARY.define(
    f"triangle_multiplication_backward(Tensor do, Tensor z, Tensor? mask, Tensor ab, Tensor t, {_WEIGHTS}, {_OPTIONS},"
    f" bool needs_weights) -> ({', '.join(['Tensor'] * (1 + len(Weights._fields)))})"
)

forward = torch.ops.evoattn.triangle_multiplication.default
"""(z `[B, L, L, C]`, mask `[B, L, L]` or None, the fields of Weights, those of Options) -> (result, halves, product)."""

backward = torch.ops.evoattn.triangle_multiplication_backward.default
"""The gradients of z and of all weights. One that is not wanted, or of a weight that is None, has no elements."""

_COUNT = len(Weights._fields)


def _forward(z: Tensor, mask: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    return autograd.forward(z, mask, Weights(*rest[:_COUNT]), Options(*rest[_COUNT:]))  # type: ignore[return-value]


def _backward(do: Tensor, z: Tensor, mask: Tensor | None, ab: Tensor, t: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    weights, options, needs_weights = Weights(*rest[:_COUNT]), Options(*rest[_COUNT:-1]), rest[-1]
    dz, found = autograd.backward(do.contiguous(), z, mask, ab, t, weights, options, needs_weights)
    if found is None:
        found = Weights(*[None] * _COUNT)  # type: ignore[arg-type]
    return dz, *[z.new_empty(0) if x is None else x.clone() for x in found]  # the results of an operator share no memory


def _fake_forward(z: Tensor, mask: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    return autograd.outline(z, Weights(*rest[:_COUNT]), Options(*rest[_COUNT:]))


def _fake_backward(do: Tensor, z: Tensor, mask: Tensor | None, ab: Tensor, t: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    weights, needs_weights = rest[:_COUNT], rest[-1]
    return torch.empty_like(z), *[torch.empty_like(x) if needs_weights and x is not None else z.new_empty(0) for x in weights]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    z, mask, *rest = inputs
    ctx.save_for_backward(z, mask, *output[1:], *rest[:_COUNT])
    ctx.options = rest[_COUNT:]


def _differentiate(ctx: Any, do: Tensor, *_: Tensor) -> tuple[Any, ...]:
    z, mask, ab, t, *weights = ctx.saved_tensors
    needs = [x is not None and x.requires_grad for x in weights]
    dz, *found = backward(do, z, mask, ab, t, *weights, *ctx.options, any(needs))
    return dz, None, *[x if need else None for x, need in zip(found, needs, strict=True)], None, None, None


LIBRARY.impl("triangle_multiplication", _forward, "CompositeExplicitAutograd")
LIBRARY.impl("triangle_multiplication_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("evoattn::triangle_multiplication", _fake_forward, lib=LIBRARY)
torch.library.register_fake("evoattn::triangle_multiplication_backward", _fake_backward, lib=LIBRARY)
torch.library.register_autograd("evoattn::triangle_multiplication", _differentiate, setup_context=_save, lib=LIBRARY)
