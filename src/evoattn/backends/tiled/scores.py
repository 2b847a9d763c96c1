"""The scores of a piece of the problem, made the same way and bit for bit in both passes."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from evoattn.backends.tiled.sizes import TiledPlan
from evoattn.core import numerics
from evoattn.core.numerics import LN2, LOG2E, NEAR, bias_limit, shifted_biases

Rows = tuple[slice, slice, slice]
"""b, n and h of a piece. Where matrices are multiplied these are one axis, g."""

Part = tuple[slice, slice, slice, slice]
"""b, n, h and queries of a piece."""


@dataclasses.dataclass(frozen=True)
class Scores:
    """The tensors and settings from which the scores of every block are computed. Threads share it, and it does not change.

    Args:
        plan: block sizes.
        scale: of q k^T.
        key_bias: mask and mask bias `[b|1,n|1,k]`, as `numerics.key_bias` makes it.
        pair_bias: `[b|1,h|1,q|1,k|1]`.
        dtype: of scores, statistics and sums.
        plain: whether the pair bias can be added as it is.
    """

    plan: TiledPlan
    scale: float
    key_bias: Tensor | None
    pair_bias: Tensor | None
    dtype: torch.dtype
    plain: bool

    @staticmethod
    def of(plan: TiledPlan, scale: float, key_bias: Tensor | None, pair_bias: Tensor | None, dtype: torch.dtype) -> Scores:
        """The scores of a problem."""
        return Scores(plan, scale, key_bias, pair_bias, dtype, pair_bias is None or is_plain(pair_bias, key_bias, dtype))

    def new_buffer(self, like: Tensor) -> Tensor:
        """Room for the scores of the largest block."""
        plan = self.plan
        return like.new_empty(plan.b * plan.n * plan.h * plan.q * plan.k, dtype=self.dtype)

    def query_shift(self, part: Part) -> Tensor | None:
        """The query shift (`numerics.query_shift`), `[b|1,n|1,h|1,q|1,1]`; None if it is 0 for all."""
        if self.plain or self.pair_bias is None:
            return None
        b, n, h, qs = part
        key_bias = None if self.key_bias is None else cut(self.key_bias, (b, n, slice(None)))
        return numerics.query_shift(cut(self.pair_bias, (b, h, qs, slice(None))), key_bias, self.dtype)

    def block(self, buffer: Tensor, part: Part, ks: slice, q: Tensor, k: Tensor, query_shift: Tensor | None) -> Tensor:
        """S `[g,q,k]` in units of log 2, in the buffer, from q `[g,q,d]` and k `[g,k,d]`."""
        b, n, h, qs = part
        s = view(buffer, (q.shape[0], q.shape[1], k.shape[1]))
        torch.baddbmm(s, q, k.transpose(1, 2), beta=0, alpha=self.scale * LOG2E, out=s)
        s5 = unflatten(s, part)  # [b,n,h,q,k]
        key_bias = None if self.key_bias is None else cut(self.key_bias, (b, n, ks))
        if self.pair_bias is not None:
            pair = cut(self.pair_bias, (b, h, qs, ks))
            if query_shift is not None:
                s5.add_(shifted_biases(pair, key_bias, query_shift), alpha=LOG2E)
                return s
            s5.add_(pair.unsqueeze(1).to(s.dtype), alpha=LOG2E)  # torch is slow if it adds numbers of two dtypes
        if key_bias is not None:
            s5.add_(key_bias[:, :, None, None, :], alpha=LOG2E)
        return s


def statistic(m: Tensor, l: Tensor, query_shift: Tensor | None) -> tuple[Tensor, Tensor]:
    """lse and reference `[b,n,h,q]`, from the largest score in log2 units, and the sum, which is 0 where there is no key."""
    m = torch.where(l == 0, 0, m)
    reference = m * LN2
    if query_shift is not None:
        reference = (query_shift[..., 0] + reference).clamp_min_(torch.finfo(m.dtype).min)
    # What rounding the reference takes away goes to the LSE.
    return l.log2().add_(m - _in_log2(reference, query_shift)), reference


def subtrahends(lse: Tensor, reference: Tensor, query_shift: Tensor | None) -> tuple[Tensor, ...]:
    """Return what is subtracted from scores before exp2 gives P, `[b,n,h,q]` each, one after the other.

    The last is +inf for a query that attends to nothing. The two numbers of the statistic are added up if that costs no digits.
    """
    first = _in_log2(reference, query_shift)
    last = torch.where(lse == -torch.inf, torch.inf, lse)
    if first.device.type == "cpu" and first.abs().amax() <= NEAR:
        return (first + last,)
    return first, last


def _in_log2(reference: Tensor, query_shift: Tensor | None) -> Tensor:
    """A reference as scores are measured, in log2 units."""
    return (reference if query_shift is None else reference - query_shift[..., 0]) * LOG2E


def is_plain(pair_bias: Tensor, key_bias: Tensor | None, dtype: torch.dtype) -> bool:
    """Return whether a pair bias can be added as it is: large for no query, and finite if multiplied by log2 e.

    A GPU is not asked, since the answer would have to be waited for.
    """
    if pair_bias.device.type != "cpu" or pair_bias.numel() == 0:
        return False
    low, high = (x.item() for x in torch.aminmax(pair_bias))
    if low > -NEAR and high < NEAR:
        return True
    if low <= -bias_limit(dtype) or high >= NEAR:
        return False
    if key_bias is None:
        return not numerics.query_shift(pair_bias, None, dtype).any()
    return _every_query_has_a_near_key(pair_bias, key_bias)


def _every_query_has_a_near_key(pair_bias: Tensor, key_bias: Tensor) -> bool:
    """Return whether each query of each row that has keys has one where both biases are near 0."""
    pair = pair_bias.flatten(1, 2).expand(-1, -1, key_bias.shape[-1])  # [b|1,hq,k]
    near_rows, near_queries = ((x > -NEAR / 2).float() for x in (key_bias, pair))
    near = torch.matmul(near_rows, near_queries.transpose(1, 2)) > 0  # [b|1,n|1,hq]
    empty_rows, empty_queries = ((x == -torch.inf).all(-1) for x in (key_bias, pair))
    return bool((near | empty_rows.unsqueeze(2) | empty_queries.unsqueeze(1)).all())


def spans(length: int, size: int) -> list[slice]:
    """An axis in pieces of `size`."""
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def stack(x: Tensor, dtype: torch.dtype) -> Tensor:
    """b, n and h as one axis g, in the dtype of scores; a copy only where it has to be one."""
    return x.flatten(0, 2).to(dtype)


def unflatten(x: Tensor, part: Part) -> Tensor:
    """g as b, n and h."""
    return x.view(*(axis.stop - axis.start for axis in part[:3]), *x.shape[1:])


def view(buffer: Tensor, shape: tuple[int, ...] | torch.Size) -> Tensor:
    """The start of a buffer."""
    return buffer[: shape[0] * shape[1] * shape[2]].view(shape)


def cut(x: Tensor, parts: tuple[slice, ...]) -> Tensor:
    """Slice each axis, leaving those of size 1 to broadcast."""
    return x[tuple(slice(None) if size == 1 else part for size, part in zip(x.shape, parts, strict=True))]
