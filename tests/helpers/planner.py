"""A backend that counts what it plans and runs."""

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
    def check(given: Iterable[Tensor | None]) -> None:
        tensors = [x for x in given if x is not None]
        assert not any(x.is_neg() for x in tensors), "memory holds the opposite sign"
        assert not any(x.numel() and x.data_ptr() == 0 for x in tensors), "there is no memory"

    def plan_forward(self, inputs: Inputs, **options: Any) -> Plan:
        self.planned_forwards += 1
        self.shapes.add(tuple(inputs.q.shape))
        plan = self._forward(inputs, **options)

        def run(*given: tuple[Tensor | None, ...]) -> None:
            self.forwards += 1
            self.check(x for tensors in given for x in tensors)
            plan.run(*given)

        return dataclasses.replace(plan, run=run)

    def plan_backward(self, *given: Any, **options: Any) -> Plan:
        self.planned_backwards += 1
        plan = self._backward(*given, **options)

        def run(*given: tuple[Tensor | None, ...]) -> Any:
            self.backwards += 1
            self.check(x for tensors in given for x in tensors)
            return plan.run(*given)

        return dataclasses.replace(plan, run=run)
