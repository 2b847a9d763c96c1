"""The operators beside the attention: those of a pair block and of an alignment, and float32 products on tensor cores."""

from evoattn.dispatch.distributed import Split
from evoattn.pair.averaging import pair_weighted_averaging
from evoattn.pair.multiplication.call import product, triangle_multiplication
from evoattn.pair.outer_product import outer_product_mean
from evoattn.pair.products.call import linear
from evoattn.pair.transitions.call import transition

__all__ = [
    "Split",
    "linear",
    "outer_product_mean",
    "pair_weighted_averaging",
    "product",
    "transition",
    "triangle_multiplication",
]
