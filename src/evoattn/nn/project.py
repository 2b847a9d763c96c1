"""Norm and projections: one product computes all projections of an input, and its backward takes their gradients as one tensor.

    y = norm(x) W^T + b,    W = the weights of all projections, one below the other

Modules that are not plain are called one after the other instead (`submodules` says which those are).

The backward keeps x, which is an input of the layer, and two numbers for each row. It normalises x again, which costs one pass
over memory: saving the result would take as much memory as x.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evoattn.core import guards
from evoattn.core.devices import constant, installed, uncast
from evoattn.core.layouts import join
from evoattn.core.numerics import accumulate_dtype
from evoattn.dispatch.autograd import once_differentiable
from evoattn.dispatch.checks import compute_dtype
from evoattn.nn.submodules import call, is_linear, is_norm, parameter_of
from evoattn.pair.products.call import (
    any_linear,
    gradient_of_rows,
    gradient_of_weight,
    linear_of_layer,
    product_of_rows,
)

_BYTES = 16
"""Each projection starts on a multiple of this, and so does each row: GPUs copy tiles only from such addresses."""


def compute_dtype_of(x: Tensor, *modules: nn.Module) -> torch.dtype:
    """The dtype of a layer's products: the narrower of those that autocast, if it is on, makes of input and parameters."""
    return compute_dtype(x, parameter_of(modules))


def layer_norm(x: Tensor, norm: nn.Module, dtype: torch.dtype) -> Tensor:
    """Apply a norm to x, with the result in `dtype`. The backward keeps x, and mean and deviation of each row."""
    if not is_norm(norm):
        return call(norm, x, dtype)
    affine = (norm.weight, norm.bias, norm.eps)
    return _NormLinear.apply(x, *affine, dtype, None, None, (0, 0))  # type: ignore[no-untyped-call, no-any-return]


def linear(x: Tensor, module: nn.Linear) -> Tensor:
    """Apply a projection in the dtype of x."""
    if not is_linear(module):
        return call(module, x, x.dtype)
    bias = None if module.bias is None else module.bias.to(x.dtype)
    return any_linear(x, module.weight.to(x.dtype), bias)


def project(x: Tensor, norm: nn.Module | None, linears: Sequence[nn.Linear]) -> list[Tensor]:
    """Project norm(x) by all of `linears`, with one product if all modules are plain, in the compute dtype.

    Without a norm x is not normalised. If the modules are plain, the results are views of one tensor, and each view and each of
    its rows starts on a multiple of 16 bytes.
    """
    dtype = compute_dtype_of(x, *linears)
    plain = [is_linear(module) for module in linears]  # not a generator: Dynamo cannot leave one half-way
    if not all(plain) or not (norm is None or is_norm(norm)):
        normed = x.to(dtype) if norm is None else layer_norm(x, norm, dtype)
        return [linear(normed, module) for module in linears]
    weight, bias, biased = _join(linears, dtype)
    if norm is None:
        joined = any_linear(x.to(dtype), weight, bias)
    else:
        affine = (norm.weight, norm.bias, norm.eps)
        in_halves = linear_of_layer(x, weight, bias, norm=affine)
        if in_halves is None:
            joined = _NormLinear.apply(x, *affine, dtype, weight, bias, biased)  # type: ignore[no-untyped-call]
            joined = joined.view(*x.shape[:-1], joined.shape[-1])
        else:
            joined = in_halves
    if len(linears) == 1:  # an ordinary view, which the caller may change in place
        return [joined[..., : linears[0].out_features]]
    sizes = tuple(itertools.chain.from_iterable((module.out_features, _gap(module, dtype)) for module in linears))
    if guards.only_computes():
        return list(_Split.apply(joined, sizes))  # type: ignore[no-untyped-call]
    return list(joined.split(sizes, -1)[::2])


