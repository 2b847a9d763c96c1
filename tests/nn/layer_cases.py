"""A small case of every layer, and its outputs and gradients in dense float64 torch."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import evoattn.nn as evoattn_nn
from evoattn.nn.diffusion import ThreefoldConditionedTransition
from evoattn.testing import relative_error
from tests.helpers.dense_layers import (
    averaging,
    columns,
    conditioned_transition,
    global_columns,
    multiplication,
    outer_product,
    pair_biased,
    rows,
    templates,
    transition,
    triangle,
)
from tests.nn.dense import Dense


class Transposed(evoattn_nn.TriangleAttention):
    """With queries and keys of the pair bias exchanged."""

    def forward(self, z: Tensor, mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
        return super().forward(z, mask, transpose_bias=True)


LAYERS = (
    Dense(
        "triangle, start",
        lambda: evoattn_nn.TriangleAttention(12, 6, 4),
        ((2, 7, 7, 12),),
        (2, 7, 7),
        triangle,
    ),
    Dense(
        "triangle, end",
        lambda: evoattn_nn.TriangleAttention(12, 6, 4, starting=False),
        ((2, 7, 7, 12),),
        (2, 7, 7),
        triangle,
        (0, slice(None), 2),
    ),
    Dense(
        "triangle, end of OpenFold-3",
        lambda: Transposed(12, 6, 4, starting=False),
        ((2, 7, 7, 12),),
        (2, 7, 7),
        functools.partial(triangle, transpose_bias=True),
        (0, slice(None), 2),
    ),
    Dense(
        "multiplication, outgoing",
        lambda: evoattn_nn.TriangleMultiplication(12, 10),
        ((2, 7, 7, 12),),
        (2, 7, 7),
        multiplication,
    ),
    Dense(
        "multiplication, incoming",
        lambda: evoattn_nn.TriangleMultiplication(12, 10, outgoing=False, bias=False),
        ((2, 7, 7, 12),),
        (2, 7, 7),
        multiplication,
    ),
    Dense(
        "transition, SwiGLU",
        lambda: evoattn_nn.Transition(12),
        ((2, 7, 12),),
        (2, 7),
        transition,
    ),
    Dense(
        "transition, ReLU",
        lambda: evoattn_nn.Transition(12, 3, activation="relu"),
        ((2, 5, 7, 12),),
        (2, 5, 7),
        transition,
    ),
    Dense(
        "MSA rows",
        lambda: evoattn_nn.MSARowAttentionWithPairBias(12, 10, 6, 4),
        ((2, 3, 7, 12), (2, 7, 7, 10)),
        (2, 3, 7),
        rows,
    ),
    Dense(
        "MSA columns",
        lambda: evoattn_nn.MSAColumnAttention(12, 6, 4),
        ((2, 5, 7, 12),),
        (2, 5, 7),
        columns,
        (0, slice(None), 2),
    ),
    Dense(
        "MSA columns, global",
        lambda: evoattn_nn.MSAColumnGlobalAttention(12, 6, 4),
        ((2, 5, 7, 12),),
        (2, 5, 7),
        global_columns,
        (0, slice(None), 2),
    ),
    Dense(
        "MSA module, outer product mean",
        lambda: evoattn_nn.OuterProductMean(12, 10, 6),
        ((2, 5, 7, 12),),
        (2, 5, 7),
        outer_product,
        (0, slice(None), 2),
    ),
    Dense(
        "MSA module, outer product mean of Boltz",
        lambda: evoattn_nn.OuterProductMean(12, 10, 6, at_least_one=True),
        ((2, 5, 7, 12),),
        (2, 5, 7),
        outer_product,
        (0, slice(None), 2),
    ),
    Dense(
        "MSA module, pair-weighted averaging",
        lambda: evoattn_nn.MSAPairWeightedAveraging(12, 10, 6, 4),
        ((2, 5, 7, 12), (2, 7, 7, 10)),
        (2, 7, 7),
        averaging,
    ),
    Dense(
        "templates",
        lambda: evoattn_nn.TemplatePointwiseAttention(10, 12, 6, 4),
        ((2, 3, 5, 7, 10), (2, 5, 7, 12)),
        (2, 3),
        templates,
        (0,),
    ),
    Dense(
        "single track",
        lambda: evoattn_nn.AttentionPairBias(12, 10, 6, 4),
        ((2, 7, 12), (2, 7, 7, 10)),
        (2, 7),
        pair_biased,
        (0,),
    ),
    Dense(
        "attention of the diffusion transformer",
        lambda: evoattn_nn.AttentionPairBias(12, 10, 6, 4, c_s=9),
        ((2, 3, 7, 12), (2, 1, 7, 7, 10), (2, 3, 7, 9)),
        (2, 3, 7),
        pair_biased,
    ),
    Dense(
        "transition, conditioned",
        lambda: evoattn_nn.ConditionedTransition(12, 9),
        ((2, 3, 7, 12), (2, 1, 7, 9)),
        (2, 3, 7),
        conditioned_transition,
    ),
    Dense(
        "transition, conditioned, of three factors",
        lambda: ThreefoldConditionedTransition(12, 9),
        ((2, 7, 12), (2, 7, 9)),
        (2, 7),
        conditioned_transition,
    ),
)
EACH = pytest.mark.parametrize("case", LAYERS, ids=lambda case: case.name)


def step(call: Callable[..., Tensor], leaves: list[Tensor], inputs: list[Tensor], mask: Tensor) -> list[Tensor]:
    """The output, and the gradients of inputs and parameters for one random cotangent."""
    output = call(*inputs, mask=mask)
    cotangent = torch.randn(output.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return [output, *torch.autograd.grad(output, [*inputs, *leaves], cotangent.to(output))]


def truth(case: Dense, layer: nn.Module, inputs: list[Tensor], mask: Tensor, swallowed: bool) -> list[Tensor]:
    """`step` in float64 and dense, from the very numbers that a layer of a narrower dtype has."""
    double = [x.detach().double().requires_grad_() for x in inputs]
    reference = case.reference(layer, torch.float64, swallowed)
    return step(reference, reference.parameters, double, mask)  # type: ignore[attr-defined]


def worst(actual: list[Tensor], expected: list[Tensor]) -> float:
    assert all(x.isfinite().all() for x in actual)
    return max(relative_error(x, y) for x, y in zip(actual, expected, strict=True))
