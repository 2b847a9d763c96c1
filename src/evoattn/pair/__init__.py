"""The operators beside the attention: triangle multiplication, the transition, and float32 products on tensor cores."""

from evoattn.dispatch.distributed import Split
from evoattn.pair.multiplication.call import product, triangle_multiplication
from evoattn.pair.products.call import linear
from evoattn.pair.transitions.call import transition

__all__ = ["Split", "linear", "product", "transition", "triangle_multiplication"]
