"""A product of float32 matrices: checks, and the way that a call takes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from evoattn.core import guards
from evoattn.core.devices import installed
from evoattn.core.keeping import made_once
from evoattn.core.numerics import float32_products
from evoattn.core.problem import dtype_name
from evoattn.dispatch.autograd import once_differentiable
from evoattn.pair.checking import check_tensors, is_recorded

_OLDEST = (8, 0)
"""The compute capability of the first cards on which layers are computed this way. AMD's have none."""

WIDEST = 16384
"""Channels of the widest row that one program splits."""

NARROWEST = 256
"""Channels from which gradients are computed by the kernels, and the forwards of calls that have some. A guess."""

_ROWS = 6144
"""Rows over which the gradient of a weight is added up at a time. A sum of more would lose more than cuBLAS' does."""

SMALLEST = 1 << 29
"""Products M N K of a layer from which the launches that split x and the weight are worth their time."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, precision: str = "exact") -> Tensor:
    """Compute x W^T + b in float32, on a GPU by its tensor cores.

    Each float32 matrix becomes two of float16 and a power of two for each row. Three products of these lie on average no
    further from float64 than a product in float32, or than 2^-22, where float32 loses less: with few channels, or one row or
    column. They take half the time of cuBLAS in float32, or less. Where float32 has an infinity or NaN, so has the result.
    Where the largest entries of two rows have a product below 2^-121 or above 2^121, a result may be 0 or not finite too early.
    Entries are exact to 2^-49 of the largest one of their row: those below 2^-28 of it lose digits.
    Gradients are products of the same kind, but for few channels. There is no second derivative.
    torch computes calls of other dtypes, on other devices, and those that it compiles.

    Inside `evoattn.nn.sampling()` the weight of a call without gradients is split once.

    Args:
        x: `[*, K]`, of any strides.
        weight: `[N, K]`.
        bias: `[N]`, or None.
        precision: "exact", or "tf32" for one product of as many bits as TF32 has.

    Returns:
        `[*, N]`, in float32 if the kernels compute it.

    Raises:
        TypeError, ValueError: an argument has a wrong type, dtype, shape or device, or the precision is not known.

    Example:
        >>> import torch
        >>> linear(torch.ones(2, 3, 8), torch.ones(4, 8)).shape
        torch.Size([2, 3, 4])

    Source: Ootomo and Yokota 2022, "Recovering single precision accuracy from Tensor Cores".
    """
    if precision not in ("exact", "tf32"):
        raise ValueError(f"precision must be 'exact' or 'tf32', got {precision!r}")
    check_tensors("x", x, None, {"weight": weight, "bias": bias}, frozenset(("bias",)))
    if weight.ndim != 2 or x.ndim < 1 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"weight must be [N, K] for x [*, K], got {list(weight.shape)} for {list(x.shape)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must be {list(weight.shape[:1])}, got {list(bias.shape)}")
    dtypes = [dtype_name(y.dtype) for y in (x, weight, bias) if y is not None]
    if len(set(dtypes)) > 1 and not torch.is_autocast_enabled(x.device.type):
        raise ValueError(f"x, weight and bias must have one dtype, got {', '.join(dtypes)}")
    if not takes(x, weight, bias):
        return F.linear(x, weight, bias)
    low = precision == "exact"
    if is_recorded(x, weight, bias):
        return _differentiable(x, weight, bias, low) if _fits(x, weight) else F.linear(x, weight, bias)
    from evoattn.pair.products import steps

    halves = made_once(precision, (weight,), lambda: steps.split_weights([weight], low=low))
    rows = steps.split(x.reshape(-1, x.shape[-1]), low=low)
    return steps.product(rows, halves, bias).view(*x.shape[:-1], weight.shape[0])


def takes(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Return whether the kernels can compute a call."""
    if not x.is_cuda or x.dtype != torch.float32 or not guards.only_computes() or not installed("triton"):
        return False
    if not 0 < x.shape[-1] <= WIDEST or not x.numel() or not weight.numel():
        return False
    if torch.is_autocast_enabled("cuda"):
        return False
    return guards.ordinary([y for y in (x, weight, bias) if y is not None])


