"""The numbers that every backend measures scores from, and the saved statistic."""

import math

import pytest
import torch

from evoattn.core import numerics
from evoattn.core.numerics import NEAR

INF = math.inf


def test_sums_are_float32_or_wider() -> None:
    dtypes = {
        dtype: numerics.accumulate_dtype(dtype) for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    }
    assert dtypes.pop(torch.float64) == torch.float64
    assert set(dtypes.values()) == {torch.float32}


def test_the_key_bias_of_a_padded_row_keeps_the_digits_of_its_scores() -> None:
    mask_bias = torch.full((1, 2, 3), -1e9)
    mask_bias[0, 1] = torch.tensor([0.0, -2.5, -1e9])
    bias = numerics.key_bias(None, mask_bias, torch.float32)
    assert bias is not None
    assert bias[0].tolist() == [[0, 0, 0], [0, -2.5, -1e9]]


def test_the_key_bias_is_minus_infinity_for_keys_that_are_not_attended_and_only_then() -> None:
    mask = torch.tensor([[[True, False, True, True]]])
    biases = torch.tensor([[[1.0, 3e38, -INF, -3e38]]])
    bias = numerics.key_bias(mask, biases, torch.float32)
    assert bias is not None
    assert (bias == -INF).tolist() == [[[False, True, True, False]]]
    assert bias[0, 0, 3] == -numerics.bias_limit(torch.float32)
    assert numerics.key_bias(mask, None, torch.float32).tolist() == [[[0, -INF, 0, 0]]]  # type: ignore[union-attr]
    assert numerics.key_bias(None, None, torch.float32) is None


def test_keys_that_the_mask_switches_off_do_not_shift_a_row() -> None:
    mask = torch.tensor([[[True, False], [False, False]]])
    biases = torch.tensor([[[-7.0, 5.0], [1.0, 2.0]]])
    assert numerics.row_shift(mask, biases, torch.float32).tolist() == [[-7, 0]]
    assert numerics.row_shift(None, biases[..., :0], torch.float32).tolist() == [[0, 0]]


def test_a_bias_that_a_narrow_dtype_cannot_hold_stays_finite() -> None:
    bias = numerics.bounded(torch.tensor([1e300, -1e300, INF, -INF, 2.0], dtype=torch.float64), torch.float32)
    largest = torch.finfo(torch.float32).max
    assert bias.dtype == torch.float32
    assert bias.tolist() == [largest, -largest, INF, -INF, 2.0]


@pytest.mark.parametrize(
    ("pair", "key", "shift"),
    [
        ([-NEAR, NEAR], None, 0),  # near 0
        ([-1e9, -1e9], None, -1e9),
        ([-1e9, 100.0], [0.0, -INF], -1e9),  # a key that the mask switches off
        ([70.0, 0.0], [-70.0, 0.0], 0),  # the sums are near 0
        ([-INF, -INF], None, 0),
        ([], None, 0),
    ],
)
def test_the_query_shift_is_the_largest_sum_of_the_biases(pair: list[float], key: list[float] | None, shift: float) -> None:
    key_bias = None if key is None else torch.tensor([[key]])
    actual = numerics.query_shift(torch.tensor([[[pair]]]), key_bias, torch.float32)
    assert actual.shape == (1, 1, 1, 1, 1)
    assert actual.item() == shift


def test_the_smaller_of_two_shifted_biases_keeps_its_digits() -> None:
    """The sum of both, from which the shift is taken afterwards, would round 1.5 away."""
    pair, key = torch.full((1, 1, 1, 3), -1e9), torch.tensor([[[0.0, 1.5, -INF]]])
    shift = numerics.query_shift(pair, key, torch.float32)
    assert numerics.shifted_biases(pair, key, shift).flatten().tolist() == [0, 1.5, -INF]
    assert numerics.shifted_biases(pair, None, shift).flatten().tolist() == [0, 0, 0]


def test_the_lse_of_a_user_is_in_natural_units() -> None:
    scores = torch.tensor([[3.0, -1.0, 100.0], [2.0, 2.0, 2.0]], dtype=torch.float64)
    reference = torch.tensor([90.0, 0.0], dtype=torch.float64)
    lse = torch.log2(torch.exp(scores - reference[:, None]).sum(-1)).requires_grad_()
    natural = numerics.natural_lse(lse, reference)
    torch.testing.assert_close(natural, torch.logsumexp(scores, -1))
    assert torch.autograd.grad(natural.sum(), lse)[0].tolist() == [numerics.LN2] * 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_numbers_are_rounded_as_tensors_are(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(1 << 31), 1 << 31, (2000,), generator=generator, dtype=torch.int64).to(torch.int32)
    values = [x for x in bits.view(torch.float32).tolist() if math.isfinite(x)]
    values += torch.randn(2000, generator=generator, dtype=torch.float64).tolist()
    values += [0.0, -0.0, 1 + 2**-8, 1 + 3 * 2**-8, 65519.0, 65520.0, -1e39, 3.4e38, 1e-45, 2.0**-25, INF]
    for x in values:
        assert numerics.rounded(x, dtype) == torch.tensor(x, dtype=torch.float64).to(dtype).item()
