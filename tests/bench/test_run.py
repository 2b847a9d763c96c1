"""A run on a CPU: all are verified, wrong ones get no time, rounds are interleaved, memory that ends is a reason."""

import math
import re

import pytest
import torch

from evoattn import testing
from evoattn.backends import tiled
from evoattn.bench import attentions, run
from evoattn.bench.contender import Contender, Prepared, Runner, copies_for
from evoattn.bench.memory import peak_bytes
from evoattn.bench.peers import PEERS
from evoattn.bench.record import Record
from evoattn.dispatch import lookup
from evoattn.testing import CaseInputs
from evoattn.workloads import WORKLOADS, workload

from .conftest import CPU, FakeClock, a_plan, measured, results


def test_what_is_wrong_gets_no_time_and_what_fails_says_why(fakes: dict[str, Contender], clock: FakeClock) -> None:
    by_peer = results(measured(a_plan(peers=tuple(fakes)), clock))
    assert {name for name, result in by_peer.items() if result.times} == {
        "evoattn",
        "right",
        "forward_only",
        "wrong_backward",
        "compiles",
    }
    assert by_peer["evoattn"].status == by_peer["right"].status == "ok"
    assert by_peer["evoattn"].backend == "tiled"
    assert set(by_peer["right"].times) == {"forward", "backward", "both"}
    assert set(by_peer["right"].errors) == {"o", "dq", "dk", "dv", "dpair_bias"}
    assert max(by_peer["right"].errors.values()) < 1e-5
    assert by_peer["wrong"].status == "wrong"
    assert "o is wrong: relative error 1.0e-02 against float64" in by_peer["wrong"].reason
    assert by_peer["nan"].status == "wrong" and by_peer["nan"].errors["o"] == math.inf
    for name in ("forward_only", "wrong_backward"):
        assert by_peer[name].status == "partial" and set(by_peer[name].times) == {"forward"}, name
        assert by_peer[name].peak_bytes is None
    assert by_peer["forward_only"].reason == "backward: NotImplementedError: no backward here"
    assert "is wrong: relative error 1.0e-02" in by_peer["wrong_backward"].reason
    assert (by_peer["refuses"].status, by_peer["refuses"].reason) == ("refused", "takes <b>nothing</b> & nobody")
    assert (by_peer["absent"].status, by_peer["absent"].reason) == ("absent", "no_such_library_at_all is not installed")
    assert (by_peer["explodes"].status, by_peer["explodes"].reason) == ("failed", "RuntimeError: the kernel")
    assert by_peer["huge"].status == "left out" and "GiB are free" in by_peer["huge"].reason


def test_without_a_forward_wished_a_wrong_backward_has_no_time(fakes: dict[str, Contender], clock: FakeClock) -> None:
    by_peer = results(measured(a_plan(peers=("wrong_backward",), passes=("both",)), clock))
    assert by_peer["wrong_backward"].status == "wrong" and not by_peer["wrong_backward"].times


def test_forward_alone_asks_for_no_gradient(fakes: dict[str, Contender], clock: FakeClock) -> None:
    by_peer = results(measured(a_plan(peers=("forward_only",), passes=("forward",)), clock))
    assert by_peer["forward_only"].status == "ok"
    assert set(by_peer["forward_only"].errors) == {"o"}


def test_rounds_are_interleaved(fakes: dict[str, Contender], clock: FakeClock) -> None:
    record = measured(a_plan(peers=("right",), passes=("forward",), rounds=3), clock)
    assert clock.order[-6:] == ["evoattn.forward", "right.forward"] * 3
    times = results(record)["right"].times["forward"]
    assert len(times.samples_ms) == 3
    assert times.median_ms == 1000.0


def test_host_time_where_the_clock_has_one(fakes: dict[str, Contender]) -> None:
    by_peer = results(measured(a_plan(peers=("compiles",)), FakeClock(host=25e-6)))
    assert by_peer["compiles"].host_us == {"forward": 25.0, "backward": 25.0, "both": 25.0}


def test_calls_that_lead_have_graphs_of_their_own(fakes: dict[str, Contender]) -> None:
    """A compiled backward runs once on each; without them it would fail."""
    by_peer = results(measured(a_plan(peers=("compiles",)), FakeClock(lead=2)))
    assert set(by_peer["compiles"].times) == {"forward", "backward", "both"}


def test_ctrl_c_keeps_what_is_done(fakes: dict[str, Contender], clock: FakeClock) -> None:
    plan = a_plan(workloads=(workload("tri16"), workload("tri17")), peers=("right",))

    def stop(done: int, what: str) -> None:
        if done == 1 and what.endswith("round 1 of 3"):
            raise KeyboardInterrupt

    kept: list[tuple[int, str]] = []
    record = run.run(
        plan, Record({}, {}), CPU, clock, stop, lambda record: kept.append((len(record.problems), record.finished))
    )
    assert record.finished == "interrupted"
    assert kept == [(1, "interrupted")], "what is written meanwhile does not call itself complete"
    (only,) = record.problems
    assert only.workload.name == "tri16" and all(result.times for result in only.results)


