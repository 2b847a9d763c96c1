"""Pictures of a record, by matplotlib: speed by workload beside the device's ceilings, and growth with length."""

from __future__ import annotations

import functools
import io
import itertools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import contenders
from ceilings import roofs

from evoattn.bench import table
from evoattn.bench.record import Problem, Record
from evoattn.compile import cache

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

EVOATTN = "#0072B2"
_COLOURS = ("#D55E00", "#009E73", "#CC79A7", "#E69F00", "#8C6BB1", "#66A61E", "#A6761D")
_BOUND = "#9AA0A6"
_MARKERS = "osD^vPX*"
INK, _GREY, _FAINT = "#222222", "#555555", "#D8D8D8"
_CEILINGS = {
    "exp2": ("#B8860B", "exponentials"),
    "products": ("#8C6BB1", "matrix products"),
    "memory": ("#009E73", "memory bandwidth"),
}
"""Colour and title of each ceiling."""

_PASSES = {"forward": "forward", "backward": "backward", "both": "forward + backward"}
_MEMORY = "peak memory beyond the inputs"
_SHARE = "evoattn (% of the lowest ceiling)"
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


def passes_apart(problems: list[Problem]) -> list[str]:
    """The forward and the backward, or both together if a record has only that."""
    return _measured(problems, ("forward", "backward")) or _measured(problems, ("both",))


def new_figure(width: float, height: float, title: str, about: str) -> Figure:
    """An empty figure of so many inches, with a title and a line of the machine."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"{title}\n", fontsize=13, fontweight="bold", color=INK, x=0.01, ha="left")
    figure.text(0.01, 1 - 0.5 / height, about, fontsize=8.5, color=_GREY)
    return figure


def plain(axes: Axes) -> None:
    """Remove two of the four spines, and draw ticks faintly."""
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(which="both", color=_FAINT, labelcolor=INK)


def by_workload(
    figure: Figure,
    problems: list[Problem],
    passes: list[str],
    label: str,
    stretch: float,
    draw: Callable[[Axes, int, Problem, str], None],
) -> list[Axes]:
    """A panel a pass, with a row a workload that `draw` draws. The axis is `stretch` times as long as the longest bar."""
    panels: list[Axes] = [*figure.subplots(1, len(passes), squeeze=False, sharey=True)[0]]
    for axes, name in zip(panels, passes, strict=True):
        for row, problem in enumerate(problems):
            draw(axes, row, problem, name)
        axes.set_xlabel(f"{_PASSES[name]}{label}")
        axes.set_xlim(0, stretch * axes.dataLim.x1)
        axes.grid(True, axis="x", color=_FAINT, linewidth=0.7)
        plain(axes)
    panels[0].set_yticks(range(len(problems)), [p.workload.name for p in problems])
    panels[0].set_ylim(len(problems) - 0.4, -0.6)
    return panels


def rates(record: Record, problems: list[Problem]) -> Figure:
    """Scores a second of all contenders: a bar a workload up to the device's lowest ceiling, whose colour says which."""
    problems = [problem for problem in problems if any(result.times for result in problem.results)]
    passes = passes_apart(problems)
    title, size = headed("Speed", problems), (4.2 + 4.2 * len(passes), 2.0 + 0.34 * len(problems))
    figure = new_figure(*size, title, table.headline(record))
    draw = functools.partial(_draw_rates, record, _style(_names(problems)))
    legend: dict[str, Any] = {}
    for axes in by_workload(figure, problems, passes, ", 10⁹ scores/s", 1.16, draw) if passes else ():
        axes.xaxis.set_major_formatter(lambda number, _: f"{number:,.6g}")
        legend |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    labels = sorted(legend, key=lambda label: (label.startswith("lowest"), label != _SHARE))
    handles = [legend[label] for label in labels]
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return figure


