"""`attend` runs a call: directly by its plan, or through torch's operator `evoattn::forward`.

A direct call skips the operator. It is possible if nothing but autograd would see the operator, and if the tensors have the
same strides and alignment in canonical axes. The result is the same, but a small direct call in bfloat16 on a CPU rounds
more. `core.guards` remembers both kinds of calls, so that each kind is checked and prepared once.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from evoattn.backends import Plan
from evoattn.core import guards, tuned_tiles
from evoattn.core.inputs import Cotangents, Inputs, Outputs, SavedProbabilities
from evoattn.core.layouts import empty_outputs
from evoattn.core.numerics import natural_lse, row_shift
from evoattn.core.problem import Needs
from evoattn.dispatch import autograd, distributed, lookup
from evoattn.dispatch.autograd import OperatorCall, allocator, same_memory
from evoattn.dispatch.axes import Axes, canonicalise, key_axes
from evoattn.dispatch.checks import check_arguments, compute_dtype
from evoattn.dispatch.lookup import BackwardPass, ForwardPass, Options, RefusalError, Settings

_SCALES = (type(None), float, int)
"""Classes of scales whose calls are remembered. A call with any other number is prepared each time."""


def attend(inputs: Inputs, options: Options) -> tuple[Tensor, ...]:
    """Return o, and the LSE if it is asked for; raises TypeError or ValueError for arguments that do not fit."""
    call = recall(inputs, options)
    if call is None:
        check_arguments(inputs, options)
        if any(distributed.is_distributed(x) for x in inputs):
            return distributed.attend(lambda local: attend(local, options), inputs, options.layout)
        call = _prepare(inputs, options)
    outputs = call(inputs)
    return (outputs[0], _user_lse(inputs, outputs[1], outputs[2])) if options.return_lse else (outputs[0],)


def _user_lse(inputs: Inputs, lse: Tensor, reference: Tensor) -> Tensor:
    """Return the logsumexp of the scores in natural units and with the row shift, from what a forward saves."""
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


@dataclasses.dataclass(eq=False)
class DirectCall(OperatorCall):
    """A call that runs its plan where an `OperatorCall` runs the operator. Its backward has the user's axes.

    Args:
        settings: of both passes.
        casts: True if it was prepared under autocast. Its inputs then had autocast's dtype already.
        records: whether autograd records the call.
        plan: of the forward.
        saves_p: whether the plan may save the probabilities in place of the statistic.
        make_o, make_lse: allocate the outputs on the device of a tensor; the reference is like lse.
    """

    records: bool
    plan: Plan
    saves_p: bool
    make_o: Callable[[torch.device], Tensor]
    make_lse: Callable[[torch.device], Tensor]

    def __call__(self, inputs: Inputs) -> Any:
        """Return o, lse and reference; o alone is meaningful if the probabilities were saved."""
        return autograd.record(self, *inputs) if self.records else self.compute(inputs)

    def compute(self, inputs: Inputs) -> Outputs | SavedProbabilities:
        """Return the outputs, without autograd."""
        device = inputs.q.device
        o = self.make_o(device)
        if self.saves_p:
            saved: SavedProbabilities | None = self.plan.save_probabilities(inputs, o)  # type: ignore[misc]
            if saved is not None:
                return saved
        lse = self.make_lse(device)
        outputs = Outputs(o, lse, torch.empty_like(lse))
        self.plan.run(inputs, outputs)
        return outputs

    def key(self, inputs: Inputs) -> DirectCall:
        return self

    def canonicalise(self, work: BackwardPass) -> tuple[BackwardPass, Axes]:
        folded, axes = canonicalise(work.inputs, self.settings.layout, narrow=not work.needs.pair_bias)
        (do, dlse), saved = work.cotangents, work.outputs
        do, o = (None if x is None else axes.fold_queries(x) for x in (do, saved.o))
        cotangents = Cotangents(do, None if dlse is None else axes.fold_statistic(dlse))
        outputs: Any = SavedProbabilities(o, saved[1])
        if isinstance(saved, Outputs):
            outputs = Outputs(o, axes.fold_statistic(saved.lse), axes.fold_statistic(saved.reference))  # type: ignore[arg-type]
        return work._replace(inputs=folded, cotangents=cotangents, outputs=outputs), axes


def recall(inputs: Inputs, options: Options) -> OperatorCall | None:
    """Return the call that an earlier one with equal shapes, dtypes, strides and settings has led to, else None.

    Return None, too, if torch must see the operator, as in a trace, and if autocast would cast an input.
    """
    if guards.is_seen():
        return None
    try:
        call: Any = guards.recall(_key(inputs, options), [x for x in inputs if x is not None])
    except (AttributeError, TypeError, RuntimeError):  # no tensor, an option that has no hash, a tensor without a shape
        return None
    return None if call is None or (call.casts and _would_cast(inputs)) else call


def _prepare(inputs: Inputs, options: Options) -> OperatorCall:
    """Return the call for arguments that have been checked, and remember it for later ones."""
    settled = options.settled()
    tensors = [x for x in inputs if x is not None]
    casts = None if guards.is_seen() else guards.autocasts()
    if casts is None or (casts and _would_cast(inputs)) or not guards.ordinary(tensors):
        return OperatorCall(settled, False)
    call = _prepare_direct(inputs, settled, casts, options.return_lse) or OperatorCall(settled, casts)
    if options.scale.__class__ in _SCALES:
        guards.remember(_key(inputs, options), tensors, call)
    return call


def _key(inputs: Inputs, options: Options) -> tuple[Any, ...]:
    """Return all that a call depends on but for the properties of its tensors."""
    q = inputs.q
    missing, deterministic = tuple([x is None for x in inputs]), torch.are_deterministic_algorithms_enabled()
    return q.shape, inputs.k.shape, missing, torch.is_grad_enabled(), deterministic, lookup.torch_settings(q.dtype), *options


def _would_cast(inputs: Inputs) -> bool:
    """Return whether autocast would give q, k, v or the gate another dtype."""
    return any(x is not None and compute_dtype(x) != x.dtype for x in (*inputs.qkv, inputs.gate))


def _prepare_direct(inputs: Inputs, settings: Settings, casts: bool, return_lse: bool) -> DirectCall | None:
    """Return a direct call; None if the canonical tensors are no views of the same elements."""
    folded, axes = canonicalise(inputs, settings.layout)
    if not axes.in_order or not all(same_memory(x, y) for x, y in zip(inputs, folded, strict=True)):
        return None
    o, lse, _ = empty_outputs(folded, settings.layout, "meta")
    allocators = [allocator(x) for x in (axes.restore_queries(o), axes.restore_statistic(lse))]
    recording = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    records = recording and any(x is not None and x.requires_grad for x in inputs)
    work = ForwardPass(folded, settings)
    plan = lookup.find_plan(work)
    saves_p = plan.save_probabilities is not None and not return_lse
    if records:
        both = functools.partial(_plans_of_both_passes, inputs, work, plan)
        if plan.compile_together is not None:
            plan.compile_together(both)
        # If another backend runs the backward, that starts from the statistic.
        saves_p = saves_p and bool(both())
        if saves_p:  # only its own backend reads them
            settings = settings._replace(backend=plan.backend)
    return DirectCall(settings, casts, records, plan, saves_p, *allocators)


def _plans_of_both_passes(inputs: Inputs, work: ForwardPass, plan: Plan) -> tuple[Plan, ...]:
    """Return the plans of both passes, or none if two backends make them.

    The backward is planned for a cotangent with the strides of O, and none of the LSE.
    """
    needs = Needs(*[x is not None and x.requires_grad for x in inputs.differentiable])
    try:
        backward = lookup.find_plan(work.backward(needs, dlse=False), will_run=False)
    except (RefusalError, RuntimeError):  # a backward that is asked for raises it again
        return ()
    return (plan, backward) if backward.backend == plan.backend else ()
