"""RosettaFold-3's layers, replaced: the same answers and gradients, in stand-ins and where it is installed."""

from __future__ import annotations

import copy
import functools
import importlib
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import evoattn.nn as evoattn_nn
from evoattn.clients import arguments
from evoattn.clients.layers import layer as patched_layer
from evoattn.clients.site import Count
from evoattn.core import own_code
from tests.clients.standins import CHANNELS, assert_equal_gradients, filled, installed, normal, register

CALLS: list[str] = []
"""Own forwards of stand-ins that ran."""


def activation_checkpointing(function: Callable[..., Any]) -> Callable[..., Any]:
    """Stands for foundry's decorator, which hides the arguments' names."""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        CALLS.append("theirs")
        return checkpoint(function, *args, use_reentrant=False, **kwargs)

    wrapper.__module__ = "foundry.training.checkpoint"
    return wrapper


class Triangle(nn.Module):
    """Stands for the triangle attention, whose bias is of the pair as it comes."""

    def __init__(self, start_node: bool) -> None:
        super().__init__()
        self.h, self.dim, self.start_node, self.norm = 2, 4, start_node, nn.LayerNorm(CHANNELS)
        self.to_q, self.to_k, self.to_v = (nn.Linear(CHANNELS, 8, bias=False) for _ in range(3))
        self.to_b, self.to_g, self.to_out = nn.Linear(CHANNELS, 2, bias=False), nn.Linear(CHANNELS, 8), nn.Linear(8, CHANNELS)

    @activation_checkpointing
    def forward(self, pair: Tensor) -> Tensor:
        y = self.norm(pair)
        bias = self.to_b(y)
        y = y if self.start_node else y.transpose(1, 2)
        q, k, v = (to(y).unflatten(-1, (self.h, -1)) for to in (self.to_q, self.to_k, self.to_v))
        scores = torch.einsum("bijhd,bikhd->bijkh", q, k) / self.dim**0.5 + bias[:, None]
        o = torch.einsum("bijkh,bikhd->bijhd", scores.softmax(-2), v).flatten(-2) * self.to_g(y).sigmoid()
        return self.to_out(o if self.start_node else o.transpose(1, 2))  # type: ignore[no-any-return]


class Multiplied(nn.Module):
    """Stands for the triangle multiplication. Its product is smaller without cuEquivariance, which the norm's epsilon shows."""

    def __init__(self, direction: str, use_cuequivariance: bool = True) -> None:
        super().__init__()
        self.d_pair, self.d_hidden, self.direction, self.use_cuequivariance = CHANNELS, 6, direction, use_cuequivariance
        self.norm_in, self.norm_out = nn.LayerNorm(CHANNELS), nn.LayerNorm(6, eps=1e-5)
        self.p_in, self.g_in = nn.Linear(CHANNELS, 12, bias=False), nn.Linear(CHANNELS, 12, bias=False)
        self.p_out, self.g_out = nn.Linear(6, CHANNELS, bias=False), nn.Linear(CHANNELS, CHANNELS, bias=False)

    def forward(self, pair: Tensor) -> Tensor:
        CALLS.append("theirs")
        y = self.norm_in(pair)
        a, b = (self.p_in(y) * self.g_in(y).sigmoid()).chunk(2, -1)
        equation = "bikd,bjkd->bijd" if self.direction == "outgoing" else "bkid,bkjd->bijd"
        switch = sys.modules["rf3.model.layers.attention"].SHOULD_USE_CUEQUIVARIANCE
        t = torch.einsum(equation, a, b / (1 if self.use_cuequivariance and switch else pair.shape[1]))
        return self.p_out(self.norm_out(t)) * self.g_out(y).sigmoid()  # type: ignore[no-any-return]


