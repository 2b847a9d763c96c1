"""A backend that counts what it plans and runs: for tests of which way a call takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from evoattn.backends import Inputs, Plan, reference

__all__ = ["Planner"]


class Planner:
    """Counts what the reference backend plans and runs, and looks at the tensors that its plans are run with."""

    def __init__(self) -> None:
        self.forwards = self.planned_forwards = 0
        self.backwards = self.planned_backwards = 0
        self.shapes: set[tuple[int, ...]] = set()
        self._forward, self._backward = reference.plan_forward, reference.plan_backward

    @staticmethod
    def check(tensors_or_none: Iterable[Tensor | None]) -> None:
        tensors = [x for x in tensors_or_none if x is not None]
        assert not any(x.is_neg() for x in tensors), "memory holds the opposite sign"
        assert not any(x.numel() and x.data_ptr() == 0 for x in tensors), "there is no memory"

    def plan_forward(self, inputs: Inputs, **options: Any) -> Plan:
        self.planned_forwards += 1
        self.shapes.add(tuple(inputs.q.shape))
        plan = self._forward(inputs, **options)

        def run(*groups: tuple[Tensor | None, ...]) -> None:
            self.forwards += 1
            self.check(x for tensors in groups for x in tensors)
            plan.run(*groups)

        return dataclasses.replace(plan, run=run)

    def plan_backward(self, *values: Any, **options: Any) -> Plan:
        self.planned_backwards += 1
        plan = self._backward(*values, **options)

        def run(*groups: tuple[Tensor | None, ...]) -> Any:
            self.backwards += 1
            self.check(x for tensors in groups for x in tensors)
            return plan.run(*groups)

        return dataclasses.replace(plan, run=run)
