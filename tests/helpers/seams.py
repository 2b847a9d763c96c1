"""Look into how calls are run, without the names of the modules that run them. For tests of evoattn and of code around it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Literal

from torch import Tensor

from evoattn.core import guards, tuned_tiles
from evoattn.core.config import Config
from evoattn.core.inputs import Inputs
from evoattn.core.problem import Problem
from evoattn.dispatch import lookup
from evoattn.dispatch.axes import canonicalise
from evoattn.dispatch.calls import DirectCall, recall
from evoattn.dispatch.lookup import Options
from evoattn.testing.cases import CaseInputs


def forget(*, torch_too: bool = False) -> None:
    """Forget every plan, every known call and what `evoattn tune` found.

    The next call is checked, chosen and planned anew. Call this after a change that a call's arguments do not show: a backend
    that was patched, or an environment variable.

    Args:
        torch_too: also forget what torch's internals said of its state. The next call and its backward ask again in threads of
            their own, which takes milliseconds.
    """
    tuned_tiles.forget()  # those who keep plans and calls hear of it
    if torch_too:
        guards.forget_torch()


def canonical(inputs: CaseInputs) -> Inputs:
    """Return the tensors as a backend gets them (`evoattn.backends`), as views where their strides allow it."""
    q, k, v, mask, mask_bias, pair_bias = inputs.q, inputs.k, inputs.v, inputs.mask, inputs.mask_bias, inputs.pair_bias
    return canonicalise(Inputs(q, k, v, mask, mask_bias, pair_bias, inputs.gate), inputs.case.layout)[0]


def chosen(problem: Problem, backend: str = "auto", config: Config | None = None) -> tuple[str, dict[str, list[str]]]:
    """Return the backend that runs a problem, and for each other backend that was asked all its reasons.

    `explain` says this of tensors; here the card of the problem need not be there.

    Raises:
        ValueError: no backend takes the problem.
    """
    module, refused = lookup.select(problem, backend, config or Config())
    return module.NAME, refused


def way(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    mask_bias: Tensor | None = None,
    pair_bias: Tensor | None = None,
    gate: Tensor | None = None,
    **options: Any,
) -> Literal["plan", "operator"] | None:
    """Return how `evoformer_attention` would run these arguments: straight to a plan or through torch's operator.

    None: no call like this one is known. The next one is checked and planned, or torch has to see an operator now.
    """
    known = recall(Inputs(q, k, v, mask, mask_bias, pair_bias, gate), Options(**options))
    if known is None:
        return None
    return "plan" if isinstance(known, DirectCall) else "operator"


@contextlib.contextmanager
def taken() -> Iterator[list[str]]:
    """Collect the backend of each plan that a pass runs for the first time inside the block, in order."""
    backends: list[str] = []
    lookup.listeners.append(backends.append)
    try:
        yield backends
    finally:
        lookup.listeners.remove(backends.append)
