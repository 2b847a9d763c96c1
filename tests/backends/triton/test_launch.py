"""Launches that are planned once and repeated, and how many kernels a new length compiles. Nothing here runs on a GPU."""

import collections
import contextlib
import dataclasses
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton.tools.tensor_descriptor", reason="no Triton, or one whose launches are not repeated")

import triton
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from evoattn.backends import Cotangents, Inputs, Outputs
from evoattn.backends import triton as backend
from evoattn.backends.triton import backward_launches, backward_plan, pair_in_order
from evoattn.backends.triton.pair_in_order import rows_of_a_turn, shares
from evoattn.core.config import Config
from evoattn.core.problem import describe
from evoattn.kit import cards, launch, strides
from evoattn.kit.launch import FlatKernel, Launch
from evoattn.kit.strides import strided


@pytest.mark.parametrize(
    ("programs", "n", "expected"),
    [
        (16, 100, 8),
        (64, 256, 6),
        (144, 384, 8),
        (196, 397, 2),
        (256, 512, 3),
        (1024, 1024, 3),
        (2304, 5, 1),
        (64, 4, 4),
        (1, 1, 1),
    ],
)
def test_shares_of_rows_fill_the_processors(programs: int, n: int, expected: int) -> None:
    """tri100 with no more than others, 256 and 384, tri397 if all of its tiles were whole, tri512, 1024 and diffusion768."""
    assert shares(programs, n, at_once=396) == expected


@pytest.mark.parametrize(("length", "most"), [(100, 16), (128, 16), (129, 8), (384, 8)])
def test_short_lengths_have_more_shares(monkeypatch: pytest.MonkeyPatch, length: int, most: int) -> None:
    monkeypatch.setattr(pair_in_order, "programs_at_once", lambda *_: 1 << 20)
    q, pair = torch.empty(1, 64, 1, length, 32, dtype=torch.bfloat16), torch.empty(1, 1, length, length, dtype=torch.bfloat16)
    lse = torch.empty(1, 64, 1, length)
    needs = (True, True, True, False, True, False)
    options = {"scale": 1.0, "layout": "bnhld", "needs": needs, "deterministic": True, "config": Config()}
    values = Cotangents(q), Inputs(q, q, q, pair_bias=pair), Outputs(q, lse, lse)
    planned = backward_plan.plan_backward(*values, **options).run
    assert planned.pair.in_order.partial.shape[1] == most


