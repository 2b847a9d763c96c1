"""Parts of the operators of an alignment: slices whose products stay in a cache, products with wide sums, and checks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from evoattn.core import guards
from evoattn.dispatch.distributed import is_distributed
from evoattn.pair.checking import WIDENS

BYTES = 32 << 20
"""Bytes of the products of a slice, which stay in the L2 cache of a large GPU. A call needs little more beside its result."""


def slices(length: int, bytes_each: int) -> Iterator[slice]:
    """Slices of an axis, of about `BYTES` each and of nearly one length."""
    parts = max(1, min(length, math.ceil(length * bytes_each / BYTES)))
    step = max(1, math.ceil(length / parts))
    return (slice(start, min(start + step, length)) for start in range(0, length, step))


def widened(x: Tensor) -> Tensor:
    """A factor of several `wide_product`s. Where torch does not multiply 16 bits into float32, it is converted once for all."""
    return x.float() if x.dtype.itemsize == 2 and not (x.is_cuda and WIDENS) else x


def wide_product(x: Tensor, y: Tensor) -> Tensor:
    """x y of matrices, or of a batch of them, with sums and results in float32 or wider."""
    x, y = widened(x), widened(y)
    if x.dtype.itemsize > 2:
        return x @ y
    product: Any = torch.mm if x.ndim == 2 else torch.bmm
    return product(x, y, out_dtype=torch.float32)  # type: ignore[no-any-return]


def check_floating(first: str, **tensors: object) -> None:
    """Raise TypeError or ValueError unless all are plain floating-point tensors on the device of the one called `first`."""
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        if is_distributed(x):
            raise TypeError(f"{name} must be a plain tensor, got a DTensor: gather it first, with full_tensor()")
        if not x.is_floating_point():
            raise TypeError(f"{name} must be of a floating-point dtype, got {x.dtype}")
        device = tensors[first].device  # type: ignore[attr-defined]
        if x.device != device:
            raise ValueError(f"{name} must be on {device}, as {first} is, got {x.device}")


def is_for_torch(*tensors: Tensor | None) -> bool:
    """Return whether torch has to see each operation, since it transforms them, or there is nothing to compute."""
    return guards.is_transformed(*tensors) or any(x is not None and not x.numel() for x in tensors)
