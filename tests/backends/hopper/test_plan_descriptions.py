"""A plan of the Hopper backend tells its tiles and its copies."""

import os
from typing import Any

import pytest
import torch
from torch import Tensor

os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")
pytest.importorskip("cutlass", reason="CuTe DSL is not installed: pip install '.[hopper]'")

from evoattn import testing
from evoattn.backends import Cotangents, Description, Inputs, hopper
from evoattn.core.config import Config
from evoattn.core.layouts import empty_gradients, empty_outputs
from tests.helpers import seams


def half(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


def described(inputs: Inputs, needs: tuple[bool, ...] | None = None) -> Description:
    """What a plan says of itself; without `needs` that of a forward."""
    options: dict[str, Any] = {"scale": 0.2, "layout": "bnhld", "config": Config()}
    if needs is None:
        return hopper.plan_forward(inputs, **options).describe()
    outputs = empty_outputs(inputs, "bnhld", "meta")
    values = Cotangents(outputs.o), inputs, outputs
    return hopper.plan_backward(*values, needs=needs, deterministic=False, **options).describe()


OF_QKV = (True, True, True, False, False, False)
OF_ALL = (True, True, True, False, True, False)
OF_MASK_BIAS = (False, False, False, True, False, False)


@pytest.mark.parametrize("needs", [None, OF_ALL], ids=["forward", "backward"])
@pytest.mark.parametrize("shape", [(1, 4, 384, 384), (1, 4, 1, 397), (1, 4, 384, 1), (1, 4, 8, 513)], ids=str)
def test_tells_that_a_pair_bias_is_laid_out_anew(
    shape: tuple[int, ...], needs: tuple[bool, ...] | None, launched: list[Any]
) -> None:
    """Always: it is measured from the largest of each query."""
    q, k = half(1, 8, 4, max(shape[2], 8), 32), half(1, 8, 4, max(shape[3], 64), 32)
    copies = described(Inputs(q, k, k, pair_bias=half(*shape)), needs).copies
    assert [what.split(":")[0] for what in copies] == ["pair_bias"]
    assert described(Inputs(q, k, k), None if needs is None else OF_QKV).copies == ()


@pytest.mark.parametrize(
    ("x", "copied"),
    [
        (half(1, 8, 64, 4, 32).transpose(2, 3), False),
        (half(1, 8, 4, 64, 64)[..., 32:], False),
        (half(1, 8, 4, 64, 33)[..., :32], True),
        (half(1, 8, 4, 64, 36)[..., 4:], True),
        (half(1, 8, 4, 32, 64).transpose(3, 4), True),
        (half(1, 8, 1, 64, 32).expand(-1, -1, 4, -1, -1), True),
    ],
    ids=["heads inside", "half of the channels", "rows of 33", "past 8 bytes", "channels far apart", "one head for all"],
)
@pytest.mark.parametrize("needs", [None, (True, True, True, False, False, True)], ids=["forward", "backward"])
def test_tells_what_is_copied(x: Tensor, copied: bool, needs: tuple[bool, ...] | None, launched: list[Any]) -> None:
    plain = half(1, 8, 4, 64, 32)
    for name in ("q", "k", "v", "gate"):
        inputs = Inputs(plain, plain, plain, gate=plain)._replace(**{name: x})  # type: ignore[arg-type]
        assert [what.split(":")[0] for what in described(inputs, needs).copies] == [name] * copied


@pytest.mark.parametrize("needs", [OF_ALL, OF_MASK_BIAS], ids=["all", "mask bias"])
def test_tells_what_is_laid_out_to_be_streamed(needs: tuple[bool, ...], launched: list[Any]) -> None:
    q, k = half(1, 8, 4, 1024, 32), half(1, 8, 4, 384, 32)
    inputs = Inputs(q, k, k, mask_bias=half(1, 8, 384), pair_bias=half(1, 4, 1024, 384))
    assert described(inputs, needs).copies[1:] == ("pair_bias: laid out anew once a backward, to be streamed",)
    aligned = inputs._replace(pair_bias=torch.empty(1, 4, 1024, 384))
    assert described(aligned).copies[1:] == ("pair_bias: in float32, laid out anew once a forward, to be streamed",)


def test_the_tiles_of_the_backward_are_told(launched: list[Any]) -> None:
    def tiles(needs: tuple[bool, ...], n: int, h: int, lq: int, lk: int, pair_bias: bool) -> dict[str, dict[str, int]]:
        q, k = half(1, n, h, lq, 32), half(1, n, h, lk, 32)
        inputs = Inputs(q, k, k, mask_bias=half(1, n, lk), pair_bias=half(1, h, lq, lk) if pair_bias else None)
        return described(inputs, needs).kernels

    both = tiles(OF_ALL, 8, 4, 384, 384, True)
    assert both["dq"]["block_k"] >= 384 and both["dq"]["cluster"] == 1
    assert both["dkdv"]["block_q"] == both["dkdv"]["block_k"] == 64
    assert tiles(OF_MASK_BIAS, 8, 4, 384, 384, True) == {"dkdv": both["dkdv"]}
    assert tiles(OF_QKV, 66, 2, 200, 300, False) == {"whole": {"block_q": 64, "block_k": 64}}
    assert set(tiles(OF_ALL, 66, 2, 200, 300, True)) == set(tiles(OF_QKV, 66, 2, 64, 300, False)) == {"dq", "dkdv"}
    assert set(tiles((False, True, True, False, False, False), 66, 2, 200, 300, False)) == {"dkdv"}
    long = tiles((True, False, False, False, False, False), 8, 4, 384, 1024, True)
    assert set(long) == {"dq"}
    assert long["dq"]["block_k"] * long["dq"]["cluster"] >= 1024 and long["dq"]["cluster"] > 1


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("scale", [0.2, -0.2, 0.0, 1e-5, -1e-5, 1e5, 0.0009765625])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_plan_tells_that_a_scale_copies_q(dtype: torch.dtype, scale: float, backward: bool, launched: list[Any]) -> None:
    """If and only if the pass copies it: the kernels then get another address."""
    case = testing.Case("scaled", n=3, h=2, lq=70, lk=65, d=32, dtype=dtype, pair_bias="b1hqk")
    inputs = seams.canonical(case.make(seed=1))
    outputs, needs = empty_outputs(inputs, "bnlhd"), (True, True, True, False, True, False)
    options: dict[str, Any] = {"scale": scale, "layout": "bnlhd", "config": Config()}
    values: Any = (inputs, outputs)
    plan = hopper.plan_forward(inputs, **options)
    if backward:
        values = (Cotangents(torch.randn_like(outputs.o)), *values)
        plan = hopper.plan_backward(*values, needs=needs, deterministic=False, **options)
        values = (*values, empty_gradients(inputs, "bnlhd", needs))
    plan.run(*values)
    copied = not any(inputs.q.data_ptr() in arguments for _, arguments in launched)
    told = [what for what in plan.describe().copies if what.startswith("q:")]
    assert len(told) == copied
    assert all("multiplied by" in what for what in told)
