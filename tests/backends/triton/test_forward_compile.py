"""Every built-in config of the forward, compiled for every supported GPU without one: spills, shared memory."""

import dataclasses
import functools
import os
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton

from evoattn.backends import Inputs, Outputs
from evoattn.backends import triton as backend
from evoattn.backends.triton.tiles.forward import forward_shared_bytes, forward_tiles
from evoattn.core.config import Config
from evoattn.core.problem import Problem
from evoattn.kit import cards
from tests.helpers.ahead_of_time import COUNTS, SHARED_LIMITS, TARGETS, TWINS, Report, report, target

ROOM = 1.03
"""A gate may lengthen the loop by this much: ptxas schedules a few instructions differently."""


@dataclasses.dataclass(frozen=True)
class Compiled:
    """One call whose kernel is compiled; sizes matter only by what the launcher makes of them.

    `spills`: instructions of the main loop that may move spilled registers, by card.
    `left_over`: not the kernel of whole tiles of queries, but that of what is left over.
    """

    name: str
    dtype: torch.dtype = torch.bfloat16
    d: int = 32
    length: int = 384
    mask: bool = True
    pair_bias: torch.dtype | None = torch.bfloat16
    n: int = 384
    spills: dict[str, int] = dataclasses.field(default_factory=dict)
    left_over: bool = False
    gate: bool = False

    def compile(self, arch: str) -> Report:
        """The report of a forward kernel that the launcher starts for this call."""
        with target(arch) as compiled:
            plan, inputs = self.plan()
            plan.run(inputs, Outputs(torch.empty_like(inputs.q), *(torch.empty(inputs.q.shape[:-1]) for _ in range(2))))
        kernels = [kernel for kernel in compiled if kernel.metadata.name == "forward_kernel"]
        assert len(kernels) == 2 or not self.left_over
        return report(kernels[-1] if self.left_over else kernels[0])

    def plan(self) -> tuple[Any, Inputs]:
        """The plan for the card that is compiled for, and the tensors of the call."""
        q, k, v = (torch.empty(1, self.n, self.length, 4, self.d, dtype=self.dtype).transpose(2, 3) for _ in range(3))
        mask = torch.ones(1, self.n, self.length, dtype=torch.bool) if self.mask else None
        pair = None if self.pair_bias is None else torch.empty(1, 4, self.length, self.length, dtype=self.pair_bias)
        inputs = Inputs(q, k, v, mask, None, pair, torch.empty_like(q) if self.gate else None)
        return backend.plan_forward(inputs, scale=self.d**-0.5, layout="bnlhd", config=Config()), inputs


FEW = {"sm_90": 2}

FLOAT: dict[str, Any] = {"dtype": torch.float32, "pair_bias": torch.float32}

CASES = (
    # What `heuristics` says of these: 2 to 24% faster than tiles that spill nothing
    Compiled("d16", d=16),
    Compiled("d32", spills=FEW),
    Compiled("d32_short", length=256),
    Compiled("d32_ragged", length=397),
    Compiled("d32_long_and_ragged", length=1001, spills=FEW),
    Compiled("d32_mask", pair_bias=None, spills={"sm_90": 8}),
    Compiled("d32_float16_wide_bias", dtype=torch.float16, pair_bias=torch.float32),
    Compiled("d32_one_row", n=1),
    Compiled("d48", d=48),
    Compiled("d64", d=64),
    Compiled("d64_mask", d=64, pair_bias=None),
    Compiled("d64_ragged", d=64, length=397),
    Compiled("d32_left_over", length=397, left_over=True),
    Compiled("d64_left_over", d=64, length=397, left_over=True),
    Compiled("d128_left_over", d=128, length=397, left_over=True),
    Compiled("d16_float32", **FLOAT, d=16, spills={"sm_90": 10}),
    Compiled("d128", d=128),
    Compiled("d256", d=256),
    Compiled("d32_float32", **FLOAT),
    Compiled("d32_float32_ragged", **FLOAT, length=397),
    Compiled("d64_float32", **FLOAT, d=64, spills={"sm_90": 1}),  # as scores are products of float16 halves
    # sm_90: 0.623 ms in spite of it, where tiles of 64 queries take 0.699 (N = 128)
    Compiled(
        "d64_float32_ragged",
        **FLOAT,
        d=64,
        length=397,
        spills={"sm_90": 77},
    ),
    Compiled("d128_float32", **FLOAT, d=128, spills={"sm_90": 2, "sm_120": 8}),
    # sm_90: 0.384 ms in spite of it, where exact products take 7.86 (N = 24)
    Compiled(
        "d128_float32_ragged",
        **FLOAT,
        d=128,
        length=397,
        spills={"sm_90": 4},
    ),
    # Never run on these cards: see notes/saved-reference.md
    Compiled("d256_float32", **FLOAT, d=256, spills={"sm_80": 732, "sm_100": 1180}),
)


