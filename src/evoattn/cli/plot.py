"""The picture: time and peak memory against length."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from evoattn.cli.evoformer import CHANNELS, TRIANGLE_HEADS
from evoattn.cli.measure import Cost
from evoattn.cli.sweep import Growth
from evoattn.cli.terminal import RefusedError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw"]

_STYLES = {"evoattn": ("#0072B2", "o", "-"), "dense": ("#D55E00", "s", "--")}
"""Colour, marker and line: Okabe and Ito's blue and vermilion, told apart without colour too."""

_LABELS = {"evoattn": "evoattn", "dense": "dense PyTorch"}
_INK, _GREY, _FAINT = "#222222", "#555555", "#D8D8D8"
_TITLE: dict[str, Any] = {"loc": "left", "fontsize": 10.5, "color": _INK}


def draw(growth: Growth, dtype: torch.dtype, machine: str, output: Path) -> None:
    """Draw and write the PNG, whole or not at all.

    Args:
        growth: what was measured.
        dtype: of q, k, v.
        machine: device and versions, for the second line of the title.
        output: where to write.
    """
    import matplotlib

    with matplotlib.rc_context({"font.size": 10, "font.family": "DejaVu Sans", "axes.edgecolor": _GREY}):
        figure = _figure(growth, dtype, machine)
        unfinished = output.with_name(f".{output.name}.{os.getpid()}.part")
        try:
            figure.savefig(unfinished, format="png", dpi=160)
            os.replace(unfinished, output)
        except OSError as error:
            raise RefusedError(f"--output {str(output)!r}: cannot be written: {error.strerror or error}") from None
        finally:
            unfinished.unlink(missing_ok=True)


def _figure(growth: Growth, dtype: torch.dtype, machine: str) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5), facecolor="white")
    FigureCanvasAgg(figure)
    figure.subplots_adjust(left=0.088, right=0.985, top=0.815, bottom=0.165, wspace=0.27)
    sizes = f"{TRIANGLE_HEADS} heads x {CHANNELS} channels, {str(dtype).removeprefix('torch.')}"
    figure.text(0.012, 0.945, f"Triangle attention, forward + backward: {sizes}", fontsize=13, fontweight="bold", color=_INK)
    figure.text(0.012, 0.892, machine, fontsize=9, color=_GREY)
    notes = [f"{_LABELS[name]} not run {why}" for name, why in growth.stopped.items()]
    figure.text(0.988, 0.012, "\n".join(notes), fontsize=8.5, color=_GREY, ha="right", va="bottom")
    time, memory = figure.subplots(1, 2)
    _panel(time, growth, "time (ms)", lambda cost: cost.seconds * 1e3)
    _panel(memory, growth, "peak memory beyond the inputs (MiB)", lambda cost: cost.peak / 2**20)
    longest = max(set(growth.costs["evoattn"]) & set(growth.costs["dense"]), default=None)
    if longest is not None:
        ours, dense = growth.costs["evoattn"][longest], growth.costs["dense"][longest]
        time.set_title(f"{dense.seconds / ours.seconds:.1f}x as fast as dense at L = {longest}", **_TITLE)
        memory.set_title(f"{100 * ours.peak / dense.peak:.0f}% of the memory of dense at L = {longest}", **_TITLE)
    time.legend(loc="upper left", frameon=False)
    return figure


def _panel(axes: Axes, growth: Growth, label: str, value: Callable[[Cost], float]) -> None:
    """One quantity against length, both axes logarithmic, with ticks at the lengths and at plain numbers."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

    for name, costs in growth.costs.items():
        colour, marker, line = _STYLES[name]
        lengths = sorted(costs)
        values = [value(costs[length]) for length in lengths]
        axes.plot(lengths, values, line, color=colour, marker=marker, markersize=6, linewidth=2, label=_LABELS[name])
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(growth.lengths[0] / 1.12, growth.lengths[-1] * 1.12)
    axes.set_xlabel("length L (residues; L rows of L x L scores)")
    axes.set_ylabel(label)
    axes.xaxis.set_major_locator(FixedLocator(_spread(growth.lengths)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda length, _: f"{length:.0f}"))
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda number, _: f"{number:,.6g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(True, color=_FAINT, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(which="both", color=_FAINT, labelcolor=_INK)


def _spread(lengths: tuple[int, ...]) -> list[int]:
    """The lengths, without those whose labels would touch the next one's on a logarithmic axis."""
    kept = [lengths[-1]]
    for length in reversed(lengths[:-1]):
        if kept[-1] / length > (lengths[-1] / lengths[0]) ** 0.09:
            kept.append(length)
    return kept[::-1]
