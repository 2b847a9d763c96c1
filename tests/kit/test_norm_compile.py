"""The kernels of the layers' norm, compiled for every supported GPU without one: registers, spills and wide loads."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import triton

from evoattn.kit import norm
from tests.helpers.ahead_of_time import TARGETS, report, target

QUICK = ("sm_90", "gfx942")
"""The cards that `make test` compiles for."""


@pytest.mark.parametrize("arch", [arch if arch in QUICK else pytest.param(arch, marks=pytest.mark.slow) for arch in TARGETS])
@pytest.mark.parametrize("channels", [64, 128, 384])
def test_registers_and_loads(arch: str, channels: int) -> None:
    """float32 rows in, bfloat16 out: at most four spills in a loop (sm_100). sm_90 loads four channels at a time."""
    if arch.startswith("gfx") and triton.__version__.startswith("3.3."):
        pytest.skip("Triton 3.3 links the kernels of AMD's GPUs with a linker that only ROCm has")
    x, dy = torch.empty(4096, channels), torch.empty(4096, channels, dtype=torch.bfloat16)
    scale, shift = torch.empty(2, channels)
    with target(arch) as compiled:
        _, mean, rstd = norm.normalise(x, scale, shift, 1e-5, torch.bfloat16)
        norm.normalise_backward(dy, x, mean, rstd, scale, shift, (True, True, True))
    assert [kernel.metadata.name for kernel in compiled] == ["norm_kernel", "norm_backward_kernel"]
    for kernel in compiled:
        output = report(kernel)
        assert output.spills <= 4 and output.registers <= 128
        if arch == "sm_90":
            assert "ld.global.v4" in kernel.asm["ptx"] and "atom" not in kernel.asm["ptx"]
