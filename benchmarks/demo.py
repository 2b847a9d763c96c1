"""The attentions of models at the sizes of models, by evoattn and by dense PyTorch: time, memory, error, and a picture.

python3 dev.py demo                    under a minute on two cores
python3 dev.py demo --quick            some seconds: a look
python3 dev.py demo tri200 single500   attentions of your choice: `evoattn bench --list` names them, and any length will do

Inputs are random. Exit status: 0 evoattn's errors are within their budgets; 1 they are not; 2 there is no such attention.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import pathlib
import sys
import time
from collections.abc import Callable

import torch

import evoattn
from evoattn import testing
from evoattn.bench import attentions, machine
from evoattn.bench.contender import Runner
from evoattn.bench.memory import peak_bytes, release, too_much
from evoattn.bench.peers import PEERS, backend_peer
from evoattn.cli.terminal import count_progress
from evoattn.testing import CaseInputs
from evoattn.workloads import Workload, workload

USUAL = {
    "cpu": ("tri128", "tri256", "tri384", "msa_row256n64", "diffusion384n5"),
    "cuda": ("tri256", "tri512", "tri1024", "msa_row", "diffusion768"),
}
QUICK = ("tri128", "diffusion256n5")
WAYS = {"evoattn": backend_peer("auto"), "dense torch": PEERS["dense"]}
COLOURS = {"evoattn": "#0072B2", "dense torch": "#D55E00"}
PASSES = ("forward", "both")

ROUNDS, PATIENCE_S = 5, 2.0
"""Rounds of an attention at most, and the seconds after which no other round begins."""

CHECKED_SCORES = (4 << 20) + 1
"""Scores that are compared with float64, in whole rows, if there are so many. A call with fewer goes another way on a CPU."""

WIDTH = 45
NEXT = """\
What to do next
  you run a program    evoattn run boltz predict input.yaml: docs/clients/index.md
  you write a model    evoattn.evoformer_attention(q, k, v, mask=mask, pair_bias=pair_bias): docs/tutorial.md
  you want more        python3 dev.py demo tri200 single500, or evoattn bench: every library that is installed
