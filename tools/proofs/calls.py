"""The calls that are recorded: awkward cases, workloads, random problems, and layers, with tensors on "meta"."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import evoattn
from evoattn import nn as layers
from evoattn.testing import AWKWARD
from evoattn.testing.cases import Case, CaseInputs, from_workload
from evoattn.workloads import WORKLOADS
from tests.fuzz import random_problem
from tests.fuzz.layer_kinds import LAYERS
from tests.fuzz.random_layers import random_layer

__all__ = ["Attention", "Layer", "attentions", "layer_calls"]

Start = Callable[..., None]
"""Told the tensors of a call by name, before it is made."""


@dataclasses.dataclass(frozen=True)
class Attention:
    """A call of the attention.

    Args:
        name: what the record calls it.
        case: the call in words.
        seed: of its numbers; None for tensors that are never drawn, as those of a workload are too large.
        deterministic: as the call takes it.
    """

    name: str
    case: Case
    seed: int | None = 0
    deterministic: bool = False

    def inputs(self) -> CaseInputs:
        """Its tensors."""
        inputs = self._empty() if self.seed is None else self.case.make(self.seed, "meta")
        for x in inputs.differentiable.values():
            x.requires_grad_()
        return inputs

    def _empty(self) -> CaseInputs:
        case = self.case

        def empty(*shape: int, dtype: torch.dtype = case.dtype) -> Tensor:
            return torch.empty(*case.lead, *shape, dtype=dtype, device="meta")

        q, heads = empty(case.n, case.lq, case.h, case.d), case.kv_heads or case.h
        k = empty(case.n, case.lk, heads, case.d)
        mask = empty(case.n, case.lk, dtype=torch.bool) if case.mask else None
        pair = empty(1, case.h, case.lq, case.lk) if case.pair_bias else None
        return CaseInputs(case, q, k, torch.empty_like(k), mask, None, pair, torch.empty_like(q), None)

    def arguments(self, inputs: CaseInputs, backend: str) -> dict[str, Any]:
        """The arguments of `evoformer_attention`."""
        case = self.case
        tensors = {name: x for name, x in _roles(inputs).items() if name not in ("do", "dlse")}
        options = {"scale": case.scale, "layout": case.layout, "return_lse": case.lse_gradient, "backend": backend}
        return {**tensors, **options, "deterministic": self.deterministic}

    def run(self, inputs: CaseInputs, backend: str, start: Start) -> None:
        """Forward and backward."""
        start(**_roles(inputs))
        leaves = list(inputs.differentiable.values())
        made = evoattn.evoformer_attention(**self.arguments(inputs, backend))
        if leaves:
            outputs, cotangents = (made, (inputs.do, inputs.dlse)) if self.case.lse_gradient else ((made,), (inputs.do,))
            torch.autograd.grad(outputs, leaves, cotangents, allow_unused=True)


def _roles(inputs: CaseInputs) -> dict[str, Tensor | None]:
    """The tensors of a call by name."""
    return {field.name: getattr(inputs, field.name) for field in dataclasses.fields(inputs) if field.name != "case"}


def attentions(problems: int, dtypes: tuple[torch.dtype, ...]) -> Iterator[Attention]:
    """The attentions: workloads, awkward cases in each dtype, and so many random problems."""
    for dtype in (torch.bfloat16, torch.float32):
        for workload in WORKLOADS:
            yield Attention(f"workload {workload.name} {dtype}", from_workload(workload, dtype), None)
    for dtype in dtypes:
        for case in AWKWARD:
            yield Attention(f"case {case.name} {dtype}", dataclasses.replace(case, dtype=dtype))
    for seed in range(problems):
        problem = random_problem(seed)
        yield Attention(f"random {seed}", problem.case, seed, problem.deterministic)


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer and what it is called with.

    Args:
        name: what the record calls it.
        make: the layer and its inputs by name, of which floating-point ones are differentiated but for masks.
    """

    name: str
    make: Callable[[], tuple[nn.Module, dict[str, Any]]]

    def run(self, start: Start) -> None:
        """Forward and backward, once `start` has been told the names of tensors."""
        layer, given = self.make()
        named = {**given, **dict(layer.named_parameters())}
        start(**{name: x for name, x in named.items() if isinstance(x, Tensor)})
        out = layer(**given)
        inputs = [x for name, x in given.items() if isinstance(x, Tensor) and x.is_floating_point() and name != "mask"]
        leaves = [x for x in (*inputs, *layer.parameters()) if x.requires_grad]
        if leaves and out.requires_grad:
            torch.autograd.grad(out, leaves, torch.empty_like(out), allow_unused=True)


def _of_a_model(kind: str, length: int, dtype: torch.dtype, weights: torch.dtype) -> tuple[nn.Module, dict[str, Any]]:
    """A layer of a published model's size."""
    made: dict[str, Callable[[], nn.Module]] = {
        "triangle": lambda: layers.TriangleAttention(128, 32, 4),
        "multiplication": lambda: layers.TriangleMultiplication(128, 128),
        "transition": lambda: layers.Transition(128),
        "wide transition": lambda: layers.Transition(256),
    }
    with torch.device("meta"):
        layer = made[kind]().to(weights)
        z = torch.empty(1, length, length, 256 if kind.startswith("wide") else 128, dtype=dtype, requires_grad=True)
        return layer, {next(iter(LAYERS[kind.removeprefix("wide ")].inputs)): z, "mask": torch.empty(z.shape[:-1], dtype=dtype)}


def _random(seed: int) -> tuple[nn.Module, dict[str, Any]]:
    """A random layer, without what surrounds its call."""
    problem = random_layer(seed)
    with warnings.catch_warnings(), contextlib.suppress(NotImplementedError):
        warnings.simplefilter("ignore")
        given: dict[str, Any] = {**problem.inputs("meta"), **problem.called}
        if LAYERS[problem.kind].mask is not None:
            given["mask"] = problem.masks("meta")
        return problem.layer("meta"), given
    raise ValueError("no such layer")


def layer_calls(number: int) -> Iterator[Layer]:
    """Layers of a model's size, and so many random ones."""
    for kind in ("triangle", "multiplication", "transition", "wide transition"):
        for length in (61, 384):
            for dtype, weights in ((torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16), (torch.float32,) * 2):
                name = f"layer {kind} {length} {dtype} {weights}"
                yield Layer(name, lambda k=kind, n=length, d=dtype, w=weights: _of_a_model(k, n, d, w))  # type: ignore[misc]
    for seed in range(number):
        yield Layer(f"layer {seed}", lambda seed=seed: _random(seed))  # type: ignore[misc]
