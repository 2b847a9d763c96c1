"""The gate, output product and residual of triangle attention in one launch, on a GPU."""

import pytest
import torch

from tests.nn.gated import SHAPES, check_kernel, check_layer

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("shape", "hidden", "bias"), [*SHAPES, ((1, 152, 152, 128), 128, False), ((2, 31, 65, 64), 128, True)])
def test_the_kernel_does_the_same(shape: tuple[int, ...], hidden: int, bias: bool, dtype: torch.dtype) -> None:
    check_kernel(shape, hidden, bias, dtype, "cuda")


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("starting", [False, True])
def test_a_layer_ends_in_one_launch(starting: bool, transposed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    check_layer(starting, transposed, "cuda", monkeypatch)
