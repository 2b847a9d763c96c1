"""The benchmark's course: what is wrong gets no time, what fails shows why, Ctrl-C and the budget keep what is done."""

import contextlib
import dataclasses
import math
import re
import signal
import time
from typing import Any

import pytest
import torch

from evoattn import testing
from evoattn.backends import tiled
from evoattn.bench import attentions, budget, run
from evoattn.bench.clock import Clock, TookTooLong, WallClock
from evoattn.bench.contender import Contender, Prepared, Runner, copies_for
from evoattn.bench.memory import peak_bytes
from evoattn.bench.peers import PEERS
from evoattn.bench.plan import Plan, default_plan, remaining, select_workloads
from evoattn.bench.record import PASSES, Record, Result
from evoattn.dispatch import lookup
from evoattn.testing import Inputs
from evoattn.workloads import WORKLOADS, workload

from .conftest import FakeClock, a_plan, a_record

CPU = torch.device("cpu")


def silent(problem: int, problems: int, what: str) -> None:
    """Progress that nobody looks at."""


def measured(plan: Plan, clock: Clock, progress: object = silent) -> Record:
    return run.run(plan, Record({}, {}), CPU, clock, progress)  # type: ignore[arg-type]


def results(record: Record) -> dict[str, Result]:
    (problem,) = record.problems
    return {result.name: result for result in problem.results}


def test_what_is_wrong_gets_no_time_and_what_fails_says_why(fakes: dict[str, Contender], clock: FakeClock) -> None:
    found = results(measured(a_plan(peers=tuple(fakes)), clock))
    assert {name for name, result in found.items() if result.times} == {
        "evoattn",
        "right",
        "forward_only",
        "wrong_backward",
        "compiles",
    }
    assert found["evoattn"].status == found["right"].status == "ok"
    assert found["evoattn"].backend == "tiled"
    assert set(found["right"].times) == {"forward", "backward", "both"}
    assert set(found["right"].errors) == {"o", "dq", "dk", "dv", "dpair_bias"}
    assert max(found["right"].errors.values()) < 1e-5
    assert found["wrong"].status == "wrong"
    assert "o is wrong: relative error 1.0e-02 against float64" in found["wrong"].reason
    assert found["nan"].status == "wrong" and found["nan"].errors["o"] == math.inf
    for name in ("forward_only", "wrong_backward"):
        assert found[name].status == "partial" and set(found[name].times) == {"forward"}, name
        assert found[name].peak_bytes is None
    assert found["forward_only"].reason == "backward: NotImplementedError: no backward here"
    assert "is wrong: relative error 1.0e-02" in found["wrong_backward"].reason
    assert (found["refuses"].status, found["refuses"].reason) == ("refused", "takes <b>nothing</b> & nobody")
    assert (found["absent"].status, found["absent"].reason) == ("absent", "no_such_library_at_all is not installed")
    assert (found["explodes"].status, found["explodes"].reason) == ("failed", "RuntimeError: the kernel")
    assert found["huge"].status == "left out" and "GiB are free" in found["huge"].reason


def test_without_a_forward_wished_a_wrong_backward_has_no_time(fakes: dict[str, Contender], clock: FakeClock) -> None:
    found = results(measured(a_plan(peers=("wrong_backward",), passes=("both",)), clock))
    assert found["wrong_backward"].status == "wrong" and not found["wrong_backward"].times


def test_forward_alone_asks_for_no_gradient(fakes: dict[str, Contender], clock: FakeClock) -> None:
    found = results(measured(a_plan(peers=("forward_only",), passes=("forward",)), clock))
    assert found["forward_only"].status == "ok"
    assert set(found["forward_only"].errors) == {"o"}


def test_rounds_are_interleaved(fakes: dict[str, Contender], clock: FakeClock) -> None:
    record = measured(a_plan(peers=("right",), passes=("forward",), rounds=3), clock)
    assert clock.order[-6:] == ["evoattn.forward", "right.forward"] * 3
    times = results(record)["right"].times["forward"]
    assert len(times.samples_ms) == 3
    assert times.median_ms == 1000.0


