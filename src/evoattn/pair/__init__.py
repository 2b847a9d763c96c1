"""The other operators of the pair block, beside the attention: so far triangle multiplication."""

from evoattn.pair.multiplication import product, triangle_multiplication

__all__ = ["product", "triangle_multiplication"]
