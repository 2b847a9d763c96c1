"""Rename the parameters in state dicts of OpenFold-3 and Boltz for `evoattn.nn`. OpenFold's names need no change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

__all__ = ["from_boltz", "from_openfold3"]


class _Layer(NamedTuple):
    """Parameters of a layer of Boltz.

    Args:
        names: by the name of a module in Boltz, its names in `evoattn.nn`. If there are two, each has half of the rows.
        siblings: modules with a weight that together only this layer has.
    """

    names: dict[str, tuple[str, ...]]
    siblings: tuple[str, ...]

    def rename(self, name: str, x: Tensor, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The parameters of `evoattn.nn` that one of Boltz becomes, by name. Empty if it is not of such a layer."""
        module, _, kind = name.rpartition(".")
        there = next((y for y in self.names if f".{module}".endswith(f".{y}")), None)
        if there is None or kind not in ("weight", "bias"):
            return {}
        prefix = module.removesuffix(there)
        if not all(f"{prefix}{y}.weight" in state for y in self.siblings):
            return {}
        here = self.names[there]
        parts = (x,) if len(here) == 1 else x.chunk(len(here))
        return {f"{prefix}{y}.{kind}": part for y, part in zip(here, parts, strict=True)}


_PAIR_BIAS = _Layer(
    {
        "norm_s": ("layer_norm_a",),
        "proj_z.0": ("layer_norm_z",),
        "proj_z.1": ("linear_z",),
        "proj_q": ("mha.linear_q",),
        "proj_k": ("mha.linear_k",),
        "proj_v": ("mha.linear_v",),
        "proj_g": ("mha.linear_g",),
        "proj_o": ("mha.linear_o",),
    },
    siblings=("proj_q", "proj_k", "proj_v", "proj_g", "proj_o"),
)
"""`AttentionPairBias`. Other layers have some of its parameters, such as `proj_g` and `proj_o`."""

_MULTIPLICATION = _Layer(
    {
        "norm_in": ("layer_norm_in",),
        "p_in": ("linear_a_p", "linear_b_p"),
        "g_in": ("linear_a_g", "linear_b_g"),
        "norm_out": ("layer_norm_out",),
        "p_out": ("linear_z",),
        "g_out": ("linear_g",),
    },
    siblings=("norm_in", "p_in", "g_in", "norm_out", "p_out", "g_out"),
)
"""Triangle multiplication. Triangle attention has OpenFold's names."""

_TRANSITION = _Layer(
    {
        "norm": ("layer_norm",),
        "fc1": ("swiglu.linear_a",),
        "fc2": ("swiglu.linear_b",),
        "fc3": ("linear_out",),
    },
    siblings=("norm", "fc1", "fc2", "fc3"),
)
"""`Transition`."""


def from_openfold3(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the parameters in a state dict of OpenFold-3, of one layer or of a whole model, to those of `evoattn.nn`.

    Only triangle attention differs: OpenFold-3 calls its pair bias `linear_z`, `evoattn.nn` calls it `linear`. Make
    `TriangleAttention` with `gate_bias=False, out_bias=False`, and `TriangleMultiplication` with `bias=False`. `Transition` has
    its names by default.

    Args:
        state: tensors by OpenFold-3's names, with any prefixes. Names of other layers are kept.

    Example:
        >>> import torch
        >>> state = {"layer_norm.weight": torch.ones(8), "linear_z.weight": torch.ones(4, 8)}
        >>> list(from_openfold3(state))
        ['layer_norm.weight', 'linear.weight']
    """
    return {_of_triangle(name, state): x for name, x in state.items()}


def _of_triangle(name: str, state: Mapping[str, Tensor]) -> str:
    prefix, found, _ = name.rpartition("linear_z.weight")
    return f"{prefix}linear.weight" if found and f"{prefix}layer_norm.weight" in state else name


def from_boltz(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the parameters in a state dict of Boltz, of one layer or of a whole model, to those of `evoattn.nn`.

    Make `TriangleAttention` with `gate_bias=False, out_bias=False`, `TriangleMultiplication` with `bias=False`, and
    `AttentionPairBias` with `inf=1e6`. Add `norm=False` if Boltz's layer has no `norm_s`.

    Args:
        state: tensors by Boltz's names, with any prefixes. An attention is renamed if the state has all five of its
            projections, a triangle multiplication if it has all six weights, a transition if it has all four. Names of other
            layers are kept.

    Returns:
        Tensors by the names of `evoattn.nn`. Some are views: Boltz has one projection for both halves of a multiplication.

    Example:
        >>> import torch
        >>> state = {f"attention.proj_{x}.weight": torch.ones(8, 8) for x in "qkvgo"}
        >>> list(from_boltz({**state, "outer_product_mean.proj_o.weight": torch.ones(8, 8)}))[3:]
        ['attention.mha.linear_g.weight', 'attention.mha.linear_o.weight', 'outer_product_mean.proj_o.weight']
    """
    made: dict[str, Tensor] = {}
    for name, x in state.items():
        found = (layer.rename(name, x, state) for layer in (_PAIR_BIAS, _MULTIPLICATION, _TRANSITION))
        made |= next((renamed for renamed in found if renamed), {name: x})
    return made
