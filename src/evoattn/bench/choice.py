"""Which workloads a run measures: the names and lengths asked for, and what is sensible where nothing was asked."""

from __future__ import annotations

import dataclasses

from evoattn.bench.peers import PEERS
from evoattn.workloads import WORKLOADS, Workload, workload

__all__ = ["Defaults", "chosen", "defaults"]

_CPU = (
    workload("tri128"),
    workload("msa_row128").with_rows(128),
    workload("tri97"),
    workload("msa_column32"),
    workload("tri64"),
    workload("diffusion128").with_rows(8),
    workload("single256"),
    workload("extra_msa_row128").with_rows(128),
    workload("template64"),
    workload("msa_global128"),
    workload("tri192"),
    workload("tri256"),
)
"""What a couple of CPU cores do in minutes."""

_QUICK = {
    "cuda": tuple(workload(name) for name in ("tri256", "tri397", "msa_row", "single768")),
    "cpu": (workload("tri64"), workload("tri97"), workload("msa_row64").with_rows(32), workload("single128")),
}
_COMPILED = tuple(peer.name for peer in PEERS.values() if peer.compiles)


@dataclasses.dataclass(frozen=True)
class Defaults:
    """What is measured where the user says nothing."""

    workloads: tuple[Workload, ...]
    dtypes: tuple[str, ...]
    peers: tuple[str, ...]
    rounds: int
    budget_s: float


def defaults(device_type: str, quick: bool) -> Defaults:
    """For a device of "cpu" or "cuda"; quick leaves out what compiles for seconds, and larger problems."""
    on_cpu = device_type == "cpu"
    dtypes = ("float32",) if on_cpu else ("bfloat16",)
    if quick:
        peers = tuple(name for name in PEERS if name not in _COMPILED)
        return Defaults(_QUICK[device_type], dtypes, peers, rounds=3, budget_s=30.0)
    workloads = _CPU if on_cpu else WORKLOADS
    return Defaults(workloads, dtypes, tuple(PEERS), rounds=7, budget_s=300.0)


def chosen(names: list[str] | None, lengths: list[int] | None, default: tuple[Workload, ...]) -> tuple[Workload, ...]:
    """The workloads of these names, or the default ones, each at these lengths, if any are given, and none twice.

    Raises:
        ValueError: there is no workload of a name.
    """
    picked = default if names is None else tuple(workload(name) for name in names)
    if lengths is not None:
        families = {candidate.family: candidate for candidate in reversed(picked)} if names else {"tri": workload("tri384")}
        picked = tuple(candidate.at(length) for candidate in reversed(families.values()) for length in lengths)
    return tuple(dict.fromkeys(picked))
