"""Every tile to which the fitting rules can shrink a table's lines on this card, launched and compared with float64.

python -m pytest -m gpu tests/backends/triton/test_tiles_gpu.py
"""

import dataclasses

import pytest
import torch

from evoattn import testing
from evoattn.core.problem import Problem
from evoattn.core.sizes import power_of_two
from tests.fuzz.conditioning import excess

pytestmark = pytest.mark.gpu

MOST_SCORES = 1 << 24
"""Of the problem at the upper edge of its tiles; float64 needs 8 bytes for each, several times."""


def problems() -> list[Problem]:
    """The smallest problem of each launch, and the largest lengths that its tiles hold."""
    if not torch.cuda.is_available():
        return []
    pytest.importorskip("triton")
    from evoattn.kit import cards
    from tests.helpers.reachable import reachable

    device = torch.device("cuda", torch.cuda.current_device())
    chosen = []
    for problem, _ in reachable(cards.capability(device), cards.shared_memory_limit(device)):
        full = dataclasses.replace(problem, lq=power_of_two(problem.lq), lk=power_of_two(problem.lk))
        chosen += [problem, full] if full.scores <= MOST_SCORES else [problem]
    return list(dict.fromkeys(chosen))


def name(problem: Problem) -> str:
    """The sizes of a problem, for a test's id."""
    p = problem
    bias = "" if p.pair_bias is None else "-in_order" if p.deterministic else "-pair"
    return f"{p.dtype}-n{p.n}h{p.h}q{p.lq}k{p.lk}d{p.d}c{p.c}{bias}".replace("torch.", "")


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("problem", problems(), ids=name)
def test_reachable_tile_agrees_with_float64(problem: Problem) -> None:
    pair = problem.pair_bias is not None
    case = testing.Case(
        name(problem),
        n=problem.n,
        h=problem.h,
        lq=problem.lq,
        lk=problem.lk,
        d=problem.d,
        c=problem.c,
        dtype=problem.dtype,
        pair_bias="b1hqk" if pair else None,
        gradients=("q", "k", "v", "pair_bias") if pair else ("q", "k", "v"),
    )
    inputs = case.make(seed=7, device="cuda")
    results = testing.run(inputs, "triton", deterministic=problem.deterministic)
    if problem.lk > 1:
        testing.check(results, inputs)
        return
    # With one key the gradients of scores are zero, and only what rounding takes says how large an error may be.
    assert excess(inputs, results, testing.oracle(inputs)) == []
    for leaf, source in inputs.differentiable.items():
        gradient = results.values[f"d{leaf}"]
        assert (gradient.shape, gradient.dtype) == (source.shape, source.dtype), leaf
