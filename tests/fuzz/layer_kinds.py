"""The layers of `evoattn.nn` and the operators of `evoattn.pair` that are drawn: how each is made, and its dense torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from evoattn import nn as modules
from tests.fuzz import random_operators as operators
from tests.helpers import dense_layers as dense


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """A layer that is drawn: how it is made, what it takes, and the same in dense torch.

    Sizes have letters: l residues, n sequences, templates or samples, k keys, c channels of the input that is updated, p and s
    channels of the second and the third, d channels of a head, h heads. * stands for the batch axes.

    Args:
        layer: its class.
        sizes: its positional arguments, as letters.
        inputs: axes of the tensors that it takes, by name; first the one that it updates.
        mask: axes of its mask.
        dense: the layer, its inputs by name, `mask` and `weights` -> the output (`dense_layers`).
        options: keyword arguments of the class, each with the values that are drawn.
        called: the same of the call.
        takes_dtensors: whether its inputs, mask and parameters may be DTensors.
        overwrites: the argument by which the result is written over the first input, or "".
        mask_is_factor: whether a float mask is a factor, which has a gradient.
        output: axes of the result. "": those of the first input.
    """

    layer: Callable[..., nn.Module]
    sizes: str
    inputs: dict[str, str]
    mask: str
    dense: Callable[..., Tensor]
    options: dict[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    called: dict[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    takes_dtensors: bool = False
    overwrites: str = ""
    mask_is_factor: bool = False
    output: str = ""


_BOTH = (False, True)
_USUAL = {"residual": _BOTH, "out_bias": _BOTH, "empty_rows": ("mean", "native"), "inf": (1e9, 1e9, 1e9, 1e6)}
_GATED = {**_USUAL, "gate_bias": _BOTH}
_SINGLE = {**_GATED, "q_bias": _BOTH}

LAYERS: dict[str, LayerKind] = {
    "triangle": LayerKind(
        modules.TriangleAttention,
        "cdh",
        {"z": "*llc"},
        "*ll",
        dense.triangle,
        {"starting": _BOTH, "dropout": (0.0, 0.25), **_GATED},
        {"transpose_bias": _BOTH},
        takes_dtensors=True,
        overwrites="in_place",
    ),
    "multiplication": LayerKind(
        modules.TriangleMultiplication,
        "cd",
        {"z": "*llc"},
        "*ll",
        dense.multiplication,
        {"outgoing": _BOTH, "dropout": (0.0, 0.25), "residual": _BOTH, "bias": _BOTH},
        takes_dtensors=True,
        overwrites="in_place",
        mask_is_factor=True,
    ),
    "transition": LayerKind(
        modules.Transition,
        "c",
        {"x": "*nlc"},
        "*nl",
        dense.transition,
        {"n": (1, 2, 4), "activation": ("swiglu", "relu"), "residual": _BOTH, "bias": _BOTH},
        takes_dtensors=True,
        overwrites="in_place",
        mask_is_factor=True,
    ),
    "rows": LayerKind(
        modules.MSARowAttentionWithPairBias,
        "cpdh",
        {"m": "*nlc", "z": "*llp"},
        "*nl",
        dense.rows,
        {"dropout": (0.0, 0.25), **_GATED},
    ),
    "columns": LayerKind(modules.MSAColumnAttention, "cdh", {"m": "*nlc"}, "*nl", dense.columns, _GATED),
    "global columns": LayerKind(modules.MSAColumnGlobalAttention, "cdh", {"m": "*nlc"}, "*nl", dense.global_columns, _GATED),
    "outer product mean": LayerKind(
        modules.OuterProductMean,
        "cpd",
        {"m": "*nlc"},
        "*nl",
        dense.outer_product,
        {"at_least_one": _BOTH},
        mask_is_factor=True,
        output="*llp",
    ),
    "averaging": LayerKind(
        modules.MSAPairWeightedAveraging,
        "cpdh",
        {"m": "*nlc", "z": "*llp"},
        "*ll",
        dense.averaging,
        {"residual": _BOTH, "inf": (1e9,)},
    ),
    "templates": LayerKind(
        modules.TemplatePointwiseAttention, "pcdh", {"z": "*llc", "t": "*nllp"}, "*n", dense.templates, _USUAL
    ),
    "single": LayerKind(
        modules.AttentionPairBias,
        "cpdh",
        {"a": "*lc", "z": "*llp"},
        "*l",
        dense.pair_biased,
        {"norm": _BOTH, **_SINGLE},
        takes_dtensors=True,
    ),
    "cross": LayerKind(
        modules.AttentionPairBias, "cpdh", {"a": "*lc", "z": "*lkp", "keys": "*kc"}, "*k", dense.pair_biased, _SINGLE
    ),
    "diffusion": LayerKind(
        modules.AttentionPairBias,
        "cpdhs",
        {"a": "*nlc", "z": "*1llp", "s": "*nls"},
        "*nl",
        dense.pair_biased,
        _SINGLE,
        takes_dtensors=True,
    ),
}
"""A new layer is one entry here, and its function in `dense_layers`."""

_CALLED = {"residual": _BOTH, "bias": _BOTH, "norm": ("weight bias", "weight bias", "weight", ""), "eps": (1e-5, 1e-5, 1e-3)}

OPERATORS: dict[str, LayerKind] = {
    "pair.triangle_multiplication": LayerKind(
        operators.triangle_multiplication,
        "cd",
        {"z": "*llc"},
        "*ll",
        operators.dense_multiplication,
        {"direction": ("outgoing", "incoming"), **_CALLED},
        overwrites="out",
        mask_is_factor=True,
    ),
    "pair.transition": LayerKind(
        operators.transition,
        "cd",
        {"x": "*nlc"},
        "*nl",
        operators.dense_transition,
        {"activation": ("swiglu", "relu"), **_CALLED},
        overwrites="out",
        mask_is_factor=True,
    ),
}
"""The operators of `evoattn.pair`, each a layer whose parameters are the call's weights."""

KINDS = LAYERS | OPERATORS
