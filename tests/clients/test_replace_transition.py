"""Clients' transitions, replaced: the same answers and gradients, in stand-ins and where a client is installed."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import evoattn.nn as evoattn_nn
from evoattn.clients import layers
from evoattn.clients.layers import layer as patched_layer
from evoattn.clients.site import Count
from evoattn.clients.snapshots import Snapshot
from evoattn.nn.submodules import is_linear, is_norm
from tests.clients.standins import assert_equal_gradients, assert_wrapped, filled, installed, normal, register

C, H = 8, 20


def dense(x: Tensor, mask: Tensor | None, norm: Any, hidden: Callable[[Tensor], Tensor], out: Any) -> Tensor:
    """The definition."""
    replaced: Tensor = out(hidden(norm(x)))
    return replaced if mask is None else replaced * mask[..., None]


class Pair(nn.Module):
    """Stands for OpenFold's."""

    def __init__(self, channels: int = C) -> None:
        super().__init__()
        self.layer_norm, self.relu = nn.LayerNorm(channels), nn.ReLU()
        self.linear_1, self.linear_2 = nn.Linear(channels, H), nn.Linear(H, channels)

    def forward(self, z: Tensor, mask: Tensor | None = None, chunk_size: int | None = None, window: Any = None) -> Tensor:
        return dense(z, mask, self.layer_norm, lambda y: self.relu(self.linear_1(y)), self.linear_2)


class Sequences(Pair):
    def forward(self, m: Tensor, mask: Tensor | None = None, chunk_size: int | None = None) -> Tensor:  # type: ignore[override]
        return dense(m, mask, self.layer_norm, lambda y: self.relu(self.linear_1(y)), self.linear_2)


class SwiGLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear_a, self.linear_b, self.swish = nn.Linear(C, H, bias=False), nn.Linear(C, H, bias=False), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.swish(self.linear_a(x)) * self.linear_b(x)  # type: ignore[no-any-return]


class Gated(nn.Module):
    """Stands for OpenFold-3's."""

    def __init__(self) -> None:
        super().__init__()
        self.layer_norm, self.swiglu, self.linear_out = nn.LayerNorm(C), SwiGLU(), nn.Linear(H, C, bias=False)

    def forward(
        self, x: Tensor, mask: Tensor | None = None, chunk_size: int | None = None, ckpt_chunk_size: int | None = None
    ) -> Tensor:
        return dense(x, mask, self.layer_norm, self.swiglu, self.linear_out)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(C, H), nn.ReLU())])
        self.linear_out = nn.Linear(H, C)


class Plain(nn.Module):
    """Stands for OpenFold-3's with ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.layer_norm, self.transition_mlp = nn.LayerNorm(C), Mlp()

    def forward(self, x: Tensor, mask: Tensor | None = None, chunk_size: int | None = None) -> Tensor:
        return dense(x, mask, self.layer_norm, self.transition_mlp.layers[0], self.transition_mlp.linear_out)


class Boltz(nn.Module):
    """Stands for Boltz's, which takes no mask."""

    def __init__(self, outputs: int = C) -> None:
        super().__init__()
        self.norm, self.silu = nn.LayerNorm(C), nn.SiLU()
        self.fc1, self.fc2, self.fc3 = (
            nn.Linear(C, H, bias=False),
            nn.Linear(C, H, bias=False),
            nn.Linear(H, outputs, bias=False),
        )

    def forward(self, x: Tensor, chunk_size: int | None = None) -> Tensor:
        return dense(x, None, self.norm, lambda y: self.silu(self.fc1(y)) * self.fc2(y), self.fc3)


