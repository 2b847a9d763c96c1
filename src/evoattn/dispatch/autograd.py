"""Autograd, for both kinds of calls: one function saves what a backward needs, and one computes the gradients.

`EvoformerAttention` is a direct call; its tensors have the user's axes. The operator `evoattn::forward` is differentiated by
the same two functions; its tensors have canonical axes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from evoattn.core import guards
from evoattn.core.inputs import Cotangents, Inputs, Outputs, SavedProbabilities
from evoattn.core.layouts import Columns, columns_of, empty_gradients
from evoattn.core.problem import GRADIENTS, Needs
from evoattn.dispatch import lookup, operators
from evoattn.dispatch.axes import CANONICAL, Axes, canonicalise
from evoattn.dispatch.checks import check_no_tangent
from evoattn.dispatch.custom_operator import CustomOperator
from evoattn.dispatch.lookup import BackwardPass, Settings

Gradients = tuple[Tensor | None, ...]
"""In the order of `problem.GRADIENTS`; None for one that is not wanted."""


_INPUTS = len(Inputs._fields)


@dataclasses.dataclass(eq=False)
class OperatorCall:
    """A call through the operator, by views that autograd knows of. Its backward has canonical axes.

    `casts` is True if it was prepared under autocast. Its inputs then had autocast's dtype already.
    """

    settings: Settings
    casts: bool

    def __call__(self, inputs: Inputs) -> Any:
        """Return o, lse and reference in the user's axes."""
        folded, axes = canonicalise(inputs, self.settings.layout)
        o, lse, reference = operators.forward(*folded, *self.settings)
        return Outputs(axes.restore_queries(o), axes.restore_statistic(lse), axes.restore_statistic(reference))

    def key(self, inputs: Inputs) -> Hashable:
        """Tell the backward of this call from others; None if it cannot be told, because sizes may be symbols of a trace."""
        if guards.autocasts() is None:
            return None
        return inputs.q.shape, inputs.k.shape, tuple([x is None for x in inputs]), self.settings

    def canonicalise(self, work: BackwardPass) -> tuple[BackwardPass, Axes]:
        """Return the backward in the canonical axes of its forward, and the way back."""
        return work, CANONICAL


def allocator(x: Tensor) -> Callable[[torch.device], Tensor]:
    """Return a function that allocates a tensor with the shape, strides and dtype of x on a device."""
    shape, stride, dtype = tuple(x.shape), x.stride(), x.dtype
    return lambda device: torch.empty_strided(shape, stride, dtype=dtype, device=device)


def same_memory(x: Tensor | None, canonical: Tensor | None) -> bool:
    """Return whether a canonical tensor is a view from the same start, with all elements if x gets a gradient."""
    if x is None or canonical is None:
        return True
    has_all = not x.requires_grad or x.numel() == canonical.numel()
    return has_all and canonical.numel() > 0 and x.data_ptr() == canonical.data_ptr()


def _save(ctx: Any, inputs: Inputs, outputs: Outputs | SavedProbabilities, call: OperatorCall) -> None:
    ctx.call = call
    ctx.set_materialize_grads(False)
    if isinstance(outputs, Outputs):  # the others are no outputs of the function
        ctx.mark_non_differentiable(outputs.reference)
    elif inputs.gate is None:
        outputs = outputs._replace(o=None)
    ctx.save_for_backward(*inputs, *outputs)


def _gradients(ctx: Any, do: Tensor | None, dlse: Tensor | None, needs: Needs) -> Gradients:
    """Return the gradients: directly by a plan, unless this pass is itself recorded, traced or transformed.

    Hooks may have replaced the saved tensors, so all are compared again.
    """
    if do is None and dlse is None:
        return (None,) * len(GRADIENTS)
    seen = guards.is_seen()
    if seen:  # perhaps by forward mode
        check_no_tangent(do, dlse)
    saved, call, count = ctx.saved_tensors, ctx.call, _INPUTS
    from_p = len(saved) == count + len(SavedProbabilities._fields)
    outputs = SavedProbabilities._make(saved[count:]) if from_p else Outputs._make(saved[count:])
    work = BackwardPass(Inputs._make(saved[:count]), call.settings, Cotangents(do, dlse), outputs, needs)
    run = None if seen or torch.is_grad_enabled() else _recall_backward(call, work)
    return _by_operator(call, work) if run is None else run(work)


