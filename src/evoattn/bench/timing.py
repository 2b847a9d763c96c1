"""Time passes in interleaved rounds, so that a drifting clock affects all contenders, and as CUDA graphs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from evoattn.bench.budget import Budget
from evoattn.bench.clock import Clock
from evoattn.bench.contender import Runner, one_line, status
from evoattn.bench.record import Result, Timing

_HOST_CALLS = 7
_HOST_S = 0.5
"""Calls that measure the host's time, or three if all of them would take longer than this."""

_MOST_TIMES_FORWARD = 4
"""Limit of another pass, as a multiple of the limit of a forward."""


@dataclasses.dataclass
class _Timed:
    """A contender's pass, to be timed `count` calls at a time, at the most `most`. The result gets the time."""

    result: Result
    runner: Runner
    name: str
    most: int
    count: int = 1
    samples_ms: list[float] = dataclasses.field(default_factory=list)

    def seconds(self, clock: Clock) -> float:
        """Mean seconds of one call."""
        self.runner.prepare(self.name, clock.lead + self.count)
        return clock.calls(getattr(self.runner, self.name), self.count) / self.count

    def warm_up(self, clock: Clock, longest_s: float) -> float | None:
        """Choose the calls of a round by two calls, and measure the host's time. Return the seconds if they are too many."""
        seconds = min(self.seconds(clock) for _ in range(2))
        if seconds > longest_s:
            return seconds
        calls = min(_HOST_CALLS if _HOST_CALLS * seconds < _HOST_S else 3, self.most)
        self.runner.prepare(self.name, calls)
        host = clock.host_s(getattr(self.runner, self.name), calls)
        if host is not None:
            self.result.host_us[self.name] = round(1e6 * host, 1)
        self.count = calls_in_a_round(clock, seconds, self.most - clock.lead)
        return None

    def add_round(self, clock: Clock) -> None:
        """Time one more round."""
        result = self.result
        try:
            self.samples_ms.append(1e3 * self.seconds(clock))
            result.times[self.name] = Timing.of(self.samples_ms)
        except Exception as error:  # such as memory that the others have filled since the warm-up
            result.status, result.reason, result.times = status(error), f"{self.name}: {one_line(error)}", {}


def calls_in_a_round(clock: Clock, seconds: float, most: int = 200) -> int:
    """The number of calls of so many seconds in a round."""
    return max(1, min(most, round(clock.target_s / max(seconds, 1e-7))))


def milliseconds(call: Callable[[int], object], clock: Clock, rounds: int) -> list[float]:
    """Milliseconds of a call, for each round."""
    count = calls_in_a_round(clock, clock.calls(call, 2) / 2)
    return [1e3 * clock.calls(call, count) / count for _ in range(rounds)]


def time_in_turn(
    runners: list[tuple[Result, Runner]],
    passes: tuple[str, ...],
    rounds: int,
    scores: int,
    clock: Clock,
    budget: Budget,
    say: Callable[[str], None],
) -> bool:
    """Time these runners: each pass once a round, in at least two rounds, and in more while there is time.

    Args:
        runners: the verified ones, each with its result. If only the forward is right, only the forward is timed.
        passes: names of passes.
        rounds: the most rounds.
        scores: of the problem.
        clock: measures the calls.
        budget: has begun with the problem.
        say: called with each step in words.

    Returns:
        True if a larger budget would have measured more.
    """
    all_timed: list[_Timed] = []
    cut = False
    for result, runner in runners:
        say(f"{result.name}, warm-up")
        try:
            runner.rotate()
            for name in passes if result.status == "ok" else ("forward",):
                timed = _Timed(result, runner, name, runner.most_calls(name, scores))
                times = 1 if name == "forward" else _MOST_TIMES_FORWARD
                if (seconds := timed.warm_up(clock, budget.longest_s * times)) is None:
                    all_timed.append(timed)
                else:
                    result.mark_untimed("partial", f"{name}: {seconds:.1f} s a call, not repeated")
                    cut |= budget.would_measure(seconds / times)
        except Exception as error:
            result.status, result.reason = status(error), one_line(error)
    budget.begin_rounds()
    for number in range(rounds):
        if number >= 2 and budget.enough():
            break
        say(f"round {number + 1} of {rounds}")
        for timed in all_timed:
            if timed.result.status in ("ok", "partial"):
                timed.add_round(clock)
    return cut


def time_graphs(result: Result, runner: Runner, passes: tuple[str, ...], rounds: int, clock: Clock) -> None:
    """Time passes as CUDA graphs. A capture that fails is noted in the result, and the eager times stay."""
    for name in passes:
        try:
            replay, output = captured(getattr(runner, name))
            result.times[f"graph_{name}"] = Timing.of(milliseconds(replay, clock, rounds))
            del replay, output
        except Exception as error:
            result.mark_untimed(result.status, f"graph of {name}: {one_line(error)}")
            torch.cuda.synchronize()


def captured(
    call: Callable[[int], object], *, warm_up: int = 2, mode: str = "global"
) -> tuple[Callable[[int], object], object]:
    """Record a call as a CUDA graph. Return a function that replays it, and its output.

    Args:
        call: what is recorded.
        warm_up: calls that come first, on a stream of their own.
        mode: "thread_local" if other threads may use the device meanwhile, as NCCL's does.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for number in range(warm_up):
            call(number)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=mode):
        output = call(0)
    return lambda number: graph.replay(), output
