#!/usr/bin/env python3
"""Forward and backward of the named workloads on a GPU, evoattn beside its peers, in one process.

    python benchmarks/gpu.py --json benchmarks/results/NAME.json [--workloads tri384 msa_row] [--peers evoattn flex]

Correctness first: outputs and gradients are compared with float64 (the tiled backend, which the tests hold to the dense
oracle), and a wrong result gets no time. Rounds are interleaved; times are medians of `triton.testing.do_bench`, which
measures with CUDA events and clears the second-level cache between runs. Memory is what forward and backward hold beyond
their inputs at the peak.
"""

from __future__ import annotations

import argparse
import datetime
import json
import pathlib
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import evoattn
from evoattn import testing
from evoattn.cli.measure import peak_bytes
from evoattn.testing import Inputs
from evoattn.workloads import WORKLOADS, workload

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from peers import PEERS, Prepared

WRONG = {torch.bfloat16: 1.5e-2, torch.float16: 3e-3, torch.float32: 5e-3}
"""Relative errors above these are wrong results, not rounding."""


def truth(inputs: Inputs) -> dict[str, Tensor]:
    """o and all gradients in float64."""
    leaves = {name: x.double().requires_grad_() for name, x in inputs.differentiable.items()}
    o = evoattn.evoformer_attention(
        leaves["q"], leaves["k"], leaves["v"], mask=inputs.mask, pair_bias=leaves.get("pair_bias"), backend="tiled"
    )
    gradients = torch.autograd.grad(o, list(leaves.values()), inputs.do.double())
    return {"o": o.detach(), **{f"d{name}": g for name, g in zip(leaves, gradients, strict=True)}}


class Runner:
    """One library on one problem: forward, backward, and what they give."""

    def __init__(self, prepared: Prepared, inputs: Inputs) -> None:
        self.prepared = prepared
        self.tensors = [None if x is None else x.detach().requires_grad_() for x in prepared.tensors]
        self.leaves = [x for x in self.tensors if x is not None]
        self.do = prepared.to_library(inputs.do)

    def forward(self) -> Tensor:
        return self.prepared.attend(*self.tensors)

    def backward_of(self, o: Tensor) -> Callable[[], tuple[Tensor, ...]]:
        return lambda: torch.autograd.grad(o, self.leaves, self.do, retain_graph=True)

    def errors(self, expected: dict[str, Tensor], inputs: Inputs) -> dict[str, float]:
        o = self.forward()
        gradients = self.backward_of(o)()
        values = {"o": self.prepared.from_library(o)}
        for name, gradient in zip(("dq", "dk", "dv"), gradients, strict=False):
            values[name] = self.prepared.from_library(gradient)
        if len(gradients) == 4:
            values["dpair_bias"] = gradients[3].reshape(expected["dpair_bias"].shape)
        return {name: testing.relative_error(value, expected[name]) for name, value in values.items()}

    def both(self) -> tuple[Tensor, ...]:
        return self.backward_of(self.forward())()


def measure(name: str, dtype: torch.dtype, peers: list[str], rounds: int) -> dict[str, Any]:
    """Every peer on one workload: errors, times in ms, memory, or the reason why there is none."""
    from triton.testing import do_bench

    torch._dynamo.reset()
    problem = workload(name)
    inputs = testing.from_workload(problem, dtype).make(seed=0, device="cuda")
    expected = truth(inputs)
    results: dict[str, Any] = {}
    runners: dict[str, Runner] = {}
    for peer in peers:
        try:
            start = time.perf_counter()
            runner = Runner(PEERS[peer](inputs), inputs)
            errors = runner.errors(expected, inputs)
            results[peer] = {
                "errors": errors,
                "first_call_s": round(time.perf_counter() - start, 2),
                "peak_bytes": peak_bytes(runner.both, inputs.q.device),
            }
            worst = max(errors.values())
            if not worst <= WRONG[dtype]:
                raise ValueError(f"wrong by {worst:.1e}")
            runners[peer] = runner
        except Exception as reason:  # whatever a peer raises is its reason, and the run goes on
            results.setdefault(peer, {})["failed"] = (str(reason).strip().splitlines() or [repr(reason)])[0][:160]
        torch.cuda.empty_cache()
    del expected
    times: dict[str, dict[str, list[float]]] = {peer: {"forward": [], "backward": []} for peer in runners}
    outputs = {peer: runner.forward() for peer, runner in runners.items()}
    for _ in range(rounds):
        for peer, runner in runners.items():
            times[peer]["forward"].append(do_bench(runner.forward, warmup=8, rep=25, return_mode="median"))
            times[peer]["backward"].append(do_bench(runner.backward_of(outputs[peer]), warmup=8, rep=30, return_mode="median"))
    for peer, passes in times.items():
        for key, values in passes.items():
            results[peer][f"{key}_ms"] = statistics.median(values)
            results[peer][f"{key}_spread_ms"] = max(values) - min(values)
    return {"scores": problem.scores, "peers": results}


def machine() -> dict[str, Any]:
    """Device, driver, versions and commit."""

    def output(*command: str) -> str:
        try:
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            return "unknown"

    import triton

    return {
        "device": torch.cuda.get_device_name(),
        "driver": output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "evoattn": evoattn.__version__,
        "commit": output("git", "describe", "--always", "--dirty"),
        "date": datetime.date.today().isoformat(),
    }


def show(name: str, result: dict[str, Any]) -> None:
    scores = result["scores"]
    for peer, numbers in result["peers"].items():
        if "failed" in numbers or "forward_ms" not in numbers:
            print(f"{name:>14} {peer:>15}   {numbers.get('failed', 'no time')}", flush=True)
            continue
        forward, backward = numbers["forward_ms"], numbers["backward_ms"]
        print(
            f"{name:>14} {peer:>15} {forward:9.4f} ms {scores / forward / 1e6:7.0f} G/s {backward:9.4f} ms"
            f" {scores / backward / 1e6:6.0f} G/s {numbers['peak_bytes'] / 2**20:8.0f} MiB"
            f"  worst error {max(numbers['errors'].values()):.1e}",
            flush=True,
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [candidate.name for candidate in WORKLOADS]
    parser.add_argument("--workloads", nargs="+", default=[name for name in names if name != "tri2048"], choices=names)
    parser.add_argument("--peers", nargs="+", default=list(PEERS), choices=list(PEERS))
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--commit", help="what to record as the commit where git cannot tell")
    parser.add_argument("--json", type=pathlib.Path, help="write the numbers here, after each workload")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no GPU that torch can use")
    report: dict[str, Any] = {"machine": machine(), "dtype": options.dtype, "workloads": {}}
    if options.commit:
        report["machine"]["commit"] = options.commit
    print(f"{'':>14} {'':>15} {'forward':>9} {'':>22} {'backward':>9}")
    for name in options.workloads:
        report["workloads"][name] = measure(name, getattr(torch, options.dtype), options.peers, options.rounds)
        show(name, report["workloads"][name])
        if options.json:
            options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
