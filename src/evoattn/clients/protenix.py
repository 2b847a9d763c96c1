"""Protenix and OpenDDE: triangle attention by a name given at each call, and SDPA for the single track, samples and atoms."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evoattn.clients import af3_transformers, aggregation, arguments, denoisers, graphs, initial
from evoattn.clients.arguments import ClientsOwn, Layer, UnknownArgument, forwards, ignore
from evoattn.clients.blocks import KnownBlock
from evoattn.clients.calls import additive, faster_as_installed, kernel, multiplication, queries_first
from evoattn.clients.known import MULTIPLICATION, OUTER_PRODUCT_MEAN, KnownLayer, features, transition, triangle
from evoattn.clients.layers import FEW, sites
from evoattn.clients.site import Client, PassedOn, Site, replacement
from evoattn.compat.openfold import attention
from evoattn.dispatch.axes import with_axes
from evoattn.nn.msa_module import MSAPairWeightedAveraging
from evoattn.nn.pair_bias import AttentionPairBias

_FEW = 16
"""Keys up to which Protenix' triangle attention takes no kernel."""


@replacement
def _single(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_bias: Tensor | None = None,
    use_efficient_implementation: bool = True,
    inplace_safe: bool = False,
) -> Tensor | PassedOn:
    """`[..., H, L, D]`, or windows `[..., H, blocks, L, D]`, whose blocks take the place of heads."""
    if q.ndim < 3:
        return PassedOn("an attention without heads")
    scores = q.shape[:-1].numel() * k.shape[-2]
    if attn_bias is not None and (reason := faster_as_installed(q, q.shape[-2], k.shape[-2], scores)):
        return PassedOn(reason)
    return attention(q, k.to(q.dtype), v.to(q.dtype), [attn_bias])


def _check_scaled(x: Tensor, triangle_attention: str) -> None:
    """Raise ClientsOwn if Protenix' triangle attention of x does not scale q: it takes no kernel for so few residues."""
    if triangle_attention in ("cuequivariance", "deepspeed") and x.shape[-2] <= _FEW:
        raise ClientsOwn(f"{_FEW} residues or fewer with {triangle_attention}, for which the client does not scale q")


def _protenix_triangle(layer: Layer, x: Tensor, mask: Tensor | None = None, **switches: Any) -> Tensor:
    _check_scaled(x, switches.get("triangle_attention", "torch"))
    return arguments.triangle(layer, x, mask, **switches)


def _make_pair_bias(client: Any) -> nn.Module | None:
    """The attention of the single track. That of samples and atoms is left to Protenix."""
    if client.has_s or client.cross_attention_mode:
        return None
    mha = client.attention
    return AttentionPairBias(mha.c_q, features(client.linear_nobias_z, "in_features"), mha.c_hidden, mha.num_heads)


def _pair_bias(
    layer: Layer,
    a: Tensor,
    s: None,
    z: Tensor,
    *,
    n_queries: int | None = None,
    n_keys: int | None = None,
    enable_efficient_fusion: bool = False,
    extra_attn_bias: Tensor | None = None,
    **switches: Any,
) -> Tensor:
    ignore(switches)
    if n_queries or n_keys or enable_efficient_fusion or extra_attn_bias is not None:
        raise ClientsOwn("windows, another product of the pair bias or one more bias")
    return layer(a, with_axes(z, a.ndim + 1))


def _outer_product(layer: Layer, m: Tensor, **arguments: Any) -> Tensor:
    """Both clients leave autocast to float16 for it."""
    if torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") == torch.float16:
        raise UnknownArgument("autocast to float16, in which the client computes it in float32")
    return forwards("m")(layer, m=m, **arguments)


def _make_averaging(client: Any) -> nn.Module:
    c_m, c_z = (features(x, "in_features") for x in (client.linear_no_bias_mv, client.linear_no_bias_z))
    return MSAPairWeightedAveraging(c_m, c_z, client.c, client.n_heads)


def _average(layer: Layer, m: Tensor, z: Tensor, **split: Any) -> Tensor:
    """OpenDDE may split z over processes."""
    if any(x is not None for x in split.values()):
        raise UnknownArgument("a pair representation that OpenDDE splits over processes")
    return layer(m, z)


def _call_protenix_block(
    layers: Any,
    block: Any,
    s: Tensor | None,
    z: Tensor,
    pair_mask: Tensor | None,
    *,
    triangle_attention: str = "torch",
    inplace_safe: bool = False,
    **switches: Any,
) -> tuple[Tensor | None, Tensor]:
    """Protenix drops nothing if it may overwrite z."""
    ignore(switches)
    _check_scaled(z, triangle_attention)
    rate = block.p_drop if block.training and not inplace_safe else 0.0
    if rate and sys.modules["protenix.model.modules.fused_ops"].TRITON_FUSED_OPS_AVAILABLE:
        raise UnknownArgument("FUSED_DROPOUT_RESIDUAL, for which Protenix draws other random numbers")

    def draw(z: Tensor, which: int) -> Tensor | None:
        return layers.shared(z, which, lambda ones: F.dropout(ones, rate)) if rate else None

    z = layers.run(z, pair_mask, draw, in_place=inplace_safe)
    return _single_of_protenix(layers, block, s, z), z


