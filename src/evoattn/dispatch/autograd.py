"""Autograd, for both ways of a call: one function saves what a backward needs, and one makes the gradients.

`EvoformerAttention` is a call that goes straight to a plan; its tensors have the user's axes. The operator `evoattn::forward`
is differentiated by the same two functions; its tensors have canonical axes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from evoattn.backends import Plan
from evoattn.core import guards
from evoattn.core.inputs import Cotangents, Inputs, Outputs, SavedProbabilities
from evoattn.core.layouts import columns_of, empty_gradients
from evoattn.core.problem import GRADIENTS
from evoattn.dispatch import lookup, operators
from evoattn.dispatch.axes import CANONICAL, Axes, canonicalise
from evoattn.dispatch.checks import check_no_tangent
from evoattn.dispatch.lookup import Backward, Options

Gradients = tuple[Tensor | None, ...]
"""In the order of `problem.GRADIENTS`; None for one that is not wanted."""


@dataclasses.dataclass(eq=False)
class Straight:
    """A call that goes straight to a plan.

    Args:
        options: of the call, settled.
        casts: True if it was planned under autocast. Its inputs then had autocast's dtype already.
        records: whether autograd has to know of the call.
        plan: of the forward.
        saves_p: whether the plan may save the probabilities in place of the statistic.
        make_o, make_lse: make them, uninitialised, of a tensor like q; the reference is like lse.
    """

    options: Options
    casts: bool
    records: bool
    plan: Plan
    saves_p: bool
    make_o: Callable[[Tensor], Tensor]
    make_lse: Callable[[Tensor], Tensor]

    def __call__(self, inputs: Inputs) -> Any:
        """o, lse and reference, in the user's axes, of tensors in the user's axes; o alone if the LSE is not wished for."""
        return _record(self, *inputs) if self.records else self.compute(inputs)

    def compute(self, inputs: Inputs) -> Outputs | SavedProbabilities:
        """The outputs, of which autograd knows nothing."""
        o = self.make_o(inputs.q)
        if self.saves_p:
            saved: SavedProbabilities | None = self.plan.save_probabilities(inputs, o)  # type: ignore[misc]
            if saved is not None:
                return saved
        lse = self.make_lse(inputs.q)
        outputs = Outputs(o, lse, torch.empty_like(lse))
        self.plan.run(inputs, outputs)
        return outputs


def maker(x: Tensor, like: Tensor) -> Callable[[Tensor], Tensor]:
    """What makes an uninitialised tensor that looks like x of a tensor that looks like `like`, on its device.

    torch.empty_like takes 0.7 us of the host, torch.empty_strided 0.9.
    """
    shape, stride, dtype = tuple(x.shape), x.stride(), x.dtype
    if (shape, stride, dtype) == (tuple(like.shape), like.stride(), like.dtype):
        return torch.empty_like
    return lambda like: torch.empty_strided(shape, stride, dtype=dtype, device=like.device)


def same_memory(x: Tensor | None, canonical: Tensor | None) -> bool:
    """Whether a canonical tensor is a view from the same start, and has all elements of one that gets a gradient."""
    if x is None or canonical is None:
        return True
    has_all = not x.requires_grad or x.numel() == canonical.numel()
    return has_all and canonical.numel() > 0 and x.data_ptr() == canonical.data_ptr()


def _save(ctx: Any, inputs: Inputs, outputs: Outputs | SavedProbabilities, call: Straight | Options) -> None:
    """Keep what the backward needs. `call` has tensors in the user's axes; the operator's Options stand for canonical ones."""
    ctx.call = call
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
    saved, call, count = ctx.saved_tensors, ctx.call, len(Inputs._fields)
    from_p = len(saved) == count + len(SavedProbabilities._fields)
    outputs = SavedProbabilities._make(saved[count:]) if from_p else Outputs._make(saved[count:])
    options = call if call.__class__ is Options else call.options
    need_q, need_k, need_v, _, need_mask_bias, need_pair_bias, need_gate = asked  # a mask has no gradient
    needs = (need_q, need_k, need_v, need_mask_bias, need_pair_bias, need_gate)
    work = Backward(Inputs._make(saved[:count]), options, Cotangents(do, dlse), outputs, needs)
    run = None if seen or torch.is_grad_enabled() else _straight_backward(call, work, from_p)
    return _by_operator(call, work) if run is None else run(work)


def _straight_backward(call: Straight | Options, work: Backward, from_p: bool) -> Callable[[Backward], Gradients] | None:
    """Return a function that runs the plan of this backward and of later equal ones; None if the operator must run it.

    Args:
        call: of the forward, as `_save` takes it.
        work: the backward.
        from_p: whether it starts from saved probabilities.
    """
    inputs, (do, dlse), needs = work.inputs, work.cotangents, work.needs
    *needs_qkv, _, _, needs_gate = needs
    settings: Any = call
    if call.__class__ is Options:
        if guards.autocasts() is None:  # in a trace, sizes may be symbols
            return None
        settings = (inputs.q.shape, inputs.k.shape, tuple([x is None for x in inputs]), call)
    # One product may have made q, k and v, and the gate if it has a gradient.
    joined = [*inputs.qkv, inputs.gate] if needs_gate and inputs.gate is not None else [*inputs.qkv]
    columns = columns_of(joined) if all(needs_qkv) and work.options.layout == "bnlhd" else None
    key = (settings, from_p, do is None, dlse is None, needs, lookup.settings(inputs.q.dtype), columns)
    tensors = [x for x in work.tensors if x is not None]
    known: Callable[[Backward], Gradients] | None = guards.recall(key, tensors)
    if known is not None:
        return known
    if guards.autocasts() is None or not guards.ordinary(tensors):
        return None
    folded, axes = _canonical(call, work)
    if not all(same_memory(x, y) for x, y in zip(work.tensors, folded.tensors, strict=True)):
        return None
    if from_p:  # only its own backend reads it
        folded = folded._replace(options=work.options._replace(backend=call.plan.backend))  # type: ignore[union-attr]
    if columns is not None:
        folded = folded._replace(into=axes.fold_written(_four(columns.make(joined, "meta"))))
    plan = lookup.plan(folded)
    written = axes.restore_written(empty_gradients(folded.inputs, work.options.layout, needs, "meta"))
    likes, count = (*inputs.qkv, inputs.gate), len(joined)
    makers = [None if x is None else maker(x, like) for x, like in zip(written, likes, strict=True)]  # type: ignore[arg-type]

    def run(work: Backward) -> Gradients:
        inputs = work.inputs
        likes = (*inputs.qkv, inputs.gate)
        if columns is not None and plan.writes_into:
            written = _four(columns.make(likes[:count]))  # type: ignore[arg-type]
        else:
            written = tuple([None if make is None else make(x) for make, x in zip(makers, likes, strict=True)])  # type: ignore[arg-type]
        dmask_bias, dpair_bias = plan.run(work.cotangents, inputs, work.outputs, written)
        return *written[:3], _like(dmask_bias, inputs.mask_bias), _like(dpair_bias, inputs.pair_bias), written[3]

    guards.remember(key, tensors, run)
    return run


def _four(gradients: list[Tensor]) -> tuple[Tensor | None, ...]:
    """dq, dk, dv and dgate, None for a gate that has none."""
    return (*gradients, None) if len(gradients) == 3 else tuple(gradients)


def _by_operator(call: Straight | Options, work: Backward) -> Gradients:
    """By the operator, which torch can trace and transform, and which refuses a second derivative.

    It starts from the statistic. A forward that saved the probabilities instead is done again.
    """
    folded, axes = _canonical(call, work)
    if isinstance(work.outputs, SavedProbabilities):
        with torch.no_grad():
            folded = folded._replace(outputs=Outputs(*operators.forward(*operators.arguments_of(folded.inputs, work.options))))
    values = operators.differentiate(folded)
    dq, dk, dv, dmask_bias, dpair_bias, dgate = (x if need else None for x, need in zip(values, work.needs, strict=True))
    dq, dk, dv, dgate = axes.restore_written((dq, dk, dv, dgate))
    gradients = (dq, dk, dv, dmask_bias, dpair_bias, dgate)
    q, k, v, _, mask_bias, pair_bias, gate = work.inputs  # compiled autograd of torch 2.7 reads no property of it
    return tuple([_like(*pair) for pair in zip(gradients, (q, k, v, mask_bias, pair_bias, gate), strict=True)])


def _canonical(call: Straight | Options, work: Backward) -> tuple[Backward, Axes]:
    """The pass in the canonical axes that its forward gave it, and the way back."""
    if isinstance(call, Options):
        return work, CANONICAL
    *_, needs_pair_bias, _ = work.needs
    folded, axes = canonicalise(work.inputs, work.options.layout, narrow=not needs_pair_bias)
    (do, dlse), saved = work.cotangents, work.outputs
    do, o = (None if x is None else axes.fold_queries(x) for x in (do, saved.o))
    cotangents = Cotangents(do, None if dlse is None else axes.fold_statistic(dlse))
    outputs: Any = SavedProbabilities(o, saved[1])
    if isinstance(saved, Outputs):
        outputs = Outputs(o, axes.fold_statistic(saved.lse), axes.fold_statistic(saved.reference))  # type: ignore[arg-type]
    return work._replace(inputs=folded, cotangents=cotangents, outputs=outputs), axes


def _like(gradient: Tensor | None, x: Tensor | None) -> Tensor | None:
    """Reshape a gradient to its input's shape."""
    return gradient if gradient is None or x is None or gradient.shape == x.shape else gradient.reshape(x.shape)


