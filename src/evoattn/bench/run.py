"""Run a benchmark: verify every contender on every problem, then time them in interleaved rounds."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from evoattn.bench import attentions
from evoattn.bench.clock import Clock
from evoattn.bench.contender import Contender, LeftOutError, Runner, UntimedError, check
from evoattn.bench.memory import peak_bytes, release, too_much
from evoattn.bench.peers import backend_peer
from evoattn.bench.record import Problem, Record, Result, Timing
from evoattn.workloads import Workload

_HOST_CALLS = 7
_HOST_S = 0.5
"""Calls that measure the host's time, or three if all of them would take longer than this."""

Say = Callable[[str], object]
"""Called with each step in words."""


@dataclasses.dataclass(frozen=True)
class BenchPlan:
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
    plan: BenchPlan,
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
                problem = Problem(workload, dtype, None)
                words = f"{workload.name}, {dtype}"
                _measure(plan, problem, device, clock, lambda what, words=words: say(len(record.problems), f"{words}: {what}"))  # type: ignore[misc]
                record.problems.append(problem)
                after_problem(record)
        record.finished = "complete"
    except KeyboardInterrupt:
        pass
    return record


def _measure(plan: BenchPlan, problem: Problem, device: torch.device, clock: Clock, say: Say) -> None:
    """Verify and time all contenders on one problem. Without memory for it, the results have the reason."""
    release(device)
    workload, dtype = problem.workload, getattr(torch, problem.dtype)
    say("float64 truth")
    try:
        if reason := attentions.too_large(workload, dtype, device):
            raise LeftOutError(reason)
        inputs = attentions.inputs_of(workload, dtype, device)
        expected = attentions.truth(inputs)
    except Exception as error:
        if not isinstance(error, LeftOutError) and not out_of_memory(error):
            raise
        reason = str(error) if isinstance(error, LeftOutError) else "the inputs and their float64 truth do not fit into memory"
        names = [backend_peer(backend).name for backend in plan.backends]
        problem.results = [Result(name, LeftOutError.status, reason) for name in (*names, *plan.peers)]
        return
    problem.bytes = attentions.io_bytes(inputs)
    contenders = attentions.contenders(inputs, plan.backends, plan.peers, backward=plan.passes != ("forward",))
    if any(contender.compiles for contender, _ in contenders):
        torch._dynamo.reset()
    runners: list[tuple[Result, Runner]] = []
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
    dtype, device, runner = getattr(torch, problem.dtype), inputs.do.device, None
    scores = int(contender.score_copies * problem.workload.scores * dtype.itemsize)
    try:
        if reason := too_much(scores, device, " of scores"):
            raise LeftOutError(f"would hold {reason}")
        start = time.perf_counter()
        runner = Runner(contender, inputs, scores)
        result.errors = runner.output_error(expected)
        check(result.errors, dtype, roundings)
        if passes != ("forward",):
            _verify_gradients(runner, result, expected, dtype, passes, roundings)
        result.first_call_s = round(time.perf_counter() - start, 3)
        if result.status == "ok":
            result.peak_bytes = peak_bytes(runner.forward if passes == ("forward",) else runner.both, device)
        return runner
    except Exception as error:  # whatever a peer raises is its reason, and the run goes on
        result.status, result.reason = why_untimed(error)
    del runner
    release(device)
    return None


def _verify_gradients(
    runner: Runner, result: Result, expected: dict[str, Tensor], dtype: torch.dtype, passes: tuple[str, ...], roundings: int
) -> None:
    """Note the errors of all gradients. If they are wrong or missing, the forward alone is timed, where it is wanted."""
    try:
        errors = runner.gradient_errors(expected)
        result.errors |= errors
        check(errors, dtype, roundings)
    except Exception as error:
        if "forward" not in passes:
            raise
        result.status, result.reason = "partial", f"backward: {why_untimed(error)[1]}"


@dataclasses.dataclass
class _Pass:
    """A pass of a runner, to be timed `count` calls at a time. The result gets the time, or the reason why there is none."""

    result: Result
    runner: Runner
    name: str
    count: int = 1
    samples_ms: tuple[float, ...] = ()

    def seconds(self, clock: Clock) -> float:
        """Mean seconds of one call."""
        self.runner.prepare(self.name, clock.lead + self.count)
        return clock.calls(getattr(self.runner, self.name), self.count) / self.count

    def warm_up(self, clock: Clock) -> None:
        """Choose the calls of a round by two calls, and measure the host's time."""
        self.runner.rotate()
        seconds, most = min(self.seconds(clock) for _ in range(2)), self.runner.most_calls(self.name)
        calls = min(_HOST_CALLS if _HOST_CALLS * seconds < _HOST_S else 3, most)
        self.runner.prepare(self.name, calls)
        host = clock.host_s(getattr(self.runner, self.name), calls)
        if host is not None:
            self.result.host_us[self.name] = round(1e6 * host, 1)
        self.count = clock.calls_in_a_round(seconds, most - clock.lead)

    def add_round(self, clock: Clock) -> None:
        """Time one more round."""
        self.samples_ms += (1e3 * self.seconds(clock),)
        self.result.times[self.name] = Timing(self.samples_ms)

    def attempt(self, step: Callable[[_Pass, Clock], None], clock: Clock) -> None:
        """Take a step, unless one failed before."""
        try:
            if self.result.status in ("ok", "partial"):
                step(self, clock)
        except Exception as error:  # such as memory that the others have filled since the first call
            (self.result.status, self.result.reason), self.result.times = why_untimed(error), {}


def time_in_turn(runners: list[tuple[Result, Runner]], passes: tuple[str, ...], rounds: int, clock: Clock, say: Say) -> None:
    """Time each pass of each runner once a round, so that a drifting clock affects all.

    Args:
        runners: the verified ones, each with its result. If only the forward is right, only the forward is timed.
        passes: names of passes.
        rounds: how many.
        clock: measures the calls.
        say: called with each step in words.
    """
    timed = [
        _Pass(result, runner, name)
        for result, runner in runners
        for name in (passes if result.status == "ok" else ("forward",))
    ]
    for one in timed:
        say(f"{one.result.name}, warm-up")
        one.attempt(_Pass.warm_up, clock)
    for number in range(rounds):
        say(f"round {number + 1} of {rounds}")
        for one in timed:
            one.attempt(_Pass.add_round, clock)


def out_of_memory(error: BaseException) -> bool:
    """On a CPU torch raises a plain RuntimeError, with one text on Linux and another elsewhere."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    texts = ("can't allocate memory", "not enough memory")
    return isinstance(error, RuntimeError) and any(text in str(error) for text in texts)


def why_untimed(error: Exception) -> tuple[str, str]:
    """The status of a contender that raised, and the reason in one line, short enough for a table."""
    if out_of_memory(error):
        return "failed", "out of memory"
    if isinstance(error, ModuleNotFoundError):
        return "absent", f"{(error.name or 'it').split('.')[0]} is not installed"
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    if isinstance(error, UntimedError):
        status, text = error.status, line
    else:
        status = "absent" if isinstance(error, ImportError) else "failed"
        text = f"{type(error).__name__}: {line}" if line else repr(error)
    return status, text if len(text) <= 200 else text[:197] + "..."
