"""Measure the attentions of the demo by the contenders, the clock and the memory of the benchmark."""

from __future__ import annotations

import dataclasses
import math

import torch

from evoattn import testing
from evoattn.bench import attentions
from evoattn.bench.clock import Clock, clock_for
from evoattn.bench.contender import Contender, Runner, one_line, out_of_memory
from evoattn.bench.memory import peak_bytes, too_much
from evoattn.bench.peers import PEERS, backend_peer
from evoattn.bench.record import Problem, Result, Timing
from evoattn.cli.evoformer import CHANNELS, TRIANGLE_HEADS, embed, triangle_start
from evoattn.cli.terminal import Step
from evoattn.core.problem import dtype_name
from evoattn.testing import Inputs
from evoattn.testing.oracle import budgets, excess
from evoattn.workloads import Workload, workload

PATIENCE_S = {"evoattn": 60.0, "dense": 8.0}
"""Most seconds of one forward + backward. A length that is expected to take longer is not measured."""

_INPUT_BYTES_A_PAIR = 3 * 4 * 128 + 8 * 4 * TRIANGLE_HEADS * CHANNELS
"""Embedding in float32 with its temporaries; q, k, v, the cotangent, the output and three gradients."""

ORACLE_SCORES = 12 << 20
"""Scores of the float64 truth; 12 Mi of them take under a second and half a gigabyte on two CPU cores."""


@dataclasses.dataclass(frozen=True)
class Size:
    """The part of an alignment that is run, and the time for it.

    Args:
        sequences, columns: the part of the alignment that is used, from the first.
        lengths: of the sweep.
        repeats, seconds: how often the time of a pass is measured, and after how long in all no more.
        patience: seconds for the whole sweep, or None for as long as it takes.
    """

    sequences: int
    columns: int
    lengths: tuple[int, ...]
    repeats: int
    seconds: float
    patience: float | None


def measure(contender: Contender, result: Result, inputs: Inputs, passes: tuple[str, ...], size: Size, clock: Clock) -> None:
    """Note time and peak memory, or why there are none. The run that measures memory warms up those that measure time."""
    device, scores = inputs.q.device, inputs.q[..., 0].numel() * inputs.k.shape[2]
    needed = contender.score_copies * scores * inputs.q.element_size()
    if reason := too_much(int(needed), device):
        return result.mark_untimed("left out", f"needs {reason}")
    try:
        runner = Runner(contender, inputs)
        result.peak_bytes, seconds = peak_bytes(runner.both, device), size.seconds / len(passes)
        for name in passes:
            runner.prepare(name, clock.lead + 1)
            begun = clock.now()
            samples = [1e3 * clock.calls(getattr(runner, name), 1)]
            while len(samples) < size.repeats and clock.now() - begun < seconds * (3 if len(samples) < 3 else 1):
                samples.append(1e3 * clock.calls(getattr(runner, name), 1))
            result.times[name] = Timing.of(samples)
    except Exception as error:
        if not out_of_memory(error):
            raise
        result.mark_untimed("left out", one_line(error))


def four_attentions(attentions_of_block: list[Inputs], size: Size, step: Step) -> list[tuple[Problem, int, list[str]]]:
    """Measure each attention. Return it with the number of rows compared with float64, and evoattn's errors beyond budgets."""
    measured = []
    for inputs in attentions_of_block:
        case = inputs.case
        sizes = (1, case.n, case.h, case.lq, case.lk, case.d)
        shape = Workload(case.name, *sizes, True, inputs.pair_bias is not None, "")
        problem = Problem(shape, dtype_name(case.dtype), attentions.io_bytes(inputs))
        for contender, result in attentions.contenders(inputs, ("auto",), ("dense",)):
            step(f"{case.name}, {contender.name}")
            measure(contender, result, inputs, ("forward", "backward"), size, clock_for(inputs.q.device))
            problem.results.append(result)
        step(f"{case.name}, against float64")
        measured.append((problem, *_accuracy(inputs, problem)))
    return measured


def _accuracy(inputs: Inputs, problem: Problem) -> tuple[int, list[str]]:
    """Give the results their errors on the first rows, as many as the oracle has room for.

    One key, as of an alignment of one sequence, has the weight 1. The gradients of q and k are then 0, and what is left of
    them is rounding, which has no relative error: they are judged by what rounding takes.
    """
    _, n, length, heads, _ = inputs.q.shape
    rows = max(1, min(n, ORACLE_SCORES // (heads * length * length)))
    part = attentions.first_rows(inputs, slice(0, rows))
    expected, results = testing.oracle(part), testing.run(part)
    own, dense = problem.results
    own.errors, allowed = testing.errors(results, expected), budgets(part, results, expected)
    dense.errors = Runner(PEERS[dense.name], part).errors(expected.values)
    beyond = [(name, error, allowed[name]) for name, error in own.errors.items() if not error <= allowed[name]]
    if beyond and length == 1:
        beyond = excess(part, results, expected)
    words = "{}: {}: relative error {:.1e}, allowed {:.1e}"
    return rows, [words.format(inputs.case.name, *one) for one in beyond]


def tiled(query: str, length: int) -> str:
    """The query cut to a length, or repeated up to it."""
    return (query * -(-length // len(query)))[:length]


def growth(query: str, size: Size, seed: int, device: torch.device, dtype: torch.dtype, step: Step) -> list[Problem]:
    """Triangle attention at growing lengths; a contender that cannot go on is dropped from there, with the reason."""
    clock = clock_for(device)
    end = math.inf if size.patience is None else clock.now() + size.patience
    problems: list[Problem] = []
    for length in size.lengths:
        problem = Problem(workload(f"tri{length}"), dtype_name(dtype), None)
        for contender in (backend_peer("auto", "evoattn"), PEERS["dense"]):
            if contender.name in stops(problems):
                continue
            step(f"triangle, L = {length}, {contender.name}")
            why = _cannot_go_on(contender, problem.workload, problems, end - clock.now(), device, dtype)
            result = Result(contender.name, "left out" if why else "ok", why or "")
            if why is None:
                inputs = triangle_start(embed((tiled(query, length),), seed, device), dtype)
                measure(contender, result, inputs, ("both",), size, clock)
            problem.results.append(result)
        problems.append(problem)
    return problems


def stops(problems: list[Problem]) -> dict[str, str]:
    """The length at which each contender stopped before the last one, and the reason."""
    return {r.name: f"at L = {p.workload.length}: {r.reason}" for p in problems for r in p.results if r.reason}


def _cannot_go_on(
    contender: Contender, asked: Workload, before: list[Problem], left_s: float, device: torch.device, dtype: torch.dtype
) -> str | None:
    """Return the reason not to begin a length. The time of a pass is expected to grow with the number of scores."""
    seconds = 0.0
    if before and (last := before[-1].result(contender.name)) and "both" in last.times:
        seconds = last.times["both"].median_ms / 1e3 * asked.scores / before[-1].workload.scores
    if seconds > PATIENCE_S[contender.name]:
        return f"it would take about {seconds:.0f} s a pass"
    if 2 * seconds > left_s:  # one pass measures memory, and one time
        return "the time of the demo is over; --max-length gives it more"
    needed = _INPUT_BYTES_A_PAIR * asked.length**2 + int(contender.score_copies) * asked.scores * dtype.itemsize
    reason = too_much(needed, device)
    return f"it would take {reason}" if reason else None