"""


@dataclasses.dataclass
class Cost:
    """Milliseconds and peak MiB beyond the inputs, by pass, and the largest relative error against float64."""

    ms: dict[str, float]
    mib: dict[str, float]
    error: float = 0.0


def title(w: Workload) -> str:
    """The attention and its length."""
    return f"{w.where.split(',')[0]}, {w.length} tokens"


def measure(inputs: CaseInputs, scores: int) -> dict[str, Cost]:
    """What each way costs that there is memory for: the least time of some rounds, in which the ways take turns."""
    device = inputs.q.device
    costs: dict[str, Cost] = {}
    passes: dict[str, dict[str, Callable[[], object]]] = {}
    for name, contender in WAYS.items():
        if not too_much(int(contender.score_copies * scores * inputs.q.dtype.itemsize), device):
            runner = Runner(contender, inputs)
            passes[name] = {"forward": torch.no_grad()(runner.forward), "both": runner.both}
            peaks = {of: peak_bytes(call, device) / 2**20 for of, call in passes[name].items()}  # this run also compiles
            costs[name] = Cost(dict.fromkeys(PASSES, math.inf), peaks)
    begun = time.perf_counter()
    for _ in range(ROUNDS):
        for name, of in itertools.product(costs, PASSES):
            costs[name].ms[of] = min(costs[name].ms[of], milliseconds(passes[name][of], device))
        if time.perf_counter() - begun > PATIENCE_S:
            break
    return costs


def milliseconds(call: Callable[[], object], device: torch.device) -> float:
    """The time of one call."""
    machine.synchronize(device)
    begun = time.perf_counter()
    call()
    machine.synchronize(device)
    return 1e3 * (time.perf_counter() - begun)


def check(inputs: CaseInputs, costs: dict[str, Cost]) -> list[str]:
    """Note the largest error of output and gradients. Return errors of evoattn that are beyond their budgets, in words."""
    expected, own = testing.oracle(inputs), testing.run(inputs)
    found, lost = testing.errors(own, expected), Runner(WAYS["dense torch"], inputs).errors(expected.values)
    for name, errors in (("evoattn", found), ("dense torch", lost)):
        if name in costs:
            costs[name].error = max(errors[value] for value in lost)
    allowed = testing.budgets(inputs, own, expected, {"lse": 0.0, **lost})
    return [f"{x}: relative error {found[x]:.1e}, allowed {allowed[x]:.1e}" for x in found if not found[x] <= allowed[x]]


def show(name: str, costs: dict[str, Cost]) -> None:
    """Print the rows of an attention."""
    for way in WAYS:
        cells = "  not enough memory"
        if cost := costs.get(way):
            cells = "".join(f"{cost.ms[of]:10.1f} ms{cost.mib[of]:7,.0f} MiB" for of in PASSES) + f"{cost.error:10.1e}"
        print(f"{name if way == 'evoattn' else '':<{WIDTH}}{way:<11}{cells}", flush=True)


def draw(found: dict[str, dict[str, Cost]], about: str, path: pathlib.Path) -> None:
    """Draw time and memory of forward and backward as bars."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(8, 1.2 + 0.55 * len(found)), layout="constrained", sharey=True)
    for panel, of, unit in zip(panels, ("ms", "mib"), ("time, ms", "peak memory, MiB"), strict=True):
        rows = [{name: getattr(cost, of)["both"] for name, cost in costs.items()} for costs in found.values()]
        for shift, (name, colour) in zip((-0.2, 0.2), COLOURS.items(), strict=True):
            lengths = [row.get(name, 0) / max(row.values(), default=1) for row in rows]  # the longer bar of each row is full
            bars = panel.barh([number + shift for number in range(len(rows))], lengths, 0.38, color=colour, label=name)
            panel.bar_label(bars, [f"{row[name]:,.0f}" if name in row else "not enough memory" for row in rows], padding=3)
        panel.set(title=unit, xlim=(0, 1.25), xticks=[], yticks=range(len(rows)))
        panel.set_yticklabels([name.replace(", ", ",\n") for name in found])
        panel.spines[:].set_visible(False)
    panels[0].invert_yaxis()
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper right", ncols=2)
    figure.suptitle(f"Forward and backward\n{about}", fontsize="medium", x=0.01, ha="left")
    figure.savefig(path, dpi=160)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("dev.py demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"on a CPU {' '.join(USUAL['cpu'])}")
    parser.add_argument("--output", type=pathlib.Path, default="evoattn-demo.png", metavar="PNG", help="%(default)s")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: the GPU if there is one")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: float32, on a GPU bfloat16")
    parser.add_argument("--quick", action="store_true", help="two small attentions")
    given = parser.parse_args(arguments)
    device = torch.device(given.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = getattr(torch, given.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    try:
        chosen = [workload(name) for name in given.names or (QUICK if given.quick else USUAL[device.type])]
    except ValueError as error:
        parser.error(str(error))
    about = f"{machine.name(device)}; evoattn {evoattn.__version__}, PyTorch {torch.__version__}; {dtype}"
    print(f"{about}\n\n{'attention':<{WIDTH}}{'by':<11}{'forward':>24}{'forward + backward':>24}{'error':>10}")
    found, wrong = {}, []
    with count_progress(len(chosen)) as progress:
        for number, w in enumerate(chosen):
            progress(number, title(w))
            release(device)
            inputs = attentions.inputs_of(w, dtype, device)
            found[title(w)] = costs = measure(inputs, w.scores)
            rows = attentions.first_rows(inputs, slice(0, -(-CHECKED_SCORES * w.n // w.scores)))
            wrong += [f"{title(w)}, {what}" for what in check(rows, costs)]
            show(title(w), costs)
    print(
        "\nTime is the least of some rounds, memory the peak beyond the inputs. The error is |value - float64| / |float64| of"
    )
    print("the output or of the worst gradient, for the first rows of a large attention.")
    print("\n".join(f"BEYOND ITS BUDGET  {line}" for line in wrong) or "Every error of evoattn is within its budget.")
    try:
        draw(found, about, given.output)
        print(f"Picture: {given.output}")
    except ImportError:
        print("The picture needs matplotlib: pip install '.[docs]'")
    print(f"\n{NEXT}", end="")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
