"""The pages' part on the records of `predictions.py` and `training_steps.py`: whole models, and their stages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import case_records
from prediction_programs import PROGRAMS, RECYCLES
from prediction_ways import INSTALLED, Case
from record_tables import markdown

__all__ = ["block", "blocks", "records", "summary", "training_block"]

STEPS = 200
TYPED = "evoattn run"
"""With `INSTALLED`, the ways that README compares: the program as it is, and what one types to have it faster."""

_INTRODUCTION = """\
A whole prediction with full depth, random weights, 3 recycles, 200 steps and one sample, s / peak GiB, as
installed without cuEquivariance ([stage by stage](docs/clients/speed.md#whole-predictions)):"""


def records(results: Path, kind: str = "predictions") -> dict[Path, dict[str, Any]]:
    """Every record of a kind, by its file."""
    return case_records.read_all(results / kind)


def blocks(results: Path) -> dict[str, str]:
    """The parts of docs/clients/speed.md, by name."""
    return {"predictions": block(records(results)), "training": training_block(records(results, "training"))}


def summary(records: dict[Path, dict[str, Any]]) -> str:
    """README's table: for each program and length what `evoattn run` changes. Empty without records."""
    rows = []
    for record in records.values():
        card = record["machine"]["device"].removeprefix("NVIDIA ").partition(" ")[0]
        for installed, typed in _pairs(record["cases"]):
            name = f"{installed['program']} {record['programs'].get(_DISTRIBUTIONS.get(installed['program'], ''), '')}".strip()
            faster = f"{installed['seconds'] / typed['seconds']:.2f}"
            rows.append([f"{name}, {card}", str(installed["residues"]), _cell(installed), _cell(typed), faster])
    if not rows:
        return ""
    order = [x.title for x in PROGRAMS.values()]
    rows.sort(key=lambda row: next((i for i, title in enumerate(order) if row[0].startswith(title)), len(order)))
    return "\n".join([_INTRODUCTION, "", markdown([["program", "residues", INSTALLED, TYPED, "times as fast"], *rows])])


def block(records: dict[Path, dict[str, Any]]) -> str:
    """All ways of all programs, with the seconds of each stage."""
    return _tables(records, _prediction, ["residues", "way", "s", "peak GiB"], _row)


def training_block(records: dict[Path, dict[str, Any]]) -> str:
    """All ways of training, with the milliseconds of each stage and how many times as fast as installed they are."""
    return _tables(records, _training, ["tokens", "way", "ms", "times as fast", "peak GiB"], _training_row)


def _tables(
    records: dict[Path, dict[str, Any]],
    title: Callable[[Case], str],
    columns: list[str],
    row: Callable[[Case, list[str], list[Case]], list[str]],
) -> str:
    """For each record a heading, and a table for each title of its cases, shortest first."""
    lines: list[str] = []
    for path, record in records.items():
        lines += [f"{_machine(record)}, commit {record['machine'].get('commit', '?')}. `{path.name}`.", ""]
        for name in dict.fromkeys(map(title, record["cases"])):
            cases = sorted((x for x in record["cases"] if title(x) == name), key=lambda case: case[columns[0]])
            stages = list(dict.fromkeys(stage for case in cases for stage in case.get("stages", {})))
            compared = list(dict.fromkeys(x for case in cases for x in _compared(case)))
            rows = [[*columns, *stages, *(f"{x} differs by" for x in compared)]]
            for case in cases:
                cells = row(case, stages, cases)
                away = [_compared(case).get(x) for x in compared]
                rows.append([*cells, *("-" if x is None else f"{x:.1e}" for x in away)])
            lines += [f"{name}:", "", markdown(rows), ""]
    return "\n".join(lines).rstrip() or "Not measured yet."


def _compared(case: Case) -> dict[str, float | None]:
    """The distance of a case from the program as installed. Random coordinates of a prediction say nothing."""
    differences = {} if "failed" in case else case.get("from_installed", {})
    return {name: x for name, x in differences.items() if name != "coordinates"}


def _prediction(case: Case) -> str:
    recycles, samples = case.get("recycles", RECYCLES), _samples(case)
    steps = f", {case['steps']} steps" if case["steps"] else ""
    again = f", {recycles} recycles" if recycles != RECYCLES else ""
    several = f", {samples} samples" if samples != 1 else ""
    return f"{case['program']}{steps}{again}{several}"


def _samples(case: Case) -> int:
    return case.get("samples") or 1  # None: a program without a denoiser; older records have one sample


def _training(case: Case) -> str:
    return f"{case['program']}, {case['blocks']} blocks, {case['rows']:,} sequences"


_DISTRIBUTIONS = {program.title: program.distribution for program in PROGRAMS.values()}


def _pairs(cases: list[Case]) -> list[tuple[Case, Case]]:
    """The predictions that ran both as installed and under `evoattn run`."""
    full = [x for x in cases if "seconds" in x and x["steps"] in (None, STEPS) and _samples(x) == 1]
    full = [x for x in full if x.get("recycles", RECYCLES) == RECYCLES]
    done = {(case["program"], case["residues"], case["way"]): case for case in full}
    return [
        (case, done[program, residues, TYPED])
        for (program, residues, way), case in sorted(done.items())
        if way == INSTALLED and (program, residues, TYPED) in done
    ]


def _row(case: Case, stages: list[str], _: list[Case]) -> list[str]:
    start = [str(case["residues"]), case["way"]]
    if "failed" in case:
        return [*start, case["failed"], *["-"] * (len(stages) + 1)]
    times = [f"{case['stages'][name]:.2f}" if name in case["stages"] else "-" for name in stages]
    return [*start, f"{case['seconds']:.2f}", _peak(case), *times]


def _training_row(case: Case, stages: list[str], cases: list[Case]) -> list[str]:
    start = [str(case["tokens"]), case["way"]]
    if "failed" in case:
        return [*start, case["failed"], *["-"] * (len(stages) + 2)]
    [base] = [x.get("ms") for x in cases if (x["tokens"], x["way"]) == (case["tokens"], INSTALLED)] or [None]
    faster = f"{base / case['ms']:.2f}" if base else "-"
    return [*start, f"{case['ms']:.0f}", faster, _peak(case), *(f"{case['stages'][name]:.0f}" for name in stages)]


def _peak(case: Case) -> str:
    return f"{case['peak_gib']:.1f}" if "peak_gib" in case else "-"


def _cell(case: Case) -> str:
    return f"{case['seconds']:.1f}" + (f" / {case['peak_gib']:.1f}" if "peak_gib" in case else "")


def _machine(record: dict[str, Any]) -> str:
    machine = record["machine"]
    return f"{machine['device']}, torch {machine['torch']}, {machine['date']}"
