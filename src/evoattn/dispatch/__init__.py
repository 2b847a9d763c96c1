"""The way of a call: `attend` runs its plans, and `explain` shows them.

A call goes straight to its plan when the operator `evoattn::forward` would do nothing but compute and its tensors lie in memory
as canonical ones do; then its result is the operator's. `guards` remembers the way of calls with the
same properties, so that these are checked and worked out once.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor

from evoattn.backends import Description, Plan
from evoattn.core import guards, tuned_tiles
from evoattn.core.config import Config
from evoattn.core.inputs import Cotangents, Inputs, Outputs
from evoattn.core.layouts import empty_outputs
from evoattn.core.numerics import natural_lse, row_shift
from evoattn.core.problem import Problem, describe
from evoattn.dispatch import distributed, lookup, operators
from evoattn.dispatch.autograd import Straight, maker, same_memory
from evoattn.dispatch.axes import canonicalise, key_axes
from evoattn.dispatch.checks import check_arguments, compute_dtype
from evoattn.dispatch.lookup import Backward, Forward, Options, RefusalError

_SCALES = (type(None), float, int)
"""Classes of scales whose calls are kept; any other number takes the way of a new call each time."""


@dataclasses.dataclass(eq=False)
class _ByOperator:
    """A call through the operator, by views that autograd knows of; its fields are those of `Straight`."""

    options: Options
    casts: bool = False

    def __call__(self, inputs: Inputs) -> Outputs:
        folded, axes = canonicalise(inputs, self.options.layout)
        o, lse, reference = operators.forward(*operators.arguments_of(folded, self.options))
        return Outputs(axes.restore_queries(o), axes.restore_statistic(lse), axes.restore_statistic(reference))


def attend(inputs: Inputs, options: Options) -> tuple[Tensor, ...]:
    """o, and the LSE if it is asked for; raises TypeError or ValueError for arguments that do not fit."""
    call = find(inputs, options)
    if call is None:
        check_arguments(inputs, options)
        if any(distributed.is_distributed(x) for x in inputs):
            return distributed.attend(lambda local: attend(local, options), inputs, options.layout)
        call = _work_out(inputs, options)
    outputs = call(inputs)
    return (outputs[0], _user_lse(inputs, outputs[1], outputs[2])) if options.return_lse else (outputs[0],)


def _user_lse(inputs: Inputs, lse: Tensor, reference: Tensor) -> Tensor:
    """The logsumexp of the scores, from what a forward saves: in natural units, and with the row shift."""
    lse = natural_lse(lse, reference)
    if inputs.mask_bias is None:
        return lse
    mask = None if inputs.mask is None else key_axes(inputs.mask, inputs.q)
    return lse + row_shift(mask, key_axes(inputs.mask_bias, inputs.q), lse.dtype)[..., None, None]


def forget() -> None:
    """Check, choose and plan anew from the next call on, because something other than a call's arguments has changed."""
    lookup.forget()
    guards.forget()


tuned_tiles.listeners.append(forget)


def find(inputs: Inputs, options: Options) -> Straight | _ByOperator | None:
    """The kept plan of an earlier call with equal shapes, dtypes, strides and settings, else None.

    It is None, too, if torch must see the operator, as in a trace, and if autocast would cast an input.
    """
    if guards.is_seen():
        return None
    try:
        call: Any = guards.recall(_key(inputs, options), [x for x in inputs if x is not None])
    except (AttributeError, TypeError, RuntimeError):  # no tensor, an option that has no hash, a tensor without a shape
        return None
    return None if call is None or (call.casts and _would_cast(inputs)) else call


def _work_out(inputs: Inputs, options: Options) -> Straight | _ByOperator:
    """The way of a call whose arguments have been checked, which is kept for calls that look alike."""
    settled = options.settled()
    tensors = [x for x in inputs if x is not None]
    casts = None if guards.is_seen() else guards.autocasts()
    if casts is None or (casts and _would_cast(inputs)) or not guards.ordinary(tensors):
        return _ByOperator(settled)
    call = _straight(inputs, settled, casts, options.return_lse) or _ByOperator(settled, casts)
    if options.scale.__class__ in _SCALES:
        guards.remember(_key(inputs, options), tensors, call)
    return call


