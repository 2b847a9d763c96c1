"""One suite for every backend: awkward cases and workloads, output, LSE and all gradients, against float64."""

import dataclasses

import pytest
import torch

from evoattn import testing
from evoattn.core.config import Config
from evoattn.workloads import WORKLOADS

CPU_BACKENDS = ("reference", "tiled")
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("case", testing.AWKWARD, ids=lambda case: case.name)
def test_awkward_case_agrees_with_float64(case: testing.Case, dtype: torch.dtype, backend: str) -> None:
    inputs = dataclasses.replace(case, dtype=dtype).make(seed=1)
    testing.check(testing.run(inputs, backend), inputs)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name)
def test_shrunk_workload_agrees_with_float64(workload, backend: str) -> None:
    inputs = testing.from_workload(workload.shrunk(), torch.bfloat16).make(seed=2)
    testing.check(testing.run(inputs, backend), inputs)


TILES = {
    "one_key_a_block": Config(block_k=1),
    "one_query_a_block": Config(block_q=1),
    "ragged_blocks": Config(block_q=7, block_k=6),
    "tiny_budget": Config(score_bytes=1024),
}
TILED_CASES = [case for case in testing.AWKWARD if case.lq <= 50 and case.d <= 32]


@pytest.mark.parametrize("config", TILES.values(), ids=TILES)
@pytest.mark.parametrize("case", TILED_CASES, ids=lambda case: case.name)
def test_any_tile_size_agrees_with_float64(case: testing.Case, config: Config) -> None:
    """First, middle and last rescale, whole and cut tiles along every axis."""
    inputs = case.make(seed=3)
    testing.check(testing.run(inputs, "tiled", config=config), inputs)


def test_an_error_of_one_in_a_thousand_fails_the_check() -> None:
    """The budget is tight: an error of one part in a thousand in one gradient is caught in float32."""
    inputs = next(case for case in testing.AWKWARD if case.name == "no_bias").make(seed=4)
    results = testing.run(inputs, "tiled")
    results.values["dk"].mul_(1.001)
    with pytest.raises(AssertionError, match="dk: relative error"):
        testing.check(results, inputs)
