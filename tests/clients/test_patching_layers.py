"""Whole layers that a patch replaces, in a toy client."""

from typing import Any

import pytest
import torch
from torch import Tensor

import evoattn
import evoattn.nn
from evoattn.clients import layers, patching
from evoattn.clients.blocks import KnownBlock
from evoattn.clients.kinds import KINDS, in_words
from evoattn.clients.layers import layer
from evoattn.clients.registry import known, sources
from evoattn.clients.site import Count
from tests.clients.toy import Z


def run_fused(triangle: Any) -> Tensor:
    """What our layer makes of Z with the same parameters."""
    layer = evoattn.nn.TriangleAttention(8, 4, 2)
    layer.load_state_dict(triangle.state_dict())
    return layer(Z)  # type: ignore[no-any-return]


def test_a_patched_layer_is_replaced_whole_and_shares_parameters(triangle: Any) -> None:
    expected, site = run_fused(triangle), "toy_client.triangle:Triangle.forward"
    with evoattn.patch("toy") as patched:
        assert patched.sites[-1] == site
        assert torch.equal(triangle(Z, use_lma=True), expected)
        assert patched.calls_by_site[site] == 1 and not patched.passed_on
        with torch.no_grad():
            triangle.mha.linear_o.bias.add_(1)
        assert torch.equal(triangle(Z), run_fused(triangle)), "parameters are shared"
    assert not triangle(Z).any(), "the client's own"


def test_layers_may_be_asked_for_later(triangle: Any) -> None:
    with evoattn.patch("toy", layers=False) as patched:
        assert not triangle(Z).any()
        assert evoattn.patch("toy") is patched is evoattn.patch("toy")
        assert patched.sites.count("toy_client.triangle:Triangle.forward") == 1
        assert torch.equal(triangle(Z), run_fused(triangle))
    patched.undo()
    assert not triangle(Z).any()


class OnGpu(Tensor):
    """A tensor of the CPU that says it is on a GPU."""

    is_cuda = True  # type: ignore[assignment]


def test_few_residues_on_a_gpu_are_left_to_the_client(triangle: Any) -> None:
    count = Count()
    forward = layer(type(triangle).forward, count, least=6)
    assert not forward(triangle, Z.as_subclass(OnGpu)).any() and not forward(triangle, x=Z.as_subclass(OnGpu)).any()
    reason = "fewer than 6 residues, where the client's own layers take less of the host"
    assert (count.replaced, dict(count.passed_on)) == (0, {reason: 2})
    assert forward(triangle, Z).any(), "on a CPU"
    forward = layer(type(triangle).forward, count, least=5)
    assert forward(triangle, Z.as_subclass(OnGpu)).any()
    assert count.replaced == 2


def test_layers_of_other_kinds_stay_the_clients(triangle: Any) -> None:
    with evoattn.patch("toy") as patched:
        assert triangle(Z).any()
        assert not triangle(Z, window=3).any()
        torch.compiler.reset()
        assert not torch.compile(triangle, backend="eager")(Z).any()
        triangle.mha.q_norm = torch.nn.LayerNorm(4)
        assert not triangle(Z).any(), "a norm that came later"
        del triangle.mha.q_norm
        assert triangle(Z).any()
        hook = triangle.mha.register_forward_hook(lambda *_: None)
        assert not triangle(Z).any(), "a hook that ours would not run"
        hook.remove()
        assert triangle(Z).any()
    reasons = list(patched.passed_on)
    assert len(reasons) == 3 and "argument 'window'" in reasons[0] and "other parameters" in reasons[1]
    assert patched.calls == 3 and reasons[2] == "mha has hooks, and evoattn.nn does not call it"


def test_adapters_in_layers_compute(triangle: Any) -> None:
    with evoattn.patch("toy") as patched:
        before = triangle(Z)
        linear = triangle.mha.linear_q
        triangle.mha.linear_q = torch.nn.Sequential(torch.nn.Linear(8, 8), linear)
        assert not torch.equal(triangle(Z), before)
        triangle.mha.linear_q = linear
        assert torch.equal(triangle(Z), before)
    assert patched.calls == 3 and not patched.passed_on


