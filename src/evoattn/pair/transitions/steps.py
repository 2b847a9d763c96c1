"""The transition and its backward by kernels.

The forward saves x alone. The backward takes rows in chunks, since the operands of the weights' gradients are wider than x.
Shapes: x and what is made of it `[R, C]`, mask `[R]`. All tensors are contiguous.
"""

from __future__ import annotations

import torch
from torch import Tensor

from evoattn.core.sizes import power_of_two
from evoattn.kit import cards
from evoattn.kit.arguments import StructuredKernel
from evoattn.pair.checking import WIDENS, cast_gradients, result_dtype
from evoattn.pair.launching import (
    Tile,
    launch_rows,
    norm_parameters,
    or_zeros,
    plan_constants,
    split_products,
    takes_halves,
)
from evoattn.pair.transitions import kernels
from evoattn.pair.values import TransitionOptions, TransitionWeights

CHUNK = 1 << 17
"""Rows for which the operands of the weights' gradients are in memory: 0.4 GiB for 512 hidden channels in 16 bits."""

_NARROW_BYTES, _MOST_BYTES = 256, 512
"""Of a row in the dtype of the products. The kernels hold it in the registers of one program."""

_SHARED_MEMORY = 200_000
"""Bytes that a program may use on cards that take wider rows than `_NARROW_BYTES`, or float32: from Hopper on. Others spill."""

_TENSOR_MEMORY = 10
"""The compute capability of cards whose products are summed in tensor memory. Products of float32 numbers are three each, and
take 544 to 768 columns of the 512 that there are.
"""

_TILES = {
    "forward": Tile(64, 64, 4, 2),
    "backward": Tile(64, 32, 4, 3),
    "forward, wide": Tile(64, 32, 8, 2),
    "backward, wide": Tile(64, 32, 4, 1),
    "forward, halves": Tile(64, 64, 4, 1),
    "backward, float32": Tile(64, 32, 8, 1),
    "backward, little shared memory": Tile(64, 32, 4, 2),
}
"""By what is launched. The first two are for up to 128 channels in 16 bits: the fastest of 8 each on an H100 at 1,024 residues.
Wide ones are for more channels, and for float32. With 64 rows, 8 warps and 256 channels in 16 bits, Triton 3.6 compiles a
backward for Hopper that writes wrong numbers, some of them past the end of its tensors.
"""


def takes(device: torch.device, dtype: torch.dtype, channels: int, hidden: int) -> bool:
    """Return whether the kernels take rows of so many channels in this dtype of the products on this card."""
    large = cards.shared_memory_limit(device) >= _SHARED_MEMORY
    if dtype == torch.float32 and (not large or (cards.capability(device) or (0,))[0] == _TENSOR_MEMORY):
        return False
    return power_of_two(channels) * dtype.itemsize <= (_MOST_BYTES if large else _NARROW_BYTES)


