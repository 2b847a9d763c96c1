"""The pages' part on the records of `predictions.py` and `training_steps.py`: whole models, and their stages."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import case_records
import plots
from prediction_programs import PROGRAMS, RECYCLES
from prediction_ways import INSTALLED, Case
from record_tables import markdown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["block", "blocks", "newest", "pictures", "records", "summary", "training_block"]

STEPS = 200
TYPED = "evoattn run"
"""The way that README compares with `INSTALLED`: what one types to have it faster."""

SHOWN = {
    INSTALLED: INSTALLED,
    "cuEquivariance": "with cuEquivariance",
    TYPED: TYPED,
    f"{TYPED} bf16": "--precision bf16",
}
"""Ways in README's picture, and what it calls them."""

_IN_TABLE = (INSTALLED, "cuEquivariance", TYPED)
"""Those of README's table, which has five columns."""

PICTURE = "predictions.png"
PICTURED = {"Boltz-2": (152, 304, 684), "OpenFold-3": (304,), "Protenix": (304,), "ESMFold": (684,)}
"""Residues of each program in the picture. The table has all."""

_COLOURS = dict(zip(SHOWN, ("#9AA0A6", "#E69F00", plots.EVOATTN, "#8EC3E6"), strict=True))

_INTRODUCTION = (
    "A whole prediction with full depth, random weights, 3 recycles, 200 steps and one sample, s / peak GiB, start-up left "
    "out. Each cell is from the newest record of that card: the programs as installed ran on other days and hosts than "
    "evoattn ([stage by stage](docs/clients/speed.md#whole-predictions)):"
)


def records(results: Path, kind: str = "predictions") -> dict[Path, dict[str, Any]]:
    """Every record of a kind, by its file."""
    return case_records.read_all(results / kind)


def blocks(results: Path) -> dict[str, str]:
    """The parts of docs/clients/speed.md, by name."""
    return {"predictions": block(records(results)), "training": training_block(records(results, "training"))}


class Row(NamedTuple):
    """The newest cases of a program, with its release and the card, by the way."""

    name: str
    residues: int
    cases: dict[str, Case]


def newest(records: dict[Path, dict[str, Any]]) -> list[Row]:
    """What was measured both as installed and under `evoattn run` on one kind of card, in the order of the programs."""
    found: dict[tuple[str, int], dict[str, Case]] = {}
    for record in sorted(records.values(), key=lambda record: str(record["machine"].get("date", ""))):
        card = case_records.card(record)
        for case in filter(_is_full, record["cases"]):
            release = record["programs"].get(_DISTRIBUTIONS.get(case["program"], ""), "")
            name = f"{case['program']} {release}".strip()
            found.setdefault((f"{name}, {card}", case["residues"]), {})[case["way"]] = case
    rows = [Row(*key, cases) for key, cases in found.items() if INSTALLED in cases and TYPED in cases]
    order = [x.title for x in PROGRAMS.values()]

    def place(row: Row) -> int:
        return next((i for i, title in enumerate(order) if row.name.startswith(title)), len(order))

    return sorted(rows, key=lambda row: (place(row), row.name, row.residues))


def summary(records: dict[Path, dict[str, Any]]) -> str:
    """README's table: for each program and length what `evoattn run` changes. Empty without records."""
    rows = newest(records)
    if not rows:
        return ""
    cells = [
        [
            row.name,
            str(row.residues),
            *(_cell(row.cases[way]) if way in row.cases else "-" for way in _IN_TABLE),
        ]
        for row in rows
    ]
    head = ["program", "residues", *(SHOWN[way] for way in _IN_TABLE)]
    return "\n".join([_INTRODUCTION, "", markdown([head, *cells])])


def pictures(records: dict[Path, dict[str, Any]], folder: Path) -> dict[Path, tuple[str, Callable[[], Figure]]]:
    """README's picture: its file, a digest of what it shows and of the code, and what draws it."""
    rows = [row for row in newest(records) if row.residues in PICTURED.get(row.name.split()[0], ())]
    if not rows:
        return {}
    shown = json.dumps([(row.name, row.residues, {way: x["seconds"] for way, x in row.cases.items()}) for row in rows])
    digest = hashlib.sha256(b"\0".join((shown.encode(), Path(__file__).read_bytes()))).hexdigest()
    return {folder / PICTURE: (digest, lambda: draw(rows))}


