"""`evoattn fuzz`: random problems on every backend, judged by the float64 oracle; failures are shrunk."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import evoattn
from evoattn.backends import BACKENDS
from evoattn.bench import machine
from evoattn.bench.record import write_text
from evoattn.cli.terminal import (
    Count,
    add_command,
    among,
    check_output,
    count_progress,
    number,
    pick,
    try_to_write,
    whole_number,
)
from evoattn.core.problem import dtype_name
from evoattn.testing.fuzz import JUDGE, LAYERS, Findings, Problem, Trial, Workers, shrunk
from evoattn.testing.judging import Outcome
from evoattn.testing.layer_kinds import OPERATORS
from evoattn.testing.random_layers import random_layer
from evoattn.testing.random_problems import DTYPES, random_problem

_DTYPES = {dtype_name(dtype): dtype for dtype in DTYPES}
_CASES = 200
_LARGEST = {JUDGE: {"cpu": 1 << 20, "cuda": 1 << 22}, LAYERS: {"cpu": 1 << 15, "cuda": 1 << 21}}
"""Scores of a problem, by judge. A layer is computed by dense torch twice, forward and backward."""

_SHRUNK = 10
"""Failures that are shrunk. The others are shown as they were drawn."""

_ABOUT = """\
Draws random problems (sizes at the edges of tiles, dtypes, layouts, strides, masks, biases, scales, gradients) and runs
each on every backend, forward and backward, in worker processes. Each result is judged by the dense float64 oracle. A
backend that refuses a problem with its reasons is counted, and is no failure. A worker that dies is a failure of the problem
that it ran. Failures are shrunk to the smallest sizes that still fail.

With --layers it draws layers of evoattn.nn instead: options, dtypes, autocast, frozen parameters, masks, adapters and hooks on
sub-modules, checkpoints, the output changed in place, modes of torch, functions put in the place of torch's, DTensors,
torch.compile. With --operators it draws calls of evoattn.pair in the same way.
"""

_EPILOG = """\
examples:
  evoattn fuzz                                       200 problems on every backend of this machine
  evoattn fuzz --cases 1000 --seed 5000              problems 5000 to 5999, the same ones everywhere
  evoattn fuzz --minutes 60 --jobs 8 --json found.json
  evoattn fuzz --backends triton --dtypes bfloat16 float16
  evoattn fuzz --layers --minutes 5                  whole layers
  evoattn fuzz --operators --cases 2000              triangle multiplications and transitions

