"""Every call that the Hopper backend takes is planned and launched without a GPU, with nothing in the place of its kernels.

The tensors are those of the conformance suite. A launch that is planned asks whether its kernel takes their sizes and strides.
"""

import ctypes
import dataclasses
import math
import os
from typing import Any

import pytest
import torch
from torch import Tensor

os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")
pytest.importorskip("cutlass", reason="CuTe DSL is not installed: pip install '.[hopper]'")

from evoattn import testing
from evoattn.backends import Cotangents, Inputs, Outputs, hopper
from evoattn.backends.hopper import backward_launches, backward_plan, launch, planner
from evoattn.backends.hopper.memory import is_aligned
from evoattn.core.config import Config
from evoattn.core.layouts import empty_gradients, empty_outputs, to_canonical
from tests.backends.hopper.planned_calls import launch_backward, launch_forward, random_outputs, skip_refused
from tests.helpers import seams

LONG = [
    testing.Case("long", n=2, h=2, lq=700, lk=650, d=32, pair_bias="b1hqk", mask="random"),
    testing.Case("long_one_query_bias", n=2, h=2, lq=640, lk=640, d=32, pair_bias="b1h1k"),
    testing.Case("one_query_bias", n=2, h=2, lq=70, lk=65, d=48, pair_bias="b1h1k"),
    testing.Case("one_key_bias", n=2, h=2, lq=72, lk=64, d=64, pair_bias="b1hq1"),
]
CASES = [dataclasses.replace(case, dtype=torch.bfloat16) for case in [*testing.AWKWARD, *LONG] if case.lq and case.lk]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_forward_is_launched(case: testing.Case, launched: list[Any]) -> None:
    c, needs = seams.canonical(case.make(seed=1))._replace(gate=None), (False,) * 6
    skip_refused(c, needs)
    outputs = random_outputs(c)
    launch_forward(c, outputs, case.layout)
    name, arguments = launched[-1]
    assert name == "Forward"
    assert {x.data_ptr() for x in outputs} <= set(arguments)
    if is_aligned(c.q):
        assert arguments[2] == c.q.data_ptr()


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_backward_is_launched(case: testing.Case, deterministic: bool, launched: list[Any]) -> None:
    c = seams.canonical(case.make(seed=1))._replace(gate=None)
    needs = (True, True, True, c.mask_bias is not None, c.pair_bias is not None, False)
    of_qkv = [torch.empty(x.shape, dtype=x.dtype) for x in c.qkv]
    options: dict[str, Any] = {"layout": case.layout, "deterministic": deterministic}
    cotangents = Cotangents(torch.randn_like(c.q))
    dmask_bias, dpair_bias = launch_backward(c, needs, cotangents=cotangents, gradients=(*of_qkv, None), **options)
    for gradient, of in ((dmask_bias, c.mask_bias), (dpair_bias, c.pair_bias)):
        assert (gradient is None) == (of is None)
        if gradient is not None and of is not None:
            assert gradient.shape == of.shape and gradient.dtype == of.dtype
    arguments = {name: set(addresses) for name, addresses in launched}
    assert of_qkv[0].data_ptr() in arguments["QueryGradients"]
    assert {x.data_ptr() for x in of_qkv[1:]} <= arguments["KeyGradients"]


@pytest.mark.parametrize("pair_bias", ["b1hqk", None])
def test_the_backend_plans_both_passes(pair_bias: str | None, launched: list[Any], kernels: list[Any]) -> None:
    """What its plans run and describe; nothing is compiled before the first run."""
    case = testing.Case("plans", n=3, h=2, lq=70, lk=65, d=32, dtype=torch.bfloat16, mask="random", pair_bias=pair_bias)
    inputs = seams.canonical(case.make(seed=1))
    outputs = empty_outputs(inputs, "bnlhd")
    needs = (True, True, True, False, pair_bias is not None, False)
    options: dict[str, Any] = {"scale": 0.2, "layout": "bnlhd", "config": Config()}
    values = Cotangents(torch.randn_like(outputs.o)), inputs, outputs
    forward = hopper.plan_forward(inputs, **options)
    backward = hopper.plan_backward(*values, needs=needs, deterministic=False, **options)
    told = forward.describe(), backward.describe()
    of_explain = empty_outputs(inputs, "bnlhd", "meta")  # `explain` has no outputs
    values_of_explain = Cotangents(of_explain.o), inputs, of_explain
    same = hopper.plan_backward(*values_of_explain, needs=needs, deterministic=False, **options).describe()
    assert same == told[1]
    assert kernels == []
    assert told[0].config == Config(block_q=128, block_k=64) and set(told[1].kernels) == {"dq", "dkdv"}
    assert [bool(description.copies) for description in told] == [pair_bias is not None] * 2
    forward.run(inputs, outputs)
    assert launched[-1][0] == "Forward" and set(map(Tensor.data_ptr, outputs)) <= set(launched[-1][1])
    gradients = empty_gradients(inputs, "bnlhd", needs)
    of_mask, of_pair = backward.run(*values, gradients)
    assert of_mask is None and (of_pair is None) == (pair_bias is None)
    assert {x.data_ptr() for x in gradients if x is not None} <= {x for _, arguments in launched for x in arguments}


