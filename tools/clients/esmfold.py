"""ESMFold in transformers: a block of the trunk."""

from __future__ import annotations

from typing import Any

from transformers import EsmConfig
from transformers.models.esm.modeling_esmfold import EsmFoldTriangularSelfAttentionBlock

from clients.blocks import Block, Call, Problem, pairs

__all__ = ["BLOCKS", "published_config"]

SEQUENCE, PAIR = 32, 16


def published_config() -> Any:
    """The configuration of the published model. `esmfold_config.trunk` is that of its trunk."""
    letters = ["<cls>", "<pad>", "<eos>", "<unk>", *"LAGVSERTIDPKQNFYMHWCXBUZO", ".", "-", "<null_1>", "<mask>"]
    return EsmConfig(
        vocab_size=33,
        mask_token_id=32,
        pad_token_id=1,
        hidden_size=2560,
        num_hidden_layers=36,
        num_attention_heads=40,
        intermediate_size=10240,
        max_position_embeddings=1026,
        position_embedding_type="rotary",
        token_dropout=True,
        emb_layer_norm_before=False,
        is_folding_model=True,
        vocab_list=letters,
        esmfold_config={"fp16_esm": True, "trunk": {"num_blocks": 48}},
    )


def _trunk(problem: Problem) -> Call:
    config = published_config().esmfold_config.trunk
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
