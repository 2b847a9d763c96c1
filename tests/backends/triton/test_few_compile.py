"""The kernels for few queries and few keys, compiled for every supported GPU without one: registers and shared memory."""

import dataclasses

import pytest
import torch

pytest.importorskip("triton")

from evoattn.backends import Cotangents, Inputs, Outputs
from evoattn.backends import triton as backend
from evoattn.core.config import Config
from tests.helpers.ahead_of_time import COUNTS, SHARED_LIMITS, TARGETS, TWINS, Report, report, target


@dataclasses.dataclass(frozen=True)
class Compiled:
    """One call whose two kernels are compiled."""

    name: str
    lq: int
    lk: int
    d: int
    dtype: torch.dtype = torch.bfloat16
    n: int = 16384
    bias: bool = False
    spills: int = 0

    def compile(self, arch: str) -> list[Report]:
        """The reports of all kernels that the launcher starts for this call."""
        q, k, v, o, do = (
            torch.empty(1, self.n, length, 4, self.d, dtype=self.dtype, device="meta").transpose(2, 3)
            for length in (self.lq, self.lk, self.lk, self.lq, self.lq)
        )
        mask = torch.empty(1, self.n, self.lk, dtype=torch.bool, device="meta")
        mask_bias = torch.empty(1, self.n, self.lk, device="meta") if self.bias else None
        lse = torch.empty(1, self.n, 4, self.lq, device="meta")
        inputs, outputs = Inputs(q, k, v, mask, mask_bias), Outputs(o, lse, lse)
        options = {"scale": self.d**-0.5, "layout": "bnlhd", "config": Config()}
        with target(arch) as compiled:
            backend.plan_forward(inputs, **options).run(inputs, outputs)
            needs = (True, True, True, False, False, False)
            values = (Cotangents(do), inputs, outputs)
            backend.plan_backward(*values, needs=needs, deterministic=False, **options).run(*values, (q, k, v, None))
        return [report(kernel) for kernel in compiled]


CASES = (
    Compiled("template_point", 1, 4, 16),
    Compiled("template_point_float32", 1, 4, 16, torch.float32),
    Compiled("all_biases", 3, 5, 24, bias=True),
    Compiled("column_of_8", 8, 8, 32),
    # In a backward, where half as many rows, and no spills, take 217 us and not 132 on an H200 (`tiles/few.py`)
    Compiled("16_keys", 4, 16, 32, spills=600),
    Compiled("one_query_16_keys", 1, 16, 32),
    Compiled("most_keys", 1, 256, 32),
    Compiled("most_queries", 16, 4, 32, spills=16),
    Compiled("most_channels", 1, 8, 256),
    Compiled("most_float32", 1, 32, 32, torch.float32),
)


QUICK = {("template_point", "sm_80"), ("all_biases", "sm_90"), ("16_keys", "sm_90"), ("template_point", "gfx942")}
"""What `make test` compiles; `make test-all` compiles every case for every card but twins, and one case for those."""

PAIRS = [
    pytest.param(case, arch, marks=[] if (case.name, arch) in QUICK else pytest.mark.slow, id=f"{case.name}-{arch}")
    for arch in TARGETS
    for case in CASES
    if arch not in TWINS or case.name == "template_point"
]


@pytest.mark.parametrize(("case", "arch"), PAIRS)
def test_few_kernels_fit_shared_memory_without_spills(case: Compiled, arch: str) -> None:
    """One kernel a pass, within shared memory. Nothing is spilled unless that is faster."""
    reports = case.compile(arch)
    assert [r.name for r in reports] == ["forward_few_kernel", "backward_few_kernel"]
    assert [r for r in reports if r.shared > SHARED_LIMITS[arch]] == []
    forward, backward = reports
    assert not COUNTS or (forward.spills == 0 and backward.spills <= case.spills)
