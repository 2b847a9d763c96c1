"""The part of docs/layer-time.md on the records of `layer_parts.py`: the times of a layer's parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import case_records
from record_tables import markdown

from evoattn.bench.record import Record
from evoattn.bench.table import headline

__all__ = ["block", "records"]

PARTS = ("norm", "projections", "attention", "gate and output")
_WAYS = {"written": "as models write it", "evoattn": "evoattn.nn"}


def records(results: Path) -> dict[Path, dict[str, Any]]:
    """Every record of parts, by its file."""
    return case_records.read_all(results / "layers")


def rest(times: dict[str, list[float]], which: int) -> float:
    """The time of the whole beyond its parts; below 0 if it takes less."""
    return times["whole"][which] - sum(times[part][which] for part in PARTS)


def _headline(record: dict[str, Any]) -> str:
    return headline(Record(record["machine"], {}))


def block(records: dict[Path, dict[str, Any]]) -> str:
    """The marked part of the page: a table for each record, or that there is none."""
    lines: list[str] = []
    for source, record in records.items():
        how = "each part replayed as a CUDA graph" if record["graphs"] else "eager calls"
        lines += [f"{_headline(record)}; {how}. `{source.name}`.", ""]
        lines += ["Forward / backward, ms; *rest* is what the whole takes beyond its parts:", "", _table(record), ""]
    return "\n".join(lines).rstrip() or "Not measured yet."


def _table(record: dict[str, Any]) -> str:
    rows = [["layer", "by", *PARTS, "rest", "whole"]]
    for layer in record["layers"]:
        for way, times in layer["ways"].items():
            cells = [*(times[part] for part in PARTS), [rest(times, which) for which in (0, 1)], times["whole"]]
            rows.append([f"`{layer['workload']}`", _WAYS[way], *(" / ".join(f"{ms:.3f}" for ms in cell) for cell in cells)])
    return markdown(rows)
