"""What a run of the benchmark measures, in a record's words too, and what of it a record has."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from evoattn.bench.record import Problem, Record
from evoattn.workloads import Workload, workload

__all__ = ["Plan", "left", "plan_of", "plan_settings", "put"]


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to measure.

    Args:
        workloads, dtypes: every one of the first in every one of the second; dtypes by torch's names.
        passes: of "forward", "backward", "both".
        backends: names of evoattn's backends; "auto" is what a plain call takes.
        peers: names of `PEERS`.
        rounds: of the timing.
        budget_s: seconds for all of it, or None for as long as it takes.
    """

    workloads: tuple[Workload, ...]
    dtypes: tuple[str, ...]
    passes: tuple[str, ...]
    backends: tuple[str, ...]
    peers: tuple[str, ...]
    rounds: int = 7
    budget_s: float | None = None

    @property
    def problems(self) -> list[tuple[Workload, str]]:
        """Workload and dtype, the most telling first: a later dtype comes to a workload later, so a cut takes some of each."""
        turns = [
            (number * (place + 1) + place, place, workload, dtype)
            for number, workload in enumerate(self.workloads)
            for place, dtype in enumerate(self.dtypes)
        ]
        return [(workload, dtype) for _, _, workload, dtype in sorted(turns, key=lambda turn: turn[:2])]


def plan_settings(plan: Plan) -> dict[str, object]:
    """A plan in words that JSON has."""
    return {
        "workloads": [workload.name for workload in plan.workloads],
        "dtypes": list(plan.dtypes),
        "passes": list(plan.passes),
        "backends": list(plan.backends),
        "peers": list(plan.peers),
        "rounds": plan.rounds,
        "budget_s": plan.budget_s,
    }


def plan_of(settings: Mapping[str, Any], budget_s: float | None) -> Plan:
    """The plan that has these settings, with another budget if one is given.

    Raises:
        KeyError, TypeError, ValueError: they are not the settings of a plan.
    """
    return Plan(
        workloads=tuple(map(workload, settings["workloads"])),
        **{name: tuple(settings[name]) for name in ("dtypes", "passes", "backends", "peers")},
        rounds=int(settings["rounds"]),
        budget_s=budget_s or settings.get("budget_s"),
    )


def left(plan: Plan, record: Record) -> list[tuple[Workload, str]]:
    """What of a plan a record does not have, or was cut short."""
    done = {_name(problem) for problem in record.problems if not problem.cut}
    return [(workload, dtype) for workload, dtype in plan.problems if (workload.name, dtype) not in done]


def _name(problem: Problem) -> tuple[str, str]:
    return problem.workload.name, problem.dtype


def put(problem: Problem, record: Record, plan: Plan) -> None:
    """A problem in its place, and in that of what was cut short, unless it was itself and has no more times than that."""
    found = {_name(old): old for old in record.problems}
    old = found.get(_name(problem))
    if old is None or not problem.cut or _times(problem) > _times(old):
        found[_name(problem)] = problem
    order = {(workload.name, dtype): place for place, (workload, dtype) in enumerate(plan.problems)}
    record.problems[:] = sorted(found.values(), key=lambda one: order.get(_name(one), len(order)))


def _times(problem: Problem) -> int:
    return sum(len(result.times) for result in problem.results)
