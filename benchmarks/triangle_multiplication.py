#!/usr/bin/env python3
"""Triangle multiplication, forward and forward + backward, beside plain torch, torch.compile and cuEquivariance.

    python benchmarks/triangle_multiplication.py --lengths 384 397 768 1001 1024 --json multiplication.json

z is float32 under autocast to bfloat16, with a mask, as models run it. On a GPU each way is also replayed as a CUDA graph, if
it can be captured. Outputs and gradients are compared with float64 first, at a length that fits: status 1 if one is far off.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import math
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cuda_graphs
import torch
from torch import Tensor

from evoattn import testing
from evoattn.bench import machine, memory
from evoattn.bench.clock import Clock, clock_for
from evoattn.compile.cache import write
from evoattn.pair import triangle_multiplication
from evoattn.pair.multiplication.call import reference
from evoattn.pair.values import MultiplicationOptions as Options
from evoattn.pair.values import MultiplicationWeights as Weights

CHANNELS = 128
VERIFIED = 200
"""Residues at which ways are compared with float64."""

WORST = 3e-2
"""An error past this is no rounding of bfloat16."""

Call = Callable[[Tensor, Tensor, Weights], Tensor]


def evoattn_update(z: Tensor, mask: Tensor, weights: Weights) -> Tensor:
    return triangle_multiplication(z, mask, **weights._asdict())


def plain(z: Tensor, mask: Tensor, weights: Weights) -> Tensor:
    dtype = torch.get_autocast_dtype(z.device.type)
    cast: Any = [x if x is None or x.ndim == 1 else x.to(dtype) for x in weights]
    return reference(z, mask, Weights(*cast), Options(True, 1e-5, residual=False))


def cuequivariance(z: Tensor, mask: Tensor, weights: Weights) -> Tensor:
    from cuequivariance_ops_torch import triangle_multiplicative_update

    made: Tensor = triangle_multiplicative_update(z, "outgoing", mask, **weights._asdict())
    return made


def ways(device: torch.device) -> dict[str, Call]:
    """The contenders: cuEquivariance only if it is installed, and on a GPU."""
    calls: dict[str, Call] = {"evoattn": evoattn_update, "plain torch": plain, "torch.compile": torch.compile(plain)}
    if device.type == "cuda" and importlib.util.find_spec("cuequivariance_ops_torch") is not None:
        calls["cuequivariance"] = cuequivariance
    return calls


@dataclasses.dataclass(frozen=True)
class Problem:
    """A triangle multiplication, and one way to compute it."""

    call: Call
    z: Tensor
    mask: Tensor
    do: Tensor
    weights: Weights

    def forward(self, number: int = 0) -> Tensor:
        with torch.no_grad():
            return self._run()

    def both(self, number: int = 0) -> tuple[Tensor, ...]:
        """The output and all gradients."""
        out = self._run()
        leaves = [self.z, *[x for x in self.weights if x is not None]]
        return out, *torch.autograd.grad(out, leaves, self.do.to(out.dtype))

    def _run(self) -> Tensor:
        with torch.autocast(self.z.device.type, torch.bfloat16, cache_enabled=False):
            out: Tensor = self.call(self.z, self.mask, self.weights)
        return out


def problem(call: Call, length: int, device: torch.device) -> Problem:
    """The same numbers for every way."""
    rng = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng, dtype=torch.float32).to(device)

    def product(*shape: int) -> Tensor:
        return (normal(*shape) / math.sqrt(shape[-1])).requires_grad_()

    def norm() -> tuple[Tensor, Tensor]:
        return (1 + 0.1 * normal(CHANNELS)).requires_grad_(), (0.1 * normal(CHANNELS)).requires_grad_()

    halves, square = (2 * CHANNELS, CHANNELS), (CHANNELS, CHANNELS)
    weights = Weights(
        *norm(), product(*halves), None, product(*halves), None, *norm(), product(*square), None, product(*square), None
    )
    z = normal(1, length, length, CHANNELS)
    mask = (torch.rand(z.shape[:-1], generator=rng, dtype=torch.float32) > 0.05).float().to(device)
    return Problem(call, z.requires_grad_(), mask, normal(*z.shape), weights)


def worst_error(call: Call, device: torch.device) -> float:
    """The largest error of output and gradients against float64."""
    one = problem(call, VERIFIED, device)
    cast: Any = [None if x is None else x.detach().double().requires_grad_() for x in one.weights]
    z = one.z.detach().double().requires_grad_()
    out = reference(z, one.mask.double(), Weights(*cast), Options(True, 1e-5, False))
    truth = (out, *torch.autograd.grad(out, [z, *[x for x in cast if x is not None]], one.do.double()))
    return max(testing.relative_error(x, y) for x, y in zip(one.both(), truth, strict=True))


def milliseconds(call: Callable[[int], object], clock: Clock, rounds: int) -> float:
    """The median of rounds."""
    return round(statistics.median(cuda_graphs.milliseconds(call, clock, rounds)), 5)


def measure(name: str, call: Call, length: int, device: torch.device, rounds: int) -> dict[str, Any]:
    """Times of a way in ms, eager and as a graph, and its peak memory."""
    one, clock = problem(call, length, device), clock_for(device)
    case: dict[str, Any] = {"way": name, "length": length}
    for kind, run in (("forward", one.forward), ("both", one.both)):
        case[kind] = milliseconds(run, clock, rounds)
        case[f"{kind}_gib"] = round(memory.peak_bytes(run, device) / 2**30, 3)
        if device.type == "cuda":
            with contextlib.suppress(RuntimeError):  # it cannot be captured
                replay, output = cuda_graphs.captured(run)
                case[f"{kind}_graph"] = milliseconds(replay, clock, rounds)
                del replay, output
    return case


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", nargs="+", type=int, default=[384, 397, 768, 1001, 1024], help="residues")
    parser.add_argument("--ways", nargs="+", help="of evoattn, 'plain torch', torch.compile, cuequivariance (default: all)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="where the record goes")
    parser.add_argument("--commit", help="what to record as the commit where git cannot tell")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    chosen = {name: call for name, call in ways(device).items() if options.ways is None or name in options.ways}
    record: dict[str, Any] = {"machine": machine.facts(device, options.commit), "errors": {}, "times": []}
    for name, call in chosen.items():
        record["errors"][name] = worst_error(call, device)
        print(f"{name}: largest error against float64 {record['errors'][name]:.1e}", flush=True)
    for length in options.lengths:
        for name, call in chosen.items():
            case = measure(name, call, length, device, options.rounds)
            record["times"].append(case)
            print(", ".join(f"{key} {value}" for key, value in case.items()), flush=True)
    if options.json is not None:
        write(options.json, f"{json.dumps(record, indent=1)}\n".encode())
    return int(any(not error <= WORST for error in record["errors"].values()))


if __name__ == "__main__":
    sys.exit(main())
