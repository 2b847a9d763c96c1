"""How passes are timed: in interleaved rounds, so that a clock that drifts drifts for all, and as CUDA graphs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from evoattn.bench.budget import Budget
from evoattn.bench.clock import Clock
from evoattn.bench.contender import Runner, one_line, status
from evoattn.bench.record import Result, Timing

__all__ = ["captured", "milliseconds", "time_graphs", "time_in_turn"]

_HOST_CALLS = 7
_HOST_S = 0.5
"""Calls that the host's time is measured by: so many, or three if they take longer than this together."""

_MOST_TIMES_FORWARD = 4
"""So many times as long as a forward may a call of another pass take."""


@dataclasses.dataclass
class _Row:
    """A contender's pass, to be timed `count` calls at a time.

    Args:
        result: gets the time.
        runner: calls the pass.
        name: of the pass.
        most: calls in a row.
        count: calls of a round.
    """

    result: Result
    runner: Runner
    name: str
    most: int
    count: int = 1

    def seconds(self, clock: Clock) -> float:
        """Of one call, in the mean of `count`."""
        self.runner.prepare(self.name, clock.lead + self.count)
        return clock.calls(self.runner.call(self.name), self.count) / self.count

    def warm_up(self, clock: Clock, longest_s: float) -> float | None:
        """Call it twice, to know how often it fits a round, and measure the host's time. The seconds, if they are too many."""
        seconds = min(self.seconds(clock) for _ in range(2))
        if seconds > longest_s:
            return seconds
        calls = min(_HOST_CALLS if _HOST_CALLS * seconds < _HOST_S else 3, self.most)
        self.runner.prepare(self.name, calls)
        host = clock.host_s(self.runner.call(self.name), calls)
        if host is not None:
            self.result.host_us[self.name] = round(1e6 * host, 1)
        self.count = calls_in_a_round(clock, seconds, self.most - clock.lead)
        return None


def calls_in_a_round(clock: Clock, seconds: float, most: int = 200) -> int:
    """The number of calls of so many seconds in a round."""
    return max(1, min(most, round(clock.target_s / max(seconds, 1e-7))))


def milliseconds(call: Callable[[int], object], clock: Clock, rounds: int) -> list[float]:
    """Of a call alone, for each round."""
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
    """Give the results of these runners their times: each pass once a round, at least two rounds, more while there is time.

    Args:
        runners: what is right, each with its result. One that is partly right is timed forward alone.
        passes: which.
        rounds: the most.
        scores: of the problem.
        clock: what measures.
        budget: which has begun with the problem.
        say: told what is being done.

    Returns:
        Whether a larger budget would have measured more.
    """
    rows: list[_Row] = []
    cut = False
    for result, runner in runners:
        say(f"{result.name}, warm-up")
        try:
            runner.rotate()
            for name in passes if result.status == "ok" else ("forward",):
                row = _Row(result, runner, name, runner.most_calls(name, scores))
                times = 1 if name == "forward" else _MOST_TIMES_FORWARD
                if (seconds := row.warm_up(clock, budget.longest_s * times)) is None:
                    rows.append(row)
                else:
                    result.without_time("partial", f"{name}: {seconds:.1f} s a call, not repeated")
                    cut |= budget.would_measure(seconds / times)
        except Exception as error:
            result.status, result.reason = status(error), one_line(error)
    samples: dict[tuple[str, str], list[float]] = {}
    budget.begin_rounds()
    for number in range(rounds):
        if number >= 2 and budget.enough():
            break
        say(f"round {number + 1} of {rounds}")
        for row in rows:
            if row.result.status in ("ok", "partial"):
                _time(row, clock, samples.setdefault((row.result.name, row.name), []))
    return cut


def _time(row: _Row, clock: Clock, samples: list[float]) -> None:
    try:
        samples.append(1e3 * row.seconds(clock))
    except Exception as error:  # such as memory that the others have filled since the warm-up
        row.result.status, row.result.reason, row.result.times = status(error), f"{row.name}: {one_line(error)}", {}
    else:
        row.result.times[row.name] = Timing.of(samples)


def time_graphs(result: Result, runner: Runner, passes: tuple[str, ...], rounds: int, clock: Clock) -> None:
    """Give a result the times of its passes as CUDA graphs; a capture that fails is noted, and the eager times stay."""
    for name in passes:
        try:
            replay, kept = captured(runner.call(name))
            result.times[f"graph_{name}"] = Timing.of(milliseconds(replay, clock, rounds))
            del replay, kept
        except Exception as error:
            result.without_time(result.status, f"graph of {name}: {one_line(error)}")
            torch.cuda.synchronize()


def captured(
    call: Callable[[int], object], *, warm_up: int = 2, mode: str = "global"
) -> tuple[Callable[[int], object], object]:
    """Record a call as a CUDA graph: what replays it, and what its output holds.

    Args:
        call: what is recorded.
        warm_up: calls that come first, on a stream of their own.
        mode: "thread_local" if other threads may use the device meanwhile, as NCCL's does.
    """
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for number in range(warm_up):
            call(number)
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=mode):
        kept = call(0)
    return lambda number: graph.replay(), kept
