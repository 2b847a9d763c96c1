"""Pieces that the kernels of both passes share, and the kernels that lay out biases before them."""
