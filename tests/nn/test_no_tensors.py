"""Every public function and layer, with a list, an array, a number or None for a tensor: an error that names the argument."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import evoattn
from evoattn import nn as layers
from evoattn.compat.cuequivariance import triangle_attention, triangle_multiplicative_update
from evoattn.compat.deepspeed import DS4Sci_EvoformerAttention
from evoattn.compat.openfold import attention
from evoattn.nn.msa import MSAAttention
from evoattn.pair import transition, triangle_multiplication

Q, PAIR, KEYS = torch.randn(1, 3, 2, 4, 8), torch.randn(1, 1, 2, 4, 4), torch.ones(1, 3, 4)
Z, M, EDGES, W = torch.randn(1, 4, 4, 8), torch.randn(1, 3, 4, 8), torch.ones(1, 4, 4), torch.randn(8, 8)
VECTOR = torch.randn(8)
MULTIPLICATION = {
    "p_in_weight": torch.randn(16, 8), "p_in_bias": torch.randn(16), "g_in_weight": torch.randn(16, 8),
    "g_in_bias": torch.randn(16), "p_out_weight": W, "p_out_bias": VECTOR, "g_out_weight": W, "g_out_bias": VECTOR,
    "norm_in_weight": VECTOR, "norm_in_bias": VECTOR, "norm_out_weight": VECTOR, "norm_out_bias": VECTOR,
}  # fmt: skip
TRANSITION = {
    "norm_weight": VECTOR, "norm_bias": VECTOR, "a_weight": W, "a_bias": VECTOR, "b_weight": W, "b_bias": VECTOR,
    "out_weight": W, "out_bias": VECTOR,
}  # fmt: skip
SAMPLES = torch.randn(1, 3, 4, 8)

Values = dict[str, Any]
"""Arguments by name."""

CALLS: dict[str, tuple[Callable[..., Any], Values]] = {
    "evoformer_attention": (
        lambda **x: evoattn.evoformer_attention(**x, layout="bnhld"),
        {"q": Q, "k": Q, "v": Q, "mask": KEYS.bool(), "mask_bias": KEYS, "pair_bias": PAIR, "gate": Q},
    ),
    "explain": (
        lambda **x: evoattn.explain(**x, layout="bnhld"),
        {"q": Q, "k": Q, "v": Q, "mask": KEYS.bool(), "mask_bias": KEYS, "pair_bias": PAIR, "gate": Q},
    ),
    "compat.openfold": (lambda **x: attention(**x, biases=[PAIR]), {"q": Q, "k": Q, "v": Q}),
    "compat.openfold, biases": (lambda biases: attention(Q, Q, Q, [biases]), {"biases": PAIR}),
    "compat.deepspeed": (lambda **x: DS4Sci_EvoformerAttention(**x, biases=[]), dict.fromkeys("QKV", Q.transpose(2, 3))),
    "compat.deepspeed, biases[0]": (
        lambda x: DS4Sci_EvoformerAttention(*[Q.transpose(2, 3)] * 3, [x, PAIR]),
        {"x": KEYS[:, :, None, None]},
    ),
    "compat.deepspeed, biases[1]": (lambda x: DS4Sci_EvoformerAttention(*[Q.transpose(2, 3)] * 3, [None, x]), {"x": PAIR}),
    "compat.cuequivariance, attention": (
        triangle_attention,
        {"q": Q, "k": Q, "v": Q, "bias": PAIR, "mask": KEYS[:, :, None, None].bool()},
    ),
    "compat.cuequivariance, lengths": (
        lambda kv_lengths: triangle_attention(Q, Q, Q, PAIR, kv_lengths=kv_lengths),
        {"kv_lengths": torch.ones(1, 3, 1, 1, 1, dtype=torch.int32)},
    ),
    "compat.cuequivariance, multiplication": (triangle_multiplicative_update, {"x": Z, "mask": EDGES, **MULTIPLICATION}),
    "pair.triangle_multiplication": (triangle_multiplication, {"z": Z, "mask": EDGES, **MULTIPLICATION}),
    "pair.transition": (transition, {"x": Z, "mask": EDGES, **TRANSITION}),
    "pair.transition, out": (lambda out: transition(Z, **TRANSITION, out=out), {"out": Z.clone()}),
    "pair.triangle_multiplication, out": (
        lambda out: triangle_multiplication(Z, **MULTIPLICATION, out=out),
        {"out": Z.clone()},
    ),
    "TriangleAttention": (layers.TriangleAttention(8, 8, 2), {"z": Z, "mask": EDGES}),
    "TriangleMultiplication": (layers.TriangleMultiplication(8, 8), {"z": Z, "mask": EDGES}),
    "Transition": (layers.Transition(8), {"x": Z, "mask": EDGES}),
    "MSARowAttentionWithPairBias": (layers.MSARowAttentionWithPairBias(8, 8, 8, 2), {"m": M, "z": Z, "mask": KEYS}),
    "MSARowAttentionWithPairBias without": (lambda z: MSAAttention(8, 8, 2)(M, z), {"z": None}),
    "MSAColumnAttention": (layers.MSAColumnAttention(8, 8, 2), {"m": M, "mask": KEYS}),
    "MSAColumnGlobalAttention": (layers.MSAColumnGlobalAttention(8, 8, 2), {"m": M, "mask": KEYS}),
    "TemplatePointwiseAttention": (
        layers.TemplatePointwiseAttention(8, 8, 8, 2),
        {"t": Z[:, None], "z": Z, "mask": torch.ones(1, 1)},
    ),
    "AttentionPairBias": (layers.AttentionPairBias(8, 8, 8, 2), {"a": Z[:, 0], "z": Z, "mask": EDGES[:, 0]}),
    "AttentionPairBias, keys": (
        layers.AttentionPairBias(8, 8, 8, 2),
        {"a": Z[:, 0], "z": Z, "mask": EDGES[:, 0], "keys": Z[:, 0]},
    ),
    "AttentionPairBias, a bias": (
        lambda **x: layers.AttentionPairBias(8, 8, 8, 2)(z=None, **x),
        {"a": Z[:, 0], "pair_bias": PAIR[:, 0]},
    ),
    "AttentionPairBias, a condition": (
        layers.AttentionPairBias(8, 8, 8, 2, 8),
        {"a": SAMPLES, "z": Z[:, None], "s": SAMPLES, "mask": KEYS},
    ),
    "AttentionPairBias.pair_bias": (layers.AttentionPairBias(8, 8, 8, 2).pair_bias, {"z": Z}),
    "PairBlock": (layers.PairBlock(8, 8, 8, 2), {"z": Z, "mask": EDGES}),
    "PairBlock in place": (
        lambda **x: layers.PairBlock(8, 8, 8, 2).requires_grad_(False)(**x, in_place=True),
        {"z": Z.clone(), "mask": EDGES},
    ),
    "PairformerBlock": (
        layers.PairformerBlock(8, 8, 8, 2, 8, 8, 2),
        {"s": Z[:, 0], "z": Z, "mask": EDGES[:, 0], "pair_mask": EDGES},
    ),
    "PairformerBlock in place": (
        lambda **x: layers.PairformerBlock(8, 8, 8, 2, 8, 8, 2).requires_grad_(False)(**x, in_place=True),
        {"s": Z[:, 0].clone(), "z": Z.clone(), "mask": EDGES[:, 0], "pair_mask": EDGES},
    ),
}
"""Each call, and tensors for its arguments. A name that is not that of an argument stands for what the message calls it."""

CASES = [(call, name) for call, (_, values) in CALLS.items() for name in values]


def named(name: str) -> str:
    """What a message calls an argument. x is also one of several biases."""
    return r"\b(x|biases|mask_bias|pair_bias)\b" if name == "x" else rf"\b{name}\b"


@pytest.mark.parametrize("value", [[[1.0]], np.ones((1, 4, 4)), 1.0, "mask"], ids=["list", "array", "number", "text"])
@pytest.mark.parametrize(("call", "name"), CASES)
def test_what_is_no_tensor_raises_type_error(call: str, name: str, value: Any) -> None:
    run, values = CALLS[call]
    with pytest.raises(TypeError, match=named(name)):
        run(**{**values, name: value})


@pytest.mark.parametrize(("call", "name"), CASES)
def test_none_is_taken_or_named(call: str, name: str) -> None:
    run, values = CALLS[call]
    try:
        run(**{**values, name: None})
    except (TypeError, ValueError) as error:
        assert re.search(named(name), str(error))  # noqa: PT017
