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

PATCHED = "evoattn.patch"
"""The same without graphs, in these records."""

SHOWN = {
    INSTALLED: INSTALLED,
    "cuEquivariance": "with cuEquivariance",
    TYPED: TYPED,
    f"{TYPED} bf16": "--precision bf16 (rounds more)",
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
    "out. Each cell is from the newest record of that card: most programs as installed ran on other days and hosts than "
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
    for _, record in _by_age(records):
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
    title = "Seconds of one prediction, start-up left out"
    about = "without an alignment, random weights, 3 recycles, 200 steps; most as installed on other days"
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
    """A table for each program: the newest case of each card, length, setting and way, with the seconds of stages."""
    found: dict[tuple[str, str, int, str, str], Found] = {}
    for path, record in _by_age(records):
        card = case_records.card(record)
        for case in record["cases"]:
            found[case["program"], card, case["residues"], _setting(case), case["way"]] = Found(case, path.stem, _date(record))
    lines: list[str] = []
    for name in sorted({key[0] for key in found}):
        of = {key[1:]: value for key, value in found.items() if key[0] == name and not _superseded(found, key)}
        stages = list(dict.fromkeys(stage for case, *_ in of.values() for stage in case.get("stages", {})))
        rows = [["card", "residues", "way", "s", "peak GiB", *stages, "distogram differs by", "record"]]
        for (card, residues, setting, way), (case, stem, _) in sorted(of.items(), key=_place):
            away = _compared(case).get("distogram")
            cells = _row(case, stages, "-" if away is None else f"{away:.1e}")
            rows.append([card, str(residues), f"{way}{setting}", *cells, stem])
        lines += [f"{name}:", "", markdown(rows), ""]
    return "\n".join(lines).rstrip() or "Not measured yet."


class Found(NamedTuple):
    """The newest case of its kind, its record, and the day."""

    case: Case
    stem: str
    date: str


def _place(item: tuple[tuple[str, int, str, str], Found]) -> tuple[Any, ...]:
    """By length and card; the usual setting first, and in it the slowest way."""
    (card, residues, setting, _), (case, *_) = item
    return residues, card, setting, -case.get("seconds", 1e9)


def _superseded(found: dict[Any, Found], key: tuple[Any, ...]) -> bool:
    """Return whether a way without graphs has a row with graphs that is as new: nobody has to run the former."""
    typed = found.get((*key[:-1], TYPED))
    return key[-1] == PATCHED and typed is not None and typed.date >= found[key].date


def training_block(records: dict[Path, dict[str, Any]]) -> str:
    """A table for each program: the newest case of each card, length and way, beside the newest as installed.

    Of one day a record of steps alone is newer than one whose steps were measured by part.
    """
    found: dict[tuple[str, str, int, str], Found] = {}
    for path, record in _by_age(records):
        card = case_records.card(record)
        for case in record["cases"]:
            found[_training(case), card, case["tokens"], case["way"]] = Found(case, path.stem, _date(record))
    lines: list[str] = []
    for name in dict.fromkeys(key[0] for key in found):
        of = {key: value for key, value in found.items() if key[0] == name and not _superseded(found, key)}
        stages = list(dict.fromkeys(stage for case, *_ in of.values() for stage in case.get("stages", {})))
        compared = list(dict.fromkeys(x for case, *_ in of.values() for x in _compared(case)))
        head = ["card", "tokens", "way", "ms", "times as fast", "peak GiB", *stages]
        rows = [[*head, *(f"{x} differs by" for x in compared), "record"]]
        for key in sorted(of, key=lambda x: (x[2], x[1], -of[x].case.get("ms", 1e9))):
            case, stem, _ = of[key]
            installed = found.get((*key[:3], INSTALLED))
            away = [_compared(case).get(x) for x in compared]
            cells = [*_training_row(case, stages, installed), *("-" if x is None else f"{x:.1e}" for x in away)]
            rows.append([key[1], str(key[2]), key[3], *cells, stem])
        lines += [f"{name}:", "", markdown(rows), ""]
    return "\n".join(lines).rstrip() or "Not measured yet."


def _by_age(records: dict[Path, dict[str, Any]]) -> list[tuple[Path, dict[str, Any]]]:
    """The records, the newest last."""
    return sorted(records.items(), key=lambda x: (_date(x[1]), all("parts" not in case for case in x[1]["cases"]), x[0].stem))


def _date(record: dict[str, Any]) -> str:
    return str(record["machine"].get("date", ""))


def _compared(case: Case) -> dict[str, float | None]:
    """The distance of a case from the program as installed. Random coordinates of a prediction say nothing."""
    differences = {} if "failed" in case else case.get("from_installed", {})
    return {name: x for name, x in differences.items() if name != "coordinates"}


def _setting(case: Case) -> str:
    """The steps, recycles and samples that are not the usual ones, in words."""
    recycles, samples = case.get("recycles", RECYCLES), _samples(case)
    steps = f", {case['steps']} steps" if case["steps"] not in (None, STEPS) else ""
    again = f", {recycles} recycles" if recycles not in (None, RECYCLES) else ""
    several = f", {samples} samples" if samples != 1 else ""
    return f"{steps}{again}{several}"


def _samples(case: Case) -> int:
    return case.get("samples") or 1  # None: a program without a denoiser; older records have one sample


def _training(case: Case) -> str:
    return f"{case['program']}, {case['blocks']} blocks, {case['rows']:,} sequences"


_DISTRIBUTIONS = {program.title: program.distribution for program in PROGRAMS.values()}


def _is_full(case: Case) -> bool:
    """Return whether a case is a prediction of one sample with all steps, which ended."""
    full = "seconds" in case and case["steps"] in (None, STEPS) and _samples(case) == 1
    return full and case.get("recycles", RECYCLES) == RECYCLES


def _row(case: Case, stages: list[str], away: str) -> list[str]:
    if "failed" in case:
        return [case["failed"], *["-"] * (len(stages) + 2)]
    times = [f"{case['stages'][name]:.2f}" if name in case["stages"] else "-" for name in stages]
    return [f"{case['seconds']:.2f}", _peak(case), *times, away]


def _training_row(case: Case, stages: list[str], installed: Found | None) -> list[str]:
    if "failed" in case:
        return [case["failed"], *["-"] * (len(stages) + 2)]
    base = installed.case.get("ms") if installed else None
    faster = f"{base / case['ms']:.2f}" if base else "-"
    times = [f"{case['stages'][name]:.0f}" if name in case["stages"] else "-" for name in stages]
    return [f"{case['ms']:.0f}", faster, _peak(case), *times]


def _peak(case: Case) -> str:
    return f"{case['peak_gib']:.1f}" if "peak_gib" in case else "-"


def _cell(case: Case) -> str:
    return _seconds(case["seconds"]) + (f" / {case['peak_gib']:.1f}" if "peak_gib" in case else "")


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f}" if seconds >= 2 else f"{seconds:.2f}"
