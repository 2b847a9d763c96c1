"""Kernels whose arguments are NamedTuples: what Triton sees of them, and what a launch passes."""

from typing import Any, NamedTuple

import pytest

pytest.importorskip("triton")

import triton.language as tl

from evoattn.kit.arguments import Constant, Number, Pointer, Specialised, View, kernel, view
from evoattn.kit.strides import contiguous


class Sizes(NamedTuple):
    rows: Number
    scale: Number


class Variant(NamedTuple):
    BLOCK: Constant
    WAIT: Constant = 0


class Out(NamedTuple):
    step: Specialised
    p: Pointer


@kernel
def scale_kernel(x: View, out: Out, sizes: Sizes, V: Variant) -> None:
    """Write `scale * x[..., 0]` of the first axis."""
    o_r = tl.arange(0, V.BLOCK)
    b_x = tl.load(x.p + o_r * x.b, mask=o_r < sizes.rows, other=0.0)
    tl.store(out.p + o_r * out.step, b_x * sizes.scale, mask=o_r < sizes.rows)


def plan(rows: int) -> Any:
    x = contiguous((rows, 1, 1, 1, 4), tl.float32)  # type: ignore[arg-type]
    return scale_kernel.plan(1, x=view(x, 4), out=Out(1, None), sizes=Sizes(rows, 0.5), V=Variant(BLOCK=16), num_warps=1)


@pytest.mark.skipif(not hasattr(scale_kernel.jitted, "params"), reason="the interpreter has no parameters")
def test_fields_are_parameters() -> None:
    """Tensors come first, then numbers, then constants. New lengths compile nothing anew; an inner stride may."""
    params = scale_kernel.jitted.params
    names = ["x_p", "out_p", "x_b", "x_n", "x_h", "x_l", "x_c", "out_step", "sizes_rows", "sizes_scale", "BLOCK", "WAIT"]
    assert [each.name for each in params] == names
    assert [each.name for each in params if each.is_constexpr] == names[-2:]
    free = ["x_b", "x_n", "x_h", "x_l", "sizes_rows", "sizes_scale"]
    assert [each.name for each in params if each.do_not_specialize] == free


def test_a_launch_has_the_numbers_in_the_order_of_the_parameters() -> None:
    launch = plan(5)
    assert launch.numbers == (1, 0, 0, 0, 1, 1, 5, 0.5)
    assert launch.constants == {"BLOCK": 16, "WAIT": 0, "num_warps": 1}


def test_the_numbers_of_a_field_that_is_not_given_are_an_error() -> None:
    with pytest.raises(KeyError, match="sizes"):
        scale_kernel.plan(1, x=view(None, 1), out=Out(1, None), V=Variant(BLOCK=16))