def _gap(module: nn.Linear, dtype: torch.dtype) -> int:
    """Rows of zeros to put below a weight, so that the next projection starts on a multiple of 16 bytes."""
    return -module.out_features % (_BYTES // dtype.itemsize)


def _join(linears: Sequence[nn.Linear], dtype: torch.dtype) -> tuple[Tensor, Tensor | None, tuple[int, int]]:
    """The joined weight, the joined bias or None, and the first and past-the-last column with a bias."""
    weights: list[Tensor] = []
    biases: list[Tensor] = []
    first, last, here = 0, 0, 0
    for module in linears:
        rows, gap = module.out_features, _gap(module, dtype)
        weights += [module.weight]
        if gap:
            weights += [_zeros(module.weight, gap, module.in_features)]
        if module.bias is not None:
            biases += [module.bias]
            first, last = (first if last else here), here + rows
        blank = gap if module.bias is not None else rows + gap
        if blank:
            biases += [_zeros(module.weight, blank)]
        here += rows + gap
    bias = concatenate(biases, dtype) if last else None
    return concatenate(weights, dtype), bias, (first, last)


def concatenate(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Parts one below the other, in a dtype. Autocast to bfloat16 refuses to concatenate float16, and the other way round."""
    return torch.cat([x.to(dtype) if x.dtype.itemsize == dtype.itemsize else x for x in parts]).to(dtype)


def _zeros(like: Tensor, *shape: int) -> Tensor:
    """Zeros that are only read: the launch that makes them costs as much as the one that joins the weights."""
    return constant(0.0, shape, like.dtype, like.device) if guards.only_computes() else like.new_zeros(shape)


class _Split(torch.autograd.Function):
    """Split a tensor along its last axis, and return every second part: the others are gaps.

    The backward copies no gradient that lies in the joined tensor already.
    """

    @staticmethod
    def forward(ctx: Any, joined: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.sizes, ctx.shape = sizes, joined.shape
        return tuple(joined.split(sizes, -1)[::2])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *parts: Tensor | None) -> tuple[Tensor | None, None]:
        if all(x is None for x in parts):
            return None, None
        rows: list[Tensor | None] = [None] * len(ctx.sizes)
        rows[::2] = [None if x is None else x.reshape(-1, x.shape[-1]) for x in parts]
        return join(rows, ctx.sizes).view(ctx.shape), None


class _NormLinear(torch.autograd.Function):
    """norm(x) W^T + b of x `[*, C]` as rows `[R, out_features]`, or norm(x) in the shape of x if there is no weight."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        norm_weight: Tensor | None,
        norm_bias: Tensor | None,
        eps: float,
        dtype: torch.dtype,
        weight: Tensor | None,
        bias: Tensor | None,
        biased: tuple[int, int],
    ) -> Tensor:
        normed, mean, rstd = normalise(x.reshape(-1, x.shape[-1]), norm_weight, norm_bias, eps, dtype)
        ctx.save_for_backward(x, norm_weight, norm_bias, weight, mean, rstd)
        ctx.eps, ctx.biased = eps, biased
        if weight is None:
            return normed.view(x.shape)  # compiled by torch 2.11, x has no gradient if this is the norm's own output
        return product_of_rows(normed, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, norm_weight, norm_bias, weight, mean, rstd = ctx.saved_tensors
        needs = ctx.needs_input_grad
        rows = x.reshape(-1, x.shape[-1])
        dx = dnorm_weight = dnorm_bias = dweight = dbias = None
        with uncast(x.device):
            if needs[5]:
                normed, _, _ = normalise(rows, norm_weight, norm_bias, ctx.eps, weight.dtype)
                dweight = gradient_of_weight(dy, normed)
                del normed
            if needs[6]:
                first, last = ctx.biased
                dbias = dy.sum(0)
                if last - first < dy.shape[-1]:  # torch has no rule for a view of all of many cotangents
                    dbias = F.pad(dbias[first:last], (first, dy.shape[-1] - last))
            if any(needs[:3]):
                d_normed = dy.reshape(rows.shape) if weight is None else gradient_of_rows(dy, weight)
                dx, dnorm_weight, dnorm_bias = normalise_backward(d_normed, rows, mean, rstd, norm_weight, norm_bias, needs[:3])
        return None if dx is None else dx.view(x.shape), dnorm_weight, dnorm_bias, None, None, dweight, dbias, None


_MOST_CHANNELS = 4096
"""The kernels hold a row in the registers of one program."""


def normalise(
    rows: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return normalised rows `[R, C]`, and the mean and 1 / standard deviation of each row, for the backward.

    `dtype` is that of the first result. Statistics are float32, or float64 for float64 rows.
    """
    if has_kernel(rows):
        from evoattn.kit import norm

        return norm.normalise(rows, weight, bias, eps, dtype)
    sum_dtype = accumulate_dtype(rows.dtype)
    weight, bias = (None if x is None else x.to(sum_dtype) for x in (weight, bias))
    normed, mean, rstd = torch.native_layer_norm(rows.to(sum_dtype), rows.shape[-1:], weight, bias, eps)
    return normed.to(dtype), mean, rstd


def normalise_backward(
    d_normed: Tensor,
    rows: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Compute the gradients of rows, weight and bias, each in the dtype of its tensor, or None if `needs` says so."""
    if has_kernel(rows):
        from evoattn.kit import norm

        return norm.normalise_backward(d_normed, rows, mean, rstd, weight, bias, needs)
    sum_dtype = accumulate_dtype(rows.dtype)
    affine = [None if x is None else x.to(sum_dtype) for x in (weight, bias)]
    gradients = torch.ops.aten.native_layer_norm_backward(
        d_normed.to(sum_dtype), rows.to(sum_dtype), rows.shape[-1:], mean, rstd, *affine, needs
    )
    dtypes = [rows.dtype if x is None else x.dtype for x in (rows, weight, bias)]
    dx, dweight, dbias = (x.to(dtype) if need else None for x, dtype, need in zip(gradients, dtypes, needs, strict=True))
    return dx, dweight, dbias


def has_kernel(rows: Tensor) -> bool:
    """Return whether the Triton kernels take these rows: 16 or 32 bits, on a GPU, in a call that nothing traces or observes."""
    if not rows.is_cuda or rows.dtype == torch.float64 or not rows.numel() or rows.shape[-1] > _MOST_CHANNELS:
        return False
    if torch.compiler.is_compiling() or type(rows) is not Tensor or torch._C._len_torch_dispatch_stack():
        return False
    return installed("triton")
