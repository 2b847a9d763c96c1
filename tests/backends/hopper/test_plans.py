"""Every call that the Hopper backend takes is planned and launched without a GPU, with nothing in the place of its kernels.

The tensors are those of the conformance suite. A launch that is planned asks whether its kernel takes their sizes and strides.
"""

import ctypes
import dataclasses
import math
import os
import types
from typing import Any

import pytest
import torch
from torch import Tensor

os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")
pytest.importorskip("cutlass", reason="CuTe DSL is not installed: pip install '.[hopper]'")

from evoattn import testing
from evoattn.backends import Cotangents, Description, Inputs, hopper
from evoattn.backends.hopper import backward_launches, head_groups, launch, tiles
from evoattn.backends.hopper import backward_plan as backward
from evoattn.backends.hopper import forward_plan as forward
from evoattn.backends.hopper.kernels import key_bias
from evoattn.backends.hopper.memory import is_aligned
from evoattn.core.config import Config
from evoattn.core.layouts import empty_gradients, empty_outputs, to_canonical
from evoattn.core.problem import describe

LONG = [
    testing.Case("long", n=2, h=2, lq=700, lk=650, d=32, pair_bias="b1hqk", mask="random"),
    testing.Case("long_one_query_bias", n=2, h=2, lq=640, lk=640, d=32, pair_bias="b1h1k"),
    testing.Case("one_query_bias", n=2, h=2, lq=70, lk=65, d=48, pair_bias="b1h1k"),
    testing.Case("one_key_bias", n=2, h=2, lq=72, lk=64, d=64, pair_bias="b1hq1"),
]
CASES = [dataclasses.replace(case, dtype=torch.bfloat16) for case in [*testing.AWKWARD, *LONG] if case.lq and case.lk]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[Any, ...]]]:
    """The name and the arguments of every launch, in their order."""
    calls: list[tuple[str, tuple[Any, ...]]] = []

    def compiled(kernel: launch.Kernel) -> Any:
        return lambda *arguments: calls.append((type(kernel).__name__, arguments))

    monkeypatch.setattr(launch, "compiled", compiled)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(multi_processor_count=132))
    monkeypatch.setattr(backward_launches, "resident_clusters", lambda *arguments: 66)
    return calls


