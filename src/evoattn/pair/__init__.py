"""The other operators of the pair block, beside the attention: triangle multiplication and the transition."""

from evoattn.dispatch.distributed import Split
from evoattn.pair.multiplication.call import product, triangle_multiplication
from evoattn.pair.transitions.call import transition

__all__ = ["Split", "product", "transition", "triangle_multiplication"]
