"""Pair blocks of OpenFold, BoltzGen, OpenDDE and ESMFold, replaced: the same answers, gradients and random numbers.

ESMFold's is the real one, the others are stand-ins.
"""

from __future__ import annotations

import copy
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import evoattn
import evoattn.nn as evoattn_nn
from evoattn.clients import esmfold as esmfold_client
from tests.clients.standins import CHANNELS, assert_close, edges, filled, normal, outcome, protenix, register
from tests.clients.standins.multiplications import In, Out
from tests.clients.standins.pair_blocks import CALLS, Attention, Multiplied, Pairs, Wide


class Stack(Pairs):
    """Stands for OpenFold's, whose attention around the ending node takes the bias of a transposed z as it is."""

    def forward(  # type: ignore[override]
        self,
        z: Tensor,
        pair_mask: Tensor,
        chunk_size: int | None = None,
        use_lma: bool = False,
        inplace_safe: bool = False,
        _mask_trans: bool = True,
        _attn_chunk_size: int | None = None,
    ) -> Tensor:
        drop = self.ps_dropout_row_layer
        for layer in (self.tri_mul_out, self.tri_mul_in, self.tri_att_start):
            z = z + drop(layer(z, pair_mask))
        z = z.transpose(-2, -3)
        z = z + drop(self.tri_att_end(z, pair_mask.transpose(-1, -2)))
        z = z.transpose(-2, -3)
        return z + self.pair_transition(z, pair_mask if _mask_trans else None)  # type: ignore[no-any-return]


DRAWN: list[torch.dtype] = []
"""Dtypes of the random numbers of BoltzGen's dropout masks."""


def get_dropout_mask(dropout: float, z: Tensor, training: bool, columnwise: bool = False) -> Tensor:
    """Stands for BoltzGen's, whose random numbers have the dtype of z."""
    DRAWN.append(z.dtype)
    v = z[:, 0:1, :, 0:1] if columnwise else z[:, :, 0:1, 0:1]
    return (torch.rand_like(v) > dropout * training) * 1.0 / (1.0 - dropout * training)


class NoSeq(nn.Module):
    """Stands for BoltzGen's block without a single track."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = 0.4
        self.tri_mul_out, self.tri_mul_in = Out(), In()
        self.tri_att_start, self.tri_att_end = Attention(), Attention(starting=False)
        self.transition_z = Wide()

    def forward(
        self, z: Tensor, pair_mask: Tensor, chunk_size_tri_attn: int | None = None, *, use_kernels: bool = False
    ) -> Tensor:
        for layer in (self.tri_mul_out, self.tri_mul_in, self.tri_att_start, self.tri_att_end):
            mask = get_dropout_mask(self.dropout, z, self.training, columnwise=layer is self.tri_att_end)
            z = z + mask * layer(z, mask=pair_mask)
        return z + self.transition_z(z)  # type: ignore[no-any-return]


class Track(nn.Module):
    """Stands for OpenDDE's attention of the single track."""

    def forward(self, a: Tensor, s: None, z: Tensor, extra_attn_bias: Tensor | None = None) -> Tensor:
        return torch.softmax(z.sum(-1) + (0 if extra_attn_bias is None else extra_attn_bias), -1) @ a


class Dde(nn.Module):
    """Stands for OpenDDE's block, which has no dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.tri_mul_out, self.tri_mul_in = protenix.Multiplied(True), protenix.Multiplied(False)
        self.tri_att_start, self.tri_att_end = protenix.Attention(), protenix.Attention()
        self.pair_transition, self.c_s = protenix.Wide(), 6
        self.attention_pair_bias, self.single_transition = Track(), nn.Linear(6, 6)

    def forward(
        self,
        s: Tensor,
        z: Tensor,
        pair_mask: Tensor,
        triangle_multiplicative: str = "torch",
        triangle_attention: str = "torch",
        inplace_safe: bool = False,
        chunk_size: int | None = None,
        extra_attn_bias: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        for layer in (self.tri_mul_out, self.tri_mul_in, self.tri_att_start):
            z = z + layer(z, pair_mask)
        z = (z.transpose(-2, -3) + self.tri_att_end(z.transpose(-2, -3), pair_mask.transpose(-1, -2))).transpose(-2, -3)
        z = z + self.pair_transition(z)
        s = s + self.attention_pair_bias(a=s, s=None, z=z, extra_attn_bias=extra_attn_bias)
        return s + self.single_transition(s), z


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-ins are taken for the clients' layers and blocks."""
    names: dict[type[nn.Module], str] = {
        Attention: "openfold3.core.model.layers.triangular_attention.TriangleAttention",
        Multiplied: "openfold.model.triangular_multiplicative_update.TriangleMultiplicativeUpdate",
        Wide: "openfold3.core.model.layers.transition.SwiGLUTransition",
        Out: "boltzgen.model.layers.triangular.TriangleMultiplicationOutgoing",
        In: "boltzgen.model.layers.triangular.TriangleMultiplicationIncoming",
        protenix.Attention: "opendde.model.triangular.triangular.TriangleAttention",
        protenix.Multiplied: "opendde.model.triangular.triangular.TriangleMultiplicativeUpdate",
        protenix.Wide: "opendde.model.modules.primitives.Transition",
        Stack: "openfold.model.evoformer.PairStack",
        NoSeq: "boltzgen.model.layers.pairformer.PairformerNoSeqLayer",
        Dde: "opendde.model.modules.pairformer.PairformerBlock",
    }
    register(monkeypatch, names)
    dropout = types.ModuleType("boltzgen.model.layers.pairformer")
    dropout.get_dropout_mask = get_dropout_mask  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, dropout.__name__, dropout)
    for calls in (CALLS, protenix.CALLS, DRAWN):
        calls.clear()  # type: ignore[attr-defined]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("options", [{}, {"_mask_trans": False}, {"chunk_size": 4, "_attn_chunk_size": 2, "use_lma": True}])
