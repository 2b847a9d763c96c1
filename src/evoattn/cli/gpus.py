"""`evoattn bench --gpus N`: a pair block over several GPUs, beside the same block on one."""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from evoattn.bench import sharded, sharded_table
from evoattn.bench.record import Problem, Record, write
from evoattn.bench.sharded import Plan
from evoattn.bench.sharded_table import VERIFIED
from evoattn.cli.terminal import RefusedError, check_output, progress, try_to_write

_LENGTHS = {"cuda": (512, 1024, 2048, 3072), "cpu": (32, 64)}
_QUICK = {"cuda": (512, 1024), "cpu": (16,)}


def _plan(arguments: argparse.Namespace, lengths: list[int] | None) -> Plan:
    """The plan that the options ask for. Raise RefusedError if this machine or this torch cannot run it."""
    device = "cpu" if arguments.device == "cpu" else "cuda"
    asked = f"--gpus {arguments.gpus}"
    if device == "cuda":
        there = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if there < arguments.gpus:
            gpus = "no GPU" if there == 0 else f"{there} GPU{'s' if there > 1 else ''}"
            raise RefusedError(f"{asked}: torch finds {gpus} here; expected {arguments.gpus} or more, or --device cpu")
    backend = "nccl" if device == "cuda" else "gloo"
    if not dist.is_backend_available(backend):
        raise RefusedError(f"{asked}: this torch was built without {backend}; expected one with it")
    measured = tuple(lengths or (_QUICK if arguments.quick else _LENGTHS)[device])
    return Plan(arguments.gpus, device, measured, arguments.rounds or (3 if arguments.quick else 5), arguments.parts)


def run_command(arguments: argparse.Namespace, lengths: list[int] | None) -> int:
    """Measure, print the table, and say how it ended."""
    plan = _plan(arguments, lengths)
    path = None if arguments.json is None else check_output(arguments.json, "--json", ".json")
    settings = {name: getattr(plan, name) for name in ("processes", "lengths", "rounds", "parts")}
    record = Record({"kind": "gpu" if plan.device == "cuda" else "cpu"}, {**settings, "note": arguments.note})
    record.finished = "interrupted"  # until it is not
    problem = _measure(plan, arguments.commit, record, path)
    status = {"complete": 0, "interrupted": 130}.get(record.finished, 1)
    unwritten = None if path is None else _write(record, path)
    print(sharded_table.as_text(record))
    for line in filter(None, (problem, unwritten and f"error: {unwritten}")):
        print(f"evoattn bench: {line}", file=sys.stderr)
    return 2 if unwritten else status


def _measure(plan: Plan, commit: str | None, record: Record, path: Path | None) -> str | None:
    """Fill the record, and write it after each measurement. Return the problem in words, if there was one."""
    steps = iter([f"{job.length} residues, {', '.join(filter(None, (job.layer, job.way)))}" for job in plan.jobs])
    try:
        with progress(1 + len(plan.jobs)) as step, contextlib.closing(sharded.run(plan, commit)) as parts:
            step(f"starts {plan.processes} processes, then compares with float64")
            for part in parts:
                if not isinstance(part, Problem):
                    record.machine = part
                    continue
                known = next((problem for problem in record.problems if problem.workload == part.workload), None)
                if known is None:
                    record.problems.append(part)
                else:  # one problem has the results of all ways
                    known.results += part.results
                if path is not None:
                    _write(record, path)  # what cannot be written now is tried again at the end
                verified = part.result(VERIFIED)
                if verified and not verified.errors["largest ratio"] <= sharded.ALLOWED:
                    record.finished = "wrong"
                    return "WRONG: the processes together are less exact than one of them, so nothing was timed"
                if what := next(steps, None):
                    step(what)
    except sharded.ProcessDiedError as died:
        record.finished = "a process died"
        return f"error: {died}; the results so far are above"
    except KeyboardInterrupt:
        return "interrupted: the results so far are above"
    record.finished = "complete"
    return None


def _write(record: Record, path: Path) -> RefusedError | None:
    return try_to_write("--json", path, lambda: write(record, path))
