"""State dicts of clients, and the same answers where a client is installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import evoattn
import evoattn.nn as evoattn_nn
from evoattn.clients import diffusion, patching
from evoattn.clients.blocks import KnownBlock
from evoattn.clients.registry import known
from evoattn.testing import relative_error
from tests.clients.standins import filled, gradients, installed, normal


def test_from_openfold3_renames_attention_alone() -> None:
    """State dicts of whole models: prefixes stay, and so do the names of all other layers."""
    others = {f"a.tri_att_start.mha.linear_{x}.weight": 4 for x in "qkvo"}
    state = {
        "a.tri_att_start.layer_norm.weight": 0,
        "a.tri_att_start.linear_z.weight": 1,
        "a.attn_pair_bias.linear_z.weight": 2,
        "a.attn_pair_bias.layer_norm_a.weight": 3,
        **others,
    }
    assert evoattn_nn.from_openfold3(state) == {  # type: ignore[arg-type]
        "a.tri_att_start.layer_norm.weight": 0,
        "a.tri_att_start.linear.weight": 1,
        "a.attn_pair_bias.linear_z.weight": 2,
        "a.attn_pair_bias.layer_norm_a.weight": 3,
        **others,
    }


def test_names_of_boltz() -> None:
    """Only attention is renamed: other layers have projections of the same names, which a lenient load would leave random."""
    attention = {f"{prefix}proj_{x}.weight": x for prefix in ("", "b.") for x in "qkvgo"}
    renamed = {f"{prefix}mha.linear_{x}.weight": x for prefix in ("", "b.") for x in "qkvgo"}
    state = {"proj_z.0.bias": 0, "proj_z.1.weight": 1, "b.proj_q.bias": 2, "b.norm_s.weight": 3}
    others = ("b.some_proj_q.weight", "msa.norm_s.weight", "msa.proj_g.weight", "msa.proj_o.weight", "outer.proj_o.bias")
    assert evoattn_nn.from_boltz(attention | state | dict.fromkeys(others, 4)) == renamed | {  # type: ignore[arg-type]
        "layer_norm_z.bias": 0,
        "linear_z.weight": 1,
        "b.mha.linear_q.bias": 2,
        "b.layer_norm_a.weight": 3,
        **dict.fromkeys(others, 4),
    }


MASK = (torch.arange(7) < torch.tensor([[7], [5]])).double()
PAIRS, SEQUENCES = MASK[:, :, None] * MASK[:, None], MASK[:, None].expand(2, 5, 7)

OPENFOLD: dict[str, tuple[str, Callable[[Any], Any], Callable[[], list[Tensor]], Tensor, nn.Module]] = {
    "triangle, start": (
        "openfold.model.triangular_attention",
        lambda client: client.TriangleAttentionStartingNode(12, 6, 4),
        lambda: [normal(2, 7, 7, 12)],
        PAIRS,
        evoattn_nn.TriangleAttention(12, 6, 4),
    ),
    "triangle, end": (
        "openfold.model.triangular_attention",
        lambda client: client.TriangleAttentionEndingNode(12, 6, 4),
        lambda: [normal(2, 7, 7, 12)],
        PAIRS,
        evoattn_nn.TriangleAttention(12, 6, 4, starting=False),
    ),
    "MSA rows": (
        "openfold.model.msa",
        lambda client: client.MSARowAttentionWithPairBias(12, 10, 6, 4),
        lambda: [normal(2, 5, 7, 12), normal(2, 7, 7, 10)],
        SEQUENCES,
        evoattn_nn.MSARowAttentionWithPairBias(12, 10, 6, 4),
    ),
    "MSA columns": (
        "openfold.model.msa",
        lambda client: client.MSAColumnAttention(12, 6, 4),
        lambda: [normal(2, 5, 7, 12)],
        SEQUENCES,
        evoattn_nn.MSAColumnAttention(12, 6, 4),
    ),
    "MSA columns, global": (
        "openfold.model.msa",
        lambda client: client.MSAColumnGlobalAttention(12, 6, 4),
        lambda: [normal(2, 5, 7, 12)],
        SEQUENCES,
        evoattn_nn.MSAColumnGlobalAttention(12, 6, 4),
    ),
    "templates": (
        "openfold.model.template",
        lambda client: client.TemplatePointwiseAttention(10, 12, 6, 4, 1e9).train(),
        lambda: [normal(2, 3, 7, 7, 10), normal(2, 7, 7, 12)],
        torch.tensor([[1.0, 0.0, 1.0], [1.0, 1.0, 1.0]]).double(),
        evoattn_nn.TemplatePointwiseAttention(10, 12, 6, 4),
    ),
}
"""By the layer: its module, what makes it, its inputs, their mask, and our layer."""


@pytest.mark.parametrize("layer", OPENFOLD)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_openfold_layers_agree_after_replace(layer: str, dtype: torch.dtype) -> None:
    """Its state dict loads as it is; outputs and all gradients are those of its own class, loaded or replaced.

    Padding is compared in float32 alone: in float64 -1e9 leaves a score of a row without a key seven digits.
    """
    module, make, inputs, mask, own = OPENFOLD[layer]
    original = filled(make(installed(module))).to(dtype)
    own.to(dtype).load_state_dict(original.state_dict())
    tensors = [x.detach().to(dtype).requires_grad_() for x in inputs()]
    mask = mask.to(dtype)
    expected = gradients(original(*tensors, mask), [*tensors, *original.parameters()])
    parameters = dict(own.named_parameters())
    leaves = [parameters.pop(name) for name, _ in original.named_parameters()]
    assert not parameters
    actual = gradients(own(*tensors, mask=mask), [*tensors, *leaves])
    assert evoattn_nn.replace(original) == [""]
    replaced = gradients(original(*tensors, mask), [*tensors, *original.parameters()])
    bound = 1e-6 if dtype == torch.float64 else 2e-5
    for a, b, third in zip(expected, actual, replaced, strict=True):
        assert torch.equal(b, third)
        assert a.abs().max() < 1e-5 or relative_error(b, a) < bound


def _triangle_of_openfold3() -> tuple[nn.Module, nn.Module, Any, list[Tensor], Any]:
    original = installed("openfold3.core.model.layers.triangular_attention").TriangleAttention(12, 6, 4)
    own = evoattn_nn.TriangleAttention(12, 6, 4, gate_bias=False, out_bias=False)
    return original, own, evoattn_nn.from_openfold3, [normal(2, 7, 7, 12)], {"mask": PAIRS}


def _track_of_openfold3() -> tuple[nn.Module, nn.Module, Any, list[Tensor], Any]:
    module = installed("openfold3.core.model.layers.attention_pair_bias")
    original = module.AttentionPairBias(12, 12, 12, 9, 10, 6, 4)
    own = evoattn_nn.AttentionPairBias(12, 10, 6, 4)
    return original, own, evoattn_nn.from_openfold3, [normal(2, 7, 12), normal(2, 7, 7, 10)], {"mask": MASK}


def _diffusion_of_openfold3() -> tuple[nn.Module, nn.Module, Any, list[Tensor], Any]:
    module = installed("openfold3.core.model.layers.attention_pair_bias")
    original = module.DiffusionAttentionPairBias(12, 12, 12, 9, 10, 6, 4)
    own = evoattn_nn.AttentionPairBias(12, 10, 6, 4, c_s=9)
    inputs = [normal(2, 3, 7, 12), normal(2, 1, 7, 7, 10), normal(2, 3, 7, 9)]
    return original, own, evoattn_nn.from_openfold3, inputs, {"mask": MASK[:, None]}


def _triangle_of_boltz() -> tuple[nn.Module, nn.Module, Any, list[Tensor], Any]:
    original = installed("boltz.model.layers.triangular_attention.attention").TriangleAttentionEndingNode(12, 6, 4)
    own = evoattn_nn.TriangleAttention(12, 6, 4, starting=False, gate_bias=False, out_bias=False)
    return original, own, evoattn_nn.from_boltz, [normal(2, 7, 7, 12)], {"mask": PAIRS}


def _track_of_boltz() -> tuple[nn.Module, nn.Module, Any, list[Tensor], Any]:
    original = installed("boltz.model.layers.attention").AttentionPairBias(24, 10, 4)
    own = evoattn_nn.AttentionPairBias(24, 10, 6, 4, inf=1e6)
    return original, own, evoattn_nn.from_boltz, [normal(2, 7, 24), normal(2, 7, 7, 10)], {"mask": MASK}


LOADED = (_triangle_of_openfold3, _track_of_openfold3, _diffusion_of_openfold3, _triangle_of_boltz, _track_of_boltz)


@pytest.mark.parametrize("make", LOADED, ids=lambda make: make.__name__)
def test_state_dicts(make: Callable[[], Any]) -> None:
    """A state dict by the client's names gives the client's outputs, at all residues; in float32, where Boltz computes."""
    original, own, names, inputs, masks = make()
    own.load_state_dict(names(filled(original).state_dict()))
    original, own = original.float(), own.float()
    inputs, masks = [x.float() for x in inputs], {name: x.float() for name, x in masks.items()}
    assert relative_error(own(*inputs, **masks), original(*inputs, **masks).double()) < 2e-6


WHOLE = ("boltz", "boltzgen", "esmfold", "opendde", "openfold3", "protenix")
"""Clients with blocks in tools/clients."""


@pytest.mark.parametrize("client", WHOLE)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_blocks(client: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block of a client with our layers in it: outputs and all gradients, padding too in float32."""
    monkeypatch.setenv("LAYERNORM_TYPE", "torch")  # Protenix compiles an extension otherwise
    installed(patching.client(client).distribution)
    blocks = importlib.import_module(f"clients.{client}").BLOCKS
    layers = importlib.import_module("clients.layers")
    limits = importlib.import_module("clients.compare").LIMITS[dtype]
    counts = []
    for block in blocks:
        count, outputs, gradients_ = layers.compare_layers(block, dtype, (16,))
        counts.append(count)
        assert outputs <= limits[0] and gradients_ <= limits[1], block.name
    assert sum(counts) >= {"boltz": 15, "openfold3": 15}.get(client, 7)


