#!/usr/bin/env python3
"""The least time of whole layers on an H200, from passes over memory and matrix products: `python benchmarks/layer_goals.py`.

A pass costs its bytes at the rate of a copy, or its product at the rate of a large one, whichever takes longer. The attention
costs what the committed record measured of it alone. Prints the goals in notes/layer-goals.md.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from layer_workloads import LAYERS
from record_tables import markdown

from evoattn.bench import table
from evoattn.bench.record import Record, read
from evoattn.workloads import Workload

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "benchmarks" / "results" / "h200-bfloat16.json"
COPIED = 4.0e12
"""Bytes a second of a copy, read and written."""

PRODUCTS = 650e12
"""Operations a second of large bfloat16 products at the card's limit of power."""

REACHED = 0.9
"""The share of the floor's speed that is the goal, where nothing waits for the host."""

EAGER_GOALS = {"layer256": (0.26, 1.30), "layer384": (0.38, 1.60), "layer768": (1.40, 5.40)}
"""Goals of eager calls in ms, set in advance: forward, forward + backward. Short ones allow for the host."""

ATTENTION = {"layer256": "tri256", "layer384": "tri384", "layer768": "tri768", "layer1536": "tri2048"}
"""The workload whose measured rate a triangle layer's attention has."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """One part of a layer. Bytes and operations of its forward and its backward."""

    part: str
    forward: tuple[float, float]
    backward: tuple[float, float]

    def ms(self, *, backward: bool) -> float:
        """The least time."""
        moved, operations = self.backward if backward else self.forward
        return 1e3 * max(moved / COPIED, operations / PRODUCTS)


def norm(rows: int, c: int) -> Piece:
    """Reads float32, writes bfloat16. The backward normalises again, reads a gradient and x, writes a float32 gradient."""
    return Piece("norm", (6 * rows * c, 0), ((6 + 2 + 4 + 4) * rows * c, 0))


def project(rows: int, c: int, out: int) -> Piece:
    """One product; its backward is two, and reads the gradient of the result for each."""
    moved, operations = 2 * rows * (c + out), 2 * rows * c * out
    return Piece("projections", (moved, operations), (2 * moved, 2 * operations))


def output(rows: int, width: int, c: int, *, gated: bool = True) -> Piece:
    """The output product: reads the attention's output, writes y. The backward is two products, and reads dy for each.

    gated: whether the attention applies the gate. A layer that turns its output around before the product gates it here: it
        reads the gate and writes the product's input, and the backward has a pass over five such tensors.
    """
    of_gate = (0, 0) if gated else (2 * rows * 2 * width, 2 * rows * 5 * width)
    moved, operations = 2 * rows * (width + c), 2 * rows * width * c
    return Piece("gate and output", (moved + of_gate[0], operations), (2 * moved + of_gate[1], 2 * operations))


def gate(rows: int, width: int) -> Piece:
    """The attention's own gate: it reads g; the backward reads g and o, and writes the gradient of g."""
    return Piece("attention", (2 * rows * width, 0), (3 * 2 * rows * width, 0))


def pointwise(rows: int, c: int, tensors: int) -> Piece:
    """One pass over so many tensors; the backward reads them and a gradient, and writes as many gradients."""
    return Piece("norm", (2 * rows * c * tensors, 0), (4 * rows * c * tensors, 0))


def pieces(w: Workload) -> list[Piece]:
    """All but the attention."""
    rows, pairs, width = w.b * w.n * w.lq, w.b * w.lq * w.lk, w.h * w.d
    if w.layer == "triangle":
        return [norm(rows, 128), project(rows, 128, 4 * width + 8), gate(rows, width), output(rows, width, 128)]
    if w.layer == "msa_row":
        own = [norm(rows, 256), project(rows, 256, 4 * width), gate(rows, width), output(rows, width, 256)]
        return [*own, norm(pairs, 128), project(pairs, 128, 8)]
    if w.layer == "msa_column":
        return [norm(rows, 256), project(rows, 256, 4 * width), output(rows, width, 256, gated=False)]
    if w.layer == "single":
        own = [norm(rows, 384), project(rows, 384, 4 * width), gate(rows, width), output(rows, width, 384)]
        return [*own, norm(pairs, 128), project(pairs, 128, 16)]
    return [
        *(norm(rows, 384), project(rows, 384, 2 * 768), norm(rows, 768), pointwise(rows, 768, 4)),
        *(project(rows, 768, 4 * width), norm(pairs, 128), project(pairs, 128, 16), gate(rows, width)),
        *(output(rows, width, 768), project(rows, 384, 768), pointwise(rows, 768, 3)),
    ]


def attention_ms(w: Workload, record: Record) -> tuple[float, float]:
    """Forward and backward at the rate of the record's closest problem."""
    named = {"msa_row": "msa_row", "msa_column": "msa_column", "pair_bias": "diffusion768", "single": "single768"}
    name = ATTENTION[w.name] if w.layer == "triangle" else named[w.layer]
    problem = next(problem for problem in record.problems if problem.workload.name == name)
    rates = [table.rate(problem, problem.result("evoattn"), which) for which in ("forward", "backward")]
    if None in rates:
        raise RuntimeError(f"the record has no times of {name}")
    forward, backward = (w.scores / rate / 1e6 for rate in rates if rate)
    return forward, backward


def floor(w: Workload, record: Record) -> dict[str, tuple[float, float]]:
    """The least time of each part, forward and backward, in ms."""
    times: dict[str, tuple[float, float]] = {"norm": (0, 0), "projections": (0, 0), "attention": attention_ms(w, record)}
    for piece in pieces(w):
        before = times.get(piece.part, (0.0, 0.0))
        times[piece.part] = (before[0] + piece.ms(backward=False), before[1] + piece.ms(backward=True))
    return times


def tables(record: Record) -> str:
    """Floors by part, and the goals that follow: forward / backward of the parts, then forward / forward + backward."""
    parts = ("norm", "projections", "attention", "gate and output")
    rows = [["layer", *parts, "floor", "goal, in a graph", "goal, eager"]]
    for w in sorted(LAYERS, key=lambda w: (w.layer, w.scores)):
        times = floor(w, record)
        sums = [sum(times[part][i] for part in parts) for i in (0, 1)]
        both = (sums[0], sums[0] + sums[1])
        eager = " / ".join(f"{goal:.2f}" for goal in EAGER_GOALS[w.name]) if w.name in EAGER_GOALS else "the same"
        goal = " / ".join(f"{ms / REACHED:.2f}" for ms in both)
        cells = (" / ".join(f"{ms:.2f}" for ms in times[part]) for part in parts)
        rows.append([f"`{w.name}`", *cells, " / ".join(f"{ms:.2f}" for ms in both), goal, eager])
    return markdown(rows)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print(tables(read(RECORD)))


if __name__ == "__main__":
    main()
