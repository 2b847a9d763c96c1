"""BoltzGen: its pairformers, miniformer, MSA layer, diffusion and atom transformers. Called as Boltz' are."""

from __future__ import annotations

import functools

from boltzgen.model.layers.miniformer import MiniformerModule
from boltzgen.model.layers.pairformer import PairformerModule, PairformerNoSeqModule
from boltzgen.model.modules.encoders import get_indexing_matrix, single_to_keys
from boltzgen.model.modules.transformers import AtomTransformer, DiffusionTransformer
from boltzgen.model.modules.trunk import MSALayer

from clients.blocks import Block
from clients.boltz_calls import CHUNKED, HEADS, KERNELS, atoms, diffusion, msa, pairformer, template

__all__ = ["BLOCKS"]

_WINDOWS = (get_indexing_matrix, single_to_keys)

BLOCKS = (
    Block("pairformer", functools.partial(pairformer, PairformerModule, pairwise_head_width=16), CHUNKED, KERNELS),
    Block("miniformer", functools.partial(pairformer, MiniformerModule)),
    Block("template pairformer", functools.partial(template, PairformerNoSeqModule), CHUNKED, KERNELS),
    Block("MSA layer", functools.partial(msa, MSALayer, miniformer_blocks=False), CHUNKED, KERNELS),
    Block("diffusion transformer", functools.partial(diffusion, DiffusionTransformer)),
    Block("diffusion, q and k normed", functools.partial(diffusion, DiffusionTransformer, use_qk_norm=True)),
    Block("atom transformer", functools.partial(atoms, AtomTransformer, 2 * HEADS, _WINDOWS)),
)
