"""Numerical conventions that every backend shares: the compute dtype, where scores are measured from, what is saved.

**The row shift.** A row of an alignment that is padding carries mask_bias = -1e9 at every key. Its scores are then near
-1e9, where float32 numbers are 64 apart: the scores lose all their digits, and `LSE = -1e9 + log(sum)` loses the sum.
Softmax does not change when a constant is added to a row, so every backend measures scores from the row's largest mask bias

    shift[b,n] = max over attended k of mask_bias[b,n,k]     (0 if that is not finite)

**The saved statistic.** A pair bias can do the same to a single query, and so can large scores. So a forward saves two
numbers for each query, with S measured from the row shift:

    reference[b,n,h,q]   a number near the largest score, in natural units; each backend chooses it and subtracts it first
    lse[b,n,h,q]         log2 of sum over k of exp(S - reference); -inf for a query that attends to nothing

The backward recomputes P = exp(S - reference) / 2**lse. `natural_lse` makes the LSE that a user asks for.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
import struct
from collections.abc import Iterator

import torch
from torch import Tensor

LN2 = math.log(2.0)
LOG2E = math.log2(math.e)

NEAR = 64.0
"""A pair bias up to this size costs a float32 score no digit that counts: float32 numbers are 4e-6 apart there."""

_HAS_FP32_PRECISION = hasattr(torch.backends.cuda.matmul, "fp32_precision")


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of scores, statistics and sums: float64 for float64, float32 for all narrower ones."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def rounded(x: float, dtype: torch.dtype) -> float:
    """A number as a floating-point dtype holds it, infinite if it is too large.

    It is computed without tensors: a plan that reads one cannot be made while a call is recorded as a CUDA graph.
    """
    if dtype == torch.float64 or not math.isfinite(x):
        return x
    try:
        single = struct.pack("<f", x)
        if dtype == torch.bfloat16:  # the upper half of a float32; half of the lower one rounds up if the upper one is odd
            bits = int.from_bytes(single, "little")
            single = ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).to_bytes(4, "little")
        value: float = struct.unpack("<f", single)[0]
        return struct.unpack("<e", struct.pack("<e", value))[0] if dtype == torch.float16 else value  # type: ignore[no-any-return]
    except OverflowError:
        return math.copysign(math.inf, x)


_products: contextvars.ContextVar[str | None] = contextvars.ContextVar("products", default=None)


def float32_products() -> str:
    """The setting for products of float32 matrices on NVIDIA GPUs, such as "tf32" or "ieee": torch's, or that of `products_in`.

    torch before 2.9 has only allow_tf32. Later ones raise if that is read after fp32_precision was set.
    """
    chosen = _products.get()
    if chosen is not None:
        return chosen
    if _HAS_FP32_PRECISION:
        setting: str = torch.backends.cuda.matmul.fp32_precision
        return setting
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"


@contextlib.contextmanager
def products_in(setting: str | None) -> Iterator[None]:
    """Let the kernels of evoattn take another setting than torch's in this thread, until the block ends. None: torch's."""
    token = _products.set(setting)
    try:
        yield
    finally:
        _products.reset(token)


def natural_lse(lse: Tensor, reference: Tensor) -> Tensor:
    """The logsumexp of the scores in natural units, from what a forward saves. It is differentiable by `lse`."""
    return torch.add(reference, lse, alpha=LN2)


def bounded(bias: Tensor, dtype: torch.dtype) -> Tensor:
    """A bias in `dtype`; a finite number that `dtype` cannot hold becomes its largest, not infinite."""
    if torch.finfo(bias.dtype).max <= torch.finfo(dtype).max:
        return bias.to(dtype)
    largest = torch.finfo(dtype).max
    return torch.where(bias.isinf(), bias, bias.clamp(-largest, largest)).to(dtype)


def bias_limit(dtype: torch.dtype) -> float:
    """Shifted biases are kept within this size, so that two of them can be added up and multiplied by log2 e."""
    return torch.finfo(dtype).max / 8


def _below(bias: Tensor, shift: Tensor) -> Tensor:
    """bias - shift, which is -inf only if the bias is, and never +inf: a key that a mask switches off may lie far above."""
    largest = bias_limit(bias.dtype)
    return torch.where(bias == -torch.inf, bias, (bias - shift).clamp(-largest, largest))


def _masked_bias(mask: Tensor | None, mask_bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if mask_bias is None and mask is None:
        return None
    if mask_bias is None:
        bias = torch.zeros((), dtype=dtype, device=mask.device)  # type: ignore[union-attr]
    else:
        bias = bounded(mask_bias, dtype)
    return bias if mask is None else torch.where(mask, bias, -torch.inf)


def _row_shift(bias: Tensor) -> Tensor:
    if bias.shape[-1] == 0:
        return bias.new_zeros(bias.shape[:-1])
    largest = bias.amax(-1)
    return torch.where(largest.isfinite(), largest, 0)


def row_shift(mask: Tensor | None, mask_bias: Tensor, dtype: torch.dtype) -> Tensor:
    """The constant that each row's scores are measured from, `[b|1, n|1]`; no gradient flows through it."""
    bias = _masked_bias(mask, mask_bias.detach(), dtype)
    return _row_shift(bias)  # type: ignore[arg-type]


def key_bias(mask: Tensor | None, mask_bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """mask and mask_bias as one additive bias `[b|1, n|1, k]`, shifted, or None if neither is given.

    It is -inf if a key is not attended, and only then.
    """
    bias = _masked_bias(mask, mask_bias, dtype)
    if bias is None or mask_bias is None:
        return bias
    return _below(bias, _row_shift(bias).unsqueeze(-1))


def query_shift(pair_bias: Tensor, key_bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the number that the pair bias of each query is measured from, `[b|1, n|1, h|1, q|1, 1]`, without a gradient.

    It is the largest sum of pair bias and key bias (`key_bias`) if that is finite and beyond NEAR, else 0. So a key that a mask
    switches off does not count. It is an estimate of the largest score, before there are scores. For a query that a pair bias
    of -1e9 masks it is what the row shift is for a padded row.
    """
    largest = bounded(pair_bias.detach(), dtype).unsqueeze(1)
    if key_bias is not None:
        largest = largest + key_bias[:, :, None, None, :]
    if largest.shape[-1] == 0:
        return largest.new_zeros((*largest.shape[:-1], 1))
    largest = largest.amax(-1, keepdim=True)
    return torch.where((largest.abs() > NEAR) & largest.isfinite(), largest, 0)


def shifted_biases(pair_bias: Tensor, key_bias: Tensor | None, query_shift: Tensor) -> Tensor:
    """The sum of pair bias and key bias, measured from `query_shift`, `[b,n,h,q,k]` in its dtype; -inf only if one of them is.

    The shift is taken from the larger of the two. If that is near the shift the difference is exact, and the smaller one keeps
    its digits. Scores are added to this sum, not to one part of it: the parts may be 1e9 and -1e9.
    """
    pair = bounded(pair_bias.unsqueeze(1), query_shift.dtype)
    if key_bias is None:
        return _below(pair, query_shift)
    key = key_bias[:, :, None, None, :]
    pair_is_larger = pair.abs() >= key.abs()
    larger, smaller = torch.where(pair_is_larger, pair, key), torch.where(pair_is_larger, key, pair)
    return _below(larger, query_shift) + smaller
