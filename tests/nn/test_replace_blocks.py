"""Clients' pair blocks, replaced, in stand-ins: the same answers, gradients and random numbers."""

from __future__ import annotations

import copy
import pickle
import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import evoattn.nn as ours
from evoattn.clients import layers
from evoattn.clients.layers import layer as patched_block
from evoattn.clients.site import Count
from tests.nn import standins
from tests.nn.standins import CHANNELS, assert_close, edges, filled, normal, register
from tests.nn.test_replace_multiplication import In, Out, Split

CALLS: list[str] = []
"""Own forwards of clients' layers that ran."""


class Attention(ours.TriangleAttention):
    """Stands for OpenFold-3's and Boltz'."""

    def __init__(self, starting: bool = True) -> None:
        super().__init__(CHANNELS, 4, 2, starting)
        self.c_hidden = 4
        self.linear_z = self.linear

    def forward(self, x: Tensor, mask: Any = None, transpose_bias: bool = False, **_: Any) -> Tensor:  # type: ignore[override]
        CALLS.append("attention")
        return super().forward(x, mask, transpose_bias=transpose_bias)


class Multiplied(Split):
    """Stands for OpenFold-3's triangle multiplication, which is OpenFold's."""

    def forward(self, z: Tensor, mask: Tensor | None = None, **_: Any) -> Tensor:  # type: ignore[override]
        CALLS.append("multiplication")
        return super().forward(z, mask)


class Wide(ours.Transition):
    """Stands for a transition of OpenFold-3."""

    def __init__(self) -> None:
        super().__init__(CHANNELS, 2)
        self.swiglu.swish = nn.SiLU()

    def forward(self, x: Tensor, mask: Tensor | None = None, **_: Any) -> Tensor:  # type: ignore[override]
        CALLS.append("transition")
        return super().forward(x, mask)


class Rowwise(nn.Module):
    """Stands for OpenFold-3's dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout, self.batch_dim = nn.Dropout(0.4), [-3]

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        return x * self.dropout(x.new_ones([1 if axis in self.batch_dim else n for axis, n in enumerate(x.shape, -x.ndim)]))  # type: ignore[no-any-return]


class Pairs(nn.Module):
    """Stands for OpenFold-3's pair block."""

    def __init__(self) -> None:
        super().__init__()
        self.tri_mul_out, self.tri_mul_in = Multiplied(True), Multiplied(False)
        self.tri_att_start, self.tri_att_end = Attention(), Attention()
        self.pair_transition, self.ps_dropout_row_layer = Wide(), Rowwise()

    def forward(
        self,
        z: Tensor,
        pair_mask: Tensor,
        inplace_safe: bool = False,
        _mask_trans: bool = True,
        _attn_chunk_size: Any = None,
        window: Any = None,
    ) -> Tensor:
        drop = self.ps_dropout_row_layer
        z = z + drop(self.tri_mul_out(z, pair_mask))
        z = z + drop(self.tri_mul_in(z, pair_mask))
        z = z + drop(self.tri_att_start(z, pair_mask))
        z = z.transpose(-2, -3)
        z = z + drop(self.tri_att_end(z, pair_mask.transpose(-1, -2), transpose_bias=True))
        z = z.transpose(-2, -3)
        return z + self.pair_transition(z, pair_mask if _mask_trans else None)  # type: ignore[no-any-return]


def get_dropout_mask(dropout: float, z: Tensor, training: bool, columnwise: bool = False) -> Tensor:
    """Stands for Boltz'."""
    dropout = dropout * training
    v = z[:, 0:1, :, 0:1] if columnwise else z[:, :, 0:1, 0:1]
    kept: Tensor = torch.rand(v.shape, dtype=torch.float32, device=v.device) >= dropout
    return kept * 1.0 / (1.0 - dropout)


class Layer(nn.Module):
    """Stands for Boltz' layer of the trunk, with its single track."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = 0.4
        self.tri_mul_out, self.tri_mul_in = Out(), In()
        self.tri_att_start, self.tri_att_end = Attention(), Attention(starting=False)
        self.transition_z, self.transition_s = Wide(), nn.Linear(6, 6)
        self.pre_norm_s, self.s_post_norm = nn.LayerNorm(6), nn.Identity()
        self.attention = Track()

    def forward(
        self, s: Tensor, z: Tensor, mask: Tensor, pair_mask: Tensor, chunk_size_tri_attn: Any = None, use_kernels: bool = False
    ) -> tuple[Tensor, Tensor]:
        for update, columns in (
            (self.tri_mul_out, False), (self.tri_mul_in, False), (self.tri_att_start, False), (self.tri_att_end, True),
        ):  # fmt: skip
            dropout = get_dropout_mask(self.dropout, z, self.training, columnwise=columns)
            z = z + dropout * update(z, mask=pair_mask)
        z = z + self.transition_z(z)
        normed = self.pre_norm_s(s.float())
        s = s.float() + self.attention(s=normed, z=z.float(), mask=mask.float(), k_in=normed)
        return self.s_post_norm(s + self.transition_s(s)), z


class Track(nn.Module):
    """Stands for Boltz' attention of the single track."""

    def forward(self, s: Tensor, z: Tensor, mask: Tensor, k_in: Tensor) -> Tensor:
        return torch.softmax(z.sum(-1), -1) @ (k_in * mask[..., None])


