#!/usr/bin/env python3
"""The longest input of Boltz-2 that a card of so many GB predicts: torch may take no more of the GPU than such a card has.

    PYTHONPATH=src python benchmarks/prediction_memory.py --gib 24 40 80 --json memory.json

Inputs are crops of a committed feature file, without an MSA, so no longer than its 2,500 tokens. Steps and recycles need no
more memory, so a prediction here has few of them. One that runs out of memory is no failure: the search goes on below it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from prediction_features import cropped, unpacked
from prediction_programs import PROGRAMS
from prediction_ways import OUT_OF_MEMORY, WAYS, Case, Way, begun, each_way, failure, keep, line, options, used
from predictions import Run

from evoattn.bench.memory import release

PROGRAM, SOURCE = PROGRAMS["boltz2"], 2500
STEPS = 4
CONTEXT_GIB = 1.5
"""Taken from a card by CUDA and its libraries."""


def longest(lengths: Sequence[int], fits: Callable[[int], bool]) -> int:
    """The last of ascending lengths that fits, if those before it do; 0 if none does."""
    first, last = 0, len(lengths)
    while first < last:
        middle = (first + last) // 2
        if fits(lengths[middle]):
            first = middle + 1
        else:
            last = middle
    return lengths[first - 1] if first else 0


def measure(run: Run, features: Mapping[str, torch.Tensor], lengths: Sequence[int], gib: float, way: Way) -> tuple[Case, Any]:
    """The longest input that fits, and its peak."""
    found: dict[int, Case] = {}

    def fits(tokens: int) -> bool:
        inputs = {name: x.to(run.device) for name, x in cropped(features, tokens).items()}
        release(run.device)
        torch.cuda.reset_peak_memory_stats(run.device)
        try:
            run.predict(inputs, STEPS)
        except Exception as error:
            if failure(error) != OUT_OF_MEMORY:
                raise
            return False
        found[tokens] = {"peak_gib": round(torch.cuda.max_memory_allocated(run.device) / 2**30, 2)}
        return True

    card = torch.cuda.current_device() if run.device.index is None else run.device.index  # torch limits it by its number alone
    total = torch.cuda.get_device_properties(card).total_memory / 2**30
    with used(way, run.program, run.model):
        torch.cuda.set_per_process_memory_fraction((gib - CONTEXT_GIB) / total, card)
        try:
            tokens = longest(lengths, fits)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, card)
            release(run.device)
    return {"longest": tokens, "or_more": tokens == lengths[-1]} | found.get(tokens, {}), {}


def show(case: Case) -> str:
    """A line for the terminal."""
    end = " or more" if case.get("or_more") else ""
    return line(case, f"{case['gib']:3} GB", f"{case.get('longest', 0):5} tokens{end}")


def main() -> int:
    parser = options(__doc__, [name for name, way in WAYS.items() if not way.runtime])
    parser.set_defaults(ways=["as installed", "cuEquivariance", "evoattn run"])
    parser.add_argument("--gib", nargs="+", type=int, default=[24, 40, 80], metavar="N", help="cards (default: 24 40 80)")
    parser.add_argument("--lengths", nargs="+", type=int, default=[*range(400, SOURCE, 100), SOURCE], metavar="N")
    chosen = parser.parse_args()
    if chosen.device.type != "cuda":
        parser.error("the memory of a GPU is measured: --device must be one")
    card = torch.cuda.get_device_properties(chosen.device).total_memory / 2**30
    if any(not CONTEXT_GIB < gib <= card + CONTEXT_GIB for gib in chosen.gib):
        parser.error(f"--gib must be more than {CONTEXT_GIB}, and no more than this card has, {card:.0f}")
    try:
        record = begun(chosen.json, chosen.device, chosen.commit)
        run = Run(PROGRAM, PROGRAM.build(chosen.device), chosen.device, STEPS, recycles=0)
        features = unpacked("boltz2", SOURCE, torch.device("cpu"))
    except (OSError, ValueError) as error:
        parser.error(str(error))

    def cases() -> Iterator[Case]:
        for gib in chosen.gib:
            facts = {"program": PROGRAM.title, "gib": gib}
            measured = functools.partial(measure, run, features, sorted(chosen.lengths), gib)
            yield from each_way(PROGRAM, chosen.ways, facts, chosen.device, measured)

    return 1 if keep(cases(), record, ("program", "gib", "way"), chosen.json, show) else 0


if __name__ == "__main__":
    sys.exit(main())
