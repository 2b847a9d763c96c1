"""cuEquivariance's `triangle_multiplicative_update` in plain torch, for models that want it together with the attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

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
    """Triangle multiplication by outgoing or incoming edges: one norm, one product for all that reads it, then the triangles.

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
    channels, hidden = x.shape[-1], p_in_weight.shape[0] // 2
    expected = ((2 * hidden, channels), (2 * hidden, channels), (channels, hidden), (channels, channels))
    for (name, weight), shape in zip(needed.items(), expected, strict=True):
        if tuple(weight.shape) != shape:  # type: ignore[union-attr]
            raise ValueError(f"{name} must be {list(shape)}, got shape {list(weight.shape)}")  # type: ignore[union-attr]

    y = F.layer_norm(x, (channels,), norm_in_weight, norm_in_bias, eps)
    joined = F.linear(y, torch.cat((p_in_weight, g_in_weight, g_out_weight)))
    p, g, gate = joined.split((2 * hidden, 2 * hidden, channels), -1)
    p, g, gate = (part if bias is None else part + bias for part, bias in ((p, p_in_bias), (g, g_in_bias), (gate, g_out_bias)))
    ab = g.sigmoid() * p
    if mask is not None:
        ab = ab * mask.unsqueeze(-1).to(ab.dtype)
    a, b = ab.chunk(2, -1)
    a, b = (x.movedim(-1, -3) for x in (a, b))  # [*,d,i,k]
    z = a @ b.transpose(-1, -2) if direction == "outgoing" else a.transpose(-1, -2) @ b
    z = F.layer_norm(z.movedim(-3, -1), (hidden,), norm_out_weight, norm_out_bias, eps)
    out: Tensor = F.linear(z, p_out_weight, p_out_bias) * gate.sigmoid()
    return out
