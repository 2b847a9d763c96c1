"""Dense attention on user shapes, in whatever dtype it is given, with its gradients by plain autograd."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from evoattn.core.problem import GRADIENTS
from evoattn.testing.cases import CaseInputs

Call = Callable[[Tensor, Tensor, Tensor, "Tensor | None", "Tensor | None", "Tensor | None"], tuple[Tensor, Tensor]]


@dataclasses.dataclass(frozen=True)
class Results:
    """Output, LSE and gradients of one call, by the names o, lse, dq, dk, dv, dmask_bias, dpair_bias, dgate."""

    values: dict[str, Tensor]


@dataclasses.dataclass(frozen=True)
class Biases:
    """Terms that are added to the scores, and the constant from which each query's sum is measured."""

    terms: tuple[Tensor, ...]
    shift: Tensor | None = None


def key_axes(x: Tensor | None, ndim: int) -> Tensor | None:
    """A mask or mask bias as `[*,n,1,1,k]`, or the end of that. `ndim` is q's number of axes."""
    if x is None or x.ndim > max(2, ndim - 2):
        return x
    return x[..., None, None, :]


def heads_first(x: Tensor, inputs: CaseInputs) -> Tensor:
    """`[*,n,h,l,d]`, whatever the layout."""
    return x.transpose(-2, -3) if inputs.case.layout == "bnlhd" else x


def plain_biases(inputs: CaseInputs, mask_bias: Tensor | None, pair_bias: Tensor | None, dtype: torch.dtype) -> Biases:
    """The biases in the dtype of the scores, added one after the other, as a model in plain torch does it."""
    return Biases(tuple(x.to(dtype) for x in (pair_bias, key_axes(mask_bias, inputs.q.ndim)) if x is not None))


def shifted_biases(inputs: CaseInputs, mask_bias: Tensor | None, pair_bias: Tensor | None, dtype: torch.dtype) -> Biases:
    """The biases measured from the largest sum of a query over the keys that it attends to.

    At -1e9 even float64 has steps of 1e-7. So what rounding takes from the sum of both biases is kept, and added once the shift
    is off. No gradient flows through the shift: it cancels in the output, and the LSE gets it back.
    """
    bias_terms = plain_biases(inputs, mask_bias, pair_bias, dtype).terms
    if not bias_terms or not inputs.case.lk:
        return Biases(bias_terms)
    total = bias_terms[0] if len(bias_terms) == 1 else bias_terms[0] + bias_terms[1]
    with torch.no_grad():
        mask = key_axes(inputs.mask, inputs.q.ndim)
        attended = total if mask is None else torch.where(mask, total, -torch.inf)
        shift = attended.amax(-1, keepdim=True)
        shift = torch.where(shift.isfinite(), shift, 0)
        rounding = _rounded_off(*bias_terms, total) if len(bias_terms) == 2 else None
    total = total - shift
    return Biases((total if rounding is None else total + rounding,), shift)


def _rounded_off(a: Tensor, b: Tensor, total: Tensor) -> Tensor:
    """a + b - total without any error (Knuth's two-sum), 0 where it is not finite."""
    b_part = total - a
    rounding = (a - (total - b_part)) + (b - b_part)
    return torch.where(rounding.isfinite(), rounding, 0)


def scores(inputs: CaseInputs, q: Tensor, k: Tensor, biases: Biases) -> Tensor:
    """S `[*,n,h,q,k]` of q and k with heads first; -inf where a key is not attended."""
    scale = q.shape[-1] ** -0.5 if inputs.case.scale is None else inputs.case.scale
    s = torch.matmul(q * scale, k.transpose(-1, -2))
    for term in biases.terms:
        s = s + term
    mask = key_axes(inputs.mask, q.ndim)
    return s if mask is None else s.masked_fill(~mask, -torch.inf)


def dense(inputs: CaseInputs, biases_of: Callable[..., Biases]) -> Call:
    """Attention by the plainest torch there is, as a function of `problem.GRADIENTS`."""

    def call(
        q: Tensor, k: Tensor, v: Tensor, mask_bias: Tensor | None, pair_bias: Tensor | None, gate: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        q, k, v = (heads_first(x, inputs) for x in (q, k, v))
        biases = biases_of(inputs, mask_bias, pair_bias, q.dtype)
        s = scores(inputs, q, k, biases)  # [*,n,h,q,k]
        empty = (s == -torch.inf).all(-1, keepdim=True)  # also where there is no key at all
        p = torch.softmax(s.masked_fill(empty, 0), -1).masked_fill(empty, 0)
        lse = torch.logsumexp(s.masked_fill(empty, 0), -1).masked_fill(empty.squeeze(-1), -torch.inf)
        lse = lse if biases.shift is None else lse + biases.shift.squeeze(-1)
        o = heads_first(torch.matmul(p, v), inputs)
        return o if gate is None else o * torch.sigmoid(gate), lse

    return call


def differentiate(call: Call, inputs: CaseInputs, dtype: torch.dtype | None) -> Results:
    """Outputs and the wanted gradients of a call, on inputs converted to a dtype."""

    def leaf(name: str) -> Tensor | None:
        x: Tensor | None = getattr(inputs, name)
        if x is None:
            return None
        x = x.detach() if dtype is None else x.detach().to(dtype)
        return x.requires_grad_(name in inputs.differentiable)

    leaves = {name: leaf(name) for name in GRADIENTS}
    o, lse = call(*leaves.values())  # type: ignore[arg-type]
    outputs, cotangents = [o], [inputs.do.to(o.dtype)]
    if inputs.dlse is not None and lse.requires_grad:  # it depends on all inputs but v and the gate
        outputs.append(lse)
        cotangents.append(inputs.dlse.to(lse.dtype))
    differentiable = {name: x for name, x in leaves.items() if x is not None and x.requires_grad}
    gradients = torch.autograd.grad(outputs, list(differentiable.values()), cotangents) if differentiable else ()
    values = {"o": o.detach(), "lse": lse.detach()}
    values.update({f"d{name}": g for name, g in zip(differentiable, gradients, strict=True)})
    return Results(values)