QUICK = {
    ("d32", "sm_80"),
    ("d32_ragged", "sm_86"),
    ("d32", "sm_90"),
    ("d64", "sm_90"),
    ("d64_left_over", "sm_90"),
    ("d128_float32", "sm_90"),
    ("d32", "sm_100"),
    ("d32", "gfx942"),
}
"""What `make test` compiles; `make test-all` compiles every case for every card that has plans of its own."""

TYPICAL = ("d32", "d128", "d32_float32")
"""Cases that are compiled for twins too."""

PAIRS = [
    pytest.param(case, arch, marks=[] if (case.name, arch) in QUICK else pytest.mark.slow, id=f"{case.name}-{arch}")
    for arch in TARGETS
    for case in CASES
    if arch not in TWINS or case.name in TYPICAL
]

compiles = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")


@functools.cache
def compiled(case: str, arch: str) -> Report:
    """Read by two tests each: with and without a gate."""
    return next(each for each in CASES if each.name == case).compile(arch)


@pytest.mark.parametrize(("arch", "twin"), TWINS.items())
def test_twins_have_the_same_plans(arch: str, twin: str) -> None:
    def constants(case: Compiled, card: str) -> list[dict[str, Any]]:
        with target(card):
            plan, _ = case.plan()
        return [each.constants for each in plan.run.launches]

    assert [case.name for case in CASES if constants(case, arch) != constants(case, twin)] == []


@compiles
@pytest.mark.parametrize(("case", "arch"), PAIRS)
def test_forward_kernels_fit_the_card_within_known_spills(case: Compiled, arch: str) -> None:
    """Within the card's shared memory, no product that ptxas serialises, and no more spills than known."""
    compiled_kernels = compiled(case.name, arch)
    assert compiled_kernels.shared <= SHARED_LIMITS[arch]
    assert not compiled_kernels.serialised
    assert not COUNTS or compiled_kernels.spills <= case.spills.get(arch, 0)


@compiles
@pytest.mark.parametrize(("name", "arch"), [
    ("d32", "sm_90"),
    *(pytest.param(name, "sm_90", marks=pytest.mark.slow) for name in ("d32_ragged", "d32_mask", "d64", "d128", "d32_float32")),
    *(pytest.param("d32", arch, marks=pytest.mark.slow) for arch in ("sm_80", "sm_100", "gfx942")),
])  # fmt: skip
def test_a_gate_costs_the_loop_nothing(name: str, arch: str) -> None:
    """It is loaded and multiplied when the loop is over."""
    case = next(each for each in CASES if each.name == name)
    without, gated = compiled(name, arch), dataclasses.replace(case, gate=True).compile(arch)
    assert gated.shared <= SHARED_LIMITS[arch]
    assert not gated.serialised
    assert gated.spills <= without.spills + 4
    assert gated.loop <= ROOM * without.loop


@compiles
def test_products_and_sums_are_fused_whatever_the_default() -> None:
    """Triton 3.10 will change it."""
    x = torch.empty(1, 4, 2, 64, 16, dtype=torch.bfloat16)
    with triton.knobs.language.scope(), target("sm_90") as compiled:
        triton.knobs.language.default_fp_fusion = False
        plan = backend.plan_forward(Inputs(x, x, x), scale=0.25, layout="bnhld", config=Config())
        plan.run(Inputs(x, x, x), Outputs(x, *(torch.empty(x.shape[:-1]) for _ in range(2))))
    assert [kernel.metadata.enable_fp_fusion for kernel in compiled] == [True]


