"""Operators of the pair block: schemas, fake functions, autograd, and the way that a call takes.

An operator of torch takes the input, the mask or None, the weights and the options. It returns the result, then the tensors
that its backward reads besides. The backward returns the gradients of the input and of all weights: one that is not needed, or
of a weight that is None, has no elements.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from evoattn.core import guards
from evoattn.core.devices import uncast
from evoattn.dispatch.autograd import NO_SECOND_DERIVATIVE, OF_A_BACKWARD, once_differentiable
from evoattn.dispatch.checks import check_no_tangent
from evoattn.dispatch.custom_operator import CustomOperator
from evoattn.dispatch.distributed import Split
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
        weights, options: the classes of the named tuples of its parameters and settings.
        steps: returns the module of its kernels, which has `forward` and `backward`. It needs Triton.
        takes: returns whether kernels on a GPU take so many channels and hidden channels in a dtype of the products.
        last: the weight `[C, H]` that tells both. It is never None.
        outline: returns empty tensors like the results of `forward`, from x, weights and options.
        reference: the same in plain torch. It takes x, the mask, weights, options and a split, which may be None.
        axes: how many axes of x the kernels take, besides one for all leading axes.
        saved: names of the tensors that the backward reads besides.
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
    ) -> None:
        self.weights, self.axes, self.saved, self.count = weights, axes, len(saved), len(weights._fields)
        self.steps, self.takes, self.last, self.outline, self.reference = steps, takes, last, outline, reference
        values, read = (f"Tensor {x}", "Tensor? mask"), [f"Tensor {name}" for name in saved]
        results, gradients = (", ".join(["Tensor"] * (1 + count)) for count in (self.saved, self.count))
        forward = CustomOperator(
            name,
            (*values, weights, options),
            f"({results})" if saved else results,
            lambda *arguments: self._as_results(self.run(*arguments)),
            lambda x, mask, *arguments: self._as_results(outline(x, *arguments)),
        )
        backward = CustomOperator(
            f"{name}_backward",
            ("Tensor do", *values, *read, weights, options, "bool needs_weights"),
            f"({gradients})",
            self._run_backward,
            self._outline_backward,
        )
        forward.differentiate(self._save, self._differentiate)
        backward.refuse_derivative(NO_SECOND_DERIVATIVE)
        self.forward, self.backward = forward.operator, backward.operator

    def __call__(
        self, x: Tensor, mask: Tensor | None, weights: Any, options: Any, out: Tensor | None = None, split: Split | None = None
    ) -> Tensor:
        """Compute the result by kernels if they take the call, else in plain torch.

        The arguments are checked and x has all leading axes. Weights are contiguous, in the dtypes that they are used in. `out`
        is what the result is written into, and `split` tells how x lies on several processes.
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

    def _as_results(self, results: tuple[Tensor, ...]) -> Any:
        """The results of the operator of torch, which is a tensor if there is only one."""
        return results if self.saved else results[0]

    def _run_backward(self, do: Tensor, x: Tensor, mask: Tensor | None, *arguments: Any) -> tuple[Tensor, ...]:
        *saved, weights, options, needs_weights = arguments
        dx, grads = self.run_backward(do, x, mask, saved, weights, options, needs_weights)
        return dx, *[x.new_empty(0) if y is None else y.clone() for y in grads]  # the results of an operator share no memory

    def _outline_backward(self, do: Tensor, x: Tensor, mask: Tensor | None, *arguments: Any) -> tuple[Tensor, ...]:
        *_, weights, _, needs_weights = arguments
        grads = [torch.empty_like(y) if needs_weights and y is not None else x.new_empty(0) for y in weights]
        return torch.empty_like(x), *grads

    def _save(self, ctx: Any, values: tuple[Any, ...], output: Any) -> None:
        x, mask, weights, ctx.options = values
        ctx.save_for_backward(x, mask, *(output[1:] if self.saved else ()), *weights)

    def _differentiate(self, ctx: Any, do: Tensor, *_: Tensor) -> tuple[Any, ...]:
        check_no_tangent(do, of=OF_A_BACKWARD)
        saved = ctx.saved_tensors  # read once: a checkpoint computes them at the first look
        needs = [x is not None and x.requires_grad for x in saved[-self.count :]]
        dx, *grads = self.backward(do, *saved, *ctx.options, any(needs))
        return dx, None, *[x if need else None for x, need in zip(grads, needs, strict=True)]


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
