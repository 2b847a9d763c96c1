"""The plan of a benchmark run, from options or by default, and the part of it that a record lacks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from evoattn.backends import BACKENDS
from evoattn.bench.peers import PEERS
from evoattn.bench.record import PASSES, Problem, Record
from evoattn.workloads import WORKLOADS, Workload, workload

_CPU = (
    *(workload("tri128"), workload("msa_row128").with_rows(128), workload("tri97"), workload("msa_column32")),
    *(workload("tri64"), workload("diffusion128").with_rows(8), workload("single256")),
    *(workload("extra_msa_row128").with_rows(128), workload("template64"), workload("msa_global128")),
    *(workload("tri192"), workload("tri256")),
)
"""Workloads that two CPU cores measure in minutes."""

_QUICK = {
    "cuda": tuple(workload(name) for name in ("tri256", "tri397", "msa_row", "single768")),
    "cpu": (workload("tri64"), workload("tri97"), workload("msa_row64").with_rows(32), workload("single128")),
}


@dataclasses.dataclass(frozen=True)
class Plan:
    """The problems, passes and contenders of a run.

    Args:
        workloads, dtypes: each workload is measured in each dtype; dtypes have torch's names.
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
        """Pairs of workload and dtype, the most telling first. A later dtype reaches each workload later."""
        turns = [
            (number * (place + 1) + place, place, workload, dtype)
            for number, workload in enumerate(self.workloads)
            for place, dtype in enumerate(self.dtypes)
        ]
        return [(workload, dtype) for _, _, workload, dtype in sorted(turns, key=lambda turn: turn[:2])]


def default_plan(device_type: str, quick: bool) -> Plan:
    """The plan for a device of type "cpu" or "cuda". A quick one leaves out large problems and peers that compile."""
    dtypes = ("float32",) if device_type == "cpu" else ("bfloat16",)
    workloads = _QUICK[device_type] if quick else _CPU if device_type == "cpu" else WORKLOADS
    peers = tuple(name for name, peer in PEERS.items() if not (quick and peer.compiles))
    rounds, budget_s = (3, 30.0) if quick else (7, 300.0)
    return Plan(workloads, dtypes, PASSES, ("auto", *BACKENDS), peers, rounds, budget_s)


def select_workloads(names: list[str] | None, lengths: list[int] | None, default: tuple[Workload, ...]) -> tuple[Workload, ...]:
    """The workloads of these names, or the default ones, each at these lengths if there are any, without duplicates.

    Raises:
        ValueError: there is no workload of a name.
    """
    picked = default if names is None else tuple(workload(name) for name in names)
    if lengths is not None:
        families = {candidate.family: candidate for candidate in reversed(picked)} if names else {"tri": workload("tri384")}
        picked = tuple(candidate.at(length) for candidate in reversed(families.values()) for length in lengths)
    return tuple(dict.fromkeys(picked))


def plan_settings(plan: Plan) -> dict[str, object]:
    """A plan in words that JSON has."""
    return {**dataclasses.asdict(plan), "workloads": [workload.name for workload in plan.workloads]}


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


def remaining(plan: Plan, record: Record) -> list[tuple[Workload, str]]:
    """The problems of a plan that a record does not have, or that were cut short."""
    done = {_name(problem) for problem in record.problems if not problem.cut}
    return [(workload, dtype) for workload, dtype in plan.problems if (workload.name, dtype) not in done]


def _name(problem: Problem) -> tuple[str, str]:
    return problem.workload.name, problem.dtype


def store(problem: Problem, record: Record, plan: Plan) -> None:
    """Put a problem into a record. It replaces one that was cut short, unless it was cut short too and has no more times."""
    by_name = {_name(old): old for old in record.problems}
    old = by_name.get(_name(problem))
    if old is None or not problem.cut or _times(problem) > _times(old):
        by_name[_name(problem)] = problem
    order = {(workload.name, dtype): place for place, (workload, dtype) in enumerate(plan.problems)}
    record.problems[:] = sorted(by_name.values(), key=lambda one: order.get(_name(one), len(order)))


def _times(problem: Problem) -> int:
    return sum(len(result.times) for result in problem.results)
