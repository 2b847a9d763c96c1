"""Clients' triangle multiplications, replaced: the same answers and gradients, in stand-ins and where a client is installed."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import evoattn.nn as evoattn_nn
from evoattn.clients.layers import layer as patched_layer
from evoattn.clients.site import Count
from tests.clients.standins import (
    CHANNELS,
    assert_equal_gradients,
    assert_wrapped,
    edges,
    filled,
    installed,
    multiplications,
    normal,
    register,
)
from tests.clients.standins.multiplications import HIDDEN, Fused, In, Out, Split

_UPDATE = "openfold.model.triangular_multiplicative_update"
STAND_INS: dict[str, Callable[[], nn.Module]] = {
    "OpenFold, outgoing": functools.partial(Split, True),
    "OpenFold, incoming": functools.partial(Split, False),
    "OpenFold, fused, outgoing": functools.partial(Fused, True),
    "OpenFold, fused, incoming": functools.partial(Fused, False),
    "Boltz, outgoing": Out,
    "Boltz, incoming": In,
}


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    boltz = "boltz.model.layers.triangular_mult.TriangleMultiplication"
    names = {Split: f"{_UPDATE}.TriangleMultiplicativeUpdate", Fused: f"{_UPDATE}.FusedTriangleMultiplicativeUpdate"}
    register(monkeypatch, {**names, Out: f"{boltz}Outgoing", In: f"{boltz}Incoming"})


@pytest.fixture(params=STAND_INS)
def original(request: pytest.FixtureRequest) -> nn.Module:
    return filled(STAND_INS[request.param]())


@pytest.mark.parametrize("masked", [False, True])
def test_replaced_multiplication_keeps_answers_and_gradients(
    masked: bool, original: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    replaced = copy.deepcopy(original)
    assert evoattn_nn.replace(replaced) == [""] and list(replaced.state_dict()) == list(original.state_dict())
    for lead in ((), (2,), (2, 3)):
        z = normal(*lead, 7, 7, CHANNELS)
        assert_equal_gradients(original, replaced, z, edges(*lead) if masked else None)
    monkeypatch.delattr(multiplications, "dense")
    replaced(z, None)
    with pytest.raises(NameError, match="dense"):
        original(z, None)


@pytest.mark.parametrize("masked", [False, True])
def test_every_module_may_be_wrapped(masked: bool, original: nn.Module) -> None:
    """Joined projections too."""
    z, mask = normal(2, 7, 7, CHANNELS), edges(2) if masked else None
    replaced = copy.deepcopy(original)
    evoattn_nn.replace(replaced)
    assert_wrapped(original, replaced, lambda: assert_equal_gradients(original, replaced, z, mask))


def test_hooks_on_projections_and_norms_run(original: nn.Module) -> None:
    seen = list[str]()
    evoattn_nn.replace(original)
    children = {name: child for name, child in original.named_children() if not isinstance(child, nn.Sigmoid)}
    for name, child in children.items():
        child.register_forward_hook(lambda *_, name=name: seen.append(name))
    original(normal(2, 7, 7, CHANNELS), None)
    assert sorted(seen) == sorted(children)


QUICK = ("OpenFold, fused, incoming", "Boltz, outgoing")


@pytest.mark.parametrize(
    "original", [pytest.param(x, marks=[] if x in QUICK else pytest.mark.slow) for x in STAND_INS], indirect=True
)
def test_replaced_multiplication_copies_and_compiles(original: nn.Module) -> None:
    """Copies compute with parameters of their own."""
    z, mask = normal(2, 7, 7, CHANNELS), edges(2)
    evoattn_nn.replace(original)
    expected = original(z, mask)
    torch.compiler.reset()
    compiled = torch.compile(original, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(z, mask), expected)
    copied, loaded = copy.deepcopy(original), pickle.loads(pickle.dumps(original))
    with torch.no_grad():
        for x in original.parameters():
            x.zero_()
    assert torch.equal(copied(z, mask), expected) and torch.equal(loaded(z, mask), expected)
    assert not original(z, mask).any()


@pytest.mark.parametrize("kind", [Split, Fused])
def test_the_update_is_added_in_place_if_the_client_asks(kind: Any) -> None:
    """Template stacks drop what the layer returns. A call of cuEquivariance adds nothing."""
    layer, mask, before = filled(kind(True)), edges(2), normal(2, 7, 7, CHANNELS).detach()
    expected = layer(before, mask)
    evoattn_nn.replace(layer)
    with torch.no_grad():
        z = before.clone()
        assert layer(z, mask, True, _add_with_inplace=True, _inplace_chunk_size=4) is z
        torch.testing.assert_close(z, before + expected)
        for options in (
            {"inplace_safe": True},
            {"_add_with_inplace": True},
            {"inplace_safe": True, "_add_with_inplace": True, "use_cueq_triangle_kernels": True},
        ):
            z = before.clone()
            torch.testing.assert_close(layer(z, mask, **options), expected)
            assert torch.equal(z, before)


@pytest.mark.parametrize("kind", [Split, Fused])
def test_a_direction_that_is_changed_later(kind: Any) -> None:
    layer, other, z = filled(kind(True)), kind(False).double(), normal(2, 7, 7, CHANNELS)
    other.load_state_dict(layer.state_dict())
    evoattn_nn.replace(layer)
    layer(z)
    layer._outgoing = False
    assert_equal_gradients(other, layer, z, edges(2))


def test_what_is_not_known_is_left_to_the_client() -> None:
    """`replace` warns. `patch` passes it on, and counts it."""
    layer, z = filled(Split(True)), normal(2, 7, 7, CHANNELS)
    count = Count()
    forward = patched_layer(Split.forward, count)
    torch.testing.assert_close(forward(layer, z, None, use_triton_triangle_kernels=False), layer(z))
    assert count.replaced == 1 and not count.passed_on
    torch.testing.assert_close(forward(layer, z, window=3), layer(z))
    assert count.replaced == 1 and list(count.passed_on) == [
        "evoattn.nn.replace does not know the argument 'window' of this layer"
    ]
    evoattn_nn.replace(layer)
    with pytest.warns(UserWarning, match="does not know the argument 'window'"):
        layer(z, window=3)
    layer.sigmoid.register_forward_hook(lambda *_: None)
    with pytest.warns(UserWarning, match="a replaced Split runs its own forward: sigmoid has hooks"):
        layer(z)


@pytest.mark.parametrize("kind", [Out, In])
def test_weights_of_boltz(kind: Any) -> None:
    """A state dict of Boltz loads into a layer with a projection for each half."""
    original = filled(kind())
    own = evoattn_nn.TriangleMultiplication(CHANNELS, CHANNELS, outgoing=kind is Out, bias=False).double()
    own.load_state_dict(evoattn_nn.from_boltz(original.state_dict()))
    z, mask = normal(2, 7, 7, CHANNELS), edges(2)
    torch.testing.assert_close(own(z, mask), original(z, mask), rtol=1e-10, atol=1e-10)


def test_names_of_boltz() -> None:
    """Only a layer that has all six modules is renamed."""
    state = {f"a.{name}": x for name, x in Out().state_dict().items()}
    p_in, g_in = state["a.p_in.weight"], state["a.g_in.weight"]
    others = {f"{prefix}{name}": x for prefix in ("", "b.") for name, x in Out().state_dict().items() if "g_out" not in name}
    others |= {"a.some_p_in.weight": p_in, "a.p_in.base.weight": p_in, "a.p_in.scale": p_in}
    replaced = evoattn_nn.from_boltz({**state, **others})
    assert all(replaced.pop(name) is x for name, x in others.items())
    halves = {"a.linear_a_p": p_in[:8], "a.linear_b_p": p_in[8:], "a.linear_a_g": g_in[:8], "a.linear_b_g": g_in[8:]}
    for name, x in halves.items():
        assert torch.equal(replaced.pop(f"{name}.weight"), x)
    names = {"layer_norm_in": "norm_in", "layer_norm_out": "norm_out", "linear_z": "p_out", "linear_g": "g_out"}
    for key, there in names.items():
        assert replaced.pop(f"a.{key}.weight") is state[f"a.{there}.weight"]
    assert replaced.keys() == {"a.layer_norm_in.bias", "a.layer_norm_out.bias"}


REAL = [
    (f"{package}.triangular_multiplicative_update", f"{fused}TriangleMultiplication{direction}")
    for package in ("openfold.model", "openfold3.core.model.layers")
    for fused in ("", "Fused")
    for direction in ("Outgoing", "Incoming")
]


@pytest.mark.parametrize(("module", "name"), REAL)
def test_openfold_multiplications_agree_after_replace(module: str, name: str) -> None:
    """Outputs, gradients, and what is written in place."""
    original = filled(getattr(installed(module), name)(CHANNELS, HIDDEN))
    replaced = copy.deepcopy(original)
    assert evoattn_nn.replace(replaced) == [""]
    for lead in ((2,), (2, 3)):
        for mask in (None, edges(*lead)):
            z = normal(*lead, 7, 7, CHANNELS)
            assert_equal_gradients(original, replaced, z, mask)
            with torch.no_grad():
                first, second = z.detach().clone(), z.detach().clone()
                options = {"inplace_safe": True, "_add_with_inplace": True, "_inplace_chunk_size": 4}
                torch.testing.assert_close(replaced(first, mask, **options), original(second, mask, **options))
                torch.testing.assert_close(first, second)


@pytest.mark.parametrize("name", ["TriangleMultiplicationOutgoing", "TriangleMultiplicationIncoming"])
def test_boltz_multiplications_agree_after_replace(name: str) -> None:
    """In float32, where Boltz multiplies; `test_blocks` compares gradients in float64."""
    original = filled(getattr(installed("boltz.model.layers.triangular_mult"), name)(CHANNELS)).float()
    replaced = copy.deepcopy(original)
    own = evoattn_nn.TriangleMultiplication(CHANNELS, CHANNELS, outgoing="Outgoing" in name, bias=False)
    own.load_state_dict(evoattn_nn.from_boltz(original.state_dict()))
    assert evoattn_nn.replace(replaced) == [""]
    z, mask = normal(2, 7, 7, CHANNELS).float(), edges(2).float()
    expected = original(z, mask)
    torch.testing.assert_close(replaced(z, mask, use_kernels=True), expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(own(z, mask), replaced(z, mask))
