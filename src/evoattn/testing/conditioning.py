"""How far rounding alone can move each value of a call: the conditioning bound of docs/mathematics.md, in numbers.

First order, with independent roundings of unit size / sqrt(3): the root of the mean square of what a backend loses that keeps
scores in the accumulation dtype and saves O in q's dtype. Two things make a problem ill-conditioned.

- Large scores: exp(S - LSE) turns an absolute error of S into a relative one of P.
- Cancellation: dS = P (dP - delta) is near 0 where a query attends to one key alone, and its sum over keys always is.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from evoattn.numerics import accumulate_dtype
from evoattn.testing.cases import Inputs
from evoattn.testing.dense import Results, exact_biases, heads_first, key_axes, scores

__all__ = ["Bound", "conditioning", "huge_queries"]

_ROUNDING = 12**-0.5
"""The root of the mean square of a rounding error, in units of the distance between neighbours."""


@dataclasses.dataclass(frozen=True)
class Bound:
    """What rounding takes from one value.

    Args:
        error: the expected error, as `relative_error` counts it.
        independent: how many errors of about the same size make it up. The fewer, the more it varies.
    """

    error: float
    independent: float

    @property
    def limit(self) -> float:
        """What rounding does not pass: two expected errors if there are many independent ones, four if there is one."""
        return self.error * (2 + 2 / math.sqrt(self.independent))


def conditioning(inputs: Inputs, expected: Results) -> dict[str, Bound]:
    """For every value what rounding takes from it.

    Args:
        inputs: the call.
        expected: its float64 results.
    """
    values = expected.values
    e = torch.finfo(accumulate_dtype(inputs.q.dtype)).eps * _ROUNDING
    u = torch.finfo(inputs.q.dtype).eps * _ROUNDING
    q, k, v, do = (heads_first(x.double(), inputs) for x in (inputs.q, inputs.k, inputs.v, inputs.do))
    gated = inputs.gate is not None
    opened = torch.sigmoid(heads_first(inputs.gate.double(), inputs)) if inputs.gate is not None else torch.ones_like(do)
    do_of_p = do * opened  # the cotangent of O before the gate, which is rounded to q's dtype for products
    scale = q.shape[-1] ** -0.5 if inputs.case.scale is None else inputs.case.scale
    biases = exact_biases(inputs, _double(inputs.mask_bias), _double(inputs.pair_bias), torch.float64)
    s = scores(inputs, q, k, biases)  # [*,n,h,q,k]
    lse = torch.logsumexp(s, -1, keepdim=True) if s.shape[-1] else s.new_full((*s.shape[:-1], 1), -torch.inf)
    p = torch.exp(s - torch.where(lse == -torch.inf, torch.inf, lse))
    sizes = torch.where(p > 0, s.abs() + lse.abs(), 0)
    of_qk = _in_turn(q.shape[-1]) * scale**2 * torch.matmul(q.square(), k.square().transpose(-1, -2))
    of_s = e**2 * ((1 + sizes).square() + of_qk)
    of_p = p.square() * (of_s + u**2 + e**2 * _in_turn(max(s.shape[-2:])))

    o = heads_first(values["o"], inputs)
    of_o = torch.matmul(of_p, v.square()) * opened.square() + gated * (e * o).square()
    lost = {"o": of_o, "lse": (p * of_s).sum(-1)}
    if biases.shift is not None:
        of_sum_with_shift = lost["lse"] + (e * biases.shift.squeeze(-1)).square()
        lost["lse"] = torch.where(values["lse"] == 0, 0, of_sum_with_shift)  # 0 where `judge` leaves queries out
    of_v = torch.matmul((of_p + gated * (u * p).square()).transpose(-1, -2), do_of_p.square())
    # Such as the output of a query with one key; but large scores lose so much that P is not 1 for it.
    exactly = (o == o.to(inputs.q.dtype).double()) & (of_s.amax(-1, keepdim=True) <= (2 * u) ** 2)
    delta = (o * do).sum(-1, keepdim=True)
    of_sum = e**2 * _in_turn(v.shape[-1])
    of_delta = ((o * do).square() * (torch.where(exactly, 0, u**2) + of_sum)).sum(-1, keepdim=True)
    if inputs.dlse is not None:
        delta = delta - inputs.dlse.double().unsqueeze(-1)
    if gated:
        lost["dgate"] = (do * (1 - opened)).square() * (of_o + torch.where(exactly, 0, (u * o).square()))
    dp = torch.matmul(do_of_p, v.transpose(-1, -2))
    of_dp = (of_sum + gated * u**2) * torch.matmul(do_of_p.square(), v.square().transpose(-1, -2))
    of_ds = of_p * (dp - delta).square() + p.square() * of_dp
    common = p * of_delta.sqrt()  # the same error for all keys of a query, times P
    lost["dq"] = scale**2 * (torch.matmul(of_ds, k.square()) + of_delta * torch.matmul(p, k).square())
    of_ds_q = of_ds + common.square()
    lost["dk"] = scale**2 * torch.matmul(of_ds_q.transpose(-1, -2), q.square())
    lost["dv"] = of_v
    for name, bias in (("dmask_bias", key_axes(inputs.mask_bias, q.ndim)), ("dpair_bias", inputs.pair_bias)):
        if bias is not None:
            over_keys = bias.shape[-1] == 1
            terms = of_ds.sum(-1, keepdim=True) + common.sum(-1, keepdim=True).square() if over_keys else of_ds_q
            lost[name] = terms.sum_to_size(bias.shape)  # one error an element, however many terms it has
    units = {"lse": e}
    for name, bias in (("dmask_bias", inputs.mask_bias), ("dpair_bias", inputs.pair_bias)):
        units[name] = u if bias is None else max(u, torch.finfo(bias.dtype).eps * _ROUNDING)
    if gated:  # which makes numbers as small as it likes
        lost = {name: terms + _least(inputs.q.dtype) ** 2 for name, terms in lost.items()}
    return {name: _bound(lost[name], value, units.get(name, u)) for name, value in values.items()}


def _least(dtype: torch.dtype) -> float:
    """What a number may lose because it is small; GPUs take subnormal numbers of 32 bits for 0, those of float16 not."""
    info = torch.finfo(dtype)
    return info.smallest_normal * (info.eps if dtype == torch.float16 else 1)


def _in_turn(terms: int) -> float:
    """The mean square of the error of a sum, one term after the other, in units of a term's square and of its rounding's."""
    return 1 + terms / 2


def _bound(lost: Tensor, value: Tensor, unit: float) -> Bound:
    """The bound of a value from the mean square of the error of each element, and the rounding of the value itself."""
    norm: float = torch.where(value.isfinite(), value, 0).norm().item()
    lost = torch.where(lost.isfinite(), lost, 0)
    total: float = lost.sum().item()
    fourth: float = (lost / total if total else lost).square().sum().item()
    error = (total + (unit * norm) ** 2) ** 0.5
    return Bound(error / norm if norm else error, max(1.0, 1 / fourth) if fourth else 1.0)


def _double(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.double()


def huge_queries(inputs: Inputs, limit: float) -> Tensor:
    """Queries `[*,n|1,h|1,q|1]` beside whose biases the accumulation dtype swallows the scores.

    That is, rounding their largest sum of biases, measured from the row shift (docs/mathematics.md), loses more than `limit`.
    No low precision computes these well, dense torch in the same dtype no better than a backend.
    """
    mask_bias = _double(key_axes(inputs.mask_bias, inputs.q.ndim))
    biases = exact_biases(inputs, _double(inputs.mask_bias), _double(inputs.pair_bias), torch.float64)
    if biases.shift is None or inputs.pair_bias is None:
        return torch.zeros((1,) * (inputs.q.ndim - 1), dtype=torch.bool, device=inputs.q.device)
    of_row = torch.zeros((), dtype=torch.float64, device=inputs.q.device)
    if mask_bias is not None:
        mask = key_axes(inputs.mask, inputs.q.ndim)
        attended = mask_bias if mask is None else torch.where(mask, mask_bias, -torch.inf)
        of_row = attended.amax(-1, keepdim=True)
        of_row = torch.where(of_row.isfinite(), of_row, 0)
    eps = torch.finfo(accumulate_dtype(inputs.q.dtype)).eps
    huge = eps * (biases.shift - of_row).abs() > limit
    return huge.squeeze(-1)[(None,) * (inputs.q.ndim - huge.ndim)]
