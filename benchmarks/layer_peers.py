"""Layers of other libraries, one small adapter each. They compute with the parameters of the layer of `evoattn.nn`.

An adapter takes a layer and returns a function that computes its output. It raises ImportError if the library is absent,
and RefusesError if it has no such layer. The table shows the reason.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from evoattn.bench.contender import RefusesError
from evoattn.nn import from_openfold3

if TYPE_CHECKING:
    from layer_ways import Layer

Compute = Callable[["Layer"], Tensor]
"""A layer -> its output."""


def openfold3(layer: Layer) -> Compute:
    """OpenFold-3's class of this layer, with its Triton kernels on a GPU."""
    module = _openfold3_class(layer).to(layer.mask.device)
    named = dict(module.named_parameters())
    places = {own.rpartition(".")[0]: name.rpartition(".")[0] for own, name in zip(from_openfold3(named), named, strict=True)}
    outer = "_msa_att." if layer.kind == "msa_column" else ""
    for name, parameter in layer.module.named_parameters():
        place, _, last = name.rpartition(".")
        module.get_submodule(places[outer + place]).register_parameter(last, parameter)
    names = [name for name, _ in module.named_parameters()]
    if len(names) != len(list(layer.module.parameters())):  # one of theirs is not of ours
        raise RefusesError(f"has other parameters: {', '.join(names)}")
    kernels = {"use_triton_triangle_kernels": True} if layer.mask.is_cuda else {}

    def compute(layer: Layer) -> Tensor:
        inputs = {"x" if layer.kind == "triangle" else name: x for name, x in layer.inputs.items()}
        first = next(iter(inputs.values()))
        output: Tensor = module(**inputs, mask=layer.mask.to(first.dtype), **kernels)
        return output

    return compute


def _openfold3_class(layer: Layer) -> nn.Module:
    """A new module of OpenFold-3 of this layer's sizes."""
    width, heads, inf = layer.do.shape[-1], layer.module.no_heads, layer.module.inf
    hidden = layer.module.mha.linear_q.out_features // heads
    c_z, c_s = (layer.inputs[x].shape[-1] if x in layer.inputs else width for x in "zs")
    room, name, sizes = {
        "triangle": ("triangular_attention", "TriangleAttention", (width, hidden, heads)),
        "msa_row": ("msa", "MSARowAttentionWithPairBias", (width, c_z, hidden, heads)),
        "msa_column": ("msa", "MSAColumnAttention", (width, hidden, heads)),
        "single": ("attention_pair_bias", "AttentionPairBias", (width, width, width, c_s, c_z, hidden, heads)),
        "pair_bias": ("attention_pair_bias", "DiffusionAttentionPairBias", (width, width, width, c_s, c_z, hidden, heads)),
    }[layer.kind]
    module: nn.Module = getattr(importlib.import_module(f"openfold3.core.model.layers.{room}"), name)(*sizes, inf=inf)
    return module


def cuequivariance(layer: Layer) -> Compute:
    """cuEquivariance's `attention_pair_bias`, from the norms to the output product."""
    if layer.kind != "single":
        raise RefusesError("has attention with pair bias of the single track alone, without a condition")
    from cuequivariance_ops_torch import attention_pair_bias

    module: Any = layer.module
    options = {
        "num_heads": module.no_heads,
        "inf": module.inf,
        "w_ln_a": module.layer_norm_a.weight,
        "b_ln_a": module.layer_norm_a.bias,
        "w_ln_z": module.layer_norm_z.weight,
        "b_ln_z": module.layer_norm_z.bias,
        "w_proj_z": module.linear_z.weight,
        "b_proj_q": module.mha.linear_q.bias,
        **{f"w_proj_{x}": getattr(module.mha, f"linear_{x}").weight for x in "qkvgo"},
    }

    def compute(layer: Layer) -> Tensor:
        a, z = layer.inputs["a"], layer.inputs["z"]
        o: Tensor = attention_pair_bias(a[0], z[0], layer.mask[0].to(a.dtype), **options)[0]
        return o.unsqueeze(0)

    return compute
