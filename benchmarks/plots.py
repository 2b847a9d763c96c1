"""Pictures of a record, by matplotlib: speed-ups and shares of the device's ceilings by workload, and growth with length.

All are drawn for pages that show them 600 pixels wide.
"""

from __future__ import annotations

import io
import itertools
import textwrap
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import contenders
from ceilings import roofs

from evoattn.bench import table
from evoattn.bench.peers import PEERS
from evoattn.bench.record import Problem, Record
from evoattn.compile import cache

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

EVOATTN, SLOWER = "#0072B2", "#D55E00"
_COLOURS = ("#D55E00", "#009E73", "#CC79A7", "#E69F00", "#8C6BB1", "#66A61E", "#A6761D")
_BOUND = "#9AA0A6"
_MARKERS = "osD^vPX*"
_INK, _GREY, _FAINT = "#222222", "#555555", "#D8D8D8"
_CEILINGS = {
    "exp2": ("#B8860B", "exponentials"),
    "products": ("#8C6BB1", "matrix products"),
    "memory": ("#009E73", "memory bandwidth"),
}
"""Colour and title of each ceiling."""

_PASSES = {"forward": "forward", "backward": "backward", "both": "forward + backward"}
_MEMORY = "peak memory beyond the inputs"
_WIDTH = 6.5
"""Inches of a picture: its letters are then as large as those of the page."""

_FONTS: Any = {"font.size": 10, "font.family": "DejaVu Sans", "axes.edgecolor": _GREY}


def _style(names: list[str]) -> dict[str, tuple[str, str]]:
    """Colour and marker of every contender; a bound is grey."""
    styles: dict[str, tuple[str, str]] = {}
    peers = 0
    for name in names:
        if name == "evoattn":
            styles[name] = (EVOATTN, "o")
        elif contenders.is_bound(name):
            styles[name] = (_BOUND, "x")
        else:
            styles[name] = (_COLOURS[peers % len(_COLOURS)], _MARKERS[1 + peers % (len(_MARKERS) - 1)])
            peers += 1
    return styles


def _names(problems: list[Problem]) -> list[str]:
    """Every contender with a time or a peak, in the order in which they ran."""
    return list(dict.fromkeys(r.name for problem in problems for r in problem.results if r.times or r.peak_bytes))


def _measured(problems: list[Problem], passes: tuple[str, ...]) -> list[str]:
    return [name for name in passes if any(name in r.times for problem in problems for r in problem.results)]


def _passes_apart(problems: list[Problem]) -> list[str]:
    """The forward and the backward, or both together if a record has only that."""
    return _measured(problems, ("forward", "backward")) or _measured(problems, ("both",))


def new_figure(width: float, height: float, title: str, about: str) -> Figure:
    """An empty figure of so many inches, with a title and a few words on the machine."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    words = textwrap.wrap(about, round(14 * width))
    figure.suptitle(title + "\n" * len(words), fontsize=13, fontweight="bold", color=_INK, x=0.01, ha="left")
    figure.text(0.01, 1 - 0.32 / height, "\n".join(words), fontsize=8.5, color=_GREY, va="top")
    return figure


def plain(axes: Axes) -> None:
    """Remove two of the four spines, and draw ticks faintly."""
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(which="both", color=_FAINT, labelcolor=_INK)


class _Bar(NamedTuple):
    """What one workload and pass show: a length, the words behind it, and a colour with its meaning."""

    length: float
    words: str
    colour: str
    meaning: str


def _by_workload(
    record: Record, problems: list[Problem], quantity: str, label: str, bar_of: Callable[[Problem, str], _Bar | None]
) -> Figure:
    """A row a workload with a bar a pass. The longest bar of the first pass is on top."""
    passes = _passes_apart(problems)
    found = [(p.workload.name, [bar_of(p, name) for name in passes]) for p in problems]
    rows = sorted((row for row in found if any(row[1])), key=lambda row: -(row[1][0].length if row[1][0] else 0))
    figure = new_figure(_WIDTH, 1.7 + 0.4 * len(rows), _headed(quantity, problems), table.headline(record))
    axes = figure.subplots()
    meanings = {bar.meaning: bar.colour for _, bars in rows for bar in bars if bar}
    for row, (_, bars) in enumerate(rows):
        for turn, bar in enumerate(bars):
            if bar is not None:
                place = row + 0.4 * (turn - (len(passes) - 1) / 2)
                axes.barh(place, bar.length, 0.36, color=bar.colour, alpha=0.5 if turn else 1.0)
                style: Any = {"textcoords": "offset points", "va": "center", "fontsize": 9, "color": _INK}
                axes.annotate(bar.words, (max(bar.length, 1), place), (4, 0), **style)  # right of the line at 1
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlabel(f"{label}\n{'; '.join(f'{x}: {name}' for x, name in zip(('dark', 'light'), passes, strict=False))}")
    axes.grid(True, axis="x", color=_FAINT, linewidth=0.7)
    plain(axes)
    handles = [axes.barh([0], [0], color=colour) for colour in meanings.values()]
    figure.legend(handles=handles, labels=list(meanings), loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


def speedups(record: Record, problems: list[Problem]) -> Figure:
    """Speed of evoattn over that of the fastest peer: a bar a workload and pass, with the number and the peer's name."""
    figure = _by_workload(record, problems, "Speed-up of", "time of the fastest peer / time of evoattn", _speedup)
    [axes] = figure.axes
    axes.set_xlim(0, 1.3 * axes.dataLim.x1)
    axes.axvline(1, color=_INK, linewidth=1)
    return figure


