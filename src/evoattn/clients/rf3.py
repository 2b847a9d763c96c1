"""RosettaFold-3 in foundry: triangle attention in two branches, and pair-biased attention inline in a `forward`."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch
from torch import Tensor, nn

from evoattn.clients import graphs, rf3_denoiser
from evoattn.clients.arguments import forwards
from evoattn.clients.boltz import MULTIPLICATION_MODULES
from evoattn.clients.known import KnownLayer, channels_of, features, transition
from evoattn.clients.layers import sites
from evoattn.clients.site import Client, Count, Site, replacement
from evoattn.compat.openfold import attention
from evoattn.nn.multiplication import JoinedTriangleMultiplication
from evoattn.nn.triangle import TriangleAttention

_TRIANGLES = "rf3.model.layers.attention"
_UTILS = "rf3.model.layers.layer_utils"
_PAIRFORMER = "rf3.model.layers.pairformer_layers"
_DIFFUSION = "rf3.model.layers.af3_diffusion_transformer"


@replacement
def _triangle(self: Any, pair: Tensor, bias: Tensor) -> Tensor:
    """Either branch, with the dtypes of torch's: cuEquivariance's insists on bfloat16."""
    gate = self.to_g(pair).sigmoid()
    q, k, v = (to(pair).unflatten(-1, (self.h, -1)).transpose(-2, -3) for to in (self.to_q, self.to_k, self.to_v))
    o = attention(q, k, v, [bias.movedim(-1, 1).unsqueeze(1)], scaled=False, empty_rows="native")
    return gate * o.transpose(-2, -3).flatten(-2)  # type: ignore[no-any-return]


@replacement
def _pairformer(self: Any, A_I: Tensor, S_I: None, Z_II: Tensor, Beta_II: Tensor) -> Tensor:  # noqa: N803
    """A_I `[I, C]`, Z_II `[I, I, C]`; Beta_II is added for all heads. `use_deepspeed_evo` chooses nothing here."""
    a = _low_precision(self, self.ln_1(A_I))
    bias = self.to_b(self.ln_0(Z_II)) + Beta_II[..., None]
    return self.to_a(_attend(self, a, bias, self.to_q(a), self.to_k(a)))  # type: ignore[no-any-return]


def _tokens(self: Any, A_I: Tensor, S_I: Tensor, Z_II: Tensor) -> Tensor:  # noqa: N803
    a = _low_precision(self, self.ada_ln_1(A_I, S_I))
    bias = self.to_b(self.ln_0(Z_II))
    o = self.to_a(_attend(self, a, bias, *_normed(self, self.to_q(a), self.to_k(a))))
    return self.linear_output_project(S_I) * o  # type: ignore[no-any-return]


def _diffusion(original: Any, count: Count) -> Any:
    def of_tokens(self: Any, A_I: Tensor, S_I: Tensor, Z_II: Tensor) -> Tensor:  # noqa: N803
        return original(self, A_I, S_I, Z_II, None)  # type: ignore[no-any-return]

    computed = replacement(_tokens)(of_tokens, count)

    def forward(self: Any, A_I: Tensor, S_I: Tensor, Z_II: Tensor, Beta_II: Any) -> Tensor:  # noqa: N803
        """A_I `[D, I, C]` of D samples that share Z_II `[I, I, C]`. With a Beta_II they are atoms, attended in windows."""
        if Beta_II is not None:
            return self.atom_attention(self.ada_ln_1(A_I, S_I), S_I, Z_II)  # type: ignore[no-any-return]
        return computed(self, A_I, S_I, Z_II)  # type: ignore[no-any-return]

    # The original has foundry's decorator.
    return importlib.import_module("foundry.training.checkpoint").activation_checkpointing(forward)


@replacement
def atoms(
    self: Any,
    A_I: Tensor,  # noqa: N803
    S_I: Tensor,  # noqa: N803
    Z_II: Tensor,  # noqa: N803
    qbatch: int = 32,
    kbatch: int = 128,
) -> Tensor:
    """A_I `[D, L, C]` or `[L, C]`, Z_II `[L, L, C]`; each window of queries attends the keys around its middle."""
    a = A_I[None] if A_I.ndim == 2 else A_I
    samples, length = a.shape[:2]
    q, k = _normed(self, self.to_q(a), self.to_k(a))  # [s,l,h,c]
    middle = torch.arange(qbatch // 2, length + qbatch // 2, qbatch, device=a.device)[:, None]
    queries = middle + torch.arange(-(qbatch // 2), qbatch // 2, device=a.device)  # [n,q]
    keys = middle + torch.arange(-(kbatch // 2), kbatch // 2, device=a.device)  # [n,k]
    outside = (keys < 0) | (keys >= length)
    off = torch.zeros_like(outside, dtype=torch.float32).masked_fill(outside, -torch.inf)[:, None, None]
    queries, keys = queries.clamp(max=length - 1), keys.clamp(0, length - 1)
    bias = self.to_b(self.ln_0(Z_II[queries[:, :, None], keys[:, None]])).movedim(-1, 1)  # [n,h,q,k]
    q, k, v = (x.transpose(-2, -3) for x in (q[:, queries], k[:, keys], self.to_v(a)[:, keys]))  # [s,n,h,q|k,c]
    # Not "mean": every window has keys, and queries beyond the last atom are cut off.
    o = attention(q, k.to(q.dtype), v.to(q.dtype), [off, bias], scaled=False, empty_rows="native")
    o = o.transpose(-2, -3).flatten(1, 2)[:, :length]
    return self.linear_output_project(S_I) * self.to_a((self.to_g(a) * o).reshape(samples, length, -1))  # type: ignore[no-any-return]


def _attends_atoms(self: Any, A_I: Tensor, S_I: Tensor, Z_II: Tensor, Beta_II: Any) -> str:  # noqa: N803
    return "" if Beta_II is None else "a transformer of atoms, whose pairs take too much memory"  # a recording copies them


def _attend(self: Any, a: Tensor, bias: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Gated attention `[..., I, H * D]`; bias `[..., I, I, H]`, shared by further leading axes of a, its samples."""
    q, k, v = (x.transpose(-2, -3) for x in (q, k, self.to_v(a)))
    o = attention(q, k.to(q.dtype), v.to(q.dtype), [bias.movedim(-1, -3)], scaled=False, empty_rows="native")
    gated: Tensor = self.to_g(a) * o.transpose(-2, -3)
    return gated.flatten(-2)