def linear_of_layer(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    norm: tuple[Any, Any, Any] | None = None,
    gate: Tensor | None = None,
) -> Tensor | None:
    """norm(x) W^T + b, or (x sigmoid(gate)) W^T + b, in the place of a float32 product of torch.

    Args:
        x: `[*, K]`, which is expanded to the gate.
        weight, bias: `[N, K]` and `[N]`.
        norm: the weight and the bias of a norm, each or both None, and what is added to the variance.
        gate: `[*, K]`.

    Returns:
        `[*, N]`; or None if torch shall compute it: where `linear` lets it, in TF32 if the user allows that, or if the product
        is small.
    """
    others = (bias, gate, *(() if norm is None else norm[:2]))
    if not takes(x, weight, bias) or not _is_large(x, weight):
        return None
    if is_recorded(x, weight, *others) or any(y is not None and y.dtype != torch.float32 for y in (weight, *others)):
        return None
    from evoattn.pair.products import steps

    if gate is not None:
        x = x.expand_as(gate)
    rows = x.reshape(-1, x.shape[-1])
    if gate is not None:
        halves = steps.split(rows, gate.reshape(rows.shape), kind="gate")
    elif norm is None:
        halves = steps.split(rows)
    else:
        halves = steps.split_normed(rows, *norm)
    return steps.product(halves, steps.split(weight), bias).view(*x.shape[:-1], weight.shape[0])


def any_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear`, by the kernels if they take a float32 product of a layer."""
    if is_recorded(x, weight, bias):
        return _differentiable(x, weight, bias, True) if _is_trained(x, weight, bias) else F.linear(x, weight, bias)
    y = linear_of_layer(x, weight, bias)
    return F.linear(x, weight, bias) if y is None else y


def _is_large(x: Tensor, weight: Tensor) -> bool:
    """Return whether a product that the kernels take is worth the launches that split its factors, as torch is set."""
    if x.numel() * weight.shape[0] < SMALLEST or float32_products() == "tf32":
        return False
    from evoattn.kit import cards

    return (cards.capability(x.device) or (0, 0)) >= _OLDEST


def _fits(x: Tensor, weight: Tensor) -> bool:
    """Return whether a product has channels enough for gradients by the kernels, and no row that is too wide for a program."""
    channels = (x.shape[-1], weight.shape[0])
    return min(channels) >= NARROWEST and max(channels) <= WIDEST


def _is_trained(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Return whether the kernels compute a product of a layer that has gradients, and its gradients."""
    if not _fits(x, weight) or not takes(x, weight, bias) or not _is_large(x, weight):
        return False
    return all(y is None or y.dtype == torch.float32 for y in (weight, bias))


def product_of_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + b for x `[R, K]` in the forward of an autograd function."""
    return _forward(x, weight, bias, True) if _is_trained(x, weight, bias) else F.linear(x, weight, bias)


def gradient_of_rows(dy: Tensor, weight: Tensor) -> Tensor:
    """dy W for dy `[R, N]` in its backward."""
    return _forward(dy, weight.t(), None, True) if _is_trained(dy, weight.t()) else dy @ weight


def gradient_of_weight(dy: Tensor, x: Tensor) -> Tensor:
    """dy^T x for dy `[R, N]` and x `[R, K]` in its backward."""
    return _across(dy, x, True) if _is_trained(x, dy.t()) else dy.t() @ x


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, low: bool) -> Tensor:
    from evoattn.pair.products import steps

    return steps.product(steps.split(x, low=low), steps.split(weight, low=low), bias)


def _across(dy: Tensor, x: Tensor, low: bool) -> Tensor:
    """dy^T x, some rows at a time."""
    from evoattn.pair.products import steps

    out: Tensor | None = None
    for first in range(0, x.shape[0], _ROWS):
        left, right = (steps.split(y[first : first + _ROWS].t(), low=low) for y in (dy, x))
        out = steps.product(left, right, base=out, out=out)
    assert out is not None
    return out


def _differentiable(x: Tensor, weight: Tensor, bias: Tensor | None, low: bool) -> Tensor:
    y: Tensor = _Linear.apply(x.reshape(-1, x.shape[-1]), weight, bias, low)  # type: ignore[no-untyped-call]
    return y.view(*x.shape[:-1], weight.shape[0])


class _Linear(torch.autograd.Function):
    """x W^T + b of rows `[R, K]` by the kernels, as are its gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, low: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.low = low
        return _forward(x, weight, bias, low)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs = ctx.needs_input_grad
        dx = _forward(dy, weight.t(), None, ctx.low) if needs[0] else None
        dweight = _across(dy, x, ctx.low) if needs[1] else None
        return dx, dweight, dy.sum(0) if needs[2] else None, None
