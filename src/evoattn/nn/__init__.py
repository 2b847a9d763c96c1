"""Whole layers around the attention, norm to output, that load the weights of OpenFold's family unchanged."""

from evoattn.nn.msa import MSAColumnAttention, MSAColumnGlobalAttention, MSARowAttentionWithPairBias
from evoattn.nn.names import from_boltz, from_openfold3
from evoattn.nn.pair_bias import AttentionPairBias
from evoattn.nn.replace import replace
from evoattn.nn.template import TemplatePointwiseAttention
from evoattn.nn.triangle import TriangleAttention

__all__ = [
    "AttentionPairBias",
    "MSAColumnAttention",
    "MSAColumnGlobalAttention",
    "MSARowAttentionWithPairBias",
    "TemplatePointwiseAttention",
    "TriangleAttention",
    "from_boltz",
    "from_openfold3",
    "replace",
]
