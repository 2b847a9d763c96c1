"""The card that is planned for, autocast around a plan, and shared constants."""

import sys

import pytest
import torch
from torch import Tensor

from evoattn.core import devices
from evoattn.core.devices import Card

CARD = Card("Some GPU", (9, 0), processors=132, shared_memory=1, cache_bytes=1, clusters=(132, 66, 40))
CPU = torch.device("cpu")


def test_plans_are_for_the_card_that_is_planned_for() -> None:
    other = Card("Another GPU", (8, 0), processors=108, shared_memory=1, cache_bytes=1)
    assert devices.planned() is None
    with devices.planned_for(CARD):
        assert devices.card(torch.device("meta")) == CARD
        with devices.planned_for(other):
            assert (devices.card(CPU), devices.processors(CPU)) == (other, 108)
        assert devices.planned() == CARD
    with pytest.raises(KeyError), devices.planned_for(CARD):
        raise KeyError
    assert devices.planned() is None
    assert devices.card(CPU) is None


def test_how_many_clusters_run_is_known_or_bounded() -> None:
    assert [CARD.clusters_of(size) for size in (1, 3, 4)] == [132, 40, 33]


def test_autocast_is_off_inside_and_only_there() -> None:
    def run(x: Tensor) -> Tensor:
        return x @ x

    x = torch.ones(2, 2)
    uncast = devices.without_autocast(x, run)
    with torch.autocast("cpu", torch.bfloat16):
        assert uncast(x).dtype == torch.float32
        assert run(x).dtype == torch.bfloat16
    assert uncast(x).dtype == torch.float32
    assert devices.without_autocast(x.to("meta"), run) is run


def test_a_constant_is_made_once_and_is_no_inference_tensor() -> None:
    with torch.inference_mode():
        x = devices.constant(2.5, (3,), torch.float64, CPU)
    assert x is devices.constant(2.5, (3,), torch.float64, CPU)
    assert x.tolist() == [2.5] * 3
    assert not x.is_inference()
    assert devices.constant(2.5, (3,), torch.float32, CPU).dtype == torch.float32


def test_packages_are_found_without_being_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    assert devices.installed("torch")
    assert not devices.installed("no_such_package")
    assert not devices.installed("no_such_package.module")
    monkeypatch.setitem(sys.modules, "stand_in", object())
    assert devices.installed("stand_in"), "a stand-in that tests put in its place"
    assert devices.installed_version("no_such_package") is None
