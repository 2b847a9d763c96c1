"""The transition of a diffusion transformer's condition in inference: four launches of fused kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from evoattn.core.keeping import keeps, made_once
from evoattn.core.numerics import float32_products
from evoattn.nn.diffusion_steps import is_exact
from evoattn.nn.submodules import is_linear, is_norm
from evoattn.pair.checking import is_recorded
from evoattn.pair.products.call import takes


def add_transition(x: Tensor, norm: nn.Module, first: nn.Module, second: nn.Module, last: nn.Module) -> Tensor | None:
    """x + last(silu(first(y)) second(y)), where y is norm(x), for x `[*, C]` in float32.

    The precision is that of the sampling, which splits the weights once.

    Args:
        x: on a GPU.
        norm: of C channels.
        first, second, last: projections to H channels, to H channels and to C channels, without biases.

    Returns:
        `[*, C]`; or None: it is another call, or somebody has to see a module called. Then the modules compute it.
    """
    linears: list[Any] = [first, second, last]
    affine: Any = norm
    if not keeps() or not is_norm(norm) or not all(map(is_linear, linears)) or any(y.bias is not None for y in linears):
        return None
    weights = [y.weight for y in linears]
    others = [*weights, *(y for y in (affine.weight, affine.bias) if y is not None)]
    if not takes(x, weights[0], affine.bias) or any(y.dtype != torch.float32 for y in others) or is_recorded(x, *others):
        return None
    if float32_products() not in ("none", "ieee", "tf32"):
        return None
    from evoattn.pair.products import steps

    low = is_exact()
    hidden = made_once(f"hidden channels, {low}", weights[:2], lambda: steps.split_weights(weights[:2], low=low))
    out = made_once(f"last product, {low}", weights[2:], lambda: steps.split_weights(weights[2:], low=low))
    rows = x.reshape(-1, x.shape[-1])
    y = steps.split_normed(rows, affine.weight, affine.bias, affine.eps, low=low)
    u = steps.product(y, hidden).split(weights[0].shape[0], -1)
    return steps.product(steps.split(*u, kind="swiglu", low=low), out, base=rows).view(x.shape)
