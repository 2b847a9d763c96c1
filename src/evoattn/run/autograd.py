"""Autograd, for both ways of a call: one function saves what a backward needs, and one makes the gradients.

`EvoformerAttention` is a call that goes straight to a plan; its tensors have the user's axes. The operator `evoattn::forward`
is differentiated by the same two functions; its tensors have canonical axes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from evoattn.call.canonical import Axes, canonicalise
from evoattn.call.validation import check_no_tangent
from evoattn.inputs import Cotangents, Inputs, Kept, Options, Outputs
from evoattn.layouts import empty_gradients
from evoattn.problem import GRADIENTS
from evoattn.run import guards, operators, plans
from evoattn.run.joined import Columns, columns_of

__all__ = ["EvoformerAttention", "Look", "look_of", "make", "record", "same_memory"]

Look = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Shape, strides and dtype of a tensor that is to be made; no tuple at all says that it is like another tensor."""

Gradients = tuple[Tensor | None, ...]
"""In the order of `problem.GRADIENTS`; None for one that is not wanted."""


class Call(Protocol):
    """A call that goes straight to a plan (`evoattn.run.calls.Straight`)."""

    options: Options
    backend: str

    def compute(self, inputs: Inputs) -> Outputs | Kept:
        """The outputs, in the user's axes."""


@dataclasses.dataclass(frozen=True)
class _Backward:
    """Backwards that look alike.

    Args:
        run: of their plan.
        looks: of dq, dk, dv and dgate, None for one that is not wanted.
        columns: where they lie in one tensor; None: each has its own memory.
    """

    run: Callable[..., tuple[Tensor | None, Tensor | None]]
    looks: tuple[Look | tuple[()] | None, ...]
    columns: Columns | None

    def make(self, inputs: Inputs) -> tuple[Tensor | None, ...]:
        """dq, dk, dv and dgate, uninitialised."""
        of_q, of_k, of_v, of_gate = self.looks
        if self.columns is not None:
            return _four(self.columns.make(_joined(inputs, of_gate is not None)))
        return (
            None if of_q is None else make(of_q, inputs.q),
            None if of_k is None else make(of_k, inputs.k),
            None if of_v is None else make(of_v, inputs.v),
            None if of_gate is None else make(of_gate, inputs.gate),  # type: ignore[arg-type]
        )


def _save(ctx: Any, inputs: Inputs, outputs: Outputs | Kept, way: Call | Options) -> None:
    """Keep what the backward needs. `way` is a call whose tensors have the user's axes, or the options of an operator."""
    ctx.way = way
    ctx.set_materialize_grads(False)
    if isinstance(outputs, Outputs):  # the others are no outputs of the function
        ctx.mark_non_differentiable(outputs.reference)
    elif inputs.gate is None:
        outputs = outputs._replace(o=None)
    ctx.save_for_backward(*inputs, *outputs)


def _gradients(ctx: Any, do: Tensor | None, dlse: Tensor | None, asked: tuple[bool, ...]) -> Gradients:
    """The gradients: straight by a plan, unless this pass is itself recorded, traced or transformed.

    Hooks may have put other tensors in the place of those that were saved, so all are looked at again.

    Args:
        ctx: what `_save` has filled.
        do, dlse: the cotangents.
        asked: for each of the inputs, whether its gradient is wanted.
    """
    if do is None and dlse is None:
        return (None,) * len(GRADIENTS)
    seen = guards.is_seen()
    if seen:  # perhaps by forward mode
        check_no_tangent(do, dlse)
    saved = ctx.saved_tensors
    count = len(Inputs._fields)
    cotangents, inputs, outputs = Cotangents(do, dlse), Inputs._make(saved[:count]), _outputs_of(saved[count:])
    found = None if seen or torch.is_grad_enabled() else _find(ctx, cotangents, inputs, outputs, asked)
    if found is None:
        return _by_operator(ctx, cotangents, inputs, outputs, _needs(asked))
    written = found.make(inputs)
    dmask_bias, dpair_bias = found.run(cotangents, inputs, outputs, written)
    if dmask_bias is not None:
        dmask_bias = _like(dmask_bias, inputs.mask_bias)
    if dpair_bias is not None:
        dpair_bias = _like(dpair_bias, inputs.pair_bias)
    return *written[:3], dmask_bias, dpair_bias, written[3]


def _outputs_of(saved: tuple[Any, ...]) -> Outputs | Kept:
    return Kept._make(saved) if len(saved) == len(Kept._fields) else Outputs._make(saved)


def _joined(inputs: Inputs, gate: bool) -> list[Tensor]:
    """q, k and v, and the gate if it has a gradient: tensors that one product may have made."""
    return [*inputs.qkv, inputs.gate] if gate and inputs.gate is not None else [*inputs.qkv]


