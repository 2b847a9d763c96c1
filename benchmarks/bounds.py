#!/usr/bin/env python3
"""Kernels that solve an easier problem than attention with a mask and a pair bias, beside evoattn, which solves all of it.

    python3 dev.py bench bounds --workloads tri384 tri1024 --json bounds.json

`cudnn_unmasked` leaves out the mask, `flash_unbiased` the mask and the pair bias. No speed-up over them is claimed. Each is
compared with the float64 truth of its own problem.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from evoattn.bench import attentions, machine, table
from evoattn.bench.clock import Clock, clock_for
from evoattn.bench.contender import Contender, Prepared, Runner
from evoattn.bench.peers import Layout, refuse
from evoattn.bench.record import PASSES, Problem, Record, Result, write
from evoattn.bench.run import time_in_turn, verify
from evoattn.testing import CaseInputs
from evoattn.workloads import workload


def _rows_viewed(inputs: CaseInputs) -> tuple[Layout, Layout]:
    """`[b,n,l,h,d]` <-> `[b*n,h,l,d]`, both as views."""
    b, n = inputs.q.shape[:2]
    return lambda x: x.flatten(0, 1).transpose(1, 2), lambda x: x.transpose(1, 2).unflatten(0, (b, n))


def _flash(inputs: CaseInputs) -> Prepared:
    """torch's FlashAttention without any bias."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def attend(q: Tensor, k: Tensor, v: Tensor, pair_bias: Tensor | None) -> Any:
        k, v = (x.expand(-1, q.shape[1], -1, -1) for x in (k, v))
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    layouts = _rows_viewed(inputs)
    return Prepared(attend, (*map(layouts[0], (inputs.q, inputs.k, inputs.v)), None), *layouts)


def _cudnn(inputs: CaseInputs) -> Prepared:
    """cuDNN's graphs with a bias and its gradient: they have no mask of keys."""
    from cudnn_graphs import Graphs

    pair_bias = inputs.pair_bias
    reasons = [
        (inputs.q.device.type != "cuda", "takes tensors on a GPU alone"),
        (inputs.q.dtype not in (torch.float16, torch.bfloat16), "takes float16 and bfloat16 alone"),
        (pair_bias is None, "is measured for its bias gradient, and there is no pair bias"),
        (inputs.q.shape[0] != 1, "shares one pair bias among all rows, and here are several"),
    ]
    refuse(reasons)
    assert pair_bias is not None
    to_library, from_library = _rows_viewed(inputs)
    tensors = (*map(to_library, (inputs.q, inputs.k, inputs.v)), pair_bias[:, 0])
    return Prepared(Graphs(*tensors).attend, tensors, to_library, from_library)


class Bound(NamedTuple):
    """A contender that takes only a part of the problem.

    Args:
        contender: who computes it.
        pair_bias: whether it takes the pair bias; none takes the mask.
    """

    contender: Contender
    pair_bias: bool

    def part(self, inputs: CaseInputs) -> CaseInputs:
        """The easier problem."""
        return dataclasses.replace(inputs, mask=None, pair_bias=inputs.pair_bias if self.pair_bias else None)


BOUNDS = (
    Bound(Contender("cudnn_unmasked", "cuDNN, no mask", _cudnn), pair_bias=True),
    Bound(Contender("flash_unbiased", "torch flash kernel, no bias", _flash), pair_bias=False),
)


def measure(problem: Problem, device: torch.device, clock: Clock, rounds: int) -> None:
    """Verify and time evoattn on a problem, and the bounds on their parts of it, in turn."""
    inputs = attentions.inputs_of(problem.workload, getattr(torch, problem.dtype), device)
    problem.bytes = attentions.io_bytes(inputs)
    contenders = [(*pair, inputs) for pair in attentions.contenders(inputs, ("auto",), ())]
    contenders += [(bound.contender, Result(bound.contender.name), bound.part(inputs)) for bound in BOUNDS]
    runners: list[tuple[Result, Runner]] = []
    for contender, result, part in contenders:
        problem.results.append(result)
        runner = verify(contender, result, part, attentions.truth(part), problem, PASSES)
        if runner is not None:
            runners.append((result, runner))
    time_in_turn(runners, PASSES, rounds, clock, lambda what: None)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", default=["tri384"], metavar="NAME", help="default: tri384")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--commit", metavar="TEXT", help="what to record as the commit where git cannot tell")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    settings = {name: getattr(options, name) for name in ("workloads", "dtype", "rounds")}
    record = Record(machine.facts(device, options.commit), settings)
    for name in options.workloads:
        record.problems.append(Problem(workload(name), options.dtype, None))
        measure(record.problems[-1], device, clock_for(device), options.rounds)
        if options.json is not None:
            write(record, options.json)
    print(table.as_text(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
