"""What the installed Triton can do. Triton 3.3, which goes with torch 2.7, has none of it, and kernels run without.

These are looked up by name, not by version: builds of Triton count in different ways.
"""

from __future__ import annotations

import importlib.util

import triton
import triton.language as tl

__all__ = ["COMPILES_AHEAD", "OVERLAPS", "REPEATS", "TENSOR_MAPS"]

COMPILES_AHEAD = hasattr(triton, "AsyncCompileMode")
"""Kernels can be compiled on other threads before they are launched."""

OVERLAPS = hasattr(getattr(tl.extra, "cuda", None), "gdc_wait")
"""A launch can start while the one before it still runs (programmatic dependent launch)."""

REPEATS = hasattr(triton, "knobs")
"""What a launch compiled can be launched again without the JIT's look-up, as `launch` does it."""

TENSOR_MAPS = importlib.util.find_spec("triton.tools.tensor_descriptor") is not None
"""A kernel can take a tensor by a descriptor that the host makes."""
