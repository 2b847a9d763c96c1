"""Memory-efficient attention in plain torch: any device, any dtype, O(L) memory. The default on CPU.

The problem is cut into blocks of batches, rows, heads, queries and keys whose scores fit in `Config.score_bytes`. While rows
are short a block holds several of them with all their keys; when they are long, keys come block by block and the running sum
and output are rescaled as the running maximum m grows:

    first   m = max S            l = sum exp(S - m)                      o = exp(S - m) v
    middle  m' = max(m, max S)   l = l exp(m - m') + sum exp(S - m')     o = o exp(m - m') + exp(S - m') v
    last    o / l                LSE = m + log l

The backward walks the same blocks, recomputes P = exp(S - LSE) from the saved statistic and sums the bias gradients in place.

Scores, statistics and sums are float32 (float64 for float64) whatever the dtype of the inputs. Scores are kept in units of
log 2: torch's CPU exp2 takes 75 us for 2^20 numbers where exp takes 330, and 1,070 when a tenth of them are masked.
Source: Rabe and Staats 2021; Dao et al. 2022.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from evoattn.layouts import empty
from evoattn.numerics import LN2, LOG2E, NEAR, accumulate_dtype, largest_bias, query_shift, row_bias, shifted_pair
from evoattn.problem import Problem, describe
from evoattn.tuning import Config, TiledPlan, tiled_plan

__all__ = ["NAME", "availability", "backward", "copies", "forward", "resolve", "unsupported"]

NAME = "tiled"

_NEAR = 64.0
"""References up to this size, in log2 units, can be added to the LSE: float32 numbers are 4e-6 apart there."""


def availability() -> str | None:
    """Runs wherever torch runs."""
    return None


def unsupported(problem: Problem, config: Config) -> list[str]:
    """Takes every problem; refuses only launch options that mean nothing here."""
    return [
        f"{name}={value} in config: the tiled backend has block_q, block_k and score_bytes alone"
        for name, value in config.given().items()
        if name in ("num_warps", "num_stages")
    ]


def resolve(problem: Problem, config: Config) -> Config:
    """The block sizes that fit the score budget."""
    return tiled_plan(problem, config).config


def copies(problem: Problem, q: Tensor, k: Tensor, v: Tensor, pair_bias: Tensor | None) -> list[str]:
    """Reads every tensor as it lies."""
    return []


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    mask_bias: Tensor | None,
    pair_bias: Tensor | None,
    *,
    scale: float,
    layout: str,
    config: Config,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `evoattn.backends`."""
    problem = describe(q, k, v, mask, mask_bias, pair_bias)
    acc = accumulate_dtype(q.dtype)
    b, n, h, lq, _ = q.shape
    o = empty((b, n, h, lq, v.shape[-1]), layout, q)
    lse = torch.full((b, n, h, lq), -torch.inf, dtype=acc, device=q.device)
    reference = torch.zeros_like(lse)
    if k.shape[-2] == 0 or lse.numel() == 0:
        return o.zero_(), lse, reference
    plan = tiled_plan(problem, config)
    scores = _Scores(plan, scale, row_bias(mask, mask_bias, acc), pair_bias, acc)
    buffer = scores.new_buffer(q, acc)
    for rows in _rows(problem, plan):
        scores.measure(rows, lq)
        q_, k_, v_ = (_stack(x[rows], acc) for x in (q, k, v))  # [g,l,d], g = b*n*h of this block
        for qs in _spans(lq, plan.q):
            running = _OnlineSoftmax(may_be_empty=scores.biased)
            for ks in _spans(k.shape[-2], plan.k):
                running.add(scores.of(buffer, rows, qs, ks, q_[:, qs], k_[:, ks]), v_[:, ks])
            part = (*rows, qs)
            o_, m, l = running.finish()
            o[part] = o_.view(o[part].shape)
            lse[part], reference[part] = scores.statistic(m.view(lse[part].shape), l.view(lse[part].shape), qs)
    return o, lse, reference