@pytest.mark.parametrize(
    ("length", "splits", "expected"), [(384, 5, 77), (1024, 3, 342), (1536, 2, 38), (2048, 2, 32), (8192, 1, 32)]
)
def test_rows_of_a_turn_stay_in_the_cache(length: int, splits: int, expected: int) -> None:
    """Triangles with 32 channels: all rows of a share, or as many of 1,536 as half the cache holds, and then the least."""
    row = 2 * length * 64 * 2
    assert rows_of_a_turn(-(-length // splits), row, splits, cache=60_000_000) == expected


@pytest.mark.parametrize(
    ("heads", "length", "sums", "heads_at_once"),
    [
        (4, 384, torch.float32, 4),
        (4, 1024, torch.float32, 4),
        (4, 2048, torch.float32, 1),
        (4, 2048, None, 2),
        (6, 1300, torch.float32, 3),
    ],
)
def test_heads_share_half_of_the_cache(
    heads: int, length: int, sums: torch.dtype | None, heads_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pair bias in 16 bits, and its gradient where it is added up in memory."""
    monkeypatch.setattr(cards, "cache_bytes", lambda device: 60 * 2**20)
    q = torch.empty(1, 2, heads, length, 32, dtype=torch.bfloat16, device="meta")
    shape = (1, heads, length, length)
    bias, of_sums = (strides.contiguous(shape, dtype) for dtype in (torch.bfloat16, sums or torch.float32))
    problem, added = describe(Inputs(q, q, q)), None if sums is None else of_sums
    output = backward_launches._heads_at_once(problem, bias, added, torch.device("cpu"))
    assert output == heads_at_once
    for of_all in ((1, 1, length, length), (1, heads, 1, length)):  # what heads share, or is small, is no reason to part them
        small = strides.contiguous(of_all, torch.bfloat16)
        assert backward_launches._heads_at_once(problem, small, None, torch.device("cpu")) == heads


class Compiled:
    """What Triton hands back for a compiled kernel; remembers how it is launched."""

    function = 17
    packed_metadata = ("packed",)

    def __init__(self) -> None:
        self.run_with: list[tuple[Any, ...]] = []
        self.hooked_with: list[tuple[Any, ...]] = []

    def run(self, *arguments: Any) -> None:
        self.run_with.append(arguments)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments: self.hooked_with.append((grid, *arguments))


class Jitted:
    """A kernel with two compile-time constants."""

    def __init__(self) -> None:
        names = (("p_x", False), ("p_y", False), ("length", False), ("SECOND", True), ("FIRST", True))
        self.params = [types.SimpleNamespace(name=name, is_constexpr=constant) for name, constant in names]
        self.compiled = Compiled()
        self.launched: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def start(*arguments: Any, **constants: Any) -> Compiled:
            self.launched.append((grid, arguments, constants))
            return self.compiled

        return start


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(launch, "repeats", lambda tensor: True)
    driver.set_active(types.SimpleNamespace(get_current_stream=lambda device: 99))
    yield
    with contextlib.suppress(RuntimeError):  # without a GPU there is no driver to go back to
        driver.reset_active()


X, Y = torch.zeros(4), torch.ones(4)


def test_the_second_launch_skips_the_jit(stub: None) -> None:
    """Addresses for tensors, and the constants in the kernel's own order, whatever the order in which they were planned."""
    jitted = Jitted()
    start = FlatKernel(jitted).plan(3, 12, FIRST=1, num_warps=4, SECOND=2)
    start(X, Y)
    options = {"enable_fp_fusion": True, "FIRST": 1, "num_warps": 4, "SECOND": 2}
    assert jitted.launched == [((3,), (X, Y, 12), options)]
    start(Y, X)
    assert len(jitted.launched) == 1
    expected = (3, 1, 1, 99, 17, ("packed",), None, None, None, Y.data_ptr(), X.data_ptr(), 12, 2, 1)
    assert jitted.compiled.run_with == [expected]


def test_a_first_launch_that_fails_is_a_first_launch_again(stub: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """No memory for the kernel's code, say, or Ctrl-C: nothing half made is launched later."""
    jitted = Jitted()
    start = FlatKernel(jitted).plan(3, 12, FIRST=1, SECOND=2)
    for place, name in ((Jitted, "__getitem__"), (launch, "repeats")):
        with monkeypatch.context() as patch:

            def fail(*_: Any) -> None:
                raise torch.OutOfMemoryError("no memory")

            patch.setattr(place, name, fail)
            with pytest.raises(torch.OutOfMemoryError):
                start(X, Y)
    assert jitted.compiled.run_with == []
    launched = len(jitted.launched)
    start(X, Y)
    start(X, Y)
    assert (len(jitted.launched), len(jitted.compiled.run_with)) == (launched + 1, 1)


def test_hooks_of_profilers_are_called(stub: None) -> None:
    jitted = Jitted()
    start = FlatKernel(jitted).plan(3, 12, FIRST=1, SECOND=2)
    start(X, Y)

    def hook(metadata: Any) -> None: ...

    triton.knobs.runtime.launch_enter_hook.add(hook)
    try:
        start(X, Y)
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(hook)
    assert jitted.compiled.run_with == []
    assert jitted.compiled.hooked_with == [((3, 1, 1), X.data_ptr(), Y.data_ptr(), 12, 2, 1)]


def test_elsewhere_every_launch_goes_through_the_jit() -> None:
    jitted = Jitted()
    start = FlatKernel(jitted).plan(3, 12, FIRST=1, SECOND=2)
    start(X, Y)
    start(X, Y)
    assert len(jitted.launched) == 2


def test_a_tensor_map_is_what_its_constructor_would_make(stub: None) -> None:
    pair = torch.zeros(1, 2, 32, 48)
    planned = _, fields = launch.tensor_map(1, strided(pair), (1, 1, 16, 32))
    jitted = Jitted()
    start = FlatKernel(jitted).plan(3, 12, FIRST=1, SECOND=2, through_map=planned)
    start(X, pair)
    start(X, pair)
    checked = TensorDescriptor(pair, fields["shape"], fields["strides"], fields["block_shape"])
    for descriptor in (jitted.launched[0][1][1], jitted.compiled.run_with[0][10]):
        assert isinstance(descriptor, TensorDescriptor)
        assert descriptor.base is pair
        for field in dataclasses.fields(checked):
            assert field.name == "base" or getattr(descriptor, field.name) == getattr(checked, field.name)


@pytest.mark.parametrize(("n", "long"), [(1 << 10, False), (1 << 26, True)])
def test_statistics_far_from_one_another(monkeypatch: pytest.MonkeyPatch, n: int, long: bool) -> None:
    """From 2**31 statistics on the way from an lse to its delta takes 64 bits: 2**26 rows of 17 queries in tiles of 32."""
    seen: dict[str, bool] = {}
    plan = FlatKernel.plan

    def planned(kernel: FlatKernel, programs: int, *numbers: float, **constants: Any) -> Launch:
        seen[kernel.jitted.__name__] = constants.get("LONG", False)
        return plan(kernel, programs, *numbers, **constants)

    monkeypatch.setattr(FlatKernel, "plan", planned)
    q, k = (torch.empty(1, n, 1, length, 8, dtype=torch.bfloat16, device="meta") for length in (17, 8))
    row, pair = torch.empty(1, n, 8, device="meta"), torch.empty(1, 1, 17, 8, dtype=torch.bfloat16, device="meta")
    lse = torch.empty(1, n, 1, 17, device="meta")
    options = {"scale": 1.0, "layout": "bnhld", "needs": (*(True,) * 5, False), "config": Config()}
    for deterministic in (False, True):
        values = Cotangents(q), Inputs(q, k, k, None, row, pair), Outputs(q, lse, lse)
        backward_plan.plan_backward(*values, deterministic=deterministic, **options)  # type: ignore[arg-type]
    kernels = ("statistics_kernel", "dq_kernel", "dkdv_kernel", "pair_gradient_kernel")
    assert {name: seen.get(name) for name in kernels} == dict.fromkeys(kernels, long), seen


@pytest.mark.parametrize(("length", "aligned", "n", "copies"), [
    (128, True, 64, ["transposed"]),
    (104, True, 64, ["padded", "transposed"]),
    (128, False, 64, ["its rows are not 16-byte aligned", "transposed"]),
    (128, True, 1, []),
])  # fmt: skip
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_backward_describes_what_it_launches(
    length: int, aligned: bool, n: int, copies: list[str], deterministic: bool
) -> None:
    q = torch.empty(1, n, 2, length, 32, dtype=torch.bfloat16, device="meta")
    pair, lse = torch.empty(1, 2, length, length + (not aligned), device="meta"), torch.empty(1, n, 2, length, device="meta")
    values = Cotangents(q), Inputs(q, q, q, pair_bias=pair.bfloat16()[..., :length]), Outputs(q, lse, lse)
    options: dict[str, Any] = {"scale": 1.0, "layout": "bnhld", "config": Config()}
    for needs, kernels in (
        ((True, True, True, False, True, False), ["dq", "dkdv", *["dpair_bias"] * (deterministic and n > 1)]),
        ((False, False, True, False, False, False), ["dkdv"]),
    ):
        plan = backend.plan_backward(*values, needs=needs, deterministic=deterministic, **options)
        told = plan.describe()
        assert list(told.kernels) == kernels
        assert told.kernels["dkdv"] == plan.run.call.tiles.dkdv.as_dict()
        if needs[4]:
            assert len(told.copies) == len(copies)
            assert all(word in text for word, text in zip(copies, told.copies, strict=True))


def plan_training_step(length: int, n: int, mask: bool) -> None:
    """Plan forward and backward of a triangle attention with a pair bias; the tensors are of no device."""
    shape = (1, n, length, 4, 32)
    q, k, v, o, do = (torch.empty(shape, dtype=torch.bfloat16, device="meta").transpose(2, 3) for _ in range(5))
    allowed = torch.empty(1, n, length, dtype=torch.bool, device="meta") if mask else None
    pair = torch.empty(1, 4, length, length, dtype=torch.bfloat16, device="meta")
    lse = torch.empty(1, n, 4, length, device="meta")
    common: dict[str, Any] = {"scale": 0.2, "layout": "bnlhd", "config": Config()}
    inputs, needs = Inputs(q, k, v, allowed, None, pair), (True, True, True, False, True, False)
    backend.plan_forward(inputs, **common)
    values = Cotangents(do), inputs, Outputs(o, lse, lse)
    backend.plan_backward(*values, needs=needs, deterministic=False, **common)


class Counter:
    """Collects what Triton would compile: one kernel for each set of constants and of what it looks at in whole numbers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
        self.launches: list[Launch] = []
        plan = FlatKernel.plan

        def counted(kernel: FlatKernel, programs: int, *numbers: float, **constants: Any) -> Launch:
            self.launches.append(plan(kernel, programs, *numbers, **constants))
            return self.launches[-1]

        monkeypatch.setattr(FlatKernel, "plan", counted)
        monkeypatch.setattr(cards, "capability", lambda device: capability)
        monkeypatch.setattr(cards, "shared_memory_limit", lambda device: 232_448)

    @staticmethod
    def look(param: Any, number: float) -> Any:
        if isinstance(number, float):
            return float
        long = not -(2**31) <= number < 2**31
        return long if param.do_not_specialize else (long, number == 1, number % 16 == 0)

    def counts(self) -> dict[str, int]:
        variants: dict[str, set[Any]] = collections.defaultdict(set)
        for each in self.launches:
            jitted, numbers = each.kernel.jitted, each.numbers
            params = [p for p in jitted.params if not p.is_constexpr][-len(numbers) :]
            looks = tuple(self.look(p, x) for p, x in zip(params, numbers, strict=True))
            block = None if each.through_map is None else each.through_map[1]["block_shape"]
            variants[jitted.fn.__name__].add((looks, repr(sorted(each.constants.items())), repr(block)))
        return {name.removesuffix("_kernel"): len(seen) for name, seen in variants.items()}


HOPPER, AMPERE = (9, 0), (8, 0)


@pytest.mark.parametrize(("capability", "mask", "lengths", "counts"), [
    (HOPPER, True, range(1, 301), {"forward": 16, "dq": 24, "dkdv": 16, "key_bias": 3, "pack": 13, "statistics": 1}),
    (AMPERE, True, range(1, 301), {"forward": 16, "dq": 20, "dkdv": 14, "key_bias": 3, "pack": 13, "statistics": 1}),
    (HOPPER, False, range(1, 301), {"forward": 16, "dq": 25, "dkdv": 16, "key_bias": 3, "pack": 15, "statistics": 1}),
])  # fmt: skip
def test_three_hundred_lengths(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], mask: bool, lengths: range, counts: dict[str, int]
) -> None:
    """notes/new-length.md gives these numbers."""
    counter = Counter(monkeypatch, capability)
    for length in lengths:
        plan_training_step(length, 64, mask)
    assert counter.counts() == counts


def test_a_length_past_640_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once every remainder by 128 has been seen, with tiles that are all as large as they get."""
    counter = Counter(monkeypatch, HOPPER)
    for length in range(129, 384):
        plan_training_step(length, 512, True)
    short = counter.counts()
    assert short == {"forward": 8, "dq": 6, "dkdv": 6, "key_bias": 1, "pack": 11, "statistics": 1}
    for length in range(384, 641):
        plan_training_step(length, 512, True)
    before = counter.counts()
    assert before == short | {"forward": 15, "key_bias": 2}
    for length in (*range(641, 900, 3), 1024, 1031, 2048):
        plan_training_step(length, 512, True)
    assert counter.counts() == before