def test_host_time_where_the_clock_has_one(fakes: dict[str, Contender]) -> None:
    found = results(measured(a_plan(peers=("compiles",)), FakeClock(host=25e-6)))
    assert found["compiles"].host_us == {"forward": 25.0, "backward": 25.0, "both": 25.0}


def test_calls_that_lead_have_graphs_of_their_own(fakes: dict[str, Contender]) -> None:
    """A compiled backward runs once on each; without them it would fail."""
    found = results(measured(a_plan(peers=("compiles",)), FakeClock(lead=2)))
    assert set(found["compiles"].times) == {"forward", "backward", "both"}


def test_ctrl_c_keeps_what_is_done(fakes: dict[str, Contender], clock: FakeClock) -> None:
    plan = a_plan(workloads=(workload("tri16"), workload("tri17")), peers=("right",))

    def stop(problem: int, problems: int, what: str) -> None:
        if problem == 2 and what.endswith("round 1 of 3"):
            raise KeyboardInterrupt

    kept: list[tuple[int, str]] = []
    record = run.run(
        plan, Record({}, {}), CPU, clock, stop, lambda record: kept.append((len(record.problems), record.finished))
    )
    assert record.finished == "interrupted"
    assert kept == [(1, "interrupted")], "what is written meanwhile does not call itself complete"
    first, second = record.problems
    assert all(result.times for result in first.results)
    assert [(r.status, r.reason) for r in second.results] == [("left out", "interrupted before it was timed")] * 2
    assert (first.cut, second.cut) == (False, True)


def test_the_budget_ends_the_run_and_says_so(fakes: dict[str, Contender], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "_LONGEST_SHARE", 1.0)
    plan = a_plan(workloads=(workload("tri16"), workload("tri17"), workload("tri18")), peers=("right",), budget_s=30.0)
    record = measured(plan, FakeClock(tick=1.0))
    assert record.finished == "out of time"
    assert record.problems[0].result("right").times  # type: ignore[union-attr]
    last = record.problems[-1]
    assert [result.name for result in last.results] == ["evoattn", "right"]
    assert {result.reason for result in last.results} == {"the budget of 30 s was over"}


def test_what_would_not_fit_into_memory_is_not_made(fakes: dict[str, Contender], clock: FakeClock) -> None:
    """Inputs of 100,000 x 100,000 rows are not even begun, and the next problem is measured."""
    plan = a_plan(workloads=(workload("tri100000"), workload("tri16")), peers=("right",), budget_s=1000.0)
    huge, small = measured(plan, clock).problems
    assert [result.name for result in huge.results] == ["evoattn", "right"]
    for result in huge.results:
        assert result.status == "left out"
        assert re.fullmatch(r"inputs, float64 truth and gradients would hold about .* GiB are free", result.reason)
    assert not huge.cut, "a larger budget would not help"
    assert all(result.times for result in small.results)


