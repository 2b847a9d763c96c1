"""Rename the parameters in state dicts of OpenFold-3 and Boltz for `evoattn.nn`. Layers themselves load those of OpenFold."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

_PROJECTIONS = {f"proj_{x}": f"mha.linear_{x}" for x in "qkvgo"}
_MULTIPLICATION = {
    "norm_in": "layer_norm_in",
    "p_in": "linear_a_p linear_b_p",
    "g_in": "linear_a_g linear_b_g",
    "norm_out": "layer_norm_out",
    "p_out": "linear_z",
    "g_out": "linear_g",
}
_TRANSITION = {"norm": "layer_norm", "fc1": "swiglu.linear_a", "fc2": "swiglu.linear_b", "fc3": "linear_out"}

_RELU = {"transition_mlp.layers.0.0": "linear_1", "transition_mlp.linear_out": "linear_2"}
"""The projections of a ReLU transition by OpenFold-3's names. It has one hidden layer."""

_OPTIONAL = {"norm_s": "layer_norm_a", "proj_z.0": "layer_norm_z", "proj_z.1": "linear_z"}
"""Of an attention with pair bias: modules that it may lack."""

_BOLTZ = ({**_OPTIONAL, **_PROJECTIONS}, _MULTIPLICATION, _TRANSITION)
"""For each layer of Boltz the names of `evoattn.nn` by Boltz's. No other layer has all that are not optional.

Of two names each gets half of the rows. Triangle attention has OpenFold's names.
"""


def _rename_boltz(name: str, x: Tensor, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parameters of `evoattn.nn` that one of Boltz becomes, by name."""
    module, _, kind = name.rpartition(".")
    for names in _BOLTZ:
        boltz_name = next((y for y in names if f".{module}".endswith(f".{y}")), None)
        if boltz_name is None or kind not in ("weight", "bias"):
            continue
        prefix, own = module.removesuffix(boltz_name), names[boltz_name].split()
        if all(f"{prefix}{y}.weight" in state for y in names.keys() - _OPTIONAL.keys()):
            parts = (x,) if len(own) == 1 else x.chunk(len(own))
            return {f"{prefix}{y}.{kind}": part for y, part in zip(own, parts, strict=True)}
    return {name: x}


def split_joined(name: str, x: Tensor) -> dict[str, Tensor]:
    """Return the parameters of `evoattn.nn` that one of OpenFold becomes, by name.

    The triangle multiplications of its multimer models of version 3 have one projection for both halves, `linear_ab_p`, and one
    for their gates, `linear_ab_g`. So does OpenFold-3 with `fuse_projection_weights`. The first rows are those of the half a.
    """
    module, _, kind = name.rpartition(".")
    if kind not in ("weight", "bias") or not f".{module}".endswith((".linear_ab_p", ".linear_ab_g")):
        return {name: x}
    start, end = module[: -len("ab_p")], module[-len("_p") :]
    return {f"{start}{half}{end}.{kind}": part for half, part in zip("ab", x.chunk(2), strict=True)}


def from_openfold3(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the parameters in a state dict of OpenFold-3, of one layer or of a whole model, to those of `evoattn.nn`.

    OpenFold-3 calls the pair bias of triangle attention `linear_z`, `evoattn.nn` calls it `linear`. The projections of a ReLU
    transition have other names, and `fuse_projection_weights` joins those of a triangle multiplication. Make
    `TriangleAttention` with `gate_bias=False, out_bias=False`, `TriangleMultiplication` with `bias=False`, and `Transition`
    with its defaults, or with `activation="relu", bias=True`.

    Args:
        state: tensors by OpenFold-3's names, with any prefixes. Names of other layers are kept.

    Returns:
        The same tensors by the names of `evoattn.nn`. Halves of a joined projection are views.

    Example:
        >>> import torch
        >>> state = {"layer_norm.weight": torch.ones(8), "linear_z.weight": torch.ones(4, 8)}
        >>> list(from_openfold3(state))
        ['layer_norm.weight', 'linear.weight']
    """
    return {here: part for name, x in state.items() for here, part in split_joined(_rename_openfold3(name, state), x).items()}


def _rename_openfold3(name: str, state: Mapping[str, Tensor]) -> str:
    prefix, separator, _ = name.rpartition("linear_z.weight")
    if separator and f"{prefix}layer_norm.weight" in state:
        return f"{prefix}linear.weight"
    for module, own in _RELU.items():
        prefix, separator, kind = name.rpartition(f"{module}.")
        if separator and kind in ("weight", "bias"):
            return f"{prefix}{own}.{kind}"
    return name


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
    return {here: part for name, x in state.items() for here, part in _rename_boltz(name, x, state).items()}
