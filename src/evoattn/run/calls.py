"""The two ways of a call: straight to a plan, or through the operator `evoattn::forward`.

A call goes straight when the operator would do nothing but compute and its tensors lie in memory as canonical ones do; then its
result is the operator's. `guards` keeps which way calls of each look go, so that a look is checked and worked out once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from evoattn.backends import Plan
from evoattn.call.canonical import canonicalise
from evoattn.call.validation import Wishes, compute_dtype
from evoattn.inputs import Cotangents, Inputs, Kept, Options, Outputs
from evoattn.layouts import empty_outputs
from evoattn.run import guards, operators, plans
from evoattn.run.autograd import Look, look_of, make, record, same_memory
from evoattn.run.dispatch import RefusalError, backend_module
from evoattn.tuning import user

__all__ = ["ByOperator", "Straight", "find", "forget", "work_out"]

_SCALES = (type(None), float, int)
"""Classes of scales whose calls are kept; any other number takes the way of a new call each time."""

Call = Callable[[Inputs], Any]
"""What makes o, lse and reference, in the user's axes, of tensors in the user's axes; o alone if the LSE is not wished for."""


@dataclasses.dataclass(eq=False)
class Straight:
    """A call that goes straight to a plan.

    Args:
        options: as the operators take them.
        casts: whether autocast was on, which then would cast nothing.
        records: whether autograd has to know of the call.
        backend: of the forward's plan.
        run: of that plan.
        keep: of that plan, if the LSE is not wished for.
        o, lse: how they are made, perhaps like q; the reference is like lse.
    """

    options: Options
    casts: bool
    records: bool
    backend: str
    run: Callable[[Inputs, Outputs], None]
    keep: Callable[[Inputs, Tensor], Kept | None] | None
    o: Look | tuple[()]
    lse: Look | tuple[()]

    def __call__(self, inputs: Inputs) -> Any:
        return record(self, *inputs) if self.records else self.compute(inputs)

    def compute(self, inputs: Inputs) -> Outputs | Kept:
        """The outputs, of which autograd knows nothing."""
        o = make(self.o, inputs.q)
        if self.keep is not None:
            kept = self.keep(inputs, o)
            if kept is not None:
                return kept
        lse = make(self.lse, inputs.q)
        outputs = Outputs(o, lse, torch.empty_like(lse))
        self.run(inputs, outputs)
        return outputs


@dataclasses.dataclass(eq=False)
class ByOperator:
    """A call through the operator, by views that autograd knows of."""

    options: Options
    casts: bool = False

    def __call__(self, inputs: Inputs) -> Outputs:
        folded, axes = canonicalise(inputs, self.options.layout)
        o, lse, reference = operators.forward(*operators.arguments_of(folded, self.options))
        return Outputs(axes.restore_queries(o), axes.restore_statistic(lse), axes.restore_statistic(reference))


def forget() -> None:
    """Check, choose and plan anew from the next call on, because something other than a call's arguments has changed."""
    plans.forget()
    guards.forget()


user.listeners.append(forget)


def find(inputs: Inputs, wishes: Wishes) -> Call | None:
    """The way of calls that look like this one, if it is known, and torch need not see an operator."""
    if guards.is_seen():
        return None
    try:
        call = guards.recall(_key(inputs, wishes), [x for x in inputs if x is not None])
    except (AttributeError, TypeError, RuntimeError):  # no tensor, an option that has no hash, a tensor without a shape
        return None
    return None if call is None or (call.casts and _would_cast(inputs)) else call


def work_out(inputs: Inputs, wishes: Wishes) -> Call:
    """The way of a call whose arguments have been checked, which is kept for calls that look alike."""
    options = wishes.options()
    if guards.is_seen():
        return ByOperator(options)
    given = [x for x in inputs if x is not None]
    casts = guards.autocasts()
    if casts is None or (casts and _would_cast(inputs)) or not guards.ordinary(given):
        return ByOperator(options)
    call = _straight(inputs, options, casts, wishes.return_lse) or ByOperator(options, casts)
    if wishes.scale.__class__ in _SCALES:
        guards.remember(_key(inputs, wishes), given, call)
    return call


def _key(inputs: Inputs, wishes: Wishes) -> tuple[Any, ...]:
    """All that a call depends on but for the looks of its tensors."""
    q = inputs.q
    missing, deterministic = tuple([x is None for x in inputs]), torch.are_deterministic_algorithms_enabled()
    return q.shape, inputs.k.shape, missing, torch.is_grad_enabled(), deterministic, plans.settings(q.dtype), *wishes


def _would_cast(inputs: Inputs) -> bool:
    """Whether autocast would give q, k, v or the gate another dtype."""
    return any(x is not None and compute_dtype(x) != x.dtype for x in (*inputs.qkv, inputs.gate))


def _straight(inputs: Inputs, options: Options, casts: bool, return_lse: bool) -> Straight | None:
    """The call that goes straight to a plan; None if its canonical tensors do not lie as its own do."""
    folded, axes = canonicalise(inputs, options.layout)
    if not axes.in_order or not all(same_memory(x, y) for x, y in zip(inputs, folded, strict=True)):
        return None
    o, lse, _ = empty_outputs(folded, options.layout, "meta")
    looks = [look_of(x, inputs.q) for x in (axes.restore_queries(o), axes.restore_statistic(lse))]
    watched = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    records = watched and any(x is not None and x.requires_grad for x in inputs)
    plan = plans.forward(folded, options)
    if records:
        _compile_both(inputs, folded, options, plan)
    keep = None if return_lse else plan.keep
    if keep is not None and records and not _both(inputs, folded, options, plan):
        keep = None  # another backend runs the backward, which starts from the statistic
    return Straight(options, casts, records, plan.backend, plan.run, keep, *looks)


def _compile_both(inputs: Inputs, folded: Inputs, options: Options, forward: Plan) -> None:
    """Let the forward's backend compile what both passes need, where it can do so at once."""
    together = getattr(backend_module(forward.backend), "compile_together", None)
    if together is not None:
        together(lambda: _both(inputs, folded, options, forward))


def _both(inputs: Inputs, folded: Inputs, options: Options, forward: Plan) -> tuple[Plan, ...]:
    """The plans of both passes, if one backend makes them. The backward is planned as it will be if the cotangent lies like O
    and the LSE has none."""
    needs = tuple([x is not None and x.requires_grad for x in inputs.differentiable])
    outputs = empty_outputs(folded, options.layout, "meta")
    try:
        backward = plans.backward(Cotangents(outputs.o), folded, outputs, needs, options, runs=False)
    except (RefusalError, RuntimeError):  # a backward that is asked for raises it again
        return ()
    return (forward, backward) if backward.backend == forward.backend else ()