def programs(x: Tensor, weights: TransitionWeights) -> int:
    """The number of programs of the backward of x."""
    return -(-x.shape[0] // _tile("backward", x, weights).rows)


def forward(
    x: Tensor,
    mask: Tensor | None,
    weights: TransitionWeights,
    options: TransitionOptions,
    split: None = None,
    save: bool = True,
    out: Tensor | None = None,
) -> tuple[Tensor]:
    """Compute the update, or x + update. It is written into `out`, which may be x itself, or into a new tensor.

    Without `save`, which is inference, float32 products may be three of float16. The backward reads no other tensors than the
    arguments. A transition needs no split.
    """
    out = torch.empty_like(x, dtype=result_dtype(x, weights, options)) if out is None else out
    halves = not save and takes_halves(x, weights.product_dtype())
    w = split_products(weights) if halves else weights
    tensors = (x, x if mask is None else mask, *_input_weights(x, w), w.out_weight, or_zeros(w.out_bias, x, x.shape[1]), out)
    _launch("forward", kernels.forward_kernel, tensors, x, mask, weights, options, halves=halves)
    return (out,)


def backward(
    do: Tensor,
    x: Tensor,
    mask: Tensor | None,
    saved: tuple[()],
    weights: TransitionWeights,
    options: TransitionOptions,
    needs_weights: bool,
    split: None = None,
) -> tuple[Tensor, TransitionWeights | None]:
    """The gradient of x, and those of the weights, all of them or none. `saved` is empty."""
    dx = torch.empty_like(x)
    if needs_weights:
        return dx, with_weights(do, x, mask, weights, options, dx)
    launch_backward(do, x, mask, weights, options, dx, None)
    return dx, None


def launch_backward(
    do: Tensor,
    x: Tensor,
    mask: Tensor | None,
    weights: TransitionWeights,
    options: TransitionOptions,
    dx: Tensor,
    operands: kernels.Operands | None,
) -> None:
    """Write the gradient of x into dx, and the operands of the gradients of the weights, unless they are None."""
    outputs = (dx,) * 5 if operands is None else operands
    tensors = (do, x, x if mask is None else mask, *_input_weights(x, weights), weights.out_weight, dx, *outputs)
    _launch("backward", kernels.backward_kernel, tensors, x, mask, weights, options, needs_weights=operands is not None)


def with_weights(
    do: Tensor, x: Tensor, mask: Tensor | None, w: TransitionWeights, options: TransitionOptions, dx: Tensor
) -> TransitionWeights:
    """Write the gradient of x, and return those of the weights: sums over chunks, in float32 if there are several."""
    rows, channels = x.shape
    chunk, has_bias = min(rows, CHUNK), w.a_bias is not None or w.b_bias is not None
    widths = (channels, channels, w.hidden, w.hidden * (1 if w.b_weight is None else 2))
    buffers = [torch.empty((chunk, n), dtype=w.product_dtype(), device=x.device) for n in widths]
    sums: list[Tensor] = []
    totals: list[Tensor] = []
    for first in range(0, rows, chunk):
        part = slice(first, min(first + chunk, rows))
        chunk_sums = x.new_empty((programs(x[part], w), 3, channels), dtype=torch.float32)
        y, d, u, dab = (buffer[: part.stop - first] for buffer in buffers)
        operands = kernels.Operands(y, d, u, dab, chunk_sums)
        launch_backward(do[part], x[part], None if mask is None else mask[part], w, options, dx[part], operands)
        sums.append(chunk_sums.sum(0))
        products = [_product(dab, y, widens=chunk < rows), _product(d, u, widens=chunk < rows)]
        products += [dab.sum(0, dtype=torch.float32)] if has_bias else []
        totals = [total.add_(more) for total, more in zip(totals, products, strict=True)] if totals else products
    return _split(totals, torch.stack(sums).sum(0), w)


def _split(totals: list[Tensor], sums: Tensor, w: TransitionWeights) -> TransitionWeights:
    """The gradients of all weights.

    Args:
        totals: the gradients of (a, b) and of the output. If a or b has a bias, then the sums of dab.
        sums: `Operands.sums` of all programs.
        w: the weights.
    """
    dab_weight, dout_weight, *dab_bias = totals
    biases = dab_bias[0] if dab_bias else dab_weight.new_empty(2 * w.hidden)
    halves = list(zip(dab_weight.split(w.hidden), biases.split(w.hidden), strict=False))
    return cast_gradients(TransitionWeights(sums[0], sums[1], *halves[0], *halves[-1], dout_weight, sums[2]), w)


def _product(a: Tensor, b: Tensor, *, widens: bool) -> Tensor:
    """a^T b, in float32 if asked for and torch can."""
    if widens and a.dtype.itemsize == 2:
        if a.is_cuda and WIDENS:
            return torch.mm(a.t(), b, out_dtype=torch.float32)
        return (a.t() @ b).float()
    return a.t() @ b


def _launch(
    step: str,
    kernel: StructuredKernel,
    tensors: tuple[Tensor, ...],
    x: Tensor,
    mask: Tensor | None,
    w: TransitionWeights,
    options: TransitionOptions,
    *,
    needs_weights: bool = False,
    halves: bool = False,
) -> None:
    tile = _TILES["forward, halves"] if halves else _tile(step, x, w)
    variant = kernels.Variant(
        **plan_constants(tile, x.device, w.product_dtype(), x.shape[1], halves=halves),
        H=w.hidden,
        BLOCK_H=tile.channels,
        GATED=w.b_weight is not None,
        HAS_BIAS=w.a_bias is not None or w.b_bias is not None,
        HAS_MASK=mask is not None,
        RESIDUAL=options.residual,
        NEEDS_WEIGHTS=needs_weights,
    )
    launch_rows(kernel, tile, x.shape[0], tensors, rows=x.shape[0], eps=options.eps, V=variant)


def _tile(step: str, x: Tensor, weights: TransitionWeights) -> Tile:
    kinds = ["wide"] if _row_bytes(weights) > _NARROW_BYTES or weights.product_dtype() == torch.float32 else []
    kinds = ["float32", *kinds] if weights.product_dtype() == torch.float32 else kinds
    if not kinds and cards.shared_memory_limit(x.device) < _SHARED_MEMORY:
        kinds = ["little shared memory"]
    return next(_TILES[name] for name in (*(f"{step}, {kind}" for kind in kinds), step) if name in _TILES)


def _row_bytes(weights: TransitionWeights) -> int:
    """Bytes of a row of x in the dtype of the products, in a tile."""
    return power_of_two(weights.out_weight.shape[0]) * weights.product_dtype().itemsize


def _input_weights(x: Tensor, w: TransitionWeights) -> tuple[Tensor, ...]:
    """Tensors that both kernels read: norm, and the products of the hidden channels."""
    b_weight = w.a_weight if w.b_weight is None else w.b_weight
    biases = [or_zeros(bias, x, w.hidden) for bias in (w.a_bias, w.b_bias)]
    return (*norm_parameters(w.norm_weight, w.norm_bias, x, x.shape[1]), w.a_weight, biases[0], b_weight, biases[1])
