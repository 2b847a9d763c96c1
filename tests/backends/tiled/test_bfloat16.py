"""Small calls in bfloat16 on the CPU: dense, if the LSE is not asked for and if no score is large."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import evoattn
from evoattn import testing
from evoattn.backends.tiled import dense
from evoattn.dispatch import calls
from evoattn.testing import Case, CaseInputs
from evoattn.testing.dense import Results

pytestmark = pytest.mark.usefixtures("one_thread", "poisoned")

SIZES: dict[str, Any] = {"n": 4, "h": 2, "lq": 24, "lk": 40, "dtype": torch.bfloat16}


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A CPU that multiplies in bfloat16, whether this one does or not."""
    monkeypatch.setattr(dense, "_multiplies_bfloat16", lambda: True)
    calls.forget()
    yield
    calls.forget()


def attend(inputs: CaseInputs) -> tuple[Results, bool]:
    """Output and gradients of a call whose LSE is not asked for, and whether it keeps probabilities."""
    case, leaves = inputs.case, {name: x.detach().requires_grad_() for name, x in inputs.differentiable.items()}
    tensors: Any = {name: getattr(inputs, name) for name in ("q", "k", "v", "mask", "mask_bias", "pair_bias", "gate")}
    o = evoattn.evoformer_attention(**(tensors | leaves), scale=case.scale, layout=case.layout, backend="tiled")
    keeps = any(
        x is not None and x.dim() == 3 and x.shape[1:] == (case.lq, case.lk) for x in getattr(o.grad_fn, "saved_tensors", ())
    )
    gradients = torch.autograd.grad(o, list(leaves.values()), inputs.do)
    return Results({"o": o.detach(), **{f"d{name}": x for name, x in zip(leaves, gradients, strict=True)}}), keeps


BIASES: list[dict[str, Any]] = [
    {},
    {"mask": "empty_rows", "gate": "large"},
    {"mask_bias": "finite", "pair_bias": "b1hqk", "gate": "random"},
    {"mask": "random", "pair_bias": "b1hqk", "bias_dtype": torch.float32},
]


@pytest.mark.parametrize("biases", BIASES, ids=str)
def test_probabilities_are_kept(biases: dict[str, Any]) -> None:
    inputs = Case("small", **SIZES, **biases).make()
    results, keeps = attend(inputs)
    testing.check(results, inputs)
    assert keeps


@pytest.mark.parametrize("case", testing.AWKWARD, ids=lambda case: case.name)
def test_awkward_case_without_its_lse_agrees_with_float64(case: Case) -> None:
    """With the LSE they are in `test_conformance`. Without it a pair bias that is the same for all keys has a gradient of 0."""
    inputs = dataclasses.replace(case, dtype=torch.bfloat16, lse_gradient=False).make(seed=1)
    results, _ = attend(inputs)
    if case.pair_bias and case.pair_bias.endswith("1"):
        results.values.pop("dpair_bias", None)
    testing.check(results, inputs)


@pytest.mark.parametrize(
    "options",
    [{"spread": 10.0}, {"n": 257, "lq": 128, "lk": 128}, {"pair_bias": "b1hqk", "pair_fill": "minus_1e9_rows"}],
    ids=str,
)
def test_other_calls_keep_none(options: dict[str, Any]) -> None:
    """Large products of q and k, whose rounding would show, many scores, and a huge bias."""
    inputs = Case("other", **{**SIZES, **options}).make()
    results, keeps = attend(inputs)
    testing.check(results, inputs)
    assert not keeps


def test_other_cpus_keep_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "_multiplies_bfloat16", lambda: False)
    inputs = Case("small", **SIZES).make()
    results, keeps = attend(inputs)
    testing.check(results, inputs)
    assert not keeps


def test_the_lse_is_that_of_exact_scores() -> None:
    inputs = Case("small", **SIZES, lse_gradient=True).make()
    testing.check(testing.run(inputs, "tiled"), inputs)
