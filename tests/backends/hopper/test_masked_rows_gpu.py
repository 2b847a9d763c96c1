"""The Hopper backward on a GPU where a mask switches rows off, and where gradients are columns of one tensor."""

import dataclasses

import pytest
import torch
from torch import Tensor

import evoattn
from evoattn import testing
from tests.backends.hopper.gpu_calls import FLOAT32, ON_HOPPER, example, mask_of
from tests.helpers.gpu_checks import check_same_bits

pytestmark = ON_HOPPER


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
    inputs = dataclasses.replace(inputs, mask=mask_of(kind, inputs.mask))
    testing.check(testing.run(inputs, "hopper", deterministic=deterministic), inputs)


@pytest.mark.usefixtures("poisoned", "rows_left_out", "heads_in_turns")
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("kind", ["ends", "batch", "nothing"])
def test_rows_left_out_of_heads_in_turns(kind: str, deterministic: bool) -> None:
    """Each batch has a list of its own, and one of them may have nothing to do."""
    inputs = example(lead=(2,), n=20, lq=520, lk=520)
    inputs = dataclasses.replace(inputs, mask=mask_of(kind, inputs.mask))
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
    inputs = dataclasses.replace(inputs, mask=mask_of(kind, inputs.mask))
    results = testing.run(inputs, "hopper")
    testing.check(results, inputs)
    check_same_bits(testing.run(inputs, "hopper").values, results.values)


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
        options = {"mask": mask, "pair_bias": pair_bias, "deterministic": True, "backend": "hopper"}
        o = evoattn.evoformer_attention(*leaves, **options)  # type: ignore[call-overload]
        return torch.autograd.grad(o, [*leaves, *([] if pair_bias is None else [pair_bias])], do)

    actual, wanted = gradients(parts), gradients([y.contiguous() for y in parts])
    for a, b in zip(actual, wanted, strict=True):
        assert torch.equal(a, b)
    assert actual[0].untyped_storage().nbytes() == length * length * width * 2
    gap = actual[0].as_strided((length * length, 8), (width, 1), 3 * h * d)
    assert bool(gap.isnan().all())


@pytest.mark.usefixtures("poisoned", "rows_left_out")
def test_columns_where_rows_are_left_out() -> None:
    test_gradients_of_columns_are_columns(256, torch.bfloat16, False)
