"""The kernels of float32 products, compiled for every supported GPU without one: shared memory, spills and wgmma."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from evoattn.pair.products import steps
from tests.helpers.ahead_of_time import SHARED_LIMITS, TARGETS, report, target


def halves(rows: int, channels: int, low: bool) -> steps.Halves:
    return steps.Halves.empty(rows, channels, torch.device("cpu"), low=low)


def compiled(arch: str, m: int, n: int, low: bool) -> Any:
    with target(arch) as kernels:
        steps.product(halves(m, 768, low), halves(n, 768, low), torch.empty(n), opened=True)
    return kernels[0]


@pytest.mark.parametrize(("m", "n"), [pytest.param(684, 3072, marks=pytest.mark.slow), (684, 768), (152, 768)], ids=str)
@pytest.mark.parametrize("low", [True, False], ids=["exact", "tf32"])
def test_products_on_an_h100(m: int, n: int, low: bool) -> None:
    resources = report(compiled("sm_90", m, n, low))
    assert resources.spills == 0 and resources.shared <= SHARED_LIMITS["sm_90"] and not resources.serialised
    assert ("HGMMA" in resources.mix) == (m > 152)


@pytest.mark.slow
@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize("low", [True, False], ids=["exact", "tf32"])
def test_every_card_has_a_tile_that_fits(arch: str, low: bool) -> None:
    resources = report(compiled(arch, 684, 768, low))
    assert resources.spills == 0 and resources.shared <= SHARED_LIMITS[arch]


def test_a_product_written_in_bfloat16_on_an_h100() -> None:
    with target("sm_90") as kernels:
        steps.product(halves(684, 768, False), halves(3072, 768, False), torch.empty(3072), dtype=torch.bfloat16)
    resources = report(kernels[0])
    assert resources.spills == 0 and resources.shared <= SHARED_LIMITS["sm_90"] and not resources.serialised
    assert "HGMMA" in resources.mix


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_is_split_without_spills(dtype: torch.dtype) -> None:
    x = torch.empty(608, 1536, dtype=dtype)
    with target("sm_90") as kernels:
        steps.split(x, x, x, kind="swiglu", low=dtype == torch.float32)
        steps.split(x, x, kind="gate", low=dtype == torch.float32)
        steps.split(x[:, :768].float(), x[:, :768].float(), x[:, :768].float(), kind="adapt")
    assert [report(kernel).spills for kernel in kernels] == [0, 0, 0]


def test_tiles_keep_processors_busy() -> None:
    """Few rows are taken in flat tiles, so that more programs run."""
    device = torch.device("cpu")
    few, many = (steps.tile_of(m, 768, 768, device, low=True) for m in (16, 4096))
    assert few.m * few.n < many.m * many.n
