"""The part of docs/layer-time.md on the records of `layer_parts.py`: a bar of a layer's parts, and their times."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import case_records
import plots
from record_tables import markdown

from evoattn.bench.record import Record
from evoattn.bench.table import headline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["block", "digest", "pictures", "records"]

PARTS = ("norm", "projections", "attention", "gate and output")
_WAYS = {"written": "as models write it", "evoattn": "evoattn.nn"}
_COLOURS = {
    "norm": "#E69F00",
    "projections": "#009E73",
    "attention": "#0072B2",
    "gate and output": "#CC79A7",
    "rest": "#B0B0B0",
}
_PASSES = ("forward", "backward")


def records(results: Path) -> dict[Path, dict[str, Any]]:
    """Every record of parts, by its file."""
    return case_records.read_all(results / "layers")


def digest(source: Path) -> str:
    """Of the record, and of the code that draws it."""
    return hashlib.sha256(b"\0".join((source.read_bytes(), Path(__file__).read_bytes()))).hexdigest()


def pictures(source: Path, record: dict[str, Any], folder: Path) -> dict[Path, Callable[[], Figure]]:
    """The file of a record's picture and what draws it."""
    return {folder / f"layers-{source.stem}.png": lambda: draw(record)}


def rest(times: dict[str, list[float]], which: int) -> float:
    """The time of the whole beyond its parts; below 0 if it takes less."""
    return times["whole"][which] - sum(times[part][which] for part in PARTS)


def draw(record: dict[str, Any]) -> Figure:
    """A panel for each layer and pass, a bar a way; what the whole takes beyond its parts comes last, in grey."""
    layers = record["layers"]
    figure = plots.new_figure(11, 1.9 + 1.5 * len(layers), "Where the time of a layer goes", _headline(record))
    panels: Any = figure.subplots(len(layers), 2, squeeze=False)
    for row, layer in zip(panels, layers, strict=True):
        for which, axes in enumerate(row):
            for place, times in enumerate(layer["ways"].values()):
                left = 0.0
                for part in (*PARTS, "rest"):
                    width = times[part][which] if part in times else max(rest(times, which), 0.0)
                    axes.barh(place, width, 0.62, left=left, color=_COLOURS[part], label=part if place == 0 else "_")
                    left += width
                axes.annotate(
                    f"{times['whole'][which]:.2f}", (left, place), (4, 0), textcoords="offset points", va="center", fontsize=8.5
                )
            axes.set_yticks(range(len(layer["ways"])), [_WAYS[way] for way in layer["ways"]])
            axes.invert_yaxis()
            axes.set_xlim(0, 1.14 * axes.dataLim.x1)
            axes.set_title(
                f"{layer['workload']}, {layer['dtype']}, {_PASSES[which]}, ms", fontsize=10, color=plots.INK, loc="left"
            )
            plots.plain(axes)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=9)
    return figure


def _headline(record: dict[str, Any]) -> str:
    return headline(Record(record["machine"], {}))


def block(records: Iterable[tuple[Path, dict[str, Any]]], figures: Path) -> str:
    """The marked part of the page: for each record a picture and a table, or that there is none."""
    lines: list[str] = []
    for source, record in records:
        how = "each part replayed as a CUDA graph" if record["graphs"] else "eager calls"
        lines += [f"{_headline(record)}; {how}. `{source.name}`.", ""]
        for path in pictures(source, record, figures):
            lines += [f"![The time of each part of a layer, as models write it and in evoattn.nn]({path.as_posix()})", ""]
        lines += ["Forward / backward, ms; *rest* is what the whole takes beyond its parts:", "", _table(record), ""]
    return "\n".join(lines).rstrip() or "Not measured yet."


def _table(record: dict[str, Any]) -> str:
    rows = [["layer", "by", *PARTS, "rest", "whole"]]
    for layer in record["layers"]:
        for way, times in layer["ways"].items():
            cells = [*(times[part] for part in PARTS), [rest(times, which) for which in (0, 1)], times["whole"]]
            rows.append([f"`{layer['workload']}`", _WAYS[way], *(" / ".join(f"{ms:.3f}" for ms in cell) for cell in cells)])
    return markdown(rows)
