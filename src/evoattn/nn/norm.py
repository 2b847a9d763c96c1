"""Layer norm whose result has the compute dtype, and its backward.

Eager calls on a GPU run Triton kernels. Other calls run plain torch, which torch.compile fuses into one kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from evoattn.devices import installed
from evoattn.numerics import accumulate_dtype

__all__ = ["normalise", "normalise_backward"]

_MOST_CHANNELS = 4096
"""The kernels hold a row in the registers of one program."""


def normalise(
    rows: Tensor, scale: Tensor | None, shift: Tensor | None, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise rows over their last axis.

    Args:
        rows: `[R, C]`.
        scale, shift: `[C]`, or None for 1 and 0.
        eps: is added to the variance.
        dtype: of the result. Statistics are float32, or float64 for float64 rows.

    Returns:
        The normalised rows `[R, C]`, then the mean and 1 / standard deviation of each row, for the backward.
    """
    if _has_kernel(rows):
        from evoattn.nn import norm_kernels

        return norm_kernels.normalise(rows, scale, shift, eps, dtype)
    wide = accumulate_dtype(rows.dtype)
    scale, shift = (None if x is None else x.to(wide) for x in (scale, shift))
    made, mean, rstd = torch.native_layer_norm(rows.to(wide), rows.shape[-1:], scale, shift, eps)
    return made.to(dtype), mean, rstd


def normalise_backward(
    d_normed: Tensor,
    rows: Tensor,
    mean: Tensor,
    rstd: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Compute the gradients of rows, scale and shift, each in the dtype of its tensor, or None if `needs` says so.

    Args:
        d_normed: the cotangent of the normalised rows, `[R, C]`.
        rows, scale, shift: as `normalise` took them.
        mean, rstd: as `normalise` returned them.
        needs: which of rows, scale and shift need a gradient.
    """
    if _has_kernel(rows):
        from evoattn.nn import norm_kernels

        return norm_kernels.normalise_backward(d_normed, rows, mean, rstd, scale, shift, needs)
    wide = accumulate_dtype(rows.dtype)
    affine = [None if x is None else x.to(wide) for x in (scale, shift)]
    found = torch.ops.aten.native_layer_norm_backward(
        d_normed.to(wide), rows.to(wide), rows.shape[-1:], mean, rstd, *affine, needs
    )
    dtypes = [rows.dtype if x is None else x.dtype for x in (rows, scale, shift)]
    dx, dscale, dshift = (x.to(dtype) if need else None for x, dtype, need in zip(found, dtypes, needs, strict=True))
    return dx, dscale, dshift


def _has_kernel(rows: Tensor) -> bool:
    """Whether the Triton kernels take these rows: 16 or 32 bits, on a GPU, in a call that nothing traces or observes."""
    if not rows.is_cuda or rows.dtype == torch.float64 or not rows.numel() or rows.shape[-1] > _MOST_CHANNELS:
        return False
    if torch.compiler.is_compiling() or type(rows) is not Tensor or torch._C._len_torch_dispatch_stack():
        return False
    return installed("triton")