def _four(gradients: list[Tensor]) -> tuple[Tensor | None, ...]:
    """Gradients of `_joined`, with None for a gate that has none."""
    return (*gradients, None) if len(gradients) == 3 else tuple(gradients)


def _needs(asked: tuple[bool, ...]) -> tuple[bool, ...]:
    """For each of `Inputs.differentiable`, whether its gradient is wanted."""
    return asked[:3] + asked[4:]


def _find(
    ctx: Any, cotangents: Cotangents, inputs: Inputs, outputs: Outputs | Kept, asked: tuple[bool, ...]
) -> _Backward | None:
    """The backward of these tensors, or None where the operator has to run it."""
    way: Any = ctx.way
    if way.__class__ is Options:
        if guards.autocasts() is None:  # in a trace, sizes may be symbols
            return None
        way = (inputs.q.shape, inputs.k.shape, tuple([x is None for x in inputs]), way)
    do, dlse = cotangents
    joins = all(asked[:3]) and _options(ctx).layout == "bnlhd"
    columns = columns_of(_joined(inputs, asked[-1])) if joins else None
    key = (way, isinstance(outputs, Kept), do is None, dlse is None, asked, plans.settings(inputs.q.dtype), columns)
    given = [x for x in (do, dlse, *inputs, *outputs) if x is not None]
    found: _Backward | None = guards.recall(key, given)
    if found is not None:
        return found
    if guards.autocasts() is None or not guards.ordinary(given):
        return None
    needs = _needs(asked)
    of_cotangents, folded, of_outputs, axes = _canonical(ctx, cotangents, inputs, outputs, needs)
    pairs = zip((*cotangents, *inputs, *outputs), (*of_cotangents, *folded, *of_outputs), strict=True)
    if not all(same_memory(x, y) for x, y in pairs):
        return None
    options = _options(ctx)
    if isinstance(outputs, Kept):  # only their own backend reads them
        options = options._replace(backend=ctx.way.backend)
    into = None if columns is None else _folded(_four(columns.make(_joined(inputs, asked[-1]), "meta")), axes)
    plan = plans.backward(of_cotangents, folded, of_outputs, needs, options, into)
    written = _restored(empty_gradients(folded, options.layout, needs, "meta"), axes)
    pairs = zip(written, (*inputs.qkv, inputs.gate), strict=True)
    looks = [None if x is None or like is None else look_of(x, like) for x, like in pairs]
    found = _Backward(plan.run, tuple(looks), columns if plan.writes_into else None)
    guards.remember(key, given, found)
    return found


def _by_operator(
    ctx: Any, cotangents: Cotangents, inputs: Inputs, outputs: Outputs | Kept, needs: tuple[bool, ...]
) -> Gradients:
    """By the operator, which torch can trace and transform, and which refuses a second derivative.

    It starts from the statistic. A forward that kept the probabilities instead is done again.
    """
    of_cotangents, folded, of_outputs, axes = _canonical(ctx, cotangents, inputs, outputs, needs)
    if isinstance(of_outputs, Kept):
        with torch.no_grad():
            of_outputs = Outputs(*operators.forward(*operators.arguments_of(folded, _options(ctx))))
    made = operators.differentiate(of_cotangents, folded, of_outputs, needs, _options(ctx))
    dq, dk, dv, dmask_bias, dpair_bias, dgate = (x if need else None for x, need in zip(made, needs, strict=True))
    dq, dk, dv, dgate = _restored((dq, dk, dv, dgate), axes)
    pairs = zip((dq, dk, dv, dmask_bias, dpair_bias, dgate), inputs.differentiable, strict=True)
    return tuple([None if x is None else _like(x, like) for x, like in pairs])


def _canonical(
    ctx: Any, cotangents: Cotangents, inputs: Inputs, outputs: Outputs | Kept, needs: tuple[bool, ...]
) -> tuple[Cotangents, Inputs, Outputs | Kept, Axes | None]:
    """All of them in the canonical axes that the forward gave them, and the way back; None where they have them."""
    if isinstance(ctx.way, Options):
        return cotangents, inputs, outputs, None
    folded, axes = canonicalise(inputs, ctx.way.options.layout, narrow=not needs[4])
    do, dlse = cotangents
    of_outputs: Outputs | Kept
    if isinstance(outputs, Outputs):
        o, lse, reference = outputs
        of_outputs = Outputs(axes.fold_queries(o), axes.fold_statistic(lse), axes.fold_statistic(reference))
    else:
        of_outputs = outputs._replace(o=None if outputs.o is None else axes.fold_queries(outputs.o))
    do = None if do is None else axes.fold_queries(do)
    return Cotangents(do, None if dlse is None else axes.fold_statistic(dlse)), folded, of_outputs, axes


