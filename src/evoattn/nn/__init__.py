"""Layers of the Evoformer and the pair block, from the norm to the output product.

They load the weights of OpenFold, and those of OpenFold-3 and Boltz after `from_openfold3` and `from_boltz`.
"""

from evoattn.nn.distribute import distribute
from evoattn.nn.msa import MSAColumnAttention, MSAColumnGlobalAttention, MSARowAttentionWithPairBias
from evoattn.nn.multiplication import TriangleMultiplication
from evoattn.nn.names import from_boltz, from_openfold3
from evoattn.nn.pair_bias import AttentionPairBias
from evoattn.nn.pair_block import PairBlock, PairformerBlock
from evoattn.nn.replace import replace
from evoattn.nn.template import TemplatePointwiseAttention
from evoattn.nn.transition import Transition
from evoattn.nn.triangle import TriangleAttention

__all__ = [
    "AttentionPairBias",
    "MSAColumnAttention",
    "MSAColumnGlobalAttention",
    "MSARowAttentionWithPairBias",
    "PairBlock",
    "PairformerBlock",
    "TemplatePointwiseAttention",
    "Transition",
    "TriangleAttention",
    "TriangleMultiplication",
    "distribute",
    "from_boltz",
    "from_openfold3",
    "replace",
]
