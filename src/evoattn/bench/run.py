"""The benchmark's course: every contender on every problem, verified first, timed in interleaved rounds, within a budget."""

from __future__ import annotations

import dataclasses
import functools
import gc
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

import evoattn
from evoattn.bench import correctness
from evoattn.bench.budget import Budget
from evoattn.bench.clock import Clock, TookTooLong
from evoattn.bench.layer_run import measure_layer
from evoattn.bench.layers import WAYS
from evoattn.bench.memory import peak_bytes, too_much
from evoattn.bench.peers import PEERS, Peer, backend_peer
from evoattn.bench.plan import Plan, left, put
from evoattn.bench.reasons import one_line, out_of_memory, status
from evoattn.bench.record import Problem, Record, Result, Timing
from evoattn.bench.runner import Runner, copies_for
from evoattn.testing import Inputs
from evoattn.workloads import Workload

__all__ = ["Progress", "contenders", "run"]

_SURE_SHARE = 0.25
"""Of the time that the float64 truth may take: after so much of it, what it will take in all is known well enough."""

_HOST_CALLS = 7
_HOST_S = 0.5
"""Calls that the host's time is measured by: so many, or three where they take longer than this together."""


class Progress(Protocol):
    """Told before each step what is about to be done."""

    def __call__(self, problem: int, problems: int, what: str) -> None: ...


def contenders(plan: Plan, inputs: Inputs) -> list[tuple[Peer, Result]]:
    """What runs on a problem, each with an empty result; a backend that `auto` takes is not measured twice."""
    q, k, v, pair_bias = (
        None if x is None else x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v, inputs.pair_bias)
    )
    taken = evoattn.explain(q, k, v, mask=inputs.mask, pair_bias=pair_bias)  # type: ignore[arg-type]
    of_backward = taken.backward_backend if set(plan.passes) != {"forward"} else None
    found: list[tuple[Peer, Result]] = []
    for backend in plan.backends:
        if backend == "auto":
            result = Result("evoattn", backend=taken.backend or "none", backward_backend=of_backward or "")
            found.insert(0, (backend_peer("auto", "evoattn"), result))
        elif "auto" not in plan.backends or backend != taken.backend or of_backward is not None:
            name = f"evoattn/{backend}"
            found.append((backend_peer(backend, name), Result(name, backend=backend)))
    return [*found, *((PEERS[name], Result(name)) for name in plan.peers)]


def run(
    plan: Plan,
    record: Record,
    device: torch.device,
    clock: Clock,
    progress: Progress,
    after_problem: Callable[[Record], None] = lambda record: None,
) -> Record:
    """Measure of a plan what the record does not have, or was cut short, into the record, and return it.

    Ctrl-C ends the run and keeps what is done: `record.finished` is then "interrupted". Where the budget ends, every problem
    that was not begun stands in the record with the reason.
    """
    problems = left(plan, record)
    course = _Course(plan, problems, device, clock, progress)
    record.finished = "interrupted"  # until it is not: what is written after a problem may be all there will be
    start, before = clock.now(), record.seconds or 0.0
    try:
        for workload, dtype in problems:
            put(course.problem(workload, dtype), record, plan)
            record.seconds = round(before + clock.now() - start, 1)
            after_problem(record)
        record.finished = "out of time" if any(problem.cut for problem in record.problems) else "complete"
    except KeyboardInterrupt:
        if course.current is not None:
            put(_as_far_as_it_came(course.current), record, plan)
    record.seconds = round(before + clock.now() - start, 1)
    return record


@dataclasses.dataclass
class _Row:
    """A contender's pass, to be timed `count` calls at a time."""

    result: Result
    runner: Runner
    name: str
    call: Callable[[int], object]
    count: int = 1

    def seconds(self, clock: Clock) -> float:
        """Of one call, in the mean of `count`."""
        self.runner.prepare(self.name, clock.lead + self.count)
        return clock.calls(self.call, self.count) / self.count


class _LeftOutError(Exception):
    """A problem that is not measured; the message is the reason."""