def _key(inputs: Inputs, options: Options) -> tuple[Any, ...]:
    """All that a call depends on but for the properties of its tensors."""
    q = inputs.q
    missing, deterministic = tuple([x is None for x in inputs]), torch.are_deterministic_algorithms_enabled()
    return q.shape, inputs.k.shape, missing, torch.is_grad_enabled(), deterministic, lookup.settings(q.dtype), *options


def _would_cast(inputs: Inputs) -> bool:
    """Whether autocast would give q, k, v or the gate another dtype."""
    return any(x is not None and compute_dtype(x) != x.dtype for x in (*inputs.qkv, inputs.gate))


def _straight(inputs: Inputs, options: Options, casts: bool, return_lse: bool) -> Straight | None:
    """The call that goes straight to a plan; None if its canonical tensors do not lie as its own do."""
    folded, axes = canonicalise(inputs, options.layout)
    if not axes.in_order or not all(same_memory(x, y) for x, y in zip(inputs, folded, strict=True)):
        return None
    o, lse, _ = empty_outputs(folded, options.layout, "meta")
    makers = [maker(x, inputs.q) for x in (axes.restore_queries(o), axes.restore_statistic(lse))]
    watched = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    records = watched and any(x is not None and x.requires_grad for x in inputs)
    plan = lookup.plan(Forward(folded, options))
    saves_p = plan.save_probabilities is not None and not return_lse
    if records:
        both = functools.partial(_both, inputs, Forward(folded, options), plan)
        if plan.compile_together is not None:
            plan.compile_together(both)
        # If another backend runs the backward, that starts from the statistic.
        saves_p = saves_p and bool(both())
    return Straight(options, casts, records, plan, saves_p, *makers)


def _both(inputs: Inputs, work: Forward, plan: Plan) -> tuple[Plan, ...]:
    """The plans of both passes, if one backend makes them. The backward is planned as it will be if the cotangent lies like O
    and the LSE has none."""
    needs = tuple([x is not None and x.requires_grad for x in inputs.differentiable])
    try:
        backward = lookup.plan(_backward_of(work, needs, dlse=False), runs=False)
    except (RefusalError, RuntimeError):  # a backward that is asked for raises it again
        return ()
    return (plan, backward) if backward.backend == plan.backend else ()


