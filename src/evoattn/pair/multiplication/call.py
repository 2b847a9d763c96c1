"""Triangle multiplication: checks, and the way that a call takes."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from evoattn.core.devices import installed, uncast
from evoattn.dispatch.distributed import Split
from evoattn.pair import checking
from evoattn.pair.multiplication import products
from evoattn.pair.operators import Operator, decided_once
from evoattn.pair.products.call import any_linear
from evoattn.pair.values import MultiplicationOptions, MultiplicationWeights

_OPTIONAL = frozenset(name for name in MultiplicationWeights._fields if name.endswith("bias") or "norm" in name)


def triangle_multiplication(
    z: Tensor,
    mask: Tensor | None = None,
    *,
    direction: str = "outgoing",
    norm_in_weight: Tensor | None = None,
    norm_in_bias: Tensor | None = None,
    p_in_weight: Tensor,
    p_in_bias: Tensor | None = None,
    g_in_weight: Tensor,
    g_in_bias: Tensor | None = None,
    norm_out_weight: Tensor | None = None,
    norm_out_bias: Tensor | None = None,
    p_out_weight: Tensor,
    p_out_bias: Tensor | None = None,
    g_out_weight: Tensor,
    g_out_bias: Tensor | None = None,
    eps: float = 1e-5,
    residual: bool = False,
    out: Tensor | None = None,
    split: Split | None = None,
) -> Tensor:
    """Multiply the edges of triangles: the triangle multiplication of AlphaFold, from norm to output gate.

        y = norm_in(z)      a, b = mask * sigmoid(g_in(y)) * p_in(y), in halves
        t[i,j] = sum over k of a[i,k] b[j,k]  (outgoing),  a[k,i] b[k,j]  (incoming)
        result = sigmoid(g_out(y)) * p_out(norm_out(t)), plus z with `residual=True`

    Sums are float32 or wider. In inference without TF32, float32 products of 2,048 edges or more are three of float16. They lie
    on average no further from float64 than products in float32 (see `linear`). In float16 the product t is kept in float32,
    because its sums can leave float16's range. On a GPU, Triton kernels compute all but the product; gradients are
    deterministic, and have no derivative of their own. Plain torch computes what they do not take: a CPU, float64, more than
    256 channels (128 in float32), the gradient of a mask.

    Args:
        z: the pair representation, `[*, L, L, C]`, of any floating-point dtype.
        mask: broadcasts to `[*, L, L]` and has as many axes: 1 or True for an edge that counts. A float mask is a factor.
        direction: "outgoing" or "incoming".
        norm_in_weight, norm_in_bias: `[C]`. None: 1 and 0.
        p_in_weight, g_in_weight: `[2 D, C]`, rows 0 to D for a, the others for b; with biases `[2 D]`.
        norm_out_weight, norm_out_bias: `[D]`. None: 1 and 0.
        p_out_weight: `[C, D]`, with a bias `[C]`.
        g_out_weight: `[C, C]`, with a bias `[C]`.
        eps: is added to the variance in both norms.
        residual: whether z is added to the update.
        out: a tensor that the result is written into, or None. It may be z itself. There is no gradient then.
        split: how rows or columns of z lie on several processes, if z and mask are the parts of this one. None: z is whole.

    Returns:
        A tensor of z's shape, in the dtype of the products: that of autocast, or the narrower one of z and the weights. With
        the residual in the dtype to which torch promotes z and the update.

    Raises:
        TypeError, ValueError: an argument has a wrong type, dtype or shape, or `out` is given and a gradient is wanted.

    Example:
        >>> import torch
        >>> z, w = torch.randn(1, 5, 5, 8), torch.randn(16, 8)
        >>> triangle_multiplication(z, p_in_weight=w, g_in_weight=w, p_out_weight=w[:8], g_out_weight=w[:8]).shape
        torch.Size([1, 5, 5, 8])

    Source: Jumper et al. 2021, supplementary algorithms 11 and 12; Abramson et al. 2024, algorithms 12 and 13.
    """
    weights = MultiplicationWeights(
        norm_in_weight, norm_in_bias, p_in_weight, p_in_bias, g_in_weight, g_in_bias,
        norm_out_weight, norm_out_bias, p_out_weight, p_out_bias, g_out_weight, g_out_bias,
    )  # fmt: skip
    if direction not in ("outgoing", "incoming"):
        raise ValueError(f"direction must be 'outgoing' or 'incoming', got {direction!r}")
    _check(z, mask, weights, split)
    options = MultiplicationOptions(direction == "outgoing", float(eps), residual)
    return OPERATOR(z, mask, checking.cast(z, weights, p_in_weight), options, out, split)


def _check(z: Tensor, mask: Tensor | None, weights: MultiplicationWeights, split: Split | None) -> None:
    """Raise TypeError or ValueError for what does not fit together."""
    named = checking.by_name(weights)
    checking.check_tensors("z", z, mask, named, _OPTIONAL)
    if z.ndim < 3 or (split is None and z.shape[-2] != z.shape[-3]):
        raise ValueError(f"z must be [*, L, L, C], got shape {list(z.shape)}")
    if weights.p_out_weight.ndim != 2:
        raise ValueError(f"p_out_weight must be [C, D], got shape {list(weights.p_out_weight.shape)}")
    channels, hidden = z.shape[-1], weights.p_out_weight.shape[1]
    shapes = {"norm_in": (channels,), "p_in": (2 * hidden, channels), "g_in": (2 * hidden, channels)}
    shapes |= {"norm_out": (hidden,), "p_out": (channels, hidden), "g_out": (channels, channels)}
    checking.check_shapes(named, shapes, f"for C = {channels} channels of z and D = {hidden} of p_out_weight")


def reference(
    z: Tensor, mask: Tensor | None, weights: MultiplicationWeights, options: MultiplicationOptions, split: Split | None = None
) -> Tensor:
    """Triangle multiplication in plain torch, which differentiates it."""
    w = weights
    y = checking.norm(z, w.norm_in_weight, w.norm_in_bias, options.eps).to(w.product_dtype())
    ab = any_linear(y, w.p_in_weight, w.p_in_bias) * any_linear(y, w.g_in_weight, w.g_in_bias).sigmoid()
    if mask is not None:
        ab = ab * mask.unsqueeze(-1).to(w.product_dtype())
    if split is not None and not ab.requires_grad and any(x is not None and x.requires_grad for x in w):
        ab = ab.detach().requires_grad_()  # the backward of a process with kernels exchanges whatever wants gradients
    a, b = ab.chunk(2, -1)
    t = product(a, b, split, outgoing=options.outgoing)
    n = checking.norm(t, w.norm_out_weight, w.norm_out_bias, options.eps).to(w.product_dtype())
    update = any_linear(n, w.p_out_weight, w.p_out_bias) * any_linear(y, w.g_out_weight, w.g_out_bias).sigmoid()
    return z + update if options.residual else update


def product(a: Tensor, b: Tensor, split: Split | None = None, *, outgoing: bool) -> Tensor:
    """t[i,j] = sum over k of a[i,k] b[j,k] (outgoing) or a[k,i] b[k,j]. In float32 for float16, which cannot hold the sums.

    a, b `[*, I, K, D]` are the halves, or what this process holds of them by `split`. The result `[*, I, J, D]` is split alike.
    """
    if split is not None:
        parts = torch.cat([x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:]).movedim(-1, 0) for x in (a, b)])  # [2 d,b,i,k]
        return products.multiply_exchanged(parts, split, outgoing=outgoing).movedim(0, -1).reshape(a.shape)
    a, b = a.movedim(-1, -3), b.movedim(-1, -3)  # [*,d,i,k]
    if a.dtype == torch.float16:
        a, b = a.float(), b.float()
    with uncast(a.device):  # autocast would take float32 back to float16
        return (a @ b.mT if outgoing else a.mT @ b).movedim(-3, -1)


def _outline(z: Tensor, weights: MultiplicationWeights, options: MultiplicationOptions) -> tuple[Tensor, Tensor, Tensor]:
    hidden, square = weights.p_out_weight.shape[1], (z.shape[0], products.side(z.shape[1]), products.side(z.shape[1]))
    dtype = weights.product_dtype()
    ab = z.new_empty((2 * hidden, *square), dtype=dtype)
    t = z.new_empty((hidden, *square), dtype=torch.float32 if dtype == torch.float16 else dtype)
    return torch.empty_like(z, dtype=checking.result_dtype(z, weights, options)), ab, t


def _steps() -> Any:
    from evoattn.pair.multiplication import steps

    return steps


@decided_once
def _takes(device: torch.device, dtype: torch.dtype, channels: int, hidden: int) -> bool:
    return installed("triton") and _steps().takes(device, dtype, channels, hidden)  # type: ignore[no-any-return]


OPERATOR = Operator(
    "triangle_multiplication",
    "z",
    MultiplicationWeights,
    MultiplicationOptions,
    steps=_steps,
    takes=_takes,
    last="p_out_weight",
    outline=_outline,
    reference=reference,
    axes=3,
    saved=("ab", "t"),
)
