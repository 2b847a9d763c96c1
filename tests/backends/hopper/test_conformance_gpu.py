"""The Hopper backend on a GPU of compute capability 9.0: the conformance suite, and what a fixed reference could get wrong.

python -m pytest -m gpu tests/backends/hopper/test_conformance_gpu.py
"""

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import evoattn
from evoattn import testing
from evoattn.backends.hopper import head_groups
from evoattn.workloads import WORKLOADS
from tests.helpers.gpu_checks import check_in_turn, check_offsets, check_same_bits

STATUS = next(status for status in evoattn.backends() if status.name == "hopper")

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not STATUS.available, reason=STATUS.reason or "available")]

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@pytest.fixture
def one_kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Without a pair bias one kernel finds all gradients, as where a call has many rows, and in this test at least once."""
    from evoattn.backends.hopper import backward_launches, tiles

    kernel, made = backward_launches.FusedGradients, []

    def make(*args: object, **wishes: object) -> object:
        made.append(kernel(*args, **wishes))
        return made[-1]

    monkeypatch.setattr(backward_launches, "FusedGradients", make)
    monkeypatch.setattr(tiles, "fused_tiles", lambda channels, *_: 16 if channels <= 16 else 8)
    yield
    assert made


@pytest.fixture
def two_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a call has few rows."""
    from evoattn.backends.hopper import tiles

    monkeypatch.setattr(tiles, "fused_tiles", lambda *_: None)


@pytest.fixture
def heads_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """One head at a time where a pair bias streams, as where one keeps all processors busy."""
    monkeypatch.setattr(head_groups, "divisor", lambda *_: 1)


