"""The launch of a pass with few queries and few keys."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from evoattn.backends.triton.kernels.few import FewConstants, FewSizes, Wanted, backward_few_kernel, forward_few_kernel
from evoattn.backends.triton.tiles.few import FewTiles
from evoattn.core.inputs import Cotangents, Inputs, Outputs
from evoattn.core.problem import Needs
from evoattn.core.sizes import power_of_two
from evoattn.kit.arguments import View, lse_view, view
from evoattn.kit.strides import Strided, contiguous, grain, strided, strides


def plan_forward_few(inputs: Inputs, tiles: FewTiles, *, scale: float, layout: str) -> Callable[..., None]:
    """Plan o, lse and reference of canonical tensors with these strides, for which `few_tiles` has tiles."""
    programs, arguments = _common(inputs, tiles, scale, layout)
    launch = forward_few_kernel.plan(programs, **arguments, num_warps=tiles.num_warps)

    def run(inputs: Inputs, outputs: Outputs) -> None:
        q, k, v, mask, mask_bias, _, gate = inputs
        lse = outputs.lse
        # Absent tensors get any address, which is never read.
        mask, mask_bias, gate = (lse if x is None else x for x in (mask, mask_bias, gate))
        launch(q, k, v, mask, mask_bias, *outputs, gate)

    return run


def plan_backward_few(
    cotangents: Cotangents,
    inputs: Inputs,
    outputs: Outputs,
    tiles: FewTiles,
    *,
    scale: float,
    layout: str,
    needs: Needs,
) -> Callable[..., tuple[None, None]]:
    """Plan dq, dk, dv and dgate, those that `needs` asks for, likewise."""
    (do, dlse), (o, lse, _) = cotangents, outputs
    do_strides = Strided(tuple(o.shape), (0,) * 5, o.dtype) if do is None else strided(do)
    dlse_strides = None if dlse is None else strided(dlse)
    programs, arguments = _common(inputs, tiles, scale, layout, dO=do_strides, o=strided(o), dlse=dlse_strides)
    gathers = not lse.is_contiguous()  # as hooks on saved tensors may give it back
    wanted = Wanted(dlse is not None, needs.q, needs.k, needs.v, needs.gate)
    launch = backward_few_kernel.plan(programs, **arguments, dlse=lse_view(dlse_strides), W=wanted, num_warps=tiles.num_warps)

    def run(cotangents: Cotangents, inputs: Inputs, outputs: Outputs, results: tuple[Tensor | None, ...]) -> tuple[None, None]:
        (do, dlse), (q, k, v, mask, mask_bias, _, gate), (o, lse, _) = cotangents, inputs, outputs
        do = torch.zeros((), dtype=o.dtype, device=o.device) if do is None else do
        lse = lse.contiguous() if gathers else lse
        mask, mask_bias, dlse, gate = (lse if x is None else x for x in (mask, mask_bias, dlse, gate))
        launch(q, k, v, mask, mask_bias, do, o, lse, dlse, gate, *(o if x is None else x for x in results))
        return None, None

    return run


def _common(
    inputs: Inputs, tiles: FewTiles, scale: float, layout: str, *, dlse: Strided | None = None, **more: Strided
) -> tuple[int, dict[str, Any]]:
    """The number of programs, and the arguments that both kernels have, with views of `more` tensors."""
    tensors = {"q": strided(inputs.q), "k": strided(inputs.k), "v": strided(inputs.v), **more}
    masks = {"mask": inputs.mask, "mask_bias": inputs.mask_bias}
    mask_strides = {name: None if x is None else strided(x) for name, x in masks.items()}
    if inputs.gate is not None:
        tensors["gate"] = strided(inputs.gate)
    b, n, h, lq, d = inputs.q.shape
    lk, c = inputs.k.shape[-2], inputs.v.shape[-1]
    units = grain(*tensors.values())
    results = contiguous((b, n, h, max(lq, lk), max(d, c)), torch.float32)
    extents = [extent(x) for x in (*tensors.values(), *mask_strides.values(), dlse, results) if x is not None]
    tile = FewConstants(
        D=d,
        C=c,
        BLOCK_D=power_of_two(d, 1),
        BLOCK_C=power_of_two(c, 1),
        ROWS=tiles.rows,
        BLOCK_K=tiles.block_k,
        EVEN_K=lk == tiles.block_k,
        GRAIN=units,
        HAS_MASK=inputs.mask is not None,
        HAS_BIAS=inputs.mask_bias is not None,
        HAS_GATE=inputs.gate is not None,
        HEADS_INSIDE=layout == "bnlhd",
        LONG=max(extents) >= 1 << 31,
    )
    views = {"gate": view(None, 1), **{name: view(x, units) for name, x in tensors.items()}}
    for name, x in mask_strides.items():
        on_b, on_n, on_k = strides(x, 3)
        views[name] = View(None, on_b, on_n, 0, 0, on_k)
    programs = -(-math.prod(inputs.q.shape[:3]) // tiles.rows)
    return programs, {**views, "sizes": FewSizes(n, h, b * n * h, lq, lk, scale), "T": tile}


def extent(tensor: Strided) -> int:
    """Elements from the tensor's first to its last."""
    return sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride, strict=True))
