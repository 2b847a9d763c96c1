"""What the pages show of the records that `predictions.py` wrote: seconds of whole predictions, and of their stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import case_records
from prediction_programs import PROGRAMS

from evoattn.bench.table import markdown

__all__ = ["block", "records", "summary"]

STEPS = 200
INSTALLED, TYPED = "as installed", "evoattn run"
"""The ways that README compares: the program as it is, and what one types to have it faster."""

Case = dict[str, Any]

_INTRODUCTION = """\
A whole prediction with full depth, random weights, 3 recycles, 200 steps and one sample, as installed without cuEquivariance
([stage by stage](docs/clients/speed.md#whole-predictions)):"""


def records(results: Path) -> dict[Path, dict[str, Any]]:
    """Every record of predictions, by its file."""
    return case_records.read_all(results / "predictions")


def summary(found: dict[Path, dict[str, Any]]) -> str:
    """README's table: for each program and length what `evoattn run` changes. Empty without records."""
    lines: list[str] = []
    for record in found.values():
        rows = [["program", "residues", INSTALLED, TYPED, "times as fast"]]
        for installed, typed in _pairs(record["cases"]):
            name = f"{installed['program']} {record['programs'].get(_DISTRIBUTIONS.get(installed['program'], ''), '')}".strip()
            faster = f"{installed['seconds'] / typed['seconds']:.2f}"
            rows.append([name, str(installed["residues"]), _cell(installed), _cell(typed), faster])
        lines += [f"{_machine(record)}, s / peak GiB:", "", markdown(rows), ""]
    if lines:
        lines = [_INTRODUCTION, "", *lines]
    return "\n".join(lines).rstrip()


def block(found: dict[Path, dict[str, Any]]) -> str:
    """All ways of all programs, with the seconds of each stage."""
    lines: list[str] = []
    for path, record in found.items():
        lines += [f"{_machine(record)}, commit {record['machine'].get('commit', '?')}. `{path.name}`.", ""]
        for program, steps in dict.fromkeys((case["program"], case["steps"]) for case in record["cases"]):
            cases = [case for case in record["cases"] if (case["program"], case["steps"]) == (program, steps)]
            stages = list(dict.fromkeys(name for case in cases for name in case.get("stages", {})))
            rows = [["residues", "way", "s", "peak GiB", *stages, "distogram differs by"]]
            rows += [_row(case, stages) for case in sorted(cases, key=lambda case: case["residues"])]
            lines += [program + (f", {steps} steps" if steps else "") + ":", "", markdown(rows), ""]
    return "\n".join(lines).rstrip() or "Not measured yet."


_DISTRIBUTIONS = {program.title: program.distribution for program in PROGRAMS.values()}


def _pairs(cases: list[Case]) -> list[tuple[Case, Case]]:
    """The predictions that ran both as installed and under `evoattn run`."""
    full = [case for case in cases if "seconds" in case and case["steps"] in (None, STEPS)]
    done = {(case["program"], case["residues"], case["way"]): case for case in full}
    return [
        (case, done[program, residues, TYPED])
        for (program, residues, way), case in sorted(done.items())
        if way == INSTALLED and (program, residues, TYPED) in done
    ]


def _row(case: Case, stages: list[str]) -> list[str]:
    start = [str(case["residues"]), case["way"]]
    if "failed" in case:
        return [*start, case["failed"], *["-"] * (len(stages) + 2)]
    times = [f"{case['stages'][name]:.2f}" if name in case["stages"] else "-" for name in stages]
    peak = f"{case['peak_gib']:.1f}" if "peak_gib" in case else "-"
    away = case.get("from_installed", {}).get("distogram")
    return [*start, f"{case['seconds']:.2f}", peak, *times, "-" if away is None else f"{away:.1e}"]


def _cell(case: Case) -> str:
    return f"{case['seconds']:.1f}" + (f" / {case['peak_gib']:.1f}" if "peak_gib" in case else "")


def _machine(record: dict[str, Any]) -> str:
    machine = record["machine"]
    return f"{machine['device']}, torch {machine['torch']}, {machine['date']}"
