"""The float64 oracle and the budget of error: a small multiple of what a dense computation in the same dtype loses itself."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from evoattn.api import evoformer_attention
from evoattn.numerics import accumulate_dtype
from evoattn.testing.cases import Inputs
from evoattn.testing.conditioning import conditioning, huge_queries
from evoattn.testing.dense import Results, dense, differentiate, exact_biases, plain_biases
from evoattn.tuning import Config

__all__ = ["FLOOR", "Results", "budgets", "check", "errors", "oracle", "relative_error", "run"]

_MULTIPLE = 4.0
_MULTIPLE_OF_DENSE = 3.0
FLOOR = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}
_CEILING = {torch.float64: 1e-10, torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


def run(inputs: Inputs, backend: str = "auto", *, deterministic: bool = False, config: Config | None = None) -> Results:
    """Forward and backward through the public call."""

    def call(
        q: Tensor, k: Tensor, v: Tensor, mask_bias: Tensor | None, pair_bias: Tensor | None, gate: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return evoformer_attention(
            q,
            k,
            v,
            mask=inputs.mask,
            mask_bias=mask_bias,
            pair_bias=pair_bias,
            gate=gate,
            scale=inputs.case.scale,
            layout=inputs.case.layout,
            return_lse=True,
            backend=backend,
            deterministic=deterministic,
            config=config,
        )

    return differentiate(call, inputs, None)


def oracle(inputs: Inputs) -> Results:
    """The same in float64, dense, by plain autograd.

    The largest bias of each query is taken off first: at -1e9 even float64 loses digits.
    """
    return differentiate(dense(inputs, exact_biases), inputs, torch.float64)


def low_precision(inputs: Inputs) -> Results:
    """The same, dense, with every intermediate in q's dtype, as a model in plain torch computes it."""
    return differentiate(dense(inputs, plain_biases), inputs, inputs.q.dtype)


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
    return _budgets(inputs, results, expected, errors(low_precision(inputs), expected))


def _budgets(inputs: Inputs, results: Results, expected: Results, lost: dict[str, float]) -> dict[str, float]:
    """`budgets`, from what the dense low-precision computation loses."""
    allowed = {}
    lse = expected.values["lse"]
    size = lse[lse.isfinite()].square().mean().sqrt().item() if lse.isfinite().any() else 0.0
    conditioning = size * torch.finfo(accumulate_dtype(inputs.q.dtype)).eps
    for name in results.values:
        dtype = _coarser(name, inputs, results)
        allowed[name] = min(max(_MULTIPLE * lost[name], FLOOR[dtype], conditioning), _CEILING[dtype])
    return allowed


def _coarser(name: str, inputs: Inputs, results: Results) -> torch.dtype:
    """The dtype whose bounds a value is held to."""
    dtype = results.values[name].dtype
    return inputs.q.dtype if name != "lse" and torch.finfo(inputs.q.dtype).eps > torch.finfo(dtype).eps else dtype


def excess(
    inputs: Inputs,
    results: Results,
    expected: Results,
    *,
    swallowed: bool = False,
    only: Callable[[Results], Results] = lambda results: results,
) -> list[tuple[str, float, float]]:
    """The values beyond their budgets on any problem, however ill-conditioned: (name, error, allowed).

    The ceiling of `budgets` yields to what rounding alone takes from the value, and there four times what dense torch loses is
    allowed too. Where the first is small, so is the budget: that of `budgets`.

    Args:
        inputs: the call.
        results: what a backend made of it.
        expected: the float64 results.
        swallowed: allow three times what dense torch in the same dtype loses, without a ceiling.
        only: what was applied to results and expected, to be applied to what dense torch gives.
    """
    found = errors(results, expected)
    lost = errors(only(low_precision(inputs)), expected)
    allowed = _budgets(inputs, results, expected, lost)
    if all(error <= allowed[name] for name, error in found.items()):
        return []
    for name, bound in conditioning(inputs, expected).items():
        if name in allowed and bound.limit > allowed[name]:
            ceiling = _CEILING[_coarser(name, inputs, results)]
            allowed[name] = max(bound.limit, _MULTIPLE * lost[name] if bound.limit > ceiling else 0.0)
        if name in allowed and swallowed:
            allowed[name] = max(allowed[name], _MULTIPLE_OF_DENSE * lost[name])
    return [(name, error, allowed[name]) for name, error in found.items() if not error <= allowed[name]]


def huge(inputs: Inputs) -> Tensor:
    """The queries `[*,n|1,h|1,q|1]` beside whose biases the scores are lost, by more than the dtype's ceiling."""
    return huge_queries(inputs, _CEILING[inputs.q.dtype])


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