def _recall_backward(call: OperatorCall, work: BackwardPass) -> Callable[[BackwardPass], Gradients] | None:
    """Return a function that runs the plan of this backward and of later equal ones; None if the operator must run it."""
    identity = call.key(work.inputs)
    if identity is None:
        return None
    joined, columns = _columns(work)
    inputs, (do, dlse), from_p = work.inputs, work.cotangents, work.outputs.__class__ is SavedProbabilities
    key = (identity, from_p, do is None, dlse is None, work.needs, lookup.torch_settings(inputs.q.dtype), columns)
    tensors = [x for x in work.tensors if x is not None]
    run: Callable[[BackwardPass], Gradients] | None = guards.recall(key, tensors)
    if run is None and guards.autocasts() is not None and guards.ordinary(tensors):
        run = _prepare_backward(call, work, joined, columns)
        if run is not None:
            guards.remember(key, tensors, run)
    return run


def _columns(work: BackwardPass) -> tuple[list[Tensor], Columns | None]:
    """Return the tensors that one product may have made, q, k, v and a gate with a gradient; and their columns in it."""
    inputs, needs = work.inputs, work.needs
    joined = [*inputs.qkv, inputs.gate] if needs.gate and inputs.gate is not None else [*inputs.qkv]
    all_needed = needs.q and needs.k and needs.v
    return joined, columns_of(joined) if all_needed and work.settings.layout == "bnlhd" else None


def _prepare_backward(
    call: OperatorCall, work: BackwardPass, joined: list[Tensor], columns: Columns | None
) -> Callable[[BackwardPass], Gradients] | None:
    """Plan a backward; None if its canonical tensors are no views of the same elements."""
    folded, axes = call.canonicalise(work)
    if not all(same_memory(x, y) for x, y in zip(work.tensors, folded.tensors, strict=True)):
        return None
    if columns is not None:
        folded = folded._replace(into=axes.fold_written((*columns.make(joined, "meta"), None)[:4]))
    plan = lookup.find_plan(folded)
    written = axes.restore_written(empty_gradients(folded.inputs, work.settings.layout, work.needs, "meta"))
    allocators = [None if x is None else allocator(x) for x in written]
    count = len(joined)

    def run(work: BackwardPass) -> Gradients:
        inputs = work.inputs
        device = inputs.q.device
        if columns is not None and plan.writes_into:
            written = (*columns.make((*inputs.qkv, inputs.gate)[:count]), None)[:4]  # type: ignore[arg-type]
        else:
            written = tuple([None if allocate is None else allocate(device) for allocate in allocators])
        dq, dk, dv, dgate = written
        dmask_bias, dpair_bias = plan.run(work.cotangents, inputs, work.outputs, written)
        return dq, dk, dv, _like(dmask_bias, inputs.mask_bias), _like(dpair_bias, inputs.pair_bias), dgate

    return run


def _by_operator(call: OperatorCall, work: BackwardPass) -> Gradients:
    """Return the gradients by the operator, which torch can trace and transform, and which refuses a second derivative.

    It starts from the statistic. If the forward saved the probabilities, it runs again.
    """
    folded, axes = call.canonicalise(work)
    if isinstance(work.outputs, SavedProbabilities):
        with torch.no_grad():
            folded = folded._replace(outputs=Outputs(*operators.forward(*folded.inputs, *work.settings)))
    values = operators.differentiate(folded)
    dq, dk, dv, dmask_bias, dpair_bias, dgate = (x if need else None for x, need in zip(values, work.needs, strict=True))
    dq, dk, dv, dgate = axes.restore_written((dq, dk, dv, dgate))
    gradients = (dq, dk, dv, dmask_bias, dpair_bias, dgate)
    q, k, v, _, mask_bias, pair_bias, gate = work.inputs  # compiled autograd of torch 2.7 reads no property of it
    return tuple([_like(*pair) for pair in zip(gradients, (q, k, v, mask_bias, pair_bias, gate), strict=True)])


def _needs_of(asked: tuple[bool, ...]) -> Needs:
    """Return which gradients are wanted, from torch's answer for each of the inputs; a mask has no gradient."""
    return Needs(*asked[:3], *asked[4:])


def _like(gradient: Tensor | None, x: Tensor | None) -> Tensor | None:
    """Return a gradient in its input's shape."""
    return gradient if gradient is None or x is None or gradient.shape == x.shape else gradient.reshape(x.shape)


