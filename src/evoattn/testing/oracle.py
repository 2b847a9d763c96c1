"""The float64 oracle and the budget of error: a small multiple of what a dense computation in the same dtype loses itself."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch
from torch import Tensor

from evoattn.api import evoformer_attention
from evoattn.numerics import accumulate_dtype
from evoattn.testing.cases import Inputs
from evoattn.tuning import Config

__all__ = ["Results", "budgets", "check", "errors", "oracle", "relative_error", "run"]

_MULTIPLE = 4.0
_FLOOR = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}
_CEILING = {torch.float64: 1e-10, torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


@dataclasses.dataclass(frozen=True)
class Results:
    """Output, LSE and gradients of one call, by the names o, lse, dq, dk, dv, dmask_bias, dpair_bias."""

    values: dict[str, Tensor]


def run(inputs: Inputs, backend: str = "auto", *, deterministic: bool = False, config: Config | None = None) -> Results:
    """Forward and backward through the public call."""

    def call(q: Tensor, k: Tensor, v: Tensor, mask_bias: Tensor | None, pair_bias: Tensor | None) -> tuple[Tensor, Tensor]:
        return evoformer_attention(
            q,
            k,
            v,
            mask=inputs.mask,
            mask_bias=mask_bias,
            pair_bias=pair_bias,
            scale=inputs.case.scale,
            layout=inputs.case.layout,
            return_lse=True,
            backend=backend,
            deterministic=deterministic,
            config=config,
        )

    return _differentiate(call, inputs, None)


def oracle(inputs: Inputs) -> Results:
    """The same in float64, dense, by plain autograd.

    The largest mask bias of a row is taken off first: at -1e9 even float64 loses digits.
    """
    shift = inputs.mask_bias.double().amax(-1, keepdim=True) if inputs.mask_bias is not None and inputs.case.lk else None
    return _differentiate(_dense(inputs, shift), inputs, torch.float64)


def low_precision(inputs: Inputs) -> Results:
    """The same, dense, with every intermediate in q's dtype, as a model in plain torch computes it."""
    return _differentiate(_dense(inputs), inputs, inputs.q.dtype)


def relative_error(value: Tensor, expected: Tensor) -> float:
    """Norm of the difference over norm of what was expected, in float64.

    Equal infinities differ by nothing; NaN is infinitely wrong.
    """
    value, expected = value.detach().double(), expected.detach().double()
    if value.shape != expected.shape:
        raise ValueError(f"shapes differ: {tuple(value.shape)} and {tuple(expected.shape)}")
    difference = torch.where(value == expected, 0.0, value - expected)
    norm: float = torch.where(expected.isfinite(), expected, 0.0).norm().item()
    error: float = difference.norm().item()
    if math.isnan(error):
        return math.inf
    return error if norm == 0 else error / norm


def errors(results: Results, expected: Results) -> dict[str, float]:
    """The relative error of every value."""
    return {name: relative_error(value, expected.values[name]) for name, value in results.values.items()}


def budgets(inputs: Inputs, results: Results, expected: Results) -> dict[str, float]:
    """The error allowed for every value: four times what the dense low-precision computation loses, within the dtype's bounds.

    The LSE is held to the bounds of its own dtype, the others to those of the coarser of q's and their own. Scores of size x
    that are
    rounded to eps x change exp(S) by a share of eps x, whoever computes it: that is the least budget where LSEs are large.
    """
    allowed = {}
    lse = expected.values["lse"]
    size = lse[lse.isfinite()].square().mean().sqrt().item() if lse.isfinite().any() else 0.0
    conditioning = size * torch.finfo(accumulate_dtype(inputs.q.dtype)).eps
    lost = errors(low_precision(inputs), expected)
    for name in results.values:
        dtype = results.values[name].dtype
        if name != "lse" and torch.finfo(inputs.q.dtype).eps > torch.finfo(dtype).eps:
            dtype = inputs.q.dtype
        allowed[name] = min(max(_MULTIPLE * lost[name], _FLOOR[dtype], conditioning), _CEILING[dtype])
    return allowed