def _options(ctx: Any) -> Options:
    options: Options = ctx.way if isinstance(ctx.way, Options) else ctx.way.options
    return options


def _restored(written: tuple[Tensor | None, ...], axes: Axes | None) -> tuple[Tensor | None, ...]:
    """dq, dk, dv and dgate in the user's axes."""
    if axes is None:
        return written
    ways = (axes.restore_queries, axes.restore_keys, axes.restore_keys, axes.restore_queries)
    return tuple([None if x is None else way(x) for x, way in zip(written, ways, strict=True)])


def _folded(written: tuple[Any, ...], axes: Axes | None) -> tuple[Tensor | None, ...]:
    """dq, dk, dv and dgate in canonical axes, from tensors that lie in memory like q, k, v and the gate."""
    if axes is None:
        return written
    dq, dk, dv, dgate = written
    of_gate = None if dgate is None else axes.fold_queries(dgate)
    return axes.fold_queries(dq), *(axes.fold_keys(x, x.shape[-2]) for x in (dk, dv)), of_gate


def _like(gradient: Tensor, x: Tensor | None) -> Tensor:
    """A gradient in the shape of what it is of."""
    return gradient if x is None or gradient.shape == x.shape else gradient.reshape(x.shape)


def same_memory(given: Tensor | None, canonical: Tensor | None) -> bool:
    """Whether a canonical tensor is a view from the same start, and has all elements of one that gets a gradient."""
    if given is None or canonical is None:
        return True
    whole = not given.requires_grad or given.numel() == canonical.numel()
    return whole and canonical.numel() > 0 and given.data_ptr() == canonical.data_ptr()


def look_of(x: Tensor, like: Tensor) -> Look | tuple[()]:
    """How to make a tensor that looks like x on the device of `like`, perhaps by making one like that."""
    look = tuple(x.shape), x.stride(), x.dtype
    return () if look == (tuple(like.shape), like.stride(), like.dtype) else look


def make(look: Look | tuple[()], like: Tensor) -> Tensor:
    """An uninitialised tensor. torch.empty_like takes 0.7 us of the host, torch.empty_strided 0.9."""
    if not look:
        return torch.empty_like(like)
    return torch.empty_strided(look[0], look[1], dtype=look[2], device=like.device)


class EvoformerAttention(torch.autograd.Function):
    """A call that goes straight to a plan, as autograd sees it; profilers show it by this name."""

    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: Any) -> tuple[Tensor | None, ...]:
        """o, lse and reference in the user's axes; o alone if the probabilities are kept."""
        inputs = Inputs._make(tensors)
        outputs = call.compute(inputs)
        _save(ctx, inputs, outputs, call)
        return (outputs.o, None, None) if isinstance(outputs, Kept) else outputs

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None, _: Tensor | None) -> Gradients:
        """A gradient, or None, for each argument of `forward`."""
        dq, dk, dv, dmask_bias, dpair_bias, dgate = _gradients(ctx, do, dlse, ctx.needs_input_grad[1:])
        return None, dq, dk, dv, None, dmask_bias, dpair_bias, dgate


record: Callable[..., Any] = super(torch.autograd.Function, EvoformerAttention).apply
"""`EvoformerAttention.apply` without its questions about transforms, which `guards` has asked."""


def _save_operator(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    given, options = operators.values_of(inputs)
    _save(ctx, given, Outputs(*output), options)


def _differentiate_operator(ctx: Any, do: Tensor | None, dlse: Tensor | None, _: Tensor | None) -> Gradients:
    asked, _ = operators.values_of(ctx.needs_input_grad)
    dq, dk, dv, dmask_bias, dpair_bias, dgate = _gradients(ctx, do, dlse, tuple([bool(need) for need in asked]))
    gradients: Gradients = (dq, dk, dv, None, dmask_bias, dpair_bias, *[None] * len(Options._fields), dgate)
    return gradients[: len(ctx.needs_input_grad)]  # torch leaves out a gate that is None


def _no_second_derivative(ctx: Any, *cotangents: Tensor) -> Gradients:
    raise RuntimeError(
        "evoformer_attention has no second derivative: its backward is a formula that autograd does not see. "
        "For double backward write the attention densely in torch."
    )


_LIBRARY = operators.LIBRARY
torch.library.register_autograd("evoattn::forward", _differentiate_operator, setup_context=_save_operator, lib=_LIBRARY)
torch.library.register_autograd("evoattn::backward", _no_second_derivative, lib=_LIBRARY)
