"""Kernels that fill empty rows in place. A call without such rows pays for a few launches.

The attention gets a mask of these rows, so its output and its gradients are 0 there. Kernels then write to its output, and add
to its gradients, in place. Two autograd functions enclose the attention:

    forward     _AddGradients passes q, k, v, pair bias and gate on; the attention; a kernel fills o
    backward    _SaveCotangent saves dO; the attention computes its gradients; _AddGradients adds to them in place
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from evoattn.core.sizes import power_of_two
from evoattn.dispatch.autograd import once_differentiable
from evoattn.dispatch.axes import with_axes
from evoattn.empty_rows.kernels import (
    AddConstants,
    Array,
    FillConstants,
    RowSizes,
    fill_kernel,
    find_kernel,
    inputs_kernel,
    pairs_kernel,
)
from evoattn.empty_rows.means import MaskLimits, heads_first
from evoattn.kit.arguments import StructuredKernel
from evoattn.kit.launch import launch_kernel

_ROWS_AT_ONCE = 128
"""Rows whose weights `pairs_kernel` reads at a time."""

_Saved = list[Tensor]
"""dO and the means `[b,n,h,c]`: `_SaveCotangent.backward` leaves them for `_AddGradients.backward`, later in the same pass."""


class _AddGradients(torch.autograd.Function):
    """Return those of q, k, v, the pair bias and the gate that require a gradient. The backward adds to their gradients."""

    @staticmethod
    def forward(ctx: Any, saved: _Saved, settings: tuple[float, str], mask_bias: Tensor, stats: Tensor, *inputs: Any) -> Any:
        ctx.saved, ctx.settings = saved, settings
        *qkv, _, gate = inputs
        ctx.save_for_backward(mask_bias, stats, *qkv, gate)
        return tuple(x for x, need in zip(inputs, ctx.needs_input_grad[4:], strict=True) if need)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        mask_bias, stats, *inputs = ctx.saved_tensors
        scale, layout = ctx.settings
        if not ctx.saved:
            raise RuntimeError("the backward of the attention ran without that of its output")
        do, means = ctx.saved
        ctx.saved.clear()  # a graph that autograd retains holds no gradient
        q, k, v, gate, do = (None if x is None else heads_first(x, layout) for x in (*inputs, do))
        remaining = iter(grads)
        dq, dk, dv, dpair, dgate = all_grads = [next(remaining) if need else None for need in ctx.needs_input_grad[4:]]
        gradients = [None if x is None else heads_first(x, layout) for x in (dq, dk, dv, dgate)]
        gradients.append(None if dpair is None else with_axes(dpair, 5))
        add_gradients((q, k, v, gate), do, tuple(gradients), mask_bias, stats, means, scale)  # type: ignore[arg-type]
        return None, None, None, None, *all_grads


class _SaveCotangent(torch.autograd.Function):
    """Return the output of the attention. The backward saves its gradient for `_AddGradients`."""

    @staticmethod
    def forward(ctx: Any, saved: _Saved, o: Tensor, means: Tensor) -> Tensor:
        ctx.saved = saved
        ctx.save_for_backward(means)
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[None, Tensor, None]:
        ctx.saved[:] = do, *ctx.saved_tensors
        return None, do, None


def attend(
    attention: Callable[..., Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask_bias: Tensor,
    pair_bias: Tensor | None,
    gate: Tensor | None = None,
    *,
    scale: float | None,
    layout: str,
    limits: MaskLimits,
) -> Tensor:
    """The output of `attention`, with the mean of v in rows whose mask bias is low at every key.

    Args:
        attention: `evoformer_attention` with this scale and layout.
        q, k, v: `[*, N, H, L, C]` or `[*, N, L, H, C]`, of the same heads and one dtype of at most 32 bits.
        mask_bias: `[*, N, 1, 1, K]`; every axis may be 1. It gets no gradient.
        pair_bias: `[*, 1, H, Q, K]`, with all leading axes of q or all of size 1. Without a gradient the last three may be 1.
        gate: of O's shape and dtype, or None. The means are gated too.
        scale, layout: what `attention` has; a scale of None is `D ** -0.5`.
        limits: of the mask bias.
    """
    lead = q.shape[:-3]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if len(lead) != 2:
        q, k, v, mask_bias = (_with_one_lead(x) for x in (q, k, v, mask_bias.expand(*lead, *mask_bias.shape[-3:])))
        pair_bias = None if pair_bias is None else _with_one_lead(with_axes(pair_bias, len(lead) + 3))
        gate = None if gate is None else _with_one_lead(gate)
        o = attend(attention, q, k, v, mask_bias, pair_bias, gate, scale=scale, layout=layout, limits=limits)
        return o.reshape(*lead, *o.shape[-3:])
    every_key = mask_bias.detach().expand(*lead, 1, 1, k.shape[-2 if layout == "bnhld" else -3])
    alive, stats = find_rows(every_key, limits)
    inputs: tuple[Tensor | None, ...] = (q, k, v, pair_bias, gate)
    saved: _Saved = []
    needs = [torch.is_grad_enabled() and x is not None and x.requires_grad for x in inputs]
    if any(needs):
        tracked = iter(_AddGradients.apply(saved, (scale, layout), every_key, stats, *inputs))  # type: ignore[no-untyped-call]
        inputs = tuple(next(tracked) if need else x for x, need in zip(inputs, needs, strict=True))
    o = attention(*inputs[:3], mask=alive, mask_bias=mask_bias, pair_bias=inputs[3], gate=inputs[4])
    o_view, v_view, gate_view = (None if x is None else heads_first(x.detach(), layout) for x in (o, v, gate))
    means = fill_output(o_view, v_view, gate_view, every_key, stats)  # type: ignore[arg-type]
    return _SaveCotangent.apply(saved, o, means) if any(needs) else o  # type: ignore[no-untyped-call, no-any-return]


def _with_one_lead(x: Tensor) -> Tensor:
    """Flatten the leading axes but the last to b: `[b,n,...]`."""
    return x[None] if x.ndim == 4 else x.flatten(0, -5)


def find_rows(mask_bias: Tensor, limits: MaskLimits) -> tuple[Tensor, Tensor]:
    """Find the empty rows of a mask bias `[b,n,1,1,k]`.

    Returns:
        alive: bool `[b,n,k]`, False at every key of an empty row. In other rows False where the mask bias is so low that it
            leaves a key no weight, whatever the scores: the attention then skips keys, and answers the same.
        stats: float32 `[2, b * n]`. First the weight of each key that counts in an empty row, 0 for other rows. Then the
            smallest mask bias of a key that counts.
    """
    b, n, _, _, lk = mask_bias.shape
    alive = torch.empty(b, n, lk, dtype=torch.uint8, device=mask_bias.device)
    stats = torch.empty(2, b * n, dtype=torch.float32, device=mask_bias.device)
    numbers = {"limit": limits.empty, "equal": limits.equal, "n_rows": n, "lk": lk, "total": b * n}
    block_k = min(1024, power_of_two(lk))
    _launch(find_kernel, b * n, {"mask": mask_bias}, alive, stats, **numbers, BLOCK_K=block_k, num_warps=4)
    return alive.view(torch.bool), stats


def fill_output(o: Tensor, v: Tensor, gate: Tensor | None, mask_bias: Tensor, stats: Tensor) -> Tensor:
    """Write the mean of v `[b,n,h,k,c]` to the empty rows of o `[b,n,h,q,c]`, times sigmoid(gate) if there is a gate.

    Returns the means `[b,n,h,c]`, of empty rows alone.
    """
    b, n, h, lq, c = o.shape
    _, block_c, block_l, warps = _blocks(c, c)
    means = torch.empty(b, n, h, c, dtype=o.dtype, device=o.device)
    views = {"v": v, "o": o, "gate": o if gate is None else gate, "mask": mask_bias}
    sizes, variant = RowSizes(n, h, lq, v.shape[-2], b * n), FillConstants(c, block_c, block_l, gate is not None)
    _launch(fill_kernel, b * n * h, views, means, stats, sizes=sizes, V=variant, num_warps=warps)
    return means


def add_gradients(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor | None],
    do: Tensor,
    gradients: tuple[Tensor | None, ...],
    mask_bias: Tensor,
    stats: Tensor,
    means: Tensor,
    scale: float,
) -> None:
    """Add what empty rows give to the gradients of q, k, v and the pair bias, in a fixed order, and write those of the gate.

    Args:
        inputs: q, k, v, and the gate or None.
        do: the gradient of the output.
        gradients: those of the inputs and of the pair bias `[b|1,1,h,q,k]`; None for each that is not wanted.
        mask_bias, stats, means: what `find_rows` takes and returns, and what `fill_output` returns.
        scale: factor on q k.
    """
    q, k, v, gate = inputs
    (b, n, h, lq, d), (lk, c) = q.shape, v.shape[-2:]
    block_d, block_c, block_l, warps = _blocks(d, c)
    views = {"v": v, "gate": do if gate is None else gate, "dO": do, "mask": mask_bias}
    values = {"sizes": RowSizes(n, h, lq, lk, b * n), "num_warps": warps, "num_stages": 1}
    *input_gradients, dpair = gradients
    needs = [x is not None for x in input_gradients]
    if any(needs):
        blocks_d = -(-d // block_d) if needs[0] or needs[1] else 1
        more = {"q": q, "k": k}
        more |= {name: q if x is None else x for name, x in zip(("dq", "dk", "dv", "dgate"), input_gradients, strict=True)}
        variant = AddConstants(d, c, block_d, block_c, block_l, blocks_d, gate is not None, *needs)
        _launch(inputs_kernel, b * n * h * blocks_d, views | more, stats, means, **values, scale=scale, V=variant)
    if dpair is not None:
        blocks_q, blocks_k = -(-lq // block_l), -(-lk // block_l)
        numbers = {"each": b * n // dpair.shape[0], "blocks_q": blocks_q, "blocks_k": blocks_k, "FLAGS": _ROWS_AT_ONCE}
        fill_variant, programs = FillConstants(c, block_c, block_l, gate is not None), dpair.shape[0] * h * blocks_q * blocks_k
        _launch(pairs_kernel, programs, views | {"dpair": dpair}, stats, means, **values, **numbers, V=fill_variant)


def _launch(kernel: StructuredKernel, programs: int, views: dict[str, Tensor], *pointers: Tensor, **values: Any) -> None:
    """Launch a kernel of views and then pointers, both in the order of its parameters."""
    strides = {name: Array(None, *x.stride()) for name, x in views.items()}
    launch_kernel(kernel, programs, (*views.values(), *pointers), **strides, **values)


def _blocks(d: int, c: int) -> tuple[int, int, int, int]:
    """Tiles of q's channels, of v's channels and of a length, and warps: so that 256 float32 channels fit in 99 KiB."""
    block_c = power_of_two(c)
    block_d = min(64 if block_c <= 128 else 32, power_of_two(d))
    return block_d, block_c, 64 if block_c <= 128 else 32, 4 if block_c <= 64 else 8
