#!/usr/bin/env python3
"""A pair block over several GPUs, beside the same block on one: `python3 dev.py bench sharded --gpus 2`.

It starts a process for each GPU of this machine, without torchrun. Status 1: the processes together are less exact than one,
or one of them died.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path

import sharded_block
import sharded_table
import torch
import torch.distributed as dist
from sharded_block import Plan
from sharded_table import VERIFIED

from evoattn.bench.record import Problem, Record, write

_LENGTHS = {"cuda": (512, 1024, 2048, 3072), "cpu": (32, 64)}


def _plan(options: argparse.Namespace) -> Plan:
    """The plan that the options ask for.

    Raises:
        ValueError: this machine or this torch cannot run it.
    """
    if options.gpus < 2 or min(options.lengths or (1,)) < 1:
        raise ValueError("expected --gpus from 2 up and --lengths from 1 up")
    if options.device == "cuda" and (there := torch.cuda.device_count()) < options.gpus:
        raise ValueError(f"--gpus {options.gpus}: torch finds {there} GPUs here; --device cpu is a trial without them")
    backend = "nccl" if options.device == "cuda" else "gloo"
    if not (dist.is_available() and dist.is_backend_available(backend)):
        raise ValueError(f"this torch was built without {backend}; expected one with it")
    return Plan(options.gpus, options.device, tuple(options.lengths or _LENGTHS[options.device]), options.rounds, options.parts)


def _measure(plan: Plan, commit: str | None, record: Record, path: Path | None) -> str | None:
    """Fill the record, and write it after each measurement. Return the problem in words, if there was one."""
    steps = iter([f"{job.length} residues, {', '.join(filter(None, (job.layer, job.way)))}" for job in plan.jobs])
    try:
        with contextlib.closing(sharded_block.run(plan, commit)) as parts:
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
                    write(record, path)
                verified = part.result(VERIFIED)
                if verified and not verified.errors["largest ratio"] <= sharded_block.ALLOWED:
                    record.finished = "wrong"
                    return "WRONG: the processes together are less exact than one of them, so nothing was timed"
                if what := next(steps, None):
                    print(what, file=sys.stderr, flush=True)
    except sharded_block.ProcessDiedError as died:
        record.finished = "a process died"
        return f"error: {died}; the results so far are above"
    except KeyboardInterrupt:
        return "interrupted: the results so far are above"
    record.finished = "complete"
    return None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=2, metavar="N", help="default: 2")
    parser.add_argument("--lengths", nargs="+", type=int, metavar="L", help="residues; default: 512, 1024, 2048, 3072")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--parts", action="store_true", help="each layer of the block alone too")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="cpu: processes and gloo, a trial")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the record, written after each measurement")
    parser.add_argument("--commit", metavar="TEXT", help="what to record as the commit where git cannot tell")
    parser.add_argument("--note", metavar="TEXT", help="what whoever reads the record has to know of this run")
    options = parser.parse_args(arguments)
    try:
        plan = _plan(options)
    except ValueError as error:
        parser.error(str(error))
    settings = {name: getattr(plan, name) for name in ("processes", "lengths", "rounds", "parts")}
    record = Record({"kind": "gpu" if plan.device == "cuda" else "cpu"}, {**settings, "note": options.note})
    record.finished = "interrupted"  # until it is not
    problem = _measure(plan, options.commit, record, options.json)
    if options.json is not None:
        write(record, options.json)
    print(sharded_table.as_text(record))
    if problem:
        print(f"sharded_times: {problem}", file=sys.stderr)
    return {"complete": 0, "interrupted": 130}.get(record.finished, 1)


if __name__ == "__main__":
    sys.exit(main())
