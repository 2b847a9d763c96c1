"""The budget of a run: what it ends, what it leaves out, and how a record is gone on with."""

import contextlib
import dataclasses
import re
import signal
import time
from typing import Any

import pytest

from evoattn import testing
from evoattn.backends import tiled
from evoattn.bench import attentions, budget, run
from evoattn.bench.clock import TookTooLong, WallClock
from evoattn.bench.contender import Contender, Prepared
from evoattn.bench.peers import PEERS
from evoattn.bench.record import PASSES, Record, Result
from evoattn.testing import Inputs
from evoattn.workloads import workload

from .conftest import CPU, FakeClock, a_plan, measured, results, silent


def test_the_budget_ends_the_run_and_says_so(fakes: dict[str, Contender], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "LONGEST_SHARE", 1.0)
    plan = a_plan(workloads=(workload("tri16"), workload("tri17"), workload("tri18")), peers=("right",), budget_s=30.0)
    record = measured(plan, FakeClock(tick=1.0))
    assert record.finished == "out of time"
    assert record.problems[0].result("right").times  # type: ignore[union-attr]
    last = record.problems[-1]
    assert [result.name for result in last.results] == ["evoattn", "right"]
    assert {result.reason for result in last.results} == {"the budget of 30 s was over"}


def test_the_budget_bounds_the_float64_truth(fakes: dict[str, Contender], monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen parts of ten seconds: after the first it is known to take more than half of the budget."""
    monkeypatch.setitem(attentions.SCORES, "cpu", 4 * 16 * 16)
    oracle, parts, clock = testing.oracle, [], FakeClock()

    def slow(inputs: Inputs) -> testing.Results:
        parts.append(inputs.q.shape[1])
        clock.time += 10.0
        return oracle(inputs)

    monkeypatch.setattr(testing, "oracle", slow)
    record = measured(a_plan(peers=("right",), budget_s=100.0), clock)
    assert len(parts) == 2
    for result in results(record).values():
        assert (result.status, result.reason) == (
            "left out",
            "its float64 truth takes about 160 s, and the budget of 100 s had 50 s for it: a larger --budget measures it",
        )
    assert record.problems[0].cut and record.finished == "out of time"
    for seconds in (400.0, None):
        assert results(measured(a_plan(peers=("right",), budget_s=seconds), clock))["right"].times


def test_a_record_that_was_cut_short_is_gone_on_with(fakes: dict[str, Contender], clock: FakeClock) -> None:
    """Only what was cut is measured, with all its contenders, and stands where it would have stood."""
    plan = a_plan(workloads=(workload("tri16"), workload("tri17"), workload("tri18")), peers=("right",))
    uncut = measured(plan, clock)
    record = Record({}, {}, problems=[uncut.problems[2], dataclasses.replace(uncut.problems[0], cut=True)], seconds=100.0)
    kept = record.problems[0]
    begun: list[tuple[int, int, str]] = []
    run.run(plan, record, CPU, clock, lambda number, of, what: begun.append((number, of, what.split(",")[0])))
    assert list(dict.fromkeys(begun)) == [(1, 2, "tri16"), (2, 2, "tri17")]
    assert [problem.workload.name for problem in record.problems] == ["tri16", "tri17", "tri18"]
    assert record.problems[2] is kept
    assert record.finished == "complete" and not any(problem.cut for problem in record.problems)
    assert record.seconds is not None and record.seconds > 100.0


def test_what_is_cut_short_again_takes_no_times_away(fakes: dict[str, Contender], clock: FakeClock) -> None:
    plan = a_plan(workloads=(workload("tri16"), workload("tri17")), peers=("right",))
    record = measured(plan, clock)
    for problem in record.problems:
        problem.results[1] = Result("right", "left out", "no time")
        problem.cut = True
    before = list(record.problems)
    run.run(dataclasses.replace(plan, budget_s=1e-9), record, CPU, FakeClock(tick=1.0), silent)
    assert record.problems == before and record.finished == "out of time"

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    run.run(plan, record, CPU, clock, stop)
    assert record.problems == before and record.finished == "interrupted"
    run.run(plan, record, CPU, clock, silent)
    assert all(result.times for problem in record.problems for result in problem.results)


def test_a_call_too_long_for_any_budget_is_not_tried_again(
    fakes: dict[str, Contender], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = a_plan(peers=("right",), budget_s=1e6)
    record = measured(plan, FakeClock(slow="right"))
    assert results(record)["right"].status == "left out" and record.finished == "complete"
    record = measured(dataclasses.replace(plan, budget_s=10.0), FakeClock())
    assert results(record)["right"].status == "left out" and record.finished == "out of time"


def test_the_budget_leaves_out_what_compiles_for_too_long(fakes: dict[str, Contender], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(budget.COMPILES_S, "cpu", 500.0)
    by_peer = results(measured(a_plan(peers=("compiles", "right"), budget_s=900.0), FakeClock(tick=0.01)))
    assert by_peer["compiles"].times, "the first one may take what the budget has"
    by_peer = results(measured(a_plan(peers=("compiles", "right"), budget_s=400.0), FakeClock(tick=0.01)))
    assert by_peer["compiles"].status == "left out"
    assert by_peer["compiles"].reason.startswith("compiles for about 500 s, and this problem has ")
    assert by_peer["right"].times


def test_compiling_takes_no_rounds_away(fakes: dict[str, Contender], clock: FakeClock) -> None:
    """A peer that tunes for longer than its problem's share costs later problems time, not this one its rounds."""

    def tuned(inputs: Inputs) -> Prepared:
        clock.time += 1500.0
        return fakes["right"].prepare(inputs)

    PEERS["tunes"] = Contender("tunes", "tunes", tuned)
    plan = a_plan(workloads=(workload("tri16"), workload("tri17")), peers=("tunes",), budget_s=3500.0, rounds=7)
    first = measured(plan, clock).problems[0]
    for result in first.results:
        assert {name: len(time.samples_ms) for name, time in result.times.items()} == dict.fromkeys(PASSES, 7)
    assert first.seconds is not None and first.seconds > 1500


def test_a_peer_whose_first_call_does_not_end_is_ended(fakes: dict[str, Contender], monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that tunes itself for minutes: the others have their times, and the next problem loses none to it."""
    begun: list[int] = []

    def tunes(inputs: Inputs) -> Prepared:
        begun.append(inputs.case.lq)
        for _ in range(6000):
            with contextlib.suppress(Exception):  # one config after the other, whatever becomes of it
                time.sleep(0.01)
        return fakes["right"].prepare(inputs)

    measured(a_plan(peers=("right",), rounds=2), WallClock())  # what is imported once takes its time here
    PEERS["tunes"] = Contender("tunes", "tunes", tunes)
    monkeypatch.setattr(budget, "LIMIT_SHARE", 0.05)
    before = signal.getsignal(signal.SIGALRM)
    workloads = (workload("tri16"), workload("tri17"))
    record = measured(a_plan(workloads=workloads, peers=("tunes", "right"), budget_s=50.0, rounds=2), WallClock())
    reasons = ("were ended after . s of the budget", "had not ended after . s on another problem")
    for problem, reason in zip(record.problems, reasons, strict=True):
        by_peer = {result.name: result for result in problem.results}
        assert by_peer["tunes"].status == "left out" and not by_peer["tunes"].times
        assert re.fullmatch(f"its first calls {reason}", by_peer["tunes"].reason)
        assert by_peer["right"].times and by_peer["evoattn"].times and problem.cut
    assert begun == [16] and record.finished == "out of time"
    assert signal.getsignal(signal.SIGALRM) is before and signal.getitimer(signal.ITIMER_REAL)[0] == 0.0


@pytest.fixture
def compiles_first(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """evoattn's first forward takes 1,500 s more."""
    right = tiled._forward

    def compiled(*arguments: Any) -> None:
        clock.time += 1500.0
        monkeypatch.setattr(tiled, "_forward", right)
        right(*arguments)

    monkeypatch.setattr(tiled, "_forward", compiled)
    monkeypatch.setattr(tiled.dense, "fits", lambda problem: False)


@pytest.mark.usefixtures("compiles_first")
def test_what_evoattn_compiles_is_not_ended(fakes: dict[str, Contender], clock: FakeClock) -> None:
    by_peer = results(measured(a_plan(peers=("right",), budget_s=2000.0), clock))
    assert by_peer["evoattn"].times and by_peer["evoattn"].first_call_s > 1500  # type: ignore[operator]


@pytest.mark.parametrize("swallows", [False, True])
def test_a_limit_leaves_nothing_behind(swallows: bool) -> None:
    """Wherever the signal comes, and though something swallows its first exception."""
    before = signal.getsignal(signal.SIGALRM)

    def sleeps() -> None:
        if swallows:
            with contextlib.suppress(TookTooLong):
                time.sleep(5)
        time.sleep(5)

    with pytest.raises(TookTooLong), WallClock().limit(0.01):
        sleeps()
    for late in range(200):
        with contextlib.suppress(TookTooLong), WallClock().limit(1e-3):
            end = time.perf_counter() + 1e-3 + (late - 100) * 1e-6
            while time.perf_counter() < end:
                pass
        assert signal.getsignal(signal.SIGALRM) is before and signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


@pytest.mark.usefixtures("compiles_first")
def test_what_evoattn_compiles_is_not_its_peers_loss(
    fakes: dict[str, Contender], clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "FIRST_SHARE", 0.0)
    monkeypatch.setitem(budget.COMPILES_S, "cpu", 500.0)
    plan = a_plan(workloads=(workload("tri16"), workload("tri17")), peers=("compiles",), budget_s=3000.0)
    result = measured(plan, clock).problems[0].result("compiles")
    assert result is not None and result.status == "ok", result


def test_what_takes_too_long_is_left_out(fakes: dict[str, Contender]) -> None:
    by_peer = results(measured(a_plan(peers=("right", "compiles")), FakeClock(slow="right")))
    assert (by_peer["right"].status, by_peer["right"].reason) == (
        "left out",
        "a forward takes 100.0 s, too long for this problem's share of time",
    )
    assert by_peer["compiles"].times
    by_peer = results(measured(a_plan(peers=("right",), budget_s=10.0), FakeClock()))
    assert by_peer["right"].reason.startswith("a forward takes 1.0 s"), "a twentieth of the problem's share is half a second"
