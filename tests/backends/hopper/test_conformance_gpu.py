"""The Hopper backend on a GPU: the conformance suite, and forwards that a fixed reference could get wrong.

python -m pytest -m gpu tests/backends/hopper
"""

import dataclasses

import pytest
import torch

from evoattn import testing
from evoattn.workloads import WORKLOADS
from tests.backends.hopper.gpu_calls import DTYPES, FLOAT32, ON_HOPPER, example, forward
from tests.fuzz import RandomProblem, judge

pytestmark = ON_HOPPER


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("case", testing.AWKWARD, ids=lambda case: case.name)
def test_forward_of_awkward_case_agrees_with_float64(case: testing.Case, dtype: torch.dtype) -> None:
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
    problem = RandomProblem(int(case.name), dataclasses.replace(case, dtype=dtype))
    assert judge(problem, "hopper", "cuda") == testing.Outcome("held")


@pytest.mark.parametrize("bias", [-3e4, -1e9, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_queries_to_which_a_pair_bias_leaves_masked_keys_alone(dtype: torch.dtype, bias: float) -> None:
    """A pair bias of -inf at all keys that the mask bias of a row leaves: what is left is attended, and keeps its digits."""
    inputs = example(n=3, h=2, lq=70, lk=70, dtype=dtype, mask=None, mask_bias="finite")
    mask_bias, pair_bias = torch.zeros_like(inputs.mask_bias, dtype=torch.float32), inputs.pair_bias.clone()
    mask_bias[:, 1, ..., 40:] = bias
    pair_bias[..., 5:20, :40] = -torch.inf
    inputs = dataclasses.replace(inputs, mask_bias=mask_bias, pair_bias=pair_bias)
    actual, expected = testing.run(inputs, "hopper"), testing.oracle(inputs)
    allowed = 1.6e-2 if dtype == torch.bfloat16 else 4e-3
    for name, value in actual.values.items():
        limit = 2e-5 if name == "lse" else allowed
        assert testing.relative_error(value, expected.values[name]) < limit, name
    few = (slice(None), 1, slice(5, 20))
    assert testing.relative_error(actual.values["o"][few], expected.values["o"][few]) < allowed


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name)
def test_forward_of_workload_agrees_with_float64(workload, dtype: torch.dtype) -> None:
    rows = max(1, min(workload.n, 200_000_000 // (workload.h * workload.lq * workload.lk)))
    case = testing.from_workload(dataclasses.replace(workload, b=min(workload.b, 2), n=rows), dtype)
    inputs = case.make(seed=2, device="cuda")
    testing.check(forward(inputs), inputs)


@pytest.mark.parametrize("channels", [8, 16, 24, 32, 48, 64])
@pytest.mark.parametrize("mask", [None, "random", "padding", "empty_rows"])
@pytest.mark.parametrize("length", [2, 33, 65, 97, 129, 397, 513, 1001])
def test_forward_of_any_length_agrees_with_float64(length: int, mask: str | None, channels: int) -> None:
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


def adversary(kind: str, dtype: torch.dtype, length: int, channels: int) -> testing.CaseInputs:
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
    actual, expected = forward(inputs).values["lse"], testing.oracle(inputs).values["lse"]
    torch.testing.assert_close(actual.double(), expected.double(), rtol=1e-5, atol=1e-3)


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
    actual, expected = forward(inputs).values["lse"], testing.oracle(inputs).values["lse"]
    torch.testing.assert_close(actual.double(), expected.double(), rtol=1e-6, atol=2e-5)


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
    actual, expected = forward(inputs), testing.run(inputs, "reference")
    for name in ("o", "lse"):
        assert torch.equal(actual.values[name].isnan(), expected.values[name].isnan()), name


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("backend", ["hopper", "auto"])
@pytest.mark.parametrize("case", testing.AWKWARD, ids=lambda case: case.name)
def test_gradients_of_awkward_case_agree_with_float64(case: testing.Case, backend: str, dtype: torch.dtype) -> None:
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