_OF3, _BOLTZ = "openfold3.core.model", "boltz.model.layers"


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-ins are taken for the clients' layers and blocks."""
    CALLS.clear()
    names: dict[type[nn.Module], str] = {
        Attention: f"{_OF3}.layers.triangular_attention.TriangleAttention",
        Multiplied: f"{_OF3}.layers.triangular_multiplicative_update.TriangleMultiplicativeUpdate",
        Wide: f"{_OF3}.layers.transition.SwiGLUTransition",
        Out: f"{_BOLTZ}.triangular_mult.TriangleMultiplicationOutgoing",
        In: f"{_BOLTZ}.triangular_mult.TriangleMultiplicationIncoming",
        Pairs: f"{_OF3}.latent.base_blocks.PairBlock",
        Layer: f"{_BOLTZ}.pairformer.PairformerLayer",
    }
    register(monkeypatch, names)
    dropout = types.ModuleType(f"{_BOLTZ}.dropout")
    dropout.get_dropout_mask = get_dropout_mask  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, dropout.__name__, dropout)


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


def outcome(block: nn.Module, given: tuple[Tensor, ...], **options: Any) -> list[Tensor]:
    """Outputs, the next random number, and gradients."""
    count = 1 if isinstance(block, Pairs) else 2
    return standins.outcome(block, given[:count], *given[count:], **options)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("which", [0, 1])
def test_answers_gradients_and_random_numbers(which: int, training: bool) -> None:
    theirs = blocks()[which].train(training)
    made, given = copy.deepcopy(theirs), arguments(theirs)
    assert "" in ours.replace(made)
    expected = outcome(theirs, given)
    assert CALLS
    CALLS.clear()
    for options in ({}, OPTIONS[which]):
        assert_close(outcome(made, given, **options), expected)
        assert not CALLS


@pytest.mark.parametrize("masked", [False, True])
def test_the_mask_of_the_transition(masked: bool) -> None:
    theirs = blocks()[0].eval()
    made, given = copy.deepcopy(theirs), arguments(theirs)
    ours.replace(made)
    options = {"_mask_trans": masked, "_attn_chunk_size": 4}
    CALLS.clear()
    found = outcome(made, given, **options)
    assert not CALLS
    assert_close(found, outcome(theirs, given, **options))


@pytest.mark.parametrize("in_place", [False, True])
def test_z_is_overwritten_only_if_the_client_permits(in_place: bool) -> None:
    made = blocks()[0].eval()
    z, mask = arguments(made)
    with torch.no_grad():
        expected, before = made(z, mask), z.clone()
        ours.replace(made)
        found = made(z, mask, inplace_safe=in_place)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    assert (found is z) == in_place and (in_place or torch.equal(z, before))


@pytest.mark.parametrize("which", [0, 1])
def test_hooks_and_arguments_that_ours_does_not_know(which: int) -> None:
    """The client's own block runs then, with layers by ours."""
    theirs = blocks()[which].eval()
    given, seen = arguments(theirs), list[str]()
    expected = outcome(theirs, given)
    ours.replace(theirs)
    CALLS.clear()
    handle = theirs.tri_att_start.register_forward_hook(lambda *_: seen.append("hook"))
    assert_close(outcome(theirs, given), expected)
    assert seen == ["hook"] and not CALLS
    handle.remove()
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(type(module).__name__))
    outcome(theirs, given)
    handle.remove()
    assert seen.count("Attention") == 2
    if which == 0:
        assert_close(outcome(theirs, given, window=4), expected)


def test_patched() -> None:
    """It is counted, and so is what is passed on to the client."""
    theirs, count = blocks()[0].eval(), Count()
    given, forward = arguments(theirs), patched_block(Pairs.forward, count)
    expected = theirs(*given)
    CALLS.clear()
    torch.testing.assert_close(forward(theirs, *given), expected)
    assert (count.replaced, dict(count.passed_on)) == (1, {}) and not CALLS
    torch.testing.assert_close(forward(theirs, given[0], given[1], window=3), expected)
    torch.testing.assert_close(
        forward(theirs, given[0], given[1][:, :1, :1].expand(2, 7, 7)), theirs(given[0], given[1][:, :1, :1].expand(2, 7, 7))
    )
    theirs.pair_transition.register_forward_hook(lambda *_: None)
    torch.testing.assert_close(forward(theirs, *given), expected)
    assert count.replaced == 2
    assert list(count.passed_on) == [
        "evoattn.nn.replace does not know the argument 'window' of this layer",
        "pair_transition has hooks, and evoattn.nn does not call it",
    ]


class Halved(Pairs):
    """A subclass with a forward of its own."""

    def forward(self, *given: Any, **named: Any) -> Tensor:  # type: ignore[override]
        return super().forward(*given, **named) / 2


