#!/usr/bin/env python3
"""Calls on a CPU beside dense torch, from the same tensors to the same: sizes of models, both passes, some biases.

Both start from projections `[b,n,l,h*d]`, as linear layers make them, and end at `[b,n,l,h*d]`, as the next one takes it. So
both pay for the layout of outputs and gradients.

    python benchmarks/cpu_calls.py --json benchmarks/results/cpu/NAME.json

The two take turns, which of them begins changes, and the least time of each counts. A ratio above the goal is measured again.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import pathlib
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import evoattn
from evoattn.bench import attentions, machine
from evoattn.workloads import Workload, workload

GOAL = 1.15
"""Time of evoattn over that of dense torch, at the most."""

NAMES = (
    *("tri16", "tri32", "tri48", "tri64", "tri76", "tri100", "tri128", "tri256n32", "tri384n16"),
    *("msa_row76n64", "msa_row128n64", "msa_row256n16", "msa_column4", "extra_msa_row128n32"),
    *("single76", "single128", "single256", "single384", "single768"),
    *("diffusion76n1", "diffusion128n1", "diffusion256n1", "diffusion384n1", "diffusion256n5"),
    *("template_pointn4096", "template_point", "msa_global64"),
)
ATOMS = Workload("atoms", 100, 1, 4, 32, 128, 32, True, True, "atom transformer: windows of 32 atoms that see 128")
WORKLOADS = (*(workload(name) for name in NAMES), ATOMS)
BIASES = {"none": (False, False), "mask": (True, False), "pair bias": (False, True), "mask, pair bias": (True, True)}
ROUNDS, LEAST_S = 7, 0.004
"""Rounds at least, and how long the calls of a round take at least."""


def dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, pair_bias: Tensor | None) -> Tensor:
    """Attention of `[b,n,l,h,d]` as models write it."""
    q, k, v = (x.transpose(-2, -3) for x in (q, k, v))  # [b,n,h,l,d]
    s = q * q.shape[-1] ** -0.5 @ k.transpose(-1, -2)
    s = s if mask is None else s.masked_fill(~mask[..., None, None, :], -torch.inf)
    s = s if pair_bias is None else s + pair_bias
    o: Tensor = s.softmax(-1) @ v
    return o.transpose(-2, -3)


def own(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, pair_bias: Tensor | None) -> Tensor:
    return evoattn.evoformer_attention(q, k, v, mask=mask, pair_bias=pair_bias)


def passes(attend: Callable[..., Tensor], w: Workload, dtype: torch.dtype) -> dict[str, Callable[[], Any]]:
    """The forward of inference, and forward and backward."""
    inputs = attentions.inputs_of(w, dtype, torch.device("cpu"))
    projections = [x.flatten(-2).requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    pair_bias = None if inputs.pair_bias is None else inputs.pair_bias.requires_grad_()
    leaves = projections if pair_bias is None else [*projections, pair_bias]
    do = inputs.do.flatten(-2)

    def forward() -> Tensor:
        return attend(*(x.unflatten(-1, (-1, w.d)) for x in projections), inputs.mask, pair_bias).flatten(-2)

    def both() -> Any:
        return torch.autograd.grad(forward(), leaves, do)

    return {"forward": torch.no_grad()(forward), "both": both}


def seconds(call: Callable[[], Any], count: int) -> float:
    """Of one call, the mean of so many."""
    begun = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - begun) / count


def least(calls: list[Callable[[], Any]], rounds: int) -> list[float]:
    """The least milliseconds of each call."""
    counts = [max(1, min(300, round(LEAST_S / min(seconds(call, 1) for _ in range(3))))) for call in calls]
    found = [float("inf")] * len(calls)
    for number in range(rounds):
        for at in range(len(calls)) if number % 2 else reversed(range(len(calls))):
            found[at] = min(found[at], 1e3 * seconds(calls[at], counts[at]))
    return found


def compare(w: Workload, dtype: torch.dtype) -> dict[str, list[float]]:
    """Milliseconds of evoattn and of dense torch, by pass."""
    ways, times = [passes(attend, w, dtype) for attend in (own, dense)], {}
    for name in ("forward", "both"):
        calls = [way[name] for way in ways]
        found = least(calls, ROUNDS)
        if found[0] > GOAL * found[1]:
            found = list(map(min, found, least(calls, 2 * ROUNDS)))
        times[name] = [round(x, 4) for x in found]
    return times


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE")
    parser.add_argument("--names", nargs="+", metavar="NAME", help="default: all")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    given = parser.parse_args(arguments)
    chosen = [w for w in WORKLOADS if not given.names or w.name in given.names]
    record: dict[str, Any] = {"machine": machine.facts(torch.device("cpu")), "rounds": ROUNDS, "goal": GOAL, "calls": []}
    for threads, dtype, w, biases in itertools.product(given.threads, given.dtypes, chosen, BIASES):
        key_mask, pair_bias = BIASES[biases]
        if pair_bias and not w.pair_bias:
            continue
        with machine.threads(threads):
            times = compare(dataclasses.replace(w, key_mask=key_mask, pair_bias=pair_bias), getattr(torch, dtype))
        record["calls"].append({"workload": w.name, "dtype": dtype, "biases": biases, "threads": threads, "ms": times})
        ratios = {name: ours / theirs for name, (ours, theirs) in times.items()}
        cells = "  ".join(f"{name} {ratio:5.2f}{'*' if ratio > GOAL else ' '}" for name, ratio in ratios.items())
        print(f"{w.name:<20} {dtype:<9} {biases:<15} {threads} threads  {cells}", flush=True)
        if given.json:
            given.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
