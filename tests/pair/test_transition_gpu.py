"""The transition on a GPU: kernels against float64, rows that fill no tile, chunks, graphs, repeated runs, in place."""

from __future__ import annotations

import pytest
import torch
from cuda_graphs import captured

from evoattn.pair.transitions import call as transition
from evoattn.pair.transitions import steps
from evoattn.pair.transitions.call import reference
from evoattn.pair.values import TransitionOptions as Options
from evoattn.testing import relative_error
from tests.pair.problems import differentiated
from tests.pair.transitions import call, inputs, is_close, truth, weights

pytestmark = pytest.mark.gpu

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.mark.parametrize("gated", [True, False], ids=["swiglu", "relu"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 61, 128, 1001])
@pytest.mark.parametrize(("channels", "hidden"), [(128, 512), (64, 256), (24, 40), (256, 1024), (128, 510)])
def test_transition_agrees_with_float64(gated: bool, dtype: torch.dtype, rows: int, channels: int, hidden: int) -> None:
    bias = hidden == 510 or channels == 24
    parameters = weights(channels, hidden, gated=gated, bias=bias, dtype=dtype, device="cuda")
    x, mask, do = inputs((rows,), channels, dtype, "cuda")
    options = Options(1e-5, residual=bias)
    actual = differentiated(call(x, mask if bias else None, parameters, options), x, parameters, do)
    assert {y.dtype for y in actual} == {dtype}
    assert is_close(actual, x, mask if bias else None, parameters, options, do)


@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize("gated", [True, False], ids=["swiglu", "relu"])
def test_tf32_products_are_as_exact_as_torch(gated: bool) -> None:
    """Without rounding before the products, errors are four times as large."""
    parameters = weights(128, 512, gated=gated, bias=True, dtype=torch.float32, device="cuda")
    x, mask, do = inputs((1001,), 128, torch.float32, "cuda")
    options = Options(1e-5, residual=False)
    expected = truth(x, mask, parameters, options, do)
    plain = differentiated(reference(x, mask, parameters, options), x, parameters, do)
    actual = differentiated(call(x, mask, parameters, options), x, parameters, do)
    for fused, torchs, right in zip(actual, plain, expected, strict=True):
        assert relative_error(fused, right) <= 1.6 * relative_error(torchs, right) + 1e-4


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_chunks_of_rows(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "CHUNK", 512)
    parameters = weights(128, 512, gated=True, bias=True, dtype=dtype, device="cuda")
    x, mask, do = inputs((2, 1111), 128, dtype, "cuda")
    options = Options(1e-5, residual=True)
    actual = differentiated(call(x, mask, parameters, options), x, parameters, do)
    assert is_close(actual, x, mask, parameters, options, do)


def test_which_calls_have_kernels() -> None:
    for channels, dtype, has in ((128, torch.bfloat16, True), (384, torch.bfloat16, False), (256, torch.float32, False),
                                 (128, torch.float64, False)):  # fmt: skip
        x = torch.empty(4, channels, device="cuda", dtype=dtype)
        parameters = weights(channels, channels, gated=True, bias=False, dtype=dtype, device="cuda")
        assert transition.OPERATOR.has_kernels(x, parameters) == has


def test_two_runs_and_a_graph_are_bit_equal() -> None:
    parameters = weights(128, 512, gated=True, bias=True, dtype=torch.float32, device="cuda")
    x, mask, do = inputs((77, 77), 128, torch.float32, "cuda")

    def run(number: int = 0) -> list[torch.Tensor]:
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            out = call(x, mask, parameters, Options(1e-5, True))
        return [y.detach() for y in differentiated(out, x, parameters, do)]

    first, second = run(), run()
    assert all(torch.equal(y, z) for y, z in zip(first, second, strict=True))
    replay, output = captured(run)
    replay(0)
    torch.cuda.synchronize()
    assert all(torch.equal(y, z) for y, z in zip(first, output, strict=True))


def test_the_result_may_be_written_to_x() -> None:
    parameters = weights(128, 512, gated=True, bias=False, dtype=torch.bfloat16, device="cuda")
    x = inputs((100_003,), 128, torch.float32, "cuda")[0].detach()
    right = steps.forward(x, None, parameters, Options(1e-5, True))[0]
    assert torch.equal(steps.forward(x, None, parameters, Options(1e-5, True), out=x)[0], right)


def test_a_forward_allocates_its_result_alone() -> None:
    parameters = weights(128, 512, gated=True, bias=False, dtype=torch.bfloat16, device="cuda")
    x = torch.randn(1 << 18, 128, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        call(x, None, parameters, Options(1e-5, True))
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call(x, None, parameters, Options(1e-5, True))
        assert torch.cuda.max_memory_allocated() - before <= x.numel() * x.itemsize + (1 << 21)
