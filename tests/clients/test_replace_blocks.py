"""Clients' pair blocks, replaced, in stand-ins: the same answers, gradients and random numbers."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import evoattn.nn as evoattn_nn
from evoattn.clients import layers
from evoattn.clients.layers import layer as patched_block
from evoattn.clients.site import Count
from evoattn.core.numerics import products_in
from tests.clients import standins
from tests.clients.standins import CHANNELS, assert_close, edges, filled, normal, pair_blocks
from tests.clients.standins.pair_blocks import CALLS, Layer, Pairs

_OF3, _BOLTZ = "openfold3.core.model", "boltz.model.layers"


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-ins are taken for the clients' layers and blocks."""
    CALLS.clear()
    pair_blocks.stand_in(monkeypatch)


def blocks() -> list[Any]:
    torch.manual_seed(7)
    return [filled(Pairs()), filled(Layer()).float()]


def arguments(block: nn.Module, lead: tuple[int, ...] = (2,)) -> tuple[Tensor, ...]:
    """Without gradients."""
    z, mask = normal(*lead, 7, 7, CHANNELS).detach(), edges(*lead)
    if isinstance(block, Pairs):
        return z, mask
    return normal(*lead, 7, 6).detach().float(), z.float(), mask.diagonal(0, -2, -1).float(), mask.float()


OPTIONS: list[dict[str, Any]] = [{"_attn_chunk_size": 4}, {"chunk_size_tri_attn": 4, "use_kernels": True}]
"""Arguments that change no answer, of each of `blocks`."""


def outcome(block: nn.Module, inputs: tuple[Tensor, ...], **options: Any) -> list[Tensor]:
    """Outputs, the next random number, and gradients."""
    count = 1 if isinstance(block, Pairs) else 2
    return standins.outcome(block, inputs[:count], *inputs[count:], **options)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("which", [0, 1])
def test_answers_gradients_and_random_numbers(which: int, training: bool) -> None:
    original = blocks()[which].train(training)
    replaced, inputs = copy.deepcopy(original), arguments(original)
    assert "" in evoattn_nn.replace(replaced)
    expected = outcome(original, inputs)
    assert CALLS
    CALLS.clear()
    for options in ({}, OPTIONS[which]):
        assert_close(outcome(replaced, inputs, **options), expected)
        assert not CALLS


@pytest.mark.parametrize("masked", [False, True])
def test_the_mask_of_the_transition(masked: bool) -> None:
    original = blocks()[0].eval()
    replaced, inputs = copy.deepcopy(original), arguments(original)
    evoattn_nn.replace(replaced)
    options = {"_mask_trans": masked, "_attn_chunk_size": 4}
    CALLS.clear()
    actual = outcome(replaced, inputs, **options)
    assert not CALLS
    assert_close(actual, outcome(original, inputs, **options))


def test_a_mask_that_shares_memory_with_an_overwritten_z() -> None:
    block = blocks()[0].eval()
    z, _ = arguments(block)
    replaced = copy.deepcopy(block)
    evoattn_nn.replace(replaced)
    with torch.no_grad():
        expected = replaced(z.clone(), z[..., 0].clone(), inplace_safe=True)
        actual = replaced(z, z[..., 0], inplace_safe=True)
    assert actual is z
    assert_close(actual, expected)


@pytest.mark.parametrize("in_place", [False, True])
def test_z_is_overwritten_only_if_the_client_permits(in_place: bool) -> None:
    replaced = blocks()[0].eval()
    z, mask = arguments(replaced)
    with torch.no_grad():
        expected, before = replaced(z, mask), z.clone()
        evoattn_nn.replace(replaced)
        actual = replaced(z, mask, inplace_safe=in_place)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)
    assert (actual is z) == in_place and (in_place or torch.equal(z, before))


