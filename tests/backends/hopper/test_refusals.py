"""What the Hopper backend refuses, said without a GPU; and how a scale is taken apart."""

import dataclasses
import math

import pytest
import torch

from evoattn.backends import hopper, tiled, triton
from evoattn.backends.triton.tiles.few import few_tiles
from evoattn.core.config import Config
from evoattn.core.problem import Problem
from tests.helpers import seams

PLAIN = Problem(
    device="cuda",
    capability=(9, 0),
    dtype=torch.bfloat16,
    b=1,
    n=8,
    h=4,
    lq=384,
    lk=384,
    d=32,
    c=32,
    mask=True,
    pair_bias=torch.bfloat16,
)
ALL = (True, True, True, False, True, False)
OF_QKV = (True, True, True, False, False, False)


def test_a_call_on_the_cpu_starts_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking a GPU for its capability would, and a worker that was forked from a process with one would fail."""
    monkeypatch.setattr(hopper, "availability", lambda: pytest.fail("asked for a GPU"))
    on_cpu = dataclasses.replace(PLAIN, device="cpu", capability=None)
    name, refused = seams.chosen(on_cpu)
    assert name == "tiled" and refused["hopper"] == ["needs tensors on a GPU, got device cpu"]


def reasons(config: Config | None = None, **changes: object) -> list[str]:
    return hopper.unsupported(dataclasses.replace(PLAIN, **changes), config or Config())


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dtype": torch.float16, "pair_bias": torch.float16},
        {"pair_bias": None, "mask_bias": torch.float32},
        {"scale": 1e-6},
        {"dtype": torch.float16, "pair_bias": None, "scale": -0.05},
        {"dtype": torch.float16, "pair_bias": None, "scale": 0.0},
        {"pair_bias": torch.float32},
        {"pair_bias": torch.float32, "d": 48, "c": 48, "needs": ALL},
        {"lq": 1, "lk": 5000},
        {"needs": ALL},
        {"needs": ALL, "lq": 4096, "lk": 4096},
        {"needs": OF_QKV, "pair_bias": None, "lk": 8192},
        {"needs": ALL, "lk": 2048, "d": 64, "c": 64},
        {"needs": ALL, "lk": 3072, "d": 48, "c": 48},
        {"needs": OF_QKV, "n": 1, "pair_bias": None},
        {"needs": ALL, "d": 64, "c": 64},
        {"needs": (False, True, True, False, False, False), "lq": 9000, "pair_bias": None},
        {"needs": (*(True,) * 5, False), "mask_bias": torch.bfloat16},
        {"needs": (False, False, False, True, False, False), "mask_bias": torch.float32, "lk": 9000},
    ],
    ids=str,
)
def test_supported_problem_has_no_reasons_against_it(changes: dict) -> None:
    assert reasons(**changes) == []


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"device": "cpu", "capability": None}, "needs tensors on a GPU"),
        ({"capability": (8, 0)}, "this card has 8.0"),
        ({"dtype": torch.float32, "pair_bias": torch.float32}, "takes float16 and bfloat16"),
        ({"c": 16}, "as many value as query channels"),
        ({"d": 40, "c": 40}, "as many value as query channels"),
        ({"pair_bias": torch.float16}, "a pair_bias of q's dtype or float32, got float16"),
        ({"mask_bias": torch.float64}, "a mask_bias in"),
        ({"dtype": torch.float16, "pair_bias": None, "scale": 1e4}, "a scale from 0.03125 to 4096 in float16"),
        ({"dtype": torch.float16, "pair_bias": None, "scale": -1e-5}, "got -1e-05"),
        ({"lk": 0}, "no empty tensors"),
        ({"n": 1}, "a pair_bias that two or more rows share, got 1 row"),
        ({"needs": ALL, "n": 1}, "a pair_bias that two or more rows share, got 1 row"),
        ({"needs": ALL, "lk": 4097}, "no room for 4097 keys of 32 channels"),
        ({"needs": OF_QKV, "pair_bias": None, "lk": 8193}, "no room for 8193 keys of 32 channels"),
        ({"needs": ALL, "lk": 2049, "d": 64, "c": 64}, "no room for 2049 keys of 64 channels"),
        ({"needs": ALL, "lk": 3073, "d": 48, "c": 48}, "no room for 3073 keys of 48 channels"),
    ],
    ids=str,
)
def test_unsupported_problem_is_refused_with_one_reason(changes: dict, word: str) -> None:
    (reason,) = reasons(**changes)
    assert word in reason


def test_refuses_every_config_its_own_too() -> None:
    assert "its tiles are fixed" in reasons(Config(num_warps=4))[0]
    assert "its tiles are fixed" in reasons(Config(block_q=128, block_k=64))[0]


@pytest.mark.parametrize("scale", [0.3, -0.3, 1.0, 32**-0.5, 3e-5, -3e-5, 9e4, 1e-30])
def test_a_scale_is_taken_apart_exactly(scale: float) -> None:
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed: pip install '.[hopper]'")
    from evoattn.backends.hopper.forward_plan import split_scale

    factor, unit = split_scale(scale)
    assert factor * unit == scale
    assert math.frexp(abs(factor))[0] == 0.5, "not a power of two: q would be rounded"
    assert 2.0**-12 <= unit <= 2.0**12


@pytest.mark.parametrize("scale", [8**-0.5, 64**-0.5, 1.0, 0.1, 3e-5, -3e-5])
def test_a_scale_that_a_log_sum_exp_is_divided_by_in_float16(scale: float) -> None:
    """A sum of scores that a float16 bias can make fits into float16, divided by scale and FLOAT16_STEP; usual scales stay."""
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed: pip install '.[hopper]'")
    from evoattn.backends.hopper.forward_plan import split_scale
    from evoattn.backends.hopper.kernels.statistics import FLOAT16_STEP

    factor, unit = split_scale(scale, 2.0 / FLOAT16_STEP)
    assert factor * unit == scale and math.frexp(abs(factor))[0] == 0.5
    assert (factor == 1.0) == (scale >= 64**-0.5)
    assert 66_000 / unit / FLOAT16_STEP < torch.finfo(torch.float16).max


FEW = {"lq": 32, "lk": 64}


@pytest.mark.parametrize(
    ("changes", "backend"),
    [
        ({}, "hopper"),
        (FEW, "triton"),
        ({**FEW, "needs": ALL}, "triton"),
        ({**FEW, "lq": 33}, "hopper"),
        ({**FEW, "lk": 65}, "hopper"),
        ({"lk": 32}, "hopper"),
        ({"lk": 32, "needs": ALL}, "triton"),
        ({"lk": 33, "needs": ALL}, "hopper"),
        ({"lq": 1, "lk": 200}, "hopper"),
        ({"lq": 1, "lk": 200, "pair_bias": None}, "triton"),
        ({"lq": 1, "lk": 200, "pair_bias": None, "needs": (True, True, True, True, False, False)}, "triton"),
        ({"lq": 2, "lk": 200, "pair_bias": None}, "hopper"),
        ({"lq": 1, "lk": 257, "pair_bias": None}, "hopper"),
    ],
    ids=str,
)
def test_auto_takes_the_faster_of_two(changes: dict, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what both measured; a named backend runs what it can, and auto stays where the other refuses."""
    for module in (hopper, triton):
        monkeypatch.setattr(module, "availability", lambda: None)
    problem = dataclasses.replace(PLAIN, **changes)
    name, refused = seams.chosen(problem)
    assert name == backend
    assert [text.split(":")[0] for text in refused.get("hopper", [])] == ["leaves it to triton"] * (backend == "triton")
    assert seams.chosen(problem, "hopper") == ("hopper", {})
    monkeypatch.setattr(triton, "availability", lambda: "Triton is not installed")
    assert seams.chosen(problem)[0] == "hopper"