def _normed(self: Any, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """q and k `[..., H, D]`, normed over all heads if the module does that."""
    if not self.kq_norm:
        return q, k
    return self.query_layer_norm(q.flatten(-2)).view_as(q), self.key_layer_norm(k.flatten(-2)).view_as(k)


def _low_precision(self: Any, a: Tensor) -> Tensor:
    """a in bfloat16 if the original casts it, else as it is."""
    low = (self.use_deepspeed_evo or self.force_bfloat16) and a.device.type != "mps"
    return a.to(torch.bfloat16) if low else a


def tokens(original: Any, count: Count) -> Any:
    """A transformer of tokens, recorded unless the denoiser is recorded as a whole."""
    recorded = graphs.step(original, count, skip=_attends_atoms)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return (original if rf3_denoiser.shares() else recorded)(self, *args, **kwargs)

    forward._evoattn_steps = recorded._evoattn_steps  # type: ignore[attr-defined]
    return forward


def _make_triangle(client: Any) -> nn.Module:
    return TriangleAttention(features(client.to_q, "in_features"), client.dim, client.h, client.start_node)


def _make_multiplication(client: Any) -> nn.Module:
    channels = channels_of(client.norm_in)
    layer: Any = JoinedTriangleMultiplication(channels, channels, client.direction == "outgoing")
    layer.by_cuequivariance = client.use_cuequivariance
    return layer  # type: ignore[no-any-return]


def _triangle_layer(layer: Any, pair: Tensor) -> Tensor:
    """Call the layer with RosettaFold-3's argument. Its pair bias is that of the pair that was not transposed."""
    return layer(pair, transpose_bias=not layer.starting)  # type: ignore[no-any-return]


def _multiplication(layer: Any, pair: Tensor) -> Tensor:
    """Call the layer with RosettaFold-3's argument. Without cuEquivariance it divides the product by the number of residues."""
    mask = None
    if not (layer.by_cuequivariance and sys.modules[_TRIANGLES].SHOULD_USE_CUEQUIVARIANCE):
        dtype = torch.promote_types(pair.dtype, torch.float32)
        mask = pair.new_full((1,) * (pair.ndim - 1), pair.shape[-2] ** -0.5, dtype=dtype)  # a factor of both halves
    return layer(pair, mask)  # type: ignore[no-any-return]


_KNOWN = {
    f"{_TRIANGLES}.TriangleAttention": KnownLayer(
        _make_triangle,
        "layer_norm=norm linear=to_b mha.linear_q=to_q mha.linear_k=to_k mha.linear_v=to_v mha.linear_g=to_g"
        " mha.linear_o=to_out",
        _triangle_layer,
    ),
    f"{_TRIANGLES}.TriangleMultiplication": KnownLayer(
        _make_multiplication, MULTIPLICATION_MODULES, _multiplication, kind="triangle multiplication"
    ),
    f"{_UTILS}.Transition": transition(
        "layer_norm=layer_norm_1 swiglu.linear_a=linear_1 swiglu.linear_b=linear_2 linear_out=linear_3", "", forwards("X")
    ),
}

CLIENTS = {
    "rf3": Client(
        "rf3",
        "rc-foundry",
        (
            Site(_TRIANGLES, "TriangleAttention._forward_vanilla", _triangle),
            Site(_TRIANGLES, "TriangleAttention._forward_cuequivariance", _triangle),
            Site(_PAIRFORMER, "AttentionPairBiasPairformerDeepspeed.forward", _pairformer),
            Site(_DIFFUSION, "AttentionPairBiasDiffusion.forward", _diffusion),
            Site(_DIFFUSION, "AttentionPairBiasDiffusion.atom_attention", atoms),
            # Classes, because the source of a decorated method is the decorator's.
            Site(_TRIANGLES, "TriangleAttention"),
            Site(_DIFFUSION, "AttentionPairBiasDiffusion"),
            Site("foundry.training.checkpoint", "activation_checkpointing"),
        ),
        layers=(*sites(_KNOWN), Site(_UTILS, "Transition"), *rf3_denoiser.layer_sites()),
        steps=(Site(_DIFFUSION, "DiffusionTransformer.forward", tokens), *rf3_denoiser.step_sites()),
        known={**_KNOWN, f"{_DIFFUSION}.DiffusionTransformer": rf3_denoiser.TRANSFORMER},
        linears=(f"{_UTILS}.MultiDimLinear",),  # its result is reshaped afterwards
    )
}