@pytest.mark.parametrize("which", [0, 1])
def test_hooks_and_arguments_that_ours_does_not_know(which: int) -> None:
    """The client's own block runs then, with layers by ours."""
    original = blocks()[which].eval()
    inputs, seen = arguments(original), list[str]()
    expected = outcome(original, inputs)
    evoattn_nn.replace(original)
    CALLS.clear()
    handle = original.tri_att_start.register_forward_hook(lambda *_: seen.append("hook"))
    with pytest.warns(UserWarning, match="tri_att_start has hooks, and evoattn.nn does not call it"):
        assert_close(outcome(original, inputs), expected)
    assert seen == ["hook"] and not CALLS
    handle.remove()
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(type(module).__name__))
    with pytest.warns(UserWarning, match="there are hooks on all modules"):
        outcome(original, inputs)
    handle.remove()
    assert seen.count("Attention") == 4, "the layers and the containers of their projections"
    if which == 0:
        with pytest.warns(UserWarning, match="does not know the argument 'window'"):
            assert_close(outcome(original, inputs, window=4), expected)


def test_patched() -> None:
    """It is counted, and so is what is passed on to the client."""
    original, count = blocks()[0].eval(), Count()
    inputs, forward = arguments(original), patched_block(Pairs.forward, count)
    expected = original(*inputs)
    CALLS.clear()
    torch.testing.assert_close(forward(original, *inputs), expected)
    assert (count.replaced, dict(count.passed_on)) == (1, {}) and not CALLS
    torch.testing.assert_close(forward(original, inputs[0], inputs[1], window=3), expected)
    torch.testing.assert_close(
        forward(original, inputs[0], inputs[1][:, :1, :1].expand(2, 7, 7)),
        original(inputs[0], inputs[1][:, :1, :1].expand(2, 7, 7)),
    )
    original.pair_transition.register_forward_hook(lambda *_: None)
    torch.testing.assert_close(forward(original, *inputs), expected)
    assert count.replaced == 2
    assert list(count.passed_on) == [
        "evoattn.nn.replace does not know the argument 'window' of this layer",
        "pair_transition has hooks, and evoattn.nn does not call it",
    ]


class Halved(Pairs):
    """A subclass with a forward of its own."""

    def forward(self, *inputs: Any, **named: Any) -> Tensor:  # type: ignore[override]
        return super().forward(*inputs, **named) / 2


def test_a_block_with_a_forward_of_its_own_keeps_it() -> None:
    """Its layers are replaced."""
    original = filled(Halved()).eval()
    inputs = arguments(Pairs())
    expected = outcome(original, inputs)
    CALLS.clear()
    assert sorted(evoattn_nn.replace(original)) == [
        "pair_transition",
        "tri_att_end",
        "tri_att_start",
        "tri_mul_in",
        "tri_mul_out",
    ]
    assert_close(outcome(original, inputs), expected)
    assert not CALLS


def test_replaced_block_copies_and_follows_its_settings() -> None:
    original = blocks()[1].eval()
    inputs = arguments(original)
    evoattn_nn.replace(original)
    expected = outcome(original, inputs)
    for other in (copy.deepcopy(original), pickle.loads(pickle.dumps(original))):
        assert_close(outcome(other, inputs), expected)
    original.train()
    original.dropout = 0.0
    assert_close(outcome(original, inputs), expected)
    original.transition_z.swiglu.linear_a = nn.Linear(CHANNELS, 2 * CHANNELS, bias=False)
    assert not torch.equal(outcome(original, inputs)[1], expected[1])


def test_a_mask_with_other_axes_is_left_to_the_client() -> None:
    original, count = blocks()[0].eval(), Count()
    z, mask = arguments(original)
    with pytest.raises(ValueError, match="mask"):  # as the stand-in's attention says
        patched_block(Pairs.forward, count)(original, z, mask[0])
    assert list(count.passed_on) == ["a mask [7, 7] of a pair representation [2, 7, 7, 8]"]


def test_a_block_in_float32_on_a_gpu_is_left_to_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "is_float32_on_gpu", lambda _: True)
    original, count = blocks()[0].eval(), Count()
    inputs = arguments(original)
    torch.testing.assert_close(patched_block(Pairs.forward, count)(original, *inputs), original(*inputs))
    assert (count.replaced, dict(count.passed_on)) == (0, {layers.WIDE: 1})


