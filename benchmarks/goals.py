#!/usr/bin/env python3
"""The ratios that the project holds itself to on a CPU, measured with `evoattn bench`'s parts; status 1 if one falls short.

Forward at least 1.3x faster than scaled_dot_product_attention (its mask summed and expanded at each call) and 3x faster than
dense; forward and backward with the pair-bias gradient at least 1.6x and 1.8x; peak extra memory of forward and backward at
N = L = 384 at most 40% of dense. All in float32. Meaningful on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import sys

import torch

from evoattn.bench import machine, table
from evoattn.bench.clock import WallClock
from evoattn.bench.correctness import inputs_of
from evoattn.bench.memory import peak_bytes
from evoattn.bench.peers import PEERS, backend_peer
from evoattn.bench.plan import Plan, plan_settings
from evoattn.bench.record import Record
from evoattn.bench.run import run
from evoattn.bench.runner import Runner
from evoattn.workloads import workload

GOALS = (("forward", "sdpa", 1.3), ("forward", "dense", 3.0), ("both", "sdpa", 1.6), ("both", "dense", 1.8))
MEMORY = 1 / 0.4


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    cpu = torch.device("cpu")
    plan = Plan((workload("tri256n128"),), ("float32",), ("forward", "both"), ("auto",), ("sdpa", "dense"), options.rounds)
    record = run(plan, Record(machine.facts(cpu), plan_settings(plan)), cpu, WallClock(), lambda *_: None)
    print(table.as_text(record))
    ours = record.problems[0].result("evoattn")
    ratios = []
    for name, peer, least in GOALS:
        theirs = record.problems[0].result(peer)
        if ours is None or theirs is None or name not in ours.times or name not in theirs.times:
            raise RuntimeError(f"{name} of {peer} has no time; the table says why")
        ratios.append((f"{name}, {peer} / evoattn", theirs.times[name].median_ms / ours.times[name].median_ms, least))
    inputs = inputs_of(workload("tri384"), torch.float32, cpu)
    runners = [Runner(peer, inputs) for peer in (PEERS["dense"], backend_peer("auto", "evoattn"))]
    dense, evoattn = (peak_bytes(lambda runner=runner: runner.both(0), cpu) for runner in runners)  # type: ignore[misc]
    ratios.append(("peak memory at N = L = 384, dense / evoattn", dense / evoattn, MEMORY))
    print()
    for title, ratio, least in ratios:
        print(f"{title:>45} {ratio:6.2f}x   at least {least:.1f}x   {'holds' if ratio >= least else 'FALLS SHORT'}")
    return 0 if all(ratio >= least for _, ratio, least in ratios) else 1


if __name__ == "__main__":
    sys.exit(main())
