"""Bring tensors with any leading axes to the canonical axes `[b,n,h,l,d]`, and back, as views if strides allow it.

The pair bias decides which leading axes are batch and which are rows: an axis along which it varies goes to b, one along
which it is broadcast goes to n. So no broadcast axis of a pair bias is ever expanded, whatever the user's shapes. If it
varies along none, the last axis of more than one entry goes to n: rows that share a pair bias are rows to every backend.

A single query of several heads that share their keys, as in global attention, is as many queries of one head: every backend
then reads and differentiates the keys once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from evoattn.core.inputs import Inputs
from evoattn.core.numerics import accumulate_dtype


@dataclasses.dataclass(frozen=True)
class Axes:
    """The way between a user's axes and canonical ones.

    Args:
        lead: sizes of the leading axes as the user has them.
        batch, rows: which of them make up b, and which n.
        layout: the order of the other axes in the user's q, k, v and o.
        swapped: whether the user's heads are the canonical queries, and the user's one query is the canonical head.
    """

    lead: tuple[int, ...]
    batch: tuple[int, ...]
    rows: tuple[int, ...]
    layout: str = "bnhld"
    swapped: bool = False

    @property
    def in_order(self) -> bool:
        """True if a contiguous tensor in the user's leading axes is contiguous in the canonical ones."""
        axes = [axis for axis in self.batch + self.rows if self.lead[axis] != 1]
        return axes == sorted(axes)

    def fold(self, x: Tensor) -> Tensor:
        """`[*lead, ...]` -> `[b,n,...]`."""
        batch, rows = self.batch, self.rows
        if batch == (0,) and rows == (1,):  # already so: the common case costs no view
            return x
        count, sizes = len(batch) + len(rows), tuple(x.shape)
        if batch + rows != tuple(range(count)):
            x = x.permute(*batch, *rows, *range(count, x.ndim))
        b, n = math.prod([sizes[axis] for axis in batch]), math.prod([sizes[axis] for axis in rows])
        return x.reshape(b, n, *sizes[count:])

    def fold_queries(self, x: Tensor) -> Tensor:
        """q, gate, o or do as the user has it -> `[b,n,h,q,d]`."""
        return self.fold(self._queries(x))

    def fold_keys(self, x: Tensor, heads: int) -> Tensor:
        """k or v as the user has it -> `[b,n,h,k,d]`, expanded if one head is shared by all."""
        x = self._keys(x)
        return self.fold(x if x.shape[-3] == heads else x.expand(*x.shape[:-3], heads, *x.shape[-2:]))

    def fold_statistic(self, x: Tensor) -> Tensor:
        """lse, reference or dlse, `[*lead,h,q]` -> `[b,n,h,q]`."""
        return self.fold(x.transpose(-1, -2) if self.swapped else x)

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

    def fold_written(self, written: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """dq, dk, dv and dgate, which lie in memory as q, k, v and the gate do -> canonical axes."""
        return tuple([None if x is None else self.fold(way(x)) for x, way in zip(written, self._ways, strict=True)])

    def restore_written(self, written: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """dq, dk, dv and dgate -> as the user has q, k, v and the gate."""
        return tuple([None if x is None else way(self.restore(x)) for x, way in zip(written, self._ways, strict=True)])

    def restore_queries(self, x: Tensor) -> Tensor:
        """o, dq or dgate, `[b,n,h,q,d]` -> as the user has it."""
        return self._queries(self.restore(x))

    def restore_statistic(self, x: Tensor) -> Tensor:
        """lse or reference, `[b,n,h,q]` -> `[*lead,h,q]`."""
        x = self.restore(x)
        return x.transpose(-1, -2) if self.swapped else x

    @property
    def _ways(self) -> tuple[Callable[[Tensor], Tensor], ...]:
        """The order of axes of q, k, v and the gate, to and fro."""
        return self._queries, self._keys, self._keys, self._queries

    def _queries(self, x: Tensor) -> Tensor:
        return x.transpose(-2, -3) if (self.layout == "bnlhd") != self.swapped else x

    def _keys(self, x: Tensor) -> Tensor:
        return x.transpose(-2, -3) if self.layout == "bnlhd" else x


CANONICAL = Axes((), (0,), (1,))
"""The identity, for tensors that already have canonical axes."""


def canonicalise(inputs: Inputs, layout: str = "bnhld", *, narrow: bool = True) -> tuple[Inputs, Axes]:
    """Return valid tensors in canonical axes (`evoattn.backends`), and the way between these and the user's.

    Args:
        inputs: with at least one leading axis. k and v may have a single head. mask and mask_bias are `[*, k]` or
            `[*, 1, 1, k]` and the pair bias `[*, h, q, k]`, all broadcast to those leading axes.
        layout: the order of axes in q, k, v and the gate.
        narrow: whether an expanded (stride 0) axis of the pair bias may be taken as broadcast.
    """
    q, k, v, mask, mask_bias, pair_bias, gate = inputs
    lead = tuple(q.shape[:-3])
    swapped = _is_one_query_of_shared_keys(inputs, layout)
    batch = _all_but_the_rows(lead)
    if pair_bias is not None:
        pair_bias = with_axes(pair_bias.transpose(-2, -3) if swapped and pair_bias.ndim > 2 else pair_bias, q.ndim)
        # Where a gradient must come back in the expanded shape, the axis stays.
        if narrow and _strides_are_guarded() and not (pair_bias.requires_grad and torch.is_grad_enabled()):
            pair_bias = narrow_expanded(pair_bias)
        batch = tuple(axis for axis in range(len(lead)) if pair_bias.shape[axis] != 1) or batch
    rows = tuple(axis for axis in range(len(lead)) if axis not in batch)
    axes = Axes(lead, batch, rows, layout, swapped)
    folded_q = axes.fold_queries(q)
    folded_k, folded_v = (axes.fold_keys(x, folded_q.shape[2]) for x in (k, v))
    keys = folded_k.shape[-2]
    masks = [None if x is None else _fold_key_axes(key_axes(x, q), axes, keys, q.dtype) for x in (mask, mask_bias)]
    folded_pair = None if pair_bias is None else axes.fold(pair_bias).squeeze(1)
    folded_gate = None if gate is None else axes.fold_queries(gate)
    return Inputs(folded_q, folded_k, folded_v, masks[0], masks[1], folded_pair, folded_gate), axes


def _is_one_query_of_shared_keys(inputs: Inputs, layout: str) -> bool:
    """Return whether there is one query with several heads, and all heads share their keys and values."""
    q, k, v, *_ = inputs
    heads, length = (-2, -3) if layout == "bnlhd" else (-3, -2)
    if q.shape[length] == 1 and q.shape[heads] > 1 and k.shape[heads] == v.shape[heads] == 1:  # noqa: SIM103
        return True
    return False  # where torch traces, a comparison of sizes is a tensor or a symbol, and no bool


def _all_but_the_rows(lead: tuple[int, ...]) -> tuple[int, ...]:
    """The leading axes that are batch if no pair bias tells: all but the last of more than one entry."""
    long = [axis for axis, size in enumerate(lead) if size > 1]
    rows = long[-1] if long else len(lead) - 1
    return tuple(axis for axis in range(len(lead)) if axis != rows)


def _strides_are_guarded() -> bool:
    """Return whether later tensors with other strides get axes of their own.

    torch.compile guards strides. A graph that is exported or traced does not: it would take the first entry of an axis as the
    whole of it, because the example was expanded.
    """
    if torch.compiler.is_compiling():
        return not torch.compiler.is_exporting()
    return torch._C._get_tracing_state() is None and get_proxy_mode() is None


def with_axes(x: Tensor, ndim: int) -> Tensor:
    """A tensor with as many axes, of size 1 in front; the tensor itself where it has them."""
    return x.reshape((1,) * (ndim - x.ndim) + tuple(x.shape)) if x.ndim < ndim else x


def narrow_expanded(x: Tensor) -> Tensor:
    """One entry of each axis along which a tensor was expanded."""
    if 0 not in x.stride():
        return x
    for axis in range(x.ndim):
        if x.shape[axis] > 1 and x.stride(axis) == 0:
            x = x.narrow(axis, 0, 1)
    return x


def key_axes(x: Tensor, q: Tensor) -> Tensor:
    """A mask or mask bias as `[*, Lk]`: `[*, N, 1, 1, Lk]` loses its two unit axes."""
    return x.squeeze(-2).squeeze(-2) if has_unit_axes(x, q) else x


def has_unit_axes(x: Tensor, q: Tensor) -> bool:
    """Return whether a mask is `[*, N, 1, 1, Lk]`: it has too many axes for `[*, N, Lk]`, or does not fit as that."""
    lead = tuple(q.shape[:-3])
    if x.ndim > max(2, len(lead) + 1):
        return True
    units = x.ndim > 3 and x.shape[-2] == 1 and x.shape[-3] == 1
    return units and not fits(tuple(x.shape[:-1]), lead) and fits(tuple(x.shape[:-3]), lead)


def fits(sizes: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    """Return whether sizes broadcast to the expected ones."""
    pairs = zip(reversed(sizes), reversed(expected), strict=False)
    return len(sizes) <= len(expected) and all(size == 1 or size == wanted for size, wanted in pairs)


def _fold_key_axes(x: Tensor, axes: Axes, keys: int, dtype: torch.dtype) -> Tensor:
    """`[*, k]` -> `[b|1,n|1,k]`: a group of axes is expanded only if the bias varies along one of them.

    The gradient of a bias that is expanded is summed by autograd, in the dtype of what was expanded: in 16 bits each term would
    be rounded before.
    """
    lead = axes.lead
    x = with_axes(x, len(lead) + 1)
    sizes = list(x.shape)
    for group in (axes.batch, axes.rows):
        if [axis for axis in group if sizes[axis] != 1]:
            for axis in group:
                sizes[axis] = lead[axis]
    if sizes != list(x.shape) or sizes[-1] != keys:
        x = x.to(accumulate_dtype(dtype)) if x.requires_grad and torch.is_grad_enabled() else x
        x = x.expand(*sizes[:-1], keys)
    return axes.fold(x)
