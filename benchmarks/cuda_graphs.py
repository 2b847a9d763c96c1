"""Calls as CUDA graphs, and the time of a call by a clock."""

from __future__ import annotations

from collections.abc import Callable

import torch

from evoattn.bench.clock import Clock
from evoattn.bench.contender import Runner
from evoattn.bench.record import Result, Timing
from evoattn.bench.run import why_untimed


def milliseconds(call: Callable[[int], object], clock: Clock, rounds: int) -> list[float]:
    """Milliseconds of a call, for each round."""
    count = clock.calls_in_a_round(clock.calls(call, 2) / 2)
    return [1e3 * clock.calls(call, count) / count for _ in range(rounds)]


def time_graphs(result: Result, runner: Runner, passes: tuple[str, ...], rounds: int, clock: Clock) -> None:
    """Time passes as CUDA graphs. A capture that fails is noted in the result, and the eager times stay."""
    for name in passes:
        try:
            replay, output = captured(getattr(runner, name))
            result.times[f"graph_{name}"] = Timing(tuple(milliseconds(replay, clock, rounds)))
            del replay, output
        except Exception as error:
            result.reason = "; ".join(filter(None, (result.reason, f"graph of {name}: {why_untimed(error)[1]}")))
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
