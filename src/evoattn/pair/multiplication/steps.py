"""Triangle multiplication and its backward by kernels: the steps, what the forward saves, and the gradients.

The forward keeps z, both halves and their product. The backward normalises again what it needs, in the kernels that read it.
All steps but the product compute each position from itself. So the kernels take the part of a process that holds some rows or
columns of z as squares of side 1, which need no padding.

Shapes: z `[B, L, L, C]`, mask `[B, L, L]`. The halves, their product t and the gradients of these have channels first, and
sides of P >= L: `[channels, B, P, P]`, with zeros outside L. What the backward makes for the weights has R = B P P rows.
All tensors are contiguous.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from evoattn.core.sizes import power_of_two
from evoattn.dispatch.distributed import Split
from evoattn.kit import cards
from evoattn.kit.arguments import StructuredKernel
from evoattn.pair.checking import cast_gradients, result_dtype
from evoattn.pair.launching import (
    Tile,
    launch_rows,
    norm_parameters,
    or_zeros,
    plan_constants,
    split_products,
    takes_halves,
)
from evoattn.pair.multiplication import kernels, products
from evoattn.pair.products.call import WIDEST
from evoattn.pair.products.steps import multiply_squares
from evoattn.pair.values import MultiplicationOptions, MultiplicationWeights

_MOST_BYTES = 512
"""Of a row. The kernels hold it in the registers of one program, and the weights of a product in shared memory."""

SHARED_MEMORY = 163_840
"""Bytes that a program needs for more than 128 channels."""

_TILES = {
    "gate_in": Tile(128, 64, 8, 2),
    "gate_out": Tile(64, 0, 4, 1),
    "gate_out_backward": Tile(32, 0, 4, 1),
    "gate_in_backward": Tile(64, 32, 4, 3),
}
"""For 128 channels in 16 bits: the fastest of 30, 17, 14 and 40 on an H100 at 1,024 residues."""


_HALVES_TILES = {"gate_in": Tile(64, 64, 4, 1), "gate_in, no wgmma": Tile(64, 32, 4, 1), "gate_out": Tile(64, 0, 4, 1)}
"""For float32 by products of float16, of up to 128 channels. Without Hopper's wgmma, 64 channels at a time spill 800 bytes."""

_SIDES = 16
"""The sides of the squares are multiples of this if they are split: loads along a row are 16 bytes wide."""


def takes(device: torch.device, dtype: torch.dtype, channels: int, hidden: int) -> bool:
    """Return whether the kernels take so many channels in this dtype of the products on this card."""
    widest = power_of_two(max(channels, hidden))
    fits = widest <= 128 or cards.shared_memory_limit(device) >= SHARED_MEMORY
    return fits and widest * dtype.itemsize <= _MOST_BYTES


