"""`dev.py fuzz --layers`: random layers hold on the CPU, every kind is drawn, and what is planted is found and printed."""

from __future__ import annotations

import dataclasses
import itertools
import re
import shlex
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import evoattn.pair.multiplication.call
from evoattn.nn import project
from evoattn.testing import Outcome
from tests.fuzz import __main__ as command
from tests.fuzz.judging_layers import judge_layer
from tests.fuzz.layer_kinds import KINDS, LAYERS, OPERATORS
from tests.fuzz.random_layers import RandomLayer, random_layer
from tests.fuzz.random_operators import Call
from tests.fuzz.random_problems import DTYPES
from tests.fuzz.trials import Findings, Trial
from tests.helpers.surroundings import COMPILERS, COUNTERS, DTENSORS, INSTEAD, MODES

SEEDS, CHUNK = range(100, 140), 10
SMALL = 4000

# Layers this small gain nothing from more threads, and wait for them where other processes run.
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("first", [pytest.param(x, marks=pytest.mark.slow if x >= 120 else []) for x in SEEDS[::CHUNK]])
def test_layers_hold_on_the_cpu(first: int) -> None:
    drawn = [random_layer(seed, largest=SMALL) for seed in range(first, first + CHUNK)]
    failed = {layer.seed: outcome.what for layer in drawn if (outcome := judge_layer(layer)).status != "held"}
    assert not failed


@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.slow) for first in (20, 40))])
def test_operators_hold_on_the_cpu(first: int) -> None:
    drawn = [random_layer(seed, largest=SMALL, kinds=tuple(OPERATORS)) for seed in range(first, first + 20)]
    failed = {call.seed: outcome.what for call in drawn if (outcome := judge_layer(call)).status != "held"}
    assert not failed


def first_drawn(is_so: Callable[[RandomLayer], bool]) -> RandomLayer:
    """The first random layer of a kind."""
    return next(filter(is_so, map(random_layer, itertools.count())))


def test_every_kind_is_drawn() -> None:
    values: dict[str, set[Any]] = {
        "kind": {*LAYERS},
        **{name: {*DTYPES} for name in ("dtype", "parameter_dtype", "compute_dtype")},
        "autocast": {None, torch.bfloat16, torch.float16},
        "mask": {None, "random", "padding", "rows", "columns", "nothing"},
        "strides": {"contiguous", "swapped", "sliced", "offset"},
        "mode": {"grad", "no_grad", "inference"},
        "checkpoint": {"", "plain", "reentrant"},
        "in_place": {"", "mul_", "relu_", "add_", "part"},
        "around": {"", *MODES, *COUNTERS, *INSTEAD, *COMPILERS, DTENSORS},
        "mask_expanded": {False, True},
        "gain": {1.0, 300.0},
        "overwrites": {False, True},
        "mask_factor": {False, True},
    }
    drawn = list(map(random_layer, range(1000)))
    for name, expected in values.items():
        assert {getattr(layer, name) for layer in drawn} == expected, name
    for is_so in (
        lambda layer: layer.frozen and not layer.needs,
        lambda layer: not layer.frozen and not layer.needs,
        lambda layer: layer.change == "adapter" and layer.autocast,
        lambda layer: "norm" in layer.path,
        lambda layer: layer.default_dtype == torch.float64 and layer.dtype == torch.bfloat16,
        lambda layer: layer.gain > 1 and layer.autocast == torch.float16,
        lambda layer: layer.mask_expanded and layer.mask_ones,
    ):
        assert any(map(is_so, drawn))
    called = [random_layer(seed, kinds=tuple(OPERATORS)) for seed in range(300)]
    assert {call.kind for call in called} == {*OPERATORS}
    assert {call.around for call in called} == {"", *MODES, *COMPILERS}


def test_one_seed_is_one_layer() -> None:
    for seed in range(20):
        layer, again = random_layer(seed), random_layer(seed)
        assert layer == again
        for a, b in zip(layer.layer().parameters(), again.layer().parameters(), strict=True):
            assert torch.equal(a, b)
        for name, x in layer.inputs().items():
            assert torch.equal(x, again.inputs()[name])


