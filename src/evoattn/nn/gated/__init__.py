"""The end of a gated layer in inference: the gate, the output product and the residual in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from evoattn.core import guards
from evoattn.nn.project import has_kernel
from evoattn.nn.submodules import is_linear
from evoattn.pair.checking import is_recorded

__all__ = ["add_gated", "takes"]

WIDEST = 128
"""Channels up to which a program holds a row, and the whole weight."""

_HALVES = (torch.float16, torch.bfloat16)


def takes(z: Tensor, g: Tensor, module: nn.Module, others: Sequence[Tensor | None] = ()) -> bool:
    """Return whether `add_gated` computes a call, for an o of the dtype and shape of the gate g.

    others: what o is made of. Each may want a gradient of its own, as under an adapter.
    """
    if not is_linear(module) or not has_kernel(z) or not guards.only_computes():
        return False
    linear: Any = module
    weight, bias = linear.weight, linear.bias
    tensors = [x for x in (z, g, weight, bias) if x is not None]
    if not guards.ordinary(tensors) or is_recorded(*tensors, *others):
        return False
    if not all(x is g or x.is_contiguous() for x in tensors):
        return False
    if g.dtype not in _HALVES or z.dtype not in (g.dtype, torch.float32) or weight.dtype not in (*_HALVES, torch.float32):
        return False
    return bool(max(weight.shape) <= WIDEST)


def add_gated(z: Tensor, o: Tensor, g: Tensor, module: nn.Linear, *, in_place: bool = False) -> Tensor:
    """z + (o * sigmoid(g)) W^T + b, summed in float32 and rounded once.

    Args:
        z: `[*, I, J, C]`, contiguous, in the dtype of g or float32.
        o, g: `[*, I, J, D]`, float16 or bfloat16, of any strides.
        module: the output projection, from D to C channels.
        in_place: whether the result is written over z.

    Returns:
        `[*, I, J, C]` in z's dtype: z itself if it is `in_place`.
    """
    from evoattn.nn.gated import kernels

    out = z if in_place else torch.empty_like(z)
    kernels.add(z, o, g, module.weight, module.bias, out)
    if in_place and not z.is_inference():
        torch.autograd.graph.increment_version(z)  # autograd learns that what it may have saved has changed
    return out
