"""The conformance suite on a GPU, and what only a GPU can get wrong: offsets, grids, streams, graphs, races.

python -m pytest -m gpu tests/backends/test_conformance_gpu.py
"""

import dataclasses
import os
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import evoattn
from evoattn import testing
from evoattn.workloads import WORKLOADS
from tests.helpers import seams
from tests.helpers.gpu_checks import capture, check_in_turn, check_offsets, check_same_bits
from tests.helpers.operators import Operators

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

pytestmark = pytest.mark.gpu

BACKENDS = ("triton", "tiled", "reference")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("case", testing.AWKWARD, ids=lambda case: case.name)
def test_awkward_case_agrees_with_float64(case: testing.Case, dtype: torch.dtype, backend: str) -> None:
    if backend == "triton" and dtype == torch.float64:
        pytest.skip("Triton takes no float64; auto takes the tiled backend")
    inputs = dataclasses.replace(case, dtype=dtype).make(seed=1, device="cuda")
    testing.check(testing.run(inputs, backend), inputs)
    testing.check(testing.run(inputs, backend, deterministic=True), inputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name)
def test_workload_agrees_with_float64(workload, dtype: torch.dtype) -> None:
    """Every workload with its own heads, channels and lengths, and as many rows as float64 has room for."""
    rows = max(1, min(workload.n, 200_000_000 // (workload.h * workload.lq * workload.lk)))
    case = testing.from_workload(dataclasses.replace(workload, b=min(workload.b, 2), n=rows), dtype)
    inputs = case.make(seed=2, device="cuda")
    testing.check(testing.run(inputs, "triton"), inputs)


@pytest.mark.parametrize("mask", [None, "random", "padding", "empty_rows"])
@pytest.mark.parametrize("length", [256, 397])
def test_several_tiles_with_masks(length: int, mask: str | None) -> None:
    case = testing.Case("tiles", n=6, h=4, lq=length, lk=length, d=32, dtype=torch.bfloat16, mask=mask, pair_bias="b1hqk")  # type: ignore[arg-type]
    inputs = case.make(seed=3, device="cuda")
    testing.check(testing.run(inputs, "triton"), inputs)


def test_auto_takes_the_fastest() -> None:
    q = torch.randn(1, 4, 64, 4, 32, device="cuda", dtype=torch.bfloat16)
    hopper = next(status for status in evoattn.backends() if status.name == "hopper")
    assert evoattn.explain(q, q, q).backend == ("hopper" if hopper.available else "triton")
    assert evoattn.explain(q.float(), q.float(), q.float()).backend == "triton"
    assert evoattn.explain(q.double(), q.double(), q.double()).backend == "tiled"


@pytest.mark.usefixtures("most_of_the_memory")
@pytest.mark.parametrize("which", ["q", "k", "v", "pair_bias", "do"])
def test_offsets_past_2_to_31(which: str) -> None:
    check_offsets(which, "triton")


@pytest.mark.parametrize("lead", [(1,), (70_000,)], ids=["rows", "batch"])
def test_more_rows_than_a_grid_axis_takes(lead: tuple[int]) -> None:
    n = 70_000 if lead == (1,) else 1
    case = testing.Case("many", lead=lead, n=n, h=2, lq=16, lk=16, d=8, dtype=torch.bfloat16, mask="random", pair_bias="11hqk")
    inputs = case.make(seed=5, device="cuda")
    testing.check(testing.run(inputs, "triton"), inputs)


def example(**changes: object) -> testing.CaseInputs:
    settings: dict = {
        "n": 8,
        "h": 4,
        "lq": 192,
        "lk": 192,
        "d": 32,
        "dtype": torch.bfloat16,
        "mask": "random",
        "pair_bias": "b1hqk",
    }
    return testing.Case("gpu", **{**settings, **changes}).make(seed=6, device="cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_plain_step_takes_the_short_way(operators: Operators, dtype: torch.dtype) -> None:
    """Forward and backward go straight to the plan, also on the threads that run a backward, and repeat their launches."""
    inputs = example(dtype=dtype)
    leaves = [x.requires_grad_() for x in inputs.differentiable.values()]
    results = []
    for _ in range(3):
        o = evoattn.evoformer_attention(
            inputs.q, inputs.k, inputs.v, mask=inputs.mask, pair_bias=inputs.pair_bias, deterministic=True
        )
        results.append((o, *torch.autograd.grad(o, leaves, inputs.do)))
        with torch.no_grad():
            again = evoattn.evoformer_attention(
                inputs.q, inputs.k, inputs.v, mask=inputs.mask, pair_bias=inputs.pair_bias, deterministic=True
            )
        assert torch.equal(o, again)
    assert operators.called() == []
    for later in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(results[0], later, strict=True))


def test_a_call_on_a_side_stream_gives_the_same_bits() -> None:
    inputs = example()
    expected = testing.run(inputs, "triton", deterministic=True)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # the inputs arrive late on this stream, so a launch on another would read the old ones
        late = dataclasses.replace(inputs, **{name: x.clone() for name, x in inputs.differentiable.items()})
        results = testing.run(late, "triton", deterministic=True)
    stream.synchronize()
    check_same_bits(results.values, expected.values)


@pytest.mark.parametrize("deterministic", [False, True])
def test_graph_capture_and_replay(deterministic: bool) -> None:
    inputs = example()
    leaves = {name: x.requires_grad_() for name, x in inputs.differentiable.items()}

    def step() -> tuple[Tensor, ...]:
        o = evoattn.evoformer_attention(
            inputs.q,
            inputs.k,
            inputs.v,
            mask=inputs.mask,
            pair_bias=inputs.pair_bias,
            backend="triton",
            deterministic=deterministic,
        )
        return o, *torch.autograd.grad(o, list(leaves.values()), inputs.do)

    graph, captured = capture(step)
    with torch.no_grad():
        for leaf in leaves.values():
            leaf.copy_(torch.randn_like(leaf))
    graph.replay()
    graph.replay()  # twice: an accumulator that is not cleared inside the graph shows
    torch.cuda.synchronize()
    for value, expected in zip(captured, step(), strict=True):
        if deterministic:
            assert torch.equal(value, expected)
        else:
            assert testing.relative_error(value, expected) < 5e-3


@pytest.mark.parametrize("pattern", ["b1hqk", "bnhqk", "b11qk", "b1h1k", "b1hq1", "11hqk"])
@pytest.mark.parametrize("length", [64, 192, 397])
def test_two_deterministic_runs_are_bit_equal(length: int, pattern: str) -> None:
    inputs = example(lq=length, lk=length, n=37, mask=None, mask_bias="finite", pair_bias=pattern, lse_gradient=True)
    check_same_bits(*(testing.run(inputs, "triton", deterministic=True).values for _ in range(2)))


@pytest.fixture
def nine_rows_a_turn(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As where rows are so long that the cache holds few of them."""
    from evoattn.backends.triton import pair_in_order

    monkeypatch.setattr(pair_in_order, "rows_of_a_turn", lambda share, *_: min(share, 9))
    seams.forget()
    yield
    seams.forget()


def test_deterministic_sums_of_rows_in_turns(nine_rows_a_turn: None) -> None:
    """Queries and keys are left over."""
    inputs = example(lq=397, lk=333, n=150)
    first, second = (testing.run(inputs, "triton", deterministic=True) for _ in range(2))
    testing.check(first, inputs)
    check_same_bits(first.values, second.values)


@pytest.mark.parametrize("changes", [
    {"lq": 397, "lk": 397, "n": 64, "lse_gradient": True},
    {"lq": 100, "lk": 90, "n": 5, "d": 24, "mask_bias": "finite"},
    {"mask": None, "n": 1, "lq": 384, "lk": 384},
], ids=["left_over", "small", "statistics_by_dq"])  # fmt: skip
def test_calls_in_turn_keep_to_themselves(changes: dict[str, object]) -> None:
    check_in_turn(example(**changes).case, "triton", deterministic=True)


def test_compile_on_the_gpu() -> None:
    inputs = example()
    leaves = [x.requires_grad_() for x in inputs.differentiable.values()]

    def attend(q: Tensor, k: Tensor, v: Tensor, pair_bias: Tensor) -> Tensor:
        return evoattn.evoformer_attention(q, k, v, mask=inputs.mask, pair_bias=pair_bias)

    actual = torch.compile(attend, fullgraph=True)(*leaves)
    torch.testing.assert_close(actual, attend(*leaves), rtol=0, atol=0)
    gradients = torch.autograd.grad(actual, leaves, inputs.do)
    for value, expected in zip(gradients, torch.autograd.grad(attend(*leaves), leaves, inputs.do), strict=True):
        assert testing.relative_error(value, expected) < 5e-3


def test_autocast_on_the_gpu() -> None:
    inputs = example(dtype=torch.float32)
    with torch.autocast("cuda", torch.bfloat16):
        o = evoattn.evoformer_attention(inputs.q, inputs.k, inputs.v, pair_bias=inputs.pair_bias)
    assert o.dtype == torch.bfloat16


def test_extra_memory_is_outputs_and_statistics() -> None:
    """Forward and backward at triangle length 512: nothing beyond outputs, statistics and the float32 pair-bias accumulator.

    Of statistics there are six: lse and reference are saved, and the backward makes four numbers a query of them.
    """
    inputs = example(n=512, lq=512, lk=512)
    leaves = [x.requires_grad_() for x in inputs.differentiable.values()]

    def step() -> tuple[Tensor, ...]:
        o = evoattn.evoformer_attention(
            inputs.q, inputs.k, inputs.v, mask=inputs.mask, pair_bias=inputs.pair_bias, backend="triton"
        )
        return torch.autograd.grad(o, leaves, inputs.do)

    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    extra = torch.cuda.max_memory_allocated() - before
    activations = inputs.q.numel() * 2
    statistics = 6 * 512 * 4 * 512 * 4
    pair = 4 * 512 * 512 * (4 + 2)
    outputs = 4 * activations + statistics + pair
    assert extra <= 1.02 * outputs, f"{extra / 2**20:.1f} MiB for outputs of {outputs / 2**20:.1f} MiB"


def test_mixed_devices_are_refused() -> None:
    inputs = example()
    with pytest.raises(ValueError, match="mask must be on the device of q, cuda:0, got cpu"):
        evoattn.evoformer_attention(inputs.q, inputs.k, inputs.v, mask=torch.ones(1, 8, 192, dtype=torch.bool))
