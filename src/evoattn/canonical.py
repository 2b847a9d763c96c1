"""Any number of leading axes -> the canonical axes `[b,n,h,l,d]`, and back, as views wherever strides allow.

The pair bias decides which leading axes are batch and which are rows: an axis along which it varies goes to b, one along
which it is broadcast goes to n. So no broadcast axis of a pair bias is ever expanded, whatever the user's shapes. If it
varies along none, the last axis of more than one entry goes to n: rows that share a pair bias are rows to every backend.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from evoattn.numerics import accumulate_dtype

__all__ = ["Canonical", "canonicalise", "narrow_expanded", "with_axes"]


@dataclasses.dataclass(frozen=True)
class Canonical:
    """Canonical tensors (axes in `evoattn.backends`) and the way between them and the leading axes that they came from.

    Args:
        q, k, v, mask, mask_bias, pair_bias: canonical.
        lead: sizes of the leading axes as the user has them.
        batch, rows: which of them make up b, and which n.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    mask_bias: Tensor | None
    pair_bias: Tensor | None
    lead: tuple[int, ...]
    batch: tuple[int, ...]
    rows: tuple[int, ...]

    def fold(self, x: Tensor) -> Tensor:
        """`[*lead, ...]` -> `[b,n,...]`."""
        return _fold(x, self.batch, self.rows)

    def restore(self, x: Tensor) -> Tensor:
        """`[b|1,n|1,...]` -> `[*lead, ...]`, with ones for every axis of a group that was 1."""
        if self.batch == (0,) and self.rows == (1,):
            return x
        sizes: list[int] = []
        for group, size in ((self.batch, x.shape[0]), (self.rows, x.shape[1])):
            full = [self.lead[axis] for axis in group]
            sizes += full if size == math.prod(full) else [1] * len(full)
        x = x.reshape(*sizes, *x.shape[2:])
        order = self.batch + self.rows
        if order == tuple(range(len(order))):
            return x
        inverse = sorted(range(len(order)), key=lambda axis: order[axis])
        return x.permute(*inverse, *range(len(inverse), x.ndim))


def canonicalise(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    mask_bias: Tensor | None,
    pair_bias: Tensor | None,
    *,
    narrow: bool = True,
) -> Canonical:
    """Bring valid tensors to canonical axes.

    Args:
        q, k, v: `[*lead, h, l, d]` with at least one leading axis; k and v may have a single head.
        mask, mask_bias: `[*, k]` that broadcasts to `[*lead, k]`.
        pair_bias: any shape that broadcasts to `[*lead, h, q, k]`.
        narrow: whether an expanded (stride 0) axis of the pair bias may be taken as broadcast.
    """
    lead = tuple(q.shape[:-3])
    batch = _all_but_the_rows(lead)
    if pair_bias is not None:
        pair_bias = with_axes(pair_bias, q.ndim)
        # Where a gradient must come back in the expanded shape, the axis stays.
        if narrow and _strides_are_told_apart() and not (pair_bias.requires_grad and torch.is_grad_enabled()):
            pair_bias = narrow_expanded(pair_bias)
        batch = tuple(axis for axis in range(len(lead)) if pair_bias.shape[axis] != 1) or batch
    rows = tuple(axis for axis in range(len(lead)) if axis not in batch)
    heads = q.shape[-3]
    return Canonical(
        q=_fold(q, batch, rows),
        k=_fold(_with_heads(k, heads), batch, rows),
        v=_fold(_with_heads(v, heads), batch, rows),
        mask=None if mask is None else _fold_keys(mask, lead, batch, rows, k.shape[-2], q.dtype),
        mask_bias=None if mask_bias is None else _fold_keys(mask_bias, lead, batch, rows, k.shape[-2], q.dtype),
        pair_bias=None if pair_bias is None else _fold(pair_bias, batch, rows).squeeze(1),
        lead=lead,
        batch=batch,
        rows=rows,
    )


def _all_but_the_rows(lead: tuple[int, ...]) -> tuple[int, ...]:
    """The leading axes that are batch if no pair bias tells: all but the last of more than one entry."""
    long = [axis for axis, size in enumerate(lead) if size > 1]
    rows = long[-1] if long else len(lead) - 1
    return tuple(axis for axis in range(len(lead)) if axis != rows)


def _strides_are_told_apart() -> bool:
    """Whether these axes are looked at again when other strides come.

    torch.compile guards strides. A graph that is exported or traced does not: it would take the first entry of an axis as the
    whole of it, because the example was expanded.
    """
    if torch.compiler.is_compiling():
        return not torch.compiler.is_exporting()
    return torch._C._get_tracing_state() is None and get_proxy_mode() is None


def with_axes(x: Tensor, ndim: int) -> Tensor:
    """A tensor with as many axes, of size 1 in front; the tensor itself where it has them."""
    return x.reshape((1,) * (ndim - x.ndim) + tuple(x.shape)) if x.ndim < ndim else x


def _with_heads(x: Tensor, heads: int) -> Tensor:
    return x if x.shape[-3] == heads else x.expand(*x.shape[:-3], heads, *x.shape[-2:])


def narrow_expanded(x: Tensor) -> Tensor:
    """One entry of each axis along which a tensor was expanded."""
    for axis in range(x.ndim):
        if x.shape[axis] > 1 and x.stride(axis) == 0:
            x = x.narrow(axis, 0, 1)
    return x


def _fold(x: Tensor, batch: tuple[int, ...], rows: tuple[int, ...]) -> Tensor:
    if batch == (0,) and rows == (1,):  # already so: the common case costs no view
        return x
    count = len(batch) + len(rows)
    sizes = tuple(x.shape)
    if batch + rows != tuple(range(count)):
        x = x.permute(*batch, *rows, *range(count, x.ndim))
    return x.reshape(math.prod([sizes[axis] for axis in batch]), math.prod([sizes[axis] for axis in rows]), *sizes[count:])


def _fold_keys(
    x: Tensor, lead: tuple[int, ...], batch: tuple[int, ...], rows: tuple[int, ...], keys: int, dtype: torch.dtype
) -> Tensor:
    """`[*, k]` -> `[b|1,n|1,k]`: a group of axes is expanded only if the bias varies along one of them.

    The gradient of a bias that is expanded is summed by autograd, in the dtype of what was expanded: in 16 bits each term would
    be rounded before.
    """
    x = with_axes(x, len(lead) + 1)
    sizes = list(x.shape)
    for group in (batch, rows):
        if [axis for axis in group if sizes[axis] != 1]:
            for axis in group:
                sizes[axis] = lead[axis]
    if sizes != list(x.shape) or sizes[-1] != keys:
        x = x.to(accumulate_dtype(dtype)) if x.requires_grad and torch.is_grad_enabled() else x
        x = x.expand(*sizes[:-1], keys)
    return _fold(x, batch, rows)
