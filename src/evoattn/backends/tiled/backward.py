"""The backward of the tiled backend: what a thread does with the shares of rows that it takes."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from evoattn.backends.tiled.scores import Rows, Scores, cut, spans, stack, subtrahends, unflatten, view


class Share:
    """Rows that one thread does one after another, and the gradients of biases that it sums over them.

    Where no share before it adds to a part of a bias gradient, it adds to that part in place. For other parts it has sums of
    its own, which `add_up` adds. Done in the order of the shares, that gives the same bits whichever thread was when where.

    Args:
        rows: pieces, which differ in n before they differ in b and h.
        dmask_bias, dpair_bias: the gradients, or None if they are not wanted.
        taken: the parts to which shares before this one add; its own are added.
    """

    def __init__(self, rows: Sequence[Rows], dmask_bias: Tensor | None, dpair_bias: Tensor | None, taken: set[str]) -> None:
        self.rows = rows
        self._mask, self._pair = dmask_bias, dpair_bias
        names = {"mask"} | {self._name(part) for part in rows}
        self._shared = names & taken
        self._own: dict[str, tuple[Tensor, Tensor]] = {}  # the part of a gradient, and the sums to be added to it
        taken |= names

    @property
    def wanted(self) -> bool:
        """True if the gradient of a bias is wanted."""
        return self._mask is not None or self._pair is not None

    def add(self, ds: Tensor, rows: Rows, qs: slice, ks: slice) -> None:
        """Add dS `[b,n,h,q,k]` of a block to the gradients of the biases that are wanted."""
        if self._pair is not None:
            gradient = cut(self._pair, (rows[0], rows[2], slice(None), slice(None)))
            part = cut(self._sums(self._name(rows), gradient), (slice(None), slice(None), qs, ks))
            part += ds.sum(1).sum_to_size(part.shape)
        if self._mask is not None:
            part = cut(self._sums("mask", self._mask), (rows[0], rows[1], ks))
            part += ds.sum((2, 3)).sum_to_size(part.shape)

    def add_up(self) -> None:
        """Add the sums that are its own to the gradients."""
        for gradient, sums in self._own.values():
            gradient += sums
        self._own.clear()

    def _sums(self, name: str, gradient: Tensor) -> Tensor:
        """Return the tensor to add to: the gradient itself, or sums of this share."""
        if name not in self._shared:
            return gradient
        if name not in self._own:
            self._own[name] = gradient, torch.zeros_like(gradient)
        return self._own[name][1]

    def _name(self, rows: Rows) -> str:
        """The part of the pair bias' gradient that rows add to."""
        if self._pair is None:
            return ""
        b, h = (0 if size == 1 else part.start for size, part in zip(self._pair.shape, (rows[0], rows[2]), strict=False))
        return f"pair {b} {h}"