class EvoformerAttention(torch.autograd.Function):
    """A call that goes straight to a plan, as autograd sees it; profilers show it by this name."""

    @staticmethod
    def forward(ctx: Any, call: Straight, *tensors: Any) -> tuple[Tensor | None, ...]:
        """o, lse and reference in the user's axes; o alone if the probabilities are saved."""
        inputs = Inputs._make(tensors)
        outputs = call.compute(inputs)
        _save(ctx, inputs, outputs, call)
        return (outputs.o, None, None) if isinstance(outputs, SavedProbabilities) else outputs

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None, _: Tensor | None) -> Gradients:
        """A gradient, or None, for each argument of `forward`."""
        dq, dk, dv, dmask_bias, dpair_bias, dgate = _gradients(ctx, do, dlse, ctx.needs_input_grad[1:])
        return None, dq, dk, dv, None, dmask_bias, dpair_bias, dgate


_record: Callable[..., Any] = super(torch.autograd.Function, EvoformerAttention).apply
"""`EvoformerAttention.apply` without its questions about transforms, which `guards` has asked."""


def _save_operator(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    tensors, options = operators.values_of(inputs)
    _save(ctx, tensors, Outputs(*output), options)


def _differentiate_operator(ctx: Any, do: Tensor | None, dlse: Tensor | None, _: Tensor | None) -> Gradients:
    asked, options = operators.split(ctx.needs_input_grad)
    dq, dk, dv, dmask_bias, dpair_bias, dgate = _gradients(ctx, do, dlse, tuple([bool(need) for need in asked]))
    gradients: Gradients = (dq, dk, dv, None, dmask_bias, dpair_bias, *[None] * len(options), dgate)
    return gradients[: len(ctx.needs_input_grad)]  # torch leaves out a gate that is None


def _no_second_derivative(ctx: Any, *cotangents: Tensor) -> Gradients:
    raise RuntimeError(
        "evoformer_attention has no second derivative: its backward is a formula that autograd does not see. "
        "For double backward write the attention densely in torch."
    )


_LIBRARY = operators.LIBRARY
torch.library.register_autograd("evoattn::forward", _differentiate_operator, setup_context=_save_operator, lib=_LIBRARY)
torch.library.register_autograd("evoattn::backward", _no_second_derivative, lib=_LIBRARY)


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the `backward` of an autograd function whose gradients have no derivative.

    The gradients depend on all cotangents and saved tensors, as autograd sees it. Their derivative raises RuntimeError.
    """

    @functools.wraps(backward)
    def once(ctx: Any, *cotangents: Any) -> Any:
        if not torch.is_grad_enabled():
            return backward(ctx, *cotangents)
        with torch.no_grad():
            result = backward(ctx, *cotangents)
        sources = [x for x in (*cotangents, *ctx.saved_tensors) if isinstance(x, Tensor) and x.requires_grad]
        if not sources:
            return result
        gradients = result if isinstance(result, tuple) else (result,)
        present = [x for x in gradients if x is not None]
        ended = iter(_End.apply(len(present), *present, *sources))  # type: ignore[no-untyped-call]
        gradients = tuple(None if x is None else next(ended) for x in gradients)
        return gradients if isinstance(result, tuple) else gradients[0]

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