def backward(
    do: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    mask_bias: Tensor | None,
    pair_bias: Tensor | None,
    o: Tensor,
    lse: Tensor,
    reference: Tensor,
    *,
    scale: float,
    layout: str,
    needs: tuple[bool, ...],
    deterministic: bool,
    config: Config,
) -> tuple[Tensor | None, ...]:
    """See `evoattn.backends`. Every sum has a fixed order, so results are bit-equal from run to run by nature."""
    problem = describe(q, k, v, mask, mask_bias, pair_bias)
    acc = accumulate_dtype(q.dtype)
    dq = empty(q.shape, layout, q) if needs[0] else None
    dk = empty(k.shape, layout, k) if needs[1] else None
    dv = empty(v.shape, layout, v) if needs[2] else None
    dmask_bias = mask_bias.new_zeros(mask_bias.shape, dtype=acc) if needs[3] and mask_bias is not None else None
    dpair_bias = pair_bias.new_zeros(pair_bias.shape, dtype=acc) if needs[4] and pair_bias is not None else None
    if problem.scores == 0:
        for gradient in (dq, dk, dv):
            if gradient is not None:
                gradient.zero_()
    else:
        do = torch.zeros((), dtype=o.dtype, device=o.device).expand(o.shape) if do is None else do
        plan = tiled_plan(problem, config)
        scores = _Scores(plan, scale, row_bias(mask, mask_bias, acc), pair_bias, acc)
        buffers = (scores.new_buffer(q, acc), scores.new_buffer(q, acc))
        for rows in _rows(problem, plan):
            scores.measure(rows, q.shape[-2])
            inputs = tuple(_stack(x[rows], acc) for x in (q, k, v, do, o))
            dlse_ = None if dlse is None else dlse[rows].flatten(0, 2)
            statistic = scores.subtrahends(lse[rows], reference[rows])
            sums = _backward_rows(scores, buffers, rows, inputs, statistic, dlse_, needs, dmask_bias, dpair_bias)
            for gradient, total in zip((dq, dk, dv), sums, strict=True):
                if gradient is not None and total is not None:
                    gradient[rows] = total.view(gradient[rows].shape)
    return (
        dq,
        dk,
        dv,
        None if dmask_bias is None or mask_bias is None else dmask_bias.to(mask_bias.dtype),
        None if dpair_bias is None or pair_bias is None else dpair_bias.to(pair_bias.dtype),
    )


