"""Rename the parameters in state dicts of OpenFold-3 and Boltz for `evoattn.nn`. OpenFold's names need no change."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor

__all__ = ["from_boltz", "from_openfold3"]

_BOLTZ = {
    "norm_s": "layer_norm_a",
    "proj_z.0": "layer_norm_z",
    "proj_z.1": "linear_z",
    "proj_q": "mha.linear_q",
    "proj_k": "mha.linear_k",
    "proj_v": "mha.linear_v",
    "proj_g": "mha.linear_g",
    "proj_o": "mha.linear_o",
}
"""Names in Boltz's `AttentionPairBias`. Its triangle attention has OpenFold's names."""

_BOLTZ_NAME = re.compile(rf"^((?:.*\.)?)({'|'.join(map(re.escape, _BOLTZ))})(\.(?:weight|bias))$")

_BOLTZ_SIBLINGS = ("proj_q.weight", "proj_k.weight", "proj_v.weight", "proj_g.weight", "proj_o.weight")
"""Parameters that together only attention has. Other layers of Boltz have some of them, such as `proj_g` and `proj_o`."""


def from_openfold3(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the parameters in a state dict of OpenFold-3, of one layer or of a whole model, to those of `evoattn.nn`.

    Only triangle attention differs: OpenFold-3 calls its pair bias `linear_z`, `evoattn.nn` calls it `linear`. Make
    `TriangleAttention` with `gate_bias=False, out_bias=False`.

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

    Make `TriangleAttention` with `gate_bias=False, out_bias=False`, and `AttentionPairBias` with `inf=1e6`. Add `norm=False` if
    Boltz's layer has no `norm_s`.

    Args:
        state: tensors by Boltz's names, with any prefixes. A layer is renamed if the state has all five of its projections.
            Names of other layers are kept.

    Example:
        >>> import torch
        >>> state = {f"attention.proj_{x}.weight": torch.ones(8, 8) for x in "qkvgo"}
        >>> list(from_boltz({**state, "outer_product_mean.proj_o.weight": torch.ones(8, 8)}))[3:]
        ['attention.mha.linear_g.weight', 'attention.mha.linear_o.weight', 'outer_product_mean.proj_o.weight']
    """
    return {_of_pair_bias(name, state): x for name, x in state.items()}


def _of_pair_bias(name: str, state: Mapping[str, Tensor]) -> str:
    found = _BOLTZ_NAME.match(name)
    if found is None or not all(found[1] + sibling in state for sibling in _BOLTZ_SIBLINGS):
        return name
    return found[1] + _BOLTZ[found[2]] + found[3]