def test_a_block_with_a_forward_of_its_own_keeps_it() -> None:
    """Its layers are replaced."""
    theirs = filled(Halved()).eval()
    given = arguments(Pairs())
    expected = outcome(theirs, given)
    CALLS.clear()
    assert sorted(ours.replace(theirs)) == ["pair_transition", "tri_att_end", "tri_att_start", "tri_mul_in", "tri_mul_out"]
    assert_close(outcome(theirs, given), expected)
    assert not CALLS


def test_copies_and_settings() -> None:
    theirs = blocks()[1].eval()
    given = arguments(theirs)
    ours.replace(theirs)
    expected = outcome(theirs, given)
    for other in (copy.deepcopy(theirs), pickle.loads(pickle.dumps(theirs))):
        assert_close(outcome(other, given), expected)
    theirs.train()
    theirs.dropout = 0.0
    assert_close(outcome(theirs, given), expected)
    theirs.transition_z.swiglu.linear_a = nn.Linear(CHANNELS, 2 * CHANNELS, bias=False)
    assert not torch.equal(outcome(theirs, given)[1], expected[1])


def test_a_mask_with_other_axes_is_left_to_the_client() -> None:
    theirs, count = blocks()[0].eval(), Count()
    z, mask = arguments(theirs)
    with pytest.raises(ValueError, match="mask"):  # as the stand-in's attention says
        patched_block(Pairs.forward, count)(theirs, z, mask[0])
    assert list(count.passed_on) == ["a mask [7, 7] of a pair representation [2, 7, 7, 8]"]


def test_a_block_in_float32_on_a_gpu_is_left_to_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "is_float32_on_gpu", lambda _: True)
    theirs, count = blocks()[0].eval(), Count()
    given = arguments(theirs)
    torch.testing.assert_close(patched_block(Pairs.forward, count)(theirs, *given), theirs(*given))
    assert (count.replaced, dict(count.passed_on)) == (0, {layers.WIDE: 1})


@pytest.mark.parametrize("grad", [False, True])
def test_a_z_of_our_own_is_overwritten_in_inference(grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made, seen, add_to = blocks()[0].eval(), list[bool](), ours.TriangleAttention.add_to

    def watched(self: Any, *given: Any, in_place: bool, **options: Any) -> Tensor:
        seen.append(in_place)
        return add_to(self, *given, in_place=in_place, **options)

    monkeypatch.setattr(ours.TriangleAttention, "add_to", watched)
    ours.replace(made)
    with torch.set_grad_enabled(grad):
        made(*arguments(made))
    assert seen == [not grad] * 2


@pytest.mark.parametrize("which", [0, 1])
def test_a_layer_that_is_exchanged_after_replace(which: int) -> None:
    """The client's own block runs then, and ours again when the layer is back."""
    theirs = blocks()[which].eval()
    given, kept = arguments(theirs), theirs.tri_mul_in
    made = copy.deepcopy(theirs)
    ours.replace(made)
    own = made.tri_mul_in
    for _ in range(2):
        theirs.tri_mul_in = made.tri_mul_in = Still()
        expected = outcome(theirs, given)
        CALLS.clear()
        assert_close(outcome(made, given), expected)
        assert not CALLS
        theirs.tri_mul_in, made.tri_mul_in = kept, own
        assert_close(outcome(made, given), outcome(theirs, given))


class Still(nn.Module):
    """Stands in for a layer of a block, and updates nothing."""

    def forward(self, z: Tensor, mask: Any = None, **_: Any) -> Tensor:
        return 0 * z


def test_a_hook_keeps_what_a_module_got() -> None:
    made = blocks()[0].eval()
    ours.replace(made)
    seen, copies = list[Tensor](), list[Tensor]()

    def keep(_: nn.Module, given: tuple[Tensor, ...]) -> None:
        seen.append(given[0])
        copies.append(given[0].clone())

    hook = made.tri_att_start.layer_norm.register_forward_pre_hook(keep)
    with torch.no_grad():
        made(*arguments(made))
    hook.remove()
    assert len(seen) == 1 and torch.equal(seen[0], copies[0])


def test_boltz_gives_float32_for_16_bits() -> None:
    theirs = blocks()[1].eval()
    s, z, mask, pairs = arguments(theirs)
    made = copy.deepcopy(theirs)
    ours.replace(made)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected, found = theirs(s, z.bfloat16(), mask, pairs), made(s, z.bfloat16(), mask, pairs)
    assert [x.dtype for x in found] == [x.dtype for x in expected] == [torch.float32] * 2
    torch.testing.assert_close(found[1], expected[1], rtol=0.1, atol=0.1)


def test_dropout_that_ours_does_not_know() -> None:
    theirs = blocks()[0].train()
    given, made = arguments(theirs), copy.deepcopy(theirs)
    ours.replace(made)
    for block in (theirs, made):
        block.ps_dropout_row_layer.batch_dim = [-2]
    CALLS.clear()
    outcome(made, given)
    assert not CALLS, "layers are ours"
    assert_close(outcome(made, given), outcome(theirs, given))
