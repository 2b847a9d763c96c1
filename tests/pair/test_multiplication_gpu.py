"""Triangle multiplication on a GPU: kernels against float64, lengths that are padded, graphs, repeated runs."""

from __future__ import annotations

import pytest
import torch
from cuda_graphs import captured

from evoattn.pair.multiplication import call as multiplication
from evoattn.pair.values import MultiplicationOptions as Options
from evoattn.testing import relative_error
from tests.pair.problems import call, differentiated, inputs, truth, weights

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("outgoing", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("length", [1, 7, 61, 64, 129])
@pytest.mark.parametrize(("channels", "hidden"), [(128, 128), (64, 32), (24, 40), (256, 256)])
def test_multiplication_agrees_with_float64(
    outgoing: bool, dtype: torch.dtype, length: int, channels: int, hidden: int
) -> None:
    """At most three times what dense torch of the dtype loses."""
    bias = channels != 128
    parameters = weights(channels, hidden, bias=bias, dtype=dtype, device="cuda")
    z, mask, do = inputs((2,), length, channels, dtype, "cuda")
    options = Options(outgoing, 1e-5, residual=bias)
    expected = truth(z, mask, parameters, options, do)
    plain = differentiated(multiplication.reference(z, mask, parameters, options), z, parameters, do)
    actual = differentiated(call(z, mask, parameters, options), z, parameters, do)
    floor = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float64: 1e-13}[dtype]
    for x, y, right in zip(actual, plain, expected, strict=True):
        assert x.dtype == dtype and x.isfinite().all()
        assert relative_error(x, right) <= 3 * max(relative_error(y, right), floor)


@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize("outgoing", [True, False])
def test_tf32_products_are_as_exact_as_torch(outgoing: bool) -> None:
    """Without rounding before the products, errors are twice as large."""
    parameters = weights(128, 128, bias=True, dtype=torch.float32, device="cuda")
    z, mask, do = inputs((2,), 129, 128, torch.float32, "cuda")
    options = Options(outgoing, 1e-5, residual=False)
    expected = truth(z, mask, parameters, options, do)
    plain = differentiated(multiplication.reference(z, mask, parameters, options), z, parameters, do)
    actual = differentiated(call(z, mask, parameters, options), z, parameters, do)
    for x, y, right in zip(actual, plain, expected, strict=True):
        assert relative_error(x, right) <= 1.6 * relative_error(y, right) + 1e-4


def test_which_calls_have_kernels() -> None:
    for channels, dtype, has in ((128, torch.bfloat16, True), (128, torch.float32, True), (256, torch.float32, False),
                                 (128, torch.float64, False)):  # fmt: skip
        z = torch.empty(1, 4, 4, channels, device="cuda", dtype=dtype)
        parameters = weights(channels, channels, bias=False, dtype=dtype, device="cuda")
        assert multiplication.OPERATOR.has_kernels(z, parameters) == has


def test_two_runs_and_a_graph_are_bit_equal() -> None:
    parameters = weights(128, 128, bias=True, dtype=torch.float32, device="cuda")
    z, mask, do = inputs((1,), 77, 128, torch.float32, "cuda")

    def run(number: int = 0) -> list[torch.Tensor]:
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            out = call(z, mask, parameters, Options(True, 1e-5, True))
        return [x.detach() for x in differentiated(out, z, parameters, do)]

    first, second = run(), run()
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
    replay, output = captured(run)
    replay(0)
    torch.cuda.synchronize()
    assert all(torch.equal(x, y) for x, y in zip(first, output, strict=True))
