"""Checks of the arguments of pair operators, casts of their weights, and what their references need."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from evoattn.core.layouts import share_memory
from evoattn.core.numerics import accumulate_dtype
from evoattn.dispatch.checks import check_mask, compute_dtype
from evoattn.dispatch.distributed import is_distributed

WIDENS = hasattr(torch.ops.aten.mm, "dtype")
"""True if torch multiplies 16 bits into float32 on a GPU, as it does from 2.8 on."""

Weights = TypeVar("Weights", bound=Any)
"""A named tuple of tensors, of which some may be None."""


def by_name(weights: Any) -> dict[str, Tensor | None]:
    """The weights by their names. torch.compile of torch 2.7 traces neither `_asdict` nor `_make` of a named tuple."""
    return dict(zip(type(weights)._fields, weights, strict=True))


def check_out(out: Tensor, x: Tensor, dtype: torch.dtype, *, records: bool) -> None:
    """Raise TypeError or ValueError unless the result for x, of a dtype, can be written into `out`.

    `records` tells whether autograd would record the call.
    """
    if not isinstance(out, Tensor):
        raise TypeError(f"out must be a torch.Tensor, got {type(out).__name__}")
    if out.shape != x.shape or out.dtype != dtype or out.device != x.device:
        wanted, got = (f"{list(y.shape)} of {kind} on {y.device}" for y, kind in ((x, dtype), (out, out.dtype)))
        raise ValueError(f"out must be {wanted}, as the result is, got {got}")
    if records or (torch.is_grad_enabled() and out.requires_grad):
        raise ValueError("out takes no result with a gradient: call under torch.no_grad()")


def check_tensors(
    name: str, x: Tensor, mask: Tensor | None, weights: Mapping[str, Tensor | None], optional: frozenset[str]
) -> None:
    """Raise TypeError or ValueError unless x and the weights are floating-point tensors on one device, with a mask of x.

    `name` is that of x. `optional` has names of weights that may be None.
    """
    check_floating({name: x, **{what: y for what, y in weights.items() if y is not None or what not in optional}})
    check_mask("mask", mask, tuple(x.shape[:-1]))
    if mask is not None and mask.device != x.device:
        raise ValueError(f"mask must be on {x.device}, as {name} is, got {mask.device}")


def check_floating(named: Mapping[str, object]) -> None:
    """Raise TypeError or ValueError unless all are plain floating-point tensors on the device of the first one."""
    first, x = next(iter(named.items()))
    for what, tensor in named.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{what} must be a torch.Tensor, got {type(tensor).__name__}")
        if is_distributed(tensor):
            raise TypeError(f"{what} must be a plain tensor, got a DTensor: gather it first, with full_tensor()")
        if not tensor.is_floating_point():
            raise TypeError(f"{what} must be of a floating-point dtype, got {tensor.dtype}")
        if isinstance(x, Tensor) and tensor.device != x.device:
            raise ValueError(f"{what} must be on {x.device}, as {first} is, got {tensor.device}")


def check_shapes(weights: Mapping[str, Tensor | None], shapes: Mapping[str, tuple[int, ...]], sizes: str) -> None:
    """Raise ValueError unless weights have the shapes of their modules. A bias has the first size of its weight.

    Weights are named by their module and "_weight" or "_bias". The message ends with `sizes`.
    """
    for name, tensor in weights.items():
        module, kind = name.rsplit("_", 1)
        wanted = shapes[module] if kind == "weight" else shapes[module][:1]
        if tensor is not None and tuple(tensor.shape) != wanted:
            raise ValueError(f"{name} must be {list(wanted)} {sizes}, got shape {list(tensor.shape)}")


def result_dtype(x: Tensor, weights: Any, options: Any) -> torch.dtype:
    """The dtype of a result: that of the products, or with the residual that to which torch promotes x and the update."""
    dtype: torch.dtype = weights.product_dtype()
    return torch.promote_types(x.dtype, dtype) if options.residual else dtype


def cast(x: Tensor, weights: Weights, product: Tensor) -> Weights:
    """Make the weights contiguous, and cast those of products, and their biases, to the dtype of the products.

    The names of norms have "norm" in them. `product` is the weight whose dtype counts.
    """
    dtype = compute_dtype(x, product)
    values = [y if y is None else (y if "norm" in name else y.to(dtype)).contiguous() for name, y in by_name(weights).items()]
    return type(weights)(*values)  # type: ignore[no-any-return]


def cast_gradients(gradients: Weights, weights: Weights) -> Weights:
    """Cast gradients to the dtypes of their weights. A weight that is None has none."""
    pairs = zip(gradients, weights, strict=True)
    return type(weights)._make([None if x is None or dx is None else dx.to(x.dtype) for dx, x in pairs])  # type: ignore[no-any-return]


def writable_out(out: Tensor | None, x: Tensor, *others: Tensor | None) -> Tensor | None:
    """Return `out` if kernels may write it, else None: it is contiguous and shares no memory with `others`. It may be x itself.

    A program reads its rows of x before it writes them. It may read a mask after another program has written.
    """
    if out is None or not out.is_contiguous() or any(share_memory(out, y) for y in others):
        return None
    is_x = out.data_ptr() == x.data_ptr() and out.stride() == x.stride()
    return out if is_x or not share_memory(out, x) else None


def is_recorded(*tensors: Tensor | None) -> bool:
    """Return whether autograd would record a call with these tensors."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """A layer norm over the last axis, in float32 or wider."""
    sum_dtype = accumulate_dtype(x.dtype)
    weight, bias = (None if y is None else y.to(sum_dtype) for y in (weight, bias))
    return F.layer_norm(x.to(sum_dtype), x.shape[-1:], weight, bias, eps)
