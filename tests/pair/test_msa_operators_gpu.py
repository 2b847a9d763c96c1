"""Outer product mean and pair-weighted averaging on a GPU, where products of 16 bits have float32 sums."""

from __future__ import annotations

import pytest
import torch

from evoattn.pair import slices
from evoattn.testing import relative_error
from tests.pair.test_msa_operators import DTYPES, PROBLEMS, of_averaging, of_product, step

pytestmark = pytest.mark.gpu

LARGER = {
    "product": (*PROBLEMS["product"][:2], of_product(1, 130, 70, 65, 32, 32, 128)),
    "averaging": (*PROBLEMS["averaging"][:2], of_averaging(1, 130, 70, 64, 8, 32, 64)),
}


@pytest.mark.parametrize("size", [1 << 16, 1 << 30])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [*PROBLEMS, *(f"larger {name}" for name in LARGER)])
def test_results_and_gradients(name: str, dtype: torch.dtype, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They lose no more than 1.5 times what torch's own operations lose, and two runs are bit-equal."""
    monkeypatch.setattr(slices, "BYTES", size)
    run, dense, tensors = LARGER[name.removeprefix("larger ")] if name.startswith("larger") else PROBLEMS[name]
    tensors = [x.cuda() for x in tensors]
    right, plain = step(dense, tensors, dtype, torch.float64), step(dense, tensors, dtype, dtype)
    floor = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 5e-3, torch.float16: 7e-4}[dtype]
    actual, again = (step(run, tensors, dtype, dtype) for _ in range(2))
    assert all(map(torch.equal, actual, again))
    for value, expected, rough in zip(actual, right, plain, strict=True):
        assert value.dtype == dtype and value.shape == expected.shape
        assert relative_error(value, expected) <= max(floor, 1.5 * relative_error(rough, expected))
