"""Pictures of a record, by matplotlib: speed and speed-ups by workload, distance from the ceilings, growth with length."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evoattn.bench import table
from evoattn.bench.peers import PEERS
from evoattn.bench.record import Problem, Record, Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["STYLE", "against_length", "rates", "roofs", "save", "speedups", "write_png"]

_OURS = "#0072B2"
_COLOURS = ("#D55E00", "#009E73", "#CC79A7", "#E69F00", "#8C6BB1", "#66A61E", "#A6761D")
_BOUND = "#9AA0A6"
_MARKERS = "osD^vPX*"
_INK, _GREY, _FAINT = "#222222", "#555555", "#D8D8D8"
_ROOFS = {"exp2": ("#B8860B", "exp2 units"), "products": ("#8C6BB1", "matrix products"), "memory": ("#009E73", "memory")}
_TITLES = {"forward": "forward", "backward": "backward", "both": "forward + backward"}
STYLE: Any = {"font.size": 10, "font.family": "DejaVu Sans", "axes.edgecolor": _GREY}


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


def _figure(width: float, height: float, title: str, about: str) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"{title}\n", fontsize=13, fontweight="bold", color=_INK, x=0.01, ha="left")
    figure.text(0.01, 1 - 0.5 / height, about, fontsize=8.5, color=_GREY)
    return figure


def _plain(axes: Axes) -> None:
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(which="both", color=_FAINT, labelcolor=_INK)


def rates(record: Record, problems: list[Problem]) -> Figure:
    """Scores a second of every contender by workload, a panel a pass, with the ceiling of the device's exponentials."""
    problems = [problem for problem in problems if any(result.times for result in problem.results)]
    passes = _passes(problems, ("forward", "backward")) or _passes(problems, ("both",))
    names = [name for name in _names(problems) if any((r := p.result(name)) and r.times for p in problems)]
    styles = _style(names)
    height = 1.6 + max(len(passes), 1) * 2.7
    figure = _figure(max(8.0, 1.5 + 0.95 * len(problems)), height, _what("Speed", problems), table.headline(record))
    panels: Any = figure.subplots(max(len(passes), 1), 1, squeeze=False)[:, 0]
    thickness = 0.8 / max(len(names), 1)
    for axes, name in zip(panels, passes, strict=False):
        for place, contender in enumerate(names):
            found = [(at, table.rate(p, p.result(contender), name)) for at, p in enumerate(problems)]
            bars = [(at - 0.4 + (place + 0.5) * thickness, rate) for at, rate in found if rate is not None]
            axes.bar(
                [x for x, _ in bars], [y for _, y in bars], thickness, color=styles[contender][0], label=table.title(contender)
            )
        ceiling = record.ceilings.exp2_per_s
        if ceiling is not None and name != "both" and axes.get_ylim()[1] > 0.2 * ceiling / 1e9:
            axes.axhline(ceiling / 1e9, color=_INK, linewidth=1, linestyle="--", label="the device's exp2, measured")
        axes.set_ylabel(f"{_TITLES[name]}\n10⁹ scores/s")
        axes.set_xticks(range(len(problems)), [p.workload.name for p in problems], rotation=20, ha="right")
        axes.grid(True, axis="y", color=_FAINT, linewidth=0.7)
        axes.set_xlim(-0.6, len(problems) - 0.4)
        _plain(axes)
    if passes:
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(5, len(labels)), frameon=False, fontsize=9)
    return figure