def _backward_of(work: Forward, needs: tuple[bool, ...], *, dlse: bool) -> Backward:
    """The backward of a forward, if the cotangent lies like O."""
    outputs = empty_outputs(work.inputs, work.options.layout, "meta")
    return Backward(*work, Cotangents(outputs.o, outputs.lse if dlse else None), outputs, needs)


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What a call would run and why; `print` it.

    Args:
        problem: the call in canonical axes.
        backend: the backend that would run it, or None if every one asked refuses.
        config: the tile config that this backend would use, of the forward where the backward has its own.
        backward_backend: the backend of the backward, if that is another one.
        backward: the tiles of each kernel of the backward that gradients need, where the backend has some of its own.
        refused: for each backend that was asked and does not take it, all its reasons; one may know another to be faster.
        copies: what would be copied or laid out anew, each with the reason.
        gate: where the gate is multiplied, and where its part of the backward is, if the backend does that in its kernels.
        tuned: for which directions, "forward", "backward" or "both", `evoattn tune` found the config on this machine.
    """

    problem: Problem
    backend: str | None
    config: Config | None
    refused: dict[str, list[str]]
    copies: list[str]
    backward: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)
    backward_backend: str | None = None
    gate: tuple[str, ...] = ()
    tuned: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"problem  {self.problem}", f"backend  {self.backend or 'none takes it'}"]
        if self.config is not None:
            lines.append(f"config   {_settings(self.config.given())}")
        if self.backward_backend is not None:
            lines.append(f"backward by {self.backward_backend}")
        lines += [f"backward {kernel}: {_settings(tiles)}" for kernel, tiles in self.backward.items()]
        lines += [f"gate     {where}" for where in self.gate]
        lines += [f"tuned    {direction}: found by evoattn tune on this machine" for direction in self.tuned]
        lines += [f"copied   {what}" for what in self.copies]
        lines += [f"refused  {name}: {reason}" for name, reasons in self.refused.items() for reason in reasons]
        return "\n".join(lines)


def _settings(values: dict[str, int]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items())


def explain(inputs: Inputs, asked: Options) -> Explanation:
    """What a call of these arguments would run: its plans, made and not run. Raises what the call raises for bad ones."""
    check_arguments(inputs, asked)
    if any(distributed.is_distributed(x) for x in inputs):
        inputs = distributed.outlines(inputs, asked.layout)
    needs = tuple([torch.is_grad_enabled() and x is not None and x.requires_grad for x in inputs.differentiable])
    inputs, options = _with_memory(inputs), asked.settled()
    folded, _ = canonicalise(inputs, options.layout, narrow=not needs[4])
    four = ("q", "k", "v", "gate")
    pairs = [(name, getattr(inputs, name), getattr(folded, name)) for name in four]
    copies = [
        f"{name}: its leading axes cannot be merged as a view"
        for name, x, y in pairs
        if x is not None and x.numel() and x.data_ptr() != y.data_ptr()
    ]
    folded = folded._replace(**{name: _cast(y) for name, _, y in pairs})  # type: ignore[arg-type]
    forward, refused = _planned(Forward(folded, options))
    backward, refused_backward = forward, refused
    if any(needs):
        backward, refused_backward = _planned(_backward_of(Forward(folded, options), needs, dlse=asked.return_lse))
    descriptions = [Description() if plan is None else plan.describe() for plan in (forward, backward)]
    names = [None if plan is None else plan.backend for plan in (forward, backward)]
    reasons = {  # the passes are chosen one by one
        name: _each_once([*refused.get(name, []), *refused_backward.get(name, [])]) for name in (*refused, *refused_backward)
    }
    return Explanation(
        problem=describe(folded, scale=options.scale, needs=needs, deterministic=bool(options.deterministic)),  # type: ignore[arg-type]
        backend=names[0],
        config=descriptions[0].config,
        refused=reasons,
        copies=_each_once([*copies, *descriptions[0].copies, *descriptions[1].copies]),
        backward=descriptions[1].kernels,
        backward_backend=names[1] if names[1] != names[0] else None,
        gate=tuple(_each_once([one.gate for one in descriptions])),
        tuned=tuple(_each_once([one.tuned for one in descriptions])),
    )


def _planned(work: Forward | Backward) -> tuple[Plan | None, dict[str, list[str]]]:
    """Return the plan, or None if every backend refuses, and the reasons of those that refuse."""
    try:
        plan = lookup.plan(work, runs=False)
    except RefusalError as refused:
        return None, refused.reasons
    return plan, plan.refused


def _each_once(texts: list[Any]) -> list[str]:
    return [text for text in dict.fromkeys(texts) if text is not None]


def _with_memory(inputs: Inputs) -> Inputs:
    """The tensors, or others like them where they have no memory of their own, as inside vmap."""
    try:
        for x in inputs:
            if x is not None:
                x.data_ptr()
    except RuntimeError:
        like = [None if x is None else torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in inputs]
        return Inputs._make(like)
    return inputs


def _cast(x: Tensor | None) -> Tensor | None:
    """A tensor like the one that autocast would make, where it would."""
    return x if x is None or x.dtype == compute_dtype(x) else torch.empty_like(x, dtype=compute_dtype(x))