def test_settings_of_layers_that_are_changed_later(triangle: Any) -> None:
    with evoattn.patch("toy") as patched:
        before = triangle(Z)
        triangle.starting = False
        ending = evoattn.nn.TriangleAttention(8, 4, 2, starting=False)
        ending.load_state_dict(triangle.state_dict())
        assert torch.equal(triangle(Z), ending(Z))
        triangle.starting = True
        assert torch.equal(triangle(Z), before)
    assert patched.calls == 3


def test_subclasses_of_layers(triangle: Any) -> None:
    """A forward that calls the known one gets ours. A layer that overrides a helper of the known forward stays the client's."""
    kind = type(triangle)

    class Halved(kind):  # type: ignore[misc, valid-type]
        def forward(self, *args: Any) -> Tensor:
            return 0.5 * super().forward(*args)  # type: ignore[no-any-return]

    class Helped(kind):  # type: ignore[misc, valid-type]
        def zeros(self, x: Tensor) -> Tensor:
            return 0 * x

    halved, helped = Halved(), Helped()
    with evoattn.patch("toy") as patched:
        assert torch.equal(halved(Z), 0.5 * run_fused(halved))
        assert not helped(Z).any()
        forward = triangle.forward
        triangle.forward = lambda x: 2 * forward(x)
        assert torch.equal(triangle(Z), 2 * run_fused(triangle))
    assert patched.calls == 2 and patched.passed_on == {OVERRIDES: 1}


OVERRIDES = "a Helped overrides zeros of toy_client.triangle.Triangle, which evoattn.nn would not call"


def test_arguments_of_layers_by_position(triangle: Any) -> None:
    mask = torch.ones(1, 5, 5)
    with evoattn.patch("toy") as patched:
        assert torch.equal(triangle(Z, mask, True), triangle(Z, mask))
        assert not triangle(Z, mask, True, 3).any()
    assert patched.calls == 2 and sum(patched.passed_on.values()) == 1


def test_a_layer_that_has_moved_is_refused_and_nothing_is_replaced(toy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    original = toy.layers._attention
    monkeypatch.setitem(sources()["toy"]["1.0"], "toy_client.triangle:Triangle.forward", "another")
    with pytest.raises(evoattn.clients.UnknownRelease, match="has another toy_client.triangle:Triangle.forward"):
        evoattn.patch("toy")
    assert toy.layers._attention is original and not patching.active


def test_calls_are_counted_by_kind(triangle: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer with an attention is an attention call; a multiplication, a transition or a block is none."""
    with evoattn.patch("toy") as patched:
        triangle(Z)
        assert patched.calls_by_kind == {"attention call": 1}
    names = {
        "openfold.model.msa.MSARowAttentionWithPairBias": "attention call",
        "openfold.model.triangular_multiplicative_update.TriangleMultiplicativeUpdate": "triangle multiplication",
        "boltz.model.layers.triangular_mult.TriangleMultiplicationIncoming": "triangle multiplication",
        "openfold.model.evoformer.MSATransition": "transition",
        "transformers.models.esm.modeling_esmfold.EsmFoldResidueMLP": "transition",
        "boltz.model.layers.pairformer.PairformerLayer": "pair block",
        "boltz.model.layers.attentionv2.AttentionPairBias": "attention call",
    }
    assert {name: layers.sites({name: known()[name]})[0].kind for name in names} == names


def test_every_known_layer_has_the_kind_of_ours() -> None:
    sites = [site for name in patching.NAMES for site in patching.client(name).layers if site.counted]
    assert {site.kind for site in sites} == set(KINDS)
    for site in sites:
        name = f"{site.module}.{site.name.partition('.')[0]}"
        assert (site.kind == "pair block") == isinstance(known().get(name), KnownBlock), site


@pytest.mark.parametrize(
    ("calls", "words"),
    [
        ({}, ""),
        ({"attention call": 0}, ""),
        ({"pair block": 1}, "1 pair block"),
        ({"transition": 2, "attention call": 1000}, "1,000 attention calls and 2 transitions"),
        (
            {"transition": 2, "attention call": 1, "triangle multiplication": 3},
            "1 attention call, 3 triangle multiplications and 2 transitions",
        ),
    ],
)
def test_calls_in_words(calls: dict[str, int], words: str) -> None:
    assert in_words(calls) == words


def test_a_module_in_the_place_of_esmfolds_sequence_mlp_is_called() -> None:
    from evoattn.clients import esmfold

    class Mine(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 100

    x = torch.ones(2, 3)
    assert torch.equal(esmfold._sequence_mlp(Mine(), x), x + 100)
