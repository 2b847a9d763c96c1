#!/usr/bin/env python3
"""Speed and memory of the tiled backend on a CPU, against dense torch and torch's own attention, in one run.

Prints the ratios that the project holds itself to: forward at least 1.3x faster than scaled_dot_product_attention (its mask
summed and expanded at each call) and 3x faster than dense; forward and backward with the pair-bias gradient at least 1.6x
and 1.8x; peak extra memory of forward and backward at N = L = 384 at most 40% of dense, all in float32. Rounds are
interleaved and medians taken; results are compared with float64 before anything is timed. Exit status 1 if a ratio falls
short.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import platform
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

import evoattn
from evoattn import testing
from evoattn.cli.measure import peak_bytes
from evoattn.testing.cases import Inputs

Step = Callable[[], object]


def attend_dense(q: Tensor, k: Tensor, v: Tensor, mask_bias: Tensor, pair_bias: Tensor) -> Tensor:
    s = torch.matmul(q * q.shape[-1] ** -0.5, k.transpose(-1, -2))  # [b,n,h,q,k]
    return torch.matmul(torch.softmax(s + mask_bias + pair_bias, -1), v)


def attend_sdpa(q: Tensor, k: Tensor, v: Tensor, mask_bias: Tensor, pair_bias: Tensor) -> Tensor:
    """Four axes: with five torch takes its slow path. The mask is built at each call, as a model must."""
    bias = (mask_bias + pair_bias)[0]
    return torch.nn.functional.scaled_dot_product_attention(q[0], k[0], v[0], attn_mask=bias)[None]


def attend_evoattn(q: Tensor, k: Tensor, v: Tensor, mask_bias: Tensor, pair_bias: Tensor) -> Tensor:
    return evoattn.evoformer_attention(q, k, v, mask_bias=mask_bias, pair_bias=pair_bias, layout="bnhld", backend="tiled")


IMPLEMENTATIONS = {"evoattn": attend_evoattn, "sdpa": attend_sdpa, "dense": attend_dense}


def problem(n: int, length: int, dtype: torch.dtype) -> Inputs:
    """H = 4, D = 32, both biases, in the layout that torch's own attention likes best."""
    case = testing.Case(
        "cpu", n=n, h=4, lq=length, lk=length, d=32, dtype=dtype, layout="bnhld", mask_bias="minus_1e9", pair_bias="b1hqk"
    )
    return case.make(seed=0)


def step(name: str, inputs: Inputs, *, backward: bool) -> Step:
    biases = [x for x in (inputs.mask_bias, inputs.pair_bias) if x is not None]
    leaves = [x.detach().requires_grad_(backward) for x in (inputs.q, inputs.k, inputs.v, biases[1])]

    def run() -> object:
        q, k, v, pair_bias = leaves
        o = IMPLEMENTATIONS[name](q, k, v, biases[0], pair_bias)
        return torch.autograd.grad(o, leaves, inputs.do) if backward else o

    return run


def check(inputs: Inputs) -> None:
    """No time for a wrong result: every implementation within its budget of float64, on a few rows."""
    expected = testing.oracle(inputs)
    for name in IMPLEMENTATIONS:
        o = step(name, inputs, backward=False)()
        gradients = step(name, inputs, backward=True)()
        if not isinstance(o, Tensor) or not isinstance(gradients, tuple):
            raise TypeError(f"{name} returned {type(o)} and {type(gradients)}")
        values = dict(zip(("o", "dq", "dk", "dv", "dpair_bias"), (o, *gradients), strict=True))
        for key, value in values.items():
            error = testing.relative_error(value, expected.values[key])
            if not error < (1e-5 if value.dtype == torch.float32 else 2e-2):
                raise AssertionError(f"{name}: {key} is wrong by {error:.1e}")


def medians(steps: dict[str, Step], rounds: int) -> dict[str, float]:
    """Milliseconds, by interleaved rounds after one to warm up."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 1):
        for name, run in steps.items():
            start = time.perf_counter()
            run()
            if number:
                times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=pathlib.Path, help="also write the numbers here")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    check(problem(4, 64, dtype))
    inputs = problem(128, 256, dtype)
    forward = medians({name: step(name, inputs, backward=False) for name in IMPLEMENTATIONS}, options.rounds)
    both = medians({name: step(name, inputs, backward=True) for name in IMPLEMENTATIONS}, options.rounds)
    large = problem(384, 384, dtype)
    memory = {name: peak_bytes(step(name, large, backward=True), torch.device("cpu")) for name in ("evoattn", "dense")}

    print(
        f"torch {torch.__version__}, {options.threads} threads, {platform.machine()}, {options.dtype},"
        " N 128, L 256, H 4, D 32, both biases"
    )
    print(f"{'ms':>24} {'evoattn':>10} {'sdpa':>10} {'dense':>10}")
    for title, times in (("forward", forward), ("forward + backward", both)):
        print(f"{title:>24} " + " ".join(f"{times[name]:10.1f}" for name in IMPLEMENTATIONS))
    print(f"{'GB at N = L = 384':>24} {memory['evoattn'] / 1e9:10.2f} {'':>10} {memory['dense'] / 1e9:10.2f}")
    goals = [
        ("forward, sdpa / evoattn", forward["sdpa"] / forward["evoattn"], 1.3),
        ("forward, dense / evoattn", forward["dense"] / forward["evoattn"], 3.0),
        ("forward + backward, sdpa / evoattn", both["sdpa"] / both["evoattn"], 1.6),
        ("forward + backward, dense / evoattn", both["dense"] / both["evoattn"], 1.8),
        ("peak memory, dense / evoattn", memory["dense"] / memory["evoattn"], 1 / 0.4),
    ]
    judged = dtype == torch.float32
    for title, ratio, least in goals:
        verdict = f"   at least {least:.1f}x   {'holds' if ratio >= least else 'FALLS SHORT'}" if judged else ""
        print(f"{title:>40} {ratio:6.2f}x{verdict}")
    if options.json:
        numbers = {
            "forward_ms": forward,
            "forward_backward_ms": both,
            "peak_bytes": memory,
            "ratios": {t: r for t, r, _ in goals},
        }
        about = {"torch": torch.__version__, "threads": options.threads, "dtype": options.dtype, "evoattn": evoattn.__version__}
        options.json.write_text(json.dumps({**about, **numbers}, indent=2) + "\n")
    return 0 if not judged or all(ratio >= least for _, ratio, least in goals) else 1


if __name__ == "__main__":
    sys.exit(main())
