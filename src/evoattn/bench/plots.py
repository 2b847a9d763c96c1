"""Pictures of a record, by matplotlib: speed and speed-ups by workload, distance from the ceilings, growth with length."""

from __future__ import annotations

import functools
import io
import itertools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evoattn.bench import table
from evoattn.bench.peers import PEERS
from evoattn.bench.record import Problem, Record, Result, replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_OURS = "#0072B2"
_COLOURS = ("#D55E00", "#009E73", "#CC79A7", "#E69F00", "#8C6BB1", "#66A61E", "#A6761D")
_BOUND = "#9AA0A6"
_MARKERS = "osD^vPX*"
INK, _GREY, _FAINT = "#222222", "#555555", "#D8D8D8"
_ROOFS = {"exp2": ("#B8860B", "exp2 units"), "products": ("#8C6BB1", "matrix products"), "memory": ("#009E73", "memory")}
_TITLES = {"forward": "forward", "backward": "backward", "both": "forward + backward"}
_FONTS: Any = {"font.size": 10, "font.family": "DejaVu Sans", "axes.edgecolor": _GREY}


def _style(names: list[str]) -> dict[str, tuple[str, str]]:
    """Colour and marker of every contender; a bound is grey."""
    styles: dict[str, tuple[str, str]] = {}
    rest = 0
    for name in names:
        if name == "evoattn":
            styles[name] = (_OURS, "o")
        elif name in PEERS and not PEERS[name].biased:
            styles[name] = (_BOUND, "x")
        else:
            styles[name] = (_COLOURS[rest % len(_COLOURS)], _MARKERS[1 + rest % (len(_MARKERS) - 1)])
            rest += 1
    return styles


def _names(problems: list[Problem]) -> list[str]:
    """Every contender with a time or a peak, in the order in which they ran."""
    found = dict.fromkeys(r.name for problem in problems for r in problem.results if r.times or r.peak_bytes)
    return list(found)


def _passes(problems: list[Problem], wished: tuple[str, ...]) -> list[str]:
    return [name for name in wished if any(name in r.times for problem in problems for r in problem.results)]


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
    """Take away what axes have beyond their data."""
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(which="both", color=_FAINT, labelcolor=INK)


def _by_workload(
    figure: Figure,
    problems: list[Problem],
    passes: list[str],
    label: str,
    room: float,
    draw: Callable[[Axes, int, Problem, str], None],
) -> list[Axes]:
    """A panel a pass, with a row a workload that `draw` draws; `room` times what the longest bar takes."""
    panels: list[Axes] = [*figure.subplots(1, len(passes), squeeze=False, sharey=True)[0]]
    for axes, name in zip(panels, passes, strict=True):
        for row, problem in enumerate(problems):
            draw(axes, row, problem, name)
        axes.set_xlabel(f"{_TITLES[name]}{label}")
        axes.set_xlim(0, room * axes.dataLim.x1)
        axes.grid(True, axis="x", color=_FAINT, linewidth=0.7)
        plain(axes)
    panels[0].set_yticks(range(len(problems)), [p.workload.name for p in problems])
    panels[0].set_ylim(len(problems) - 0.4, -0.6)
    return panels


def speedups(record: Record, problems: list[Problem]) -> Figure:
    """Speed of evoattn over that of the fastest peer: a bar a workload and pass, with the number and the peer's name."""
    passes = _passes(problems, ("forward", "backward")) or _passes(problems, ("both",))
    rows = [p for p in problems if any(_beside_fastest(p, name) for name in passes)]
    title = _what("Speed-up", rows)
    figure = new_figure(1.6 + 4.3 * len(passes), 1.35 + 0.34 * len(rows), title, table.headline(record))
    for axes in _by_workload(figure, rows, passes, ": time of the fastest peer / evoattn's", 1.75, _speedup):
        axes.axvline(1, color=INK, linewidth=1)
    return figure


def _speedup(axes: Axes, row: int, problem: Problem, name: str) -> None:
    if found := _beside_fastest(problem, name):
        ratio, peer = found
        axes.barh(row, ratio, 0.66, color=_OURS if ratio >= 1 else _COLOURS[0])
        place: Any = {"xytext": (4, 0), "textcoords": "offset points", "va": "center", "fontsize": 8.5}
        axes.annotate(f"{ratio:.2f}x  {peer}", (max(ratio, 1), row), **place)