@pytest.mark.parametrize(("layout", "heads"), [("bnhld", 2), ("bnlhd", 2), ("bnlhd", 1)])
@pytest.mark.parametrize("dlse", [False, True])
def test_the_copy_engine_gets_addresses_that_it_takes(layout: str, heads: int, dlse: bool, launched: list[Any]) -> None:
    """Of tensors that start anywhere, also of contiguous ones, which `contiguous` leaves where they are."""

    def anywhere(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return to_canonical(torch.randn(math.prod(sizes) + 1).to(dtype)[1:].view(sizes), layout)

    stored = (1, 4, 128, heads, 32) if layout == "bnlhd" else (1, 4, heads, 128, 32)
    q, k, v, do, o = (anywhere(*stored) for _ in range(5))
    lse = torch.randn(q.shape[:-1])
    gradient = torch.randn(lse.numel() + 1)[1:].view(lse.shape) if dlse else None
    made, *wanted = (torch.empty(stored) for _ in range(4))
    inputs = Inputs(q, k, v)
    launch_forward(inputs, Outputs(made, lse, lse), layout)
    options: dict[str, Any] = {"cotangents": Cotangents(do, gradient), "gradients": (*wanted, None), "layout": layout}
    outputs = Outputs(o, lse, torch.zeros_like(lse))
    launch_backward(inputs, (True, True, True, False, False, False), outputs=outputs, **options)
    assert len(launched) >= 2
    for name, (_, _, *arguments) in launched:  # extents and the stream come first, and other numbers are small
        addresses = [x for x in arguments if isinstance(x, int) and x > 1 << 22]
        assert len(addresses) >= 5 and not any(x % 16 for x in addresses), name


@pytest.mark.parametrize(
    ("changes", "rounds"),
    [
        ({}, True),
        ({"mask": None, "lk": 384}, True),
        ({"n": 31}, False),  # too few rows to hide it
        ({"lk": 70}, False),  # lines of the sum are longer than those of the gradient
        ({"lq": 640, "lk": 640}, False),  # every warp is busy: three streams, and the pair bias
        ({"lq": 640, "lk": 640, "d": 64}, True),  # two streams
        ({"pair_bias": "b1h1k"}, False),  # queries are still to be summed
    ],
    ids=str,
)
def test_who_rounds_the_gradient_of_the_pair_bias(changes: dict[str, Any], rounds: bool, launched: list[Any]) -> None:
    """One piece of memory is cleared, added to and rounded; a launch less where the kernel of the keys has time for it."""
    settings = {"n": 32, "h": 2, "lq": 72, "lk": 72, "d": 32, "mask": "random", "pair_bias": "b1hqk", **changes}
    c = seams.canonical(testing.Case("rounds", dtype=torch.bfloat16, **settings).make(seed=1))  # type: ignore[arg-type]
    _, dpair_bias = launch_backward(c, (True, True, True, False, True, False))
    arguments = dict(launched)
    added = arguments["QueryGradients"][13]  # after sizes, stream and eleven other tensors
    assert dpair_bias is not None and dpair_bias.shape == c.pair_bias.shape and dpair_bias.dtype == c.q.dtype  # type: ignore[union-attr]
    if "KeyBias" in arguments:
        assert added in arguments["KeyBias"]
    if rounds:
        assert arguments["KeyGradients"][11:13] == (added, dpair_bias.data_ptr())
    else:
        assert added not in arguments["KeyGradients"]


@pytest.mark.parametrize(("n", "h", "length", "timed"), [(33, 4, 384, True), (2, 24, 384, False), (3, 4, 1000, False)])
def test_a_kernel_and_its_sum_count_changes_alike(n: int, h: int, length: int, timed: bool, kernels: list[Any]) -> None:
    """What the blocks of `dq` leave, `PanelSum` looks for in the same places."""
    case = testing.Case("shares", n=n, h=h, lq=length, lk=length, d=32, dtype=torch.bfloat16, pair_bias="b1hqk")
    c = seams.canonical(case.make(seed=1))
    needs = (True, True, True, False, True, False)
    launch_backward(c, needs, deterministic=True)
    timed_kernels = {type(kernel).__name__: kernel.timed for kernel in kernels if hasattr(kernel, "timed")}
    assert [timed_kernels[name] for name in ("QueryGradients", "PanelSum", "KeyGradients")] == [timed] * 3


@pytest.mark.parametrize("most", [2 * 72 * 72 - 1, 32 * 4096 - 1], ids=["sums", "rows"])
def test_torch_clears_more_than_32_bits_count(most: int, launched: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (backward_plan, backward_launches):
        monkeypatch.setattr(module, "MOST_IN_32_BITS", most)
    case = testing.Case("many", n=32, h=2, lq=72, lk=72, d=32, dtype=torch.bfloat16, mask="random", pair_bias="b1hqk")
    c = seams.canonical(case.make(seed=1))
    _, dpair_bias = launch_backward(c, (True, True, True, False, True, False))
    arguments = dict(launched)
    added = arguments["QueryGradients"][13]
    assert added not in arguments["KeyBias"]
    if added not in arguments["KeyGradients"]:  # torch rounds too
        assert dpair_bias is not None and not dpair_bias.any(), "cleared, and nothing was added"
    assert (added in arguments["KeyGradients"]) == (most >= 2 * 72 * 72)


@pytest.mark.parametrize("needs", [(False, True, True, False, False, False), (True, False, False, False, True, False)], ids=str)
def test_no_memory_for_what_no_kernel_makes(
    needs: tuple[bool, ...], launched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    make = planner.Workspace.make
    monkeypatch.setattr(planner.Workspace, "make", lambda self: sizes.append(self.bytes) or make(self))
    c = seams.canonical(
        testing.Case("few", n=64, h=4, lq=64, lk=64, d=64, dtype=torch.bfloat16, pair_bias="b1hqk").make(seed=1)
    )
    launch_backward(c, needs)
    assert sizes[0] < c.q.nbytes


@pytest.mark.parametrize("bias_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("of_b", "of_n"), [(2, 3), (2, 1), (1, 3), (1, 1)])
def test_the_gradient_of_a_mask_bias_alone(
    of_b: int, of_n: int, bias_dtype: torch.dtype, launched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel leaves each head's part; heads, and the axes along which the bias is broadcast, are summed after it."""
    parts = torch.randn(2, 3, 4, 65)
    note = launch.load_kernel

    def compiled(kernel: launch.KernelVariant) -> Any:
        def run(*arguments: Any) -> None:
            note(kernel)(*arguments)
            if isinstance(kernel, backward_launches.KeyGradients):
                ctypes.memmove(arguments[11], parts.data_ptr(), parts.nbytes)  # after sizes, stream and nine other tensors

        return run

    monkeypatch.setattr(launch, "load_kernel", compiled)
    case = testing.Case("mask", lead=(2,), n=3, h=4, lq=70, lk=65, d=32, dtype=torch.bfloat16, mask_bias="finite")
    inputs = dataclasses.replace(case, pair_bias="b1hqk", bias_dtype=bias_dtype).make(seed=1)
    pair = inputs.pair_bias.to(torch.bfloat16)  # type: ignore[union-attr]
    bias = inputs.mask_bias[:of_b, :of_n]  # type: ignore[index]
    c = seams.canonical(dataclasses.replace(inputs, mask_bias=bias, pair_bias=pair))
    needs = (False, False, False, True, False, False)
    dmask_bias, dpair_bias = launch_backward(c, needs)
    assert [name for name, _ in launched] == ["PairBias", "KeyBias", "Statistics", "KeyGradients"]
    assert dpair_bias is None
    expected = parts.double().sum_to_size(of_b, of_n, 1, 65)[:, :, 0]
    assert dmask_bias.shape == c.mask_bias.shape and dmask_bias.dtype == bias_dtype  # type: ignore[union-attr]
    torch.testing.assert_close(dmask_bias, expected.to(bias_dtype))


@pytest.mark.parametrize(
    ("dtype", "scale", "unit"), [(torch.float16, 0.2, 0.2), (torch.float16, 0.1, 3.2), (torch.bfloat16, 0.1, 0.1)]
)
def test_a_float16_backward_divides_by_no_small_scale(
    dtype: torch.dtype, scale: float, unit: float, launched: list[Any]
) -> None:
    c = seams.canonical(testing.Case("far", n=2, h=2, lq=64, lk=64, d=32, dtype=dtype, pair_bias="b1hqk").make(seed=1))
    needs = (True, True, True, False, True, False)
    launch_backward(c, needs, scale=scale, layout="bnhld")
    for name in ("QueryGradients", "KeyGradients"):
        assert [x for x in dict(launched)[name] if isinstance(x, float)] == [unit]


def test_a_gradient_of_the_lse_alone_is_launched(launched: list[Any]) -> None:
    case = testing.Case("lse", n=2, h=2, lq=70, lk=65, d=32, dtype=torch.bfloat16, pair_bias="b1hqk")
    c = seams.canonical(case.make(seed=1))
    needs = (True, True, True, False, True, False)
    dlse = torch.randn(*c.q.shape[:-1], 2)[..., 0]
    launch_backward(c, needs, cotangents=Cotangents(None, dlse), layout="bnhld")
    assert [name for name, _ in launched] == ["PairBias", "KeyBias", "QueryGradients", "KeyGradients"]
