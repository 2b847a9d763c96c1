"""The gradients of the Hopper backend on a GPU: every variant of its kernels, and numbers far from 1."""

import dataclasses

import pytest
import torch

from evoattn import testing
from evoattn.backends.hopper import head_groups
from tests.backends.hopper.gpu_calls import DTYPES, FLOAT32, ON_HOPPER, example
from tests.helpers.gpu_checks import check_same_bits

pytestmark = ON_HOPPER


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
def test_gradients_agree_with_float64(changes: dict, deterministic: bool) -> None:
    inputs = example(**changes)
    testing.check(testing.run(inputs, "hopper", deterministic=deterministic), inputs)


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
@pytest.mark.parametrize("heads_at_once", [1, 2])
def test_heads_in_turns(
    heads_at_once: int, changes: dict, pair_bias: str, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where so many keep all processors busy."""
    monkeypatch.setattr(head_groups, "divisor", lambda *_: heads_at_once)
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
