"""Kernels for rows without a key, compiled without a GPU: shared memory and spilled registers."""

import pytest
import torch

pytest.importorskip("triton")

from evoattn.empty_rows import in_place
from evoattn.empty_rows.means import MOST_GATED_CHANNELS, MaskLimits
from tests.helpers.ahead_of_time import SHARED_LIMITS, report, target

CASES = [
    (torch.bfloat16, 32, 32),
    (torch.float32, 32, 32),
    (torch.float16, 24, 128),
    (torch.float32, 128, 128),
    (torch.bfloat16, 256, 256),
    (torch.float32, 256, 256),
]


UNGATED = [(*case, arch, False) for case in CASES for arch in ("sm_80", "sm_86", "sm_90")]
GATED = [(*case, "sm_90", True) for case in CASES if case[2] <= MOST_GATED_CHANNELS]


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "d", "c", "arch", "gated"), UNGATED + GATED, ids=str)
def test_kernels_fit_the_card_without_spills(dtype: torch.dtype, d: int, c: int, arch: str, gated: bool) -> None:
    q, dq = (torch.empty(1, 384, 4, 384, d, dtype=dtype, device="meta") for _ in range(2))
    v, dv = (torch.empty(1, 384, 4, 384, c, dtype=dtype, device="meta") for _ in range(2))
    keys = torch.empty(1, 384, 1, 1, 384, device="meta")
    pair = torch.empty(1, 1, 4, 384, 384, dtype=dtype, device="meta")
    with target(arch) as compiled:
        _, stats = in_place.find_rows(keys, MaskLimits(-1e8, 1.25))
        gate = v if gated else None
        means = in_place.fill_output(v, v, gate, keys, stats)
        in_place.add_gradients((q, q, v, gate), v, (dq, dq, dv, dv if gated else None, pair), keys, stats, means, 1.0)
    reports = [report(kernel) for kernel in compiled]
    assert [r.name for r in reports] == ["find_kernel", "fill_kernel", "inputs_kernel", "pairs_kernel"]
    for r in reports:
        assert r.shared <= SHARED_LIMITS[arch]
        assert r.spills <= (80 if dtype == torch.float32 else 0) or c > 64  # of 1,700 instructions in float32