def test_openfold_blocks_agree_after_replace(options: dict[str, Any], training: bool) -> None:
    original = filled(Stack()).train(training)
    replaced, z = copy.deepcopy(original), normal(2, 7, 7, CHANNELS)
    assert "" in evoattn_nn.replace(replaced)
    expected = outcome(original, [z], edges(2), **options)
    CALLS.clear()
    assert_close(outcome(replaced, [z], edges(2), **options), expected)
    assert not CALLS


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("training", [False, True])
def test_random_numbers_of_boltzgen(training: bool, dtype: torch.dtype) -> None:
    """The first mask is of the dtype in which z comes."""
    original = filled(NoSeq()).train(training)
    replaced, z, mask = copy.deepcopy(original), normal(2, 7, 7, CHANNELS).detach(), edges(2)
    assert "" in evoattn_nn.replace(replaced)
    if dtype == torch.float64:
        expected = outcome(original, [z], mask)
        CALLS.clear()
        assert_close(outcome(replaced, [z], mask, 4, use_kernels=True), expected)
        assert not CALLS
        return
    replaced, original = replaced.float(), original.float()
    with torch.no_grad(), torch.autocast("cpu", dtype):
        torch.manual_seed(4)  # no torch draws a bfloat16 0 then, which the stand-in drops even in evaluation
        expected, after = original(z.to(dtype), mask.float()), torch.rand(3)
        assert [torch.bfloat16, *[torch.float32] * 3] == DRAWN
        torch.manual_seed(4)
        torch.testing.assert_close(replaced(z.to(dtype), mask.float()), expected, rtol=0.1, atol=0.1)
        assert torch.equal(torch.rand(3), after) and (DRAWN[:4] == DRAWN[4:] or not training)


def test_opendde_blocks_agree_after_replace(monkeypatch: pytest.MonkeyPatch) -> None:
    original = filled(Dde()).train()
    replaced, leaves, bias = copy.deepcopy(original), [normal(7, 6), normal(7, 7, CHANNELS)], normal(7, 7).detach()
    assert "" in evoattn_nn.replace(replaced)
    expected = outcome(original, leaves, edges(), extra_attn_bias=bias)
    protenix.CALLS.clear()
    assert_close(outcome(replaced, leaves, edges(), "torch", "cuequivariance", extra_attn_bias=bias), expected)
    assert not protenix.CALLS
    monkeypatch.setenv("OPENDDE_FOLDCP_MODE", "distributed")
    monkeypatch.setattr(Dde, "forward", lambda self, s, z, pair_mask: (s, -z))
    with pytest.warns(UserWarning, match="a pair representation that OpenDDE splits"):
        assert torch.equal(replaced(*leaves, edges())[1], -leaves[1])


SEQUENCE, PAIR = 16, 8


def esmfold(dropout: float = 0.0) -> Any:
    """A real block."""
    transformers = pytest.importorskip("transformers")
    module = pytest.importorskip("transformers.models.esm.modeling_esmfold")
    config = transformers.EsmConfig(vocab_size=33, is_folding_model=True, esmfold_config={}, vocab_list=["<cls>"] * 33)
    trunk = config.esmfold_config.trunk
    trunk.sequence_state_dim, trunk.pairwise_state_dim = SEQUENCE, PAIR
    trunk.sequence_head_width, trunk.pairwise_head_width, trunk.dropout = 8, 4, dropout
    return filled(module.EsmFoldTriangularSelfAttentionBlock(trunk))


def states() -> list[Tensor]:
    torch.manual_seed(5)
    return [normal(2, 7, SEQUENCE), normal(2, 7, 7, PAIR)]


LENGTHS = (torch.arange(7) < torch.tensor([[7], [5]])).long()
"""The mask of residues, in whole numbers, as the tokenizer has it."""

