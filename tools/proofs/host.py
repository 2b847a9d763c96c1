"""The host's time of a small call on the CPU in two checkouts, whose processes take turns."""

from __future__ import annotations

import os
import pathlib
import statistics
import subprocess
import sys
import time

__all__ = ["compare_hosts"]

_TURNS, _CALLS, _BLOCKS = 7, 200, 15
_PASSES = ("forward", "forward and backward")


def compare_hosts(before: pathlib.Path, after: pathlib.Path) -> int:
    """Print the least medians of both checkouts in microseconds. Times differ from run to run, so the status is 0."""
    found: dict[pathlib.Path, list[list[float]]] = {before: [], after: []}
    for _ in range(_TURNS):
        for checkout, turns in found.items():
            environment = {**os.environ, "PYTHONPATH": str(checkout.resolve() / "src"), "OMP_NUM_THREADS": "1"}
            command = [sys.executable, str(pathlib.Path(__file__))]
            said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
            turns.append([float(x) for x in said.split()])
    print(f"{'host, us a call':24}{'before':>10}{'after':>10}{'more':>10}")
    for i, name in enumerate(_PASSES):
        old, new = (min(turn[i] for turn in found[x]) for x in (before, after))
        print(f"{name:24}{old:10.1f}{new:10.1f}{new - old:+10.1f}")
    return 0


def measure() -> list[float]:
    """The median over blocks of calls, in microseconds, of each pass."""
    import torch

    from evoattn import evoformer_attention

    q, k, v = (torch.randn(1, 2, 4, 2, 8, requires_grad=True) for _ in range(3))
    pair, do = torch.randn(1, 1, 2, 4, 4, requires_grad=True), torch.randn(1, 2, 4, 2, 8)

    def forward() -> None:
        with torch.no_grad():
            evoformer_attention(q, k, v, pair_bias=pair)

    def both() -> None:
        torch.autograd.grad(evoformer_attention(q, k, v, pair_bias=pair), (q, k, v, pair), do)

    medians = []
    for call in (forward, both):
        times = []
        for _ in range(_BLOCKS):
            began = time.perf_counter()
            for _ in range(_CALLS):
                call()
            times.append((time.perf_counter() - began) / _CALLS * 1e6)
        medians.append(statistics.median(times))
    return medians


if __name__ == "__main__":
    print(*measure())
