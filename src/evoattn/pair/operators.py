"""Operators of the pair block: schemas, fake functions and autograd.

An operator takes the input, the mask or None, the fields of `Weights` and those of `Options`. It returns the result, then the
tensors that its backward reads besides. The backward returns the gradients of the input and of all weights: one that is not
needed, or of a weight that is None, has no elements.
"""

from __future__ import annotations

import typing
from typing import Any

import torch
from torch import Tensor

from evoattn.core import guards
from evoattn.dispatch.autograd import once_differentiable
from evoattn.dispatch.operators import LIBRARY

__all__ = ["Operator"]


class Operator:
    """One operator of `torch.ops.evoattn`, and the same as an autograd function of Python.

    Args:
        name: of the operator.
        x: the name of its input.
        weights, options: the named tuples of its parameters and settings.
        steps: the module that has `forward`, `outline` (empty tensors like the results of `forward`) and `backward`.
        saved: names of the tensors that the backward reads besides.
        required: weights that are never None.
    """

    def __init__(
        self, name: str, x: str, weights: Any, options: Any, steps: Any, saved: tuple[str, ...] = (), required: Any = ()
    ) -> None:
        self.weights, self.options, self.steps = weights, options, steps
        self.saved, self.count = len(saved), len(weights._fields)
        kinds = typing.get_type_hints(options)
        tensors = ", ".join(f"Tensor{'' if field in required else '?'} {field}" for field in weights._fields)
        settings = ", ".join(f"{kinds[field].__name__} {field}" for field in options._fields)
        read = "".join(f"Tensor {field}, " for field in saved)
        results = f"({', '.join(['Tensor'] * (1 + len(saved)))})" if saved else "Tensor"
        LIBRARY.define(f"{name}(Tensor {x}, Tensor? mask, {tensors}, {settings}) -> {results}")
        LIBRARY.define(
            f"{name}_backward(Tensor do, Tensor {x}, Tensor? mask, {read}{tensors}, {settings}, bool needs_weights)"
            f" -> ({', '.join(['Tensor'] * (1 + self.count))})"
        )
        LIBRARY.impl(name, self._forward, "CompositeExplicitAutograd")
        LIBRARY.impl(f"{name}_backward", self._backward, "CompositeExplicitAutograd")
        torch.library.register_fake(f"evoattn::{name}", self._fake_forward, lib=LIBRARY)
        torch.library.register_fake(f"evoattn::{name}_backward", self._fake_backward, lib=LIBRARY)
        torch.library.register_autograd(f"evoattn::{name}", self._differentiate, setup_context=self._save, lib=LIBRARY)
        self.forward = getattr(torch.ops.evoattn, name).default
        self.backward = getattr(torch.ops.evoattn, f"{name}_backward").default

    def record(self, x: Tensor, mask: Tensor | None, weights: Any, options: Any) -> Tensor:
        """Compute the result, with gradients for x and the weights, without the dispatcher."""
        return _Recorded.apply(self, x, mask, options, *weights)  # type: ignore[no-untyped-call, no-any-return]

    def _forward(self, x: Tensor, mask: Tensor | None, *rest: Any) -> Any:
        return self.steps.forward(x, mask, self.weights(*rest[: self.count]), self.options(*rest[self.count :]))

    def _fake_forward(self, x: Tensor, mask: Tensor | None, *rest: Any) -> Any:
        return self.steps.outline(x, self.weights(*rest[: self.count]), self.options(*rest[self.count :]))

    def _backward(self, do: Tensor, x: Tensor, mask: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
        saved, weights = rest[: self.saved], self.weights(*rest[self.saved : self.saved + self.count])
        options = self.options(*rest[self.saved + self.count : -1])
        dx, grads = self.steps.backward(do.contiguous(), x, mask, *saved, weights, options, rest[-1])
        grads = grads or (None,) * self.count
        return dx, *[x.new_empty(0) if y is None else y.clone() for y in grads]  # the results of an operator share no memory

    def _fake_backward(self, do: Tensor, x: Tensor, mask: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
        weights, needs = rest[self.saved : self.saved + self.count], rest[-1]
        return torch.empty_like(x), *[torch.empty_like(y) if needs and y is not None else x.new_empty(0) for y in weights]

    def _save(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, mask, *rest = inputs
        ctx.save_for_backward(x, mask, *(output[1:] if self.saved else ()), *rest[: self.count])
        ctx.options = rest[self.count :]

    def _differentiate(self, ctx: Any, do: Tensor, *_: Tensor) -> tuple[Any, ...]:
        saved = ctx.saved_tensors  # read once: a checkpoint computes them at the first look
        needs = [x is not None and x.requires_grad for x in saved[-self.count :]]
        dx, *grads = self.backward(do, *saved, *ctx.options, any(needs))
        weights = [x if need else None for x, need in zip(grads, needs, strict=True)]
        return dx, None, *weights, *[None] * len(ctx.options)


class _Recorded(torch.autograd.Function):
    """The result of an operator's `forward`, with gradients for x and the weights."""

    @staticmethod
    def forward(ctx: Any, operator: Operator, x: Tensor, mask: Tensor | None, options: Any, *weights: Tensor | None) -> Tensor:
        results = operator.steps.forward(x, mask, operator.weights(*weights), options)
        result, *saved = results if operator.saved else (results,)
        ctx.save_for_backward(x, mask, *saved, *weights)
        ctx.operator, ctx.options = operator, options
        return result  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Any, ...]:
        operator, needs = ctx.operator, ctx.needs_input_grad[4:]
        saved = ctx.saved_tensors
        saved, weights = saved[: -operator.count], operator.weights(*saved[-operator.count :])
        if guards.is_plain([do]):
            dx, grads = operator.steps.backward(do.contiguous(), *saved, weights, ctx.options, any(needs))
        else:  # many cotangents at once, for instance
            dx, *grads = operator.backward(do, *saved, *weights, *ctx.options, any(needs))
        grads = grads or (None,) * operator.count
        return None, dx, None, None, *[x if need else None for x, need in zip(grads, needs, strict=True)]