@pytest.mark.parametrize("why", ["inference", "TF32", "few residues"])
def test_a_block_in_float32_is_computed_on_tensor_cores(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In inference, unless torch is to round, or has too little to do."""
    monkeypatch.setattr(layers, "is_float32_on_gpu", lambda _: True)
    monkeypatch.setattr(layers, "residues", lambda *_: 287 if why == "few residues" else 288)
    original, count = copy.deepcopy(blocks()[0]).eval().float(), Count()
    inputs = arguments(original)
    with torch.no_grad(), products_in("tf32" if why == "TF32" else None):
        patched_block(Pairs.forward, count)(original, *[x.float() for x in inputs])
    left = {} if why == "inference" else {layers.WIDE: 1}
    assert (count.replaced, dict(count.passed_on)) == (0 if left else 1, left)
    assert not layers._multiplies_by_float16((inputs[0].double(),)), "float64"
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda _: True)
    assert not layers._multiplies_by_float16((inputs[0].float(),)), "OpenFold-3 casts to float32"


@pytest.mark.parametrize("grad", [False, True])
def test_a_z_of_our_own_is_overwritten_in_inference(grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    replaced, seen, add_to = blocks()[0].eval(), list[bool](), evoattn_nn.TriangleAttention.add_to

    def watched(self: Any, *inputs: Any, in_place: bool, **options: Any) -> Tensor:
        seen.append(in_place)
        return add_to(self, *inputs, in_place=in_place, **options)

    monkeypatch.setattr(evoattn_nn.TriangleAttention, "add_to", watched)
    evoattn_nn.replace(replaced)
    with torch.set_grad_enabled(grad):
        replaced(*arguments(replaced))
    assert seen == [not grad] * 2


@pytest.mark.parametrize("which", [0, 1])
def test_a_layer_that_is_exchanged_after_replace(which: int) -> None:
    """The client's own block runs then, and ours again when the layer is back."""
    original = blocks()[which].eval()
    inputs, kept = arguments(original), original.tri_mul_in
    replaced = copy.deepcopy(original)
    evoattn_nn.replace(replaced)
    own = replaced.tri_mul_in
    for _ in range(2):
        original.tri_mul_in = replaced.tri_mul_in = Still()
        expected = outcome(original, inputs)
        CALLS.clear()
        with pytest.warns(UserWarning, match="evoattn.nn has no Still"):
            assert_close(outcome(replaced, inputs), expected)
        assert not CALLS
        original.tri_mul_in, replaced.tri_mul_in = kept, own
        assert_close(outcome(replaced, inputs), outcome(original, inputs))


class Still(nn.Module):
    """Stands in for a layer of a block, and updates nothing."""

    def forward(self, z: Tensor, mask: Any = None, **_: Any) -> Tensor:
        return 0 * z


def test_a_hook_keeps_what_a_module_got() -> None:
    replaced = blocks()[0].eval()
    evoattn_nn.replace(replaced)
    seen, copies = list[Tensor](), list[Tensor]()

    def record(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen.append(inputs[0])
        copies.append(inputs[0].clone())

    hook = replaced.tri_att_start.layer_norm.register_forward_pre_hook(record)
    with torch.no_grad():
        replaced(*arguments(replaced))
    hook.remove()
    assert len(seen) == 1 and torch.equal(seen[0], copies[0])


def test_boltz_gives_float32_for_16_bits() -> None:
    original = blocks()[1].eval()
    s, z, mask, pairs = arguments(original)
    replaced = copy.deepcopy(original)
    evoattn_nn.replace(replaced)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected, actual = original(s, z.bfloat16(), mask, pairs), replaced(s, z.bfloat16(), mask, pairs)
    assert [x.dtype for x in actual] == [x.dtype for x in expected] == [torch.float32] * 2
    torch.testing.assert_close(actual[1], expected[1], rtol=0.1, atol=0.1)


def test_dropout_that_ours_does_not_know() -> None:
    original = blocks()[0].train()
    inputs, replaced = arguments(original), copy.deepcopy(original)
    evoattn_nn.replace(replaced)
    for block in (original, replaced):
        block.ps_dropout_row_layer.batch_dim = [-2]
    CALLS.clear()
    with pytest.warns(UserWarning, match="dropout in place, or another one than along rows"):
        actual = outcome(replaced, inputs)
    assert not CALLS, "layers are ours"
    assert_close(actual, outcome(original, inputs))
