#!/usr/bin/env python3
"""Time and peak memory of the clients' blocks before and after `evoattn.patch`.

    PYTHONPATH=src:tools python benchmarks/client_blocks.py --json benchmarks/results/clients/NAME.json

The clients have to be installed beside evoattn, with what tools/clients/NAME.txt names. Each client's blocks, of real width and
with random weights, are compared with a float64 run of the original first. Each group of a client's ways runs in a process of
its own. If that dies, another goes on behind the way that killed it. A record of the same machine and commit is added to, so
that a run can be made in parts. It is written after each process.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import case_records
import torch
from client_cases import CLIENTS, GROUPS, Client

from evoattn.bench import machine
from evoattn.compile.cache import write
from evoattn.core.devices import installed_version

ROOT = Path(__file__).resolve().parents[1]
WORKER = Path(__file__).with_name("client_worker.py")
SCHEMA = 1
LENGTHS = (256, 384, 512, 768, 1024)
DTYPES = ("bfloat16", "float32")
_OUT_OF_TIME = "out of time"
"""The end of a process that the time of the run did not suffice for."""

CONDITIONS = {
    "blocks": {client.name: client.blocks for client in CLIENTS.values()},
    "bfloat16": {client.name: "autocast" if client.autocast else "all tensors" for client in CLIENTS.values()},
    "matmul": "float32 products in full precision",
    "notes": "dropout 0; nothing recomputed in training; Protenix with LAYERNORM_TYPE=torch; ESMFold's mask in whole numbers",
}


@dataclasses.dataclass(frozen=True)
class Job:
    """One process: a group of a client's ways at these lengths and in these dtypes."""

    client: str
    group: str


class Run:
    """The cases that are asked for, and their results so far.

    Args:
        options: of the command line.
        record: what there is already; cases are added to it.
    """

    def __init__(self, options: argparse.Namespace, record: dict[str, Any]) -> None:
        self.options = options
        self.record = record
        self._end: float = time.monotonic() + options.seconds
        self._folder = Path(tempfile.mkdtemp(prefix="evoattn-blocks-"))

    def jobs(self) -> Iterable[Job]:
        """All processes, a group after the other: what comes last is what a lack of time loses."""
        for group in GROUPS:
            if group in self.options.groups:
                for name in self.options.clients:
                    if any(way.group == group for way in CLIENTS[name].ways):
                        yield Job(name, group)

    def warm(self) -> None:
        """Run everything once in many processes at a time, and forget it: kernels are compiled and kept on disk."""
        print(f"compiling, {self.options.warm} processes", file=sys.stderr, flush=True)
        parts = [(job, dtype) for job in self.jobs() if job.group == "base" for dtype in self.options.dtypes]
        with concurrent.futures.ThreadPoolExecutor(self.options.warm) as pool:
            for number, (job, dtype) in enumerate(parts):
                pool.submit(self._process, job, self._folder / f"warm{number}", set(), [dtype], True)

    def measure(self, job: Job) -> None:
        """Run one job to its end, in several processes if one dies."""
        lines = self._folder / f"{job.client}-{job.group}"
        skip: set[tuple[Any, ...]] = set()
        self.record["ended"] = [x for x in self.record["ended"] if not x.startswith(f"{job.client}, {job.group}:")]
        while self._left() > 0:
            ended = self._process(job, lines, skip, self.options.dtypes, False)
            begun, cases = _read(lines)
            self._take(cases)
            if ended in ("", _OUT_OF_TIME):
                self.record["ended"] += [f"{job.client}, {job.group}: {ended}"] if ended else []
                return
            if begun is None or begun in skip:  # it died before or between its ways: another try would not help
                print(f"{job.client}, {job.group}: {ended}", file=sys.stderr, flush=True)
                self.record["ended"].append(f"{job.client}, {job.group}: {ended}")
                return
            skip = {_key(case) for case in cases} | {begun}
            residues, dtype, switch, patched = begun
            for name in ("inference", "training"):
                case = {"client": job.client, "residues": residues, "dtype": dtype, "pass": name, "switch": switch}
                case |= {"patched": patched, "status": "failed", "reason": ended}
                if not any(_same(case, other) for other in cases):
                    self._take([case])

    def write(self) -> None:
        """The record, whole or not at all."""
        if self.options.json:
            write(self.options.json, f"{json.dumps(self.record, indent=1, allow_nan=False)}\n".encode())

    def _left(self) -> float:
        return self._end - time.monotonic()

    def _take(self, cases: list[dict[str, Any]]) -> None:
        for case in cases:
            self.record["cases"] = [x for x in self.record["cases"] if not _same(x, case)] + [case]

    def _process(self, job: Job, lines: Path, skip: set[tuple[Any, ...]], dtypes: list[str], warm: bool) -> str:
        """Run the worker; return how it ended, empty if well."""
        client: Client = CLIENTS[job.client]
        spec = {"client": client.name, "group": job.group, "device": self.options.device, "lines": str(lines), "warm": warm}
        spec |= {"lengths": self.options.lengths, "dtypes": dtypes, "skip": sorted(skip, key=str)}
        paths = [ROOT / "src", ROOT / "tools", *([self.options.cuequivariance] if job.group == "cuequivariance" else [])]
        old = os.environ.get("PYTHONPATH")
        path = os.pathsep.join([*map(str, paths), *([old] if old else [])])
        command = [sys.executable, str(WORKER), json.dumps(spec)]
        with lines.with_suffix(".log").open("a+b") as log:
            try:
                done = subprocess.run(
                    command, env={**os.environ, "PYTHONPATH": path}, stdout=log, stderr=log, timeout=max(1, self._left())
                )
            except subprocess.TimeoutExpired:
                return _OUT_OF_TIME
            if done.returncode:
                log.seek(0)
                said = log.read().decode(errors="replace").strip().splitlines()
                return f"status {done.returncode}: {(said or [''])[-1][:300]}"
        return ""


