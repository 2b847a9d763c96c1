"""The transition: checks, and the way that a call takes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from evoattn.core import guards
from evoattn.core.devices import installed
from evoattn.pair import checking
from evoattn.pair.operators import Operator, decided_once
from evoattn.pair.products.call import any_linear
from evoattn.pair.values import TransitionOptions, TransitionWeights

CHUNK = 1 << 17
"""Rows that plain torch takes at a time in inference."""

_OPTIONAL = frozenset(("norm_weight", "norm_bias", "a_bias", "b_weight", "b_bias", "out_bias"))


def transition(
    x: Tensor,
    mask: Tensor | None = None,
    *,
    activation: str = "swiglu",
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    a_weight: Tensor,
    a_bias: Tensor | None = None,
    b_weight: Tensor | None = None,
    b_bias: Tensor | None = None,
    out_weight: Tensor,
    out_bias: Tensor | None = None,
    eps: float = 1e-5,
    residual: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Update each entry by itself, through a wider hidden layer: the transition of AlphaFold, from norm to residual.

        y = norm(x)
        u = silu(a(y)) * b(y)  (activation "swiglu"),  relu(a(y))  (activation "relu")
        result = mask * out(u), plus x with `residual=True`

    Sums are float32 or wider. In inference without TF32, float32 products of 2,048 rows or more are three of float16 (see
    `linear`). On a GPU, Triton kernels compute it, and a forward stores no tensor of the hidden channels. A backward computes
    them again; if weights need gradients, it stores them for some rows at a time. Gradients are deterministic, and have no
    derivative of their own. Plain torch computes what the kernels do not take: a CPU, float64, more than 256 channels in 16
    bits (128 before Hopper), float32 with more than 128 channels or on other cards than Hopper's, and the gradient of a mask.
    In inference it takes 131,072 rows at a time.

    Args:
        x: a pair representation, an MSA representation or any other rows, `[*, C]`, of any floating-point dtype.
        mask: broadcasts to `[*]` and has as many axes: 1 or True for a row that counts. A float mask is a factor of the update.
        activation: "swiglu" (AlphaFold 3, Boltz, Protenix, OpenFold-3) or "relu" (AlphaFold 2, OpenFold).
        norm_weight, norm_bias: `[C]`. None: 1 and 0.
        a_weight: `[H, C]`, with a bias `[H]`.
        b_weight: `[H, C]`, with a bias `[H]`. For "swiglu" only.
        out_weight: `[C, H]`, with a bias `[C]`.
        eps: is added to the variance in the norm.
        residual: whether x is added to the update.
        out: a tensor that the result is written into, or None. It may be x itself. There is no gradient then.

    Returns:
        `[*, C]` in the dtype of the products: that of autocast, or the narrower one of x and the weights. With the residual in
        the dtype to which torch promotes x and the update.

    Raises:
        TypeError, ValueError: an argument has a wrong type, dtype or shape, or `out` is given and a gradient is wanted.

    Example:
        >>> import torch
        >>> x, w = torch.randn(1, 5, 5, 8), torch.randn(32, 8)
        >>> transition(x, a_weight=w, b_weight=w, out_weight=w.t(), residual=True).shape
        torch.Size([1, 5, 5, 8])

    Source: Jumper et al. 2021, supplementary algorithms 9 and 15; Abramson et al. 2024, algorithm 11.
    """
    weights = TransitionWeights(norm_weight, norm_bias, a_weight, a_bias, b_weight, b_bias, out_weight, out_bias)
    _check(x, mask, activation, weights)
    weights = checking.cast(x, weights, a_weight)
    return OPERATOR(x, mask, weights, TransitionOptions(float(eps), residual), out)


def _check(x: Tensor, mask: Tensor | None, activation: str, weights: TransitionWeights) -> None:
    """Raise TypeError or ValueError for what does not fit together."""
    if activation not in ("swiglu", "relu"):
        raise ValueError(f"activation must be 'swiglu' or 'relu', got {activation!r}")
    if activation == "swiglu" and weights.b_weight is None:
        raise ValueError("b_weight must be given with activation='swiglu', got None; 'relu' takes none")
    if activation == "relu" and (weights.b_weight is not None or weights.b_bias is not None):
        raise ValueError("b_weight and b_bias must be None with activation='relu'")
    named = checking.by_name(weights)
    checking.check_tensors("x", x, mask, named, _OPTIONAL)
    if x.ndim < 1:
        raise ValueError("x must be [*, C], got a scalar")
    if weights.out_weight.ndim != 2:
        raise ValueError(f"out_weight must be [C, H], got shape {list(weights.out_weight.shape)}")
    channels, hidden = x.shape[-1], weights.out_weight.shape[1]
    shapes: dict[str, tuple[int, ...]] = {"norm": (channels,), "a": (hidden, channels), "b": (hidden, channels)}
    shapes["out"] = (channels, hidden)
    checking.check_shapes(named, shapes, f"for C = {channels} channels of x and H = {hidden} of out_weight")


def reference(
    x: Tensor, mask: Tensor | None, weights: TransitionWeights, options: TransitionOptions, split: None = None
) -> Tensor:
    """The transition in plain torch, which differentiates it. It needs no split: it looks at one row at a time.

    If nothing records it, it takes some rows at a time: its hidden tensors would take several times the memory of x.
    """
    if not guards.only_computes() or checking.is_recorded(x, mask, *weights) or x.numel() <= CHUNK * x.shape[-1]:
        return dense(x, mask, weights, options)
    rows = x.reshape(-1, x.shape[-1])
    factors = None if mask is None else mask.expand(x.shape[:-1]).reshape(-1)
    result = rows.new_empty(rows.shape, dtype=checking.result_dtype(x, weights, options))
    for first in range(0, rows.shape[0], CHUNK):
        part = slice(first, first + CHUNK)
        result[part] = dense(rows[part], None if factors is None else factors[part], weights, options)
    return result.view(x.shape)


def dense(x: Tensor, mask: Tensor | None, w: TransitionWeights, options: TransitionOptions) -> Tensor:
    y = checking.norm(x, w.norm_weight, w.norm_bias, options.eps).to(w.product_dtype())
    u = any_linear(y, w.a_weight, w.a_bias)
    u = F.relu(u) if w.b_weight is None else F.silu(u) * any_linear(y, w.b_weight, w.b_bias)
    update = any_linear(u, w.out_weight, w.out_bias)
    if mask is not None:
        update = update * mask.unsqueeze(-1).to(w.product_dtype())
    return x + update if options.residual else update


def _outline(x: Tensor, weights: TransitionWeights, options: TransitionOptions) -> tuple[Tensor]:
    return (torch.empty_like(x, dtype=checking.result_dtype(x, weights, options)),)


def _steps() -> Any:
    from evoattn.pair.transitions import steps

    return steps


@decided_once
def _takes(device: torch.device, dtype: torch.dtype, channels: int, hidden: int) -> bool:
    return installed("triton") and _steps().takes(device, dtype, channels, hidden)  # type: ignore[no-any-return]


OPERATOR = Operator(
    "transition",
    "x",
    TransitionWeights,
    TransitionOptions,
    steps=_steps,
    takes=_takes,
    last="out_weight",
    outline=_outline,
    reference=reference,
    axes=1,
)
