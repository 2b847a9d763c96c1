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


def _sites(package: str, *more: Site) -> tuple[Site, ...]:
    layers, triangles = f"{package}.model.triangular.layers", f"{package}.model.triangular.triangular"
    return (
        Site(layers, "_attention", additive),
        Site(layers, "cuequivariance_triangular_attn", kernel),
        *more,
        Site(f"{package}.model.modules.primitives", "_attention", _single),
        Site(triangles, "kernel_triangular_mult", multiplication, missing="cuequivariance_torch", counted=False),
        Site(layers, "Attention.forward"),
        Site(f"{package}.model.modules.primitives", "_local_attention"),
        Site(f"{package}.model.modules.primitives", "Attention.forward"),
    )


_BLOCK = "model.modules.pairformer:PairformerBlock"


def _steps(package: str, model: str, block: str) -> tuple[Site, ...]:
    """In inference blocks write into their input; recorded ones do not."""
    return (
        Site(f"{package}.model.utils", "aggregate_atom_to_token", aggregation.means_by_token, counted=False),
        Site(f"{package}.model.modules.diffusion", "DiffusionModule.forward", graphs.step),
        Site(f"{package}.model.{package}", f"{model}.sample_diffusion", graphs.loop, counted=False),
        *graphs.blocks(f"{package}.{_BLOCK}", method=block, instead={"inplace_safe": False}),
    )


CLIENTS = {
    "protenix": Client(
        "protenix",
        "protenix",
        _sites(
            "protenix",
            Site("protenix.model.triangular.layers", "_tri_attention", queries_first(scaled=True)),
            Site("protenix.model.triangular.layers", "_deepspeed_evo_attn", queries_first(scaled=False)),
        ),
        layers=known_sites("protenix", least_trained=FEW),
        steps=_steps("protenix", "Protenix", ".forward"),
    ),
    "opendde": Client(
        "opendde",
        "opendde",
        _sites("opendde"),
        layers=(
            *known_sites("opendde", but="PairformerBlock", least_trained=FEW),
            *sites(f"opendde.{_BLOCK}", method=".forward_source", least_trained=FEW),
        ),
        steps=_steps("opendde", "OpenDDE", ".forward_source"),
    ),
}