class Protenix(nn.Module):
    """Stands for Protenix's, which calls a function in the place of a module."""

    def __init__(self) -> None:
        super().__init__()
        self.layernorm1 = nn.LayerNorm(C)
        self.linear_no_bias_a, self.linear_no_bias_b = nn.Linear(C, H, bias=False), nn.Linear(C, H, bias=False)
        self.linear_no_bias = nn.Linear(H, C, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        def hidden(y: Tensor) -> Tensor:
            return F.silu(self.linear_no_bias_a(y)) * self.linear_no_bias_b(y)

        return dense(x, None, self.layernorm1, hidden, self.linear_no_bias)


class Esm(nn.Module):
    """Stands for ESMFold's, which adds its input."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.LayerNorm(C), nn.Linear(C, H), nn.ReLU(), nn.Linear(H, C), nn.Dropout(dropout))

    def forward(self, x: Tensor) -> Tensor:
        return x + dense(x, None, self.mlp[0], lambda y: self.mlp[2](self.mlp[1](y)), lambda u: self.mlp[4](self.mlp[3](u)))


STAND_INS: dict[type[nn.Module], str] = {
    Pair: "openfold.model.pair_transition.PairTransition",
    Sequences: "openfold.model.evoformer.MSATransition",
    Gated: "openfold3.core.model.layers.transition.SwiGLUTransition",
    Plain: "openfold3.core.model.layers.transition.ReLUTransition",
    Boltz: "boltz.model.layers.transition.Transition",
    Protenix: "protenix.model.modules.primitives.Transition",
    Esm: "transformers.models.esm.modeling_esmfold.EsmFoldResidueMLP",
}
MASKED = (Pair, Sequences, Gated, Plain)


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, STAND_INS)


@pytest.fixture(params=STAND_INS, ids=lambda kind: kind.__name__)
def original(request: pytest.FixtureRequest) -> nn.Module:
    return filled(request.param())


def rows(*lead: int) -> Tensor:
    return (torch.rand(*lead, generator=torch.Generator().manual_seed(5)) > 0.3).double()


def test_replaced_transition_keeps_answers_and_gradients(original: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    replaced = copy.deepcopy(original)
    assert evoattn_nn.replace(replaced) == [""] and list(replaced.state_dict()) == list(original.state_dict())
    for lead in ((7,), (2, 7), (2, 3, 7)):
        x = normal(*lead, C)
        assert_equal_gradients(original, replaced, x)
        if isinstance(original, MASKED):
            assert_equal_gradients(original, replaced, x, rows(*lead))
            assert_equal_gradients(original, replaced, x, rows(7))  # the same for all batches
    monkeypatch.delitem(globals(), "dense")
    chunks: dict[str, int] = {} if isinstance(original, Protenix | Esm) else {"chunk_size": 3}
    replaced(normal(7, C), **chunks, **({"ckpt_chunk_size": 2} if isinstance(original, Gated) else {}))
    with pytest.raises(NameError, match="dense"):
        original(normal(7, C))


def test_every_norm_and_projection_may_be_wrapped(original: nn.Module) -> None:
    x, replaced = normal(2, 7, C), copy.deepcopy(original)
    evoattn_nn.replace(replaced)
    assert_wrapped(original, replaced, lambda: assert_equal_gradients(original, replaced, x))


@pytest.mark.parametrize(
    "original",
    [pytest.param(x, id=x.__name__, marks=[] if x in (Gated, Esm) else pytest.mark.slow) for x in STAND_INS],
    indirect=True,
)
def test_replaced_transition_copies_and_compiles(original: nn.Module) -> None:
    x = normal(2, 7, C)
    evoattn_nn.replace(original)
    expected = original(x)
    torch.compiler.reset()
    torch.testing.assert_close(torch.compile(original, fullgraph=True, backend="aot_eager")(x), expected)
    copied, loaded = copy.deepcopy(original), pickle.loads(pickle.dumps(original))
    with torch.no_grad():
        for parameter in original.parameters():
            parameter.zero_()
    assert torch.equal(copied(x), expected) and torch.equal(loaded(x), expected)
    assert torch.equal(original(x), x if isinstance(original, Esm) else torch.zeros_like(x))


def test_wide_transitions_and_those_of_other_sizes_are_left_alone() -> None:
    for left, known in ((Pair(257), Pair(256)), (Boltz(C + 1), Boltz())):
        model = nn.ModuleList([left, known])
        assert evoattn_nn.replace(model) == ["1"]
        assert type(model[0]) is type(left) and type(model[1]) is not type(left)


def test_a_wide_transition_is_no_call_that_was_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client computes it because that is as fast: nobody has to read so, and no second call looks at its modules."""
    original, count = filled(Pair(257)), Count()
    z, forward = normal(2, 3, 257), patched_layer(Pair.forward, count)
    torch.testing.assert_close(forward(original, z), original(z))
    monkeypatch.setattr(Snapshot, "holds", None)
    torch.testing.assert_close(forward(original, z), original(z))
    assert (count.replaced, dict(count.passed_on)) == (0, {})


def test_float32_on_a_gpu_is_left_to_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "is_float32_on_gpu", lambda arguments: any(isinstance(x, Tensor) for x in arguments))
    original, count = filled(Pair()), Count()
    z = normal(2, 3, C)
    forward = patched_layer(Pair.forward, count)
    torch.testing.assert_close(forward(original, z), original(z))
    monkeypatch.setattr(Snapshot, "holds", None)  # a look at the modules takes the host long; no second call has one
    torch.testing.assert_close(forward(original, z=z), original(z))
    assert (count.replaced, dict(count.passed_on)) == (0, {layers.WIDE: 2})


