#!/usr/bin/env python3
"""The ratios that the project holds itself to on a CPU, measured with `evoattn bench`'s parts; status 1 if one falls short.

Forward at least 1.3x faster than scaled_dot_product_attention (its mask summed and expanded at each call) and 3x faster than
dense; forward and backward with the pair-bias gradient at least 1.6x and 1.8x; peak extra memory of forward and backward at
N = L = 384 at most 40% of dense. Beside one process that keeps a core busy at least as fast as scaled_dot_product_attention,
beside two at least 0.7x, with any number of threads. All in float32. Meaningful on a machine that does nothing else.
`cpu_calls.py` measures calls of other sizes beside dense.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import torch

from evoattn.bench import machine, table
from evoattn.bench.attentions import inputs_of
from evoattn.bench.clock import Clock
from evoattn.bench.contender import Runner
from evoattn.bench.memory import peak_bytes
from evoattn.bench.peers import PEERS, backend_peer
from evoattn.bench.record import Record
from evoattn.bench.run import BenchPlan, run
from evoattn.workloads import workload

GOALS = (("forward", "sdpa", 1.3), ("forward", "dense", 3.0), ("both", "sdpa", 1.6), ("both", "dense", 1.8))
MEMORY = 1 / 0.4
BESIDE = ((0, 1.3), (1, 1.0), (2, 0.7))
"""The number of processes that keep a core busy -> the least ratio of scaled_dot_product_attention's time to evoattn's."""

THREADS = (1, 2, 8)
PASSES = ("forward", "both")


@contextlib.contextmanager
def busy(processes: int) -> Iterator[None]:
    """So many processes that never stop computing."""
    started = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def times(calls: list[Callable[[], object]], rounds: int) -> list[float]:
    """Seconds of each call, the median of rounds in which all take turns: whatever the machine does, all meet it."""
    seconds_by_call: list[list[float]] = [[] for _ in calls]
    for count in range(rounds + 2):
        for call, seconds in zip(calls, seconds_by_call, strict=True):
            start = time.perf_counter()
            call()
            if count >= 2:
                seconds.append(time.perf_counter() - start)
    return [statistics.median(seconds) for seconds in seconds_by_call]


def ratios_to(peer: str, name: str, rounds: int) -> dict[str, float]:
    """The time of a peer over that of evoattn on a workload, for each pass."""
    inputs = inputs_of(workload(name), torch.float32, torch.device("cpu"))
    runners = [Runner(PEERS[peer], inputs), Runner(backend_peer("auto"), inputs)]
    ratios = {}
    for which in PASSES:
        with torch.set_grad_enabled(which != "forward"):  # without, scaled_dot_product_attention takes its fastest way
            peer_s, own_s = times([functools.partial(getattr(runner, which), 0) for runner in runners], rounds)
        ratios[which] = peer_s / own_s
    return ratios


def beside_others(rounds: int) -> list[tuple[str, float, float]]:
    """The ratios to scaled_dot_product_attention while other processes want the cores too."""
    ratios = []
    counts = [count for count in THREADS if count <= (os.cpu_count() or 1)]
    for threads, (processes, least) in itertools.product(counts, BESIDE):
        with machine.threads(threads), busy(processes):
            for name, ratio in ratios_to("sdpa", "tri256n128", rounds).items():
                ratios.append((f"{name}, {threads} threads, {processes} busy, sdpa / evoattn", ratio, least))
    return ratios


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    cpu = torch.device("cpu")
    plan = BenchPlan((workload("tri256n128"),), ("float32",), ("forward", "both"), ("auto",), ("sdpa", "dense"), options.rounds)
    record = run(plan, Record(machine.facts(cpu), plan.settings()), cpu, Clock(), lambda *_: None)
    print(table.as_text(record))
    own = record.problems[0].result("evoattn")
    ratios = []
    for name, peer, least in GOALS:
        peer_result = record.problems[0].result(peer)
        if own is None or peer_result is None or name not in own.times or name not in peer_result.times:
            raise RuntimeError(f"{name} of {peer} has no time; the table says why")
        ratios.append((f"{name}, {peer} / evoattn", peer_result.times[name].median_ms / own.times[name].median_ms, least))
    inputs = inputs_of(workload("tri384"), torch.float32, cpu)
    runners = [Runner(peer, inputs) for peer in (PEERS["dense"], backend_peer("auto"))]
    dense, evoattn = (peak_bytes(lambda runner=runner: runner.both(0), cpu) for runner in runners)  # type: ignore[misc]
    ratios.append(("peak memory at N = L = 384, dense / evoattn", dense / evoattn, MEMORY))
    ratios += beside_others(options.rounds)
    print()
    for title, ratio, least in ratios:
        print(f"{title:>47} {ratio:6.2f}x   at least {least:.2f}x   {'holds' if ratio >= least else 'FALLS SHORT'}")
    return 0 if all(ratio >= least for _, ratio, least in ratios) else 1


if __name__ == "__main__":
    sys.exit(main())
