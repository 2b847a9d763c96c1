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
from evoattn.core.layouts import empty_outputs
from evoattn.core.numerics import float32_products
from evoattn.core.problem import NO_GRADIENTS, Needs, Problem, describe

listeners: list[Callable[[str], None]] = []
"""Told the name of a plan's backend when a pass takes the plan for the first time; `explain` runs none and tells nothing."""


class Settings(NamedTuple):
    """The options of both passes of a call, as values that an operator of torch takes: a config as text, "" for none."""

    scale: float | None
    layout: str
    deterministic: bool
    backend: str
    config: str


class Options(NamedTuple):
    """The options of a call, as `evoattn.api.evoformer_attention` describes them."""

    scale: float | None = None
    layout: str = "bnlhd"
    deterministic: bool | None = None
    backend: str = "auto"
    config: Config | None = None
    return_lse: bool = False

    def settled(self) -> Settings:
        """Return what a plan depends on, with `deterministic` filled in from torch's setting."""
        scale, deterministic, config = self.scale, self.deterministic, self.config
        deterministic = torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic
        text = "" if config is None else config.to_text()
        return Settings(None if scale is None else float(scale), self.layout, deterministic, self.backend, text)


class ForwardPass(NamedTuple):
    """A forward of canonical tensors."""

    inputs: Inputs
    settings: Settings

    def backward(self, needs: Needs, *, dlse: bool) -> BackwardPass:
        """Return the backward of this forward, for a cotangent with the strides of O, and for one of the LSE or none."""
        outputs = empty_outputs(self.inputs, self.settings.layout, "meta")
        return BackwardPass(*self, Cotangents(outputs.o, outputs.lse if dlse else None), outputs, needs)


class BackwardPass(NamedTuple):
    """A backward of canonical tensors.

    `into` is how dq, dk, dv and dgate lie in memory if the backend can write them so (`Plan.writes_into`). For `()` they are
    contiguous in the user's layout.
    """

    inputs: Inputs
    settings: Settings
    cotangents: Cotangents
    outputs: Outputs | SavedProbabilities
    needs: Needs
    into: tuple[Tensor | None, ...] = ()

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """All tensors that it reads."""
        return (*self.cotangents, *self.inputs, *self.outputs)


@dataclasses.dataclass(slots=True)
class _Entry:
    """The plan of passes with one signature, None until it is made, and whether the listeners have been told of it."""

    plan: Plan | None = None
    reported: bool = False


@functools.lru_cache(maxsize=4096)
def _entry(*signature: Any) -> _Entry:
    return _Entry()


def forget() -> None:
    """Choose and plan anew from the next call on, because something other than a call's arguments has changed."""
    _entry.cache_clear()


def torch_settings(dtype: torch.dtype) -> str:
    """Return the settings of torch that a plan may depend on, besides determinism, which is an option."""
    return float32_products() if dtype == torch.float32 else ""


def find_plan(work: ForwardPass | BackwardPass, *, will_run: bool = True) -> Plan:
    """Return the plan of a pass, and make it if there is none; raises ValueError if no backend takes the pass.

    `listeners` are told of it if the caller runs it.
    """
    # A plan for a card that need not be there has an entry of its own: nobody runs it twice.
    entry = _entry(*_signature(work)) if planned() is None else _Entry()
    if entry.plan is None:
        plan = _make(work)
        if entry.plan is None:  # else another thread was faster
            entry.plan = plan
    if will_run and not entry.reported:
        entry.reported = True
        for listener in listeners:
            listener(entry.plan.backend)
    return entry.plan


def _signature(work: ForwardPass | BackwardPass) -> tuple[Any, ...]:
    """Return all that a plan may depend on. All tensors are on the device of q."""
    q = work.inputs.q
    tensors, needs = ((*work.tensors, *work.into), work.needs) if isinstance(work, BackwardPass) else (work.inputs, None)
    tensor_keys = [None if x is None else (x.shape, x.stride(), x.dtype, x.data_ptr() % 16 == 0) for x in tensors]
    return q.device, torch_settings(q.dtype), needs, *work.settings, *tensor_keys


def _make(work: ForwardPass | BackwardPass) -> Plan:
    inputs, (scale, layout, deterministic, name, text) = work.inputs, work.settings
    config = Config.from_text(text)
    # A plain tuple: the compiler of torch 2.7, which may trace a backend, fails at a slice of a named one.
    needs: Any = tuple(work.needs if isinstance(work, BackwardPass) else NO_GRADIENTS)
    problem = describe(inputs, scale=scale, needs=needs, deterministic=deterministic)
    if scale is not None and not math.isfinite(scale):  # a number that torch.compile traced as a symbol
        raise ValueError(f"scale must be finite, got {scale}")
    backend, refused = select(problem, name, config)
    arguments: Any = {"scale": float(problem.d) ** -0.5 if scale is None else scale, "layout": layout, "config": config}
    if isinstance(work, BackwardPass):
        arguments |= {"needs": needs, "deterministic": deterministic, "into": work.into or None}
        plan = backend.plan_backward(work.cotangents, inputs, work.outputs, **arguments)
    else:
        plan = backend.plan_forward(inputs, **arguments)
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
    """No backend that was asked takes a problem. `reasons` has all reasons of each backend."""

    def __init__(self, message: str, reasons: dict[str, list[str]]) -> None:
        super().__init__(message)
        self.reasons = reasons


def select(problem: Problem, backend: str, config: Config) -> tuple[Backend, dict[str, list[str]]]:
    """Return the first backend that takes a problem, or the one that it knows to be faster; and the others' reasons.

    RefusalError: the named backend (or, for "auto", every backend) refuses; the message lists all reasons.
    """
    names: Sequence[str] = AUTO_ORDER if backend == "auto" else (backend,)
    reasons = {name: refusals(name, problem, config) for name in names}
    able = [name for name in names if not reasons[name]]
    if not able:
        refused = [f"{name}: {reason}" for name, each in reasons.items() for reason in each]
        raise RefusalError(f"backend={backend!r} cannot run this problem ({problem}):\n  " + "\n  ".join(refused), reasons)
    faster = backend_module(able[0]).faster(problem) if len(able) > 1 else None
    chosen = able[0]
    if faster is not None and faster[0] in able:
        chosen = faster[0]
        reasons |= {name: ["leaves it to {}: {}".format(*faster)] for name in able[: able.index(chosen)]}
    return backend_module(chosen), {name: each for name, each in reasons.items() if each}
