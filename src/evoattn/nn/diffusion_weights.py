"""The weights of a diffusion transformer, split for products on tensor cores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Block(NamedTuple):
    """The split weights of one block. All are `Halves`."""

    qkvg: Any
    qkvg_bias: Tensor | None
    out: Any
    out_bias: Tensor | None
    hidden: Any
    last: Any
    keys: tuple[Any, Tensor, Any] | None
    """The scale, its bias and the shift of the norm of the keys. None: they have none of their own."""


class Conditions(NamedTuple):
    """The split weights `[2 blocks c_a, c_s]` of the condition, attention and transition in turn, and their biases."""

    scales: Any
    scale_bias: Tensor
    shifts: Any
    gates: Any
    gate_bias: Tensor


def split(blocks: Sequence[Any], low: bool) -> tuple[list[Block], Conditions]:
    """The split weights of all blocks."""
    from evoattn.pair.products import steps

    made = []
    for block in blocks:
        mha, transition = block.attention_pair_bias.mha, block.conditioned_transition
        made.append(
            Block(
                steps.split_weights([x.weight for x in mha.inputs], low=low),
                _joined_bias(mha.inputs),
                steps.split_weights([mha.linear_o.weight], low=low),
                mha.linear_o.bias,
                steps.split_weights(transition.hidden_weights(), low=low),
                steps.split_weights([transition.linear_out.weight], low=low),
                _split_norm(block.attention_pair_bias.layer_norm_k, low),
            )
        )
    norms = [x for block in blocks for x in (block.attention_pair_bias.layer_norm_a, block.conditioned_transition.layer_norm)]
    gates = [x for block in blocks for x in (block.attention_pair_bias.linear_ada_out, block.conditioned_transition.linear_g)]
    factors = [x.layer_norm_s.weight for x in norms]
    conditions = Conditions(
        steps.split_weights([x.linear_g.weight for x in norms], factors=factors, low=low),
        torch.cat([_bias(x.linear_g) for x in norms]),
        steps.split_weights([x.linear_s.weight for x in norms], factors=factors, low=low),
        steps.split_weights([x.weight for x in gates], low=low),
        torch.cat([_bias(x) for x in gates]),
    )
    return made, conditions


def _split_norm(norm: Any, low: bool) -> tuple[Any, Tensor, Any] | None:
    """The split scale, its bias and the split shift of an adaptive norm, or None if there is none."""
    from evoattn.pair.products import steps

    if norm is None:
        return None
    scale, shift = (
        steps.split_weights([x.weight], factors=[norm.layer_norm_s.weight], low=low) for x in (norm.linear_g, norm.linear_s)
    )
    return scale, _bias(norm.linear_g), shift


def _joined_bias(linears: Sequence[nn.Linear]) -> Tensor | None:
    if all(x.bias is None for x in linears):
        return None
    return torch.cat([_bias(x) for x in linears])


def _bias(linear: nn.Linear) -> Tensor:
    return linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias
