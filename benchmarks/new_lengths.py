#!/usr/bin/env python3
"""Seconds of first predictions of many lengths in one process, and for how many of them something is compiled.

    PYTHONPATH=src python benchmarks/new_lengths.py --inputs 40 --json new-lengths.json

Inputs of Boltz-2 are crops of a committed feature file with random alignments. Each length is predicted once, in an order
that is always the same, under `evoattn.patch("boltz")`, which waits for no compiler. "compiling" counts the calls that the
client computed because a kernel was not there yet. Set TRITON_CACHE_DIR and EVOATTN_CACHE_DIR to empty folders to begin
without any.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator

import torch
from directories import spread
from prediction_features import moved, unpacked
from prediction_ways import WAYS, Case, begun, keep, options
from predictions import Run
from training_programs import TRAINED

import evoattn
from evoattn.clients.site import COMPILING

TRAINS, SOURCE = TRAINED["boltz2"], 2500
PROGRAM = TRAINS.program


def problems(count: int, shortest: int, longest: int, rows: int) -> list[tuple[int, int]]:
    """Lengths at equal distances with sizes of alignments from 1 to `rows`, in an order that is always the same."""
    drawn = random.Random(0)
    return [(length, round(rows ** drawn.random())) for length in spread(count, shortest, longest, drawn)]


def show(case: Case) -> str:
    """A line for the terminal."""
    return f"{case['tokens']:5} tokens {case['rows']:5} rows {case['s']:7.2f} s {case['compiling']:5} calls while compiling"


def main() -> int:
    parser = options(__doc__, ["evoattn run"])
    parser.add_argument("--inputs", type=int, default=40, metavar="N", help="lengths (default: 40)")
    parser.add_argument("--lengths", nargs=2, type=int, default=[100, 1000], metavar=("MIN", "MAX"))
    parser.add_argument("--rows", type=int, default=1024, help="of the largest alignment (default: 1024)")
    parser.add_argument("--steps", type=int, default=8, help="of the denoiser (default: 8)")
    chosen = parser.parse_args()
    try:
        record = begun(chosen.json, chosen.device, chosen.commit)
        features = unpacked("boltz2", SOURCE, torch.device("cpu"))
    except (OSError, ValueError) as error:
        parser.error(str(error))
    run = Run(PROGRAM, PROGRAM.build(chosen.device), chosen.device, chosen.steps)
    if PROGRAM.kernels is not None:
        PROGRAM.kernels(run.model, False)

    def cases() -> Iterator[Case]:
        with evoattn.patch(PROGRAM.client, **(WAYS["evoattn run"].patch or {})) as patched:
            for tokens, rows in problems(chosen.inputs, chosen.lengths[0], chosen.lengths[1], chosen.rows):
                inputs = moved(TRAINS.draw(TRAINS.crop(features, tokens), rows), chosen.device)
                before, start = patched.passed_on.get(COMPILING, 0), time.perf_counter()
                run.predict(inputs, chosen.steps)
                seconds = round(time.perf_counter() - start, 2)
                compiling = patched.passed_on.get(COMPILING, 0) - before
                yield {"tokens": tokens, "rows": rows, "steps": chosen.steps, "s": seconds, "compiling": compiling}

    return 1 if keep(cases(), record, ("tokens", "rows", "steps"), chosen.json, show) else 0


if __name__ == "__main__":
    sys.exit(main())
