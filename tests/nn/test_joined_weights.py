"""State dicts with joined projections of a triangle multiplication, as OpenFold's multimer models of version 3 have them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evoattn.nn import PairBlock, Transition, TriangleMultiplication, from_openfold3
from evoattn.nn.multiplication import JoinedTriangleMultiplication

RENAMES: list[Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]] = [dict, from_openfold3]


def joined(bias: bool) -> nn.Module:
    torch.manual_seed(0)
    layer = JoinedTriangleMultiplication(16, 12, outgoing=False, bias=bias)
    for x in layer.parameters():
        nn.init.normal_(x)
    return layer


@pytest.mark.parametrize("rename", RENAMES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("strict", [True, False])
def test_a_layer_loads_joined_projections(bias: bool, strict: bool, rename: Any) -> None:
    other, layer = joined(bias), TriangleMultiplication(16, 12, outgoing=False, bias=bias)
    state = other.state_dict()
    names = list(state)
    assert layer.load_state_dict(rename(state), strict=strict) == ([], [])
    assert list(state) == names
    z = torch.randn(1, 5, 5, 16)
    torch.testing.assert_close(layer(z), other(z))


@pytest.mark.parametrize("rename", RENAMES)
def test_a_model_loads_joined_projections(rename: Any) -> None:
    """Whole state dicts too, below other names."""
    block, wanted = nn.Sequential(PairBlock(16, 12, 8, 2)), PairBlock(16, 12, 8, 2)
    state = dict(wanted.state_dict())
    for name in ("tri_mul_out", "tri_mul_in"):
        for letter in "pg":
            halves = [state.pop(f"{name}.linear_{half}_{letter}.weight") for half in "ab"]
            state[f"{name}.linear_ab_{letter}.weight"] = torch.cat(halves)
    block.load_state_dict(rename({f"0.{name}": x for name, x in state.items()}))
    for x, y in zip(block.parameters(), wanted.parameters(), strict=True):
        assert torch.equal(x, y)


def test_a_missing_projection_is_named() -> None:
    state = dict(joined(True).state_dict())
    del state["linear_ab_g.bias"]
    with pytest.raises(RuntimeError, match=r"Missing key.*linear_a_g.bias.*linear_b_g.bias"):
        TriangleMultiplication(16, 12).load_state_dict(state)


def test_a_relu_transition_of_openfold3() -> None:
    layer = Transition(8, activation="relu")
    names = {"linear_1": "transition_mlp.layers.0.0", "linear_2": "transition_mlp.linear_out"}
    theirs = {
        f"pair_transition.{names.get(module, module)}.{kind}": x
        for name, x in layer.state_dict().items()
        for module, _, kind in [name.rpartition(".")]
    }
    own = from_openfold3(theirs)
    assert {name.removeprefix("pair_transition.") for name in own} == layer.state_dict().keys()
