"""Triangle multiplication: `call` checks, `steps` launch, `kernels` compute, and `products` multiply the halves."""
