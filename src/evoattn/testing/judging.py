"""The verdict on one backend and one call: numbers, bits, shapes, and arguments left as they were."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator
from typing import Literal

import torch
from torch import Tensor

from evoattn.api import explain
from evoattn.core.numerics import accumulate_dtype
from evoattn.core.problem import GRADIENTS
from evoattn.testing.cases import CaseInputs
from evoattn.testing.dense import Results, heads_first
from evoattn.testing.oracle import beyond, budgets, errors, oracle, run

Failures = list[tuple[str, str]]
"""Kinds of failure, such as "error of dq", each with what went wrong."""

_ARGUMENTS = ("q", "k", "v", "mask", "mask_bias", "pair_bias", "gate", "do", "dlse")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of one call on one backend.

    Args:
        status: whether the backend held, refused with its stated reasons, or failed.
        what: the reasons, or what went wrong, one line.
        kinds: the kinds of failure, such as "error of dq".
    """

    status: Literal["held", "refused", "failed"]
    what: str = ""
    kinds: tuple[str, ...] = ()


def judge(inputs: CaseInputs, backend: str = "auto", *, deterministic: bool = False) -> Outcome:
    """Run a call forward and backward on a backend, and judge all results.

    Errors have to stay within their budgets, shapes and dtypes have to be right, values finite where the oracle's are, queries
    without a key exactly 0, and arguments have to keep their bits.

    Args:
        inputs: the call, from `Case.make`.
        backend: what `evoformer_attention` takes. A refusal that `explain` states is no failure.
        deterministic: ask for equal bits, and compare two runs.

    Returns:
        An `Outcome`. An exception is a failure too.

    Example:
        >>> from evoattn.testing import Case, judge
        >>> judge(Case("mine", lq=5, lk=7, pair_bias="b1hqk").make(), "tiled").status
        'held'
    """

    def find() -> Outcome | Failures:
        if reasons := refusals(inputs, backend, deterministic=deterministic):
            return Outcome("refused", "; ".join(reasons))
        results, failures = observe(inputs, lambda x: run(x, backend, deterministic=deterministic), twice=deterministic)
        expected = oracle(inputs)
        if wrong := wrong_shapes(inputs, results, expected):
            return failures + wrong
        found = beyond(errors(results, expected), budgets(inputs, results, expected))
        return failures + wrong_values(inputs, results, expected) + errors_of(found)

    return verdict(find)


def verdict(find: Callable[[], Outcome | Failures]) -> Outcome:
    """The outcome of `find`, which returns an outcome or failures, or raises."""
    try:
        failures = find()
    except Exception as error:  # whatever a broken backend raises is a finding
        text = " ".join(str(error).split()) or "no message"
        return Outcome("failed", f"{type(error).__name__}: {text[:600]}", (f"raised {type(error).__name__}",))
    if isinstance(failures, Outcome):
        return failures
    if not failures:
        return Outcome("held")
    what = "; ".join(f"{kind}: {what}" if what else kind for kind, what in failures)
    return Outcome("failed", what, tuple(kind for kind, _ in failures))


def refusals(inputs: CaseInputs, backend: str, *, deterministic: bool = False) -> list[str]:
    """The reasons of a backend to refuse a call, forward or backward. "auto" has none."""
    if backend == "auto":
        return []
    tensors = {name: getattr(inputs, name) for name in GRADIENTS}
    tensors |= {name: x.detach().requires_grad_() for name, x in inputs.differentiable.items()}
    case = inputs.case
    options = {"scale": case.scale, "layout": case.layout, "return_lse": True, "deterministic": deterministic}
    explanation = explain(**tensors, mask=inputs.mask, backend=backend, **options)  # type: ignore[arg-type]
    return explanation.refused.get(backend, [])


def observe(inputs: CaseInputs, attend: Callable[[CaseInputs], Results], *, twice: bool) -> tuple[Results, Failures]:
    """Run a call, and find the arguments that it changed. If it runs twice, find the results whose bits differ."""
    before = {name: bits(x) for name in _ARGUMENTS if (x := getattr(inputs, name)) is not None}
    with poisoned():
        results = attend(inputs)
        again = attend(inputs) if twice else results
    failures = [(f"mutated {name}", "") for name, same in before.items() if not torch.equal(same, bits(getattr(inputs, name)))]
    failures += [
        (f"unequal bits of {name}", "two deterministic runs differ")
        for name, value in results.values.items()
        if not torch.equal(bits(value), bits(again.values[name]))
    ]
    return results, failures


def wrong_shapes(inputs: CaseInputs, results: Results, expected: Results) -> Failures:
    """Values of the wrong shape or dtype, and values that are missing."""
    failures = []
    for name, right in expected.values.items():
        if name not in results.values:
            failures.append((f"no {name}", ""))
            continue
        value = results.values[name]
        source = inputs.q if name == "o" else getattr(inputs, name[1:], None) if name.startswith("d") else None
        dtype = accumulate_dtype(inputs.q.dtype) if source is None else source.dtype
        if value.shape != right.shape or value.dtype != dtype:
            failures.append((f"shape of {name}", f"{value.dtype} {tuple(value.shape)}, expected {dtype} {tuple(right.shape)}"))
    return failures


def wrong_values(inputs: CaseInputs, results: Results, expected: Results) -> Failures:
    """Values that are not finite, and queries without a key whose output, LSE or gradients are not 0, -inf and 0."""
    failures = []
    for name, right in expected.values.items():
        if count := int((right.isfinite() & ~results.values[name].isfinite()).sum()):
            failures.append((f"not finite: {name}", f"{count} elements"))
    empty = expected.values["lse"] == -torch.inf
    for name in ("o", "dq", "dgate"):
        if name in results.values and bool((heads_first(results.values[name], inputs)[empty] != 0).any()):
            failures.append((f"not 0 without a key: {name}", ""))
    if bool((results.values["lse"][empty] != -torch.inf).any()):
        failures.append(("not -inf without a key: lse", ""))
    return failures


def errors_of(found: list[tuple[str, float, float]], where: str = "") -> Failures:
    """Failures for names of values, each with its error and what is allowed."""
    return [(f"error of {name}{where}", f"{error:.2e}, allowed {allowed:.2e}") for name, error, allowed in found]


def bits(x: Tensor) -> Tensor:
    """A copy of a tensor's bytes, so that NaN equals itself."""
    return x.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Let torch.empty give NaN, so that an element which is never written is seen."""
    before = (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
