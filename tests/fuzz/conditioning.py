"""Budgets of ill-conditioned problems: how far rounding alone can move each value.

`conditioning` is the bound of docs/mathematics.md in numbers. To first order, with independent roundings of unit size /
sqrt(3), it is the root of the mean square of what a backend loses that keeps scores in the accumulation dtype and saves O in
q's dtype. Two things make a problem ill-conditioned.

- Large scores: exp(S - LSE) turns an absolute error of S into a relative one of P.
- Cancellation: dS = P (dP - delta) is near 0 where a query attends to one key alone, and its sum over keys always is.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch
from torch import Tensor

from evoattn.core.numerics import accumulate_dtype
from evoattn.testing.cases import CaseInputs
from evoattn.testing.dense import Results, heads_first, key_axes, scores, shifted_biases
from evoattn.testing.oracle import CEILING, MULTIPLE, beyond, budgets, coarser, errors, low_precision

_MULTIPLE_OF_DENSE = 3.0

_ROUNDING = 12**-0.5
"""The root of the mean square of a rounding error, in units of the distance between neighbours."""


@dataclasses.dataclass(frozen=True)
class Bound:
    """The error of one value by rounding alone.

    Args:
        error: the expected error, as `relative_error` counts it.
        independent: how many errors of about the same size make it up. The fewer, the more it varies.
    """

    error: float
    independent: float

    @property
    def limit(self) -> float:
        """The most that rounding alone does: two expected errors if there are many independent ones, four if there is one."""
        return self.error * (2 + 2 / math.sqrt(self.independent))


def conditioning(inputs: CaseInputs, expected: Results) -> dict[str, Bound]:
    """The error of every value of a call by rounding alone, from its float64 results."""
    values = expected.values
    e = torch.finfo(accumulate_dtype(inputs.q.dtype)).eps * _ROUNDING
    u = torch.finfo(inputs.q.dtype).eps * _ROUNDING
    q, k, v, do = (heads_first(x.double(), inputs) for x in (inputs.q, inputs.k, inputs.v, inputs.do))
    gated = inputs.gate is not None
    opened = torch.sigmoid(heads_first(inputs.gate.double(), inputs)) if inputs.gate is not None else torch.ones_like(do)
    do_of_p = do * opened  # the cotangent of O before the gate, which is rounded to q's dtype for products
    scale = q.shape[-1] ** -0.5 if inputs.case.scale is None else inputs.case.scale
    biases = shifted_biases(inputs, inputs.mask_bias, inputs.pair_bias, torch.float64)
    s = scores(inputs, q, k, biases)  # [*,n,h,q,k]
    lse = torch.logsumexp(s, -1, keepdim=True) if s.shape[-1] else s.new_full((*s.shape[:-1], 1), -torch.inf)
    p = torch.exp(s - torch.where(lse == -torch.inf, torch.inf, lse))
    sizes = torch.where(p > 0, s.abs() + lse.abs(), 0)
    qk_loss = _in_turn(q.shape[-1]) * scale**2 * torch.matmul(q.square(), k.square().transpose(-1, -2))
    s_loss = e**2 * ((1 + sizes).square() + qk_loss)
    p_loss = p.square() * (s_loss + u**2 + e**2 * _in_turn(max(s.shape[-2:])))

    o = heads_first(values["o"], inputs)
    o_loss = torch.matmul(p_loss, v.square()) * opened.square() + gated * (e * o).square()
    lost = {"o": o_loss, "lse": (p * s_loss).sum(-1)}
    if biases.shift is not None:
        shift_loss = lost["lse"] + (e * biases.shift.squeeze(-1)).square()
        lost["lse"] = torch.where(values["lse"] == 0, 0, shift_loss)  # 0 where `judge` leaves queries out
    v_loss = torch.matmul((p_loss + gated * (u * p).square()).transpose(-1, -2), do_of_p.square())
    # Such as the output of a query with one key; but large scores lose so much that P is not 1 for it.
    exactly = (o == o.to(inputs.q.dtype).double()) & (s_loss.amax(-1, keepdim=True) <= (2 * u) ** 2)
    delta = (o * do).sum(-1, keepdim=True)
    sum_loss = e**2 * _in_turn(v.shape[-1])
    delta_loss = ((o * do).square() * (torch.where(exactly, 0, u**2) + sum_loss)).sum(-1, keepdim=True)
    if inputs.dlse is not None:
        delta = delta - inputs.dlse.double().unsqueeze(-1)
    if gated:
        lost["dgate"] = (do * (1 - opened)).square() * (o_loss + torch.where(exactly, 0, (u * o).square()))
    dp = torch.matmul(do_of_p, v.transpose(-1, -2))
    dp_loss = (sum_loss + gated * u**2) * torch.matmul(do_of_p.square(), v.square().transpose(-1, -2))
    ds_loss = p_loss * (dp - delta).square() + p.square() * dp_loss
    common = p * delta_loss.sqrt()  # the same error for all keys of a query, times P
    lost["dq"] = scale**2 * (torch.matmul(ds_loss, k.square()) + delta_loss * torch.matmul(p, k).square())
    ds_loss_q = ds_loss + common.square()
    lost["dk"] = scale**2 * torch.matmul(ds_loss_q.transpose(-1, -2), q.square())
    lost["dv"] = v_loss
    units = {"lse": e}
    for name, bias in (("dmask_bias", key_axes(inputs.mask_bias, q.ndim)), ("dpair_bias", inputs.pair_bias)):
        if bias is not None:
            units[name] = max(u, torch.finfo(bias.dtype).eps * _ROUNDING)
            over_keys = bias.shape[-1] == 1
            terms = ds_loss.sum(-1, keepdim=True) + common.sum(-1, keepdim=True).square() if over_keys else ds_loss_q
            lost[name] = terms.sum_to_size(bias.shape)  # one error an element, however many terms it has
    if gated:  # numbers may be tiny, and GPUs take subnormal numbers of 32 bits for 0, but not those of float16
        info = torch.finfo(inputs.q.dtype)
        least = info.smallest_normal * (info.eps if inputs.q.dtype == torch.float16 else 1)
        lost = {name: terms + least**2 for name, terms in lost.items()}
    return {name: _bound(lost[name], value, units.get(name, u)) for name, value in values.items()}


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


def huge_queries(inputs: CaseInputs) -> Tensor:
    """Queries `[*,n|1,h|1,q|1]` whose scores the accumulation dtype swallows, because a bias is huge.

    That is, rounding their largest sum of biases, measured from the row shift (docs/mathematics.md), loses more than the
    ceiling of q's dtype. No low precision computes these well, dense torch in the same dtype no better than a backend.
    """
    shift = shifted_biases(inputs, inputs.mask_bias, inputs.pair_bias, torch.float64).shift
    if shift is None or inputs.pair_bias is None:
        return torch.zeros((1,) * (inputs.q.ndim - 1), dtype=torch.bool, device=inputs.q.device)
    row_shift = shifted_biases(inputs, inputs.mask_bias, None, torch.float64).shift
    shift = shift if row_shift is None else shift - row_shift
    huge = torch.finfo(accumulate_dtype(inputs.q.dtype)).eps * shift.abs() > CEILING[inputs.q.dtype]
    return huge.squeeze(-1)[(None,) * (inputs.q.ndim - huge.ndim)]


def excess(
    inputs: CaseInputs,
    results: Results,
    expected: Results,
    *,
    swallowed: bool = False,
    only: Callable[[Results], Results] = lambda results: results,
) -> list[tuple[str, float, float]]:
    """Return the values beyond their budgets on any problem, however ill-conditioned: (name, error, allowed).

    The ceiling of `budgets` yields to what rounding alone takes from the value, and there four times what dense torch loses is
    allowed too. Where the first is small, so is the budget: that of `budgets`.

    Args:
        inputs, results, expected: the call, a backend's results, and the float64 results.
        swallowed: allow three times what dense torch in the same dtype loses, without a ceiling.
        only: what was applied to results and expected, to be applied to what dense torch gives.
    """
    found = errors(results, expected)
    lost = errors(only(low_precision(inputs)), expected)
    allowed = budgets(inputs, results, expected, lost)
    if not beyond(found, allowed):
        return []
    for name, bound in conditioning(inputs, expected).items():
        if name in allowed and bound.limit > allowed[name]:
            ceiling = CEILING[coarser(name, inputs, results)]
            allowed[name] = max(bound.limit, MULTIPLE * lost[name] if bound.limit > ceiling else 0.0)
        if name in allowed and swallowed:
            allowed[name] = max(allowed[name], _MULTIPLE_OF_DENSE * lost[name])
    return beyond(found, allowed)
