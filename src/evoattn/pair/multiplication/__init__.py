"""Triangle multiplication: `call` checks, `steps` launch, `kernels` compute, and `products` multiply the halves."""

from evoattn.pair.multiplication.call import product, reference, triangle_multiplication

__all__ = ["product", "reference", "triangle_multiplication"]