def _backward_rows(
    scores: _Scores,
    buffers: tuple[Tensor, Tensor],
    rows: tuple[slice, slice, slice],
    inputs: tuple[Tensor, ...],
    statistic: tuple[Tensor, ...],
    dlse: Tensor | None,
    needs: tuple[bool, ...],
    dmask_bias: Tensor | None,
    dpair_bias: Tensor | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dq, dk, dv of one block of rows `[g,l,d]`; bias gradients are added to the tensors given."""
    q, k, v, do, o = inputs
    delta = (o * do).sum(-1, keepdim=True)  # [g,q,1]
    if dlse is not None:
        delta -= dlse.unsqueeze(-1) * LOG2E
    delta.masked_fill_(statistic[-1].unsqueeze(-1) == torch.inf, 0)
    dq, dk, dv = (torch.zeros_like(x) if need else None for x, need in zip((q, k, v), needs, strict=False))
    need_ds = dq is not None or dk is not None or dmask_bias is not None or dpair_bias is not None
    for qs, ks in itertools.product(_spans(q.shape[1], scores.plan.q), _spans(k.shape[1], scores.plan.k)):
        p = scores.of(buffers[0], rows, qs, ks, q[:, qs], k[:, ks])
        for number in statistic:
            p.sub_(number[:, qs, None])
        p.exp2_()  # [g,q,k]
        if dv is not None:
            dv[:, ks].baddbmm_(p.transpose(1, 2), do[:, qs])
        if not need_ds:
            continue
        ds = torch.bmm(do[:, qs], v[:, ks].transpose(1, 2), out=_view(buffers[1], p.shape))  # dP [g,q,k]
        ds.sub_(delta[:, qs]).mul_(p)
        if dq is not None:
            dq[:, qs].baddbmm_(ds, k[:, ks], alpha=scores.scale)
        if dk is not None:
            dk[:, ks].baddbmm_(ds.transpose(1, 2), q[:, qs], alpha=scores.scale)
        ds = scores.unflatten(ds, rows)  # [b,n,h,q,k]
        if dpair_bias is not None:
            part = _cut(dpair_bias, (rows[0], rows[2], qs, ks))
            part += ds.sum(1).sum_to_size(part.shape)
        if dmask_bias is not None:
            part = _cut(dmask_bias, (rows[0], rows[1], ks))
            part += ds.sum((2, 3)).sum_to_size(part.shape)
    return dq, dk, dv


class _Scores:
    """Makes the scores of one block, the same way and bit for bit in forward and backward.

    They are measured from the row shift, and for queries that a pair bias masks from `numerics.query_shift`.
    """

    def __init__(
        self, plan: TiledPlan, scale: float, bias: Tensor | None, pair_bias: Tensor | None, dtype: torch.dtype
    ) -> None:
        self.plan, self.scale, self.bias, self.pair_bias = plan, scale, bias, pair_bias
        self.biased = bias is not None or pair_bias is not None
        self.dtype, self.plain = dtype, pair_bias is None or _plain(pair_bias, dtype)
        self.shift: Tensor | None = None

    def measure(self, rows: tuple[slice, slice, slice], queries: int) -> None:
        """Find what the scores of a block of rows are measured from: its query shift `[b|1,n|1,h|1,q,1]`."""
        if self.plain or self.pair_bias is None:
            return
        bias = None if self.bias is None else _cut(self.bias, (rows[0], rows[1], slice(None)))
        shifts = []
        for qs in _spans(queries, self.plan.q):
            shift = query_shift(_cut(self.pair_bias, (rows[0], rows[2], qs, slice(None))), bias, self.dtype)
            shifts.append(shift.expand(-1, -1, -1, qs.stop - qs.start, -1))
        self.shift = torch.cat(shifts, -2)

    def statistic(self, m: Tensor, l: Tensor, qs: slice) -> tuple[Tensor, Tensor]:
        """lse and reference `[b,n,h,q]` of queries, from the largest score in log2 units, and the sum."""
        m = torch.where(l == 0, 0, m) if self.biased else m
        reference = m * LN2
        if self.shift is not None:
            reference = (self.shift[..., qs, 0] + reference).clamp_min_(torch.finfo(m.dtype).min)
        # What rounding the reference takes away goes to the LSE.
        return l.log2().add_(m - self._in_log2(reference, qs)), reference

    def subtrahends(self, lse: Tensor, reference: Tensor) -> tuple[Tensor, ...]:
        """What scores have subtracted before exp2 gives P, `[g,q]` each, one after the other.

        The last is +inf for a query that attends to nothing. The two numbers of the statistic are added up if that costs no
        digits.
        """
        first = self._in_log2(reference, slice(None))
        last = torch.where(lse == -torch.inf, torch.inf, lse)
        if first.device.type == "cpu" and first.abs().amax() <= _NEAR:
            return ((first + last).flatten(0, 2),)
        return first.flatten(0, 2), last.flatten(0, 2)

    def _in_log2(self, reference: Tensor, qs: slice) -> Tensor:
        """A reference as scores are measured, in log2 units."""
        return (reference if self.shift is None else reference - self.shift[..., qs, 0]) * LOG2E

    def new_buffer(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        plan = self.plan
        return like.new_empty(plan.b * plan.n * plan.h * plan.q * plan.k, dtype=dtype)

    def of(self, buffer: Tensor, rows: tuple[slice, slice, slice], qs: slice, ks: slice, q: Tensor, k: Tensor) -> Tensor:
        """S `[g,q,k]` in units of log 2, in the buffer, from q `[g,q,d]` and k `[g,k,d]`."""
        s = _view(buffer, (q.shape[0], q.shape[1], k.shape[1]))
        torch.bmm(q * (self.scale * LOG2E), k.transpose(1, 2), out=s)
        s5 = self.unflatten(s, rows)  # [b,n,h,q,k]
        if self.pair_bias is not None:
            pair = _cut(self.pair_bias, (rows[0], rows[2], qs, ks))
            s5.add_(pair.unsqueeze(1) if self.shift is None else shifted_pair(pair, self.shift[..., qs, :]), alpha=LOG2E)
        if self.bias is not None:
            s5.add_(_cut(self.bias, (rows[0], rows[1], ks))[:, :, None, None, :], alpha=LOG2E)
        return s

    @staticmethod
    def unflatten(x: Tensor, rows: tuple[slice, slice, slice]) -> Tensor:
        return x.view(*(part.stop - part.start for part in rows), *x.shape[1:])


class _OnlineSoftmax:
    """The running maximum m `[g,q,1]`, sum l `[g,q,1]` and unnormalised output o `[g,q,c]` over blocks of keys."""

    def __init__(self, *, may_be_empty: bool) -> None:
        self.may_be_empty = may_be_empty
        self.m: Tensor | None = None
        self.l: Tensor | None = None
        self.o: Tensor | None = None

    def add(self, s: Tensor, v: Tensor) -> None:
        """Take in a block of scores `[g,q,k]`, which are overwritten, and its values `[g,k,c]`."""
        m = s.amax(-1, keepdim=True)
        if self.m is not None:
            m = torch.maximum(self.m, m)
        # A row without an attended key so far has m = -inf: measured from 0, all its terms are exp2(-inf) = 0, never NaN.
        reference = torch.where(m == -torch.inf, 0, m) if self.may_be_empty else m
        p = s.sub_(reference).exp2_()
        if self.m is None or self.l is None or self.o is None:
            self.l, self.o = p.sum(-1, keepdim=True), torch.bmm(p, v)
        else:
            rescale = torch.exp2(self.m - reference)
            self.l.mul_(rescale).add_(p.sum(-1, keepdim=True))
            self.o.mul_(rescale).baddbmm_(p, v)
        self.m = m

    def finish(self) -> tuple[Tensor, Tensor, Tensor]:
        """o `[g,q,c]` normalised, m and l; o and l are 0 for a row without an attended key."""
        if self.m is None or self.l is None or self.o is None:
            raise RuntimeError("finish() before any block of keys")
        total = torch.where(self.l == 0, 1, self.l) if self.may_be_empty else self.l
        return self.o.div_(total), self.m, self.l


def _plain(pair_bias: Tensor, dtype: torch.dtype) -> bool:
    """Whether a pair bias can be added as it is: it is large for no query, and log2 e times it is infinite nowhere.

    A GPU is not asked, since the answer would have to be waited for.
    """
    if pair_bias.device.type != "cpu" or pair_bias.numel() == 0:
        return False
    low, high = (x.item() for x in torch.aminmax(pair_bias))
    if low > -NEAR and high < NEAR:
        return True
    return low > -largest_bias(dtype) and not query_shift(pair_bias, None, dtype).any()


def _rows(problem: Problem, plan: TiledPlan) -> Iterator[tuple[slice, slice, slice]]:
    return itertools.product(_spans(problem.b, plan.b), _spans(problem.n, plan.n), _spans(problem.h, plan.h))


def _spans(length: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def _stack(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).flatten(0, 2)


def _view(buffer: Tensor, shape: tuple[int, ...] | torch.Size) -> Tensor:
    return buffer[: shape[0] * shape[1] * shape[2]].view(shape)


def _cut(x: Tensor, parts: tuple[slice, ...]) -> Tensor:
    """Slice each axis, leaving those of size 1 to broadcast."""
    return x[tuple(slice(None) if size == 1 else part for size, part in zip(x.shape, parts, strict=True))]