def _key(case: dict[str, Any]) -> tuple[Any, ...]:
    """The key of a problem and a way."""
    return case["residues"], case["dtype"], case["switch"], case["patched"]


def _same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return _key(a) == _key(b) and (a["client"], a["pass"]) == (b["client"], b["pass"])


def _read(lines: Path) -> tuple[tuple[Any, ...] | None, list[dict[str, Any]]]:
    """The way that has begun last, and the cases."""
    begun, cases = None, []
    for line in lines.read_text(encoding="utf-8").splitlines() if lines.exists() else ():
        found = json.loads(line)
        if "begins" in found:
            begun = tuple(found["begins"])
        else:
            cases.append(found["case"])
    return begun, cases


def fresh(device: torch.device, commit: str | None) -> dict[str, Any]:
    """A record without cases."""
    facts = {key: value for key, value in machine.facts(device, commit).items() if value is not None}
    versions = {client: found for client, of in _DISTRIBUTIONS.items() if (found := installed_version(of))}
    return {"schema": SCHEMA, "machine": facts, "clients": versions, "settings": CONDITIONS, "ended": [], "cases": []}


_DISTRIBUTIONS = {name: "transformers" if name == "esmfold" else name for name in CLIENTS}


def show(case: dict[str, Any]) -> str:
    """A line for the terminal."""
    words = [f"{case['client']:10}{case['residues']:>5} {case['dtype']:9}{case['pass']:10}"]
    words.append(f"{case['switch'] + (' + evoattn' if case['patched'] else ''):30}")
    if "median_ms" in case:
        words.append(f"{case['median_ms']:10.2f} ms {case['peak_bytes'] / 2**20:10.0f} MiB")
    found = " ".join(f"{key} {x:.0e}" if isinstance(x, float) else f"{key} {x}" for key, x in case.get("errors", {}).items())
    return " ".join([*words, found, *case.get("backends", []), "" if case["status"] == "ok" else _why(case)]).rstrip()


def _why(case: dict[str, Any]) -> str:
    return f"{case['status']}: {case.get('reason', '')}"[:160]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    installed = [name for name, of in _DISTRIBUTIONS.items() if installed_version(of)]
    parser.add_argument("--clients", nargs="+", default=installed, choices=list(CLIENTS), help="default: those installed")
    parser.add_argument("--lengths", nargs="+", type=int, default=list(LENGTHS), metavar="N")
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--groups", nargs="+", default=["base", "own"], choices=("base", "own"))
    parser.add_argument("--cuequivariance", type=Path, metavar="FOLDER", help="measure cuEquivariance too, installed there")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=540.0, help="end after so long, with what there is")
    parser.add_argument("--warm", type=int, default=0, metavar="JOBS", help="compile first, in so many processes")
    parser.add_argument("--commit", help="what to record if git cannot tell")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the record, or add to it")
    options = parser.parse_args()
    if options.cuequivariance:
        options.groups = [*options.groups, "cuequivariance"]
    start = datetime.datetime.now()
    try:
        run = Run(options, case_records.begun(options.json, fresh(torch.device(options.device), options.commit)))
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if options.warm:
        run.warm()
    for job in run.jobs():
        print(f"{job.client}, {job.group}: {(datetime.datetime.now() - start).seconds} s", file=sys.stderr, flush=True)
        before = len(run.record["cases"])
        run.measure(job)
        run.write()
        print("\n".join(show(case) for case in run.record["cases"][before:]), flush=True)
    return 1 if any(case["status"] in ("wrong", "failed") for case in run.record["cases"]) else 0


if __name__ == "__main__":
    sys.exit(main())
