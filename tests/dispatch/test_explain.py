"""`explain` and `backends`: what runs a call, with which tiles and copies, and what leaves it to a slower backend."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import evoattn
from evoattn.backends import Description, Plan, reference, tiled, triton
from evoattn.core.config import Config
from evoattn.core.problem import Problem
from tests.dispatch.calls import make
from tests.helpers import seams


def test_explain_shows_problem_backend_and_config() -> None:
    inputs = make(dtype=torch.bfloat16)
    inputs.q.requires_grad_()
    told = evoattn.explain(inputs.q, inputs.k, inputs.v, mask_bias=inputs.mask_bias, pair_bias=inputs.pair_bias)
    assert told.backend == "tiled" and told.config is not None and told.config.block_k == 20
    assert told.problem.needs == (True, False, False, False, False, False)
    text = str(told)
    assert "bfloat16 on cpu, b=1 n=3 h=2 lq=20 lk=20 d=8 c=8, mask_bias bfloat16, pair_bias bfloat16" in text
    assert "backend  tiled" in text and "block_q=20" in text
    with torch.autocast("cpu", torch.bfloat16):
        assert evoattn.explain(*(x.float() for x in (inputs.q, inputs.k, inputs.v))).problem.dtype == torch.bfloat16


def test_explain_names_a_copy() -> None:
    """Two leading axes that lie apart in memory cannot be merged as a view."""
    q = torch.randn(3, 2, 4, 5, 2, 8).transpose(0, 1)
    k = q.contiguous()
    assert evoattn.explain(q, k, k).copies == ["q: its leading axes cannot be merged as a view"]
    assert evoattn.explain(k, k, k, gate=q).copies == ["gate: its leading axes cannot be merged as a view"]


def test_explain_tells_of_a_gate() -> None:
    inputs = make(gate="random")
    inputs.gate.requires_grad_()  # type: ignore[union-attr]
    told = evoattn.explain(inputs.q, inputs.k, inputs.v, gate=inputs.gate)
    assert told.problem.gate and told.problem.needs == (False,) * 5 + (True,)
    assert "d=8 c=8, no bias, gate" in str(told)
    with torch.autocast("cpu", torch.bfloat16):
        assert evoattn.explain(inputs.q, inputs.k, inputs.v, gate=inputs.gate).problem.gate


def test_explain_inside_vmap() -> None:
    """Of one sample, whose tensors have no memory of their own."""
    told = []

    def attend(q: Tensor) -> Tensor:
        told.append(evoattn.explain(q, q, q))
        return q

    torch.func.vmap(attend)(torch.randn(3, 1, 2, 5, 4, 8))
    assert (told[0].backend, told[0].problem.n, told[0].copies) == ("tiled", 2, [])


def test_backends_are_available_or_have_a_reason() -> None:
    status = {backend.name: backend for backend in evoattn.backends()}
    assert status["tiled"].available and status["reference"].available
    assert all(backend.available != bool(backend.reason) for backend in status.values())


def test_the_function_backends_and_the_package_of_that_name_live_together() -> None:
    from evoattn.backends import tiled

    assert callable(evoattn.backends) and tiled.NAME == "tiled"


def takes_the_cpu(monkeypatch: pytest.MonkeyPatch, **names: Callable[..., Any]) -> None:
    """Let `triton`, which `auto` asks before `tiled`, take calls on the CPU, with other functions for some of its own."""
    attributes: dict[str, Callable[..., Any]] = {
        "availability": lambda: None,
        "unsupported": lambda problem, config: [],
        **names,
    }
    for name, function in attributes.items():
        monkeypatch.setattr(triton, name, function, raising=False)
    seams.forget()


def test_explain_names_the_backend_of_the_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """The passes are chosen one by one, so a backend without a gradient may still run the forward."""

    def unsupported(problem: Problem, config: Config) -> list[str]:
        return ["has no gradient of q"] if problem.needs[0] else []

    takes_the_cpu(monkeypatch, unsupported=unsupported, plan_forward=reference.plan_forward)
    q = torch.randn(1, 2, 8, 2, 8, requires_grad=True)
    explanation = evoattn.explain(q, q, q)
    assert (explanation.backend, explanation.backward_backend) == ("triton", "tiled")
    assert explanation.refused["triton"] == ["has no gradient of q"]
    assert "backward by tiled" in str(explanation)
    with torch.no_grad():
        assert evoattn.explain(q, q, q).backward_backend is None


def test_explain_tells_what_leaves_a_pass_to_a_faster_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the forward alone, so the passes have different backends, and the reason stands with those of refusals."""

    def faster(problem: Problem) -> tuple[str, str] | None:
        return None if any(problem.needs) else ("tiled", "it has no launches")

    def told(name: str, pass_: str, *tensors: object, **options: object) -> Plan:
        copies = (f"{name}: q", *[f"{name}: k once a backward"] * (pass_ == "backward"))
        return Plan(lambda *args: None, lambda: Description(copies=copies, tuned=pass_))

    takes_the_cpu(monkeypatch, faster=faster)
    for backend in (triton, tiled):
        for pass_ in ("forward", "backward"):
            monkeypatch.setattr(backend, f"plan_{pass_}", functools.partial(told, backend.NAME, pass_))
    q = torch.randn(1, 2, 8, 2, 8, requires_grad=True)
    explanation = evoattn.explain(q, q, q)
    assert (explanation.backend, explanation.backward_backend) == ("tiled", "triton")
    assert explanation.copies == ["tiled: q", "triton: q", "triton: k once a backward"], "of each pass by who runs it"
    assert explanation.tuned == ("forward", "backward")
    assert explanation.refused["triton"] == ["leaves it to tiled: it has no launches"]
    assert evoattn.explain(q, q, q, backend="triton").backend == "triton"


def test_plans_that_run_are_told() -> None:
    """Once for each plan, and never of a call that is only explained."""
    seams.forget()
    q = torch.randn(1, 3, 5, 2, 8, requires_grad=True)
    with seams.taken() as backends:
        evoattn.explain(q, q, q)
        assert backends == []
        for _ in range(2):
            evoattn.evoformer_attention(q, q, q).sum().backward()
        assert backends == ["tiled", "tiled"]  # forward and backward
        evoattn.explain(q, q, q)
    assert backends == ["tiled", "tiled"]
