"""The one look-up: a pass, by how its tensors lie in memory -> the backend that takes it and the plan that runs it."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from evoattn.backends import AUTO_ORDER, Backend, Plan
from evoattn.core.config import Config
from evoattn.core.devices import planned
from evoattn.core.inputs import Cotangents, Inputs, Outputs, SavedProbabilities
from evoattn.core.numerics import float32_products
from evoattn.core.problem import Problem, describe

listeners: list[Callable[[str], None]] = []
"""Told the name of a plan's backend when a pass takes the plan for the first time; `explain` runs none and tells nothing."""


class Options(NamedTuple):
    """What a caller asks for besides the tensors; `evoattn.api.evoformer_attention` says what each is."""

    scale: float | None = None
    layout: str = "bnlhd"
    deterministic: bool | None = None
    backend: str = "auto"
    config: Config | None = None
    return_lse: bool = False

    def settled(self) -> Options:
        """The same of both passes, once it has been checked: torch's settings are in it, and the LSE is not."""
        scale, deterministic = self.scale, self.deterministic
        deterministic = torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic
        return Options(None if scale is None else float(scale), self.layout, deterministic, self.backend, self.config)


class Forward(NamedTuple):
    """A forward of canonical tensors, with settled options."""

    inputs: Inputs
    options: Options


class Backward(NamedTuple):
    """A backward of canonical tensors.

    Args:
        inputs, options: of its forward.
        cotangents, outputs: what it starts from.
        needs: for each of `problem.GRADIENTS`, whether it is wanted.
        into: how dq, dk, dv and dgate lie in memory if the backend can write them so (`Plan.writes_into`). It can if they are
            contiguous in the user's layout, which they are for `()`.
    """

    inputs: Inputs
    options: Options
    cotangents: Cotangents
    outputs: Outputs | SavedProbabilities
    needs: tuple[bool, ...]
    into: tuple[Tensor | None, ...] = ()

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """All that it reads."""
        return (*self.cotangents, *self.inputs, *self.outputs)


@dataclasses.dataclass(slots=True)
class _Place:
    """The plan of passes with the same signature; None until there is one. `told`: the listeners have heard of it."""

    plan: Plan | None = None
    told: bool = False


@functools.lru_cache(maxsize=4096)
def _place(*signature: Any) -> _Place:
    return _Place()


def forget() -> None:
    """Choose and plan anew from the next call on, because something other than a call's arguments has changed."""
    _place.cache_clear()


def settings(dtype: torch.dtype) -> str:
    """All that a backend may look at in torch's settings when it plans, besides determinism, which is an argument."""
    return float32_products() if dtype == torch.float32 else ""


def plan(work: Forward | Backward, *, runs: bool = True) -> Plan:
    """The plan of a pass, made if there is none; raises ValueError if no backend takes it.

    Args:
        work: the pass.
        runs: whether the caller runs the plan.
    """
    # A plan for a card that need not be there has a place of its own: nobody runs it twice.
    place = _place(*_signature(work)) if planned() is None else _Place()
    if place.plan is None:
        new = _make(work)
        if place.plan is None:  # else another thread was faster
            place.plan = new
    if runs and not place.told:
        place.told = True
        for listener in listeners:
            listener(place.plan.backend)
    return place.plan


def _signature(work: Forward | Backward) -> tuple[Any, ...]:
    """All that a backend may look at when it plans. The device of q is that of all tensors."""
    q = work.inputs.q
    tensors, needs = ((*work.tensors, *work.into), work.needs) if isinstance(work, Backward) else (work.inputs, None)
    tensor_keys = [None if x is None else (x.shape, x.stride(), x.dtype, x.data_ptr() % 16 == 0) for x in tensors]
    return q.device, settings(q.dtype), needs, *work.options, *tensor_keys


def _make(work: Forward | Backward) -> Plan:
    inputs, options = work.inputs, work.options
    scale, config = options.scale, options.config or Config()
    settings: Any = {"deterministic": bool(options.deterministic)} | (
        {"needs": work.needs} if isinstance(work, Backward) else {}
    )
    problem = describe(inputs, scale=scale, **settings)
    if scale is not None and not math.isfinite(scale):  # a number that torch.compile traced as a symbol
        raise ValueError(f"scale must be finite, got {scale}")
    backend, refused = select(problem, options.backend, config)
    asked: Any = {"scale": float(problem.d) ** -0.5 if scale is None else scale, "layout": options.layout, "config": config}
    if isinstance(work, Backward):
        plan = backend.plan_backward(work.cotangents, inputs, work.outputs, into=work.into or None, **asked, **settings)
    else:
        plan = backend.plan_forward(inputs, **asked)
    return dataclasses.replace(plan, backend=backend.NAME, refused=refused)


def backend_module(name: str) -> Backend:
    """The backend's module; importing it pulls in no kernel language."""
    return cast(Backend, importlib.import_module(f"evoattn.backends.{name}"))


def refusals(name: str, problem: Problem, config: Config) -> list[str]:
    """Every reason why a backend does not take a problem; empty when it does."""
    backend = backend_module(name)
    reasons = backend.unsupported(problem, config)
    if reasons and problem.device == "cpu":  # asking for a GPU would start CUDA, which does not outlive a fork
        return reasons
    unavailable = backend.availability()
    return ([unavailable] if unavailable else []) + reasons


class RefusalError(ValueError):
    """No backend that was asked takes a problem.

    Args:
        message: the problem, and the reasons in lines.
        reasons: all reasons of each backend that was asked.
    """

    def __init__(self, message: str, reasons: dict[str, list[str]]) -> None:
        super().__init__(message)
        self.reasons = reasons


def select(problem: Problem, backend: str, config: Config) -> tuple[Backend, dict[str, list[str]]]:
    """The first backend without a reason to refuse a problem, or the one that it knows to be faster; and the others' reasons.

    Raises:
        RefusalError: the named backend (or, for "auto", every backend) refuses; the message lists all reasons.
    """
    names: Sequence[str] = AUTO_ORDER if backend == "auto" else (backend,)
    objections = {name: refusals(name, problem, config) for name in names}
    able = [name for name in names if not objections[name]]
    if not able:
        refused = [f"{name}: {reason}" for name, reasons in objections.items() for reason in reasons]
        raise RefusalError(f"backend={backend!r} cannot run this problem ({problem}):\n  " + "\n  ".join(refused), objections)
    faster = backend_module(able[0]).faster(problem) if len(able) > 1 else None
    if faster is not None and faster[0] in able:
        while able[0] != faster[0]:
            objections[able.pop(0)] = ["leaves it to {}: {}".format(*faster)]
    return backend_module(able[0]), {name: reasons for name, reasons in objections.items() if reasons}