PADDED = 1e-6
"""The limit of differences: -1e9 leaves seven digits of the scores of a row without a key."""


@pytest.fixture
def counted() -> Iterator[list[str]]:
    """The own forwards of ESMFold's layers of pairs that run. Nothing is put in their place: `replace` would call that."""
    module, ran = pytest.importorskip("transformers.models.esm.modeling_esmfold"), list[str]()
    kinds = (module.EsmFoldTriangleAttention, module.EsmFoldTriangleMultiplicativeUpdate)
    names = {kind.forward.__code__: kind.__name__ for kind in kinds}

    def note(frame: types.FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code in names:
            ran.append(names[frame.f_code])

    before = sys.getprofile()
    sys.setprofile(note)
    yield ran
    sys.setprofile(before)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("mask", [None, LENGTHS], ids=["whole", "padded"])
def test_esmfold_blocks_agree_after_replace(mask: Tensor | None, dropout: float, training: bool, counted: list[str]) -> None:
    original = esmfold(dropout).train(training)
    replaced, leaves = copy.deepcopy(original), states()
    assert sorted(evoattn_nn.replace(replaced)) == [
        "", "mlp_pair", "mlp_seq", "tri_att_end", "tri_att_start", "tri_mul_in", "tri_mul_out",
    ]  # fmt: skip
    expected = outcome(original, leaves, mask=mask)
    assert len(counted) == 4
    for options in ({}, {"chunk_size": 4, "unheard_of": 1}):
        assert_close(outcome(replaced, leaves, mask=mask, **options), expected, PADDED)
    assert len(counted) == 4


def test_esmfold_keeps_its_input() -> None:
    replaced, (s, z) = esmfold().eval(), (x.detach() for x in states())
    before = s.clone(), z.clone()
    with torch.no_grad():
        expected = replaced(s, z, LENGTHS)
        evoattn_nn.replace(replaced)
        assert_close(list(replaced(s, z, LENGTHS)), list(expected), PADDED)
    assert torch.equal(s, before[0]) and torch.equal(z, before[1])


def test_esmfold_with_hooks_and_shapes_that_it_refuses(counted: list[str]) -> None:
    replaced, leaves, seen = esmfold().eval(), states(), list[str]()
    expected = outcome(replaced, leaves, LENGTHS)
    evoattn_nn.replace(replaced)
    for name in ("row_drop", "tri_att_end"):
        handle = replaced.get_submodule(name).register_forward_hook(lambda *_, name=name: seen.append(name))
        counted.clear()
        with pytest.warns(UserWarning, match=f"{name} has hooks, and evoattn.nn does not call it"):
            assert_close(outcome(replaced, leaves, LENGTHS), expected, PADDED)
        handle.remove()
        assert not counted, "its layers are ours"
    assert seen == ["row_drop", "row_drop", "tri_att_end"]
    refused = pytest.warns(UserWarning, match="shapes that ESMFold refuses")
    with refused, pytest.raises(ValueError, match="inconsistent sequence length"):
        replaced(leaves[0][:, :5], leaves[1])


def test_esmfold_patched() -> None:
    block, (s, z) = esmfold().eval(), states()
    expected = block(s, z, LENGTHS)
    with evoattn.patch("esmfold", graphs=False) as patched:
        assert_close(list(block(s, z, LENGTHS)), list(expected), PADDED)
    calls = {site.rpartition(":")[2]: calls for site, calls in patched.calls_by_site.items() if calls}
    assert calls == {
        "EsmFoldTriangularSelfAttentionBlock.forward": 1,
        "EsmFoldSelfAttention.forward": 1,
        "EsmFoldResidueMLP.forward": 1,
    }
    with evoattn.patch("esmfold", layers=False, graphs=False) as patched:
        assert_close(list(block(s, z, LENGTHS)), list(expected), PADDED)
    calls = {site.rpartition(":")[2]: calls for site, calls in patched.calls_by_site.items() if calls}
    assert calls == {"EsmFoldAttention.forward": 2, "EsmFoldSelfAttention.forward": 1}


def test_a_wide_transition_of_a_sequence_is_computed_as_its_modules_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the products of other layers; by a call if somebody has to see it."""
    layer, x = esmfold().eval().mlp_seq, states()[0].detach()
    right, linears = layer(x), list[nn.Module]()
    monkeypatch.setattr(esmfold_client, "WIDEST", 1)
    monkeypatch.setattr(esmfold_client, "linear", lambda x, module: linears.append(module) or module(x))
    torch.testing.assert_close(esmfold_client._sequence_mlp(layer, x), right)
    assert linears == [layer.mlp[1], layer.mlp[3]]
    handle = layer.register_forward_hook(lambda *_: None)
    torch.testing.assert_close(esmfold_client._sequence_mlp(layer, x), right)
    handle.remove()
    assert len(linears) == 2