def check(results: Results, inputs: Inputs) -> None:
    """Raise AssertionError if a value has the wrong shape or dtype, or is further from the oracle than its budget.

    Values that `results` does not have, such as the LSE of a kernel that returns none, are not checked.
    """
    expected = oracle(inputs)
    allowed = budgets(inputs, results, expected)
    failures = []
    for name, error in errors(results, expected).items():
        given = results.values[name]
        source = getattr(inputs, name[1:], None) if name.startswith("d") else None
        if source is not None and (given.shape != source.shape or given.dtype != source.dtype):
            failures.append(f"{name}: {given.dtype} {tuple(given.shape)} for an input {source.dtype} {tuple(source.shape)}")
        if not error <= allowed[name]:
            failures.append(f"{name}: relative error {error:.2e}, allowed {allowed[name]:.2e}")
    if failures:
        raise AssertionError(f"case {inputs.case.name}: " + "; ".join(failures))


_Call = Callable[[Tensor, Tensor, Tensor, "Tensor | None", "Tensor | None"], tuple[Tensor, Tensor]]


def _dense(inputs: Inputs, shift: Tensor | None = None) -> _Call:
    """Attention in whatever dtype it is given, on user shapes, by the plainest torch there is.

    Scores are measured from `shift` where it is given and finite.
    """
    heads_last = inputs.case.layout == "bnlhd"
    if shift is not None:
        shift = torch.where(shift.isfinite(), shift, 0)

    def call(q: Tensor, k: Tensor, v: Tensor, mask_bias: Tensor | None, pair_bias: Tensor | None) -> tuple[Tensor, Tensor]:
        if heads_last:
            q, k, v = (x.transpose(-2, -3) for x in (q, k, v))
        scale = q.shape[-1] ** -0.5 if inputs.case.scale is None else inputs.case.scale
        s = torch.matmul(q * scale, k.transpose(-1, -2))  # [*,n,h,q,k]
        if pair_bias is not None:
            s = s + pair_bias.to(s.dtype)
        if mask_bias is not None:
            s = s + (mask_bias.to(s.dtype) if shift is None else mask_bias - shift)
        if inputs.mask is not None:
            s = s.masked_fill(~inputs.mask[..., :, None, None, :], -torch.inf)
        empty = (s == -torch.inf).all(-1, keepdim=True)  # also where there is no key at all
        p = torch.softmax(s.masked_fill(empty, 0), -1).masked_fill(empty, 0)
        lse = torch.logsumexp(s.masked_fill(empty, 0), -1).masked_fill(empty.squeeze(-1), -torch.inf)
        lse = lse if shift is None else lse + shift.squeeze(-1)
        o = torch.matmul(p, v)
        return (o.transpose(-2, -3) if heads_last else o), lse

    return call


def _differentiate(call: _Call, inputs: Inputs, dtype: torch.dtype | None) -> Results:
    def leaf(name: str) -> Tensor | None:
        x: Tensor | None = getattr(inputs, name)
        if x is None:
            return None
        x = x.detach() if dtype is None else x.detach().to(dtype)
        return x.requires_grad_(name in inputs.differentiable)

    leaves = {name: leaf(name) for name in ("q", "k", "v", "mask_bias", "pair_bias")}
    o, lse = call(*leaves.values())  # type: ignore[arg-type]
    outputs, cotangents = [o], [inputs.do.to(o.dtype)]
    if inputs.dlse is not None:
        outputs.append(lse)
        cotangents.append(inputs.dlse.to(lse.dtype))
    wanted = {name: x for name, x in leaves.items() if x is not None and x.requires_grad}
    gradients = torch.autograd.grad(outputs, list(wanted.values()), cotangents) if wanted else ()
    values = {"o": o.detach(), "lse": lse.detach()}
    values.update({f"d{name}": g for name, g in zip(wanted, gradients, strict=True)})
    return Results(values)