class _Course:
    def __init__(
        self, plan: Plan, problems: list[tuple[Workload, str]], device: torch.device, clock: Clock, progress: Progress
    ) -> None:
        self.plan, self.device, self.clock, self.progress = plan, device, clock, progress
        self.problems, self.number = len(problems), 0
        self.budget = Budget(plan.budget_s, len(problems), clock)
        self.current: Problem | None = None

    def problem(self, workload: Workload, dtype_name: str) -> Problem:
        """One problem, within its share of what is left of the budget."""
        self.number += 1
        begun = self.clock.now()
        self.current = problem = Problem(workload, dtype_name, None)
        if not self.budget.begin():
            problem.cut = True
            self._leave_out(problem, self.budget.over)
            self.current = None
            return problem
        try:
            self._measure(problem)
        except _LeftOutError as left_out:
            self._leave_out(problem, str(left_out))
        except Exception as error:
            if not out_of_memory(error):
                raise
            self._leave_out(problem, "the inputs and their float64 truth do not fit into memory")
        self._release()
        self.current = None
        problem.seconds = round(self.clock.now() - begun, 1)
        return problem

    def _leave_out(self, problem: Problem, reason: str) -> None:
        if problem.workload.layer:
            problem.results = [Result(way.name, "left out", reason) for way in WAYS]
            return
        names = [*("evoattn" if name == "auto" else f"evoattn/{name}" for name in self.plan.backends), *self.plan.peers]
        problem.results = [Result(name, "left out", reason) for name in names]

    def _cut_short(self, seconds: float = 0.0) -> None:
        """Note that a larger budget would have measured more, unless a call of so many seconds is too long for any."""
        if self.current is not None and self.budget.would_measure(seconds):
            self.current.cut = True

    def _say(self, problem: Problem, what: str) -> None:
        self.progress(self.number, self.problems, f"{problem.workload.name}, {problem.dtype}: {what}")

    def _measure(self, problem: Problem) -> None:
        if problem.workload.layer:
            say = functools.partial(self._say, problem)
            measure_layer(problem, self.plan, self.device, self.clock, self.budget, say)
            return
        if any(PEERS[name].compiles for name in self.plan.peers):
            torch._dynamo.reset()
        self._say(problem, "float64 truth")
        dtype = getattr(torch, problem.dtype)
        reason = correctness.too_large(problem.workload, dtype, self.device)
        if reason:
            raise _LeftOutError(reason)
        inputs = correctness.inputs_of(problem.workload, dtype, self.device)
        problem.bytes = correctness.io_bytes(inputs)
        expected = correctness.truth(inputs, self._truth_check())
        runners: list[tuple[Result, Runner]] = []
        for peer, result in contenders(self.plan, inputs):
            self._say(problem, peer.name)
            problem.results.append(result)
            begun = self.clock.now()
            runner = self._verified(peer, inputs, expected, result)
            if runner is not None:
                runners.append((result, runner))
            if result.backend:  # evoattn's compiling is not its peers' loss
                self.budget.add(self.clock.now() - begun)
        del expected
        self._release()
        self._time(problem, inputs, runners)

    def _truth_check(self) -> Callable[[float], None]:
        """Ends a float64 truth that takes more than what a peer's first calls may, as soon as that is sure."""
        begun, limit = self.clock.now(), self.budget.first_calls()

        def check(done: float) -> None:
            if limit is None:
                return
            if self.device.type == "cuda":  # what was asked of it is not done yet
                torch.cuda.synchronize(self.device)
            passed = self.clock.now() - begun
            if passed > _SURE_SHARE * limit and passed / done > limit:
                self._cut_short()
                raise _LeftOutError(
                    f"its float64 truth takes about {passed / done:.0f} s, and the budget of {self.plan.budget_s:g} s had "
                    f"{limit:.0f} s for it: a larger --budget measures it"
                )

        return check

    def _release(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _verified(self, peer: Peer, inputs: Inputs, expected: dict[str, Tensor], result: Result) -> Runner | None:
        """A runner whose output, at least, is right; the result says what else is not."""
        reason = self._not_begun(peer, inputs)
        if reason:
            result.status, result.reason = "left out", reason
            return None
        begun, limit = self.clock.now(), None if result.backend else self.budget.first_calls()
        try:
            with self.clock.limit(limit):
                runner = self._first_calls(peer, inputs, expected, result)
        except TookTooLong:
            self._cut_short()
            seconds = self.clock.now() - begun
            self.budget.ended(peer.name, seconds)
            result.status, result.reason = "left out", f"its first calls were ended after {seconds:.0f} s of the budget"
            runner = None
        except Exception as error:  # whatever a peer raises is its reason, and the run goes on
            result.status, result.reason = status(error), one_line(error)
            runner = None
        if runner is None:
            self._release()
        return runner

    def _first_calls(self, peer: Peer, inputs: Inputs, expected: dict[str, Tensor], result: Result) -> Runner | None:
        if peer.leaves_out == "biases":
            inputs = correctness.without_biases(inputs)
        elif peer.leaves_out == "mask":
            inputs = correctness.without_mask(inputs)
        start = self.clock.now()
        runner = Runner(peer, inputs)
        if not peer.biased:  # only now: the easier problem's truth takes as long as another, and the peer may be absent
            begun = self.clock.now()
            expected = correctness.truth(correctness.first_part(inputs) if peer.leaves_out == "biases" else inputs)
            start += self.clock.now() - begun
        dtype = inputs.q.dtype
        result.errors = runner.forward_error(expected)
        wrong = correctness.worst(result.errors, dtype)
        if wrong:
            result.status, result.reason = "wrong", wrong
            return None
        seconds = self.clock.calls(runner.forward, 1)
        if seconds > self.budget.longest_s:  # once more: a machine that had something else to do takes long too
            seconds = min(seconds, self.clock.calls(runner.forward, 1))
        if seconds > self.budget.longest_s:
            self._cut_short(seconds)
            result.status, result.reason = (
                "left out",
                f"a forward takes {seconds:.1f} s, too long for this problem's share of time",
            )
            return None
        if set(self.plan.passes) == {"forward"}:
            result.first_call_s = self._first_call(peer, start)
            result.peak_bytes = peak_bytes(lambda: runner.forward(0), self.device)
            return runner
        try:
            gradients = runner.gradient_errors(expected)
            wrong = correctness.worst(gradients, dtype)
            result.errors |= gradients
        except Exception as error:
            wrong = one_line(error)
        if wrong:
            result.status, result.reason = ("partial" if "forward" in self.plan.passes else "wrong"), f"backward: {wrong}"
        result.first_call_s = self._first_call(peer, start)
        result.peak_bytes = None if wrong else peak_bytes(lambda: runner.both(0), self.device)
        return runner if result.status != "wrong" else None

    def _first_call(self, peer: Peer, start: float) -> float:
        seconds = self.clock.now() - start
        if peer.compiles:
            self.budget.compiled(peer.name, seconds)
        return round(seconds, 3)

    def _not_begun(self, peer: Peer, inputs: Inputs) -> str | None:
        scores = inputs.case.h * inputs.k.shape[2] * inputs.do[..., 0, 0].numel()
        reason = too_much(int(peer.score_copies * scores * inputs.q.element_size()), self.device, " of scores")
        if reason:
            return f"would hold {reason}"
        reason = self.budget.not_begun(peer, self.device.type)
        if reason:
            self._cut_short()
        return reason

    def _time(self, problem: Problem, inputs: Inputs, runners: list[tuple[Result, Runner]]) -> None:
        """Interleaved rounds; at least two, and as many as asked for while the problem's share of the budget lasts."""
        rows: list[_Row] = []
        copies = copies_for(inputs)
        for result, runner in runners:
            self._say(problem, f"{result.name}, warm-up")
            try:
                rows += self._warm(result, runner, copies)
            except Exception as error:
                result.status, result.reason = status(error), one_line(error)
        samples: dict[tuple[str, str], list[float]] = {}
        self.budget.begin_rounds()
        for number in range(self.plan.rounds):
            if number >= 2 and self.budget.enough():
                break
            self._say(problem, f"round {number + 1} of {self.plan.rounds}")
            for row in rows:
                result, name = row.result, row.name
                if result.status == "failed":
                    continue
                try:
                    seconds = row.seconds(self.clock)
                except Exception as error:  # such as memory that the others have filled since the warm-up
                    result.status, result.reason, result.times = status(error), f"{name}: {one_line(error)}", {}
                    continue
                samples.setdefault((result.name, name), []).append(1e3 * seconds)
                result.times[name] = Timing.of(samples[result.name, name])

    def _warm(self, result: Result, runner: Runner, copies: int) -> list[_Row]:
        """Every pass once or twice, to know how often it fits a round; and its host time."""
        possible = ("forward",) if result.status == "partial" else self.plan.passes
        runner.rotate(1 if runner.peer.score_copies else copies)  # scores alone are larger than the cache
        rows = []
        for name, call in runner.passes().items():
            if name not in possible:
                continue
            row = _Row(result, runner, name, call)
            seconds = min(row.seconds(self.clock) for _ in range(2))
            if seconds > self.budget.longest_s * (1 if name == "forward" else 4):
                result.reason = f"{result.reason + '; ' if result.reason else ''}{name}: {seconds:.1f} s a call, not repeated"
                result.status = "partial"
                self._cut_short(seconds if name == "forward" else seconds / 4)
                continue
            calls = min(_HOST_CALLS if _HOST_CALLS * seconds < _HOST_S else 3, runner.most_calls)
            runner.prepare(name, calls)
            host = self.clock.host_s(call, calls)
            if host is not None:
                result.host_us[name] = round(1e6 * host, 1)
            row.count = max(1, min(runner.most_calls - self.clock.lead, round(self.clock.target_s / max(seconds, 1e-7))))
            rows.append(row)
        return rows


def _as_far_as_it_came(problem: Problem) -> Problem:
    """An interrupted problem: whoever has no time yet says why."""
    problem.cut = True
    for result in problem.results:
        if result.status in ("ok", "partial") and not result.times:
            result.status, result.reason = "left out", "interrupted before it was timed"
    return problem