def draw(rows: list[Row]) -> Figure:
    """A group of bars for each program and length."""
    count = sum(len(SHOWN.keys() & row.cases.keys()) for row in rows)
    title, about = "Seconds of a whole prediction", "full depth, random weights, 3 recycles, 200 steps, one sample"
    figure = plots.new_figure(7.2, 1.1 + 0.2 * (count + 0.7 * len(rows)), title, about)
    axes, ticks, place = figure.subplots(), [], 0.0
    for row in rows:
        ways = [way for way in SHOWN if way in row.cases]
        for i, way in enumerate(ways):
            seconds, y = row.cases[way]["seconds"], place + i
            axes.barh(y, seconds, 0.85, color=_COLOURS[way])
            axes.annotate(_seconds(seconds), (seconds, y), (4, 0), textcoords="offset points", va="center", fontsize=9)
        ticks.append(place + (len(ways) - 1) / 2)
        place += len(ways) + 0.7
    axes.set_yticks(ticks, [f"{row.name}\n{row.residues} residues" for row in rows])
    axes.set_ylim(place - 0.9, -0.7)
    axes.set_xlim(0, 1.1 * axes.dataLim.x1)
    plots.plain(axes)
    handles = [axes.barh([0], [0], color=_COLOURS[way]) for way in SHOWN]
    options = {"ncols": len(SHOWN), "frameon": False, "fontsize": 9}
    figure.legend(handles=handles, labels=list(SHOWN.values()), loc="outside lower center", **options)  # type: ignore[arg-type]
    return figure


def block(records: dict[Path, dict[str, Any]]) -> str:
    """A table for each program, steps and samples: the newest case of each card, length and way, with the seconds of stages."""
    found: dict[tuple[str, str, int, str], tuple[Case, str]] = {}
    for path, record in sorted(records.items(), key=lambda x: str(x[1]["machine"].get("date", ""))):
        card = case_records.card(record)
        for case in record["cases"]:
            found[_prediction(case), card, case["residues"], case["way"]] = case, path.stem
    lines: list[str] = []
    for name in sorted({key[0] for key in found}):
        of = sorted((key, *found[key]) for key in found if key[0] == name)
        stages = list(dict.fromkeys(stage for _, case, _ in of for stage in case.get("stages", {})))
        rows = [["card", "residues", "way", "s", "peak GiB", *stages, "distogram differs by", "record"]]
        for (_, card, *_), case, stem in sorted(of, key=lambda x: (x[0][2], x[0][1], -x[1].get("seconds", 1e9))):
            away = _compared(case).get("distogram")
            rows.append([card, *_row(case, stages), "-" if away is None else f"{away:.1e}", stem])
        lines += [f"{name}:", "", markdown(rows), ""]
    return "\n".join(lines).rstrip() or "Not measured yet."


def training_block(records: dict[Path, dict[str, Any]]) -> str:
    """For each record the ways of training: milliseconds of stages, and how many times as fast as installed."""
    lines: list[str] = []
    for path, record in records.items():
        lines += [f"{_machine(record)}, commit {record['machine'].get('commit', '?')}. `{path.name}`.", ""]
        for name in dict.fromkeys(map(_training, record["cases"])):
            cases = sorted((x for x in record["cases"] if _training(x) == name), key=lambda case: case["tokens"])
            stages = list(dict.fromkeys(stage for case in cases for stage in case.get("stages", {})))
            compared = list(dict.fromkeys(x for case in cases for x in _compared(case)))
            rows = [["tokens", "way", "ms", "times as fast", "peak GiB", *stages, *(f"{x} differs by" for x in compared)]]
            for case in cases:
                away = [_compared(case).get(x) for x in compared]
                rows.append([*_training_row(case, stages, cases), *("-" if x is None else f"{x:.1e}" for x in away)])
            lines += [f"{name}:", "", markdown(rows), "", *_parts(cases)]
    return "\n".join(lines).rstrip() or "Not measured yet."


def _parts(cases: list[Case]) -> list[str]:
    """Where the time of steps went that were measured by part."""
    measured = [case for case in cases if "parts" in case]
    if not measured:
        return []
    names = list(dict.fromkeys(name for case in measured for name in case["parts"]))
    rows = [["tokens", "way", "GPU busy, ms", "launches", *names]]
    for case in measured:
        spent = [case["parts"].get(name, {}) for name in names]
        cells = [f"{x['forward']:.0f} + {x['backward']:.0f} ({x['again']:.0f})" if x else "-" for x in spent]
        rows.append([str(case["tokens"]), case["way"], f"{case['gpu_ms']:.0f}", f"{case['launches']:,}", *cells])
    what = "Parts, ms on the GPU's stream, waiting for the host included: forward + backward (of that, computed again):"
    return [what, "", markdown(rows), ""]


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


def _is_full(case: Case) -> bool:
    """Return whether a case is a prediction of one sample with all steps, which ended."""
    full = "seconds" in case and case["steps"] in (None, STEPS) and _samples(case) == 1
    return full and case.get("recycles", RECYCLES) == RECYCLES


def _row(case: Case, stages: list[str]) -> list[str]:
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
    return _seconds(case["seconds"]) + (f" / {case['peak_gib']:.1f}" if "peak_gib" in case else "")


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f}" if seconds >= 2 else f"{seconds:.2f}"


def _machine(record: dict[str, Any]) -> str:
    machine = record["machine"]
    return f"{machine['device']}, torch {machine['torch']}, {machine['date']}"