def _speedup(problem: Problem, name: str) -> _Bar | None:
    """The time of the fastest peer over that of evoattn, and the peer's title. A bound, which leaves biases out, is no peer."""
    own = problem.result("evoattn")
    peers = [r for r in problem.results if r.name in PEERS and name in r.times]
    if own is None or name not in own.times or not peers:
        return None
    fastest = min(peers, key=lambda r: r.times[name].median_ms)
    ratio, peer = fastest.times[name].median_ms / own.times[name].median_ms, contenders.title(fastest.name).split(",")[0]
    return _Bar(ratio, f"{ratio:.2f}x  {peer}", *((EVOATTN, "evoattn is faster") if ratio >= 1 else (SLOWER, "slower")))


def ceilings(record: Record, problems: list[Problem]) -> Figure:
    """The share of the device's lowest ceiling that evoattn reaches: a bar a workload and pass, whose colour says which."""

    def share(problem: Problem, name: str) -> _Bar | None:
        rate, bounds = table.rate(problem, problem.result("evoattn"), name), roofs(record, problem, name)
        if rate is None or not bounds:
            return None
        lowest = min(bounds, key=lambda what: bounds[what])
        reached = 100 * rate / bounds[lowest]
        return _Bar(reached, f"{reached:.0f}%", *_CEILINGS[lowest])

    figure = _by_workload(
        record, problems, "Share of a ceiling reached by", "% of the scores a second that the lowest ceiling allows", share
    )
    figure.axes[0].set_xlim(0, 100)
    return figure


def _headed(quantity: str, problems: list[Problem]) -> str:
    """A title: a quantity, and the dtypes of problems."""
    dtypes = ", ".join(dict.fromkeys(problem.dtype for problem in problems))
    return f"{quantity} Evoformer attention, {dtypes}"


def against_length(record: Record, problems: list[Problem], family: str = "tri") -> Figure:
    """Time and peak memory of one family's attention against its length, both logarithmic."""
    alike = sorted((p for p in problems if p.workload.family == family), key=lambda p: p.workload.length)
    passes = _measured(alike, ("both",)) or _measured(alike, ("forward", "backward"))
    figure = new_figure(_WIDTH, 1.6 + 3.2 * (len(passes) + 1), _headed("Time and memory of", alike), table.headline(record))
    panels: Any = figure.subplots(len(passes) + 1, 1, squeeze=False)[:, 0]
    styles = _style(_names(alike))
    for axes, name in zip(panels, [*passes, _MEMORY], strict=True):
        _draw_curves(axes, _curves(alike, name), styles, f"{_PASSES[name]}, ms" if name in _PASSES else f"{name}, MiB")
    handles, labels = panels[-1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


def _curves(problems: list[Problem], name: str) -> dict[str, dict[int, float]]:
    """By contender and length, the milliseconds of a pass or the MiB of memory that were measured."""
    curves: dict[str, dict[int, float]] = {}
    for problem in problems:
        for result in problem.results:
            value = result.times[name].median_ms if name in result.times else None
            if name == _MEMORY and result.peak_bytes:
                value = result.peak_bytes / 2**20
            if value is not None:
                curves.setdefault(result.name, {})[problem.workload.length] = value
    return curves


def _draw_curves(axes: Axes, curves: dict[str, dict[int, float]], styles: dict[str, tuple[str, str]], label: str) -> None:
    for name, (colour, marker) in styles.items():
        points = curves.get(name, {})  # without one, the legend still has its name
        width, line = (2.5, "-") if name == "evoattn" else (1.5, "--")
        xs, ys = [*points], [*points.values()]
        axes.plot(xs, ys, line, color=colour, marker=marker, markersize=5, linewidth=width, label=contenders.title(name))
    _logarithmic(axes, {length for points in curves.values() for length in points})
    axes.set_xlabel("length L")
    axes.set_ylabel(label)


def _logarithmic(axes: Axes, lengths: Iterable[int]) -> None:
    """Make both axes logarithmic, with ticks at the lengths whose labels do not touch, and at plain numbers."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

    axes.set_xscale("log")
    axes.set_yscale("log")
    longer = [*sorted(lengths), float("inf")]
    axes.xaxis.set_major_locator(FixedLocator([a for a, b in itertools.pairwise(longer) if b / a > 1.12]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda length, _: f"{length:.0f}"))
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda number, _: f"{number:,.6g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(True, color=_FAINT, linewidth=0.7)
    plain(axes)


def style() -> AbstractContextManager[None]:
    """In this block figures have the fonts of this module."""
    import matplotlib

    return matplotlib.rc_context(_FONTS)  # type: ignore[no-any-return]


def save(figure: Figure, path: Path, metadata: dict[str, str] | None = None, dpi: int = 130) -> None:
    """Write a figure as PNG, whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    picture = io.BytesIO()
    with style():
        figure.savefig(picture, format="png", dpi=dpi, metadata=metadata)
    cache.write(path, picture.getvalue())
