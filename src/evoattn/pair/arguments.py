"""What the calls of pair operators share: checks of tensors and masks, and the norm in plain torch."""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor

from evoattn.call.sharded import is_distributed
from evoattn.call.validation import check_mask
from evoattn.numerics import accumulate_dtype

__all__ = ["check_pair_mask", "check_shapes", "check_tensors", "norm"]


def check_tensors(name: str, x: Tensor, weights: Mapping[str, Tensor | None], optional: frozenset[str]) -> None:
    """Raise TypeError or ValueError unless x and the weights are floating-point tensors on one device.

    Args:
        name: that of x.
        x: the input.
        weights: by name.
        optional: names of weights that may be None.
    """
    for what, tensor in ((name, x), *weights.items()):
        if tensor is None and what in optional:
            continue
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{what} must be a torch.Tensor, got {type(tensor).__name__}")
        if is_distributed(tensor):
            raise TypeError(f"{what} must be a plain tensor, got a DTensor: gather it first, with full_tensor()")
        if not tensor.is_floating_point():
            raise TypeError(f"{what} must be of a floating-point dtype, got {tensor.dtype}")
        if tensor.device != x.device:
            raise ValueError(f"{what} must be on {x.device}, as {name} is, got {tensor.device}")


def check_shapes(weights: Mapping[str, Tensor | None], shapes: Mapping[str, tuple[int, ...]], sizes: str) -> None:
    """Raise ValueError unless weights have the shapes of their modules. A bias has the first size of its weight.

    Args:
        weights: by name, which is that of the module and "_weight" or "_bias".
        shapes: of weights, by module.
        sizes: what the message says of them.
    """
    for name, tensor in weights.items():
        module, kind = name.rsplit("_", 1)
        wanted = shapes[module] if kind == "weight" else shapes[module][:1]
        if tensor is not None and tuple(tensor.shape) != wanted:
            raise ValueError(f"{name} must be {list(wanted)} {sizes}, got shape {list(tensor.shape)}")


def check_pair_mask(name: str, x: Tensor, mask: Tensor | None) -> None:
    """Raise TypeError or ValueError unless the mask broadcasts to the leading axes of x and is on its device."""
    check_mask("mask", mask, tuple(x.shape[:-1]))
    if mask is not None and mask.device != x.device:
        raise ValueError(f"mask must be on {x.device}, as {name} is, got {mask.device}")


def norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """A layer norm over the last axis, in float32 or wider."""
    wide = accumulate_dtype(x.dtype)
    weight, bias = (None if y is None else y.to(wide) for y in (weight, bias))
    return F.layer_norm(x.to(wide), x.shape[-1:], weight, bias, eps)
