"""The gate in the backward: one pass before the other kernels."""
