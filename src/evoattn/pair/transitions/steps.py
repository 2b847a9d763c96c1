"""The steps of the transition: launches of `kernels`.

Shapes: x and what is made of it `[R, C]`, mask `[R]`. All tensors are contiguous.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from evoattn.backends.triton import cards
from evoattn.backends.triton.cards import split_precision
from evoattn.backends.triton.launch import launch_kernel
from evoattn.core.sizes import power_of_two
from evoattn.pair.checking import result_dtype
from evoattn.pair.launching import Tile, affine, shift
from evoattn.pair.transitions import kernels
from evoattn.pair.transitions.values import Options, Weights

__all__ = ["Operands", "backward", "forward", "programs", "takes"]

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
    "backward, float32": Tile(64, 32, 8, 1),
    "backward, little shared memory": Tile(64, 32, 4, 2),
}
"""By what is launched. The first two are for up to 128 channels in 16 bits: the fastest of 8 each on an H100 at 1,024 residues.
Wide ones are for more channels, and for float32. With 64 rows, 8 warps and 256 channels in 16 bits, Triton 3.6 compiles a
backward for Hopper that writes wrong numbers, some of them past the end of its tensors.
"""


class Operands(NamedTuple):
    """Operands of the products that are the gradients of the weights, for a chunk of rows.

    Shapes: y (the normalised rows) and d (mask times do) `[R, C]`, u `[R, H]`, dab (da, then db if there is one) `[R, 2 H]`.
    """

    y: Tensor
    d: Tensor
    u: Tensor
    dab: Tensor


def takes(x: Tensor, weights: Weights) -> bool:
    """Return whether the kernels take rows of this size and dtype on this card."""
    large = cards.shared_memory_limit(x.device) >= _SHARED_MEMORY
    if weights.dtype == torch.float32 and (not large or (cards.capability(x.device) or (0,))[0] == _TENSOR_MEMORY):
        return False
    return _row_bytes(weights) <= (_MOST_BYTES if large else _NARROW_BYTES)


def programs(x: Tensor, weights: Weights) -> int:
    """The number of programs of the backward of x."""
    return -(-x.shape[0] // _tile("backward", x, weights).rows)


def forward(x: Tensor, mask: Tensor | None, weights: Weights, options: Options, out: Tensor | None = None) -> Tensor:
    """Compute the update, or x + update. It is written into `out`, which may be x itself, or into a new tensor."""
    out = torch.empty_like(x, dtype=result_dtype(x, weights, options)) if out is None else out
    w = weights
    tensors = (x, x if mask is None else mask, *_input_weights(x, w), w.out_weight, shift(w.out_bias, x, x.shape[1]), out)
    _launch("forward", kernels.forward_kernel, tensors, x, mask, weights, options)
    return out


def backward(
    do: Tensor,
    x: Tensor,
    mask: Tensor | None,
    weights: Weights,
    options: Options,
    dx: Tensor,
    operands: Operands | None,
    sums: Tensor | None,
) -> None:
    """Write the gradient of x, and what the gradients of the weights are made of.

    Args:
        do: the gradient of the result.
        dx: is written.
        operands: are written. None: none of them, nor `sums`.
        sums: of each program over its rows, `[programs, 3, C]` in float32: the gradients of the norm's weight and bias, and of
            the output's bias.
    """
    outputs = (dx,) * 5 if operands is None or sums is None else (*operands, sums)
    tensors = (do, x, x if mask is None else mask, *_input_weights(x, weights), weights.out_weight, dx, *outputs)
    _launch("backward", kernels.backward_kernel, tensors, x, mask, weights, options, NEEDS_WEIGHTS=operands is not None)


def _launch(
    step: str,
    kernel: Any,
    tensors: tuple[Tensor, ...],
    x: Tensor,
    mask: Tensor | None,
    w: Weights,
    options: Options,
    **more: Any,
) -> None:
    """Launch a step's kernel over all rows of x."""
    (rows, channels), tile = x.shape, _tile(step, x, w)
    constants = {
        "C": channels,
        "H": w.hidden,
        "BLOCK_R": tile.rows,
        "BLOCK_C": power_of_two(channels),
        "BLOCK_H": min(tile.channels, power_of_two(w.hidden)),
        "GATED": w.b_weight is not None,
        "HAS_BIAS": w.a_bias is not None or w.b_bias is not None,
        "HAS_MASK": mask is not None,
        "RESIDUAL": options.residual,
        "FAST": cards.capability(x.device) is not None,
        "PRECISION": split_precision(w.dtype, channels),
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
    launch_kernel(kernel, -(-rows // tile.rows), tensors, rows, options.eps, **constants, **more)


def _tile(step: str, x: Tensor, weights: Weights) -> Tile:
    kinds = ["wide"] if _row_bytes(weights) > _NARROW_BYTES or weights.dtype == torch.float32 else []
    kinds = ["float32", *kinds] if weights.dtype == torch.float32 else kinds
    if not kinds and cards.shared_memory_limit(x.device) < _SHARED_MEMORY:
        kinds = ["little shared memory"]
    return next(_TILES[name] for name in (*(f"{step}, {kind}" for kind in kinds), step) if name in _TILES)


def _row_bytes(weights: Weights) -> int:
    """Bytes of a row of x in the dtype of the products, in a tile."""
    return power_of_two(weights.out_weight.shape[0]) * weights.dtype.itemsize


def _input_weights(x: Tensor, w: Weights) -> tuple[Tensor, ...]:
    """Tensors that both kernels read: norm, and the products of the hidden channels."""
    b_weight = w.a_weight if w.b_weight is None else w.b_weight
    biases = [shift(bias, x, w.hidden) for bias in (w.a_bias, w.b_bias)]
    return (*affine(w.norm_weight, w.norm_bias, x, x.shape[1]), w.a_weight, biases[0], b_weight, biases[1])
