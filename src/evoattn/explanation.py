"""What a call would run: the plans that it would run, made and not run, as they describe themselves."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from evoattn.backends import Description, Plan
from evoattn.call import sharded
from evoattn.call.canonical import canonicalise
from evoattn.call.validation import Wishes, check_arguments, compute_dtype
from evoattn.inputs import Cotangents, Inputs
from evoattn.layouts import empty_outputs
from evoattn.problem import Problem, describe
from evoattn.run import plans
from evoattn.run.dispatch import RefusalError
from evoattn.tuning import Config

__all__ = ["Explanation", "explanation_of"]


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


def explanation_of(inputs: Inputs, wishes: Wishes) -> Explanation:
    """What a call of these arguments would run; raises what the call raises for bad ones."""
    check_arguments(inputs, wishes)
    if sharded.is_sharded(inputs):
        inputs = sharded.outlines(inputs, wishes.layout)
    needs = tuple([torch.is_grad_enabled() and x is not None and x.requires_grad for x in inputs.differentiable])
    inputs = _with_memory(inputs)
    options = wishes.options()
    folded, _ = canonicalise(inputs, options.layout, narrow=not needs[4])
    copies = [
        f"{name}: its leading axes cannot be merged as a view"
        for name in ("q", "k", "v", "gate")
        if _is_copied(getattr(inputs, name), getattr(folded, name))
    ]
    folded = _cast(folded)
    forward, refused = _planned(lambda: plans.forward(folded, options, runs=False))
    backward, refused_backward = forward, refused
    if any(needs):
        outputs = empty_outputs(folded, options.layout, "meta")
        cotangents = Cotangents(outputs.o, outputs.lse if wishes.return_lse else None)
        backward, refused_backward = _planned(lambda: plans.backward(cotangents, folded, outputs, needs, options, runs=False))
    told = [Description() if plan is None else plan.describe() for plan in (forward, backward)]
    names = dict.fromkeys((*refused, *refused_backward))  # chosen one by one
    return Explanation(
        problem=describe(folded, scale=options.scale, needs=needs, deterministic=options.deterministic),  # type: ignore[arg-type]
        backend=None if forward is None else forward.backend,
        config=told[0].config,
        refused={name: _each_once(refused.get(name, []), refused_backward.get(name, [])) for name in names},
        copies=_each_once(copies, told[0].copies, told[1].copies),
        backward=told[1].kernels,
        backward_backend=_other(backward, forward),
        gate=tuple(dict.fromkeys(one.gate for one in told if one.gate is not None)),
        tuned=tuple(dict.fromkeys(one.tuned for one in told if one.tuned is not None)),
    )


def _planned(plan: Callable[[], Plan]) -> tuple[Plan | None, dict[str, list[str]]]:
    """A plan and what the backends say that it is not of; None if all refuse."""
    try:
        made = plan()
    except RefusalError as refused:
        return None, refused.reasons
    return made, made.refused


def _other(backward: Plan | None, forward: Plan | None) -> str | None:
    """The backend of the backward, if that is another one."""
    name = None if backward is None else backward.backend
    return None if forward is not None and name == forward.backend else name


def _each_once(*texts: list[str] | tuple[str, ...]) -> list[str]:
    return list(dict.fromkeys(text for some in texts for text in some))


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


def _is_copied(given: Tensor | None, canonical: Tensor | None) -> bool:
    """Whether a canonical tensor is not a view of what was given."""
    return given is not None and canonical is not None and given.numel() > 0 and given.data_ptr() != canonical.data_ptr()


def _cast(folded: Inputs) -> Inputs:
    """Canonical tensors like those that autocast would make, where it would."""
    q, k, v = (x if x.dtype == compute_dtype(x) else torch.empty_like(x, dtype=compute_dtype(x)) for x in folded.qkv)
    gate = folded.gate
    if gate is not None and gate.dtype != compute_dtype(gate):
        gate = torch.empty_like(gate, dtype=compute_dtype(gate))
    return folded._replace(q=q, k=k, v=v, gate=gate)
