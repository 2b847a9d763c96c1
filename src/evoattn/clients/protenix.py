"""Protenix and OpenDDE: triangle attention by a name given at each call, and SDPA for the single track, samples and atoms."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from evoattn.clients import aggregation, graphs
from evoattn.clients.calls import HOST_BOUND, additive, host_sets_pace, kernel, multiplication, queries_first
from evoattn.clients.layers import FEW, known_sites, sites
from evoattn.clients.site import Client, Count, Site
from evoattn.compat.openfold import attention


def _single(original: Any, count: Count) -> Any:
    def _attention(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_bias: Tensor | None = None,
        use_efficient_implementation: bool = True,
        inplace_safe: bool = False,
    ) -> Tensor:
        """`[..., H, L, D]`, or windows `[..., H, blocks, L, D]`, whose blocks take the place of heads."""
        if q.ndim < 3:
            count.count_passed_on("an attention without heads")
            return original(q, k, v, attn_bias, use_efficient_implementation, inplace_safe)  # type: ignore[no-any-return]
        if attn_bias is not None and host_sets_pace(q, q.shape[-2], k.shape[-2], q.shape[:-1].numel() * k.shape[-2]):
            count.count_passed_on(HOST_BOUND)
            return original(q, k, v, attn_bias, use_efficient_implementation, inplace_safe)  # type: ignore[no-any-return]
        count.count_replaced()
        return attention(q, k.to(q.dtype), v.to(q.dtype), [attn_bias])

    return _attention


def _client(package: str, model: str, method: str, *more: Site) -> Client:
    """Protenix or OpenDDE. `model` is the class of the whole model, `method` is what its pairformer calls of a block."""
    layers, primitives = f"{package}.model.triangular.layers", f"{package}.model.modules.primitives"
    triangles, block = f"{package}.model.triangular.triangular", f"{package}.model.modules.pairformer:PairformerBlock"
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
            *known_sites(package, but="PairformerBlock", least_trained=FEW),
            *sites(block, method=method, least_trained=FEW),
        ),
        steps=(
            Site(f"{package}.model.utils", "aggregate_atom_to_token", aggregation.means_by_token, counted=False),
            Site(f"{package}.model.modules.diffusion", "DiffusionModule.forward", graphs.step),
            Site(f"{package}.model.{package}", f"{model}.sample_diffusion", graphs.loop, counted=False),
            # In inference blocks write into their input; recorded ones do not.
            *graphs.blocks(block, method=method, instead={"inplace_safe": False}),
        ),
    )


CLIENTS = {
    "protenix": _client(
        "protenix",
        "Protenix",
        ".forward",
        Site("protenix.model.triangular.layers", "_tri_attention", queries_first(scaled=True)),
        Site("protenix.model.triangular.layers", "_deepspeed_evo_attn", queries_first(scaled=False)),
    ),
    "opendde": _client("opendde", "OpenDDE", ".forward_source"),
}
