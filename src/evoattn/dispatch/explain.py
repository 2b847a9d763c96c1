"""`explain_call` shows what a call would run: its plans, made and not run."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from evoattn.backends import Description, Plan
from evoattn.core.config import Config
from evoattn.core.inputs import Inputs
from evoattn.core.problem import Needs, Problem, describe
from evoattn.dispatch import distributed, lookup
from evoattn.dispatch.axes import canonicalise
from evoattn.dispatch.checks import check_arguments, compute_dtype
from evoattn.dispatch.lookup import BackwardPass, ForwardPass, Options, RefusalError


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The backend and tiles that a call would use, and why; `print` it.

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
            lines.append(f"config   {_listed(self.config.given())}")
        if self.backward_backend is not None:
            lines.append(f"backward by {self.backward_backend}")
        lines += [f"backward {kernel}: {_listed(tiles)}" for kernel, tiles in self.backward.items()]
        lines += [f"gate     {where}" for where in self.gate]
        lines += [f"tuned    {direction}: found by evoattn tune on this machine" for direction in self.tuned]
        lines += [f"copied   {what}" for what in self.copies]
        lines += [f"refused  {name}: {reason}" for name, reasons in self.refused.items() for reason in reasons]
        return "\n".join(lines)


def _listed(values: dict[str, int]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items())


def explain_call(inputs: Inputs, options: Options) -> Explanation:
    """Return what a call of these arguments would run; raises what the call raises for bad ones."""
    check_arguments(inputs, options)
    if any(distributed.is_distributed(x) for x in inputs):
        inputs = distributed.outlines(inputs, options.layout)
    grad_enabled = torch.is_grad_enabled()
    needs = Needs(*[grad_enabled and x is not None and x.requires_grad for x in inputs.differentiable])
    inputs, settled = _with_memory(inputs), options.settled()
    folded, _ = canonicalise(inputs, settled.layout, narrow=not needs.pair_bias)
    pairs = [(name, getattr(inputs, name), getattr(folded, name)) for name in ("q", "k", "v", "gate")]
    copies = [
        f"{name}: its leading axes cannot be merged as a view"
        for name, x, y in pairs
        if x is not None and x.numel() and x.data_ptr() != y.data_ptr()
    ]
    folded = folded._replace(**{name: _cast(y) for name, _, y in pairs})  # type: ignore[arg-type]
    work = ForwardPass(folded, settled)
    forward, refused = _plan(work)
    backward, refused_backward = forward, refused
    if any(needs):
        backward, refused_backward = _plan(work.backward(needs, dlse=options.return_lse))
    descriptions = [Description() if plan is None else plan.describe() for plan in (forward, backward)]
    names = [None if plan is None else plan.backend for plan in (forward, backward)]
    reasons = {  # the passes are chosen one by one
        name: list(dict.fromkeys([*refused.get(name, []), *refused_backward.get(name, [])]))
        for name in (*refused, *refused_backward)
    }
    return Explanation(
        problem=describe(folded, scale=settled.scale, needs=needs, deterministic=bool(settled.deterministic)),
        backend=names[0],
        config=descriptions[0].config,
        refused=reasons,
        copies=list(dict.fromkeys([*copies, *descriptions[0].copies, *descriptions[1].copies])),
        backward=descriptions[1].kernels,
        backward_backend=names[1] if names[1] != names[0] else None,
        gate=tuple(dict.fromkeys([one.gate for one in descriptions if one.gate is not None])),
        tuned=tuple(dict.fromkeys([one.tuned for one in descriptions if one.tuned is not None])),
    )


def _plan(work: ForwardPass | BackwardPass) -> tuple[Plan | None, dict[str, list[str]]]:
    """Return the plan, or None if every backend refuses, and the reasons of those that refuse."""
    try:
        plan = lookup.find_plan(work, will_run=False)
    except RefusalError as error:
        return None, error.reasons
    return plan, plan.refused


def _with_memory(inputs: Inputs) -> Inputs:
    """Return the tensors, or others like them if they have no memory of their own, as inside vmap."""
    try:
        for x in inputs:
            if x is not None:
                x.data_ptr()
    except RuntimeError:
        like = [None if x is None else torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in inputs]
        return Inputs._make(like)
    return inputs


def _cast(x: Tensor | None) -> Tensor | None:
    """Return an uninitialised tensor like the one that autocast would make; x if autocast leaves it."""
    return x if x is None or x.dtype == compute_dtype(x) else torch.empty_like(x, dtype=compute_dtype(x))
