"""`python -m tests.fuzz`: random problems on every backend, judged by the float64 oracle; failures are shrunk."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import evoattn
from evoattn.backends import BACKENDS
from evoattn.core.devices import installed_version
from evoattn.core.problem import dtype_name
from evoattn.testing import Outcome
from tests.fuzz.layer_kinds import OPERATORS
from tests.fuzz.random_layers import random_layer
from tests.fuzz.random_problems import DTYPES, random_problem
from tests.fuzz.shrinking import shrunk
from tests.fuzz.trials import JUDGE, LAYERS, Findings, Problem, Trial, Workers

_DTYPES = {dtype_name(dtype): dtype for dtype in DTYPES}
_LARGEST = {JUDGE: {"cpu": 1 << 20, "cuda": 1 << 22}, LAYERS: {"cpu": 1 << 15, "cuda": 1 << 21}}
"""Scores of a problem, by judge. A layer is computed by dense torch twice, forward and backward."""

_SHRUNK = 10
"""Failures that are shrunk. The others are shown as they were drawn."""

EVERY_S = 5.0
"""Seconds between two lines that tell how far a run is."""

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
  python3 dev.py fuzz                                       200 problems on every backend of this machine
  python3 dev.py fuzz --cases 1000 --seed 5000              problems 5000 to 5999, the same ones everywhere
  python3 dev.py fuzz --minutes 60 --jobs 8 --json found.json
  python3 dev.py fuzz --backends triton --dtypes bfloat16 float16
  python3 dev.py fuzz --layers --minutes 5                  whole layers
  python3 dev.py fuzz --operators --cases 2000              triangle multiplications and transitions

Where torch is installed already, `PYTHONPATH=src python -m tests.fuzz` does the same without an environment of its own.

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


def settings_of(arguments: list[str] | None) -> tuple[Settings, Path | None]:
    """The settings that a command line asks for, and the file for what is found."""
    parser = argparse.ArgumentParser(
        "dev.py fuzz", description=_ABOUT, epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    how_long = parser.add_mutually_exclusive_group()
    how_long.add_argument("--cases", type=int, metavar="N", help="problems (default: 200)")
    how_long.add_argument("--minutes", type=float, metavar="M", help="begin problems for this long")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the first problem (default: 0)")
    parser.add_argument("--jobs", type=int, metavar="J", help="worker processes (default: half of the cores, up to 4)")
    parser.add_argument("--backends", nargs="+", choices=("auto", *BACKENDS), help="default: those of the device")
    parser.add_argument("--dtypes", nargs="+", choices=tuple(_DTYPES), default=tuple(_DTYPES), help="default: all")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: the GPU if there is one")
    parser.add_argument(
        "--largest",
        type=int,
        metavar="SCORES",
        help="the most scores of a problem (default: 2^20, on a GPU 2^22; layers 2^15 and 2^21)",
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--layers", action="store_true", help="random layers of evoattn.nn in the place of random attentions")
    what.add_argument("--operators", action="store_true", help="random calls of the operators of evoattn.pair")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found")
    given = parser.parse_args(arguments)
    device = given.device or ("cuda" if torch.cuda.is_available() else "cpu")
    judge = LAYERS if given.layers or given.operators else JUDGE
    available = (status.name for status in evoattn.backends() if status.available and status.name != "reference")
    backends = ("tiled", "reference") if device == "cpu" else ("auto", *available)
    settings = Settings(
        cases=200 if given.cases is None and given.minutes is None else given.cases,
        minutes=given.minutes,
        seed=given.seed,
        jobs=given.jobs or max(1, min(4, (os.cpu_count() or 2) // 2)),
        backends=tuple(given.backends or (("auto",) if given.operators else backends)),  # operators have no other
        dtypes=tuple(given.dtypes),
        device=device,
        largest=given.largest or _LARGEST[judge][device],
        judge=judge,
        operators=given.operators,
    )
    return settings, given.json


def fuzz(settings: Settings, output: Path | None = None) -> int:
    """Run these settings, print the findings, write them to a file, and return the exit status."""
    findings = Findings()
    begun = time.monotonic()
    interrupted = False
    with Workers(settings.jobs, settings.judge, settings.limit_s) as workers:
        try:
            _judge_all(settings, workers, findings)
            for place, failure in enumerate(findings.failures[:_SHRUNK]):
                findings.failures[place] = shrunk(failure, workers)
        except KeyboardInterrupt:
            interrupted = True
    on_gpu = settings.device == "cuda"
    record = {
        "schema": 1,
        "finished": "interrupted" if interrupted else "complete",
        "versions": {
            "evoattn": evoattn.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": installed_version("triton"),
        },
        "device": torch.cuda.get_device_name() if on_gpu else platform.processor() or platform.machine(),
        "settings": dataclasses.asdict(settings),
        "seconds": round(time.monotonic() - begun, 1),
        "counts": [{"backend": b, "dtype": dtype, **counts} for (b, dtype), counts in sorted(findings.counts.items())],
        "failures": [failure.as_json() for failure in findings.failures],
    }
    _print(record, findings)
    if output is not None:
        output.write_text(json.dumps(record, indent=2) + "\n")
    if interrupted:
        print("dev.py fuzz: interrupted: the results so far are above", file=sys.stderr)
        return 130
    return 1 if findings.failures else 0


def _seeds(settings: Settings) -> Iterator[int]:
    end = None if settings.minutes is None else time.monotonic() + 60 * settings.minutes
    for index in itertools.count():
        if (settings.cases is not None and index >= settings.cases) or (end is not None and time.monotonic() > end):
            return
        yield settings.seed + index


def _judge_all(settings: Settings, workers: Workers, findings: Findings) -> None:
    draw: Callable[..., Problem] = random_layer if settings.judge == LAYERS else random_problem
    draw = functools.partial(draw, kinds=tuple(OPERATORS)) if settings.operators else draw
    draw = functools.partial(draw, dtypes=[_DTYPES[name] for name in settings.dtypes], largest=settings.largest)
    trials = (Trial(problem, name, settings.device) for problem in map(draw, _seeds(settings)) for name in settings.backends)
    shown = time.monotonic()
    for trial, outcome in workers.run(trials):
        findings.add(trial, outcome)
        if outcome.status == "failed":  # at once, so that it is seen if the run is killed
            print(_title(trial, outcome), file=sys.stderr, flush=True)
        if time.monotonic() - shown >= EVERY_S:
            shown = time.monotonic()
            print(f"{findings}; seed {trial.problem.seed}", file=sys.stderr, flush=True)


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


if __name__ == "__main__":
    sys.exit(fuzz(*settings_of(None)))
