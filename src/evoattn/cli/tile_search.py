"""The search of `evoattn tune`. It tries neighbours of the best tiles so far, and verifies each before it is timed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from evoattn.backends import AUTO_ORDER
from evoattn.bench import attentions
from evoattn.bench.clock import Clock
from evoattn.bench.contender import Runner, check
from evoattn.bench.peers import backend_peer
from evoattn.bench.record import Result, Timing
from evoattn.bench.run import time_in_turn
from evoattn.core import tuned_tiles
from evoattn.core.config import Config
from evoattn.core.problem import NO_GRADIENTS, Problem
from evoattn.dispatch.lookup import refusals
from evoattn.testing import CaseInputs
from evoattn.workloads import Workload

_WORTH_A_STEP = 0.01
_WORTH_KEEPING = 0.03
"""Keep a result only if it gains 3%: the built-in tiles serve all lengths, a tuned one a few."""

_ROUNDS = 3
_LAST_ROUNDS = 9
_RANGES = {"num_warps": (1, 16), "num_stages": (1, 5), "block_q": (16, 256), "block_k": (16, 128)}
_RANGES |= {"score_bytes": (1 << 18, 1 << 28)}
"""The least and the most of each field."""


@dataclasses.dataclass(frozen=True)
class Tuned:
    """The result of a search for one direction of one problem.

    Args:
        workload, dtype, backend, direction: of what.
        key: of the user's table.
        config: better than the built-in choice, or None.
        before_ms, after_ms: the built-in choice and the best found, measured in turn.
        tried: how many configs were tried.
        cut: whether the time was over before every neighbour had been tried.
    """

    workload: str
    dtype: str
    backend: str
    direction: str
    key: str
    config: Config | None
    before_ms: float
    after_ms: float
    tried: int
    cut: bool

    @property
    def gain(self) -> float:
        """The built-in choice's time over that of the best found."""
        return self.before_ms / self.after_ms

    def entry(self) -> dict[str, object]:
        """The entry of the user's table."""
        config = {} if self.config is None else self.config.given()
        numbers = {"before_ms": round(self.before_ms, 5), "after_ms": round(self.after_ms, 5)}
        return {"config": config, "workload": self.workload, **numbers}


def neighbours(config: Config) -> Iterator[Config]:
    """Configs one step away: half or twice one field, or one pipeline stage more or less.

    Of a plan in plain torch the budget of scores is the only field: its block sizes follow from it.
    """
    fields = config.given()
    if "score_bytes" in fields:
        fields = {"score_bytes": fields["score_bytes"]}
    for name, value in fields.items():
        least, most = _RANGES[name]
        steps = (value + 1, value - 1) if name == "num_stages" else (value * 2, value // 2)
        yield from (Config(**{**fields, name: step}) for step in steps if least <= step <= most)


def tune(
    workload: Workload, dtype: str, device: torch.device, clock: Clock, end: float, say: Callable[[str], None]
) -> Iterator[Tuned]:
    """Search every direction of a workload until the clock says `end`, without the user's table.

    Args:
        workload, dtype, device: the problem.
        clock: what measures.
        end: when to stop, on the clock's own now().
        say: told what is being tried.
    """
    with tuned_tiles.ignored():
        inputs = attentions.inputs_of(workload, getattr(torch, dtype), device)
        expected = attentions.truth(inputs)
        # The first of auto's that takes the problem and has tiles to choose: one with fixed tiles refuses even its own.
        for name in AUTO_ORDER:
            chosen = attentions.explanation(inputs, name)
            if name == "triton" and chosen.config is not None and chosen.config.block_q is None:
                return  # few queries and few keys: kernels without tiles of scores, which ask no table
            if chosen.config is not None and not refusals(name, chosen.problem, chosen.config):
                break
        else:
            return
    directions = ("both",) if chosen.config.score_bytes else ("forward", "backward")
    now = clock.now()
    for place, direction in enumerate(directions):
        until = now + (end - now) * (place + 1) / len(directions)
        with tuned_tiles.ignored():
            climb = _Climb(inputs, expected, name, direction, clock, until, say)
            finding = climb.run(chosen.config, workload.name, dtype, chosen.problem)
        yield finding


@dataclasses.dataclass
class _Climb:
    """A hill climb from the built-in choice, for one direction."""

    inputs: CaseInputs
    expected: dict[str, Tensor]
    backend: str
    direction: str
    clock: Clock
    end: float
    say: Callable[[str], None]
    tried: int = 0
    cut: bool = False

    def run(self, start: Config, workload: str, dtype: str, problem: Problem) -> Tuned:
        """Step while a neighbour is better. Then time the best and the built-in choice in turn, which decides."""
        if start.score_bytes:
            start = Config(score_bytes=start.score_bytes)
        builtin = self._runner(None)
        before = after = self._times(_ROUNDS, builtin)[0]
        best_ms = before.median_ms
        best: Config | None = None
        seen = {start}
        # A search of the forward alone needs no gradient, so it may try what the backward refuses.
        asked = dataclasses.replace(problem, needs=NO_GRADIENTS) if self.direction == "forward" else problem

        def accepted(configs: Iterable[Config]) -> list[Config]:
            return [config for config in configs if not refusals(self.backend, asked, config)]

        candidates = [start] if self.direction == "backward" else []  # its three kernels have tiles of their own: one for all?
        candidates = accepted([*candidates, *neighbours(start)])
        while candidates:
            timed = [
                (ms, config) for config in candidates if config not in seen or config == start if (ms := self._try(config))
            ]
            seen.update(candidates)
            ms, config = min(timed, key=lambda pair: pair[0], default=(best_ms, start))
            if ms >= best_ms * (1 - _WORTH_A_STEP):
                break
            best, best_ms = config, ms
            candidates = [config for config in accepted(neighbours(best)) if config not in seen]
        if best is not None:
            before, after = self._times(_LAST_ROUNDS, builtin, self._runner(best))
            if after.range_ms[1] >= before.range_ms[0] or before.median_ms / after.median_ms < 1 + _WORTH_KEEPING:
                best = None
        key, times = tuned_tiles.key(self.backend, self.direction, problem), (before.median_ms, after.median_ms)
        return Tuned(workload, dtype, self.backend, self.direction, key, best, *times, self.tried, self.cut)

    def _runner(self, config: Config | None) -> Runner:
        return Runner(backend_peer(self.backend, config), self.inputs)

    def _try(self, config: Config) -> float | None:
        """Milliseconds of a config. None if it does not run, is wrong, or no time is left."""
        if self.clock.now() > self.end:
            self.cut = True
            return None
        self.say(", ".join(f"{name}={value}" for name, value in config.given().items()))
        self.tried += 1
        try:
            runner = self._runner(config)
            errors = runner.output_error if self.direction == "forward" else runner.errors
            check(errors(self.expected), self.inputs.q.dtype)
            return self._times(_ROUNDS, runner)[0].median_ms
        except Exception:  # too much shared memory, a refusal, a wrong result: this config is none
            return None

    def _times(self, rounds: int, *runners: Runner) -> list[Timing]:
        """Timings of the runners, in interleaved rounds. Raise RuntimeError if one has no time."""
        pairs = [(Result(str(number)), runner) for number, runner in enumerate(runners)]
        time_in_turn(pairs, (self.direction,), rounds, self.clock, lambda what: None)
        if reason := next((result.reason for result, _ in pairs if result.reason), None):
            raise RuntimeError(reason)
        return [result.times[self.direction] for result, _ in pairs]
