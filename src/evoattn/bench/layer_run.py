"""The benchmark of whole layers: verified against float64, then timed eager in interleaved rounds, then in CUDA graphs."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch
from torch import Tensor

from evoattn import testing
from evoattn.bench.budget import Budget
from evoattn.bench.clock import Clock
from evoattn.bench.correctness import WRONG
from evoattn.bench.layers import WAYS, Layer, Way, layer_of, layer_truth, named
from evoattn.bench.memory import peak_bytes, too_much
from evoattn.bench.plan import Plan
from evoattn.bench.reasons import one_line, status
from evoattn.bench.record import Problem, Result, Timing

__all__ = ["captured", "measure_layer"]

_ROUNDINGS = 2
"""A layer rounds to 16 bits before and after its attention: so many times an attention's error is still rounding."""

_DENSE_COPIES = 12
"""Bytes per score of a dense layer over those of its dtype: float32 softmax under autocast, scores, and their gradients."""

_LONGEST_S = 20.0


class _Runner:
    """A way on a layer: forward, and forward with backward."""

    def __init__(self, way: Way, layer: Layer, dtype: torch.dtype) -> None:
        self.layer, self.run = layer, way.of(layer, dtype)
        self.do = layer.do if dtype == torch.float32 else layer.do.to(dtype)

    def forward(self, number: int = 0) -> Tensor:
        """As in training: what the backward needs is kept."""
        return self.run()

    def both(self, number: int = 0) -> tuple[Tensor, ...]:
        """The gradients of inputs and parameters."""
        o = self.run()
        return torch.autograd.grad(o, self.layer.leaves, self.do.to(o.dtype))

    def errors(self, expected: dict[str, Tensor], with_gradients: bool) -> dict[str, float]:
        """Relative errors against the truth; of all parameters together, since a gradient of one may be 0."""
        o = self.run()
        found = {"o": testing.relative_error(o.detach(), expected["o"])}
        if not with_gradients:
            return found
        values = named(self.layer, o.detach(), torch.autograd.grad(o, self.layer.leaves, self.do.to(o.dtype)))
        parameters = [name for name in values if name.startswith("dparameters.")]
        for name in values.keys() - {"o", *parameters}:
            found[name] = testing.relative_error(values[name], expected[name])
        theirs, truth = (torch.cat([of[name].flatten().double() for name in parameters]) for of in (values, expected))
        found["dparameters"] = testing.relative_error(theirs, truth)
        return found


def measure_layer(
    problem: Problem, plan: Plan, device: torch.device, clock: Clock, budget: Budget, say: Callable[[str], None]
) -> None:
    """Fill a problem with the results of all ways.

    Eager calls of all ways take turns. A way's CUDA graphs are captured, timed and freed before the next way's, because all
    of them do not fit into memory together.
    """
    dtype = getattr(torch, problem.dtype)
    if any(way.compiles for way in WAYS):
        torch._dynamo.reset()
    say("float64 truth")
    layer = layer_of(problem.workload, device)
    problem.bytes = layer.nbytes
    expected = layer_truth(layer)
    runners: list[tuple[Way, Result, _Runner]] = []
    for way in WAYS:
        say(way.name)
        result = Result(way.name)
        problem.results.append(result)
        try:
            runner = _verified(way, layer, dtype, expected, result, plan, clock, device)
        except Exception as error:  # whatever a way raises is its reason, and the run goes on
            result.status, result.reason, runner = status(error), one_line(error), None
        _release(device)
        if runner is not None:
            runners.append((way, result, runner))
    del expected
    _release(device)
    budget.begin_rounds()
    _time_eager(runners, plan, clock, budget, say)
    if device.type == "cuda":
        for way, result, runner in runners:
            say(f"{way.name}, CUDA graphs")
            _time_graphs(result, runner, plan, clock)
            _release(device)


def _verified(
    way: Way,
    layer: Layer,
    dtype: torch.dtype,
    expected: dict[str, Tensor],
    result: Result,
    plan: Plan,
    clock: Clock,
    device: torch.device,
) -> _Runner | None:
    if way.dense:
        reason = too_much(_DENSE_COPIES * _scores(layer) * dtype.itemsize, device, " of scores")
        if reason:
            result.status, result.reason = "left out", f"would hold {reason}"
            return None
    start = clock.now()
    runner = _Runner(way, layer, dtype)
    with_gradients = set(plan.passes) != {"forward"}
    result.errors = runner.errors(expected, with_gradients)
    result.first_call_s = round(clock.now() - start, 3)
    name = max(result.errors, key=lambda key: result.errors[key])
    limit = _ROUNDINGS * WRONG[dtype]
    if not result.errors[name] <= limit:
        result.status = "wrong"
        result.reason = f"{name}: relative error {result.errors[name]:.1e} against float64, at most {limit:.0e} is rounding"
        return None
    result.peak_bytes = peak_bytes(runner.both if with_gradients else runner.forward, device)
    return runner


def _scores(layer: Layer) -> int:
    rows = layer.mask.numel()
    keys = layer.mask.shape[-2 if layer.kind == "msa_column" else -1]
    return rows * keys * layer.module.no_heads


def _passes(runner: _Runner, plan: Plan) -> dict[str, Callable[[int], object]]:
    calls: dict[str, Callable[[int], object]] = {"forward": runner.forward, "both": runner.both}
    return {name: call for name, call in calls.items() if name in plan.passes}


def _time_eager(
    runners: list[tuple[Way, Result, _Runner]], plan: Plan, clock: Clock, budget: Budget, say: Callable[[str], None]
) -> None:
    rows = []
    for _, result, runner in runners:
        for name, call in _passes(runner, plan).items():
            seconds = min(clock.calls(call, 1) for _ in range(2))
            if seconds > _LONGEST_S:
                result.status, result.reason = "partial", f"{name}: {seconds:.1f} s a call, not repeated"
                continue
            host = clock.host_s(call, 3)
            if host is not None:
                result.host_us[name] = round(1e6 * host, 1)
            rows.append((result, name, call, _count(clock, seconds)))
    samples: dict[tuple[str, str], list[float]] = {}
    for number in range(plan.rounds):
        if number >= 2 and budget.enough():
            break
        say(f"round {number + 1} of {plan.rounds}")
        for result, name, call, count in rows:
            samples.setdefault((result.name, name), []).append(1e3 * clock.calls(call, count) / count)
            result.times[name] = Timing.of(samples[result.name, name])


def _count(clock: Clock, seconds: float) -> int:
    return max(1, min(200, round(clock.target_s / max(seconds, 1e-9))))


def _time_graphs(result: Result, runner: _Runner, plan: Plan, clock: Clock) -> None:
    """Each pass as a CUDA graph; a capture that fails is noted, and the eager times stay."""
    for name, call in _passes(runner, plan).items():
        try:
            replay, kept = captured(call)
            count = _count(clock, clock.calls(replay, 2) / 2)
            times = [1e3 * clock.calls(replay, count) / count for _ in range(plan.rounds)]
            result.times[f"graph_{name}"] = Timing.of(times)
            del replay, kept
        except Exception as error:
            result.reason = f"{result.reason + '; ' if result.reason else ''}graph of {name}: {one_line(error)}"
            torch.cuda.synchronize()


def captured(call: Callable[[int], object]) -> tuple[Callable[[int], object], object]:
    """A call as a CUDA graph, and what its output holds."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for number in range(2):
            call(number)
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = call(0)
    return lambda number: graph.replay(), kept


def _release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
