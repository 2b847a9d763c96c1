"""The kernels of triangle multiplication, compiled for every supported GPU without one: shared memory, spills and atomics."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton

from evoattn.pair.multiplication import steps
from evoattn.pair.values import MultiplicationOptions as Options
from evoattn.pair.values import MultiplicationWeights as Weights
from tests.helpers.ahead_of_time import SHARED_LIMITS, TARGETS, report, target
from tests.pair.problems import weights

NAMES = ["gate_in_kernel", "gate_out_kernel", "gate_out_backward_kernel", "gate_in_backward_kernel"]


def compiled(arch: str, channels: int, dtype: torch.dtype, length: int) -> list[Any]:
    """All four kernels, as a step of training launches them for z in float32."""
    padded = length + -length % 8
    parameters = weights(channels, channels, bias=False, dtype=dtype)
    parameters = Weights(*[x if x is None else x.detach() for x in parameters])
    z, mask = torch.empty(1, length, length, channels), torch.empty(1, length, length)
    ab = torch.empty(2 * channels, 1, padded, padded, dtype=dtype)
    t: Tensor = ab[:channels].float() if dtype == torch.float16 else ab[:channels]
    dg, options = torch.empty(padded * padded, channels, dtype=dtype), Options(True, 1e-5, True)
    with target(arch) as kernels:
        steps.gate_in(z, mask, parameters, options, padded)
        steps.gate_out(z, t, parameters, options, torch.empty_like(z))
        steps.gate_out_backward(z, z, t, parameters, options, needs_weights=True)
        steps.gate_in_backward(ab, dg, z, z, mask, parameters, options, needs_weights=True)
    assert [kernel.metadata.name for kernel in kernels] == NAMES
    return kernels


@pytest.mark.parametrize("length", [61, pytest.param(64, marks=pytest.mark.slow)])
def test_an_h100_in_bfloat16(length: int) -> None:
    """Nothing spills, loads of z are 16 bytes wide with and without padding, and no sum is made by atomics."""
    most = 17 if triton.__version__.startswith("3.3.") else 0  # spills of gate_in_backward_kernel
    for kernel in compiled("sm_90", 128, torch.bfloat16, length):
        resources = report(kernel)
        assert resources.spills <= most and resources.shared <= SHARED_LIMITS["sm_90"] // 2
        assert "ld.global.v4" in kernel.asm["ptx"] and "atom" not in kernel.asm["ptx"]


OF_MODELS = [(arch, 128, torch.bfloat16) for arch in TARGETS]
OTHERS = [
    (arch, *sizes)
    for arch in ("sm_86", "sm_90")
    for sizes in ((64, torch.float16), (256, torch.bfloat16), (128, torch.float32))
]


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "channels", "dtype"), [*OF_MODELS, *OTHERS])
def test_every_card_has_the_shared_memory(arch: str, channels: int, dtype: torch.dtype) -> None:
    if channels > 128 and SHARED_LIMITS[arch] < steps.SHARED_MEMORY:
        pytest.skip("left to plain torch there")
    for kernel in compiled(arch, channels, dtype, 61):
        assert report(kernel).shared <= SHARED_LIMITS[arch], kernel.metadata.name