@pytest.mark.parametrize("whole_layer", [True, False])
@pytest.mark.parametrize("client", WHOLE)
def test_blocks_patched(client: str, whole_layer: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same by `patch`: each kind of block, or of layer, is ours, and what their callers get is theirs."""
    monkeypatch.setenv("LAYERNORM_TYPE", "torch")
    installed(patching.client(client).distribution)
    of_blocks = {name for name, x in known().items() if isinstance(x, KnownBlock)}
    for name in () if whole_layer else of_blocks:
        monkeypatch.delitem(known(), name)
    compare, blocks = importlib.import_module("clients.compare"), importlib.import_module(f"clients.{client}").BLOCKS
    dtype, called = torch.float32, dict[str, int]()
    for block in blocks:
        expected = compare.outcome(block, dtype, 16, block.ways[0])
        with evoattn.patch(client, graphs=False) as patched:
            actual = compare.outcome(block, dtype, 16, block.ways[0])
        called |= {site: called.get(site, 0) + calls for site, calls in patched.calls_by_site.items()}
        for error, limit in zip(compare.errors(expected, actual), compare.LIMITS[dtype], strict=True):
            assert error <= limit, block.name
    for site in patching.client(client).layers:
        if not site.counted or site.kind == diffusion.KIND or site.replace is diffusion.trained:  # those of a GPU alone
            continue
        is_block = f"{site.module}.{site.name.partition('.')[0]}" in of_blocks
        assert called[str(site)] or is_block != whole_layer, site
