"""Kernels for rows without a key, compiled without a GPU: shared memory and spilled registers."""

import pytest
import torch

pytest.importorskip("triton")

from evoattn.compat import empty_rows_kernels as kernels
from tests.helpers.ahead_of_time import SHARED_LIMITS, report, target

CASES = [
    (torch.bfloat16, 32, 32),
    (torch.float32, 32, 32),
    (torch.float16, 24, 128),
    (torch.float32, 128, 128),
    (torch.bfloat16, 256, 256),
    (torch.float32, 256, 256),
]


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90"])
@pytest.mark.parametrize(("dtype", "d", "c"), CASES, ids=str)
def test_fits(dtype: torch.dtype, d: int, c: int, arch: str) -> None:
    q, dq = (torch.empty(1, 384, 4, 384, d, dtype=dtype, device="meta") for _ in range(2))
    v, dv = (torch.empty(1, 384, 4, 384, c, dtype=dtype, device="meta") for _ in range(2))
    keys = torch.empty(1, 384, 384, device="meta")
    pair = torch.empty(1, 1, 4, 384, 384, dtype=dtype, device="meta")
    with target(arch) as compiled:
        _, stats = kernels.find(keys, -1e8, 1.25)
        means = kernels.fill(v, v, v, keys, stats)
        kernels.add_to_inputs((q, q, v), v, v, (dq, dq, dv, dv), keys, stats, means, 1.0)
        kernels.add_to_pairs(v, v, v, pair, keys, stats, means)
    reports = [report(kernel) for kernel in compiled]
    assert [r.name for r in reports] == ["find_kernel", "fill_kernel", "inputs_kernel", "pairs_kernel"]
    for r in reports:
        assert r.shared <= SHARED_LIMITS[arch]
        assert r.spills <= (64 if dtype == torch.float32 else 0) or c > 64  # of 1,700 instructions in float32