class EvoformerAttention(torch.autograd.Function):
    """A direct call, as autograd sees it; profilers show it by this name."""

    @staticmethod
    def forward(ctx: Any, call: Any, *tensors: Any) -> tuple[Tensor | None, ...]:
        """Return o, lse and reference in the user's axes; o alone if the probabilities are saved."""
        inputs = Inputs._make(tensors)
        outputs = call.compute(inputs)
        _save(ctx, inputs, outputs, call)
        return (outputs.o, None, None) if isinstance(outputs, SavedProbabilities) else outputs

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None, _: Tensor | None) -> Gradients:
        """Return a gradient, or None, for each argument of `forward`."""
        gradients = _gradients(ctx, do, dlse, _needs_of(ctx.needs_input_grad[1:]))
        return None, *_with_mask(gradients)


def _with_mask(gradients: Gradients) -> Gradients:
    """Return a gradient for each of `Inputs`: None for the mask."""
    return *gradients[:3], None, *gradients[3:]


record: Callable[..., Any] = super(torch.autograd.Function, EvoformerAttention).apply
"""`EvoformerAttention.apply` without its questions about transforms, which `guards` has asked."""


def _save_operator(ctx: Any, values: tuple[Inputs, Settings], output: tuple[Tensor, Tensor, Tensor]) -> None:
    inputs, settings = values
    _save(ctx, inputs, Outputs(*output), OperatorCall(settings, False))


def _differentiate_operator(ctx: Any, do: Tensor | None, dlse: Tensor | None, _: Tensor | None) -> Gradients:
    asked = tuple([bool(need) for need in ctx.needs_input_grad])
    return _with_mask(_gradients(ctx, do, dlse, _needs_of(asked[:_INPUTS])))


operators.FORWARD.differentiate(_save_operator, _differentiate_operator)
operators.BACKWARD.refuse_derivative(
    "evoformer_attention has no second derivative: its backward is a formula that autograd does not see. "
    "For double backward write the attention densely in torch."
)


OF_A_BACKWARD = "the backward of layers and drop-ins"
"""As `check_no_tangent` names it."""

NO_SECOND_DERIVATIVE = (
    "layers and drop-ins of evoattn have no second derivative: their backward recomputes what it needs. "
    "For double backward write the layer densely in torch."
)
"""The message of the derivative of the gradients of a layer."""


class _Context:
    """A context of a backward with saved tensors that have been read."""

    def __init__(self, ctx: Any, saved: tuple[Tensor | None, ...]) -> None:
        self._ctx, self.saved_tensors = ctx, saved

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the `backward` of an autograd function whose gradients have no derivative.

    The gradients depend on all cotangents and saved tensors, as autograd sees it. Their derivative raises RuntimeError, and a
    tangent of a cotangent NotImplementedError.
    """

    @functools.wraps(backward)
    def once(ctx: Any, *cotangents: Any) -> Any:
        check_no_tangent(*cotangents, of=OF_A_BACKWARD)
        if not torch.is_grad_enabled():
            return backward(ctx, *cotangents)
        saved = ctx.saved_tensors  # read once: a checkpoint computes them at the first look, and refuses a second one
        with torch.no_grad():
            result = backward(_Context(ctx, saved), *cotangents)
        # a cotangent of several at once does not tell whether it requires a gradient
        sources = [x for x in cotangents if isinstance(x, Tensor)]
        sources += [x for x in saved if isinstance(x, Tensor) and x.requires_grad]
        if not sources:
            return result
        zero = sum(map(_zero, sources))
        gradients = result if isinstance(result, tuple) else (result,)
        gradients = tuple([x + zero if isinstance(x, Tensor) else x for x in gradients])
        return gradients if isinstance(result, tuple) else gradients[0]

    return once


def _make_zero(source: Tensor) -> Tensor:
    return source.new_zeros(())


_NO_DERIVATIVE = CustomOperator("no_derivative", ("Tensor source",), "Tensor", _make_zero, _make_zero)
_NO_DERIVATIVE.refuse_derivative(NO_SECOND_DERIVATIVE)
_zero = _NO_DERIVATIVE.operator
"""A 0 that depends on a tensor and has no derivative. With many cotangents at once torch loses an autograd function here."""
