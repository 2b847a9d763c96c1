"""The one cache of plans: how the tensors of a pass lie in memory, and what is asked of it -> the plan that runs it."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from evoattn.backends import Plan
from evoattn.devices import planned
from evoattn.inputs import Cotangents, Inputs, Kept, Options, Outputs
from evoattn.numerics import float32_products
from evoattn.problem import Problem, describe
from evoattn.run.dispatch import select
from evoattn.tuning import Config

__all__ = ["backward", "forget", "forward", "listeners", "settings"]

listeners: list[Callable[[str], None]] = []
"""Told the name of a plan's backend when a pass takes the plan for the first time; `explain` runs none and tells nothing."""


@dataclasses.dataclass(slots=True)
class _Place:
    """Where the plan of passes that look alike is kept; None until there is one.

    Args:
        plan: the plan.
        told: whether the listeners have heard of it.
    """

    plan: Plan | None = None
    told: bool = False

    def take(self, make: Callable[[], Plan], runs: bool) -> Plan:
        """The plan, made if there is none."""
        if self.plan is None:
            made = make()
            if self.plan is None:  # else another thread was faster
                self.plan = made
        if runs and not self.told:
            self.told = True
            for listener in listeners:
                listener(self.plan.backend)
        return self.plan


@functools.lru_cache(maxsize=4096)
def _place(*alike: Any) -> _Place:
    return _Place()


def _kept(*alike: Any) -> _Place:
    """The same, but a place of its own for each plan that is made for a card that need not be there: nobody runs it twice."""
    return _place(*alike) if planned() is None else _Place()


def forget() -> None:
    """Choose and plan anew from the next call on, because something other than a call's arguments has changed."""
    _place.cache_clear()


def settings(dtype: torch.dtype) -> str:
    """All that a backend may look at in torch's settings when it plans, besides determinism, which is an argument."""
    return float32_products() if dtype == torch.float32 else ""


def forward(inputs: Inputs, options: Options, *, runs: bool = True) -> Plan:
    """The plan of a forward of canonical tensors; raises ValueError if no backend takes it.

    Args:
        inputs, options: of the pass.
        runs: whether the caller runs the plan.
    """
    place = _kept(inputs.q.device, *map(_look, inputs), *options, settings(inputs.q.dtype))

    def make() -> Plan:
        problem = describe(inputs, scale=options.scale, deterministic=options.deterministic)
        return _plan("plan_forward", (inputs,), problem, options)

    return place.take(make, runs)


def backward(
    cotangents: Cotangents,
    inputs: Inputs,
    outputs: Outputs | Kept,
    needs: tuple[bool, ...],
    options: Options,
    into: Sequence[Tensor | None] | None = None,
    *,
    runs: bool = True,
) -> Plan:
    """The plan of a backward of canonical tensors; raises ValueError if no backend takes it.

    Args:
        cotangents, inputs, outputs, needs, options: of the pass.
        into: how dq, dk, dv and dgate lie in memory where the backend can write them so (`Plan.writes_into`), as it can if they
            are contiguous in the user's layout; None: they are.
        runs: whether the caller runs the plan.
    """
    tensors = (*cotangents, *inputs, *outputs, *(into or ()))
    place = _kept(inputs.q.device, *map(_look, tensors), needs, *options, settings(inputs.q.dtype))

    def make() -> Plan:
        wishes: Any = {"needs": needs, "deterministic": options.deterministic}
        problem = describe(inputs, scale=options.scale, **wishes)
        return _plan("plan_backward", (cotangents, inputs, outputs), problem, options, into, **wishes)

    return place.take(make, runs)


def _look(x: Tensor | None) -> tuple[Any, ...] | None:
    """All that a backend may look at in a tensor when it plans, but for its device, which is that of q."""
    return None if x is None else (x.shape, x.stride(), x.dtype, x.data_ptr() % 16 == 0)


def _plan(
    planner: str,
    tensors: tuple[Any, ...],
    problem: Problem,
    options: Options,
    into: Sequence[Tensor | None] | None = None,
    **wishes: Any,
) -> Plan:
    config, scale = Config.from_text(options.config), options.scale
    if scale is not None and not math.isfinite(scale):  # a number that torch.compile traced as a symbol
        raise ValueError(f"scale must be finite, got {scale}")
    backend, refused = select(problem, options.backend, config)
    scale = float(problem.d) ** -0.5 if scale is None else scale
    if into is not None and getattr(backend, "WRITES_ANYWHERE", False):
        wishes["into"] = into
    plan: Plan = getattr(backend, planner)(*tensors, scale=scale, layout=options.layout, config=config, **wishes)
    return dataclasses.replace(plan, backend=backend.NAME, refused=refused, writes_into="into" in wishes)