def test_whoever_is_named_as_faster_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though others that could run it come before it."""
    for module in (hopper, triton, tiled):
        monkeypatch.setattr(module, "availability", lambda: None)
        monkeypatch.setattr(module, "unsupported", lambda problem, config: [])
    monkeypatch.setattr(hopper, "faster", lambda problem: ("tiled", "so it is"))
    left = ["leaves it to tiled: so it is"]
    assert seams.chosen(PLAIN) == ("tiled", {"hopper": left, "triton": left})


@pytest.mark.parametrize("d", [8, 16, 24, 32, 48, 64])
@pytest.mark.parametrize("lk", [1, 64, 65, 128, 129, 256, 257])
@pytest.mark.parametrize("lq", [1, 2, 16, 33])
def test_what_few_kernels_of_triton_take_is_left_to_them(lq: int, lk: int, d: int) -> None:
    """This backend keeps numbers of its own, as no backend reads another's tables; they agree with Triton's."""
    for pair_bias in (None, torch.bfloat16):
        problem = dataclasses.replace(PLAIN, lq=lq, lk=lk, d=d, c=d, pair_bias=pair_bias)
        taken = few_tiles("forward", problem, Config()) is not None
        assert (hopper.faster(problem) is not None) == (taken or (lq <= FEW["lq"] and lk <= FEW["lk"]))


@pytest.mark.parametrize("lk", [1, 32, 64, 65, 256, 600])
@pytest.mark.parametrize("lq", [1, 32, 33, 600])
@pytest.mark.parametrize("n", [2, 500])
@pytest.mark.parametrize("pair_bias", [torch.bfloat16, None], ids=str)
def test_no_forward_of_triton_meets_a_backward_of_hopper(n: int, lq: int, lk: int, pair_bias: torch.dtype | None) -> None:
    """They differ in what they make of biases below -65,504 in float16."""
    problem = dataclasses.replace(PLAIN, n=n, lq=lq, lk=lk, pair_bias=pair_bias)
    if hopper.faster(problem) is not None:
        assert hopper.faster(dataclasses.replace(problem, needs=ALL)) is not None


def test_a_scale_of_zero() -> None:
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed: pip install '.[hopper]'")
    from evoattn.backends.hopper.forward_plan import split_scale

    assert split_scale(0.0) == (0.0, 1.0)
