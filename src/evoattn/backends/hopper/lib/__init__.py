"""Pieces that the kernels share."""
