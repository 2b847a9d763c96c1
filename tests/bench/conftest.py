"""What the tests of the benchmark share: a clock that tells what it is told, peers made of plain torch."""

import dataclasses
from collections.abc import Callable, Iterator

import pytest
import torch

from evoattn.bench import peers, run
from evoattn.bench.clock import Clock
from evoattn.bench.contender import Contender, Prepared, RefusesError
from evoattn.bench.peers import PEERS
from evoattn.bench.record import Problem, Record, Result, Timing
from evoattn.bench.run import BenchPlan
from evoattn.testing import CaseInputs
from evoattn.workloads import workload


class FakeClock(Clock):
    """Every call takes a second of its own time; now() moves with it and by `tick` a look."""

    target_s = 1.0

    def __init__(self, tick: float = 0.0, host: float | None = None, lead: int = 0) -> None:
        self.lead = lead
        self.time, self.tick, self.host = 0.0, tick, host
        self.order: list[str] = []

    def calls(self, call: Callable[[int], object], count: int) -> float:
        for number in range(self.lead + count):
            call(number)
        owner = getattr(call, "__self__", None)
        self.order.append(f"{owner.contender.name}.{call.__name__}" if owner else "?")
        self.time += count
        return count

    def host_s(self, call: Callable[[int], object], count: int) -> float | None:
        for number in range(count):
            call(number)
        return self.host

    def now(self) -> float:
        self.time += self.tick
        return self.time


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def dense_with(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[CaseInputs], Prepared]:
    """Dense torch whose output goes through `change`."""

    def prepare(inputs: CaseInputs) -> Prepared:
        right = peers._dense(inputs, compiled=False)
        return right._replace(compute=lambda *tensors: change(right.compute(*tensors)))

    return prepare


def refuse(inputs: CaseInputs) -> Prepared:
    raise RefusesError("takes <b>nothing</b> & nobody")


def absent(inputs: CaseInputs) -> Prepared:
    import no_such_library_at_all  # noqa: F401

    raise AssertionError


def explode(o: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("the kernel\nfell over")


class OnlyForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, o: torch.Tensor) -> torch.Tensor:
        return o.clone()

    @staticmethod
    def backward(ctx: object, do: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("no backward here")


FAKES = (
    Contender("right", "right", dense_with(lambda o: o * 1)),
    Contender("wrong", "wrong", dense_with(lambda o: o * 1.01)),
    Contender("nan", "nan", dense_with(lambda o: o * float("nan"))),
    Contender("wrong_backward", "wrong backward", dense_with(lambda o: o * 1.01 + o.detach() * -0.01)),
    Contender("refuses", "refuses", refuse),
    Contender("absent", "absent", absent),
    Contender("explodes", "explodes", dense_with(explode)),
    Contender("forward_only", "forward only", dense_with(OnlyForward.apply)),  # type: ignore[arg-type]
    Contender("huge", "huge", dense_with(lambda o: o), score_copies=1e12),
    Contender("compiles", "compiles", dense_with(lambda o: o * 1), compiles=True),
)


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Contender]]:
    """The fake peers, in place of the real ones."""
    before = dict(PEERS)
    PEERS.clear()
    PEERS.update({peer.name: peer for peer in FAKES})
    yield PEERS
    PEERS.clear()
    PEERS.update(before)


def a_plan(**changes: object) -> BenchPlan:
    plan = BenchPlan((workload("tri16"),), ("float32",), ("forward", "backward", "both"), ("auto",), (), rounds=3)
    return dataclasses.replace(plan, **changes)  # type: ignore[arg-type]


def a_record(**times: list[float]) -> Record:
    """A record of one problem, with forward times by contender."""
    results = [
        Result(name, errors={"o": 1e-7}, peak_bytes=1 << 20, times={"forward": Timing(tuple(samples))})
        for name, samples in times.items()
    ]
    problem = Problem(workload("tri16"), "float32", 1000, results)
    ceilings = {"exp2_per_s": 4e9, "copy_bytes_per_s": 2e10, "how": "by hand"}
    return Record({"device": "a machine", "torch": "2"}, {"rounds": 3}, [problem], ceilings=ceilings)


CPU = torch.device("cpu")


def silent(done: int, what: str) -> None:
    """Progress that nobody looks at."""


def measured(plan: BenchPlan, clock: object, progress: object = silent) -> Record:
    """The record of a plan on the CPU."""
    return run.run(plan, Record({}, {}), CPU, clock, progress)  # type: ignore[arg-type]


def results(record: Record) -> dict[str, Result]:
    """The results of a record's one problem, by contender."""
    (problem,) = record.problems
    return {result.name: result for result in problem.results}
