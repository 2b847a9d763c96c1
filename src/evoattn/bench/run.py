"""Run a benchmark: verify every contender on every problem, then time them in interleaved rounds, within a budget."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from evoattn.bench import attentions, layers, machine
from evoattn.bench.budget import Budget
from evoattn.bench.clock import Clock, TookTooLong
from evoattn.bench.contender import Contender, Runner, one_line, out_of_memory, status, worst
from evoattn.bench.memory import peak_bytes, release, too_much
from evoattn.bench.plan import Plan, remaining, store
from evoattn.bench.record import Problem, Record, Result
from evoattn.bench.timing import time_graphs, time_in_turn
from evoattn.workloads import Workload

_SURE_SHARE = 0.25
"""Share of the truth's time limit after which its total time can be estimated well enough."""


class Kind(Protocol):
    """A kind of problem, which is a module: `attentions` or `layers`."""

    PASSES: tuple[str, ...]
    ROUNDINGS: int
    GRAPHS: bool

    def names(self, plan: Plan) -> list[str]: ...
    def too_large(self, workload: Workload, dtype: torch.dtype, device: torch.device) -> str | None: ...
    def inputs_of(self, workload: Workload, dtype: torch.dtype, device: torch.device) -> Any: ...
    def io_bytes(self, inputs: Any) -> int: ...
    def scores_of(self, inputs: Any) -> int: ...
    def truth(self, inputs: Any, between: Callable[[float], None]) -> dict[str, Tensor]: ...
    def contenders(self, plan: Plan, inputs: Any) -> list[tuple[Contender, Result]]: ...


def run(
    plan: Plan,
    record: Record,
    device: torch.device,
    clock: Clock,
    progress: Callable[[int, int, str], None],
    after_problem: Callable[[Record], object] = lambda record: None,
) -> Record:
    """Measure the problems of a plan that the record lacks or that were cut short. Return the record.

    `progress` is called before each step with the number of the problem, from 1, of all problems, and the step in words.
    Ctrl-C ends the run and keeps what is done: `record.finished` is then "interrupted". If the budget ends, every problem that
    was not begun is in the record with the reason.
    """
    problems = remaining(plan, record)
    budget = Budget(plan.budget_s, len(problems), clock)
    record.finished = "interrupted"  # until it is not: what is written after a problem may be all there will be
    start, before = clock.now(), record.seconds or 0.0
    current: _ProblemRun | None = None
    try:
        for number, (workload, dtype) in enumerate(problems, start=1):

            def say(what: str, number: int = number, name: str = f"{workload.name}, {dtype}") -> None:
                progress(number, len(problems), f"{name}: {what}")

            current = _ProblemRun(plan, Problem(workload, dtype, None), device, clock, budget, say)
            current.run()
            store(current.problem, record, plan)
            record.seconds = round(before + clock.now() - start, 1)
            after_problem(record)
        record.finished = "out of time" if any(problem.cut for problem in record.problems) else "complete"
    except KeyboardInterrupt:
        if current is not None and current.problem.seconds is None:
            store(_mark_interrupted(current.problem), record, plan)
    record.seconds = round(before + clock.now() - start, 1)
    return record


class _SkippedError(Exception):
    """A problem that is not measured; the message is the reason."""


