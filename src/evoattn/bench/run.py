"""Run a benchmark: verify every contender on every problem, then time them in interleaved rounds."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from evoattn.bench import attentions
from evoattn.bench.clock import Clock
from evoattn.bench.contender import Contender, Runner, one_line, out_of_memory, status, worst
from evoattn.bench.memory import peak_bytes, release, too_much
from evoattn.bench.record import Problem, Record, Result, Timing
from evoattn.workloads import Workload

_HOST_CALLS = 7
_HOST_S = 0.5
"""Calls that measure the host's time, or three if all of them would take longer than this."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """The problems, passes and contenders of a run.

    Args:
        workloads, dtypes: each workload is measured in each dtype; dtypes have torch's names.
        passes: of "forward", "backward", "both".
        backends: names of evoattn's backends; "auto" is what a plain call takes.
        peers: names of `PEERS`.
        rounds: of the timing.
    """

    workloads: tuple[Workload, ...]
    dtypes: tuple[str, ...]
    passes: tuple[str, ...]
    backends: tuple[str, ...]
    peers: tuple[str, ...]
    rounds: int = 7

    def settings(self) -> dict[str, object]:
        """The plan in types that JSON has."""
        return {**dataclasses.asdict(self), "workloads": [workload.name for workload in self.workloads]}


def run(
    plan: Plan,
    record: Record,
    device: torch.device,
    clock: Clock,
    say: Callable[[int, str], object],
    after_problem: Callable[[Record], object] = lambda record: None,
) -> Record:
    """Measure the problems of a plan into a record, and return it.

    Ctrl-C ends the run and keeps the problems that are done: `record.finished` is then "interrupted".

    Args:
        plan: what is measured.
        record: gets the problems.
        device: where.
        clock: times the calls.
        say: called before each step with the number of problems that are done, and the step in words.
        after_problem: called with the record after each problem.
    """
    record.finished = "interrupted"  # until it is not: what is written after a problem may be all there will be
    try:
        for dtype in plan.dtypes:
            for workload in plan.workloads:
                problem, done = Problem(workload, dtype, None), len(record.problems)
                _measure(plan, problem, device, clock, lambda what, done=done: say(done, what))  # type: ignore[misc]
                record.problems.append(problem)
                after_problem(record)
        record.finished = "complete"
    except KeyboardInterrupt:
        pass
    return record


def _measure(plan: Plan, problem: Problem, device: torch.device, clock: Clock, say: Callable[[str], object]) -> None:
    """Verify and time all contenders on one problem. Without memory for it, the results have the reason."""
    name, dtype = f"{problem.workload.name}, {problem.dtype}", getattr(torch, problem.dtype)
    say(f"{name}: float64 truth")
    reason = attentions.too_large(problem.workload, dtype, device)
    try:
        if reason is None:
            _measure_attention(plan, problem, dtype, device, clock, lambda what: say(f"{name}: {what}"))
    except Exception as error:
        if not out_of_memory(error):
            raise
        reason = "the inputs and their float64 truth do not fit into memory"
    if reason is not None:
        names = ["evoattn" if backend == "auto" else f"evoattn/{backend}" for backend in plan.backends]
        problem.results = [Result(name, "left out", reason) for name in (*names, *plan.peers)]
    release(device)


def _measure_attention(
    plan: Plan, problem: Problem, dtype: torch.dtype, device: torch.device, clock: Clock, say: Callable[[str], object]
) -> None:
    inputs = attentions.inputs_of(problem.workload, dtype, device)
    problem.bytes = attentions.io_bytes(inputs)
    contenders = attentions.contenders(inputs, plan.backends, plan.peers, backward=plan.passes != ("forward",))
    if any(contender.compiles for contender, _ in contenders):
        torch._dynamo.reset()
    expected, runners = attentions.truth(inputs), []
    for contender, result in contenders:
        say(contender.name)
        problem.results.append(result)
        runner = verify(contender, result, inputs, expected, problem, plan.passes)
        if runner is not None:
            runners.append((result, runner))
    del expected
    release(device)
    time_in_turn(runners, plan.passes, plan.rounds, clock, say)


def verify(
    contender: Contender,
    result: Result,
    inputs: Any,
    expected: dict[str, Tensor],
    problem: Problem,
    passes: tuple[str, ...],
    roundings: int = 1,
) -> Runner | None:
    """Return a runner if a contender's output is right. The result tells its errors, and what is wrong.

    Args:
        contender, result: who computes, and what is noted of it.
        inputs, expected: of the problem, and the float64 truth.
        problem: its sizes and dtype.
        passes: if only "forward", no gradient is computed.
        roundings: how many times the contenders of this problem round to its dtype.
    """
    dtype, device, scores = getattr(torch, problem.dtype), inputs.do.device, problem.workload.scores
    runner = None
    if reason := too_much(int(contender.score_copies * scores * dtype.itemsize), device, " of scores"):
        result.mark_untimed("left out", f"would hold {reason}")
        return None
    try:
        start = time.perf_counter()
        runner = Runner(contender, inputs, scores)
        result.errors = runner.forward_error(expected)
        if wrong := worst(result.errors, dtype, roundings):
            result.mark_untimed("wrong", wrong)
        elif passes != ("forward",):
            wrong = _gradients(runner, result, expected, dtype, roundings)
            if wrong:
                result.mark_untimed("partial" if "forward" in passes else "wrong", f"backward: {wrong}")
        result.first_call_s = round(time.perf_counter() - start, 3)
        if result.status == "ok":
            result.peak_bytes = peak_bytes(runner.forward if passes == ("forward",) else runner.both, device)
    except Exception as error:  # whatever a peer raises is its reason, and the run goes on
        result.status, result.reason = status(error), one_line(error)
    if result.status not in ("ok", "partial"):
        runner = None
        release(device)
    return runner


def _gradients(runner: Runner, result: Result, expected: dict[str, Tensor], dtype: torch.dtype, roundings: int) -> str | None:
    """Note the errors of all gradients. Return what is wrong with them."""
    try:
        errors = runner.gradient_errors(expected)
    except Exception as error:
        return one_line(error)
    result.errors |= errors
    return worst(errors, dtype, roundings)


@dataclasses.dataclass
class _Pass:
    """A pass of a runner, to be timed `count` calls at a time. The result gets the time."""

    result: Result
    runner: Runner
    name: str
    count: int = 1
    samples_ms: list[float] = dataclasses.field(default_factory=list)

    def seconds(self, clock: Clock) -> float:
        """Mean seconds of one call."""
        self.runner.prepare(self.name, clock.lead + self.count)
        return clock.calls(getattr(self.runner, self.name), self.count) / self.count

    def warm_up(self, clock: Clock) -> None:
        """Choose the calls of a round by two calls, and measure the host's time."""
        seconds, most = min(self.seconds(clock) for _ in range(2)), self.runner.most_calls(self.name)
        calls = min(_HOST_CALLS if _HOST_CALLS * seconds < _HOST_S else 3, most)
        self.runner.prepare(self.name, calls)
        host = clock.host_s(getattr(self.runner, self.name), calls)
        if host is not None:
            self.result.host_us[self.name] = round(1e6 * host, 1)
        self.count = clock.calls_in_a_round(seconds, most - clock.lead)

    def add_round(self, clock: Clock) -> None:
        """Time one more round."""
        self.samples_ms.append(1e3 * self.seconds(clock))
        self.result.times[self.name] = Timing.of(self.samples_ms)


def time_in_turn(
    runners: list[tuple[Result, Runner]], passes: tuple[str, ...], rounds: int, clock: Clock, say: Callable[[str], object]
) -> None:
    """Time each pass of each runner once a round, so that a drifting clock affects all.

    Args:
        runners: the verified ones, each with its result. If only the forward is right, only the forward is timed.
        passes: names of passes.
        rounds: how many.
        clock: measures the calls.
        say: called with each step in words.
    """
    timed: list[_Pass] = []

    def attempt(result: Result, step: Callable[[], object]) -> None:
        if result.status not in ("ok", "partial"):
            return
        try:
            step()
        except Exception as error:  # such as memory that the others have filled since the first call
            result.status, result.reason, result.times = status(error), one_line(error), {}

    for result, runner in runners:
        say(f"{result.name}, warm-up")
        attempt(result, runner.rotate)
        for name in passes if result.status == "ok" else ("forward",):
            timed.append(_Pass(result, runner, name))
            attempt(result, functools.partial(timed[-1].warm_up, clock))
    for number in range(rounds):
        say(f"round {number + 1} of {rounds}")
        for one in timed:
            attempt(one.result, functools.partial(one.add_round, clock))
