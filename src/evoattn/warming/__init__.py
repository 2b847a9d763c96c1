"""Compiling what a model family needs before its first call: which calls it makes, which kernels these launch, and where."""