class Wide(nn.Module):
    """Stands for the transition."""

    def __init__(self) -> None:
        super().__init__()
        self.layer_norm_1, self.linear_3 = nn.LayerNorm(CHANNELS), nn.Linear(20, CHANNELS, bias=False)
        self.linear_1, self.linear_2 = nn.Linear(CHANNELS, 20, bias=False), nn.Linear(CHANNELS, 20, bias=False)

    @activation_checkpointing
    def forward(self, X: Tensor) -> Tensor:
        y = self.layer_norm_1(X)
        return self.linear_3(F.silu(self.linear_1(y)) * self.linear_2(y))  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """The stand-ins are taken for RosettaFold-3's layers. The module that holds its switch is returned."""
    names = {Triangle: "attention.TriangleAttention", Multiplied: "attention.TriangleMultiplication"}
    names |= {Wide: "layer_utils.Transition"}
    register(monkeypatch, {kind: f"rf3.model.layers.{name}" for kind, name in names.items()})
    module = types.ModuleType("rf3.model.layers.attention")
    module.SHOULD_USE_CUEQUIVARIANCE = False  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    CALLS.clear()
    return module


STAND_INS = {
    "starting node": lambda: Triangle(True),
    "ending node": lambda: Triangle(False),
    "outgoing": lambda: Multiplied("outgoing"),
    "incoming": lambda: Multiplied("incoming", use_cuequivariance=False),
    "transition": Wide,
}


@pytest.mark.parametrize("switch", [False, True])
@pytest.mark.parametrize("name", STAND_INS)
def test_replaced_layers_of_rf3_keep_answers_and_gradients(name: str, switch: bool, known: Any) -> None:
    original = filled(STAND_INS[name]())
    known.SHOULD_USE_CUEQUIVARIANCE = switch
    replaced, count = copy.deepcopy(original), Count()
    assert evoattn_nn.replace(replaced) == [""]
    assert_equal_gradients(original, replaced, normal(2, 7, 7, CHANNELS))
    forward = patched_layer(type(original).forward, count)
    assert_equal_gradients(original, functools.partial(forward, original), normal(2, 7, 7, CHANNELS))
    assert count.replaced == 1 and not count.passed_on
    CALLS.clear()
    replaced(normal(2, 7, 7, CHANNELS))
    assert not CALLS


@pytest.mark.parametrize("decorated", [True, False])
def test_a_decorated_forward_is_the_clients_own(decorated: bool, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The decorator lies in another package than the client, and does not say what it wraps. Another one is a program's."""
    name = "activation_checkpointing" if decorated else "traced"
    decorator = f"def {name}(function):\n    def wrapper(*x):\n        return function(*x)\n    return wrapper\n"
    client = f"from foundry.training.checkpoint import {name}\n\n\n@{name}\ndef forward(self, x):\n    return x\n"
    files = {"foundry.training.checkpoint": decorator, "clientish.layers": client}
    for module, source in files.items():
        file = (tmp_path / module.replace(".", "/")).with_suffix(".py")
        file.parent.mkdir(parents=True)
        file.write_text(source)
        for folder in file.parents[: module.count(".")]:
            (folder / "__init__.py").touch()
    packages = ("foundry", "foundry.training", "foundry.training.checkpoint", "clientish", "clientish.layers")
    monkeypatch.syspath_prepend(str(tmp_path))
    for module in packages:
        monkeypatch.setitem(sys.modules, module, sys)  # so that it is as before afterwards
        del sys.modules[module]
    forward = importlib.import_module("clientish.layers").forward
    assert own_code.is_from(forward, "clientish.layers") is decorated
    assert (arguments.positions(forward) == ("x",)) is decorated
    of_others = getattr(sys.modules["foundry.training.checkpoint"], name)(filled)
    assert not own_code.is_from(of_others, "clientish.layers")


REAL: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "starting node": ("attention", lambda client: client.TriangleAttention(32, 4, 8, start_node=True)),
    "ending node": ("attention", lambda client: client.TriangleAttention(32, 4, 8, start_node=False)),
    "outgoing": ("attention", lambda client: client.TriangleMultiplication(32, 32, "outgoing")),
    "incoming": ("attention", lambda client: client.TriangleMultiplication(32, 24, "incoming", False, False)),
    "transition": ("layer_utils", lambda client: client.Transition(n=2, c=32)),
}


@pytest.mark.parametrize("name", REAL)
def test_real_layers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "rf3.model.layers.attention")
    module, make = REAL[name]
    original = filled(make(installed(f"rf3.model.layers.{module}")))
    replaced = copy.deepcopy(original)
    assert evoattn_nn.replace(replaced) == [""]
    assert_equal_gradients(original, replaced, normal(2, 7, 7, 32))
