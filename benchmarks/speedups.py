"""The picture of speed-ups: a bar for each workload and pass, with the number and the name of the fastest peer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import contenders
import plots

from evoattn.bench import table
from evoattn.bench.peers import PEERS
from evoattn.bench.record import Problem, Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SLOWER = "#D55E00"
"""The colour of a bar below 1."""


def speedups(record: Record, problems: list[Problem]) -> Figure:
    """Speed of evoattn over that of the fastest peer: a bar a workload and pass, with the number and the peer's name."""
    passes = plots.passes_apart(problems)
    rows = [p for p in problems if any(_speedup(p, name) for name in passes)]
    title = plots.headed("Speed-up", rows)
    figure = plots.new_figure(1.6 + 4.3 * len(passes), 1.35 + 0.34 * len(rows), title, table.headline(record))
    for axes in plots.by_workload(figure, rows, passes, ": time of the fastest peer / time of evoattn", 1.75, _draw_speedup):
        axes.axvline(1, color=plots.INK, linewidth=1)
    return figure


def _draw_speedup(axes: Axes, row: int, problem: Problem, name: str) -> None:
    if speedup := _speedup(problem, name):
        ratio, peer = speedup
        axes.barh(row, ratio, 0.66, color=plots.EVOATTN if ratio >= 1 else SLOWER)
        place: Any = {"xytext": (4, 0), "textcoords": "offset points", "va": "center", "fontsize": 8.5}
        axes.annotate(f"{ratio:.2f}x  {peer}", (max(ratio, 1), row), **place)


def _speedup(problem: Problem, name: str) -> tuple[float, str] | None:
    """The time of the fastest peer over that of evoattn, and the peer's title. A bound, which leaves biases out, is no peer."""
    own = problem.result("evoattn")
    peers = [r for r in problem.results if r.name in PEERS and name in r.times]
    if own is None or name not in own.times or not peers:
        return None
    fastest = min(peers, key=lambda r: r.times[name].median_ms)
    return fastest.times[name].median_ms / own.times[name].median_ms, contenders.title(fastest.name).split(",")[0]