def _single_of_protenix(layers: Any, block: Any, s: Tensor | None, z: Tensor, **more: Any) -> Tensor | None:
    if block.c_s > 0:
        s = s + layers.attention_pair_bias(a=s, s=None, z=z, **more)
        s = s + layers.single_transition(s)
    return s


def _call_opendde_block(
    layers: Any,
    block: Any,
    s: Tensor | None,
    z: Tensor,
    pair_mask: Tensor | None,
    *,
    inplace_safe: bool = False,
    extra_attn_bias: Tensor | None = None,
    **switches: Any,
) -> tuple[Tensor | None, Tensor]:
    """OpenDDE drops nothing."""
    ignore(switches)
    if os.environ.get(denoisers.MODE, denoisers.ALONE) != denoisers.ALONE:
        raise UnknownArgument("a pair representation that OpenDDE splits over processes")
    z = layers.run(z, pair_mask, lambda *_: None, in_place=inplace_safe)
    return _single_of_protenix(layers, block, s, z, extra_attn_bias=extra_attn_bias), z


_PAIR_BIAS = KnownLayer(
    _make_pair_bias,
    "layer_norm_a=layernorm_a layer_norm_z=layernorm_z linear_z=linear_nobias_z mha.linear_*=attention.linear_*",
    _pair_bias,
)
_AVERAGING = KnownLayer(
    _make_averaging,
    "layer_norm_m=layernorm_m layer_norm_z=layernorm_z linear_z=linear_no_bias_z linear_v=linear_no_bias_mv "
    "linear_g=linear_no_bias_mg linear_o=linear_no_bias_out",
    _average,
    kind="MSA layer",
)
_SINGLE = ("attention_pair_bias", "single_transition")
_TRANSITION = transition(
    "layer_norm=layernorm1 swiglu.linear_a=linear_no_bias_a swiglu.linear_b=linear_no_bias_b linear_out=linear_no_bias", ""
)


def _client(
    package: str,
    model: str,
    method: str,
    call_triangle: Callable[..., Tensor],
    call_block: Callable[..., Any],
    *more: Site,
) -> Client:
    """Protenix or OpenDDE.

    `model` is the class of the whole model, `method` is what its pairformer calls of a block. `call_triangle` and `call_block`
    call our triangle attention and block.
    """
    layers, primitives = f"{package}.model.triangular.layers", f"{package}.model.modules.primitives"
    triangles, pairformer = f"{package}.model.triangular.triangular", f"{package}.model.modules.pairformer"
    block = f"{pairformer}:PairformerBlock"
    transformer = f"{package}.model.modules.transformer"
    layers_known = {
        f"{triangles}.TriangleAttention": triangle(call=call_triangle),
        f"{triangles}.TriangleMultiplicativeUpdate": MULTIPLICATION,
        f"{transformer}.AttentionPairBias": _PAIR_BIAS,
        f"{primitives}.Transition": _TRANSITION,
        f"{layers}.OuterProductMean": OUTER_PRODUCT_MEAN._replace(call=_outer_product),
        f"{pairformer}.MSAPairWeightedAveraging": _AVERAGING,
    }
    block_known = {block.replace(":", "."): KnownBlock(call_block, "pair_transition", True, _SINGLE)}
    return Client(
        package,
        package,
        (
            Site(layers, "_attention", additive),
            Site(layers, "cuequivariance_triangular_attn", kernel),
            *more,
            Site(primitives, "_attention", _single),
            Site(triangles, "kernel_triangular_mult", multiplication, missing="cuequivariance_torch", counted=False),
            Site(layers, "Attention.forward"),
            Site(primitives, "_local_attention"),
            Site(primitives, "Attention.forward"),
        ),
        layers=(
            *sites(layers_known, least_trained=FEW),
            *sites(block_known, least_trained=FEW, method=method),
            *denoisers.protenix_sites(package),
            Site(layers, "trunc_normal_init_", initial.truncated, counted=False),
        ),
        steps=(
            Site(f"{package}.model.utils", "aggregate_atom_to_token", aggregation.means_by_token, counted=False),
            Site(f"{package}.model.modules.diffusion", "DiffusionModule.forward", graphs.step),
            Site(f"{package}.model.{package}", f"{model}.sample_diffusion", graphs.loop, counted=False),
            # In inference blocks write into their input; recorded ones do not.
            *graphs.blocks(block, method=f".{method}", instead={"inplace_safe": False}),
            *graphs.blocks(f"{pairformer}:MSABlock", instead={"inplace_safe": False}),
        ),
        known={**layers_known, **block_known, f"{transformer}.DiffusionTransformer": af3_transformers.PROTENIX},
        linears=(f"{layers}.OpenfoldLinear", f"{primitives}.Linear"),
        norms=(f"{layers}.OpenFoldLayerNorm", f"{package}.model.layer_norm.layer_norm.FusedLayerNorm"),
    )


CLIENTS = {
    "protenix": _client(
        "protenix",
        "Protenix",
        "forward",
        _protenix_triangle,
        _call_protenix_block,
        Site("protenix.model.triangular.layers", "_tri_attention", queries_first(scaled=True)),
        Site("protenix.model.triangular.layers", "_deepspeed_evo_attn", queries_first(scaled=False)),
    ),
    "opendde": _client("opendde", "OpenDDE", "forward_source", arguments.triangle, _call_opendde_block),
}
