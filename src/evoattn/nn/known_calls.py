"""Call layers of `evoattn.nn` with the arguments of a client. `known` lists the layers.

Masks may lack leading axes along which they do not vary, and so may the pair representation of an attention with pair bias.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from evoattn.dispatch.axes import with_axes

_FEW = 16
"""Keys up to which Protenix' triangle attention takes no kernel."""

_IGNORED = (
    "chunk_size",
    "ckpt_chunk_size",
    "_inplace_chunk_size",
    "inplace_safe",
    "flash_mask",
    "triangle_attention",
    "triangle_multiplicative",
)
"""Arguments that change no answer, beside those of which only the beginning is known."""


Layer = Callable[..., Tensor]
"""A layer of `evoattn.nn`."""


class UnknownArgument(TypeError):  # noqa: N818
    """A client's layer was called with an argument that `evoattn.nn` does not know. Nothing was computed."""


class ClientsOwn(UnknownArgument):
    """A client's layer was called in a way in which it has an answer of its own, which is kept."""


def ignore(switches: dict[str, Any]) -> None:
    """Raise UnknownArgument unless every argument is a kernel switch, a chunk size, or permits overwriting an input."""
    for name in switches:
        if not name.startswith(("use_", "_chunk", "_checkpoint")) and name not in _IGNORED:
            raise UnknownArgument(f"evoattn.nn.replace does not know the argument {name!r} of this layer")


def forwards(*inputs: str) -> Callable[..., Tensor]:
    """A call of the layer with the tensors that the client names `inputs`, in the order of the layer, and with its `mask`."""
    return functools.partial(_forward, inputs)  # which can be pickled


def _forward(inputs: tuple[str, ...], layer: Layer, **arguments: Any) -> Tensor:
    tensors = [arguments.pop(name, None) for name in inputs]
    mask = arguments.pop("mask", None)
    ignore(arguments)
    return layer(*tensors) if mask is None else layer(*tensors, mask=with_axes(mask, tensors[0].ndim - 1))


def triangle(layer: Layer, x: Tensor, mask: Tensor | None = None, *, transpose_bias: bool = False, **switches: Any) -> Tensor:
    """Call the layer with OpenFold's arguments, and with an option of `evoattn.nn`."""
    ignore(switches)
    return layer(x, None if mask is None else with_axes(mask, x.ndim - 1), transpose_bias=transpose_bias)


def protenix_triangle(layer: Layer, x: Tensor, mask: Tensor | None = None, **switches: Any) -> Tensor:
    check_scaled(x, switches.get("triangle_attention", "torch"))
    return triangle(layer, x, mask, **switches)


def templates(layer: Layer, t: Tensor, z: Tensor, template_mask: Tensor | None = None, **switches: Any) -> Tensor:
    ignore(switches)
    return layer(t, z, template_mask)


def pair_bias(layer: Layer, a: Tensor, z: Tensor, **arguments: Any) -> Tensor:
    """Call the layer with OpenFold-3's arguments, of the trunk or of the diffusion transformer."""
    return forwards("a", "z", "s")(layer, a=a, z=with_axes(z, a.ndim + 1), **arguments)


def check_scaled(x: Tensor, triangle_attention: str) -> None:
    """Raise ClientsOwn if Protenix' triangle attention of x does not scale q: it takes no kernel for so few residues."""
    if triangle_attention in ("cuequivariance", "deepspeed") and x.shape[-2] <= _FEW:
        raise ClientsOwn(f"{_FEW} residues or fewer with {triangle_attention}, for which the client does not scale q")


def protenix_pair_bias(
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


def boltz_pair_bias(
    layer: Any,
    s: Tensor,
    z: Tensor,
    mask: Tensor,
    *,
    k_in: Tensor | None = None,
    multiplicity: int = 1,
    to_keys: Callable[[Tensor], Tensor] | None = None,
    model_cache: dict[str, Any] | None = None,
) -> Tensor:
    """Call the layer with Boltz's arguments. The first axis of s and mask holds structures times samples.

    `to_keys` picks the keys of each window.
    """
    if to_keys is not None:
        k_in, mask = to_keys(s), to_keys(mask.unsqueeze(-1)).squeeze(-1)
    pair_bias = None if model_cache is None else model_cache.get("z")
    if pair_bias is None:
        pair_bias = layer.pair_bias(z)
        if model_cache is not None:
            model_cache["z"] = pair_bias
    samples = (-1, multiplicity)
    keys = None if k_in is None or k_in is s else k_in.unflatten(0, samples)
    mask, bias = mask.unflatten(0, samples), pair_bias.unsqueeze(1)
    return layer(s.unflatten(0, samples), None, mask=mask, keys=keys, pair_bias=bias).flatten(0, 1)  # type: ignore[no-any-return]


def multiplication(
    layer: Layer, z: Tensor, *, inplace_safe: bool = False, _add_with_inplace: bool = False, **arguments: Any
) -> Tensor:
    """Call the layer with OpenFold's arguments. If z may be overwritten, the update may have to be added to it, in place.

    Template stacks keep z and drop what the layer returns. OpenFold-3 adds nothing if it calls cuEquivariance.
    """
    update = forwards("z")(layer, z=z, **arguments)
    adds = inplace_safe and _add_with_inplace and not arguments.get("use_cueq_triangle_kernels")
    return z.add_(update) if adds else update


def rf3_triangle(layer: Any, pair: Tensor) -> Tensor:
    """Call the layer with RosettaFold-3's argument. Its pair bias is that of the pair that was not transposed."""
    return layer(pair, transpose_bias=not layer.starting)  # type: ignore[no-any-return]


def rf3_multiplication(layer: Any, pair: Tensor) -> Tensor:
    """Call the layer with RosettaFold-3's argument. Without cuEquivariance it divides the product by the number of residues."""
    mask = None
    if not (layer.by_cuequivariance and sys.modules["rf3.model.layers.attention"].SHOULD_USE_CUEQUIVARIANCE):
        dtype = torch.promote_types(pair.dtype, torch.float32)
        mask = pair.new_full((1,) * (pair.ndim - 1), pair.shape[-2] ** -0.5, dtype=dtype)  # a factor of both halves
    return layer(pair, mask)  # type: ignore[no-any-return]


def residue_mlp(layer: Any, x: Tensor, **switches: Any) -> Tensor:
    """Call the layer with ESMFold's arguments. It adds its update."""
    ignore(switches)
    return layer.add_to(x, None, in_place=False)  # type: ignore[no-any-return]
