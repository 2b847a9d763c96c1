"""Operators of the pair block: schemas, fake functions, autograd, and the way that a call takes.

An operator of torch takes the input, the mask or None, the weights and the options. It returns the result, then the tensors
that its backward reads besides. The backward returns the gradients of the input and of all weights: one that is not needed, or
of a weight that is None, has no elements.
"""

from __future__ import annotations

import typing
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from evoattn.core import guards
from evoattn.core.devices import uncast
from evoattn.dispatch.autograd import OF_A_BACKWARD, no_second_derivative, once_differentiable
from evoattn.dispatch.checks import check_no_tangent
from evoattn.dispatch.distributed import Split
from evoattn.dispatch.operators import LIBRARY
from evoattn.pair.checking import check_out, is_recorded, result_dtype, writable_out

Takes = TypeVar("Takes", bound=Callable[..., bool])


def decided_once(function: Takes) -> Takes:
    """Let torch.compile call a function while it traces, and take what it returns for a constant.

    `torch.compiler.assume_constant_result` does the same, and imports torch's compiler.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


class Operator:
    """One operator of `torch.ops.evoattn`, and the same as an autograd function of Python.

    Args:
        name: of the operator.
        x: the name of its input.
        weights, options: the named tuples of its parameters and settings.
        steps: returns the module of its kernels, which has `forward` and `backward`. It needs Triton.
        takes: returns whether kernels on a GPU take so many channels and hidden channels in a dtype of the products.
        last: the weight `[C, H]` that tells both. It is never None.
        outline: returns empty tensors like the results of `forward`, from x, weights and options.
        reference: the same in plain torch. It takes x, the mask, weights, options and a split, which may be None.
        axes: how many axes of x the kernels take, besides one for all leading axes.
        saved: names of the tensors that the backward reads besides.
        required: weights that are never None.
    """

    def __init__(
        self,
        name: str,
        x: str,
        weights: Any,
        options: Any,
        *,
        steps: Callable[[], Any],
        takes: Callable[[torch.device, torch.dtype, int, int], bool],
        last: str,
        outline: Callable[..., tuple[Tensor, ...]],
        reference: Callable[..., Tensor],
        axes: int,
        saved: tuple[str, ...] = (),
        required: tuple[str, ...] = (),
    ) -> None:
        self.weights, self.options, self.axes = weights, options, axes
        self.steps, self.takes, self.last, self.outline, self.reference = steps, takes, last, outline, reference
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
        torch.library.register_autograd(f"evoattn::{name}_backward", no_second_derivative, lib=LIBRARY)
        self.forward = getattr(torch.ops.evoattn, name).default
        self.backward = getattr(torch.ops.evoattn, f"{name}_backward").default

    def __call__(
        self, x: Tensor, mask: Tensor | None, weights: Any, options: Any, out: Tensor | None = None, split: Split | None = None
    ) -> Tensor:
        """Compute the result by kernels if they take the call, else in plain torch.

        Args:
            x, mask: checked, with all leading axes.
            weights, options: named tuples. Weights are contiguous, in the dtypes that they are used in.
            out: the tensor that the result is written into, or None.
            split: how x lies on several processes, or None.
        """
        if mask is not None and not mask.is_floating_point():
            mask = mask.to(weights.product_dtype())
        recorded = is_recorded(x, mask, *weights)
        if out is not None:
            check_out(out, x, result_dtype(x, weights, options), records=recorded)
        mask_requires_grad = mask is not None and mask.requires_grad
        by_torch = mask_requires_grad or not self.has_kernels(x, weights) or guards.is_transformed(x, mask, *weights)
        if by_torch or (split is not None and not guards.only_computes()):
            result = self.reference(x, mask, weights, options, split)
            return result if out is None else out.copy_(result)
        folded = x.reshape(-1, *x.shape[-self.axes :]).contiguous()
        factors = None if mask is None else mask.expand(x.shape[:-1]).reshape(folded.shape[:-1]).contiguous()
        if not guards.only_computes():  # torch has to see an operator
            results = self.forward(folded, factors, *weights, *options)
            result = results[0] if self.saved else results
        elif recorded:
            result = _Recorded.apply(self, folded, factors, options, split, *weights)  # type: ignore[no-untyped-call]
        else:
            into = writable_out(out, x, mask, *weights)
            (result, *_) = self.run(folded, factors, weights, options, split, save=False, out=into)
            if into is not None:
                if not into.is_inference():
                    torch.autograd.graph.increment_version(into)  # autograd learns that what it may have saved has changed
                return into
        result = result.view(x.shape)
        return result if out is None else out.copy_(result)

    def has_kernels(self, x: Tensor, weights: Any) -> bool:
        """Return whether kernels take these tensors: 16 or 32 bits on a GPU, not too many channels."""
        is_double = weights.product_dtype() == torch.float64 or x.dtype == torch.float64
        if not x.is_cuda or is_double or not x.numel():
            return False
        return self.takes(x.device, weights.product_dtype(), *getattr(weights, self.last).shape)

    def run(self, x: Tensor, *arguments: Any, **settings: Any) -> tuple[Tensor, ...]:
        """Launch the kernels of the forward: the result, then what the backward reads besides."""
        with uncast(x.device):
            return self.steps().forward(x, *arguments, **settings)  # type: ignore[no-any-return]

    def run_backward(self, do: Tensor, *arguments: Any) -> tuple[Tensor, Any]:
        """Launch the kernels of the backward: the gradient of x, and those of the weights, all of them or None."""
        with uncast(do.device):
            dx, grads = self.steps().backward(do.contiguous(), *arguments)
        return dx, grads or (None,) * self.count

    def _values(self, arguments: tuple[Any, ...]) -> tuple[Any, Any]:
        """The weights and the options among the arguments of torch's operator."""
        return self.weights(*arguments[: self.count]), self.options(*arguments[self.count :])

    def _forward(self, x: Tensor, mask: Tensor | None, *arguments: Any) -> Any:
        results = self.run(x, mask, *self._values(arguments))
        return results if self.saved else results[0]

    def _fake_forward(self, x: Tensor, mask: Tensor | None, *arguments: Any) -> Any:
        results = self.outline(x, *self._values(arguments))
        return results if self.saved else results[0]

    def _backward(self, do: Tensor, x: Tensor, mask: Tensor | None, *arguments: Any) -> tuple[Tensor, ...]:
        saved, arguments, needs_weights = arguments[: self.saved], arguments[self.saved : -1], arguments[-1]
        dx, grads = self.run_backward(do, x, mask, saved, *self._values(arguments), needs_weights)
        return dx, *[x.new_empty(0) if y is None else y.clone() for y in grads]  # the results of an operator share no memory

    def _fake_backward(self, do: Tensor, x: Tensor, mask: Tensor | None, *arguments: Any) -> tuple[Tensor, ...]:
        weights, _ = self._values(arguments[self.saved : -1])
        return torch.empty_like(x), *[
            torch.empty_like(y) if arguments[-1] and y is not None else x.new_empty(0) for y in weights
        ]

    def _save(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, mask, *rest = inputs
        ctx.save_for_backward(x, mask, *(output[1:] if self.saved else ()), *rest[: self.count])
        ctx.options = rest[self.count :]

    def _differentiate(self, ctx: Any, do: Tensor, *_: Tensor) -> tuple[Any, ...]:
        check_no_tangent(do, of=OF_A_BACKWARD)
        saved = ctx.saved_tensors  # read once: a checkpoint computes them at the first look
        needs = [x is not None and x.requires_grad for x in saved[-self.count :]]
        dx, *grads = self.backward(do, *saved, *ctx.options, any(needs))
        weights = [x if need else None for x, need in zip(grads, needs, strict=True)]
        return dx, None, *weights, *[None] * len(ctx.options)


class _Recorded(torch.autograd.Function):
    """An operator without the dispatcher, and with a split, which the operator of torch does not take."""

    @staticmethod
    def forward(
        ctx: Any,
        operator: Operator,
        x: Tensor,
        mask: Tensor | None,
        options: Any,
        split: Split | None,
        *weights: Tensor | None,
    ) -> Tensor:
        result, *saved = operator.run(x, mask, operator.weights(*weights), options, split)
        ctx.save_for_backward(x, mask, *saved, *weights)
        ctx.operator, ctx.options, ctx.split = operator, options, split
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Any, ...]:
        operator, needs = ctx.operator, ctx.needs_input_grad[5:]
        x, mask, *saved = ctx.saved_tensors
        saved, weights = saved[: -operator.count], operator.weights(*saved[-operator.count :])
        if ctx.split is not None or guards.is_plain([do]):
            dx, grads = operator.run_backward(do, x, mask, saved, weights, ctx.options, any(needs), ctx.split)
        else:  # many cotangents at once, for instance
            dx, *grads = operator.backward(do, x, mask, *saved, *weights, *ctx.options, any(needs))
        return None, dx, None, None, None, *[x if need else None for x, need in zip(grads, needs, strict=True)]
