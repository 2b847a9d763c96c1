"""Kernels of float32 inference by products of float16, compiled for every supported GPU without one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from evoattn.pair.multiplication import steps as multiplication
from evoattn.pair.products import steps as products
from evoattn.pair.transitions import steps as transitions
from evoattn.pair.values import MultiplicationOptions, TransitionOptions
from tests.helpers.ahead_of_time import SHARED_LIMITS, TARGETS, report, target
from tests.helpers.descriptors import wrong_descriptors
from tests.pair import problems
from tests.pair.transitions import weights

LENGTH, PADDED = 684, 688
ROWS = torch.empty(4096, 128)


def frozen(parameters: Any) -> Any:
    return type(parameters)(*[None if x is None else x.detach() for x in parameters])


def of_a_multiplication(arch: str, *, outgoing: bool) -> list[Any]:
    """The gates and the product of squares, as `forward` launches them."""
    parameters = frozen(problems.weights(128, 128, bias=True, dtype=torch.float32))
    z, mask = torch.empty(1, LENGTH, LENGTH, 128), torch.empty(1, LENGTH, LENGTH)
    options, ab = MultiplicationOptions(outgoing, 1e-5, True), torch.empty(256, 1, PADDED, PADDED)
    with target(arch) as kernels:
        multiplication.gate_in(z, mask, parameters, options, PADDED, halves=True)
        multiplication.gate_out(z, ab[:128], parameters, options, z, halves=True)
        products.multiply_squares(ab)
    names = ["gate_in_kernel", "gate_out_kernel", "split_kernel", "product_kernel"]
    assert [kernel.metadata.name for kernel in kernels] == names
    return kernels


@pytest.mark.parametrize(
    "outgoing", [pytest.param(True, id="outgoing", marks=pytest.mark.slow), pytest.param(False, id="incoming")]
)
def test_a_multiplication_on_an_h100(outgoing: bool) -> None:
    for kernel in of_a_multiplication("sm_90", outgoing=outgoing):
        resources = report(kernel)
        assert resources.spills == 0 and resources.shared <= SHARED_LIMITS["sm_90"] and not resources.serialised
        assert "wgmma" in kernel.asm["ptx"] or kernel.metadata.name == "split_kernel"
        assert wrong_descriptors(kernel) == [], kernel.metadata.name


@pytest.mark.parametrize("gated", [True, False], ids=["swiglu", "relu"])
def test_a_transition_on_an_h100(gated: bool) -> None:
    parameters, options = frozen(weights(128, 512, gated=gated, bias=True, dtype=torch.float32)), TransitionOptions(1e-5, True)
    with target("sm_90") as kernels:
        transitions.forward(ROWS, None, parameters, options, save=False)
    resources = report(kernels[-1])
    assert [kernel.metadata.name for kernel in kernels] == ["split_kernel"] * (3 if gated else 2) + ["forward_kernel"]
    assert resources.spills <= 6 and resources.shared <= SHARED_LIMITS["sm_90"] // 2 and not resources.serialised
    assert "HGMMA" in resources.mix and wrong_descriptors(kernels[-1]) == []


@pytest.mark.slow
@pytest.mark.parametrize("arch", TARGETS)
def test_every_card_has_the_shared_memory(arch: str) -> None:
    for kernel in of_a_multiplication(arch, outgoing=False):
        assert report(kernel).shared <= SHARED_LIMITS[arch], kernel.metadata.name