def _beside_fastest(problem: Problem, name: str) -> tuple[float, str] | None:
    """The time of the fastest peer over ours, and that peer's title; a bound, which leaves biases out, is no peer."""
    ours = problem.result("evoattn")
    fair = [r for r in problem.results if r.name in PEERS and PEERS[r.name].biased and name in r.times]
    if ours is None or name not in ours.times or not fair:
        return None
    fastest = min(fair, key=lambda r: r.times[name].median_ms)
    return fastest.times[name].median_ms / ours.times[name].median_ms, table.title(fastest.name).split(",")[0]


def rates(record: Record, problems: list[Problem]) -> Figure:
    """Scores a second of all contenders: a bar a workload up to the device's lowest ceiling, whose colour says which."""
    problems = [problem for problem in problems if any(result.times for result in problem.results)]
    passes = _passes(problems, ("forward", "backward")) or _passes(problems, ("both",))
    title, size = _what("Speed", problems), (4.2 + 4.2 * len(passes), 2.0 + 0.34 * len(problems))
    figure = new_figure(*size, title, table.headline(record))
    draw = functools.partial(_rates, record, _style(_names(problems)))
    found: dict[str, Any] = {}
    for axes in _by_workload(figure, problems, passes, ", 10⁹ scores/s", 1.16, draw) if passes else ():
        axes.xaxis.set_major_formatter(lambda number, _: f"{number:,.0f}")
        found |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    labels = sorted(found, key=lambda label: (label.startswith("lowest"), not label.startswith("evoattn, and")))
    handles = [found[label] for label in labels]
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return figure


def _rates(record: Record, styles: dict[str, tuple[str, str]], axes: Axes, row: int, problem: Problem, name: str) -> None:
    """One workload: the lowest ceiling, evoattn's rate with its share of that, and a mark for each of the others."""
    rate = table.rate(problem, problem.result("evoattn"), name)
    bounds = table.roofs(record, problem, name)
    if bounds:
        lowest = min(bounds, key=lambda what: bounds[what])
        colour, title = _ROOFS[lowest]
        axes.barh(row, bounds[lowest], 0.62, color=colour, alpha=0.16)
        axes.plot([bounds[lowest]] * 2, [row - 0.31, row + 0.31], color=colour, linewidth=2.5, label=f"lowest ceiling: {title}")
        if rate is not None:
            text = f"{100 * rate / bounds[lowest]:.0f}%"
            style: Any = {"textcoords": "offset points", "va": "center", "fontsize": 8.5, "color": INK}
            axes.annotate(text, (bounds[lowest], row), (5, 0), **style)
    if rate is not None:
        axes.barh(row, rate, 0.32, color=_OURS, label="evoattn, and its share of the ceiling")
    for result in problem.results:
        other = table.rate(problem, result, name)
        if result.name != "evoattn" and other is not None:
            colour, marker = styles[result.name]
            edge = colour if marker == "x" else "white"
            style = {"markersize": 6.5, "color": colour, "markeredgecolor": edge, "linestyle": "", "zorder": 3}
            axes.plot(other, row, marker=marker, label=table.title(result.name), **style)


def _what(quantity: str, problems: list[Problem]) -> str:
    dtypes = ", ".join(dict.fromkeys(problem.dtype for problem in problems))
    return f"{quantity} of Evoformer attention, {dtypes}"


def against_length(record: Record, problems: list[Problem], family: str = "tri") -> Figure:
    """Time and peak memory of one family's attention against its length, both logarithmic."""
    alike = sorted((p for p in problems if p.workload.family == family), key=lambda p: p.workload.length)
    return growth(alike, _what("Time and memory", alike), table.headline(record))


