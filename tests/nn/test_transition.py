"""The transition layer: in place, with modules that were changed, and with weights of clients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import evoattn.nn.transition as of_layer
from evoattn.nn import Transition, from_boltz
from tests.helpers.changes import Wrapper
from tests.helpers.dense_layers import MaskedSoftmax, transition

MODULES = {
    "swiglu": ("layer_norm", "swiglu", "swiglu.linear_a", "swiglu.linear_b", "linear_out"),
    "relu": ("layer_norm", "linear_1", "linear_2"),
}
EACH = pytest.mark.parametrize(("activation", "path"), [(x, path) for x, paths in MODULES.items() for path in paths])


def layer_of(activation: str, *, residual: bool = False) -> Transition:
    torch.manual_seed(0)
    layer = Transition(8, 2, activation=activation, residual=residual).double()
    for x in layer.parameters():
        nn.init.normal_(x, std=0.5)
    return layer


def dense(layer: Transition, x: Tensor, mask: Tensor) -> Tensor:
    return transition(layer, x, mask=mask, weights=MaskedSoftmax())


def by_calls(layer: Transition, x: Tensor, mask: Tensor) -> Tensor:
    """The update, with each sub-module called, one that only holds others too."""
    y = layer.layer_norm(x)
    output: Tensor = (
        layer.linear_2(layer.linear_1(y).relu()) if layer.activation == "relu" else layer.linear_out(layer.swiglu(y))
    )
    return output * mask[..., None]


def rows() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(2, 5, 8, dtype=torch.float64), (torch.rand(2, 5) > 0.3).double()


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """An entry for each call of the operator."""
    seen: list[str] = []
    operator = of_layer.transition

    def counted(*args: Tensor, **named: object) -> Tensor:
        seen.append("operator")
        return operator(*args, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(of_layer, "transition", counted)
    return seen


def test_names() -> None:
    """They are those of OpenFold-3 and OpenFold."""
    assert set(layer_of("swiglu").state_dict()) == {
        "layer_norm.weight", "layer_norm.bias", "swiglu.linear_a.weight", "swiglu.linear_b.weight", "linear_out.weight"
    }  # fmt: skip
    kinds = {f"{name}.{kind}" for name in MODULES["relu"] for kind in ("weight", "bias")}
    assert set(layer_of("relu").state_dict()) == kinds
    assert "linear_out.bias" in Transition(8, bias=True).state_dict()


@pytest.mark.parametrize("activation", MODULES)
def test_a_new_layer_changes_nothing(activation: str) -> None:
    """The output is initialised to 0, as AlphaFold does."""
    layer, (x, mask) = Transition(8, activation=activation, residual=True).double(), rows()
    assert torch.equal(layer(x, mask), x)
    assert all(module.weight.std() > 0.1 for module in layer._inner)


@EACH
def test_a_hooked_module_of_a_transition_is_called(activation: str, path: str, called: list[str]) -> None:
    layer, (x, mask), seen = layer_of(activation), rows(), []
    layer(x, mask)
    assert called == ["operator"]
    layer.get_submodule(path).register_forward_hook(lambda *_: seen.append(path))
    torch.testing.assert_close(layer(x, mask), dense(layer, x, mask))
    assert seen[:1] == [path] and called == ["operator"]


@EACH
def test_modules_may_be_wrapped(activation: str, path: str, called: list[str]) -> None:
    """The update and all gradients are those of a layer that calls its modules. The wrapper triples what its module returns."""
    layer, (x, mask) = layer_of(activation), rows()
    parent, _, name = path.rpartition(".")
    setattr(layer.get_submodule(parent), name, Wrapper(layer.get_submodule(path)))
    leaves = [x.requires_grad_(), *layer.parameters()]
    actual, right = layer(x, mask), by_calls(layer, x, mask)
    torch.testing.assert_close(actual, right)
    do = torch.randn_like(right)
    for a, b in zip(torch.autograd.grad(actual, leaves, do), torch.autograd.grad(right, leaves, do), strict=True):
        torch.testing.assert_close(a, b)
    assert not called


def test_a_swiglu_of_another_kind(called: list[str]) -> None:
    layer, (x, mask) = layer_of("swiglu"), rows()
    layer.swiglu = nn.Sequential(nn.Linear(8, 16), nn.GELU()).double()  # type: ignore[assignment]
    torch.testing.assert_close(layer(x, mask), by_calls(layer, x, mask))
    assert not called


@pytest.mark.parametrize("activation", MODULES)
@pytest.mark.parametrize("hooked", [False, True])
def test_in_place_transition_overwrites_x(activation: str, hooked: bool) -> None:
    layer, (x, mask) = layer_of(activation, residual=True), rows()
    with torch.no_grad():
        right = layer(x, mask)
        if hooked:
            layer.layer_norm.register_forward_hook(lambda *_: None)
        assert layer(x, mask, in_place=True) is x
    torch.testing.assert_close(x, right)


def test_add_to() -> None:
    """x is added whatever `residual` says."""
    (x, mask), update = rows(), layer_of("relu")
    right = x + update(x, mask)
    with torch.no_grad():
        for layer in (update, layer_of("relu", residual=True)):
            torch.testing.assert_close(layer.add_to(x, mask, in_place=False), right)
        assert update.add_to(x, mask, in_place=True) is x
    torch.testing.assert_close(x, right)


def test_weights_of_boltz() -> None:
    layer, (x, _) = layer_of("swiglu"), rows()
    names = {"layer_norm": "norm", "swiglu.linear_a": "fc1", "swiglu.linear_b": "fc2", "linear_out": "fc3"}
    state = {f"{names[name.rpartition('.')[0]]}.{name.rpartition('.')[2]}": y for name, y in layer.state_dict().items()}
    other = Transition(8, 2).double()
    other.load_state_dict(from_boltz(state))
    torch.testing.assert_close(other(x), layer(x))
    partly = {name: y for name, y in state.items() if name != "fc2.weight"}
    assert from_boltz(partly) == partly


WRONG: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: Transition(8, activation="gelu"), ValueError, "activation must be 'swiglu' or 'relu', got 'gelu'"),
    (lambda: Transition(8)(torch.ones(5, 7)), ValueError, r"x must have at least 1 axes and 8 channels, got shape \[5, 7\]"),
    (lambda: Transition(8)(torch.ones(5, 8), torch.ones(4)), ValueError, r"mask must broadcast to \[5\]"),
    (lambda: Transition(8)(torch.ones(5, 8), in_place=True), ValueError, "in_place=True needs residual=True"),
    (
        lambda: Transition(8, residual=True)(torch.ones(5, 8), in_place=True),
        ValueError,
        "in_place=True overwrites x, which a gradient needs",
    ),
]


@pytest.mark.parametrize(("call", "error", "message"), WRONG)
def test_what_does_not_fit_is_named(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
