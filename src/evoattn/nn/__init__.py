"""Layers of the Evoformer and the pair block, from the norm to the output product.

They load the weights of OpenFold, and those of OpenFold-3 and Boltz after `from_openfold3` and `from_boltz`. What is known of
clients' models is in `evoattn.clients`, and is imported when one of its names is asked for.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

from evoattn.core.keeping import sampling
from evoattn.nn.diffusion import ConditionedTransition, DiffusionTransformer, DiffusionTransformerBlock
from evoattn.nn.msa import MSAColumnAttention, MSAColumnGlobalAttention, MSARowAttentionWithPairBias
from evoattn.nn.msa_module import MSAPairWeightedAveraging, OuterProductMean
from evoattn.nn.multiplication import TriangleMultiplication
from evoattn.nn.pair_bias import AdaLN, AttentionPairBias
from evoattn.nn.pair_block import PairBlock, PairformerBlock
from evoattn.nn.template import TemplatePointwiseAttention
from evoattn.nn.transition import Transition
from evoattn.nn.triangle import TriangleAttention

if TYPE_CHECKING:
    from evoattn.clients.boltz import from_boltz
    from evoattn.clients.distribute import distribute
    from evoattn.clients.openfold3 import from_openfold3
    from evoattn.clients.replace import replace

__all__ = [
    "AdaLN",
    "AttentionPairBias",
    "ConditionedTransition",
    "DiffusionTransformer",
    "DiffusionTransformerBlock",
    "MSAColumnAttention",
    "MSAColumnGlobalAttention",
    "MSAPairWeightedAveraging",
    "MSARowAttentionWithPairBias",
    "OuterProductMean",
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
    "sampling",
]

_OF_CLIENTS = {"distribute": "distribute", "from_boltz": "boltz", "from_openfold3": "openfold3", "replace": "replace"}
"""Names of `evoattn.clients`, and the file of each."""


def __getattr__(name: str) -> Any:
    if name not in _OF_CLIENTS:
        return object.__getattribute__(sys.modules[__name__], name)  # raises AttributeError as a module does
    return getattr(importlib.import_module(f"evoattn.clients.{_OF_CLIENTS[name]}"), name)