def speedups(record: Record, problems: list[Problem]) -> Figure:
    """How many times as fast evoattn is as the fastest peer: a bar a workload and pass, with the number and the peer's name."""
    passes = _passes(problems, ("forward", "backward")) or _passes(problems, ("both",))
    rows = [p for p in problems if any(_beside_fastest(p, name) for name in passes)]
    height = 1.35 + 0.34 * len(rows)
    figure = _figure(1.6 + 4.3 * len(passes), height, _what("Speed-up", rows), table.headline(record))
    panels: Any = figure.subplots(1, len(passes), squeeze=False, sharey=True)[0]
    for axes, name in zip(panels, passes, strict=True):
        for row, problem in enumerate(rows):
            found = _beside_fastest(problem, name)
            if found is None:
                continue
            ratio, peer = found
            axes.barh(row, ratio, 0.66, color=_OURS if ratio >= 1 else _COLOURS[0])
            place: Any = {"xytext": (4, 0), "textcoords": "offset points", "va": "center", "fontsize": 8.5}
            axes.annotate(f"{ratio:.2f}x  {peer}", (max(ratio, 1), row), **place)
        axes.axvline(1, color=_INK, linewidth=1)
        axes.set_xlabel(f"{_TITLES[name]}: time of the fastest peer / evoattn's")
        axes.set_xlim(0, 1.75 * axes.dataLim.x1)
        axes.grid(True, axis="x", color=_FAINT, linewidth=0.7)
        _plain(axes)
    panels[0].set_yticks(range(len(rows)), [p.workload.name for p in rows])
    panels[0].set_ylim(len(rows) - 0.4, -0.6)
    return figure


def _beside_fastest(problem: Problem, name: str) -> tuple[float, str] | None:
    """The time of the fastest peer that solves the whole problem over ours, and that peer's title."""
    ours, fastest = problem.result("evoattn"), _fastest_peer(problem, name)
    if ours is None or name not in ours.times or fastest is None:
        return None
    return fastest.times[name].median_ms / ours.times[name].median_ms, table.title(fastest.name).split(",")[0]


def _fastest_peer(problem: Problem, name: str) -> Result | None:
    """The peer that solves the whole problem in the least time; a bound, which leaves the biases out, is none."""
    fair = [r for r in problem.results if r.name in PEERS and PEERS[r.name].biased and name in r.times]
    return min(fair, key=lambda r: r.times[name].median_ms, default=None)


def roofs(record: Record, problems: list[Problem]) -> Figure:
    """How far evoattn and the best peer come: a bar a workload up to the device's lowest ceiling, whose colour says which."""
    problems = [p for p in problems if (ours := p.result("evoattn")) and ours.times]
    passes = _passes(problems, ("forward", "backward"))
    height = 1.65 + 0.3 * len(problems)
    figure = _figure(4.2 + 4.2 * len(passes), height, _what("Distance from the ceilings", problems), table.headline(record))
    panels: Any = figure.subplots(1, len(passes), squeeze=False, sharey=True)[0]
    for axes, name in zip(panels, passes, strict=True):
        for row, problem in enumerate(problems):
            _roof(axes, row, record, problem, name)
        axes.set_xlabel(f"{_TITLES[name]}, 10⁹ scores/s")
        axes.xaxis.set_major_formatter(lambda number, _: f"{number:,.0f}")
        axes.set_xlim(0, 1.16 * axes.dataLim.x1)
        axes.grid(True, axis="x", color=_FAINT, linewidth=0.7)
        _plain(axes)
    panels[0].set_yticks(range(len(problems)), [p.workload.name for p in problems])
    panels[0].set_ylim(len(problems) - 0.4, -0.6)
    found: dict[str, Any] = {}
    for axes in panels:
        found |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    labels = sorted(found, key=lambda label: (label.startswith("lowest"), label))
    handles = [found[label] for label in labels]
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=9)
    return figure


def _roof(axes: Axes, row: int, record: Record, problem: Problem, name: str) -> None:
    """One workload's bar: the lowest ceiling, evoattn's rate with its share of that, the best peer's as a mark."""
    rate = table.rate(problem, problem.result("evoattn"), name)
    bounds = table.roofs(record, problem, name)
    if bounds:
        lowest = min(bounds, key=lambda what: bounds[what])
        colour, title = _ROOFS[lowest]
        axes.barh(row, bounds[lowest], 0.62, color=colour, alpha=0.16)
        axes.plot([bounds[lowest]] * 2, [row - 0.31, row + 0.31], color=colour, linewidth=2.5, label=f"lowest ceiling: {title}")
        if rate is not None:
            text = f"{100 * rate / bounds[lowest]:.0f}%"
            style: Any = {"textcoords": "offset points", "va": "center", "fontsize": 8.5, "color": _INK}
            axes.annotate(text, (bounds[lowest], row), (5, 0), **style)
    if rate is not None:
        axes.barh(row, rate, 0.32, color=_OURS, label="evoattn, and its share of the ceiling")
    best = table.rate(problem, _fastest_peer(problem, name), name)
    if best is not None:
        axes.plot(best, row, "D", color=_COLOURS[0], markeredgecolor="white", markersize=6.5, label="the fastest peer")


