"""The steps of triangle multiplication and of its backward: launches of `kernels`.

Shapes: z `[B, L, L, C]`, mask `[B, L, L]`. The halves, their product t and the gradients of these have channels first, and
sides of P >= L: `[channels, B, P, P]`, with zeros outside L. What the backward makes for the weights has R = B P P rows.
All tensors are contiguous.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from evoattn.backends.triton.cards import capability, shared_memory_limit, split_precision
from evoattn.backends.triton.launch import launch_kernel
from evoattn.core.sizes import power_of_two
from evoattn.pair.checking import result_dtype
from evoattn.pair.launching import Tile, affine, narrowed, shift
from evoattn.pair.multiplication import kernels
from evoattn.pair.multiplication.values import Options, Weights

__all__ = ["gate_in", "gate_in_backward", "gate_out", "gate_out_backward", "takes"]

_MOST_BYTES = 512
"""Of a row. The kernels hold it in the registers of one program, and the weights of a product in shared memory."""

_SHARED_MEMORY = 163_840
"""Bytes that a program needs for more than 128 channels."""


_TILES = {
    "gate_in": Tile(128, 64, 8, 2),
    "gate_out": Tile(64, 0, 4, 1),
    "gate_out_backward": Tile(32, 0, 4, 1),
    "gate_in_backward": Tile(64, 32, 4, 3),
}
"""For 128 channels in 16 bits: the fastest of 30, 17, 14 and 40 on an H100 at 1,024 residues."""


def takes(z: Tensor, weights: Weights) -> bool:
    """Return whether the kernels take weights of these sizes."""
    channels = power_of_two(max(weights.p_out_weight.shape))
    fits = channels <= 128 or shared_memory_limit(z.device) >= _SHARED_MEMORY
    return fits and channels * weights.dtype.itemsize <= _MOST_BYTES


def gate_in(z: Tensor, mask: Tensor | None, weights: Weights, options: Options, padded: int) -> Tensor:
    """Make both halves, `mask * sigmoid(g_in(y)) * p_in(y)` with `y = norm_in(z)`: `[2 D, B, P, P]`."""
    w, channels = weights, weights.p_in_weight.shape[0]
    ab = torch.empty((channels, z.shape[0], padded, padded), dtype=w.dtype, device=z.device)
    tensors = (z, z if mask is None else mask, *_input_weights(z, w), ab)
    launch = _Launch("gate_in", z, w, padded, options.eps)
    launch(kernels.gate_in_kernel, tensors, C=z.shape[-1], N=channels, HAS_MASK=mask is not None)
    return ab


def gate_out(z: Tensor, t: Tensor, weights: Weights, options: Options, out: Tensor | None = None) -> Tensor:
    """Make the update `sigmoid(g_out(y)) * p_out(norm_out(t))`, or z + update, in `out` if it is given.

    `out` may be z: a program reads its rows before it writes them.
    """
    if out is None:
        out = torch.empty_like(z, dtype=result_dtype(z, weights, options))
    tensors = (z, t, *_output_weights(z, weights), out)
    launch = _Launch("gate_out", z, weights, t.shape[-1], options.eps)
    launch(kernels.gate_out_kernel, tensors, C=z.shape[-1], D=t.shape[0], RESIDUAL=options.residual)
    return out


def gate_out_backward(
    do: Tensor, z: Tensor, t: Tensor, weights: Weights, options: Options, *, needs_weights: bool
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor] | None]:
    """Differentiate `gate_out`, but for what flows through y.

    Returns:
        The gradient of t; that of the gate's product g_out(y), `[R, C]`; and for the weights the gradient of the output product
        `[R, C]`, its input `[D, R]`, and the gradients of the norm's weight and bias `[2, D]`.
    """
    rows, hidden, channels = t[0].numel(), t.shape[0], z.shape[-1]
    launch = _Launch("gate_out_backward", z, weights, t.shape[-1], options.eps)
    buffer = functools.partial(torch.empty, dtype=weights.dtype, device=z.device)
    dt, dg = buffer(t.shape), buffer((rows, channels))
    du, n, sums = dt, dt, dt
    if needs_weights:
        du, n = buffer((rows, channels)), buffer((hidden, rows))
        sums = buffer((launch.programs, 2, hidden), dtype=torch.float32)
    tensors = (do, z, t, *_output_weights(z, weights), dt, dg, du, n, sums)
    launch(kernels.gate_out_backward_kernel, tensors, C=channels, D=hidden, NEEDS_WEIGHTS=needs_weights)
    return dt, dg, (du, n, sums.sum(0)) if needs_weights else None


def gate_in_backward(
    dab: Tensor,
    dg_out: Tensor,
    do: Tensor,
    z: Tensor,
    mask: Tensor | None,
    weights: Weights,
    options: Options,
    *,
    needs_weights: bool,
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor] | None]:
    """Differentiate `gate_in`, and everything else that reads z.

    Args:
        dab: the gradient of the halves.
        dg_out: the gradient of the gate's product, `[R, C]`.
        do: the gradient of the result.

    Returns:
        The gradient of z; and for the weights the gradients of both products, p then g, `[4 D, R]`, the rows y that were
        multiplied `[R, C]`, and the gradients of the norm's weight and bias `[2, C]`.
    """
    w, rows, count, channels = weights, dab[0].numel(), dab.shape[0], z.shape[-1]
    launch = _Launch("gate_in_backward", z, w, dab.shape[-1], options.eps)
    buffer = functools.partial(torch.empty, dtype=w.dtype, device=z.device)
    dz = torch.empty_like(z)
    dpg, y, sums = dz, dz, dz
    if needs_weights:
        dpg, y = buffer((2 * count, rows)), buffer((rows, channels))
        sums = buffer((launch.programs, 2, channels), dtype=torch.float32)
    tensors = (dab, dg_out, do, z, z if mask is None else mask, *_input_weights(z, w), w.g_out_weight, dz, dpg, y, sums)
    flags = {"HAS_MASK": mask is not None, "RESIDUAL": options.residual, "NEEDS_WEIGHTS": needs_weights}
    launch(kernels.gate_in_backward_kernel, tensors, C=channels, N=count, **flags)
    return dz, (dpg, y, sums.sum(0)) if needs_weights else None


class _Launch:
    """One launch of a step's kernel over all rows of the padded square. `step` is its name in the table of tiles."""

    def __init__(self, step: str, z: Tensor, weights: Weights, padded: int, eps: float) -> None:
        self.tile = narrowed(_TILES[step], max(z.shape[-1], weights.p_out_weight.shape[1]), weights.dtype)
        self.length, self.padded, self.rows, self.eps = z.shape[1], padded, z.shape[0] * padded * padded, eps
        self.fast = capability(z.device) is not None
        self.precision = split_precision(weights.dtype, z.shape[-1])
        self.programs = -(-self.rows // self.tile.rows)

    def __call__(self, kernel: Any, tensors: tuple[Tensor, ...], **constants: int) -> None:
        blocks = {"BLOCK_R": self.tile.rows, "BLOCK_C": power_of_two(constants["C"])}
        if "N" in constants:
            blocks["BLOCK_N"] = min(self.tile.channels, power_of_two(constants["N"]))
        if "D" in constants:
            blocks["BLOCK_D"] = power_of_two(constants["D"])
        flags: dict[str, Any] = {"PADDED": self.padded != self.length, "NARROW": self.padded < self.tile.rows}
        flags |= {"FAST": self.fast, "PRECISION": self.precision}
        compiled = {"num_warps": self.tile.warps, "num_stages": self.tile.stages}
        numbers = (self.rows, self.length, self.padded, self.eps)
        launch_kernel(kernel, self.programs, tensors, *numbers, **constants, **blocks, **flags, **compiled)


def _input_weights(z: Tensor, w: Weights) -> tuple[Tensor, ...]:
    """Tensors that both kernels of the input read: norm and products."""
    count, channels = w.p_in_weight.shape
    norms = affine(w.norm_in_weight, w.norm_in_bias, z, channels)
    return (*norms, w.p_in_weight, shift(w.p_in_bias, z, count), w.g_in_weight, shift(w.g_in_bias, z, count))


def _output_weights(z: Tensor, w: Weights) -> tuple[Tensor, ...]:
    """Tensors that both kernels of the output read: norms, output product, gate."""
    channels, hidden = w.p_out_weight.shape
    norms = affine(w.norm_in_weight, w.norm_in_bias, z, channels) + affine(w.norm_out_weight, w.norm_out_bias, z, hidden)
    return (*norms, w.p_out_weight, shift(w.p_out_bias, z, channels), w.g_out_weight, shift(w.g_out_bias, z, channels))
