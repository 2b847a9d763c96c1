"""Every built-in config of the backward, compiled for every supported GPU without one: registers, spills, shared memory."""

import dataclasses
import functools
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from evoattn.backends import Cotangents, Inputs, Outputs
from evoattn.backends import triton as backend
from evoattn.core.config import Config
from tests.helpers.ahead_of_time import COUNTS, SHARED_LIMITS, Report, report, target

FEW_SPILLS = 28
"""Instructions of the main loop that may move spilled registers, where a limit of registers makes a kernel faster: dQ by 13% at
tri384 on an H200, and by 3 to 4% with up to 16 channels."""

WIDE_FLOAT_SPILLS = 288
"""The same with three TF32 products a matmul and 65 to 128 channels: 1.29 and 1.26 ms for dQ and for dK and dV, where exact
products, which spill nothing, take 4.64 and 4.84 (N = 24, L = 384)."""

KERNELS = ("statistics_kernel", "dq_kernel", "dkdv_kernel", "pair_gradient_kernel", "total_kernel")


@dataclasses.dataclass(frozen=True)
class Compiled:
    """One call whose kernels are compiled; sizes matter only by what the launcher makes of them."""

    name: str
    dtype: torch.dtype = torch.bfloat16
    d: int = 32
    length: int = 384
    mask: bool = True
    pair_bias: torch.dtype | None = torch.bfloat16
    deterministic: bool = False
    n: int = 384
    spills: int = FEW_SPILLS
    queries: int | None = None
    gate: bool = False

    def compile(self, arch: str) -> list[Report]:
        """The reports of the kernels that the launcher starts for this call."""
        shape = (1, self.n, self.length, 4, self.d)
        q, k, v, o, do = (torch.empty(shape, dtype=self.dtype, device="meta").transpose(2, 3) for _ in range(5))
        queries = self.queries or self.length
        q, o, do = (x[:, :, :, :queries] for x in (q, o, do))
        mask = torch.empty(1, self.n, self.length, dtype=torch.bool, device="meta") if self.mask else None
        pair = None
        if self.pair_bias is not None:
            pair = torch.empty(1, 4, queries, self.length, dtype=self.pair_bias, device="meta")
        lse = torch.empty(1, self.n, 4, queries, device="meta")
        with target(arch) as compiled:
            gate = torch.empty_like(o) if self.gate else None
            values = Cotangents(do), Inputs(q, k, v, mask, None, pair, gate), Outputs(o, lse, torch.empty_like(lse))
            needs = (True, True, True, False, pair is not None, self.gate)
            options = {"layout": "bnlhd", "needs": needs, "deterministic": self.deterministic}
            plan = backend.plan_backward(*values, scale=self.d**-0.5, **options, config=Config())
            plan.run(*values, (*(torch.empty_like(x) for x in (q, k, v)), gate))
        return [report(kernel) for kernel in compiled if kernel.metadata.name in KERNELS]


FLOAT: dict[str, Any] = {"dtype": torch.float32, "pair_bias": torch.float32}

CASES = (
    Compiled("d16", d=16),
    Compiled("d32"),
    Compiled("d32_in_order", deterministic=True),
    Compiled("d32_in_order_left_over", length=397, deterministic=True),
    Compiled("d32_ragged", length=397),
    Compiled("d32_mask", pair_bias=None),
    Compiled("d32_float16_wide_bias", dtype=torch.float16, pair_bias=torch.float32),
    Compiled("d48", d=48),
    Compiled("d64", d=64),
    Compiled("d64_ragged", d=64, length=397),
    Compiled("d64_in_order", d=64, deterministic=True),
    Compiled("d128", d=128),
    Compiled("d256", d=256),
    Compiled("d32_few_queries", queries=16, pair_bias=None),
    Compiled("d64_few_queries", d=64, queries=16, pair_bias=None),
    Compiled("d128_few_queries", d=128, queries=16),
    Compiled("single", n=1, d=24, mask=False),
    Compiled("d32_float32", **FLOAT),
    Compiled("d64_float32", **FLOAT, d=64),
    Compiled("d128_float32", **FLOAT, d=128, spills=WIDE_FLOAT_SPILLS),
    Compiled(
        "d128_float32_in_order",
        length=397,
        **FLOAT,
        d=128,
        deterministic=True,
        spills=WIDE_FLOAT_SPILLS,
    ),
    Compiled("d256_float32", **FLOAT, d=256),
)


LINES = ("d32", "d32_in_order", "d32_in_order_left_over", "d128", "d256", "d32_float32", "d128_float32")
"""Cases that between them use the lines of the tables for other cards than Hopper's."""

TYPICAL = ("d32", "d128", "d32_float32", "d128_float32")

CHECKED = {
    "sm_90": tuple(case.name for case in CASES),
    "sm_80": LINES,
    "sm_86": (*TYPICAL[:3], "d256_float32"),
    "sm_89": TYPICAL[:3],
    "sm_100": TYPICAL,
    "sm_120": TYPICAL,
    "gfx90a": TYPICAL[:3],
    "gfx942": LINES,
}

QUICK = {("d32", "sm_80"), ("d32_in_order", "sm_90"), ("d32", "gfx942")}
"""What `make test` compiles: each kernel for Hopper, beside those of a gated call, and the default's for two other cards."""

PAIRS = [
    pytest.param(case, arch, marks=[] if (case.name, arch) in QUICK else pytest.mark.slow, id=f"{case.name}-{arch}")
    for arch, names in CHECKED.items()
    for case in CASES
    if case.name in names
]


@functools.cache
def compiled(case: str, arch: str) -> list[Report]:
    """Read by two tests each: with and without a gate."""
    return next(each for each in CASES if each.name == case).compile(arch)


@pytest.mark.parametrize(("case", "arch"), PAIRS)
def test_backward_kernels_fit_the_card_without_spills(case: Compiled, arch: str) -> None:
    """Within the card's shared memory, no product that ptxas serialises, and next to nothing is spilled."""
    reports = compiled(case.name, arch)
    assert {"dq_kernel", "dkdv_kernel"} <= {r.name for r in reports}
    assert [r for r in reports if r.shared > SHARED_LIMITS[arch] or r.serialised] == []
    assert not COUNTS or [r for r in reports if r.spills > case.spills] == []


@pytest.mark.parametrize(("name", "arch"), [
    ("d32", "sm_90"),
    *(pytest.param(name, "sm_90", marks=pytest.mark.slow) for name in ("d32_in_order", "d64_ragged", "d128", "d256_float32")),
    *(pytest.param("d32", arch, marks=pytest.mark.slow) for arch in ("sm_80", "sm_100", "gfx942")),
])  # fmt: skip
def test_a_gate_has_registers(name: str, arch: str) -> None:
    """Only the pass before them multiplies by it, and has registers for it."""
    case = next(each for each in CASES if each.name == name)
    without = {r.name: r for r in compiled(name, arch)}
    gated = dataclasses.replace(case, gate=True).compile(arch)
    assert {r.name for r in gated} == {*without, "statistics_kernel"}
    for r in gated:
        assert r.shared <= SHARED_LIMITS[arch]
        assert not r.serialised
        assert r.spills <= case.spills
        assert r.name != "statistics_kernel" or r.registers <= 96, "with 255 it spills, and it has no loop to count that in"