def _what(quantity: str, problems: list[Problem]) -> str:
    dtypes = ", ".join(dict.fromkeys(problem.dtype for problem in problems))
    return f"{quantity} of Evoformer attention, {dtypes}"


def against_length(record: Record, problems: list[Problem], family: str = "tri") -> Figure:
    """Time and peak memory of one family's attention against its length, both logarithmic."""
    of = sorted((p for p in problems if p.workload.family == family), key=lambda p: p.workload.length)
    passes = _passes(of, ("both",)) or _passes(of, ("forward", "backward"))
    figure = _figure(5.0 * (len(passes) + 1), 4.9, _what("Time and memory", problems), table.headline(record))
    panels: Any = figure.subplots(1, len(passes) + 1, squeeze=False)[0]
    styles = _style(_names(of))
    for axes, name in zip(panels, passes, strict=False):
        _lines(
            axes, of, styles, f"{_TITLES[name]}, ms", lambda r, name=name: r.times[name].median_ms if name in r.times else None
        )  # type: ignore[misc]
    memory = "peak memory beyond the inputs, MiB"
    _lines(panels[-1], of, styles, memory, lambda r: None if r.peak_bytes is None else r.peak_bytes / 2**20)
    handles, labels = panels[-1].get_legend_handles_labels()
    if labels:
        figure.legend(handles, labels, loc="outside lower center", ncols=min(5, len(labels)), frameon=False, fontsize=9)
    return figure


def _lines(axes: Axes, problems: list[Problem], styles: dict[str, tuple[str, str]], label: str, value: Any) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

    for name, (colour, marker) in styles.items():
        found = [(p.workload.length, value(result)) for p in problems if (result := p.result(name)) is not None]
        points = [(length, y) for length, y in found if y]
        width = 2.5 if name == "evoattn" else 1.5
        line = "-" if name == "evoattn" else "--"
        xs, ys = [x for x, _ in points], [y for _, y in points]
        axes.plot(xs, ys, line, color=colour, marker=marker, markersize=5, linewidth=width, label=table.title(name))
    axes.set_xscale("log")
    axes.set_yscale("log")
    lengths = sorted({problem.workload.length for problem in problems})
    kept = [length for i, length in enumerate(lengths) if i + 1 == len(lengths) or lengths[i + 1] / length > 1.12]
    axes.xaxis.set_major_locator(FixedLocator(kept))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda length, _: f"{length:.0f}"))
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda number, _: f"{number:,.6g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("length")
    axes.set_ylabel(label)
    axes.grid(True, color=_FAINT, linewidth=0.7)
    _plain(axes)


def save(figure: Figure, path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write a figure as PNG, whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    import matplotlib

    unfinished = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with matplotlib.rc_context(STYLE):
            figure.savefig(unfinished, format="png", dpi=130, metadata=metadata)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def write_png(record: Record, path: Path) -> None:
    """The plots of a record's first dtype in one file: speed above, growth with length below where there is more than one.

    Raises:
        OSError: the file cannot be written.
    """
    import io

    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.image import imread

    problems = [p for p in record.problems if p.dtype == record.problems[0].dtype]
    with matplotlib.rc_context(STYLE):
        figures = [rates(record, problems)]
        lengths = {p.workload.length for p in problems if p.workload.family == "tri"}
        if len(lengths) > 1:
            figures.append(against_length(record, problems))
        pictures = []
        for figure in figures:
            held = io.BytesIO()
            figure.savefig(held, format="png", dpi=130)
            held.seek(0)
            pictures.append(imread(held, format="png"))
        if len(pictures) == 1:
            save(figures[0], path)
            return
        width = max(picture.shape[1] for picture in pictures)
        height = sum(picture.shape[0] for picture in pictures)
        page = Figure(figsize=(width / 130, height / 130), facecolor="white")
        FigureCanvasAgg(page)
        top = height
        for picture in pictures:
            top -= picture.shape[0]
            page.figimage(picture, 0, top)
        save(page, path)