def shares(rows: Sequence[Rows], count: int, dmask_bias: Tensor | None, dpair_bias: Tensor | None) -> list[Share]:
    """Rows in so many shares of about the same size."""
    taken: set[str] = set()
    ends = [len(rows) * i // count for i in range(count + 1)]
    return [Share(rows[first:last], dmask_bias, dpair_bias, taken) for first, last in itertools.pairwise(ends)]


@dataclasses.dataclass(frozen=True)
class Work:
    """The tensors that the shares of a backward read and write. Threads share it.

    Args:
        scores: of the problem.
        inputs: q, k, v, do and o, gated if there is a gate.
        gate: `[b,n,h,q,c]`, or None.
        numbers: lse and reference; or what `subtrahends` makes of them, if nothing but the row shift is taken from scores.
        dlse: the gradient of the LSE in log2 units, `[b,n,h,q]`, if there is one.
        gradients: dq, dk, dv and dgate, those that are wanted.
    """

    scores: Scores
    inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
    gate: Tensor | None
    numbers: tuple[Tensor, ...]
    dlse: Tensor | None
    gradients: Sequence[Tensor | None]

    def run(self, taken: Iterator[Share]) -> None:
        """Write the gradients of q, k, v and gate of some shares, and add to those of the biases."""
        buffers = tuple(self.scores.new_buffer(self.inputs[0]) for _ in range(2))
        for share in taken:
            for rows in share.rows:
                sums = self._row_gradients(rows, share, buffers)
                for gradient, total in zip(self.gradients, sums, strict=True):
                    if gradient is not None and total is not None:
                        gradient[rows] = unflatten(total, (*rows, slice(None)))

    def _row_gradients(self, rows: Rows, share: Share, buffers: tuple[Tensor, ...]) -> list[Tensor | None]:
        """dq, dk, dv and dgate of rows, `[g,l,d]`; those of biases are added to the share."""
        scores = self.scores
        q, k, v, do, o = (stack(x[rows], scores.dtype) for x in self.inputs)
        query_shift = scores.query_shift((*rows, slice(0, q.shape[1])))
        numbers = tuple(x[rows] for x in self.numbers)
        if query_shift is not None:
            numbers = subtrahends(numbers[0], numbers[1], query_shift)
        numbers = tuple(_column(x) for x in numbers)  # [g,q,1]
        delta = (o * do).sum(-1, keepdim=True)
        if self.dlse is not None:
            delta -= _column(self.dlse[rows])
        delta.masked_fill_(numbers[-1] == torch.inf, 0)
        needs_dq, needs_dk, needs_dv, needs_dgate = (gradient is not None for gradient in self.gradients)
        needs_ds = needs_dq or needs_dk or share.wanted
        sums: list[Tensor | None] = [None, None, None, None]
        if self.gate is not None:
            gate = stack(self.gate[rows], scores.dtype)
            sums[3] = (
                torch.sigmoid(-gate).mul_(o).mul_(do) if needs_dgate else None
            )  # 1 - sigmoid(gate), exact where it is small
            do = torch.sigmoid(gate).mul_(do)
        for qs, ks in itertools.product(spans(q.shape[1], scores.plan.q), spans(k.shape[1], scores.plan.k)):
            part_shift = None if query_shift is None else query_shift[..., qs if query_shift.shape[-2] > 1 else slice(None), :]
            p = scores.block(buffers[0], (*rows, qs), ks, q[:, qs], k[:, ks], part_shift)
            for number in numbers:
                p.sub_(number[:, qs])
            p.exp2_()  # [g,q,k]
            if needs_dv:
                _add(sums, 2, v, ks, p.transpose(1, 2), do[:, qs])
            if not needs_ds:
                continue
            ds = torch.bmm(do[:, qs], v[:, ks].transpose(1, 2), out=view(buffers[1], p.shape))  # dP [g,q,k]
            ds.sub_(delta[:, qs]).mul_(p)
            if needs_dq:
                _add(sums, 0, q, qs, ds, k[:, ks], scores.scale)
            if needs_dk:
                _add(sums, 1, k, ks, ds.transpose(1, 2), q[:, qs], scores.scale)
            share.add(unflatten(ds, (*rows, qs)), rows, qs, ks)
        return sums


def _column(x: Tensor) -> Tensor:
    """A number a query, `[b,n,h,q]`, as `[g,q,1]`."""
    return x.flatten(0, 2).unsqueeze(-1)


def _add(sums: list[Tensor | None], i: int, like: Tensor, part: slice, x: Tensor, y: Tensor, scale: float = 1.0) -> None:
    """Add scale x y to part of the sums of q, k or v `[g,l,d]`."""
    total = sums[i]
    if total is None:
        if part == slice(0, like.shape[1]):  # the first product is all there is so far
            sums[i] = torch.baddbmm(like.new_empty(1), x, y, beta=0, alpha=scale)
            return
        total = sums[i] = torch.zeros_like(like)
    total[:, part].baddbmm_(x, y, alpha=scale)
