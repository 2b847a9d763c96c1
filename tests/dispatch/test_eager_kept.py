"""A kept plan serves only calls that are alike: sizes, strides, alignment, settings and which tensors are the same."""

import gc
import weakref

import pytest
import torch
from torch import Tensor

import evoattn
from tests.dispatch.calls import attend, leaves, step, way
from tests.helpers import seams
from tests.helpers.operators import Operators
from tests.helpers.planner import Planner

LOOKS = 32
"""Twice as many calls as are kept of those that differ in their strides alone."""


def test_validation_is_not_skipped_for_what_looks_alike(planner: Planner) -> None:
    """1 equals True, and has its hash."""
    tensors = leaves()
    attend(*tensors, deterministic=True, scale=1.0, return_lse=False)
    for wrong, message in (
        ({"deterministic": 1}, "deterministic must be"),
        ({"scale": True}, "scale must be"),
        ({"return_lse": 0}, "return_lse must be"),
        ({"layout": ["bnlhd"]}, "layout must be"),
        ({"config": {}}, "config must be"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            attend(*tensors, **{"deterministic": True, "scale": 1.0, **wrong})
    with pytest.raises(TypeError, match="k must have the dtype of q"):
        attend(tensors[0], tensors[1].double(), *tensors[2:])
    with pytest.raises(ValueError, match="cannot run this problem"):
        attend(*tensors, config=evoattn.Config(block_q=16))


def test_settings_are_part_of_a_call(planner: Planner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Determinism and the precision of float32 products are looked at on every call."""
    tensors = [x.detach() for x in leaves()]
    for name in ("", "deterministic", "tf32", ""):
        deterministic = torch.are_deterministic_algorithms_enabled()
        before = torch.get_float32_matmul_precision()
        try:
            torch.use_deterministic_algorithms(name == "deterministic", warn_only=True)
            torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
            attend(*tensors)
            assert way(*tensors) == "plan"
        finally:
            torch.use_deterministic_algorithms(deterministic)
            torch.set_float32_matmul_precision(before)
    assert (planner.forwards, planner.planned_forwards) == (4, 3)


def test_settings_are_part_of_a_backward(planner: Planner, operators: Operators) -> None:
    """And what is forgotten between it and its forward is forgotten. It finds all gradients when few of them are asked for."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)  # torch tells one that was set from one that never was
    arguments = leaves()
    output = attend(*arguments)
    cotangent = torch.randn_like(output)

    def gradients(of: list[Tensor]) -> list[Tensor]:
        return list(torch.autograd.grad(output, of, cotangent, retain_graph=True))

    expected = gradients(arguments)
    torch.testing.assert_close(gradients(arguments[1:]), expected[1:])
    torch.testing.assert_close(gradients(arguments[:1]), expected[:1])
    assert planner.planned_backwards == 1
    try:
        torch.set_float32_matmul_precision("high")
        gradients(arguments)
        assert planner.planned_backwards == 2
    finally:
        torch.set_float32_matmul_precision(precision)
    seams.forget()
    torch.testing.assert_close(gradients(arguments), expected)
    assert planner.planned_backwards == 3
    assert operators.called() == []


def test_alignment_is_part_of_a_call(planner: Planner) -> None:
    """Kernels load 16 bytes at a time where tensors start on a multiple of them."""
    q, k, v, mask_bias, pair_bias = (x.detach() for x in leaves())
    moved = torch.empty(pair_bias.numel() + 1)[1:].view(pair_bias.shape).copy_(pair_bias)
    for bias, plans in ((pair_bias, 1), (moved, 2), (pair_bias.clone(), 2), (moved, 2)):
        attend(q, k, v, mask_bias, bias)
        assert planner.planned_forwards == plans
        assert way(q, k, v, mask_bias, bias) == "plan"


def test_a_bias_is_not_taken_for_another(planner: Planner, operators: Operators) -> None:
    """A key-wise bias may have the shape of a pair bias that varies along nothing else."""
    q, k, v, mask_bias, _ = (x.detach() for x in leaves())
    pair_bias = mask_bias.detach()
    assert pair_bias.ndim == q.ndim
    by_key, by_pair = attend(q, k, v, mask_bias, None), attend(q, k, v, None, pair_bias)
    torch.testing.assert_close(by_key, by_pair)
    assert [way(q, k, v, *biases) for biases in ((mask_bias, None), (None, pair_bias))] == ["plan"] * 2
    assert planner.planned_forwards == 2
    assert operators.called() == []


def test_only_the_newest_looks_are_kept(planner: Planner, operators: Operators) -> None:
    """Of calls that differ in their strides alone, forward and backward; the forgotten ones find their plan again."""
    q, k, v, mask_bias, pair_bias = leaves()
    *lead, lq, lk = pair_bias.shape
    widest = torch.randn(*lead, lq, lk + LOOKS)
    biases = [widest[..., : lk + more].contiguous()[..., :lk].detach().requires_grad_() for more in (*range(LOOKS), 0)]
    for bias in biases:
        expected = evoattn.evoformer_attention(q, k, v, mask_bias=mask_bias, pair_bias=bias, backend="tiled")
        actual = attend(q, k, v, mask_bias, bias)
        torch.testing.assert_close(actual, expected)
        torch.testing.assert_close(*(torch.autograd.grad(o.sum(), bias)[0] for o in (actual, expected)))
    assert operators.called() == []
    assert planner.planned_forwards == planner.planned_backwards == LOOKS
    ways = [way(q, k, v, mask_bias, bias) for bias in biases[1:]]
    assert ways == [None] * (LOOKS // 2) + ["plan"] * (LOOKS // 2)


def test_a_tensor_may_be_given_twice(planner: Planner, operators: Operators) -> None:
    """Keys that are values too are planned once, and told from keys and values that only look alike."""
    q, k, *_ = leaves(mask_bias=None, pair_bias=None)
    v = k.detach().neg().requires_grad_()
    attend(q, k, k, None, None)
    assert (way(q, v, v, None, None), way(q, k, v, None, None)) == ("plan", None)
    for keys, values in ((k, k), (k, v), (v, v), (k, v), (k, k)):
        actual = attend(q, keys, values, None, None)
        expected = evoattn.evoformer_attention(q, keys, values, backend="tiled")
        torch.testing.assert_close(actual, expected)
        of = [q, k, v]
        gradients = [torch.autograd.grad(o.square().sum(), of, allow_unused=True) for o in (actual, expected)]
        for x, y in zip(*gradients, strict=True):
            torch.testing.assert_close(x, y)
    assert (planner.forwards, planner.backwards) == (6, 5)
    assert planner.planned_forwards == 1 and planner.planned_backwards <= 2
    assert [way(q, *keys_values, None, None) for keys_values in ((k, k), (v, v), (k, v))] == ["plan"] * 3


def test_a_kept_call_holds_no_tensor(planner: Planner) -> None:
    tensors = leaves()
    step(tensors)
    dead = [weakref.ref(x) for x in tensors]
    del tensors
    gc.collect()
    assert [x() for x in dead] == [None] * len(dead)
