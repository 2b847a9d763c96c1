"""Compiling kernels: one pool of worker processes, and one folder of compiled code."""