def growth(problems: list[Problem], title: str, about: str, notes: str = "", beside: str = "") -> Figure:
    """Time and peak memory of problems of growing length, both logarithmic.

    Args:
        problems: the shortest first.
        title, about: the two lines above.
        notes: the lines below.
        beside: a contender; each panel says what evoattn takes of its time or memory at the longest length of both.
    """
    passes = _passes(problems, ("both",)) or _passes(problems, ("forward", "backward"))
    height = 5.0 if beside else 4.9
    figure = new_figure(5.0 * (len(passes) + 1), height, title + ("\n" if beside else ""), about)
    panels: Any = figure.subplots(1, len(passes) + 1, squeeze=False)[0]
    styles = _style(_names(problems))
    for axes, name in zip(panels, passes, strict=False):
        found = _values(problems, styles, lambda r, name=name: r.times[name].median_ms if name in r.times else None)  # type: ignore[misc]
        _lines(axes, found, styles, f"{_TITLES[name]}, ms")
        _say_beside(axes, found, beside, lambda ours, theirs: f"{theirs / ours:.1f}x as fast as")
    found = _values(problems, styles, lambda r: None if r.peak_bytes is None else r.peak_bytes / 2**20)
    _lines(panels[-1], found, styles, "peak memory beyond the inputs, MiB")
    _say_beside(panels[-1], found, beside, lambda ours, theirs: f"{100 * ours / theirs:.0f}% of the memory of")
    handles, labels = panels[-1].get_legend_handles_labels()
    if beside:
        panels[0].legend(loc="upper left", frameon=False)
    elif labels:
        figure.legend(handles, labels, loc="outside lower center", ncols=min(5, len(labels)), frameon=False, fontsize=9)
    if notes:
        figure.supxlabel(notes, fontsize=8.5, color=_GREY, x=0.99, ha="right")
    return figure


def _values(
    problems: list[Problem], names: Iterable[str], value: Callable[[Result], float | None]
) -> dict[str, dict[int, float]]:
    """By contender and length, what was measured."""
    found: dict[str, dict[int, float]] = {name: {} for name in names}
    for problem in problems:
        for result in problem.results:
            if (y := value(result)) and result.name in found:
                found[result.name][problem.workload.length] = y
    return found


def _say_beside(axes: Axes, found: dict[str, dict[int, float]], name: str, words: Callable[[float, float], str]) -> None:
    ours, theirs = found.get("evoattn", {}), found.get(name, {})
    if longest := max(ours.keys() & theirs.keys(), default=None):
        what = f"{words(ours[longest], theirs[longest])} {table.title(name)} at L = {longest}"
        axes.set_title(what, loc="left", fontsize=10.5, color=INK)


def _lines(axes: Axes, found: dict[str, dict[int, float]], styles: dict[str, tuple[str, str]], label: str) -> None:
    for name, points in found.items():
        colour, marker = styles[name]
        width, line = (2.5, "-") if name == "evoattn" else (1.5, "--")
        xs, ys = [*points], [*points.values()]
        axes.plot(xs, ys, line, color=colour, marker=marker, markersize=5, linewidth=width, label=table.title(name))
    logarithmic(axes, {length for points in found.values() for length in points})
    axes.set_xlabel("length")
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
    with style(), replacing(path) as unfinished:
        figure.savefig(unfinished, format="png", dpi=dpi, metadata=metadata)


def write_png(record: Record, path: Path) -> None:
    """The plots of a record's first dtype in one file: speed above, growth with length below where there is more than one.

    Raises:
        OSError: the file cannot be written.
    """
    import numpy
    from matplotlib.image import imread, imsave

    problems = [p for p in record.problems if p.dtype == record.problems[0].dtype]
    pictures = []
    with style():
        figures = [rates(record, problems)]
        if len({p.workload.length for p in problems if p.workload.family == "tri"}) > 1:
            figures.append(against_length(record, problems))
        for figure in figures:
            held = io.BytesIO()
            figure.savefig(held, format="png", dpi=130)
            held.seek(0)
            pictures.append(imread(held, format="png"))
    width = max(picture.shape[1] for picture in pictures)
    whole = [numpy.pad(x, ((0, 0), (0, width - x.shape[1]), (0, 0)), constant_values=1.0) for x in pictures]
    with replacing(path) as unfinished:
        imsave(unfinished, numpy.concatenate(whole), format="png", dpi=130)
