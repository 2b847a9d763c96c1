"""ESMFold in transformers: a block of the trunk."""

from __future__ import annotations

from typing import Any

from transformers import EsmConfig
from transformers.models.esm.modeling_esmfold import EsmFoldTriangularSelfAttentionBlock

from clients.blocks import Block, Call, Problem, pairs

__all__ = ["BLOCKS", "trunk_config"]

SEQUENCE, PAIR = 32, 16


def trunk_config() -> Any:
    """Of the published trunk."""
    return EsmConfig(vocab_size=33, is_folding_model=True, esmfold_config={}, vocab_list=["<cls>"] * 33).esmfold_config.trunk


def _trunk(problem: Problem) -> Call:
    config = trunk_config()
    config.sequence_state_dim, config.pairwise_state_dim = SEQUENCE, PAIR
    config.sequence_head_width, config.pairwise_head_width, config.dropout = 8, 8, 0.0
    module, mask, n = problem.fill(EsmFoldTriangularSelfAttentionBlock(config)), problem.mask(), problem.residues
    return Call(
        module,
        lambda s, z, **options: module(s, z, mask=mask, **options),
        {"s": problem.normal(2, n, SEQUENCE), "z": problem.normal(2, n, n, PAIR)},
        {"s": mask, "z": pairs(mask)},
        ("s", "z"),
    )


BLOCKS = (Block("trunk", _trunk, ways=({}, {"chunk_size": 8})),)
