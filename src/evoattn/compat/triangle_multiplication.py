"""cuEquivariance's `triangle_multiplicative_update`, for models that call it together with the attention."""

from __future__ import annotations

from torch import Tensor

from evoattn.call.canonical import fits
from evoattn.pair import triangle_multiplication

__all__ = ["triangle_multiplicative_update"]


def triangle_multiplicative_update(
    x: Tensor,
    direction: str = "outgoing",
    mask: Tensor | None = None,
    norm_in_weight: Tensor | None = None,
    norm_in_bias: Tensor | None = None,
    p_in_weight: Tensor | None = None,
    p_in_bias: Tensor | None = None,
    g_in_weight: Tensor | None = None,
    g_in_bias: Tensor | None = None,
    norm_out_weight: Tensor | None = None,
    norm_out_bias: Tensor | None = None,
    p_out_weight: Tensor | None = None,
    p_out_bias: Tensor | None = None,
    g_out_weight: Tensor | None = None,
    g_out_bias: Tensor | None = None,
    eps: float = 1e-5,
    precision: str | None = None,
) -> Tensor:
    """Triangle multiplication by outgoing or incoming edges: `evoattn.pair.triangle_multiplication` by their names.

        y = norm(x)        a, b = mask * sigmoid(y g_in) * (y p_in), in halves
        z[i,j] = sum over k of a[i,k] b[j,k]  (outgoing),  a[k,i] b[k,j]  (incoming)
        result = sigmoid(y g_out) * (norm(z) p_out)

    Args:
        x: `[*, N, N, C]`, of any dtype and on any device. Three axes, `[N, N, C]`, are taken too.
        direction: "outgoing" or "incoming".
        mask: `[*, N, N]`, or anything that broadcasts to it; of any dtype.
        norm_in_weight, norm_in_bias: `[C]`.
        p_in_weight, g_in_weight: `[2 D, C]`, with biases `[2 D]`.
        norm_out_weight, norm_out_bias: `[D]`.
        p_out_weight: `[C, D]`, with a bias `[C]`.
        g_out_weight: `[C, C]`, with a bias `[C]`.
        eps: of both norms.
        precision: None; torch's own settings say how float32 is multiplied.

    Returns:
        `[*, N, N, C]`, with gradients for x and every weight.

    Raises:
        ValueError: for another direction or precision, a weight that is missing, or sizes that do not fit.

    Example:
        >>> import torch
        >>> x, w = torch.randn(1, 5, 5, 8), torch.randn(16, 8)
        >>> triangle_multiplicative_update(
        ...     x, p_in_weight=w, g_in_weight=w, p_out_weight=w[:8], g_out_weight=w[:8]
        ... ).shape
        torch.Size([1, 5, 5, 8])

    Source: Jumper et al. 2021, supplementary algorithms 11 and 12.
    """
    if direction not in ("outgoing", "incoming"):
        raise ValueError(f"direction must be 'outgoing' or 'incoming', got {direction!r}")
    if precision is not None:
        raise ValueError(f"precision must be None here (torch.set_float32_matmul_precision sets it), got {precision!r}")
    if x.ndim < 3 or x.shape[-2] != x.shape[-3]:
        raise ValueError(f"x must be [*, N, N, C], got shape {list(x.shape)}")
    needed = {
        "p_in_weight": p_in_weight,
        "g_in_weight": g_in_weight,
        "p_out_weight": p_out_weight,
        "g_out_weight": g_out_weight,
    }
    if p_in_weight is None or g_in_weight is None or p_out_weight is None or g_out_weight is None:
        raise ValueError(f"{next(name for name, weight in needed.items() if weight is None)} must be given")
    if mask is not None:
        if not fits(tuple(mask.shape), tuple(x.shape[:-1])):
            raise ValueError(f"mask must broadcast to {list(x.shape[:-1])}, got shape {list(mask.shape)}")
        mask = mask.expand(x.shape[:-1])
    return triangle_multiplication(
        x,
        mask,
        direction=direction,
        norm_in_weight=norm_in_weight,
        norm_in_bias=norm_in_bias,
        p_in_weight=p_in_weight,
        p_in_bias=p_in_bias,
        g_in_weight=g_in_weight,
        g_in_bias=g_in_bias,
        norm_out_weight=norm_out_weight,
        norm_out_bias=norm_out_bias,
        p_out_weight=p_out_weight,
        p_out_bias=p_out_bias,
        g_out_weight=g_out_weight,
        g_out_bias=g_out_bias,
        eps=eps,
    )
