"""The kernels of the transition, compiled for every supported GPU without one: shared memory, spills and atomics."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from evoattn.pair.transitions import steps
from evoattn.pair.transitions.kernels import Operands
from evoattn.pair.values import TransitionOptions as Options
from evoattn.pair.values import TransitionWeights as Weights
from tests.helpers.ahead_of_time import SHARED_LIMITS, TARGETS, report, target
from tests.helpers.descriptors import wrong_descriptors
from tests.pair.transitions import weights


def compiled(
    arch: str, channels: int, dtype: torch.dtype, *, gated: bool = True, bias: bool = False, hidden: int | None = None
) -> list[Any]:
    """Both kernels, as a step of training launches them for x in float32."""
    rows, hidden, options = 4096, hidden or 4 * channels, Options(1e-5, True)
    parameters = weights(channels, hidden, gated=gated, bias=bias, dtype=dtype)
    parameters = Weights(*[y if y is None else y.detach() for y in parameters])  # type: ignore[arg-type]
    x, mask = torch.empty(rows, channels), torch.empty(rows) if bias else None
    widths = (channels, channels, hidden, 2 * hidden if gated else hidden)
    operands = [torch.empty(rows, width, dtype=dtype) for width in widths]
    with target(arch) as kernels:
        sums = torch.empty(steps.programs(x, parameters), 3, channels)
        steps.forward(x, mask, parameters, options)
        steps.launch_backward(x, x, mask, parameters, options, torch.empty_like(x), Operands(*operands, sums))
    assert [kernel.metadata.name for kernel in kernels] == ["forward_kernel", "backward_kernel"]
    return kernels


@pytest.mark.parametrize("gated", [True, False], ids=["swiglu", "relu"])
@pytest.mark.parametrize("bias", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["plain", "bias"])
def test_an_h100_in_bfloat16(gated: bool, bias: bool) -> None:
    """Nothing spills, wgmma multiplies without being serialised, loads are 16 bytes wide, and no sum is made by atomics."""
    for kernel in compiled("sm_90", 128, torch.bfloat16, gated=gated, bias=bias):
        resources = report(kernel)
        assert resources.spills == 0 and resources.shared <= SHARED_LIMITS["sm_90"]
        assert "HGMMA" in resources.mix and not resources.serialised
        assert "ld.global.v4" in kernel.asm["ptx"] and "atom" not in kernel.asm["ptx"]


def test_a_sigmoid_is_four_instructions() -> None:
    """The division of Triton's own takes eight more: 619 instructions of the forward's loop, not 363."""
    for kernel in compiled("sm_90", 128, torch.bfloat16):
        assert "div.full" not in kernel.asm["ptx"].split("wgmma", 1)[1].rsplit("wgmma", 1)[0]


OF_MODELS = [(arch, 128, torch.bfloat16) for arch in TARGETS]
OTHERS = [
    (arch, *sizes)
    for arch in ("sm_86", "sm_90", "sm_100")
    for sizes in ((64, torch.float16), (256, torch.bfloat16), (64, torch.float32), (128, torch.float32))
]


SLOW = [pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((48, 16, True), (128, 16, False), (64, 64, True))]


@pytest.mark.parametrize(("channels", "hidden", "gated"), [(64, 4, True), *SLOW])
def test_no_product_of_float32_reads_other_shared_memory(channels: int, hidden: int, gated: bool) -> None:
    """ptxas 12.8 computes wrong addresses where warps share 64 rows and a block of hidden channels is 16 wide."""
    for kernel in compiled("sm_90", channels, torch.float32, gated=gated, bias=True, hidden=hidden):
        assert wrong_descriptors(kernel) == [], kernel.metadata.name


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "channels", "dtype"), [*OF_MODELS, *OTHERS])
def test_every_card_can_run_what_it_takes(arch: str, channels: int, dtype: torch.dtype) -> None:
    """A program has the shared memory. Where products do not fit into tensor memory, Triton compiles a trap."""
    with target(arch):
        takes = steps.takes(torch.device("cuda"), dtype, channels, channels)
    assert takes == ((arch, channels, dtype) not in LEFT_TO_TORCH)
    if not takes:
        return
    for kernel in compiled(arch, channels, dtype):
        assert report(kernel).shared <= SHARED_LIMITS[arch], kernel.metadata.name
        assert "trap;" not in kernel.asm.get("ptx", ""), kernel.metadata.name


LEFT_TO_TORCH = {
    ("sm_86", 256, torch.bfloat16),
    ("sm_86", 64, torch.float32),
    ("sm_86", 128, torch.float32),
    ("sm_100", 64, torch.float32),
    ("sm_100", 128, torch.float32),
}
