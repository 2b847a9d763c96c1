#!/usr/bin/env python3
"""Whole layers, from the norm to the output product, in several ways: `python3 dev.py bench layers --json layers.json`.

Output and gradients of each way are compared with float64 first: what is wrong gets no time. On a GPU each pass is also timed
as a CUDA graph, without the host's part.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from cuda_graphs import time_graphs
from layer_ways import WAYS, inputs_of, io_bytes, truth
from layer_workloads import LAYERS, workload

from evoattn.bench import machine, table
from evoattn.bench.clock import Clock, clock_for
from evoattn.bench.contender import Runner
from evoattn.bench.memory import release
from evoattn.bench.record import Problem, Record, Result, write
from evoattn.bench.run import time_in_turn, verify

PASSES = ("forward", "both")
ROUNDINGS = 2
"""A layer rounds to 16 bits before and after its attention: so many times an attention's error is still rounding."""


def measure(problem: Problem, device: torch.device, clock: Clock, rounds: int, say: Callable[[str], object]) -> None:
    """Verify and time every way on one layer.

    Raises:
        ValueError: the workload has no layer.
    """
    layer = inputs_of(problem.workload, getattr(torch, problem.dtype), device)
    problem.bytes = io_bytes(layer)
    torch._dynamo.reset()
    expected = truth(layer)
    runners: list[tuple[Result, Runner]] = []
    for way in WAYS:
        say(way.name)
        problem.results.append(Result(way.name))
        runner = verify(way, problem.results[-1], layer, expected, problem, PASSES, ROUNDINGS)
        if runner is not None:
            runners.append((problem.results[-1], runner))
        release(device)
    del expected
    time_in_turn(runners, PASSES, rounds, clock, say)
    for result, runner in runners if device.type == "cuda" else ():
        say(f"{result.name}, CUDA graphs")  # one after the other: all do not fit into memory together
        time_graphs(result, runner, PASSES, rounds, clock)
        release(device)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [layer.name for layer in LAYERS]
    parser.add_argument(
        "--workloads", nargs="+", default=names, metavar="NAME", help=f"of {', '.join(names)}, or at another length"
    )
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, metavar="FILE", help="the record, written after each layer")
    parser.add_argument("--commit", metavar="TEXT", help="what to record as the commit where git cannot tell")
    parser.add_argument("--note", metavar="TEXT", help="what whoever reads the record has to know of this run")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    settings = {name: getattr(options, name) for name in ("workloads", "dtype", "rounds", "note")}
    record = Record(machine.facts(device, options.commit), settings)
    for name in options.workloads:
        problem = Problem(workload(name), options.dtype, None)

        def say(what: str, name: str = name) -> None:
            print(f"{name}: {what}", file=sys.stderr, flush=True)

        measure(problem, device, clock_for(device), options.rounds, say)
        record.problems.append(problem)
        if options.json is not None:
            write(record, options.json)
    print(table.as_text(record))
    print("\n".join(wrong := table.wrong(record)), end="\n" if wrong else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
