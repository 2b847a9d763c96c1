"""Diffusion transformers with random weights, for tests of their kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from evoattn.nn import DiffusionTransformer
from evoattn.nn.diffusion import ThreefoldConditionedTransition
from evoattn.nn.pair_bias import AdaLN
from tests.nn.dense import fill_far_from_zero

__all__ = ["norms_as_rf3", "transformer"]


def norms_as_rf3(made: Any) -> Any:
    """Give a transformer the norms of RosettaFold-3."""
    made.layer_norm_z = None
    for block in made.blocks:
        attention, width = block.attention_pair_bias, block.attention_pair_bias.mha.linear_q.out_features
        attention.layer_norm_z = nn.LayerNorm(made.c_z)
        attention.mha.layer_norm_q, attention.mha.layer_norm_k = nn.LayerNorm(width), nn.LayerNorm(width)
    return made


def transformer(
    c_a: int,
    c_s: int,
    c_z: int,
    no_heads: int,
    no_blocks: int,
    *,
    threefold: bool,
    keys: str = "",
    rf3: bool = False,
    seed: int = 1,
) -> Any:
    """A frozen transformer, whose transitions have three factors if asked for.

    keys: "apart": keys have a norm of their own; "twice": it takes what the other norm returns.
    rf3: as RosettaFold-3's, with parallel blocks, norms of q and k, and norms of z in each block.
    """
    made = DiffusionTransformer(c_a, c_s, c_z, c_a // no_heads, no_heads, no_blocks, parallel=rf3)
    if rf3:
        norms_as_rf3(made)
    for block in made.blocks if threefold else ():
        block.conditioned_transition = ThreefoldConditionedTransition(c_a, c_s, residual=True)
    for block in made.blocks if keys else ():
        block.attention_pair_bias.layer_norm_k = AdaLN(c_a, c_s)
        block.attention_pair_bias.norms_keys_twice = keys == "twice"
    fill_far_from_zero(made, torch.float32, seed)
    return made.requires_grad_(False)