def forward(
    z: Tensor,
    mask: Tensor | None,
    weights: MultiplicationWeights,
    options: MultiplicationOptions,
    split: Split | None = None,
    save: bool = True,
    out: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Compute the result, and with `save` return what `products.forward` saves and the product t besides.

    z is `[B, L, L, C]`, or the part `[B, I, J, C]` of this process; the mask is like it. `out` may be z; the result is no view.
    """
    if split is None and not save and z.shape[1] <= WIDEST and takes_halves(z, weights.product_dtype()):
        return (_forward_in_halves(z, mask, weights, options, out),)
    squares, padded = (z, products.side(z.shape[1])) if split is None else (_ones(z), 1)
    ab = gate_in(squares, mask, weights, options, padded)
    if split is not None:
        ab = ab.view(-1, *z.shape[:-1])
    t, saved = products.forward(ab, split, outgoing=options.outgoing, save=save)
    del ab  # before the result is allocated
    # autograd takes no view that a function of Python returns for a result that may change in place
    out = torch.empty_like(z, dtype=result_dtype(z, weights, options)) if out is None else out
    gate_out(squares, t.view(-1, squares.shape[0], padded, padded), weights, options, out.view(squares.shape))
    return (out, *saved, t) if save else (out,)


def _forward_in_halves(
    z: Tensor, mask: Tensor | None, weights: MultiplicationWeights, options: MultiplicationOptions, out: Tensor | None
) -> Tensor:
    """`forward` by products of float16. Halves of incoming edges are turned, so that the product sums over their rows."""
    length, w = z.shape[1], split_products(weights)
    ab = gate_in(z, mask, w, options, length + -length % _SIDES, halves=True)
    t = multiply_squares(ab)
    del ab
    out = torch.empty_like(z, dtype=result_dtype(z, weights, options)) if out is None else out
    gate_out(z, t, w, options, out, halves=True)
    return out


def backward(
    do: Tensor,
    z: Tensor,
    mask: Tensor | None,
    saved: tuple[Tensor, ...],
    weights: MultiplicationWeights,
    options: MultiplicationOptions,
    needs_weights: bool,
    split: Split | None = None,
) -> tuple[Tensor, MultiplicationWeights | None]:
    """The gradient of z, and those of the weights, all of them or none. `saved` is what `forward` returns after its result."""
    *factors, t = saved
    do, squares = (do, z) if split is None else (_ones(do), _ones(z))
    shape = (-1, *t.shape[1:]) if split is None else (-1, squares.shape[0], 1, 1)
    dt, dg, out_operands = gate_out_backward(do, squares, t.view(shape), weights, options, needs_weights=needs_weights)
    dab = products.backward(dt.view(t.shape), factors, split, outgoing=options.outgoing).view(shape)
    del dt
    dz, in_operands = gate_in_backward(dab, dg, do, squares, mask, weights, options, needs_weights=needs_weights)
    del dab
    if out_operands is None or in_operands is None:
        return dz.view(z.shape), None
    return dz.view(z.shape), _weight_gradients(dg, out_operands, in_operands, weights)


def _ones(x: Tensor) -> Tensor:
    """The positions of x `[B, I, J, C]` as squares of side 1."""
    return x.view(-1, 1, 1, x.shape[-1])


def _weight_gradients(
    dg: Tensor, out_operands: kernels.OutOperands, in_operands: kernels.InOperands, w: MultiplicationWeights
) -> MultiplicationWeights:
    """The gradients of all weights, from their operands and sums, which the steps return."""
    du, n, norm_out = out_operands
    dpg, y, norm_in = in_operands
    dp_in, dg_in = dpg.chunk(2)
    dp_weight, dg_weight = (dpg @ y).chunk(2)
    gradients = MultiplicationWeights(
        norm_in_weight=norm_in[0],
        norm_in_bias=norm_in[1],
        p_in_weight=dp_weight,
        p_in_bias=None if w.p_in_bias is None else dp_in.sum(1),
        g_in_weight=dg_weight,
        g_in_bias=None if w.g_in_bias is None else dg_in.sum(1),
        norm_out_weight=norm_out[0],
        norm_out_bias=norm_out[1],
        p_out_weight=du.t() @ n.t(),
        p_out_bias=None if w.p_out_bias is None else du.sum(0),
        g_out_weight=dg.t() @ y,
        g_out_bias=None if w.g_out_bias is None else dg.sum(0),
    )
    return cast_gradients(gradients, w)


def gate_in(
    z: Tensor,
    mask: Tensor | None,
    weights: MultiplicationWeights,
    options: MultiplicationOptions,
    padded: int,
    *,
    halves: bool = False,
) -> Tensor:
    """Make both halves, `mask * sigmoid(g_in(y)) * p_in(y)` with `y = norm_in(z)`: `[2 D, B, P, P]`.

    halves: whether the weights of products are split. Then incoming edges have z[j, i] at (i, j).
    """
    w, channels = weights, weights.p_in_weight.shape[0]
    ab = torch.empty((channels, z.shape[0], padded, padded), dtype=w.product_dtype(), device=z.device)
    tensors = (z, z if mask is None else mask, *_input_weights(z, w), ab)
    flags = {"TURNED": halves and not options.outgoing, "HAS_MASK": mask is not None}
    tile = _tile("gate_in", z, w, halves)
    _launch(kernels.gate_in_kernel, tile, tensors, z, w, padded, options.eps, halves, **flags)
    return ab


def gate_out(
    z: Tensor,
    t: Tensor,
    weights: MultiplicationWeights,
    options: MultiplicationOptions,
    out: Tensor,
    *,
    halves: bool = False,
) -> None:
    """Write the update `sigmoid(g_out(y)) * p_out(norm_out(t))`, or z + update, into `out`.

    `out` may be z: a program reads its rows before it writes them. halves: whether the weights of products are split.
    """
    tensors = (z, t, *_output_weights(z, weights), out)
    tile = _tile("gate_out", z, weights, halves)
    _launch(kernels.gate_out_kernel, tile, tensors, z, weights, t.shape[-1], options.eps, halves, RESIDUAL=options.residual)


def gate_out_backward(
    do: Tensor, z: Tensor, t: Tensor, weights: MultiplicationWeights, options: MultiplicationOptions, *, needs_weights: bool
) -> tuple[Tensor, Tensor, kernels.OutOperands | None]:
    """Differentiate `gate_out`, but for what flows through y.

    Returns:
        The gradient of t; that of the gate's product g_out(y), `[R, C]`; and what the weights need, `[R, C]`, `[D, R]` and
        `[2, D]`, whose sums are the gradients of the norm's weight and bias.
    """
    rows, hidden, channels = t[0].numel(), t.shape[0], z.shape[-1]
    tile = _tile("gate_out_backward", z, weights)
    buffer = functools.partial(torch.empty, dtype=weights.product_dtype(), device=z.device)
    dt, dg = torch.empty_like(t), buffer((rows, channels))  # t is float32 for float16, and so is its gradient
    du, n, sums = dt, dt, dt
    if needs_weights:
        du, n = buffer((rows, channels)), buffer((hidden, rows))
        sums = buffer((-(-rows // tile.rows), 2, hidden), dtype=torch.float32)
    tensors = (do, z, t, *_output_weights(z, weights), dt, dg, du, n, sums)
    padded = t.shape[-1]
    _launch(kernels.gate_out_backward_kernel, tile, tensors, z, weights, padded, options.eps, NEEDS_WEIGHTS=needs_weights)
    return dt, dg, kernels.OutOperands(du, n, sums.sum(0)) if needs_weights else None


def gate_in_backward(
    dab: Tensor,
    dg_out: Tensor,
    do: Tensor,
    z: Tensor,
    mask: Tensor | None,
    weights: MultiplicationWeights,
    options: MultiplicationOptions,
    *,
    needs_weights: bool,
) -> tuple[Tensor, kernels.InOperands | None]:
    """Differentiate `gate_in`, and everything else that reads z.

    Args:
        dab: the gradient of the halves.
        dg_out: the gradient of the gate's product, `[R, C]`.
        do: the gradient of the result.

    Returns:
        The gradient of z; and what the weights need, `[4 D, R]`, `[R, C]` and `[2, C]`, whose sums are the gradients of the
        norm's weight and bias.
    """
    w, rows, count, channels = weights, dab[0].numel(), dab.shape[0], z.shape[-1]
    tile = _tile("gate_in_backward", z, w)
    buffer = functools.partial(torch.empty, dtype=w.product_dtype(), device=z.device)
    dz = torch.empty_like(z)
    dpg, y, sums = dz, dz, dz
    if needs_weights:
        dpg, y = buffer((2 * count, rows)), buffer((rows, channels))
        sums = buffer((-(-rows // tile.rows), 2, channels), dtype=torch.float32)
    tensors = (dab, dg_out, do, z, z if mask is None else mask, *_input_weights(z, w), w.g_out_weight, dz, dpg, y, sums)
    flags = {"HAS_MASK": mask is not None, "RESIDUAL": options.residual, "NEEDS_WEIGHTS": needs_weights}
    _launch(kernels.gate_in_backward_kernel, tile, tensors, z, w, dab.shape[-1], options.eps, **flags)
    return dz, kernels.InOperands(dpg, y, sums.sum(0)) if needs_weights else None


def _tile(step: str, z: Tensor, weights: MultiplicationWeights, halves: bool = False) -> Tile:
    if halves:
        elsewhere = f"{step}, no wgmma"
        hopper = (cards.capability(z.device) or (0,))[0] == 9
        return _HALVES_TILES[step if hopper or elsewhere not in _HALVES_TILES else elsewhere]
    return _narrow(_TILES[step], max(z.shape[-1], weights.p_out_weight.shape[1]), weights.product_dtype())


@functools.cache
def _narrow(tile: Tile, channels: int, dtype: torch.dtype) -> Tile:
    """A tile that suits 128 channels in 16 bits, or a smaller one if a row takes more registers."""
    wider = max(1, power_of_two(channels) // 128) * (dtype.itemsize // 2)
    return Tile(max(16, tile.rows // wider), max(16, tile.channels // wider), tile.warps, tile.stages if wider == 1 else 1)


def _launch(
    kernel: StructuredKernel,
    tile: Tile,
    tensors: tuple[Tensor, ...],
    z: Tensor,
    w: MultiplicationWeights,
    padded: int,
    eps: float,
    halves: bool = False,
    **flags: bool,
) -> None:
    """Launch a step's kernel over all positions of the padded squares."""
    length, hidden, rows = z.shape[1], w.p_out_weight.shape[1], z.shape[0] * padded * padded
    variant = kernels.Variant(
        **plan_constants(tile, z.device, w.product_dtype(), z.shape[-1], halves=halves),
        D=hidden,
        BLOCK_D=power_of_two(hidden),
        BLOCK_N=min(tile.channels, power_of_two(2 * hidden)),
        PADDED=padded != length,
        NARROW=padded < tile.rows,
        **flags,
    )
    launch_rows(kernel, tile, rows, tensors, squares=kernels.Squares(rows, length, padded), eps=eps, V=variant)


def _input_weights(z: Tensor, w: MultiplicationWeights) -> tuple[Tensor, ...]:
    """Tensors that both kernels of the input read: norm and products."""
    count, channels = w.p_in_weight.shape
    norms = norm_parameters(w.norm_in_weight, w.norm_in_bias, z, channels)
    return (*norms, w.p_in_weight, or_zeros(w.p_in_bias, z, count), w.g_in_weight, or_zeros(w.g_in_bias, z, count))


def _output_weights(z: Tensor, w: MultiplicationWeights) -> tuple[Tensor, ...]:
    """Tensors that both kernels of the output read: norms, output product, gate."""
    channels, hidden = w.p_out_weight.shape
    norms = norm_parameters(w.norm_in_weight, w.norm_in_bias, z, channels) + norm_parameters(
        w.norm_out_weight, w.norm_out_bias, z, hidden
    )
    return (*norms, w.p_out_weight, or_zeros(w.p_out_bias, z, channels), w.g_out_weight, or_zeros(w.g_out_bias, z, channels))
