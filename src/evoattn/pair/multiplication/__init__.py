"""Triangle multiplication: `call` checks and chooses, `autograd` orders the steps, `steps` launch, `kernels` compute."""

from evoattn.pair.multiplication.call import product, reference, triangle_multiplication

__all__ = ["product", "reference", "triangle_multiplication"]
