"""`evoattn tune`: it climbs to what is faster, keeps nothing wrong and nothing within noise, and shows and clears its table."""

import dataclasses
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import evoattn
from evoattn import cli
from evoattn.backends import tiled
from evoattn.backends.tiled.sizes import TiledPlan
from evoattn.cli import tile_search, tune
from evoattn.cli.tile_search import Tuned
from evoattn.core import tuned_tiles
from evoattn.core.config import Config
from evoattn.core.inputs import Inputs, Outputs
from evoattn.workloads import workload

from .conftest import CPU, FakeClock


class ClockOfTiles(FakeClock):
    """A call takes as long as `cost` says of the score budget that its plan had."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cost: Callable[[int], float], tick: float = 0.0) -> None:
        super().__init__(tick)
        self.budget, self.cost = 0, cost
        plan = tiled.Blocks.plan

        def watched(blocks: tiled.Blocks) -> TiledPlan:
            tiles = plan(blocks)
            self.budget = tiles.score_bytes
            return tiles

        monkeypatch.setattr(tiled.Blocks, "plan", watched)
        monkeypatch.setattr(tiled.dense, "fits", lambda problem: False)  # which has no blocks

    def calls(self, call: Callable[[int], object], count: int) -> float:
        super().calls(call, count)
        return count * self.cost(self.budget)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_table_of_the_user: None) -> Iterator[Path]:
    monkeypatch.setenv("EVOATTN_CACHE_DIR", str(tmp_path / "cache"))
    tuned_tiles.forget()
    yield tmp_path / "cache"
    tuned_tiles.forget()


def searched(clock: FakeClock, end: float = 1e9) -> Tuned:
    (tuned,) = tile_search.tune(workload("tri16"), "float32", CPU, clock, end, lambda what: None)
    return tuned


def test_it_climbs_to_what_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """The best is three steps away from the 4 MiB of the built-in choice, and every step is better."""
    best = 1 << 19
    tuned = searched(ClockOfTiles(monkeypatch, lambda budget: 1 + abs(budget - best) / (1 << 20)))
    assert tuned.config == Config(score_bytes=best)
    assert (tuned.backend, tuned.direction) == ("tiled", "both")
    assert tuned.gain == pytest.approx(4.5)
    assert tuned.tried == 5 and not tuned.cut


def test_nothing_is_kept_that_is_not_clearly_better(monkeypatch: pytest.MonkeyPatch) -> None:
    assert searched(ClockOfTiles(monkeypatch, lambda budget: 1.0 if budget == 4 << 20 else 0.98)).config is None
    number = iter(range(10**6))
    noisy = ClockOfTiles(monkeypatch, lambda budget: (1.0 if budget == 4 << 20 else 0.9) * (1 + next(number) % 3))
    assert searched(noisy).config is None


def test_what_is_wrong_or_fails_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ClockOfTiles(monkeypatch, lambda budget: budget / (1 << 22))
    right = tiled._forward

    def broken(inputs: Inputs, outputs: Outputs, scale: float, blocks: tiled.Blocks) -> None:
        right(inputs, outputs, scale, blocks)
        if blocks.config.score_bytes == 1 << 20:
            raise RuntimeError("too much shared memory")
        if blocks.config.score_bytes == 2 << 20:
            outputs.o.mul_(1.01)

    monkeypatch.setattr(tiled, "_forward", broken)
    tuned = searched(clock)
    assert tuned.config is None


def test_the_time_ends_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned = searched(ClockOfTiles(monkeypatch, lambda budget: 1.0, tick=1.0), end=1.0)
    assert tuned.cut and tuned.tried == 0 and tuned.config is None


def test_an_older_find_does_not_start_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    first = searched(ClockOfTiles(monkeypatch, lambda budget: 1 + budget / (1 << 20)))
    assert first.config == Config(score_bytes=1 << 18)
    tuned_tiles.save({first.key: first.entry()}, on_cpu=True)
    again = searched(ClockOfTiles(monkeypatch, lambda budget: 1 + budget / (1 << 20)))
    assert again.before_ms == first.before_ms, "the built-in choice is what a gain is measured from"


def test_neighbours_differ_by_one_step_of_one_setting() -> None:
    steps = list(tile_search.neighbours(Config(block_q=16, block_k=128, num_warps=4, num_stages=1)))
    assert Config(block_q=32, block_k=128, num_warps=4, num_stages=1) in steps
    assert Config(block_q=16, block_k=128, num_warps=4, num_stages=2) in steps
    assert {step.block_q for step in steps} == {16, 32} and {step.block_k for step in steps} == {64, 128}
    assert {step.num_warps for step in steps} == {2, 4, 8} and {step.num_stages for step in steps} == {1, 2}
    assert len(steps) == 5
    plan = list(tile_search.neighbours(Config(block_q=64, block_k=64, score_bytes=1 << 22)))
    assert plan == [Config(score_bytes=1 << 23), Config(score_bytes=1 << 21)]


def test_tune_command_prints_and_keeps_the_best_config(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ClockOfTiles(monkeypatch, lambda budget: 1 + budget / (1 << 20))
    monkeypatch.setattr(tune, "clock_for", lambda device: clock)
    monkeypatch.setattr(tuned_tiles, "_device", lambda on_cpu: "cpu Some Processor")
    arguments = ["tune", "--device", "cpu", "--workloads", "tri16", "--budget", "1000"]
    assert cli.main(arguments) == 0
    printed = capsys.readouterr()
    assert re.search(
        r"^tri16, float32 +tiled +both +5000\.000 +1250\.000 +4\.00x +\d+ +score_bytes=262144$", printed.out, re.MULTILINE
    )
    assert f"kept in {folder / 'tuned-cpu-some-processor.json'}" in printed.out
    assert cli.main(["tune", "--device", "cpu", "--show"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^tiled/both/float32/\S+ +tri16 +5000\.0 +1250\.0 +score_bytes=262144$", shown, re.MULTILINE)
    assert cli.main(["tune", "--device", "cpu", "--clear"]) == 0
    assert "removed " in capsys.readouterr().out
    assert cli.main(["tune", "--device", "cpu", "--clear"]) == 0
    assert "there was none at " in capsys.readouterr().out
    assert cli.main(["tune", "--device", "cpu", "--show"]) == 0
    assert "the built-in tables choose" in capsys.readouterr().out


def test_ctrl_c_keeps_what_was_found(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ClockOfTiles(monkeypatch, lambda budget: 1 + budget / (1 << 20))
    monkeypatch.setattr(tune, "clock_for", lambda device: clock)
    real = tile_search.tune

    def stop_at_the_second(wanted: object, *args: object) -> Iterator[Tuned]:
        if getattr(wanted, "name", "") == "tri17":
            raise KeyboardInterrupt
        return real(wanted, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(tile_search, "tune", stop_at_the_second)
    assert cli.main(["tune", "--device", "cpu", "--workloads", "tri16", "tri17", "--budget", "1000"]) == 130
    printed = capsys.readouterr()
    assert "score_bytes=262144" in printed.out
    assert printed.err == "evoattn tune: interrupted\n"
    assert len(tuned_tiles.entries(on_cpu=True)) == 1


def test_what_does_not_fit_into_memory_is_left_out(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ClockOfTiles(monkeypatch, lambda budget: 1 + budget / (1 << 20))
    monkeypatch.setattr(tune, "clock_for", lambda device: clock)
    monkeypatch.setattr("evoattn.bench.machine.free_bytes", lambda device: 50 << 20)
    assert cli.main(["tune", "--device", "cpu", "--workloads", "tri200", "tri16", "--budget", "1000"]) == 0
    printed = capsys.readouterr()
    assert re.search(r"^tri200, float32: left out: .* would hold about .* GiB; 0\.0 GiB are free$", printed.err, re.MULTILINE)
    assert "tri16, float32" in printed.out and "tri200" not in printed.out


REFUSED = {
    "workload": (["--workloads", "nonsense"], "--workloads: no workload 'nonsense'"),
    "dtype": (["--dtypes", "float64"], "argument --dtypes: invalid choice: 'float64'"),
    "budget": (["--budget", "0"], "--budget: expected a whole number from 1 up, got '0'"),
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.values(), ids=REFUSED)
def test_tune_command_refuses_bad_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tune", "--device", "cpu", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_no_place_for_a_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVOATTN_CACHE_DIR", "")
    assert cli.main(["tune", "--device", "cpu", "--show"]) == 2
    assert "EVOATTN_CACHE_DIR is empty, which means that nothing is kept" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EVOATTN_CACHE_DIR", str(tmp_path / "file" / "cache"))
    clock = ClockOfTiles(monkeypatch, lambda budget: 1 + budget / (1 << 20))
    monkeypatch.setattr(tune, "clock_for", lambda device: clock)
    assert cli.main(["tune", "--device", "cpu", "--workloads", "tri16"]) == 2
    printed = capsys.readouterr()
    assert "cannot be written: Not a directory; EVOATTN_CACHE_DIR names another folder" in printed.err
    assert clock.order == [] and "tri16" not in printed.err, "it is refused before the search"


def test_what_cannot_be_kept_is_shown(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that fills meanwhile ends the search, not what it found."""

    def full(*_: object) -> Path:
        raise OSError(28, "No space left on device")

    clock = ClockOfTiles(monkeypatch, lambda budget: 1 + budget / (1 << 20))
    monkeypatch.setattr(tune, "clock_for", lambda device: clock)
    monkeypatch.setattr(tuned_tiles, "save", full)
    assert cli.main(["tune", "--device", "cpu", "--workloads", "tri16", "tri17", "--budget", "1000"]) == 2
    printed = capsys.readouterr()
    assert "score_bytes=262144" in printed.out and "tri17" not in printed.out and "kept in" not in printed.out
    assert "cannot be written: No space left on device" in printed.err


def test_showing_does_not_clear(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tune", "--show", "--clear"]) == 2
    assert "--clear: not allowed with argument --show" in capsys.readouterr().err


def test_tune_help_names_options_and_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tune", "--help"]) == 0
    text = capsys.readouterr().out
    for piece in ("--show", "--clear", "EVOATTN_CACHE_DIR", "examples:", "exit status"):
        assert piece in text


def test_few_queries_and_keys_have_nothing_to_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's kernels for them ask no table, and what plain torch would find nobody would ask for."""
    explain = evoattn.explain

    def explained(*arguments: object, backend: str, **options: object) -> object:
        if backend != "triton":
            return explain(*arguments, backend=backend, **options)  # type: ignore[arg-type]
        return dataclasses.replace(explain(*arguments, backend="tiled", **options), config=Config(num_warps=1))  # type: ignore[arg-type]

    monkeypatch.setattr(evoattn, "explain", explained)
    point = workload("template_point").shrunk()
    assert list(tile_search.tune(point, "float32", CPU, FakeClock(), 1e9, lambda what: None)) == []