@pytest.fixture
def kernels(launched: list[Any], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The kernels that are launched, in their order."""
    created: list[Any] = []
    note = launch.compiled
    monkeypatch.setattr(launch, "compiled", lambda kernel: created.append(kernel) or note(kernel))
    return created


def tensors_of(c: Inputs, needs: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
    problem = dataclasses.replace(describe(c, needs=needs), device="cuda", capability=(9, 0))  # type: ignore[arg-type]
    if reasons := hopper.unsupported(problem, Config()):
        pytest.skip("; ".join(reasons))
    return c[:6]


def launch_backward(c: Inputs, needs: tuple[bool, ...]) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of mask_bias and pair_bias of a backward that adds in memory, with random o, do and lse."""
    o, lse = torch.randn(c.q.shape, dtype=c.q.dtype), torch.randn(c.q.shape[:-1])
    tensors = (torch.randn_like(o), None, *tensors_of(c, needs), o, lse, torch.zeros_like(lse))
    of_qkv = [torch.empty(x.shape, dtype=x.dtype) if need else None for x, need in zip((c.q, c.k, c.v), needs, strict=False)]
    return backward.plan_backward(*tensors, scale=0.2, layout="bnlhd", needs=needs, deterministic=False)(*tensors, *of_qkv)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_forward_is_launched(case: testing.Case, launched: list[Any]) -> None:
    c = testing.canonical(case.make(seed=1))
    tensors = tensors_of(c, (False,) * 6)
    o, lse = torch.empty(c.q.shape), torch.empty(c.q.shape[:-1])
    forward.plan_forward(*tensors, scale=0.2, layout=case.layout)(*tensors, o, lse, torch.zeros_like(lse))
    name, arguments = launched[-1]
    assert name == "Forward"
    assert {o.data_ptr(), lse.data_ptr()} <= set(arguments)
    if is_aligned(c.q):
        assert arguments[2] == c.q.data_ptr()


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_backward_is_launched(case: testing.Case, deterministic: bool, launched: list[Any]) -> None:
    c = testing.canonical(case.make(seed=1))
    needs = (True, True, True, c.mask_bias is not None, c.pair_bias is not None, False)
    inputs = tensors_of(c, needs)
    do, o, lse = torch.randn_like(c.q), torch.randn(c.q.shape, dtype=c.q.dtype), torch.randn(c.q.shape[:-1])
    tensors = (do, None, *inputs, o, lse, torch.zeros_like(lse))
    of_qkv = [torch.empty(x.shape, dtype=x.dtype) for x in (c.q, c.k, c.v)]
    options: dict[str, Any] = {"layout": case.layout, "needs": needs, "deterministic": deterministic}
    dmask_bias, dpair_bias = backward.plan_backward(*tensors, scale=0.2, **options)(*tensors, *of_qkv)
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
    inputs = testing.canonical(case.make(seed=1))
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
    inputs = testing.canonical(case.make(seed=1))
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
    outputs, *wanted = (torch.empty(stored) for _ in range(4))
    inputs = (q, k, v, None, None, None)
    forward.plan_forward(*inputs, scale=0.1, layout=layout)(*inputs, outputs, lse, lse)
    tensors = (do, gradient, q, k, v, None, None, None, o, lse, torch.zeros_like(lse))
    options: dict[str, Any] = {"needs": (True, True, True, False, False, False), "deterministic": False}
    backward.plan_backward(*tensors, scale=0.1, layout=layout, **options)(*tensors, *wanted)
    assert len(launched) >= 2
    for name, (_, _, *arguments) in launched:  # extents and the stream come first, and other numbers are small
        addresses = [x for x in arguments if isinstance(x, int) and x > 1 << 22]
        assert len(addresses) >= 5 and not any(x % 16 for x in addresses), name


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_rows_without_a_pair_bias_are_done_whole(masked: bool, deterministic: bool, launched: list[Any]) -> None:
    """One kernel finds all gradients; what nobody wants has a place too."""
    case = testing.Case("whole", n=66, h=2, lq=100, lk=70, d=16, dtype=torch.bfloat16, mask_bias="finite" if masked else None)
    c = testing.canonical(case.make(seed=1))
    needs = (True, False, True, masked, False, False)
    o, lse, dlse = torch.randn(c.q.shape, dtype=c.q.dtype), torch.randn(c.q.shape[:-1]), torch.randn(c.q.shape[:-1])
    tensors = (torch.randn_like(o), dlse, *tensors_of(c, needs), o, lse, torch.zeros_like(lse))
    of_qkv = [torch.empty(c.q.shape, dtype=o.dtype), None, torch.empty(c.v.shape, dtype=o.dtype)]
    options: dict[str, Any] = {"layout": case.layout, "needs": needs, "deterministic": deterministic}
    dmask_bias, dpair_bias = backward.plan_backward(*tensors, scale=0.2, **options)(*tensors, *of_qkv)
    assert [name for name, _ in launched] == ["KeyBias", "FusedGradients"]
    arguments = dict(launched)["FusedGradients"]
    do = tensors[0]
    assert do is not None and arguments[2:7] == tuple(x.data_ptr() for x in (c.q, c.k, c.v, o, do))
    assert arguments[8] == lse.data_ptr() and arguments[10] == of_qkv[0].data_ptr() and arguments[12] == of_qkv[2].data_ptr()  # type: ignore[union-attr]
    assert arguments[11] not in (None, arguments[7], arguments[10], arguments[12]), "dk, which is not wanted, and the terms"
    assert dpair_bias is None and (dmask_bias is not None) == masked
    if dmask_bias is not None:
        assert dmask_bias.shape == c.mask_bias.shape  # type: ignore[union-attr]


@pytest.mark.parametrize("of_b", [1, 2])
@pytest.mark.parametrize("heads_at_once", [1, 2])
def test_heads_in_turns(heads_at_once: int, of_b: int, launched: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each turn's launches take the addresses of its own heads, and what is laid out, cleared and allocated is for all."""
    monkeypatch.setattr(head_groups, "divisor", lambda *_: heads_at_once)
    case = testing.Case(
        "turns", lead=(2,), n=32, h=4, lq=640, lk=640, d=64, dtype=torch.bfloat16, mask="random", pair_bias="b1hqk"
    )
    c = testing.canonical(case.make(seed=1))
    c = c._replace(pair_bias=c.pair_bias[:of_b])  # type: ignore[index]
    pair = tensors_of(c, (True, True, True, False, True, False))[5]
    q, k, v = (x.contiguous() for x in (c.q, c.k, c.v))
    assert pair is not None
    starts = (
        [(0, h) for h in range(0, 4, heads_at_once)]
        if of_b == 1
        else [(b, h) for b in range(2) for h in range(0, 4, heads_at_once)]
    )

    def addresses(x: Tensor, heads: int) -> list[int]:
        return [(x[b:] if x.shape[0] > 1 else x).narrow(heads, h, heads_at_once).data_ptr() for b, h in starts]

    o, lse = torch.empty_like(q), torch.empty(q.shape[:-1])
    inputs = (q, k, v, c.mask, None, pair)
    forward.plan_forward(*inputs, scale=0.2, layout="bnhld")(*inputs, o, lse, lse)
    assert [name for name, _ in launched] == ["PairBias", "KeyBias", *["Forward"] * len(starts)]
    forwards = [args for name, args in launched if name == "Forward"]
    for place, x in ((2, q), (3, k), (4, v), (10, o), (11, lse)):
        assert [args[place] for args in forwards] == addresses(x, 2)
    assert [args[8] for args in forwards] == addresses(pair, 1), "the pair bias as it is given"
    assert len({args[9] for args in forwards}) == len(starts), "and laid out anew"
    assert len({args[5] for args in forwards}) == (1 if of_b == 1 else 2), "the rows' terms, of each b"
    assert len({args[6] for args in forwards}) == (1 if of_b == 1 else 2), "their ends"
    assert len({args[7] for args in forwards}) == (1 if of_b == 1 else 2), "their biases as they are"

    launched.clear()
    needs, do = (True, True, True, False, True, False), torch.randn_like(o)
    of_qkv = [torch.empty_like(x) for x in (q, k, v)]
    tensors = (do, None, q, k, v, c.mask, None, pair, o, lse, torch.zeros_like(lse))
    _, dpair = backward.plan_backward(*tensors, scale=0.2, layout="bnhld", needs=needs, deterministic=False)(*tensors, *of_qkv)
    assert [name for name, _ in launched] == [
        "PairBias",
        "PairBiasTiles",
        "KeyBias",
        *["QueryGradients", "KeyGradients"] * len(starts),
    ]
    of_queries, of_keys = ([args for name, args in launched if name == f"{x}Gradients"] for x in ("Query", "Key"))
    for place, x in ((2, q), (3, k), (4, v), (5, o), (6, do), (9, lse), (12, of_qkv[0])):
        assert [args[place] for args in of_queries] == addresses(x, 2), place
    for place, x in ((2, q), (3, k), (4, v), (5, do), (9, of_qkv[1]), (10, of_qkv[2])):
        assert [args[place] for args in of_keys] == addresses(x, 2), place
    assert dpair is not None and [args[12] for args in of_keys] == addresses(dpair, 1), "rounded in its turn"
    assert [args[13] for args in of_queries] == [args[11] for args in of_keys], "sums of the same heads"
    assert len({args[6] for args in of_keys}) == len(starts), "tiles of its own"
    assert {args[8] for args in of_keys} == {args[11] for args in of_queries} and len({args[8] for args in of_keys}) == 1
    assert [args[13] for args in of_keys] == addresses(of_qkv[0], 2), "dq, of which the kernel of the keys clears rows"
    assert [args[14:16] for args in of_keys] == [args[14:16] for args in of_queries], "the rows that a mask leaves"
    assert len({args[14:16] for args in of_keys}) == (1 if of_b == 1 else 2), "of each b"
    assert next(args for name, args in launched if name == "KeyBias")[6:8] == of_keys[0][14:16]

    launched.clear()
    needs = (True, False, False, False, True, False)  # nothing streams then
    backward.plan_backward(*tensors, scale=0.2, layout="bnhld", needs=needs, deterministic=False)(
        *tensors, of_qkv[0], None, None
    )
    assert [name for name, _ in launched] == ["PairBias", "KeyBias", "QueryGradients"]


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
    c = testing.canonical(testing.Case("rounds", dtype=torch.bfloat16, **settings).make(seed=1))  # type: ignore[arg-type]
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
    c = testing.canonical(case.make(seed=1))
    needs = (True, True, True, False, True, False)
    o, lse = torch.randn(c.q.shape, dtype=c.q.dtype), torch.randn(c.q.shape[:-1])
    tensors = (torch.randn_like(o), None, *tensors_of(c, needs), o, lse, torch.zeros_like(lse))
    backward.plan_backward(*tensors, scale=0.2, layout="bnlhd", needs=needs, deterministic=True)(
        *tensors, *map(torch.empty_like, c.qkv)
    )
    timed_kernels = {type(kernel).__name__: kernel.timed for kernel in kernels if hasattr(kernel, "timed")}
    assert [timed_kernels[name] for name in ("QueryGradients", "PanelSum", "KeyGradients")] == [timed] * 3


@pytest.mark.parametrize(
    ("changes", "needs", "skips"),
    [
        ({}, (True, True, True, False, True, False), True),
        ({"mask": None}, (True, True, True, False, True, False), False),
        ({"mask": None, "mask_bias": "finite"}, (True, True, True, True, True, False), False),
        ({"n": 4}, (True, True, True, False, True, False), False),  # few scores
        ({}, (True, False, False, False, True, False), False),  # no kernel of the keys
        ({}, (False, True, False, False, False, False), True),
    ],
    ids=str,
)
def test_who_leaves_rows_out(
    changes: dict[str, Any], needs: tuple[bool, ...], skips: bool, launched: list[Any], kernels: list[Any]
) -> None:
    """All kernels or none, where a mask may switch rows off and there is much to do; that of the keys clears dq then."""
    settings = {"n": 140, "h": 4, "lq": 260, "lk": 260, "d": 16, "mask": "padding", "pair_bias": "b1hqk", **changes}
    c = testing.canonical(testing.Case("left_out", dtype=torch.bfloat16, **settings).make(seed=1))  # type: ignore[arg-type]
    o, lse = torch.empty_like(c.q), torch.empty(c.q.shape[:-1])
    tensors = (torch.empty_like(o), None, *tensors_of(c, needs), o, lse, torch.zeros_like(lse))
    of_qkv = [torch.empty_like(x) if need else None for x, need in zip((c.q, c.k, c.v), needs, strict=False)]
    backward.plan_backward(*tensors, scale=0.2, layout="bnlhd", needs=needs, deterministic=False)(*tensors, *of_qkv)
    assert kernels
    for kernel in kernels:
        if isinstance(kernel, (backward_launches.QueryGradients, backward_launches.KeyGradients)):
            assert kernel.skips == skips
        if isinstance(kernel, backward_launches.KeyGradients):
            assert kernel.clears == (skips and needs[0])
        if isinstance(kernel, key_bias.KeyBias):
            assert kernel.lists == skips
    launches = dict(launched)
    lists = launches["KeyBias"][-4:-2] if skips else ()  # before the number of keys, and of rows
    for name in ("QueryGradients", "KeyGradients"):
        assert name not in launches or set(lists) <= set(launches[name])
    if "KeyGradients" in launches and of_qkv[0] is not None:
        assert (of_qkv[0].data_ptr() in launches["KeyGradients"]) == skips


@pytest.mark.parametrize(
    ("sizes", "channels", "pair", "skips"),
    [
        ((1, 140, 4, 260, 260), 32, True, True),
        ((1, 140, 4, 64, 8192), 32, False, True),
        ((1, 140, 4, 64, 8193), 32, False, False),  # as many panels are not listed
        ((32, 140, 4, 64, 64), 32, True, True),
        ((33, 140, 4, 64, 64), 32, True, False),
        ((1, 65536, 4, 16, 16), 32, True, True),
        ((1, 65537, 4, 16, 16), 32, True, False),
        ((1, 140, 4, 260, 260), 48, True, True),
        ((1, 140, 4, 260, 260), 48, False, False),  # it would cost a stage
        ((1, 140, 4, 200, 200), 32, True, False),
    ],
    ids=str,
)
def test_where_rows_are_left_out(sizes: tuple[int, int, int, int, int], channels: int, pair: bool, skips: bool) -> None:
    needs = (True, True, True, False, pair, False)
    assert tiles.skips_rows(True, needs, pair, channels, sizes) == skips
    assert not tiles.skips_rows(False, needs, pair, channels, sizes)
    assert not tiles.skips_rows(True, (True, False, False, False, pair, False), pair, channels, sizes)


@pytest.mark.parametrize("most", [2 * 72 * 72 - 1, 32 * 4096 - 1], ids=["sums", "rows"])
def test_torch_clears_more_than_32_bits_count(most: int, launched: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (backward, backward_launches):
        monkeypatch.setattr(module, "MOST_IN_32_BITS", most)
    case = testing.Case("many", n=32, h=2, lq=72, lk=72, d=32, dtype=torch.bfloat16, mask="random", pair_bias="b1hqk")
    c = testing.canonical(case.make(seed=1))
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
    make = backward.Workspace.make
    monkeypatch.setattr(backward.Workspace, "make", lambda self: sizes.append(self.bytes) or make(self))
    c = testing.canonical(
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
    note = launch.compiled

    def compiled(kernel: launch.Kernel) -> Any:
        def run(*arguments: Any) -> None:
            note(kernel)(*arguments)
            if isinstance(kernel, backward_launches.KeyGradients):
                ctypes.memmove(arguments[11], parts.data_ptr(), parts.nbytes)  # after sizes, stream and nine other tensors

        return run

    monkeypatch.setattr(launch, "compiled", compiled)
    case = testing.Case("mask", lead=(2,), n=3, h=4, lq=70, lk=65, d=32, dtype=torch.bfloat16, mask_bias="finite")
    inputs = dataclasses.replace(case, pair_bias="b1hqk", bias_dtype=bias_dtype).make(seed=1)
    pair = inputs.pair_bias.to(torch.bfloat16)  # type: ignore[union-attr]
    bias = inputs.mask_bias[:of_b, :of_n]  # type: ignore[index]
    c = testing.canonical(dataclasses.replace(inputs, mask_bias=bias, pair_bias=pair))
    needs = (False, False, False, True, False, False)
    o, lse = torch.randn(c.q.shape, dtype=c.q.dtype), torch.randn(c.q.shape[:-1])
    tensors = (torch.randn_like(o), None, *tensors_of(c, needs), o, lse, torch.zeros_like(lse))
    run = backward.plan_backward(*tensors, scale=0.2, layout="bnlhd", needs=needs, deterministic=False)
    dmask_bias, dpair_bias = run(*tensors, None, None, None)
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
    c = testing.canonical(testing.Case("far", n=2, h=2, lq=64, lk=64, d=32, dtype=dtype, pair_bias="b1hqk").make(seed=1))
    needs = (True, True, True, False, True, False)
    o, lse = torch.randn(c.q.shape, dtype=dtype), torch.randn(c.q.shape[:-1])
    tensors = (torch.randn_like(o), None, *tensors_of(c, needs), o, lse, torch.zeros_like(lse))
    of_qkv = [torch.empty(x.shape, dtype=dtype) for x in (c.q, c.k, c.v)]
    backward.plan_backward(*tensors, scale=scale, layout="bnhld", needs=needs, deterministic=False)(*tensors, *of_qkv)
    for name in ("QueryGradients", "KeyGradients"):
        assert [x for x in dict(launched)[name] if isinstance(x, float)] == [unit]


def test_a_gradient_of_the_lse_alone_is_launched(launched: list[Any]) -> None:
    case = testing.Case("lse", n=2, h=2, lq=70, lk=65, d=32, dtype=torch.bfloat16, pair_bias="b1hqk")
    c = testing.canonical(case.make(seed=1))
    needs = (True, True, True, False, True, False)
    o, lse, dlse = torch.randn(c.q.shape, dtype=c.q.dtype), torch.randn(c.q.shape[:-1]), torch.randn(*c.q.shape[:-1], 2)[..., 0]
    tensors = (None, dlse, *tensors_of(c, needs), o, lse, torch.zeros_like(lse))
    of_qkv = [torch.empty(x.shape, dtype=x.dtype) for x in (c.q, c.k, c.v)]
    backward.plan_backward(*tensors, scale=0.2, layout="bnhld", needs=needs, deterministic=False)(*tensors, *of_qkv)
    assert [name for name, _ in launched] == ["PairBias", "KeyBias", "QueryGradients", "KeyGradients"]