def _draw_rates(record: Record, styles: dict[str, tuple[str, str]], axes: Axes, row: int, problem: Problem, name: str) -> None:
    """One workload: the lowest ceiling, evoattn's rate with its share of that, and a mark for each of the others."""
    rate = table.rate(problem, problem.result("evoattn"), name)
    bounds = roofs(record, problem, name)
    if bounds:
        lowest = min(bounds, key=lambda what: bounds[what])
        colour, title = _CEILINGS[lowest]
        axes.barh(row, bounds[lowest], 0.62, color=colour, alpha=0.16)
        axes.plot([bounds[lowest]] * 2, [row - 0.31, row + 0.31], color=colour, linewidth=2.5, label=f"lowest ceiling: {title}")
        if rate is not None:
            text = f"{100 * rate / bounds[lowest]:.0f}%"
            style: Any = {"textcoords": "offset points", "va": "center", "fontsize": 8.5, "color": INK}
            axes.annotate(text, (bounds[lowest], row), (5, 0), **style)
    if rate is not None:
        axes.barh(row, rate, 0.32, color=EVOATTN, label=_SHARE)
    for result in problem.results:
        peer_rate = table.rate(problem, result, name)
        if result.name != "evoattn" and peer_rate is not None:
            colour, marker = styles[result.name]
            edge = colour if marker == "x" else "white"
            style = {"markersize": 6.5, "color": colour, "markeredgecolor": edge, "linestyle": "", "zorder": 3}
            axes.plot(peer_rate, row, marker=marker, label=contenders.title(result.name), **style)


def headed(quantity: str, problems: list[Problem]) -> str:
    """A title: a quantity, and the dtypes of problems."""
    dtypes = ", ".join(dict.fromkeys(problem.dtype for problem in problems))
    return f"{quantity} of Evoformer attention, {dtypes}"


def against_length(record: Record, problems: list[Problem], family: str = "tri") -> Figure:
    """Time and peak memory of one family's attention against its length, both logarithmic."""
    alike = sorted((p for p in problems if p.workload.family == family), key=lambda p: p.workload.length)
    return growth(alike, headed("Time and memory", alike), table.headline(record))


def growth(problems: list[Problem], title: str, about: str, notes: str = "", beside: str = "") -> Figure:
    """Time and peak memory of problems of growing length, both logarithmic.

    Args:
        problems: the shortest first.
        title, about: the two lines above.
        notes: the lines below.
        beside: a contender; each panel says what evoattn takes of its time or memory at the longest length of both.
    """
    passes = _measured(problems, ("both",)) or _measured(problems, ("forward", "backward"))
    height = 5.0 if beside else 4.9
    figure = new_figure(5.0 * (len(passes) + 1), height, title + ("\n" if beside else ""), about)
    panels: Any = figure.subplots(1, len(passes) + 1, squeeze=False)[0]
    styles = _style(_names(problems))
    for axes, name in zip(panels, [*passes, _MEMORY], strict=True):
        curves = _curves(problems, name)
        _draw_curves(axes, curves, styles, f"{_PASSES[name]}, ms" if name in _PASSES else f"{name}, MiB")
        own, other = curves.get("evoattn", {}), curves.get(beside, {})
        if longest := max(own.keys() & other.keys(), default=None):
            ratio = other[longest] / own[longest]
            words = f"{100 / ratio:.0f}% of the memory of" if name == _MEMORY else f"{ratio:.1f}x as fast as"
            axes.set_title(f"{words} {contenders.title(beside)} at L = {longest}", loc="left", fontsize=10.5, color=INK)
    handles, labels = panels[-1].get_legend_handles_labels()
    if beside:
        panels[0].legend(loc="upper left", frameon=False)
    elif labels:
        figure.legend(handles, labels, loc="outside lower center", ncols=min(5, len(labels)), frameon=False, fontsize=9)
    if notes:
        figure.supxlabel(notes, fontsize=8.5, color=_GREY, x=0.99, ha="right")
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
    logarithmic(axes, {length for points in curves.values() for length in points})
    axes.set_xlabel("length L")
    axes.set_ylabel(label)


def logarithmic(axes: Axes, lengths: Iterable[int]) -> None:
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
