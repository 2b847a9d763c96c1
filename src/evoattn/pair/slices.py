"""Parts of the operators of an alignment: slices whose products stay in a cache, products with wide sums, gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from evoattn.core import guards
from evoattn.dispatch.autograd import OF_A_BACKWARD
from evoattn.dispatch.checks import check_no_tangent
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


def is_for_torch(*tensors: Tensor | None) -> bool:
    """Return whether torch has to see each operation, since it transforms them, or there is nothing to compute."""
    return guards.is_transformed(*tensors) or any(x is not None and not x.numel() for x in tensors)


def empty_gradients(likes: Sequence[Tensor], needs: Sequence[bool]) -> tuple[Tensor, ...]:
    """Uninitialised gradients of tensors like these. One that is not needed has no elements."""
    return tuple(torch.empty_like(x) if needed else x.new_empty(0) for x, needed in zip(likes, needs, strict=True))


def gradients_of(
    backward: Callable[..., Any], ctx: Any, count: int, cotangent: Tensor, *options: Any
) -> tuple[Tensor | None, ...]:
    """The gradients of the first `count` arguments by the operator of a backward, which takes what was saved, and options."""
    check_no_tangent(cotangent, of=OF_A_BACKWARD)
    needs = [bool(x) for x in ctx.needs_input_grad[:count]]
    gradients = backward(cotangent, *ctx.saved_tensors, *options, needs)
    return tuple(x if needed else None for x, needed in zip(gradients, needs, strict=True))
