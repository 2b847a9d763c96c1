"""The transition by kernels: what it saves for its backward, and its gradients.

The forward keeps x alone. The backward takes rows in chunks, since the operands of the weights' gradients are wider than x.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from evoattn.core.devices import uncast
from evoattn.pair.checking import result_dtype
from evoattn.pair.transitions.values import Options, Weights

__all__ = ["backward", "forward", "outline"]

_CHUNK = 1 << 17
"""Rows for which the operands of the weights' gradients are in memory: 0.4 GiB for 512 hidden channels in 16 bits."""

_MM_WIDENS = hasattr(torch.ops.aten.mm, "dtype")
"""True if torch multiplies 16 bits into float32, as it does from 2.8 on."""


def forward(x: Tensor, mask: Tensor | None, weights: Weights, options: Options, out: Tensor | None = None) -> Tensor:
    """The result `[R, C]`. It is written into `out`, which may be x, if that is given."""
    from evoattn.pair.transitions import steps

    with uncast(x.device):
        return steps.forward(x, mask, weights, options, out)


def outline(x: Tensor, weights: Weights, options: Options) -> Tensor:
    """A tensor of the shape and dtype that `forward` returns."""
    return torch.empty_like(x, dtype=result_dtype(x, weights, options))


def backward(
    do: Tensor, x: Tensor, mask: Tensor | None, weights: Weights, options: Options, needs_weights: bool
) -> tuple[Tensor, Weights | None]:
    """The gradient of x, and those of the weights, all of them or none."""
    from evoattn.pair.transitions import steps

    dx = torch.empty_like(x)
    with uncast(x.device):
        if not needs_weights:
            steps.backward(do, x, mask, weights, options, dx, None, None)
            return dx, None
        return dx, _with_weights(do, x, mask, weights, options, dx)


def _with_weights(do: Tensor, x: Tensor, mask: Tensor | None, weights: Weights, options: Options, dx: Tensor) -> Weights:
    """Write the gradient of x, and return those of the weights."""
    from evoattn.pair.transitions import steps

    (rows, channels), w = x.shape, weights
    chunk = min(rows, _CHUNK)
    widths = (channels, channels, w.hidden, w.hidden * (1 if w.b_weight is None else 2))
    operands = steps.Operands(*[torch.empty((chunk, n), dtype=w.dtype, device=x.device) for n in widths])
    sums, total = [], _Sums()
    for start in range(0, rows, chunk):
        part = slice(start, min(start + chunk, rows))
        operands_of_chunk = steps.Operands(*[tensor[: part.stop - start] for tensor in operands])
        chunk_sums = x.new_empty((steps.programs(x[part], w), 3, channels), dtype=torch.float32)
        rows_of_mask = None if mask is None else mask[part]
        steps.backward(do[part], x[part], rows_of_mask, w, options, dx[part], operands_of_chunk, chunk_sums)
        sums.append(chunk_sums.sum(0))
        total.add(operands_of_chunk, widens=chunk < rows, has_bias=w.a_bias is not None or w.b_bias is not None)
    return total.gradients(torch.stack(sums).sum(0), w)


class _Sums:
    """Sums over chunks, in float32 if there are several: gradients of the products' weights, and of their biases."""

    def __init__(self) -> None:
        self._parts: list[Tensor] = []

    def add(self, operands: Any, *, widens: bool, has_bias: bool) -> None:
        """Add those of one chunk."""
        products = [_product(operands.dab, operands.y, widens=widens), _product(operands.d, operands.u, widens=widens)]
        parts = products + ([operands.dab.sum(0, dtype=torch.float32)] if has_bias else [])
        if not self._parts:
            self._parts = parts
            return
        for mine, more in zip(self._parts, parts, strict=True):
            mine += more

    def gradients(self, sums: Tensor, w: Weights) -> Weights:
        """Gradients in the dtypes of their weights. sums: those of the norm's weight and bias, and of the output's bias."""
        dab_weight, dout_weight, *rest = self._parts
        dab_bias = rest[0] if rest else dab_weight.new_empty(2 * w.hidden)
        halves = [(weight, bias) for weight, bias in zip(dab_weight.split(w.hidden), dab_bias.split(w.hidden), strict=False)]
        (da_weight, da_bias), (db_weight, db_bias) = halves[0], halves[-1]
        grads = (sums[0], sums[1], da_weight, da_bias, db_weight, db_bias, dout_weight, sums[2])
        cast: Any = [None if x is None else dx.to(x.dtype) for dx, x in zip(grads, w, strict=True)]
        return Weights(*cast)


def _product(a: Tensor, b: Tensor, *, widens: bool) -> Tensor:
    """a^T b, in float32 if asked for and torch can."""
    if widens and a.dtype.itemsize == 2:
        if a.is_cuda and _MM_WIDENS:
            return torch.mm(a.t(), b, out_dtype=torch.float32)
        return (a.t() @ b).float()
    return a.t() @ b
