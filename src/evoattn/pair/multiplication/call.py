"""Triangle multiplication: checks, and the way that a call takes."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from evoattn.core import guards
from evoattn.core.devices import installed
from evoattn.dispatch.distributed import Split
from evoattn.pair import checking
from evoattn.pair.multiplication import autograd, exchanged, sharded
from evoattn.pair.multiplication.values import Options, Weights
from evoattn.pair.operators import Operator

__all__ = ["product", "reference", "triangle_multiplication"]

_OPTIONAL = frozenset(name for name in Weights._fields if name.endswith("bias") or "norm" in name)

_OPERATOR = Operator("triangle_multiplication", "z", Weights, Options, autograd, saved=("ab", "t"))


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

    Sums are float32 or wider. In float16 the product t is kept in float32, because its sums can leave float16's range. On a
    GPU, Triton kernels compute all but the product; gradients are deterministic, and have no derivative of their own. Plain
    torch computes what they do not take: a CPU, float64, more than 256 channels (128 in float32), the gradient of a mask.

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
    weights = Weights(
        norm_in_weight, norm_in_bias, p_in_weight, p_in_bias, g_in_weight, g_in_bias,
        norm_out_weight, norm_out_bias, p_out_weight, p_out_bias, g_out_weight, g_out_bias,
    )  # fmt: skip
    if direction not in ("outgoing", "incoming"):
        raise ValueError(f"direction must be 'outgoing' or 'incoming', got {direction!r}")
    _check(z, mask, weights, split)
    options = Options(direction == "outgoing", float(eps), residual)
    weights = checking.cast(z, weights, weights.p_in_weight)
    if mask is not None and not mask.is_floating_point():
        mask = mask.to(weights.dtype)
    records = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (z, mask, *weights))
    if out is not None:
        checking.check_out(out, z, checking.result_dtype(z, weights, options), records=records)
    into = checking.direct(out, z, mask, *weights)
    result = _compute(z, mask, weights, options, records, into, split)
    return result if out is None or result is out else out.copy_(result)


def _compute(
    z: Tensor, mask: Tensor | None, weights: Weights, options: Options, records: bool, out: Tensor | None, split: Split | None
) -> Tensor:
    """The result, in `out` if it is given and kernels compute."""
    if not z.numel() or (mask is not None and mask.requires_grad) or not _has_kernels(z, weights):
        return reference(z, mask, weights, options, split)
    square = z.reshape(math.prod(z.shape[:-3]), *z.shape[-3:]).contiguous()
    rows = None if mask is None else mask.expand(z.shape[:-1]).reshape(square.shape[:-1]).contiguous()
    if split is not None:
        result = _compute_part(square, rows, weights, options, records, out, split)
    elif not guards.only_computes():  # torch has to see an operator
        result = _OPERATOR.forward(square, rows, *weights, *options)[0]
    elif records:
        result = _OPERATOR.record(square, rows, weights, options)
    else:
        result = autograd.forward(square, rows, weights, options, save=False, out=out)[0]
    if out is not None and not records:
        return checking.written(out)
    return result.view(z.shape)


def _compute_part(
    z: Tensor, mask: Tensor | None, weights: Weights, options: Options, records: bool, out: Tensor | None, split: Split
) -> Tensor:
    """The result for a part of z, by kernels unless torch has to see operators."""
    if not guards.only_computes():
        return reference(z, mask, weights, options, split)
    if not records:
        return sharded.forward(z, mask, weights, options, split, save=False, out=out)[0]
    return sharded.ShardedTriangleMultiplication.apply(z, mask, options, split, *weights)  # type: ignore[no-untyped-call, no-any-return]


def _has_kernels(z: Tensor, weights: Weights) -> bool:
    """Return whether kernels take these tensors: 16 or 32 bits on a GPU, not too many channels, no transform."""
    if not z.is_cuda or weights.dtype == torch.float64 or z.dtype == torch.float64 or not installed("triton"):
        return False
    from evoattn.pair.multiplication import steps

    return steps.takes(z, weights) and not torch._C._are_functorch_transforms_active()


def _check(z: Tensor, mask: Tensor | None, weights: Weights, split: Split | None) -> None:
    """Raise TypeError or ValueError for what does not fit together."""
    named = weights._asdict()
    checking.check_tensors("z", z, named, _OPTIONAL)
    if z.ndim < 3 or (split is None and z.shape[-2] != z.shape[-3]):
        raise ValueError(f"z must be [*, L, L, C], got shape {list(z.shape)}")
    if weights.p_out_weight.ndim != 2:
        raise ValueError(f"p_out_weight must be [C, D], got shape {list(weights.p_out_weight.shape)}")
    channels, hidden = z.shape[-1], weights.p_out_weight.shape[1]
    shapes = {"norm_in": (channels,), "p_in": (2 * hidden, channels), "g_in": (2 * hidden, channels)}
    shapes |= {"norm_out": (hidden,), "p_out": (channels, hidden), "g_out": (channels, channels)}
    checking.check_shapes(named, shapes, f"for C = {channels} channels of z and D = {hidden} of p_out_weight")
    checking.check_mask_of("z", z, mask)


def reference(z: Tensor, mask: Tensor | None, weights: Weights, options: Options, split: Split | None = None) -> Tensor:
    """Triangle multiplication in plain torch, which differentiates it."""
    w = weights
    y = checking.norm(z, w.norm_in_weight, w.norm_in_bias, options.eps).to(w.dtype)
    ab = F.linear(y, w.p_in_weight, w.p_in_bias) * F.linear(y, w.g_in_weight, w.g_in_bias).sigmoid()
    if mask is not None:
        ab = ab * mask.unsqueeze(-1).to(w.dtype)
    if split is not None and not ab.requires_grad and any(x is not None and x.requires_grad for x in w):
        ab = ab.detach().requires_grad_()  # the backward of a process with kernels exchanges whatever wants gradients
    a, b = ab.chunk(2, -1)
    t = product(a, b, split, outgoing=options.outgoing)
    n = checking.norm(t, w.norm_out_weight, w.norm_out_bias, options.eps).to(w.dtype)
    update = F.linear(n, w.p_out_weight, w.p_out_bias) * F.linear(y, w.g_out_weight, w.g_out_bias).sigmoid()
    return z + update if options.residual else update


def product(a: Tensor, b: Tensor, split: Split | None = None, *, outgoing: bool) -> Tensor:
    """t[i,j] = sum over k of a[i,k] b[j,k] (outgoing) or a[k,i] b[k,j]. In float32 for float16, which cannot hold the sums.

    Args:
        a, b: `[*, I, K, D]`, the halves or what this process holds of them.
        split: how rows or columns of the halves lie on several processes, or None.
        outgoing: which sum.

    Returns:
        `[*, I, J, D]`, split alike.
    """
    if split is not None:
        parts = torch.cat([x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:]).movedim(-1, 0) for x in (a, b)])  # [2 d,b,i,k]
        return exchanged.exchanged(parts, split, outgoing=outgoing).movedim(0, -1).reshape(a.shape)
    a, b = a.movedim(-1, -3), b.movedim(-1, -3)  # [*,d,i,k]
    if a.dtype == torch.float16:
        a, b = a.float(), b.float()
    return (a @ b.mT if outgoing else a.mT @ b).movedim(-3, -1)
