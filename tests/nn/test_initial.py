"""Layers start as AlphaFold's do, also if their initialisation is deferred."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

from evoattn import nn as layers
from evoattn.nn.multiplication import JoinedTriangleMultiplication

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "triangle attention": lambda: layers.TriangleAttention(16, 8, 2),
    "multiplication": lambda: layers.TriangleMultiplication(16, 12),
    "joined multiplication": lambda: JoinedTriangleMultiplication(16, 12, bias=False),
    "SwiGLU": lambda: layers.Transition(16),
    "ReLU": lambda: layers.Transition(16, activation="relu"),
    "rows": lambda: layers.MSARowAttentionWithPairBias(16, 12, 8, 2),
    "columns": lambda: layers.MSAColumnAttention(16, 8, 2),
    "global columns": lambda: layers.MSAColumnGlobalAttention(16, 8, 2),
    "outer product mean": lambda: layers.OuterProductMean(16, 12, 8),
    "averaging": lambda: layers.MSAPairWeightedAveraging(16, 12, 8, 2),
    "templates": lambda: layers.TemplatePointwiseAttention(12, 16, 8, 2),
    "single track": lambda: layers.AttentionPairBias(16, 12, 8, 2),
    "diffusion transformer": lambda: layers.AttentionPairBias(16, 12, 8, 2, c_s=12),
    "pair block": lambda: layers.PairBlock(16, 12, 8, 2, bias=True),
    "pairformer block": lambda: layers.PairformerBlock(16, 16, 8, 2, 12, 8, 2),
}


def owns_parameters(module: nn.Module) -> bool:
    return any(x is not None for x in module._parameters.values())


def reset(modules: list[nn.Module]) -> None:
    for module in modules:
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


ORDERS: dict[str, Callable[[nn.Module], None]] = {
    "the layer": lambda layer: layer.reset_parameters(),  # type: ignore[operator]
    "parents first": lambda layer: reset(list(layer.modules())),
    "children first": lambda layer: reset(list(layer.modules())[::-1]),
    "owners of parameters, as FSDP": lambda layer: reset([x for x in layer.modules() if owns_parameters(x)]),
}


def assert_as_new(layer: nn.Module, new: nn.Module) -> None:
    for (name, x), y in zip(layer.named_parameters(), new.parameters(), strict=True):
        if bool((y == y.flatten()[0]).all()):
            assert torch.equal(x, y), name
        else:
            assert bool(x.isfinite().all()), name
            assert x.numel() < 64 or 0.6 < float(x.detach().std() / y.detach().std()) < 1.6, name


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", LAYERS)
def test_a_deferred_initialisation(name: str, order: str) -> None:
    torch.manual_seed(0)
    new = LAYERS[name]()
    with torch.device("meta"):
        layer = LAYERS[name]()
    layer.to_empty(device="cpu")
    with torch.no_grad():
        for x in layer.parameters():
            x.fill_(torch.nan)
    ORDERS[order](layer)
    assert_as_new(layer, new)


@pytest.mark.parametrize("name", LAYERS)
def test_copies_initialise_their_own_parameters(name: str) -> None:
    layer = LAYERS[name]()
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        with torch.no_grad():
            for x in (*layer.parameters(), *other.parameters()):
                x.fill_(torch.nan)
        other.reset_parameters()
        assert_as_new(other, LAYERS[name]())
        assert all(bool(x.isnan().all()) for x in layer.parameters())


@pytest.mark.parametrize("name", LAYERS)
def test_projections_are_plain_modules_of_torch(name: str) -> None:
    layer = LAYERS[name]()
    assert {type(x) for x in layer.modules() if owns_parameters(x)} <= {nn.Linear, nn.LayerNorm}


def test_a_layer_is_freed_at_once() -> None:
    """Without a reference to itself."""
    gc.disable()
    try:
        layer = layers.TriangleAttention(16, 8, 2)
        gone = weakref.ref(layer.mha.linear_q)
        del layer
        assert gone() is None
    finally:
        gc.enable()


def test_a_new_block_changes_nothing() -> None:
    block, z = layers.PairBlock(16, 16, 8, 2).eval(), torch.randn(1, 6, 6, 16)
    block.reset_parameters()
    assert torch.equal(block(z), z)