def test_what_would_not_fit_into_memory_is_not_made(fakes: dict[str, Contender], clock: FakeClock) -> None:
    """Inputs of 100,000 x 100,000 rows are not even begun, and the next problem is measured."""
    plan = a_plan(workloads=(workload("tri100000"), workload("tri16")), peers=("right",))
    huge, small = measured(plan, clock).problems
    assert [result.name for result in huge.results] == ["evoattn", "right"]
    for result in huge.results:
        assert result.status == "left out"
        assert re.fullmatch(r"inputs, float64 truth and gradients would hold about .* GiB are free", result.reason)
    assert all(result.times for result in small.results)


@pytest.mark.parametrize("error", [RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), MemoryError()])
def test_memory_that_ends_on_a_cpu_is_a_reason(
    error: Exception, fakes: dict[str, Contender], clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch raises a plain RuntimeError there; another one is a bug, and no reason."""

    def fails(*_: object) -> CaseInputs:
        raise error

    def exhausts(inputs: CaseInputs) -> Prepared:
        raise error

    PEERS["exhausts"] = Contender("exhausts", "exhausts", exhausts)
    assert results(measured(a_plan(peers=("exhausts",)), clock))["exhausts"].reason == "out of memory"
    monkeypatch.setattr(attentions, "inputs_of", fails)
    by_peer = results(measured(a_plan(peers=("right",)), clock))
    assert {result.reason for result in by_peer.values()} == {"the inputs and their float64 truth do not fit into memory"}
    error = RuntimeError("expected a tensor")
    with pytest.raises(RuntimeError, match="expected a tensor"):
        measured(a_plan(), clock)


@pytest.mark.parametrize("name", ["tri48", "msa_row32", "msa_global32", "single64"])
def test_what_is_foreseen_to_be_held_is_what_is_held(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = workload(name).with_rows(48)
    monkeypatch.setitem(attentions.SCORES, "cpu", 1 << 16)
    tensors: list[object] = []

    def make() -> None:
        inputs = attentions.inputs_of(wanted, torch.float32, CPU)
        tensors.append(attentions.truth(inputs))

    foreseen = attentions.held_bytes(wanted, torch.float32, CPU)
    assert 0.4 * foreseen < peak_bytes(make, CPU) <= foreseen


def test_a_backend_that_auto_takes_is_measured_once(clock: FakeClock) -> None:
    by_peer = results(measured(a_plan(backends=("auto", "tiled", "reference", "triton"), passes=("forward",)), clock))
    assert list(by_peer) == ["evoattn", "evoattn/reference", "evoattn/triton"]
    assert by_peer["evoattn/triton"].status == "refused"
    assert by_peer["evoattn/reference"].times


def test_another_backend_for_the_backward_is_named(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where Hopper's kernels take a forward and Triton's its backward."""
    monkeypatch.setattr(lookup, "AUTO_ORDER", ("tiled", "reference"))
    right = tiled.unsupported
    monkeypatch.setattr(
        tiled, "unsupported", lambda problem, config: ["no gradients"] if any(problem.needs) else right(problem, config)
    )
    by_peer = results(measured(a_plan(backends=("auto", "tiled", "reference")), clock))
    fused = by_peer["evoattn"]
    assert (fused.status, fused.backend, fused.backward_backend) == ("ok", "tiled", "reference")
    assert list(by_peer) == ["evoattn", "evoattn/tiled", "evoattn/reference"], "neither is both passes of auto"
    assert by_peer["evoattn/reference"].backends("/") == "reference"
    forward_only = results(measured(a_plan(passes=("forward",)), clock))["evoattn"]
    assert forward_only.backends(", backward ") == "tiled", "no backward was run"


@pytest.mark.parametrize("name", ["dense", "sdpa"])
@pytest.mark.parametrize("case", WORKLOADS, ids=lambda case: case.name)
def test_every_peer_of_plain_torch_takes_every_workload(name: str, case: object) -> None:
    small = case.shrunk()  # type: ignore[attr-defined]
    inputs = attentions.inputs_of(small, torch.float32, CPU)
    runner, expected = Runner(PEERS[name], inputs), attentions.truth(inputs)
    errors = runner.errors(expected)
    assert max(errors.values()) < 2e-6, errors


def test_the_truth_in_parts_is_the_oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = attentions.inputs_of(workload("template8"), torch.float32, CPU)
    expected = testing.oracle(inputs).values
    monkeypatch.setitem(attentions.SCORES, "cpu", 3 * 4 * 4 * 8 * 8)
    actual = attentions.truth(inputs)
    assert set(actual) == {"o", "dq", "dk", "dv", "dpair_bias"}
    for name, value in actual.items():
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
    nbytes = sum(x.nbytes for x in (small.q, small.k, small.v, small.pair_bias) if x is not None)
    assert copies * nbytes >= 64 << 20 > (copies - 1) * nbytes
    tiny = attentions.inputs_of(workload("tri8"), torch.float32, CPU)
    assert copies_for((tiny.q, tiny.k, tiny.v, tiny.pair_bias), CPU) == 24
    runner = Runner(PEERS["dense"], small)
    runner._copy(3)
    assert len({tensors[0].data_ptr() for tensors in runner.sets if tensors[0] is not None}) == 3