@pytest.fixture
def rows_left_out(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The backward leaves out rows that a mask switches off, as where a call has many scores; at least once in a test."""
    from evoattn.backends.hopper import backward_launches, tiles

    kernel, made = backward_launches.KeyGradients, []

    def make(*args: object, **wishes: object) -> object:
        made.append(wishes["skips"])
        return kernel(*args, **wishes)

    monkeypatch.setattr(backward_launches, "KeyGradients", make)
    monkeypatch.setattr(tiles, "_LEAST_SCORES_TO_SKIP", 0)
    yield
    assert any(made)


WAYS = {
    "short": (None, {"lq": 100, "lk": 100}),
    "kept": (None, {"lq": 384, "lk": 384}),
    "streamed": ("heads_in_turns", {"lq": 640, "lk": 640}),
    "no_pair_bias": ("one_kernel", {"lq": 384, "lk": 384, "pair_bias": None}),
}
"""Where a call's pair bias is: a fixture for it, and what the call looks like."""


@pytest.fixture
def way(request: pytest.FixtureRequest) -> dict:
    """What a call looks like that goes one of these ways."""
    fixture, changes = WAYS[request.param]
    if fixture is not None:
        request.getfixturevalue(fixture)
    return changes


def forward(inputs: testing.Inputs, **changes: object) -> testing.Results:
    """o and lse by the Hopper backend; skips what it refuses."""
    case = inputs.case
    call = {
        "mask": inputs.mask,
        "mask_bias": inputs.mask_bias,
        "pair_bias": inputs.pair_bias,
        "gate": inputs.gate,
        "scale": case.scale,
    }
    call = {**call, "layout": case.layout, "backend": "hopper", **changes}
    if refused := evoattn.explain(inputs.q, inputs.k, inputs.v, **call).refused:  # type: ignore[arg-type]
        pytest.skip("; ".join(refused["hopper"]))
    with torch.no_grad():
        o, lse = evoattn.evoformer_attention(inputs.q, inputs.k, inputs.v, return_lse=True, **call)  # type: ignore[call-overload]
    return testing.Results({"o": o, "lse": lse})


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("case", testing.AWKWARD, ids=lambda case: case.name)
def test_awkward_case(case: testing.Case, dtype: torch.dtype) -> None:
    inputs = dataclasses.replace(case, dtype=dtype).make(seed=1, device="cuda")
    testing.check(forward(inputs), inputs)


@pytest.mark.parametrize(
    ("queries", "keys"), [(slice(0, 9, 8), slice(None)), (slice(16, 32), slice(0, 32))], ids=["two_queries", "one_warp"]
)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_masked_queries_leave_their_neighbours_alone(dtype: torch.dtype, queries: slice, keys: slice) -> None:
    """The warps of a warpgroup choose what scores are measured from at different keys."""
    case = testing.Case("masked", n=700, h=1, lq=64, lk=64, d=16, dtype=dtype, pair_bias="b1hqk", gradients=())
    inputs = case.make(seed=1, device="cuda")
    pair_bias = torch.zeros_like(inputs.pair_bias)
    pair_bias[..., queries, keys] = -torch.inf
    inputs = dataclasses.replace(inputs, pair_bias=pair_bias)
    testing.check(forward(inputs), inputs)


FOUND = (
    # A running sum that took a rounding error with it at every step: the LSE of large scores, and so dv.
    testing.Case("425873", lead=(), n=1, h=1, lq=1, lk=385, d=32, scale=0.37, spread=1430.0, gradients=("v",)),
    testing.Case("423399", lead=(), n=1, h=1, lq=1, lk=380, d=48, spread=3000.0, gradients=("v",)),
    # The same, where a query with one key must get no gradient.
    testing.Case("425735", lead=(1, 1), n=2, h=1, lq=4, lk=2, d=32, mask="padding", mask_axes="b1k", pair_bias="1111qk",
                 pair_fill="lowest", spread=20.0, gradients=("q",)),
    # A pair bias of -inf leaves a query only keys that the mask bias masks.
    testing.Case("452849", lead=(1, 1), n=2, h=1, lq=11, lk=2, d=64, mask_bias="minus_1e9", mask_bias_axes="b111k",
                 pair_bias="1111qk", pair_fill="minus_inf", spread=60.0, gradients=("v",)),
    testing.Case("463911", n=2, lq=4, lk=4, d=16, mask_bias="lowest", pair_bias="111qk", pair_fill="minus_inf",
                 strides=("contiguous", "sliced", "transposed"), gradients=()),
)  # fmt: skip
"""Random problems that failed here, by their seeds."""


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("case", FOUND, ids=lambda case: case.name)
def test_a_problem_that_failed_holds(case: testing.Case, dtype: torch.dtype) -> None:
    problem = testing.RandomProblem(int(case.name), dataclasses.replace(case, dtype=dtype))
    assert testing.judge(problem, "hopper", "cuda") == testing.Outcome("held")


@pytest.mark.parametrize("bias", [-3e4, -1e9, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_queries_to_which_a_pair_bias_leaves_masked_keys_alone(dtype: torch.dtype, bias: float) -> None:
    """A pair bias of -inf at all keys that the mask bias of a row leaves: what is left is attended, and keeps its digits."""
    inputs = example(n=3, h=2, lq=70, lk=70, dtype=dtype, mask=None, mask_bias="finite")
    mask_bias, pair_bias = torch.zeros_like(inputs.mask_bias, dtype=torch.float32), inputs.pair_bias.clone()
    mask_bias[:, 1, ..., 40:] = bias
    pair_bias[..., 5:20, :40] = -torch.inf
    inputs = dataclasses.replace(inputs, mask_bias=mask_bias, pair_bias=pair_bias)
    found, expected = testing.run(inputs, "hopper"), testing.oracle(inputs)
    allowed = 1.6e-2 if dtype == torch.bfloat16 else 4e-3
    for name, value in found.values.items():
        limit = 2e-5 if name == "lse" else allowed
        assert testing.relative_error(value, expected.values[name]) < limit, name
    few = (slice(None), 1, slice(5, 20))
    assert testing.relative_error(found.values["o"][few], expected.values["o"][few]) < allowed


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name)
def test_workload(workload, dtype: torch.dtype) -> None:
    rows = max(1, min(workload.n, 200_000_000 // (workload.h * workload.lq * workload.lk)))
    case = testing.from_workload(dataclasses.replace(workload, b=min(workload.b, 2), n=rows), dtype)
    inputs = case.make(seed=2, device="cuda")
    testing.check(forward(inputs), inputs)


@pytest.mark.parametrize("channels", [8, 16, 24, 32, 48, 64])
@pytest.mark.parametrize("mask", [None, "random", "padding", "empty_rows"])
@pytest.mark.parametrize("length", [2, 33, 65, 97, 129, 397, 513, 1001])
def test_length(length: int, mask: str | None, channels: int) -> None:
    """Whole and ragged blocks, one panel and several, a bias that stays and one that streams."""
    pair = None if channels == 16 else "b1hqk"
    case = testing.Case("sweep", n=3, h=2, lq=length, lk=length, d=channels, dtype=torch.bfloat16, mask=mask, pair_bias=pair)  # type: ignore[arg-type]
    inputs = case.make(seed=3, device="cuda")
    testing.check(forward(inputs), inputs)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("length", [33, 129, 384, 397])
@pytest.mark.parametrize("offset", range(8))
def test_pair_bias_of_any_alignment(offset: int, length: int, dtype: torch.dtype) -> None:
    """Lines of keys that start on any two bytes, with NaN before the first and after the last."""
    inputs = example(n=3, h=2, lq=length, lk=length, dtype=dtype)
    pair = inputs.pair_bias
    room = torch.full((pair.numel() + 16,), torch.nan, dtype=dtype, device="cuda")
    moved = room[offset : offset + pair.numel()].view(pair.shape).copy_(pair)
    assert moved.data_ptr() % 16 == 2 * offset
    inputs = dataclasses.replace(inputs, pair_bias=moved)
    testing.check(forward(inputs), inputs)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("pair_bias", ["b1hqk", None])
@pytest.mark.parametrize("length", [64, 200, 397, 512, 700, 1001])
def test_rows_of_different_lengths(length: int, pair_bias: str | None, dtype: torch.dtype) -> None:
    """Each row n has keys up to an end of its own, some none at all."""
    inputs = example(n=150, h=2, lq=150, lk=length, dtype=dtype, pair_bias=pair_bias)
    ends = torch.randint(0, length + 1, (150, 1), generator=torch.Generator().manual_seed(7))
    ends[::50] = 0
    mask = torch.arange(length) < ends
    inputs = dataclasses.replace(inputs, mask=mask.view_as(inputs.mask).cuda())
    testing.check(forward(inputs), inputs)


@pytest.mark.parametrize("length", [200, 397, 700])
@pytest.mark.parametrize("kept", [3, 33, 64, 70, 100, 128])
def test_dead_keys_at_the_end_are_not_touched(kept: int, length: int) -> None:
    """NaN in keys and values of the slices past the last live key: whoever multiplies by it has NaN in the output."""
    inputs = example(n=5, lq=length, lk=length)
    mask = torch.zeros_like(inputs.mask)
    mask[..., :kept] = True
    inputs = dataclasses.replace(inputs, mask=mask)
    beyond = max(-(-kept // 32) * 32, 64)
    poisoned = {name: getattr(inputs, name).clone() for name in ("k", "v")}
    for x in poisoned.values():
        x[:, :, beyond:] = torch.nan
    testing.check(forward(dataclasses.replace(inputs, **poisoned)), inputs)


@pytest.mark.parametrize("pair", [None, "b1hqk"])
@pytest.mark.parametrize("channels", [32, 48, 64])
@pytest.mark.parametrize("length", [65, 300, 520])
def test_many_rows_of_a_block(length: int, channels: int, pair: str | None) -> None:
    """Each block goes through many rows, an odd number among them, and a last panel leaves half of it idle."""
    inputs = example(n=151, lq=length, lk=length, d=channels, pair_bias=pair)
    testing.check(forward(inputs), inputs)


@pytest.mark.parametrize("length", [384, 768])
def test_a_pair_bias_of_one_key_out_of_many(length: int) -> None:
    """Its rows start on 16 bytes, and yet no two of its keys can be loaded at a time."""
    inputs = example(lq=length, lk=length)
    inputs = dataclasses.replace(inputs, pair_bias=inputs.pair_bias[..., :1])
    testing.check(forward(inputs), inputs)


ADVERSARIES = ["growing", "growing_far", "large", "first_masked", "pair_first_masked", "one_far_key", "first_biased"]


def adversary(kind: str, dtype: torch.dtype, length: int, channels: int) -> testing.Inputs:
    """Inputs for which a reference taken from the first keys is wrong."""
    case = testing.Case("adversary", n=5, h=2, lq=length, lk=length, d=channels, dtype=dtype, pair_bias="b1hqk", mask="random")
    inputs = case.make(seed=4, device="cuda")
    q, k, pair, mask = inputs.q, inputs.k, inputs.pair_bias.float(), inputs.mask.clone()
    along = torch.arange(length, device="cuda", dtype=torch.float32)
    if kind == "growing":  # every block of keys exceeds all before it
        pair = pair + along
    elif kind == "growing_far":
        pair = pair + along * (1e4 / length)
    elif kind == "large":  # scores up to about 1e4
        q = q * 100
        k = k * 10
    elif kind == "first_masked":  # no key of the first slice counts
        mask[..., :40] = False
    elif kind == "pair_first_masked":  # the same, for some queries alone, through the pair bias
        pair[..., ::3, :70] = -1e4
    elif kind == "one_far_key":
        pair[..., length - 1] += 5e3
    elif kind == "first_biased":  # a finite bias masks the first keys: the reference is chosen anew
        bias = torch.zeros(mask.shape, device="cuda").where(along >= 70, -1e5)
        inputs = dataclasses.replace(inputs, mask_bias=bias[..., None, None, :])
    return dataclasses.replace(inputs, q=q, k=k, pair_bias=pair.to(dtype), mask=mask)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("channels", [8, 32, 48, 64])
@pytest.mark.parametrize("length", [200, 384, 700])
@pytest.mark.parametrize("kind", ADVERSARIES)
def test_a_wrong_reference_is_found_and_done_again(kind: str, length: int, channels: int, dtype: torch.dtype) -> None:
    inputs = adversary(kind, dtype, length, channels)
    testing.check(forward(inputs), inputs)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("channels", [8, 16, 32])
@pytest.mark.parametrize("scale", [None, 0.37, -0.2])
def test_a_large_pair_bias_is_added_exactly(scale: float | None, channels: int, dtype: torch.dtype) -> None:
    """Where the inverse of a scale is no number of dtype; taken in one term it would leave an error of 0.01 and more."""
    inputs = example(d=channels, scale=scale, dtype=dtype)
    inputs = dataclasses.replace(inputs, pair_bias=inputs.pair_bias * 30)
    ours, expected = forward(inputs).values["lse"], testing.oracle(inputs).values["lse"]
    torch.testing.assert_close(ours.double(), expected.double(), rtol=1e-5, atol=1e-3)


FLOAT32 = {"pair_bias_dtype": torch.float32}
"""A pair bias that streams in float32 through the forward, beside 16-bit q, k and v."""


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("channels", [8, 16, 24, 32, 48, 64])
@pytest.mark.parametrize(("length", "mask"), [(2, None), (65, "padding"), (192, None), (397, "random"), (1001, "empty_rows")])
def test_a_float32_pair_bias(length: int, mask: str | None, channels: int, dtype: torch.dtype) -> None:
    inputs = example(n=3, lq=length, lk=length, d=channels, dtype=dtype, mask=mask, **FLOAT32)
    testing.check(forward(inputs), inputs)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("channels", [8, 32, 64])
def test_a_float32_pair_bias_is_not_rounded(channels: int, dtype: torch.dtype) -> None:
    """Rounded to bfloat16 it would leave an error of 0.1 in the LSE, in two terms of it 1e-3."""
    inputs = example(n=3, d=channels, dtype=dtype, **FLOAT32)
    inputs = dataclasses.replace(inputs, pair_bias=inputs.pair_bias * 30)
    ours, expected = forward(inputs).values["lse"], testing.oracle(inputs).values["lse"]
    torch.testing.assert_close(ours.double(), expected.double(), rtol=1e-6, atol=2e-5)


@pytest.mark.parametrize("length", [130, 384])
@pytest.mark.parametrize("offset", [1, 2, 3])
def test_a_float32_pair_bias_of_any_alignment(offset: int, length: int) -> None:
    inputs = example(lq=length, lk=length, **FLOAT32)
    pair = inputs.pair_bias
    room = torch.full((pair.numel() + 8,), torch.nan, device="cuda")
    inputs = dataclasses.replace(inputs, pair_bias=room[offset : offset + pair.numel()].view(pair.shape).copy_(pair))
    testing.check(testing.run(inputs, "hopper"), inputs)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("channels", [8, 32, 64])
@pytest.mark.parametrize("kind", ADVERSARIES)
def test_a_wrong_reference_beside_a_float32_pair_bias(kind: str, channels: int, dtype: torch.dtype) -> None:
    inputs = adversary(kind, dtype, 300, channels)
    inputs = dataclasses.replace(inputs, pair_bias=inputs.pair_bias.float() + 1 / 3)
    testing.check(forward(inputs), inputs)


@pytest.mark.parametrize("where", ["q", "k", "v", "pair_bias"])
def test_nan_reaches_what_it_should_and_nothing_else(where: str) -> None:
    case = testing.Case("nan", n=3, h=2, lq=150, lk=150, d=32, dtype=torch.bfloat16, pair_bias="b1hqk")
    inputs = case.make(seed=5, device="cuda")
    broken = getattr(inputs, where).clone()
    broken[(0, 0, 0, 7, 9) if where == "pair_bias" else (0, 1, 20, 1, 3)] = torch.nan
    inputs = dataclasses.replace(inputs, **{where: broken})
    ours, expected = forward(inputs), testing.run(inputs, "reference")
    for name in ("o", "lse"):
        assert torch.equal(ours.values[name].isnan(), expected.values[name].isnan()), name


def example(**changes: object) -> testing.Inputs:
    settings: dict = {"n": 8, "h": 4, "lq": 192, "lk": 192, "d": 32, "dtype": torch.bfloat16, "mask": "random"}
    return testing.Case("gpu", **{**settings, "pair_bias": "b1hqk", **changes}).make(seed=6, device="cuda")


@pytest.mark.parametrize("length", [100, 397, 600])
def test_two_runs_are_bit_equal(length: int) -> None:
    inputs = example(lq=length, lk=length, n=150)
    check_same_bits(forward(inputs).values, forward(inputs).values)


def test_rows_of_one_block_are_bit_equal_run_after_run() -> None:
    """Where rows are short, the next row's queries arrive while a slow warp may still be reading those of the last."""
    inputs = example(n=150, h=3, lq=512, lk=65)
    mask = torch.arange(65) < torch.randint(1, 40, (150, 1), generator=torch.Generator().manual_seed(7))
    inputs = dataclasses.replace(inputs, mask=mask.view_as(inputs.mask).cuda())
    first = forward(inputs).values
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    with torch.no_grad():
        for _ in range(6000):
            o, lse = evoattn.evoformer_attention(
                inputs.q, inputs.k, inputs.v, mask=inputs.mask, pair_bias=inputs.pair_bias, backend="hopper", return_lse=True
            )
            wrong += (o != first["o"]).sum() + (lse != first["lse"]).sum()
    assert wrong == 0


def test_more_rows_than_a_grid_axis_takes() -> None:
    inputs = example(n=70_000, lq=16, lk=16, h=1, d=8)
    testing.check(forward(inputs), inputs)


@pytest.mark.parametrize("length", [16, 17], ids=["copied in words", "one by one"])
def test_more_batches_of_a_pair_bias_than_a_grid_axis_takes(length: int) -> None:
    """48 channels have it laid out anew, by a kernel of its own in either pass."""
    inputs = example(lead=(70_000,), n=2, lq=length, lk=length, h=1, d=48)
    testing.check(testing.run(inputs, "hopper"), inputs)


@pytest.mark.usefixtures("most_of_the_memory")
@pytest.mark.parametrize("which", ["q", "k", "v", "pair_bias", "do"])
def test_offsets_past_2_to_31(which: str) -> None:
    check_offsets(which, "hopper")


@pytest.mark.usefixtures("most_of_the_memory", "one_kernel")
@pytest.mark.parametrize("which", ["q", "k", "v", "do"])
def test_offsets_past_2_to_31_without_a_pair_bias(which: str) -> None:
    check_offsets(which, "hopper", pair_bias=None)


@pytest.mark.usefixtures("most_of_the_memory")
@pytest.mark.parametrize("with_pair_bias", [True, False])
def test_rows_past_2_to_31_elements(with_pair_bias: bool) -> None:
    """All that a call reads and writes is longer than 2^31 elements: the last rows are those of a call of their own."""
    n, l, h, d = 66_000, 256, 4, 32
    mask = torch.rand(1, n, l, device="cuda") > 0.3
    pair = torch.randn(1, 1, h, l, l, device="cuda", dtype=torch.bfloat16) if with_pair_bias else None
    leaves = [torch.randn(1, n, l, h, d, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
    do = torch.randn_like(leaves[0])
    assert do.numel() > 2**31
    o = evoattn.evoformer_attention(*leaves, mask=mask, pair_bias=pair, backend="hopper")
    gradients = torch.autograd.grad(o, leaves, do)
    last = slice(n - 3, n)
    few = [x[:, last].detach().clone().requires_grad_() for x in leaves]
    expected = evoattn.evoformer_attention(*few, mask=mask[:, last], pair_bias=pair, backend="hopper")
    assert torch.equal(o[:, last], expected)
    for gradient, other in zip(gradients, torch.autograd.grad(expected, few, do[:, last]), strict=True):
        assert testing.relative_error(gradient[:, last], other) < 2e-3


def test_a_side_stream() -> None:
    inputs = example()
    expected = forward(inputs).values
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # the inputs arrive late on this stream, so a launch on another would read the old ones
        late = dataclasses.replace(inputs, **{name: x.clone() for name, x in inputs.differentiable.items()})
        results = forward(late).values
    stream.synchronize()
    check_same_bits(results, expected)


@pytest.mark.parametrize("length", [192, 600])
def test_graph_capture_and_replay(length: int) -> None:
    inputs = example(lq=length, lk=length)

    def step() -> Tensor:
        with torch.no_grad():
            return evoattn.evoformer_attention(
                inputs.q, inputs.k, inputs.v, mask=inputs.mask, pair_bias=inputs.pair_bias, backend="hopper"
            )

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for x in inputs.differentiable.values():
        x.copy_(torch.randn_like(x))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, step())


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("backend", ["hopper", "auto"])
@pytest.mark.parametrize("case", testing.AWKWARD, ids=lambda case: case.name)
def test_awkward_gradients(case: testing.Case, backend: str, dtype: torch.dtype) -> None:
    """By this backend where it takes them; and whomever `auto` takes for each pass, the two fit."""
    inputs = dataclasses.replace(case, dtype=dtype).make(seed=1, device="cuda")
    try:
        results = testing.run(inputs, backend)
    except ValueError as refusal:
        if backend == "auto" or "cannot run this problem" not in str(refusal):
            raise
        pytest.skip(str(refusal).splitlines()[1])
    testing.check(results, inputs)
    testing.check(testing.run(inputs, backend, deterministic=True), inputs)


CHANGES = [
    {},
    {"dtype": torch.float16},
    {"lq": 397, "lk": 397},
    {"lq": 200, "lk": 500},
    {"lq": 512, "lk": 65, "h": 3},
    {"lead": (2,), "layout": "bnhld"},
    {"lse_gradient": True},
    {"mask": "empty_rows"},
    {"mask": None},
    {"pair_bias": None},
    {"pair_bias": "11hqk", "lead": (2,)},
    {"pair_bias": "b11qk"},
    {"pair_bias": "b1h1k"},
    {"pair_bias": "b1hq1", "lse_gradient": True},  # without, its gradient is zero
    {"strides": "permuted_pair"},
    {"cotangent": "expanded"},
    {"scale": 0.3},
    {"scale": -0.3},
    {"scale": 3e-5},
    {"n": 2, "d": 24, "lq": 300, "lk": 300},
    {"d": 8},
    {"d": 16},
    {"d": 64},
    {"gradients": ("q",)},
    {"gradients": ("k", "v")},
    {"gradients": ("pair_bias",)},
    {"d": 48, "lq": 300, "lk": 384},
    # beyond 512: the keys are split over a cluster, the pair bias streams
    {"lq": 513, "lk": 513},
    {"lq": 1024, "lk": 1024, "dtype": torch.float16},
    {"lq": 1001, "lk": 1001, "n": 3, "mask": "padding", "lse_gradient": True},
    {"lq": 640, "lk": 640, "n": 70, "mask": "empty_rows"},
    {"lq": 1000, "lk": 1000, "mask": None, "pair_fill": True},
    {"lq": 640, "lk": 640, "dtype": torch.float16, "pair_fill": True},
    {"lq": 640, "lk": 640, "d": 24, "pair_fill": True},
    {"lq": 640, "lk": 640, "d": 48, "pair_fill": True},
    {"lq": 640, "lk": 640, "d": 48, "dtype": torch.float16, "pair_fill": True},
    {"lq": 640, "lk": 640, "d": 64, "pair_fill": True},
    {"lq": 640, "lk": 640, "d": 64, "dtype": torch.float16, "pair_fill": True},
    {"lq": 640, "lk": 640, "scale": 3e-5},
    {"lq": 640, "lk": 640, "scale": -0.3, "dtype": torch.float16},
    {"lq": 600, "lk": 1500},
    {"lq": 1100, "lk": 300},
    {"lq": 100, "lk": 2048, "h": 1},
    {"lq": 768, "lk": 768, "d": 16, "strides": "permuted_pair"},
    {"lq": 768, "lk": 768, "n": 2, "d": 24, "h": 16},
    {"lq": 768, "lk": 768, "d": 48},
    {"lq": 768, "lk": 700, "d": 64},
    {"lq": 640, "lk": 640, "pair_bias": None},
    {"lq": 640, "lk": 640, "pair_bias": "11hqk", "lead": (2,)},
    {"lq": 640, "lk": 640, "pair_bias": "b1h1k"},
    {"lq": 700, "lk": 700, "gradients": ("q",)},
    {"lq": 700, "lk": 700, "gradients": ("k", "v")},
    # without a pair bias: four warpgroups, a block's keys exactly or fewer, and blocks that share them
    {"lq": 130, "lk": 128, "pair_bias": None, "n": 40},
    {"lq": 100, "lk": 100, "pair_bias": None, "d": 8, "lse_gradient": True},
    {"lq": 200, "lk": 250, "pair_bias": None, "dtype": torch.float16},
    {"lq": 384, "lk": 384, "pair_bias": None, "mask": "empty_rows", "n": 70},
    {"lq": 512, "lk": 512, "pair_bias": None, "n": 70},
    {"lq": 512, "lk": 512, "pair_bias": None, "mask": None, "lse_gradient": True},
    {"lq": 200, "lk": 1024, "pair_bias": None, "dtype": torch.float16},
    {"lq": 300, "lk": 500, "pair_bias": None, "mask": None, "d": 16},
    {"lq": 600, "lk": 700, "pair_bias": None, "d": 24, "dtype": torch.float16},
    {"lq": 300, "lk": 1000, "pair_bias": None, "n": 40, "h": 1},
    {"lq": 200, "lk": 1500, "pair_bias": None, "mask": "padding"},
    {"lq": 200, "lk": 2048, "pair_bias": None, "n": 40},
    {"lq": 100, "lk": 2500, "pair_bias": None, "h": 1},
    {"lq": 100, "lk": 4000, "pair_bias": None, "h": 1, "dtype": torch.float16},
    {"lq": 70, "lk": 8192, "pair_bias": None, "h": 1, "n": 3},
    # with a pair bias: two warpgroups up to 256 keys
    {"lq": 130, "lk": 128, "n": 70, "dtype": torch.float16},
    {"lq": 200, "lk": 192, "n": 70, "lse_gradient": True},
    {"lq": 130, "lk": 150, "d": 16, "mask": "empty_rows"},
    {"lq": 256, "lk": 256, "n": 70},
    {"lq": 100, "lk": 250, "d": 8, "mask": None, "dtype": torch.float16},
    # so many rows that the kernel of the keys rounds d(pair bias); the terms' kernel clears it, or torch where there is none
    {"n": 40, "lq": 384, "lk": 384},
    {"n": 40, "lq": 70, "lk": 388, "dtype": torch.float16, "lse_gradient": True},
    {"n": 33, "lq": 384, "lk": 384, "mask": None},
    {"n": 32, "lq": 200, "lk": 100, "lead": (2,), "pair_bias": "11hqk"},
    {"n": 40, "lq": 130, "lk": 260, "pair_bias": "b11qk", "d": 64},
    {"n": 40, "lq": 512, "lk": 512, "d": 64},
    {"n": 40, "lq": 100, "lk": 100, "gradients": ("k", "pair_bias")},
    {"n": 600, "lq": 20, "lk": 24, "h": 1, "mask": None},
    # few rows of so many panels that blocks go through whole ones, on 132 processors
    {"n": 4, "h": 48},
    {"n": 3, "h": 64, "lq": 256, "lk": 256, "mask_bias": "finite"},
    # the gradient of a mask bias
    {"mask_bias": "finite"},
    {"mask_bias": "finite", "n": 40, "lq": 256, "lk": 256},
    {"mask_bias": "finite", "lq": 65, "lk": 65, "d": 8, "dtype": torch.float16, "pair_bias": None, "mask": None},
    {"mask_bias": "finite", "lq": 384, "lk": 384, "n": 70, "dtype": torch.float16},
    {"mask_bias": "finite", "lq": 200, "lk": 288, "mask": None, "gradients": ("q", "mask_bias")},
    {"mask_bias": "minus_1e9_rows", "lq": 397, "lk": 397, "d": 24},
    {"mask_bias": "minus_inf_rows", "lq": 512, "lk": 512, "bias_dtype": torch.float32, "pair_bias": None, "lse_gradient": True},
    {"mask_bias": "finite", "lq": 300, "lk": 384, "d": 48, "scale": -0.3},
    {"mask_bias": "finite", "lq": 384, "lk": 384, "d": 64, "layout": "bnhld"},
    {"mask_bias": "finite", "lq": 768, "lk": 700, "d": 64, "dtype": torch.float16},
    {"mask_bias": "finite", "lq": 1000, "lk": 1000, "n": 3, "mask": "empty_rows", "lse_gradient": True},
    {"mask_bias": "finite", "gradients": ("mask_bias",)},
    {"mask_bias": "finite", "lq": 768, "lk": 768, "d": 48, "gradients": ("mask_bias",)},
    {"mask_bias": "finite", "gradients": ("mask_bias", "pair_bias")},
    *({"lq": length, "lk": length, "d": channels, **FLOAT32} for length in (100, 397, 768) for channels in (8, 32, 48, 64)),
    {"lq": 397, "lk": 397, "dtype": torch.float16, **FLOAT32},
    {"lq": 600, "lk": 600, "d": 48, "mask_bias": "finite", "dtype": torch.float16, **FLOAT32},
    {"lq": 200, "lk": 1100, "n": 40, "layout": "bnhld", **FLOAT32},
    {"lq": 192, "lk": 192, "n": 40, "mask": None, "gradients": ("pair_bias",), **FLOAT32},
    {"lq": 130, "lk": 260, "n": 40, "pair_bias": "111qk", "lead": (2,), **FLOAT32},
    {"lq": 130, "lk": 260, "pair_bias": "b1h1k", **FLOAT32},
]


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_gradients(changes: dict, deterministic: bool) -> None:
    inputs = example(**changes)
    testing.check(testing.run(inputs, "hopper", deterministic=deterministic), inputs)


def masked(kind: str, like: Tensor) -> Tensor:
    """A mask [b,n,k] that leaves few keys, rows or batches."""
    mask, (batches, n, keys) = torch.ones_like(like), like.shape
    if kind in ("ends", "apart"):
        ends = torch.randint(0, keys + 1, (batches, n, 1), generator=torch.Generator().manual_seed(7))
        mask &= torch.arange(keys, device=mask.device) < ends.to(mask.device)
        if kind == "apart":  # in memory
            mask = torch.stack((mask, ~mask), -1)[..., 0]
    elif kind == "padding":
        mask[:, n // 2 :] = False
        mask[..., keys // 2 :] = False
    elif kind == "shared":
        mask = (torch.arange(keys, device=mask.device) < keys // 3).expand(batches, 1, keys)
    elif kind == "batch":
        mask[0] = False
    elif kind == "one_key":
        mask[:] = False
        mask[-1, n // 2, keys // 2] = True
    else:
        assert kind == "nothing"
        mask[:] = False
    return mask


LEFT_OUT = [
    {},
    {"lq": 640, "lk": 640, "dtype": torch.float16},
    {"lq": 130, "lk": 1500, "n": 3},
    {"lq": 300, "lk": 397, "d": 8, "layout": "bnhld"},
    {"d": 64, "lq": 200, "lk": 384, "dtype": torch.float16},
    {"d": 64, "lq": 64, "lk": 640},
    {"d": 48, "lq": 640, "lk": 300, "lse_gradient": True},
    {"n": 150, "lq": 100, "lk": 130, "mask_bias": "finite"},
    {"n": 150, "lq": 70, "lk": 512},  # so many rows that a block goes through several
    {"n": 150, "lq": 64, "lk": 384, "d": 64, "h": 2},
    {"n": 4, "h": 36},  # and so few that it goes through whole panels
    {"mask_bias": "minus_inf_rows", "lq": 200, "lk": 200},
    {"pair_bias": None, "lq": 300, "lk": 500, "mask_bias": "finite"},
    {"pair_bias": None, "d": 64, "lq": 200, "lk": 384, "lse_gradient": True},
    {"gradients": ("k", "v")},
    {"gradients": ("q", "k", "pair_bias")},
    {"d": 48, "lq": 640, "lk": 300, **FLOAT32},
    {"lq": 200, "lk": 384, **FLOAT32},
]


@pytest.mark.usefixtures("poisoned", "rows_left_out")
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("kind", ["ends", "apart", "padding", "shared", "batch", "one_key", "nothing"])
@pytest.mark.parametrize("changes", LEFT_OUT, ids=str)
def test_gradients_where_a_mask_leaves_rows_out(changes: dict, kind: str, deterministic: bool) -> None:
    """What is left out has gradients of zero; rows whose bias alone is -inf are not left out."""
    inputs = example(**{"lead": (2,), "n": 10, **changes})
    inputs = dataclasses.replace(inputs, mask=masked(kind, inputs.mask))
    testing.check(testing.run(inputs, "hopper", deterministic=deterministic), inputs)


@pytest.mark.usefixtures("poisoned", "rows_left_out", "heads_in_turns")
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("kind", ["ends", "batch", "nothing"])
def test_rows_left_out_of_heads_in_turns(kind: str, deterministic: bool) -> None:
    """Each batch has a list of its own, and one of them may have nothing to do."""
    inputs = example(lead=(2,), n=20, lq=520, lk=520)
    inputs = dataclasses.replace(inputs, mask=masked(kind, inputs.mask))
    results = testing.run(inputs, "hopper", deterministic=deterministic)
    testing.check(results, inputs)
    if deterministic:
        check_same_bits(testing.run(inputs, "hopper", deterministic=True).values, results.values)


@pytest.mark.usefixtures("poisoned", "one_kernel")
@pytest.mark.parametrize(
    "changes", [{}, {"mask_bias": "finite", "dtype": torch.float16}, {"d": 8, "lse_gradient": True}], ids=str
)
@pytest.mark.parametrize("kind", ["ends", "padding", "one_key", "nothing"])
def test_whole_rows_end_where_a_mask_ends_them(kind: str, changes: dict) -> None:
    """A block goes through several rows, each with tiles of keys of its own number."""
    inputs = example(**{"n": 110, "lq": 130, "lk": 500, "pair_bias": None, **changes})
    inputs = dataclasses.replace(inputs, mask=masked(kind, inputs.mask))
    results = testing.run(inputs, "hopper")
    testing.check(results, inputs)
    check_same_bits(testing.run(inputs, "hopper").values, results.values)


WITHOUT_A_PAIR_BIAS = [
    {},
    {"dtype": torch.float16},
    {"lq": 512, "lk": 512},
    {"lq": 512, "lk": 512, "d": 16, "dtype": torch.float16, "n": 70},
    {"lq": 384, "lk": 384, "d": 24, "mask": None, "n": 150},
    {"lq": 1, "lk": 1},
    {"lq": 64, "lk": 64, "mask": None, "n": 300},
    {"lq": 65, "lk": 129, "d": 8},
    {"lq": 130, "lk": 1},
    {"lq": 1, "lk": 700, "mask": "padding"},
    {"lq": 250, "lk": 333, "d": 8, "dtype": torch.float16, "mask": None},
    {"lq": 300, "lk": 1000, "mask": "empty_rows", "n": 40},
    {"lq": 1024, "lk": 100, "d": 16},
    {"lq": 1000, "lk": 1500, "d": 8, "h": 1, "n": 3},
    {"lq": 449, "lk": 448, "layout": "bnhld", "lead": (2,)},
    {"lq": 200, "lk": 500, "lse_gradient": True, "mask": "empty_rows"},
    {"lq": 200, "lk": 200, "d": 16, "lse_gradient": True, "cotangent": "expanded", "dtype": torch.float16},
    {"scale": -0.3},
    {"scale": 3e-5},
    {"mask_bias": "finite", "lq": 397, "lk": 397},
    {"mask_bias": "finite", "lq": 397, "lk": 130, "d": 8, "dtype": torch.float16, "mask": None},
    {"mask_bias": "minus_1e9_rows", "lq": 397, "lk": 397, "d": 24, "lse_gradient": True},
    {"mask_bias": "minus_inf_rows", "lq": 100, "lk": 512, "d": 16, "bias_dtype": torch.float32},
    {"gradients": ("q", "v"), "mask_bias": "finite"},
]


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("kernels", ["one_kernel", "two_kernels"])
@pytest.mark.parametrize("changes", WITHOUT_A_PAIR_BIAS, ids=str)
def test_gradients_without_a_pair_bias(changes: dict, kernels: str, request: pytest.FixtureRequest) -> None:
    """As where a call has many rows, and as where it has few; twice, with the same bits."""
    request.getfixturevalue(kernels)
    inputs = example(pair_bias=None, **changes)
    results = testing.run(inputs, "hopper")
    testing.check(results, inputs)
    check_same_bits(testing.run(inputs, "hopper").values, results.values)


IN_TURNS = [
    {},
    {"lq": 600, "lk": 600, "n": 40},
    {"d": 48, "dtype": torch.float16},
    {"gradients": ("q",)},
    {"gradients": ("k", "v")},
    {"lse_gradient": True, "mask": "empty_rows"},
    FLOAT32,
]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("pair_bias", ["b1hqk", "11hqk"])
@pytest.mark.parametrize("changes", IN_TURNS, ids=str)
@pytest.mark.parametrize("together", [1, 2])
def test_heads_in_turns(
    together: int, changes: dict, pair_bias: str, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where so many keep all processors busy."""
    monkeypatch.setattr(head_groups, "divisor", lambda *_: together)
    inputs = example(**{"lead": (2,), "mask_bias": "finite", "pair_bias": pair_bias, "lq": 520, "lk": 520, **changes})
    results = testing.run(inputs, "hopper", deterministic=deterministic)
    testing.check(results, inputs)
    if deterministic:
        check_same_bits(testing.run(inputs, "hopper", deterministic=True).values, results.values)


@pytest.mark.parametrize(
    ("gradients", "way"),
    [(("q", "k", "v"), "kept"), (("k", "v"), "kept"), (("q", "k", "v"), "no_pair_bias")],
    indirect=["way"],
)
def test_a_gradient_of_the_lse_of_queries_that_attend_to_nothing(gradients: tuple[str, ...], way: dict) -> None:
    """It is asked for nowhere: NaN there reaches nothing."""
    inputs = example(mask="empty_rows", lse_gradient=True, gradients=gradients, **way)
    dead = ~inputs.mask.any(-1)  # [b,n]
    assert dead.any() and not dead.all()
    expected = testing.run(inputs, "hopper")
    poisoned = torch.where(dead[..., None, None], torch.nan, inputs.dlse)
    results = testing.run(dataclasses.replace(inputs, dlse=poisoned), "hopper")
    check_same_bits(results.values, expected.values)


@pytest.mark.parametrize("bias_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("of_b", "of_n"), [(2, 1), (1, 8), (1, 1)])
def test_gradient_of_a_mask_bias_that_is_shared(of_b: int, of_n: int, bias_dtype: torch.dtype) -> None:
    inputs = example(lead=(2,), mask_bias="finite")
    inputs = dataclasses.replace(inputs, mask_bias=inputs.mask_bias[:of_b, :of_n].to(bias_dtype))
    testing.check(testing.run(inputs, "hopper"), inputs)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("length", [192, 640])
@pytest.mark.parametrize("far", [-6e4, -3e4, 3e4, 6e4])
def test_gradients_of_far_log_sum_exps(far: float, length: int, dtype: torch.dtype) -> None:
    """A query that a finite pair bias switches off, or on, as a whole: nothing of it may reach the others as NaN.

    At 60,000 the log-sum-exp itself is rounded by up to 0.2% of the exponential, all that float16 is allowed otherwise.
    """
    inputs = example(dtype=dtype, lq=length)
    pair = inputs.pair_bias.clone()
    pair[..., ::5, :] = far
    inputs = dataclasses.replace(inputs, pair_bias=pair)
    results = testing.run(inputs, "hopper")
    if dtype == torch.float16 and abs(far) > 5e4:
        lost = testing.errors(results, testing.oracle(inputs))
        assert max(lost.values()) < abs(far) * torch.finfo(torch.float32).eps
    else:
        testing.check(results, inputs)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("length", [100, 640])
@pytest.mark.parametrize("times", [2.0**-8, 2.0**-4, 2.0**11])
def test_gradients_of_small_and_large_cotangents(times: float, length: int, dtype: torch.dtype) -> None:
    """delta is subtracted by a product, in terms of dtype: float16 has few exponents for them."""
    inputs = example(dtype=dtype, lq=length)
    inputs = dataclasses.replace(inputs, do=inputs.do * times)
    testing.check(testing.run(inputs, "hopper"), inputs)


@pytest.mark.parametrize("offset", [1, 2, 4])
def test_gradients_with_a_pair_bias_of_any_alignment(offset: int) -> None:
    inputs = example()
    pair = inputs.pair_bias
    moved = (
        torch.empty(pair.numel() + 8, dtype=pair.dtype, device="cuda")[offset : offset + pair.numel()]
        .view(pair.shape)
        .copy_(pair)
    )
    inputs = dataclasses.replace(inputs, pair_bias=moved)
    testing.check(testing.run(inputs, "hopper"), inputs)


@pytest.mark.parametrize("mask_bias", [None, "finite"])
@pytest.mark.parametrize(("length", "n"), [(397, 300), (1000, 100)])
def test_deterministic_gradients_are_bit_equal(length: int, n: int, mask_bias: str | None) -> None:
    inputs = example(n=n, lq=length, lk=length, mask_bias=mask_bias)
    check_same_bits(*(testing.run(inputs, "hopper", deterministic=True).values for _ in range(2)))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("way", WAYS, indirect=True)
@pytest.mark.parametrize("n", [5, 40])
def test_calls_in_turn_keep_to_themselves(n: int, way: dict, deterministic: bool) -> None:
    check_in_turn(example(n=n, **way).case, "hopper", deterministic=deterministic)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("way", WAYS, indirect=True)
@pytest.mark.parametrize("n", [8, 40])
def test_graph_of_a_training_step(n: int, way: dict, deterministic: bool) -> None:
    inputs = example(n=n, **way)
    leaves = [x.requires_grad_() for x in inputs.differentiable.values()]

    def step() -> tuple[Tensor, ...]:
        call = {"mask": inputs.mask, "pair_bias": inputs.pair_bias, "backend": "hopper", "deterministic": deterministic}
        o = evoattn.evoformer_attention(inputs.q, inputs.k, inputs.v, **call)  # type: ignore[call-overload]
        return o, *torch.autograd.grad(o, leaves, inputs.do)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for leaf in leaves:
            leaf.copy_(torch.randn_like(leaf))
    right = step()
    for _ in range(2):  # at once: a kernel that reads too early finds words of the old inputs; again: a sum not cleared shows
        graph.replay()
        torch.cuda.synchronize()
        for value, expected in zip(captured, right, strict=True):
            if deterministic:
                assert torch.equal(value, expected)
            else:
                assert testing.relative_error(value, expected) < 5e-3


def test_auto_takes_both_passes() -> None:
    inputs = example(mask_bias="finite")
    q, k, v, mask_bias, pair_bias = (x.requires_grad_() for x in inputs.differentiable.values())
    explanation = evoattn.explain(q, k, v, mask=inputs.mask, mask_bias=mask_bias, pair_bias=pair_bias)
    assert explanation.backend == "hopper" and explanation.backward_backend is None


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("bias", [None, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("length", [70, 256])
def test_gradients_of_columns_are_columns(length: int, bias: torch.dtype | None, across: bool) -> None:
    """Bit for bit what q, k and v of their own get, in one tensor whose other columns nobody touches."""
    h, d = 4, 32
    width = 3 * h * d + 8
    x = torch.randn(1, length, length, width, device="cuda", dtype=torch.bfloat16)
    parts = [x[..., i * h * d : (i + 1) * h * d].unflatten(-1, (h, d)) for i in range(3)]
    parts = [y.transpose(1, 2) if across else y for y in parts]
    mask = torch.rand(1, length, length, device="cuda") > 0.3
    mask[:, :3] = False
    pair_bias = None
    if bias is not None:
        pair_bias = torch.randn(1, 1, h, length, length, device="cuda", dtype=bias).requires_grad_()
    do = torch.randn(1, length, length, h, d, device="cuda", dtype=torch.bfloat16)

    def gradients(parts: list[Tensor]) -> tuple[Tensor, ...]:
        leaves = [y.detach().requires_grad_() for y in parts]
        wishes = {"mask": mask, "pair_bias": pair_bias, "deterministic": True, "backend": "hopper"}
        o = evoattn.evoformer_attention(*leaves, **wishes)  # type: ignore[call-overload]
        return torch.autograd.grad(o, [*leaves, *([] if pair_bias is None else [pair_bias])], do)

    found, wanted = gradients(parts), gradients([y.contiguous() for y in parts])
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)
    assert found[0].untyped_storage().nbytes() == length * length * width * 2
    gap = found[0].as_strided((length * length, 8), (width, 1), 3 * h * d)
    assert bool(gap.isnan().all())


@pytest.mark.usefixtures("poisoned", "rows_left_out")
def test_columns_where_rows_are_left_out() -> None:
    test_gradients_of_columns_are_columns(256, torch.bfloat16, False)