@pytest.mark.parametrize(("kind", "path"), [(Pair, "relu"), (Boltz, "silu"), (Gated, "swiglu.swish")])
def test_another_activation_is_refused(kind: Any, path: str) -> None:
    layer = kind()
    parent, _, name = path.rpartition(".")
    setattr(layer.get_submodule(parent), name, nn.GELU())
    with pytest.raises(ValueError, match=f"a {kind.__name__} has other modules than the layer"):
        evoattn_nn.replace(layer)


def test_hooks_on_an_activation_run() -> None:
    layer = filled(Gated())
    evoattn_nn.replace(layer)
    layer.swiglu.swish.register_forward_hook(lambda _, __, y: 0 * y)
    with pytest.warns(UserWarning, match=r"a replaced Gated runs its own forward: swiglu.swish has hooks"):
        assert not layer(normal(7, C)).any()
    other = filled(Pair())
    evoattn_nn.replace(other)
    with pytest.warns(UserWarning, match="does not know the argument 'window'"):
        other(normal(7, C), window=3)


def test_dropout_of_esmfold() -> None:
    """As the client's, in training and not, if its probability changes, and if it has a hook."""
    original, x, seen = filled(Esm(0.5)), normal(7, C), list[str]()
    replaced = copy.deepcopy(original)
    evoattn_nn.replace(replaced)
    for probability, training in ((0.5, True), (0.5, False), (0.0, True), (0.3, True)):
        for layer in (original, replaced):
            layer.train(training).mlp[4].p = probability
        torch.manual_seed(0)
        expected = original(x)
        torch.manual_seed(0)
        torch.testing.assert_close(replaced(x), expected)
    replaced.eval().mlp[4].register_forward_hook(lambda *_: seen.append("drop"))
    replaced(x)
    assert seen == ["drop"]


REAL: dict[str, tuple[str, Callable[[Any], Any], tuple[tuple[int, ...], ...]]] = {
    "OpenFold, pairs": ("openfold.model.pair_transition", lambda client: client.PairTransition(C, 2), ((2, 7, 7),)),
    "OpenFold, MSA": ("openfold.model.evoformer", lambda client: client.MSATransition(C, 2), ((2, 5, 7),)),
    "OpenFold-3, SwiGLU": (
        "openfold3.core.model.layers.transition",
        lambda client: client.SwiGLUTransition(C, 2),
        ((2, 7), (2, 3, 7, 7)),
    ),
    "OpenFold-3, ReLU": ("openfold3.core.model.layers.transition", lambda client: client.ReLUTransition(C, 2), ((2, 7, 7),)),
    "Boltz": ("boltz.model.layers.transition", lambda client: client.Transition(C, 3 * C), ()),
    "Protenix": ("protenix.model.modules.primitives", lambda client: client.Transition(C, 2), ()),
    "ESMFold": ("transformers.models.esm.modeling_esmfold", lambda client: client.EsmFoldResidueMLP(C, 2 * C), ()),
}


@pytest.mark.parametrize("name", REAL)
def test_clients(name: str) -> None:
    """Outputs and gradients in training, and outputs in inference, where some take chunks."""
    module, make, masks = REAL[name]
    original = filled(make(installed(module)))
    replaced = copy.deepcopy(original)
    assert evoattn_nn.replace(replaced) == [""]
    parts = [x for x in original.modules() if x._parameters]
    assert len(parts) > 2 and all(is_linear(x) or is_norm(x) for x in parts)  # so that the operator computes
    for lead in masks:
        assert_equal_gradients(original, replaced, normal(*lead, C), rows(*lead))
    x = normal(2, 7, 7, C)
    assert_equal_gradients(original, replaced, x)
    with torch.no_grad():
        torch.testing.assert_close(replaced.eval()(x), original.eval()(x), rtol=1e-10, atol=1e-10)
