"""Protenix' layers and pair blocks, replaced: the same answers, gradients and random numbers, in stand-ins and for real."""

from __future__ import annotations

import copy
import functools
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import evoattn.nn as evoattn_nn
from evoattn.clients import protenix as protenix_client
from evoattn.clients.arguments import UnknownArgument
from evoattn.clients.layers import layer as patched_layer
from evoattn.clients.site import Count
from evoattn.nn.submodules import is_linear, is_norm
from tests.clients.standins import CHANNELS, assert_close, edges, filled, installed, normal, outcome, protenix
from tests.clients.standins.protenix import CALLS, UNSCALED, Attention, Block, PairBias, Track


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-ins are taken for Protenix' classes."""
    CALLS.clear()
    monkeypatch.setenv("LAYERNORM_TYPE", "torch")  # it compiles an extension otherwise
    protenix.stand_in(monkeypatch)


@pytest.fixture
def unfused(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    return protenix.stand_in_unfused(monkeypatch)


def inputs(block: Any, residues: int = 7, dtype: torch.dtype = torch.float64) -> list[Tensor | None]:
    """s and z. No axis of a batch, as in Protenix."""
    torch.manual_seed(5)
    channels = block.tri_att_start.c_in
    return [
        normal(residues, block.c_s).detach() if block.c_s else None,
        normal(residues, residues, channels).detach().to(dtype),
    ]


@pytest.mark.usefixtures("unfused")
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("single", [0, 6])
def test_answers_gradients_and_random_numbers(single: int, training: bool, masked: bool) -> None:
    original = filled(Block(single)).train(training)
    replaced, tensors, mask = copy.deepcopy(original), inputs(original), edges() if masked else None
    assert "" in evoattn_nn.replace(replaced)
    expected = outcome(original, tensors, mask)
    CALLS.clear()
    assert_close(outcome(replaced, tensors, mask), expected)
    assert_close(outcome(replaced, tensors, mask, "cuequivariance", "triattention", chunk_size=4), expected)
    assert not CALLS


@pytest.mark.parametrize("training", [False, True])
def test_z_is_overwritten_only_if_the_client_permits(training: bool) -> None:
    """Then nothing is dropped either."""
    original = filled(Block(6)).train(training)
    replaced, (s, z), mask = copy.deepcopy(original), inputs(original), edges()
    evoattn_nn.replace(replaced)
    original.p_drop = 0.0
    with torch.no_grad():
        expected = original(s, z.clone(), mask, inplace_safe=True)
        first, second = z.clone(), z.clone()
        replaced.eval()(s, first, mask)
        assert torch.equal(first, z)
        actual = replaced.train(training)(s, second, mask, inplace_safe=True)
    assert actual[1] is second
    assert_close(list(actual), list(expected))


@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize("kernel", UNSCALED)
def test_few_residues_keep_an_answer_of_their_own(kernel: str, patched: bool) -> None:
    """Of a block and of a layer. That is no news to anybody."""
    for residues, own in ((16, True), (17, False)):
        original = filled(Block(0)).eval()
        replaced, (_, z), count = copy.deepcopy(original), inputs(original, residues), Count()
        if not patched:
            evoattn_nn.replace(replaced)
        expected = original(None, z, None, triangle_attention=kernel)
        CALLS.clear()
        block = patched_layer(Block.forward, count) if patched else type(replaced).forward
        assert_close([block(replaced, None, z, None, triangle_attention=kernel)[1]], [expected[1]])
        assert ("attention" in CALLS) == own
        layer = patched_layer(Attention.forward, count) if patched else type(replaced.tri_att_start).forward
        expected = original.tri_att_start(z, None, triangle_attention=kernel)
        assert_close([layer(replaced.tri_att_start, z, None, triangle_attention=kernel)], [expected])
        assert (count.replaced, dict(count.passed_on)) == (0 if own or not patched else 2, {})


def test_dropout_by_a_kernel_of_protenix(unfused: Any) -> None:
    """The client draws other random numbers then, so its own block runs, with layers by ours. In inference nothing is drawn."""
    original, count = filled(Block(0)).train(), Count()
    forward = patched_layer(Block.forward, count)
    unfused.TRITON_FUSED_OPS_AVAILABLE = True
    _, z = inputs(original)
    forward(original, None, z, None)
    assert count.replaced == 0 and "FUSED_DROPOUT_RESIDUAL" in next(iter(count.passed_on))
    forward(original.eval(), None, z, None)
    assert count.replaced == 1


def test_hooks_and_masks_that_ours_does_not_know() -> None:
    original = filled(Block(6)).eval()
    replaced, tensors, seen = copy.deepcopy(original), inputs(original), list[str]()
    evoattn_nn.replace(replaced)
    batch = [torch.stack([x, 2 * x]) for x in tensors if x is not None]
    expected = outcome(original, batch, edges().expand(2, 7, 7))  # type: ignore[arg-type]
    CALLS.clear()
    with pytest.warns(UserWarning, match="a mask .* of a pair representation"):
        assert_close(outcome(replaced, batch, edges()), expected)  # type: ignore[arg-type]
    replaced.tri_mul_in.sigmoid.register_forward_hook(lambda *_: None)
    with pytest.warns(UserWarning, match=r"tri_mul_in.sigmoid has hooks, and evoattn.nn does not call it"):
        outcome(replaced, tensors, None)
    handle = replaced.attention_pair_bias.register_forward_hook(lambda *_: seen.append("track"))
    del replaced.tri_mul_in.sigmoid
    CALLS.clear()
    outcome(replaced, tensors, None)
    handle.remove()
    assert seen == ["track"] and not CALLS


def test_real_modules_are_plain() -> None:
    """So that the operators compute them."""
    block = installed("protenix.model.modules.pairformer").PairformerBlock(n_heads=2, c_z=16, c_s=8)
    parts = {name: x for name, x in block.named_modules() if x._parameters and not name.startswith(("attention_", "single_"))}
    assert len(parts) == 4 + 16 + 14 and all(is_linear(x) or is_norm(x) for x in parts.values())


@pytest.mark.parametrize("training", [False, True])
def test_a_real_block(training: bool) -> None:
    """Outputs, gradients and random numbers, in float64."""
    module = installed("protenix.model.modules.pairformer")
    original = filled(module.PairformerBlock(n_heads=2, c_z=16, c_s=8, c_hidden_mul=24)).train(training)
    original.attention_pair_bias = Track()  # its scores are float32
    replaced, tensors = copy.deepcopy(original), inputs(original)
    assert sorted(evoattn_nn.replace(replaced)) == [
        "", "pair_transition", "single_transition", "tri_att_end", "tri_att_start", "tri_mul_in", "tri_mul_out",
    ]  # fmt: skip
    for mask in (None, edges()):
        for options in ({}, {"chunk_size": 4}):
            assert_close(outcome(replaced, tensors, mask, **options), outcome(original, tensors, mask))
        with torch.no_grad():
            s, z = tensors
            assert_close(
                list(replaced(s, z.clone(), mask, inplace_safe=True)), list(original(s, z.clone(), mask, inplace_safe=True))
            )


def test_the_attention_of_the_single_track() -> None:
    """That with a condition, and calls that are not the trunk's, stay Protenix'. That is no news to anybody."""
    original, count = filled(PairBias()), Count()
    replaced, forward = copy.deepcopy(original), patched_layer(PairBias.forward, count)
    model = nn.ModuleList([replaced, PairBias(has_s=True)])
    assert evoattn_nn.replace(model) == ["0"]

    def run(layer: Any, lead: tuple[int, ...], *more: Any, **options: Any) -> list[Tensor]:
        torch.manual_seed(3)
        a, z = normal(*lead, 7, 6), normal(7, 7, CHANNELS)
        actual = layer(a, None, z, *more, **options)
        leaves = [a, z, *original.parameters()] if layer is not replaced else [a, z, *replaced.parameters()]
        return [actual, *torch.autograd.grad(actual.square().sum(), leaves)]

    for lead in ((), (2,)):
        expected = run(original, lead)
        CALLS.clear()
        assert_close(run(replaced, lead, None, None, True), expected)
        assert_close(run(functools.partial(forward, original), lead, chunk_size=4), expected)
        assert not CALLS
    for options in (
        {"extra_attn_bias": normal(7, 7).detach()},
        {"enable_efficient_fusion": True},
        {"n_queries": 4, "n_keys": 8},
    ):
        for layer in (replaced, functools.partial(forward, original)):
            CALLS.clear()
            assert_close(run(layer, (), **options), run(original, (), **options))
            assert CALLS == ["pair bias"] * 2
    assert (count.replaced, dict(count.passed_on)) == (2, {})


@pytest.mark.parametrize("direction", ["Outgoing", "Incoming"])
def test_a_real_multiplication_in_place(direction: str) -> None:
    original = filled(getattr(installed("protenix.model.triangular.triangular"), f"TriangleMultiplication{direction}")(16, 24))
    replaced, z = copy.deepcopy(original), normal(7, 7, 16).detach()
    assert evoattn_nn.replace(replaced) == [""]
    for mask in (None, edges()):
        with torch.no_grad():
            first, second = z.clone(), z.clone()
            assert_close([replaced(first, mask, True, True)], [original(second, mask, True, True)])
            torch.testing.assert_close(first, second)
            assert_close([replaced(z, mask)], [original(z, mask)])


def test_an_outer_product_mean_in_float16_is_the_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Protenix and OpenDDE compute it in float32 under autocast to float16."""
    layer, m = evoattn_nn.OuterProductMean(16, 8, 4), torch.randn(3, 5, 16)
    assert protenix_client._outer_product(layer, m, mask=torch.ones(3, 5), chunk_size=4).shape == (5, 5, 8)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: device == "cuda")
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda _: torch.float16)
    with pytest.raises(UnknownArgument, match="autocast to float16"):
        protenix_client._outer_product(layer, m)