@pytest.mark.parametrize("error", [RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), MemoryError()])
def test_memory_that_ends_on_a_cpu_is_a_reason(
    error: Exception, fakes: dict[str, Contender], clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch raises a plain RuntimeError there; another one is a bug, and no reason."""

    def fails(*_: object) -> Inputs:
        raise error

    def exhausts(inputs: Inputs) -> Prepared:
        raise error

    PEERS["exhausts"] = Contender("exhausts", "exhausts", exhausts)
    assert results(measured(a_plan(peers=("exhausts",)), clock))["exhausts"].reason == "out of memory"
    monkeypatch.setattr(attentions, "inputs_of", fails)
    found = results(measured(a_plan(peers=("right",)), clock))
    assert {result.reason for result in found.values()} == {"the inputs and their float64 truth do not fit into memory"}
    error = RuntimeError("expected a tensor")
    with pytest.raises(RuntimeError, match="expected a tensor"):
        measured(a_plan(), clock)


@pytest.mark.parametrize("name", ["tri48", "msa_row32", "msa_global32", "single64"])
def test_what_is_foreseen_to_be_held_is_what_is_held(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = workload(name).with_rows(48)
    monkeypatch.setitem(attentions.SCORES, "cpu", 1 << 16)
    held: list[object] = []

    def make() -> None:
        inputs = attentions.inputs_of(wanted, torch.float32, CPU)
        held.append(attentions.truth(inputs))

    foreseen = attentions.held_bytes(wanted, torch.float32, CPU)
    assert 0.4 * foreseen < peak_bytes(make, CPU) <= foreseen


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
    whole = measured(plan, clock)
    record = Record({}, {}, problems=[whole.problems[2], dataclasses.replace(whole.problems[0], cut=True)], seconds=100.0)
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


def test_a_workload_is_known_by_its_name(fakes: dict[str, Contender], clock: FakeClock) -> None:
    """Another length of a workload is told in other words than the one of that length."""
    plan = a_plan(workloads=select_workloads(None, [100], ()))
    record = Record({}, {}, problems=[dataclasses.replace(a_record(evoattn=[1.0]).problems[0], workload=workload("tri100"))])
    assert record.problems[0].workload != plan.workloads[0]
    assert remaining(plan, record) == []


def test_a_call_too_long_for_any_budget_is_not_tried_again(
    fakes: dict[str, Contender], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = a_plan(peers=("right",), budget_s=1e6)
    record = measured(plan, FakeClock(slow="right"))
    assert results(record)["right"].status == "left out" and record.finished == "complete"
    record = measured(dataclasses.replace(plan, budget_s=10.0), FakeClock())
    assert results(record)["right"].status == "left out" and record.finished == "out of time"


def test_the_budget_leaves_out_what_compiles_for_too_long(fakes: dict[str, Contender], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(budget._COMPILES_S, "cpu", 500.0)
    found = results(measured(a_plan(peers=("compiles", "right"), budget_s=900.0), FakeClock(tick=0.01)))
    assert found["compiles"].times, "the first one may take what the budget has"
    found = results(measured(a_plan(peers=("compiles", "right"), budget_s=400.0), FakeClock(tick=0.01)))
    assert found["compiles"].status == "left out"
    assert found["compiles"].reason.startswith("compiles for about 500 s, and this problem has ")
    assert found["right"].times


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
    monkeypatch.setattr(budget, "_LIMIT_SHARE", 0.05)
    before = signal.getsignal(signal.SIGALRM)
    workloads = (workload("tri16"), workload("tri17"))
    record = measured(a_plan(workloads=workloads, peers=("tunes", "right"), budget_s=50.0, rounds=2), WallClock())
    reasons = ("were ended after . s of the budget", "had not ended after . s on another problem")
    for problem, reason in zip(record.problems, reasons, strict=True):
        found = {result.name: result for result in problem.results}
        assert found["tunes"].status == "left out" and not found["tunes"].times
        assert re.fullmatch(f"its first calls {reason}", found["tunes"].reason)
        assert found["right"].times and found["evoattn"].times and problem.cut
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
    found = results(measured(a_plan(peers=("right",), budget_s=2000.0), clock))
    assert found["evoattn"].times and found["evoattn"].first_call_s > 1500  # type: ignore[operator]


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
    monkeypatch.setattr(budget, "_FIRST_SHARE", 0.0)
    monkeypatch.setitem(budget._COMPILES_S, "cpu", 500.0)
    plan = a_plan(workloads=(workload("tri16"), workload("tri17")), peers=("compiles",), budget_s=3000.0)
    found = measured(plan, clock).problems[0].result("compiles")
    assert found is not None and found.status == "ok", found


def test_what_takes_too_long_is_left_out(fakes: dict[str, Contender]) -> None:
    found = results(measured(a_plan(peers=("right", "compiles")), FakeClock(slow="right")))
    assert (found["right"].status, found["right"].reason) == (
        "left out",
        "a forward takes 100.0 s, too long for this problem's share of time",
    )
    assert found["compiles"].times
    found = results(measured(a_plan(peers=("right",), budget_s=10.0), FakeClock()))
    assert found["right"].reason.startswith("a forward takes 1.0 s"), "a twentieth of the problem's share is half a second"


def test_a_backend_that_auto_takes_is_measured_once(clock: FakeClock) -> None:
    found = results(measured(a_plan(backends=("auto", "tiled", "reference", "triton"), passes=("forward",)), clock))
    assert list(found) == ["evoattn", "evoattn/reference", "evoattn/triton"]
    assert found["evoattn/triton"].status == "refused"
    assert found["evoattn/reference"].times


def test_another_backend_for_the_backward_is_named(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where Hopper's kernels take a forward and Triton's its backward."""
    monkeypatch.setattr(lookup, "AUTO_ORDER", ("tiled", "reference"))
    right = tiled.unsupported
    monkeypatch.setattr(
        tiled, "unsupported", lambda problem, config: ["no gradients"] if any(problem.needs) else right(problem, config)
    )
    found = results(measured(a_plan(backends=("auto", "tiled", "reference")), clock))
    ours = found["evoattn"]
    assert (ours.status, ours.backend, ours.backward_backend) == ("ok", "tiled", "reference")
    assert list(found) == ["evoattn", "evoattn/tiled", "evoattn/reference"], "neither is both passes of auto"
    assert found["evoattn/reference"].backends("/") == "reference"
    alone = results(measured(a_plan(passes=("forward",)), clock))["evoattn"]
    assert alone.backends(", backward ") == "tiled", "no backward was run"


def test_a_bound_is_checked_against_its_own_truth(clock: FakeClock) -> None:
    """FlashAttention without a bias is right about its own, easier problem, and about all rows that the truth has."""
    found = results(measured(a_plan(peers=("flash_unbiased",)), clock))
    assert found["flash_unbiased"].status == "ok", found["flash_unbiased"].reason
    assert "dpair_bias" not in found["flash_unbiased"].errors


def test_a_bound_without_a_mask_keeps_the_pair_bias(
    fakes: dict[str, Contender], clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its truth has every key, and every row too, since all of them share the gradient of the pair bias."""
    right = fakes["right"].prepare
    every_key = Contender("every_key", "every key", lambda inputs: right(attentions.without(inputs, "mask")))
    fakes["every_key"], fakes["bound"] = every_key, dataclasses.replace(every_key, name="bound", leaves_out="mask")
    monkeypatch.setitem(attentions.SCORES, "cpu", 4 * 16 * 16 * 4)  # four parts
    found = results(measured(a_plan(peers=("every_key", "bound")), clock))
    assert found["every_key"].status == "wrong", "of the problem with a mask"
    assert found["bound"].status == "ok", found["bound"].reason
    assert set(found["bound"].errors) == {"o", "dq", "dk", "dv", "dpair_bias"}


@pytest.mark.parametrize("name", ["dense", "sdpa", "flash_unbiased"])
@pytest.mark.parametrize("case", WORKLOADS, ids=lambda case: case.name)
def test_every_peer_of_plain_torch_takes_every_workload(name: str, case: object) -> None:
    small = case.shrunk()  # type: ignore[attr-defined]
    inputs = attentions.inputs_of(small, torch.float32, CPU)
    if not PEERS[name].biased:
        inputs = attentions.without(inputs, "biases")
    runner, expected = Runner(PEERS[name], inputs), attentions.truth(inputs)
    errors = {**runner.forward_error(expected), **runner.gradient_errors(expected)}
    assert max(errors.values()) < 2e-6, errors


def test_the_truth_in_parts_is_the_oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = attentions.inputs_of(workload("template8"), torch.float32, CPU)
    expected = testing.oracle(inputs).values
    monkeypatch.setitem(attentions.SCORES, "cpu", 3 * 4 * 4 * 8 * 8)
    found = attentions.truth(inputs)
    assert set(found) == {"o", "dq", "dk", "dv", "dpair_bias"}
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-12, atol=1e-12)


def test_a_graph_that_gives_its_memory_away_is_used_once(fakes: dict[str, Contender]) -> None:
    inputs = attentions.inputs_of(workload("tri16"), torch.float32, CPU)
    runner = Runner(fakes["compiles"], inputs)
    runner.prepare("backward", 2)
    runner.backward(0)
    with pytest.raises(RuntimeError):
        runner.backward(0)
    again = Runner(fakes["right"], inputs)
    again.prepare("backward", 1)
    assert torch.equal(again.backward(0)[0], again.backward(5)[0])


def test_copies_of_the_inputs_do_not_fit_the_cache() -> None:
    small = attentions.inputs_of(workload("tri64"), torch.float32, CPU)
    copies = copies_for((small.q, small.k, small.v, small.pair_bias), CPU)
    one = sum(x.nbytes for x in (small.q, small.k, small.v, small.pair_bias) if x is not None)
    assert copies * one >= 64 << 20 > (copies - 1) * one
    tiny = attentions.inputs_of(workload("tri8"), torch.float32, CPU)
    assert copies_for((tiny.q, tiny.k, tiny.v, tiny.pair_bias), CPU) == 24
    runner = Runner(PEERS["dense"], small)
    runner.rotate(3)
    assert len({tensors[0].data_ptr() for tensors in runner.sets if tensors[0] is not None}) == 3


def test_problems_come_with_the_most_telling_first() -> None:
    plan = a_plan(workloads=tuple(workload(name) for name in ("tri1", "tri2", "tri3")), dtypes=("bfloat16", "float16"))
    order = [(w.name, dtype) for w, dtype in plan.problems]
    assert len(order) == len(set(order)) == 6
    assert order[0] == ("tri1", "bfloat16")
    assert order.index(("tri2", "bfloat16")) < order.index(("tri2", "float16"))
    assert order.index(("tri1", "float16")) < order.index(("tri3", "bfloat16"))


def test_choosing_workloads() -> None:
    default = default_plan("cpu", quick=False)
    assert select_workloads(None, None, default.workloads) == default.workloads
    assert [w.name for w in select_workloads(None, [100, 397], default.workloads)] == ["tri100", "tri397"]
    picked = select_workloads(["msa_row", "tri384", "tri500"], [64], default.workloads)
    assert [(w.name, w.n, w.lq) for w in picked] == [("msa_row64", 512, 64), ("tri64", 64, 64)]
    with pytest.raises(ValueError, match="no workload 'nonsense'; expected one of tri384, "):
        select_workloads(["nonsense"], None, default.workloads)
    for device in ("cpu", "cuda"):
        for quick in (False, True):
            found = default_plan(device, quick)
            assert len({w.name for w in found.workloads}) == len(found.workloads)
            assert not quick or not any(PEERS[name].compiles for name in found.peers)


def test_workloads_at_other_lengths() -> None:
    assert workload("tri500") == dataclasses.replace(workload("tri384"), name="tri500", n=500, lq=500, lk=500)
    column = workload("msa_column100")
    assert (column.n, column.lq, column.length, column.family) == (100, 512, 100, "msa_column")
    assert workload("tri384").with_rows(10).name == "tri384n10"
    assert workload("single768").with_rows(5) is workload("single768")
    assert testing.from_workload(workload("msa_global"), torch.float32).kv_heads == 1
    rows = workload("msa_row128n64")
    assert (rows.name, rows.n, rows.lq) == ("msa_row128n64", 64, 128)
    assert workload("msa_columnn9").n == 9
    for name, length, found, n in (
        ("tri384n64", 500, "tri500n64", 64),
        ("tri384n64", 32, "tri32", 32),
        ("msa_row200n64", 300, "msa_row300n64", 64),
        ("diffusion128n8", 256, "diffusion256n8", 8),
    ):
        other = workload(name).at(length)
        assert (other.name, other.n, other.length) == (found, n, length)
        assert workload(found) == other
    for wrong in ("tri0", "tri", "nonsense5", "tri1234567", "nonsense5n3", "n5", "trin5"):
        with pytest.raises(ValueError, match="no workload"):
            workload(wrong)
    with pytest.raises(ValueError, match="must be 1 or more, got 0"):
        workload("tri384").at(0)