class _ProblemRun:
    """One problem: its contenders are verified, then timed."""

    def __init__(
        self, plan: Plan, problem: Problem, device: torch.device, clock: Clock, budget: Budget, say: Callable[[str], None]
    ) -> None:
        self.plan, self.problem, self.device, self.clock, self.budget, self.say = plan, problem, device, clock, budget, say
        self.kind: Kind = layers if problem.workload.layer else attentions
        self.dtype: torch.dtype = getattr(torch, problem.dtype)
        self.passes = tuple(name for name in self.kind.PASSES if name in plan.passes)

    def run(self) -> None:
        """Measure within this problem's share of the remaining budget."""
        begun = self.clock.now()
        try:
            if not self.budget.begin():
                self.problem.cut = True
                raise _SkippedError(self.budget.over)
            self._measure()
        except _SkippedError as skipped:
            self._skip(str(skipped))
        except Exception as error:
            if not out_of_memory(error):
                raise
            self._skip("the inputs and their float64 truth do not fit into memory")
        release(self.device)
        self.problem.seconds = round(self.clock.now() - begun, 1)

    def _skip(self, reason: str) -> None:
        self.problem.results = [Result(name, "left out", reason) for name in self.kind.names(self.plan)]

    def _mark_incomplete(self, seconds: float = 0.0) -> None:
        """Note that a larger budget would have measured more, unless a call of so many seconds is too long for any budget."""
        if self.budget.would_measure(seconds):
            self.problem.cut = True

    def _measure(self) -> None:
        self.say("float64 truth")
        reason = self.kind.too_large(self.problem.workload, self.dtype, self.device)
        if reason:
            raise _SkippedError(reason)
        inputs = self.kind.inputs_of(self.problem.workload, self.dtype, self.device)
        self.problem.bytes, self.scores = self.kind.io_bytes(inputs), self.kind.scores_of(inputs)
        contenders = self.kind.contenders(self.plan, inputs)
        if any(contender.compiles for contender, _ in contenders):
            torch._dynamo.reset()
        expected = self.kind.truth(inputs, self._truth_check())
        runners: list[tuple[Result, Runner]] = []
        for contender, result in contenders:
            self.say(contender.name)
            self.problem.results.append(result)
            begun = self.clock.now()
            runner = self._verified(contender, inputs, expected, result)
            if runner is not None:
                runners.append((result, runner))
            if result.is_evoattn:  # evoattn's compiling is not its peers' loss
                self.budget.add(self.clock.now() - begun)
        del expected
        release(self.device)
        if time_in_turn(runners, self.passes, self.plan.rounds, self.scores, self.clock, self.budget, self.say):
            self.problem.cut = True
        for result, runner in runners if self.kind.GRAPHS and self.device.type == "cuda" else ():
            self.say(f"{result.name}, CUDA graphs")  # one after the other: all do not fit into memory together
            time_graphs(result, runner, self.passes, self.plan.rounds, self.clock)
            release(self.device)

    def _truth_check(self) -> Callable[[float], None]:
        """Return a function that ends a float64 truth as soon as it surely exceeds the limit of a peer's first calls."""
        begun, limit = self.clock.now(), self.budget.first_calls()

        def check(done: float) -> None:
            if limit is None:
                return
            machine.synchronize(self.device)  # the device may still be computing
            passed = self.clock.now() - begun
            if passed > _SURE_SHARE * limit and passed / done > limit:
                self._mark_incomplete()
                raise _SkippedError(
                    f"its float64 truth takes about {passed / done:.0f} s, and the budget of {self.plan.budget_s:g} s had "
                    f"{limit:.0f} s for it: a larger --budget measures it"
                )

        return check

    def _verified(self, contender: Contender, inputs: Any, expected: dict[str, Tensor], result: Result) -> Runner | None:
        """Return a runner if its output is right. The result tells what else is wrong."""
        reason = self._reason_to_skip(contender)
        if reason:
            result.mark_untimed("left out", reason)
            return None
        begun, runner = self.clock.now(), None
        try:
            with self.clock.limit(None if result.is_evoattn else self.budget.first_calls()):
                runner = self._first_calls(contender, inputs, expected, result)
        except TookTooLong:
            self._mark_incomplete()
            seconds = self.clock.now() - begun
            self.budget.ended_s[contender.name] = seconds
            result.status, result.reason = "left out", f"its first calls were ended after {seconds:.0f} s of the budget"
        except Exception as error:  # whatever a peer raises is its reason, and the run goes on
            result.status, result.reason = status(error), one_line(error)
        if runner is None or self.kind.GRAPHS:
            release(self.device)
        return runner

    def _first_calls(self, contender: Contender, inputs: Any, expected: dict[str, Tensor], result: Result) -> Runner | None:
        if not contender.biased:
            inputs = attentions.without(inputs, contender.leaves_out)
        start = self.clock.now()
        runner = Runner(contender, inputs)
        if not contender.biased:  # only now: the easier problem's truth takes as long as another, and the peer may be absent
            begun = self.clock.now()
            expected = attentions.truth(attentions.first_part(inputs) if contender.leaves_out == "biases" else inputs)
            start += self.clock.now() - begun
        result.errors = runner.forward_error(expected)
        wrong = worst(result.errors, self.dtype, self.kind.ROUNDINGS)
        if wrong:
            result.mark_untimed("wrong", wrong)
            return None
        if seconds := self._too_long(runner):
            self._mark_incomplete(seconds)
            result.mark_untimed("left out", f"a forward takes {seconds:.1f} s, too long for this problem's share of time")
            return None
        if self.passes != ("forward",):
            try:
                gradients = runner.gradient_errors(expected)
                wrong = worst(gradients, self.dtype, self.kind.ROUNDINGS)
                result.errors |= gradients
            except Exception as error:
                wrong = one_line(error)
        if wrong:
            result.mark_untimed("partial" if "forward" in self.passes else "wrong", f"backward: {wrong}")
        seconds = self.clock.now() - start
        result.first_call_s = round(seconds, 3)
        if contender.compiles:
            self.budget.compiled_s[contender.name] = seconds
        if not wrong:
            result.peak_bytes = peak_bytes(runner.forward if self.passes == ("forward",) else runner.both, self.device)
        return runner if result.status != "wrong" else None

    def _too_long(self, runner: Runner) -> float | None:
        """Return the seconds of a forward if the budget does not allow them."""
        seconds = self.clock.calls(runner.forward, 1)
        if seconds > self.budget.longest_s:  # once more: a machine that had something else to do takes long too
            seconds = min(seconds, self.clock.calls(runner.forward, 1))
        return seconds if seconds > self.budget.longest_s else None

    def _reason_to_skip(self, contender: Contender) -> str | None:
        reason = too_much(int(contender.score_copies * self.scores * self.dtype.itemsize), self.device, " of scores")
        if reason:
            return f"would hold {reason}"
        reason = self.budget.reason_to_skip(contender, self.device.type)
        if reason:
            self._mark_incomplete()
        return reason


def _mark_interrupted(problem: Problem) -> Problem:
    """Complete an interrupted problem: contenders without a time get the reason."""
    problem.cut = True
    for result in problem.results:
        if result.status in ("ok", "partial") and not result.times:
            result.status, result.reason = "left out", "interrupted before it was timed"
    return problem
