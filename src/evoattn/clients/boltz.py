"""Boltz-1, Boltz-2 and BoltzGen: triangle attention, its kernel, and the pair-biased attention inline in a `forward`."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from evoattn.clients import graphs, sampling
from evoattn.clients.calls import HOST_BOUND, additive, host_sets_pace, kernel, multiplication
from evoattn.clients.layers import FEW, known_sites, layer
from evoattn.clients.site import Client, Count, Replace, Site, named
from evoattn.compat.openfold import attention


def unless_host_bound(replace: Replace, *, counted: bool = True) -> Replace:
    """`replace`, except for calls in which the host sets the pace. These are counted here if no site inside counts them."""

    def wrap(original: Any, count: Count) -> Any:
        replacement = replace(original, count)

        def forward(self: Any, s: Tensor, z: Tensor | None, *rest: Any, **named: Any) -> Any:
            # From Boltz-1's second step on z is None, and its projection `[B, H, Q, K]` is in the cache.
            queries, keys = named["model_cache"]["z"].shape[-2:] if z is None else z.shape[-3:-1]
            if not host_sets_pace(s, queries, keys, s.shape[0] * self.num_heads * queries * keys):
                return replacement(self, s, z, *rest, **named)
            if counted:
                count.count_passed_on(HOST_BOUND)
            return original(self, s, z, *rest, **named)

        return forward

    return wrap


def attend(self: Any, s: Tensor, qkv: tuple[Tensor, ...], bias: Tensor, mask: Tensor, multiplicity: int) -> Tensor:
    """The gated, pair-biased attention of S samples that share the bias `[B, H, Q, K]`, as its output `[B * S, Q, C]`.

    s is `[B * S, Q, C]`; q, k and v are `[B * S, L, H, D]`, the mask is `[B * S, K]`.

    The originals repeat the bias for each sample, and compute in float32. -1e6 or so is added where the mask is 0.
    """
    q, k, v = (x.transpose(1, 2).unflatten(0, (-1, multiplicity)) for x in qkv)  # [b,s,h,l,d]
    off = (1 - mask.float()) * -self.inf
    masks = off.unflatten(0, (-1, multiplicity))[:, :, None, None]
    with torch.autocast(q.device.type, enabled=False):
        o = attention(q, k, v, [bias.unsqueeze(1), masks], scaled=False, empty_rows="native")
    o = o.flatten(0, 1).transpose(1, 2)
    return self.proj_o(self.proj_g(s).sigmoid() * o.reshape(s.shape[0], -1, self.c_s))  # type: ignore[no-any-return]


def boltz2_attention(original: Any, count: Count) -> Any:
    """The attention with pair bias of Boltz-2 and BoltzGen."""

    def forward(self: Any, s: Tensor, z: Tensor, mask: Tensor, k_in: Tensor, multiplicity: int = 1) -> Tensor:
        count.count_replaced()
        q, k, v = projected(self, s, k_in)
        if getattr(self, "use_qk_norm", False):
            q, k = self.q_norm(q), self.k_norm(k)
        return attend(self, s, (q, k, v), self.proj_z(z), mask, multiplicity)

    return forward


def _boltz1_attention(original: Any, count: Count) -> Any:
    """The attention with pair bias of Boltz-1. Its keys may be of windows, and all steps of a diffusion share its bias."""

    def forward(
        self: Any,
        s: Tensor,
        z: Tensor,
        mask: Tensor,
        multiplicity: int = 1,
        to_keys: Any = None,
        model_cache: dict[str, Tensor] | None = None,
    ) -> Tensor:
        count.count_replaced()
        if self.initial_norm:
            s = self.norm_s(s)
        k_in = s
        if to_keys is not None:
            k_in, mask = to_keys(s), to_keys(mask.unsqueeze(-1)).squeeze(-1)
        qkv = projected(self, s, k_in)
        if model_cache is None or "z" not in model_cache:
            z = self.proj_z(z)
            if model_cache is not None:
                model_cache["z"] = z
        else:
            z = model_cache["z"]
        return attend(self, s, qkv, z, mask, multiplicity)

    return forward


def projected(self: Any, s: Tensor, k_in: Tensor) -> tuple[Tensor, ...]:
    """q, k and v `[B, L, H, D]`."""
    qkv = (self.proj_q(s), self.proj_k(k_in), self.proj_v(k_in))
    return tuple(x.view(s.shape[0], -1, self.num_heads, self.head_dim) for x in qkv)


_uncounted = functools.partial(named, method="", counted=False)


def _client(
    package: str, multiplied: str, pairs: dict[str, Replace], diffusions: tuple[str, ...], layers: tuple[Site, ...] = ()
) -> Client:
    """Boltz or BoltzGen.

    `multiplied` is the module of the triangle multiplication. `pairs` has replacements of `AttentionPairBias.forward` by
    module, `diffusions` modules of the diffusion, `layers` sites that only one of both has.
    """
    there = f"{package}.model.layers"
    triangle, multiplication_kernel = f"{there}.triangular_attention", "kernel_triangular_mult"
    diffusions = tuple(f"{package}.model.modules.{name}" for name in diffusions)
    return Client(
        package,
        package,
        (
            Site(f"{triangle}.primitives", "_attention", additive),
            Site(f"{triangle}.primitives", "kernel_triangular_attn", kernel),
            *(Site(f"{there}.{name}", "AttentionPairBias.forward", unless_host_bound(x)) for name, x in pairs.items()),
            Site(f"{there}.{multiplied}", ("_" if package == "boltzgen" else "") + multiplication_kernel,
                 multiplication, missing="cuequivariance_torch", counted=False),
            Site(f"{triangle}.primitives", "Attention.forward"),
            Site(f"{triangle}.attention", "TriangleAttention.forward"),
        ),
        layers=(*layers, *known_sites(package, but="AttentionPairBias", least=FEW)),
        steps=(
            *named(graphs.step, *(f"{module}:DiffusionModule" for module in diffusions)),
            *_uncounted(graphs.loop, *(f"{module}:AtomDiffusion.sample" for module in diffusions)),
            *graphs.blocks(f"{there}.pairformer:PairformerLayer", f"{there}.pairformer:PairformerNoSeqLayer"),
        ),
    )  # fmt: skip


_MODULES, _LOSS = "boltz.model.modules", "boltz.model.loss"

CLIENTS = {
    "boltz": _client(
        "boltz",
        "triangular_mult",
        {"attentionv2": boltz2_attention, "attention": _boltz1_attention},
        ("diffusion", "diffusionv2"),
        (
            *named(
                unless_host_bound(layer, counted=False),
                "boltz.model.layers.attention:AttentionPairBias",
                "boltz.model.layers.attentionv2:AttentionPairBias",
            ),
            *_uncounted(
                sampling.aligned, f"{_LOSS}.diffusion:weighted_rigid_align", f"{_LOSS}.diffusionv2:weighted_rigid_align"
            ),
            *_uncounted(
                sampling.schedule,
                f"{_MODULES}.diffusion:AtomDiffusion.sample_schedule",
                f"{_MODULES}.diffusionv2:AtomDiffusion.sample_schedule",
            ),
            *_uncounted(sampling.sampled, f"{_MODULES}.diffusionv2:AtomDiffusion.sample"),
        ),
    ),
    "boltzgen": _client("boltzgen", "triangular", {"attention": boltz2_attention}, ("diffusion",)),
}