exit status: 0 nothing failed; 1 a problem failed; 2 bad options; 130 interrupted: the results so far are
shown and written
"""


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of a run.

    Args:
        cases: how many problems, or None if time decides.
        minutes: after which no problem is begun, or None.
        seed: of the first problem; the others have the seeds that follow.
        jobs: worker processes.
        backends, dtypes: by name.
        device: "cpu" or "cuda".
        largest: the most scores of a problem.
        limit_s: seconds that a problem may take.
        judge: the function that judges a problem, see `Workers`.
        operators: whether operators of `evoattn.pair` are drawn in the place of layers.
    """

    cases: int | None
    minutes: float | None
    seed: int
    jobs: int
    backends: tuple[str, ...]
    dtypes: tuple[str, ...]
    device: str
    largest: int
    limit_s: float = 120.0
    judge: str = JUDGE
    operators: bool = False


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `fuzz` to the command line."""
    parser = add_command(commands, "fuzz", run, "random problems on every backend, against float64", _ABOUT, _EPILOG)
    how_long = parser.add_mutually_exclusive_group()
    how_long.add_argument("--cases", type=whole_number(1), metavar="N", help=f"problems (default: {_CASES})")
    how_long.add_argument(
        "--minutes",
        type=number(float, lambda minutes: 0 < minutes < 1e6, "minutes above 0"),
        metavar="M",
        help="begin problems for this long",
    )
    parser.add_argument("--seed", type=whole_number(0), default=0, metavar="S", help="of the first problem (default: 0)")
    parser.add_argument(
        "--jobs", type=whole_number(1), metavar="J", help="worker processes (default: half of the cores, up to 4)"
    )
    parser.add_argument(
        "--backends", nargs="+", metavar="NAME", help="auto and any of `evoattn doctor` (default: those of the device)"
    )
    parser.add_argument("--dtypes", nargs="+", metavar="DTYPE", help=f"of {', '.join(_DTYPES)} (default: all)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto is the GPU where there is one")
    parser.add_argument(
        "--largest",
        type=whole_number(1),
        metavar="SCORES",
        help="the most scores of a problem (default: 2^20, on a GPU 2^22; layers 2^15 and 2^21)",
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--layers", action="store_true", help="random layers of evoattn.nn in the place of random attentions")
    what.add_argument("--operators", action="store_true", help="random calls of the operators of evoattn.pair")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found")


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    device = pick(arguments.device).type
    judge = LAYERS if arguments.layers or arguments.operators else JUDGE
    cases = _CASES if arguments.cases is None and arguments.minutes is None else arguments.cases
    available = (status.name for status in evoattn.backends() if status.available and status.name != "reference")
    default = ("tiled", "reference") if device == "cpu" else ("auto", *available)
    default = ("auto",) if arguments.operators else default  # they have no other
    settings = Settings(
        cases=cases,
        minutes=arguments.minutes,
        seed=arguments.seed,
        jobs=arguments.jobs or max(1, min(4, (os.cpu_count() or 2) // 2)),
        backends=among("--backends", arguments.backends, ("auto", *BACKENDS), default),
        dtypes=among("--dtypes", arguments.dtypes, tuple(_DTYPES), tuple(_DTYPES)),
        device=device,
        largest=arguments.largest or _LARGEST[judge][device],
        judge=judge,
        operators=arguments.operators,
    )
    return fuzz(settings, None if arguments.json is None else check_output(arguments.json, "--json", ".json"))


def fuzz(settings: Settings, output: Path | None = None) -> int:
    """Run these settings, print the findings, write them to a file, and return the exit status."""
    findings = Findings()
    begun = time.monotonic()
    interrupted = False
    with Workers(settings.jobs, settings.judge, settings.limit_s) as workers:
        try:
            with count_progress(None if settings.cases is None else settings.cases * len(settings.backends)) as count:
                _judge_all(settings, workers, findings, count)
                for place, failure in enumerate(findings.failures[:_SHRUNK]):
                    count(findings.total(), f"{findings}; shrinking seed {failure.trial.problem.seed}")
                    findings.failures[place] = shrunk(failure, workers)
        except KeyboardInterrupt:
            interrupted = True
    record = {
        "schema": 1,
        "finished": "interrupted" if interrupted else "complete",
        "versions": {name: machine.versions()[name] for name in ("evoattn", "python", "torch", "triton")},
        "device": machine.name(torch.device(settings.device)),
        "settings": dataclasses.asdict(settings),
        "seconds": round(time.monotonic() - begun, 1),
        "counts": [{"backend": b, "dtype": dtype, **counts} for (b, dtype), counts in sorted(findings.counts.items())],
        "failures": [failure.as_json() for failure in findings.failures],
    }
    unwritten = None
    if output is not None:  # before the table: whoever reads that may stop early
        unwritten = try_to_write("--json", output, lambda: write_text(json.dumps(record, indent=2) + "\n", output))
    _print(record, findings)
    if unwritten is not None:
        raise unwritten
    if interrupted:
        print("evoattn fuzz: interrupted: the results so far are above", file=sys.stderr)
        return 130
    return 1 if findings.failures else 0


def _seeds(settings: Settings) -> Iterator[int]:
    end = None if settings.minutes is None else time.monotonic() + 60 * settings.minutes
    for index in itertools.count():
        if (settings.cases is not None and index >= settings.cases) or (end is not None and time.monotonic() > end):
            return
        yield settings.seed + index


def _judge_all(settings: Settings, workers: Workers, findings: Findings, count: Count) -> None:
    draw: Callable[..., Problem] = random_layer if settings.judge == LAYERS else random_problem
    draw = functools.partial(draw, kinds=tuple(OPERATORS)) if settings.operators else draw
    draw = functools.partial(
        draw,
        dtypes=[_DTYPES[name] for name in settings.dtypes],
        largest=settings.largest,
    )
    trials = (Trial(problem, name, settings.device) for problem in map(draw, _seeds(settings)) for name in settings.backends)
    for done, (trial, outcome) in enumerate(workers.run(trials), 1):
        findings.add(trial, outcome)
        if outcome.status == "failed":  # at once, so that it is seen if the run is killed
            print(_title(trial, outcome), file=sys.stderr, flush=True)
        count(done, f"{findings}; seed {trial.problem.seed}")


def _print(record: dict[str, Any], findings: Findings) -> None:
    for failure in findings.failures:
        smallest = "smallest" if failure.shrunk else "problem "
        print(f"{_title(failure.trial, failure.outcome)}\n  {smallest}  {failure.smallest!r}\n  again     {failure.line}\n")
    print(f"{'backend':<10} {'dtype':<9} {'ran':>6} {'refused':>8} {'failed':>7}")
    for x in record["counts"]:
        print(f"{x['backend']:<10} {x['dtype']:<9} {x['held'] + x['failed']:>6} {x['refused']:>8} {x['failed']:>7}")
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items() if version is not None)
    print(f"{record['device']}; {versions}")
    seed, cases = record["settings"]["seed"], record["settings"]["cases"]
    last = "" if cases is None else f" to {seed + cases - 1}"
    print(f"seeds from {seed}{last}, {findings}, in {record['seconds']:.1f} s")


def _title(trial: Trial, outcome: Outcome) -> str:
    return f"FAILED  seed {trial.problem.seed}, {trial.backend} on {trial.device}: {outcome.what}"