def failures(change: Callable[[RandomLayer], RandomLayer] = lambda layer: layer) -> set[str]:
    """The kinds of failure of a plain triangle in float32."""
    layer = first_drawn(lambda x: x.kind == "triangle" and x.options["starting"] and x.sizes["l"] > 5)
    usual: dict[str, Any] = {
        **dict.fromkeys(("dtype", "parameter_dtype"), torch.float32),
        **dict.fromkeys(("path", "change", "checkpoint", "in_place", "around"), ""),
        **dict.fromkeys(("autocast", "mask")),
        **dict.fromkeys(("overwrites", "mask_factor"), False),
        "options": {**layer.options, "residual": False},
        "frozen": (),
        "needs": ("z",),
        "mode": "grad",
        "scale": 1.0,
    }
    return set(judge_layer(change(dataclasses.replace(layer, **usual))).kinds)


def test_the_judge_sees_what_is_planted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert failures() == set()
    right = project.normalise_backward

    def times(factor: float) -> Callable[..., Any]:
        def wrong(*args: Any) -> tuple[Tensor | None, ...]:
            dx, *affine = right(*args)
            return (None if dx is None else factor * dx, *affine)

        return wrong

    monkeypatch.setattr(project, "normalise_backward", times(1.0001))
    assert failures() == {"error of dz"}
    monkeypatch.setattr(project, "normalise_backward", times(torch.inf))
    assert failures() == {"error of dz", "not finite: dz"}
    monkeypatch.setattr(project, "normalise_backward", lambda *args: (None, *right(*args)[1:]))
    assert failures() == {"gradient dz"}
    monkeypatch.setattr(project, "normalise_backward", lambda *args: (right(*args)[0].zero_(), *right(*args)[1:]))
    assert failures() == {"error of dz"}
    monkeypatch.undo()

    def changes(x: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        output = project_normalise(x, *args)
        with torch.no_grad():
            x.mul_(2)
        return output

    project_normalise = project.normalise
    monkeypatch.setattr(project, "normalise", changes)
    assert "mutated z" in failures()


def test_a_layer_that_reads_a_changed_module_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were every subclass of Linear taken for a plain one, an adapter would have no effect."""

    def adapted(layer: RandomLayer) -> RandomLayer:
        return dataclasses.replace(layer, path="mha.linear_q", change="adapter")

    assert failures(adapted) == set()
    monkeypatch.setattr(project, "is_linear", lambda module: isinstance(module, torch.nn.Linear))
    assert {"error of o", "gradient dmha.linear_q.up"} <= failures(adapted)


@pytest.mark.parametrize("around", [*MODES, *COUNTERS, *COMPILERS, DTENSORS])
def test_a_layer_holds_in_its_surroundings(around: str) -> None:
    assert failures(lambda layer: dataclasses.replace(layer, around=around)) == set()


@pytest.mark.parametrize("around", INSTEAD)
def test_functions_put_in_place_are_called(around: str) -> None:
    assert failures(lambda layer: dataclasses.replace(layer, around=around)) == set()


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(name, marks=[] if name == "transition" else pytest.mark.slow)
        for name, kind in KINDS.items()
        if kind.overwrites
    ],
)
def test_a_result_written_over_its_input_holds(kind: str) -> None:
    drawn = [layer for seed in range(1000) if (layer := random_layer(seed, kinds=(kind,), largest=SMALL)).overwrites]
    failed = {layer.seed: outcome.what for layer in drawn[:5] if (outcome := judge_layer(layer)).status != "held"}
    assert len(drawn) >= 5 and not failed


def test_a_mask_without_its_gradient_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    words = {"kinds": ("pair.transition",), "largest": SMALL}
    call = next(call for seed in range(999) if (call := random_layer(seed, **words)).mask_factor and not call.around)  # type: ignore[arg-type]
    assert judge_layer(call).status == "held"
    right = Call.forward
    monkeypatch.setattr(Call, "forward", lambda self, *, mask, **x: right(self, mask=mask.detach(), **x))
    assert judge_layer(call).kinds == ("gradient dmask",)


@pytest.mark.parametrize("in_place", ["mul_", "relu_", "add_", "part"])
def test_a_change_in_place_reaches_the_truth_too(in_place: str) -> None:
    assert failures(lambda layer: dataclasses.replace(layer, in_place=in_place)) == set()


def test_a_product_that_leaves_the_range_of_float16_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    words = {"kinds": ("pair.triangle_multiplication",), "dtypes": (torch.float16,), "largest": SMALL}
    call = next(call for seed in range(99) if (call := random_layer(seed, **words)).gain > 1 and call.sizes["l"] > 5)  # type: ignore[arg-type]
    call = dataclasses.replace(call, mode="grad", mask=None, around="", autocast=None, in_place="", checkpoint="")
    assert judge_layer(call).status == "held"
    right = evoattn.pair.multiplication.call.product
    monkeypatch.setattr(evoattn.pair.multiplication.call, "product", lambda *args, **named: right(*args, **named).half())
    assert "not finite: o" in judge_layer(call).kinds


def test_the_default_dtype_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = first_drawn(lambda x: x.default_dtype == torch.float64 and x.kind == "triangle")
    assert judge_layer(layer).status == "held"
    assert torch.get_default_dtype() == torch.float32
    monkeypatch.setattr("evoattn.nn.attention.evoformer_attention", lambda *_, **__: 1 / 0)
    assert judge_layer(layer).kinds == ("raised ZeroDivisionError",)
    assert torch.get_default_dtype() == torch.float32


def run(*arguments: str) -> int:
    """The exit status of the command with these arguments."""
    return command.fuzz(*command.settings_of([*arguments]))


def test_fuzz_layers_command_prints_its_counts(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--layers", "--cases", "2", "--seed", "103", "--largest", "500", "--jobs", "1", "--device", "cpu"]
    assert run(*arguments, "--backends", "auto", "triton") == 0
    assert "seeds from 103 to 104, 2 held, 2 refused, 0 failed" in capsys.readouterr().out


@pytest.mark.slow
def test_fuzz_operators_command_prints_its_counts(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--operators", "--cases", "3", "--seed", "5", "--largest", "500", "--jobs", "1", "--device", "cpu"]
    assert run(*arguments) == 0
    assert "seeds from 5 to 7, 3 held, 0 refused, 0 failed" in capsys.readouterr().out
    call = random_layer(5, largest=500, kinds=tuple(OPERATORS))
    assert call.command("auto", "cpu").startswith("python3 dev.py fuzz --operators --seed 5 --cases 1 --largest 500 ")


def test_a_failure_is_printed_with_a_line_that_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, so that the planted fault is there too: a gradient times 1.01."""

    class Here:
        def __init__(self, jobs: int, judge: str, limit_s: float) -> None:
            assert judge == "tests.fuzz.judging_layers:judge_layer"

        def __enter__(self) -> Here:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def run(self, trials: Any) -> Any:
            for trial in trials:
                yield trial, judge_layer(*trial)

    right = project.normalise_backward
    monkeypatch.setattr(command, "Workers", Here)
    monkeypatch.setattr(
        project, "normalise_backward", lambda *args: tuple(None if x is None else 1.01 * x for x in right(*args))
    )
    arguments = ["--layers", "--seed", "100", "--cases", "20", "--backends", "tiled", "--dtypes", "float32"]
    assert run(*arguments, "--device", "cpu", "--largest", "500") == 1
    printed = capsys.readouterr().out
    first = re.search(r"FAILED  seed (\d+), tiled on cpu: error of d", printed)
    assert first
    line = next(text.split("again", 1)[1].strip() for text in printed.splitlines() if text.startswith("  again"))
    assert f"--seed {first[1]} --cases 1 " in line
    *program, again = line.partition(" fuzz ")
    assert program == ["python3 dev.py", " fuzz "] and run(*shlex.split(again)) == 1
    assert f"FAILED  seed {first[1]}, tiled on cpu: " in capsys.readouterr().out
    monkeypatch.setattr(project, "normalise_backward", right)
    assert run(*shlex.split(again)) == 0


def test_counts_go_by_the_dtype_of_the_inputs() -> None:
    findings = Findings()
    layer = random_layer(1)
    findings.add(Trial(layer, "tiled"), Outcome("held"))
    assert findings.counts == {("tiled", str(layer.dtype).removeprefix("torch.")): {"held": 1, "refused": 0, "failed": 0}}