@pytest.mark.parametrize("shared_limit", sorted(set(SHARED_LIMITS.values())))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_configs_fit_in_shared_memory(dtype: torch.dtype, shared_limit: int) -> None:
    """The estimate that picks smaller tiles; what the compiler really takes is held to the limit above."""
    for capability in ((8, 6), (9, 0), (10, 0), None):
        for d in (8, 16, 24, 32, 48, 64, 128, 256):
            problem = Problem("cuda", capability, dtype, 1, 8, 4, 384, 384, d, d, mask=True, pair_bias=dtype)
            tiles = forward_tiles(problem, Config(), shared_limit)
            assert forward_shared_bytes(problem, tiles) <= shared_limit
            kept = forward_tiles(problem, Config(block_k=16, num_stages=1), shared_limit)
            assert (kept.block_k, kept.num_stages) == (16, 1)


def planned(dtype: torch.dtype, lq: int, lk: int, d: int, pair: tuple[int, ...] | None = None) -> list[dict[str, Any]]:
    """The constants and options of the kernel's launches on Hopper; the pair bias has the shape given, or the whole one."""
    q = torch.empty(1, 300, lq, 4, d, dtype=dtype).transpose(2, 3)
    k = torch.empty(1, 300, lk, 4, d, dtype=dtype).transpose(2, 3)
    bias = torch.empty(pair or (1, 4, lq, lk), dtype=dtype)
    with target("sm_90"):
        plan = backend.plan_forward(Inputs(q, k, k, pair_bias=bias), scale=0.2, layout="bnlhd", config=Config())
    return [each.constants for each in plan.run.launches]  # type: ignore[attr-defined]


@pytest.mark.parametrize(("length", "d"), [(384, 32), (256, 32), (397, 32), (1001, 32), (384, 64), (397, 128)])
def test_registers_are_limited_where_it_is_faster(length: int, d: int) -> None:
    """And never for queries that are left over, nor for a pair bias that does not come through a tensor map: that spills."""
    first, *left_over = planned(torch.bfloat16, length, length, d)
    assert first["maxnreg"]
    assert not any("maxnreg" in each for each in left_over)
    assert not any("maxnreg" in each for each in planned(torch.bfloat16, length, length, d, pair=(1, 4, 1, length)))


@pytest.mark.parametrize(("dtype", "length", "d", "tails"), [
    (torch.bfloat16, 384, 32, [(64, 64)]),
    (torch.bfloat16, 397, 32, [(32, 16), (32, 32)]),
    (torch.bfloat16, 410, 32, [(32, 32), (32, 32)]),
    (torch.bfloat16, 1001, 32, [(64, 64)]),
    (torch.bfloat16, 1030, 32, [(64, 32), (64, 64)]),
    (torch.float32, 397, 128, [(32, 16), (32, 32)]),
    (torch.float32, 397, 200, [(32, 32), (32, 32)]),
], ids=str)  # fmt: skip
def test_half_a_tile_for_few_keys_left_over(dtype: torch.dtype, length: int, d: int, tails: list[tuple[int, int]]) -> None:
    """For whole tiles of queries, and not where warps share queries: (64, 32) with 8 warps in the last."""
    assert [(each["BLOCK_K"], each["TAIL_K"]) for each in planned(dtype, length, length, d)] == tails


def test_float32_products_follow_torch() -> None:
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    try:
        for tf32, single, split in ((False, "ieee", "tf32x3"), (True, "tf32", "tf32")):
            matmul.allow_tf32 = tf32
            assert cards.split_precision(torch.float32, 128) == split
            assert cards.split_precision(torch.float32, 129) == single
            assert cards.split_precision(torch.bfloat16, 64) == "ieee"
    finally:
        matmul.allow_tf32 = before
