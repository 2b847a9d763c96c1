"""Modules that refer to themselves are freed, and weights that are written through `.data` are read."""

import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evoattn.clients import graphs
from evoattn.clients.graphs import FIRST
from evoattn.clients.graphs.modules import Seen
from evoattn.clients.site import Count
from tests.clients.recording import Trunk, Watched


class Owner:
    def __init__(self, module: Any) -> None:
        self.module = module

    def __call__(self, x: Tensor) -> Tensor:
        return x


REFERENCES: dict[str, Callable[[nn.Module], Any]] = {
    "list": lambda module: [module],
    "object": Owner,
    "bound method": lambda module: module.eval,
    "method of an object that has it": lambda module: Owner(module).__call__,
    "partial": lambda module: functools.partial(print, module),
    "function": lambda module: lambda: module,
    "class": lambda module: type("Holder", (), {"module": module}),
}


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("what", REFERENCES)
@pytest.mark.parametrize("where", ["module", "inner", "weight"])
def test_a_module_that_refers_to_itself_is_freed(what: str, where: str, shared: bool) -> None:
    trunk, watched = Trunk(), Watched()
    count = trunk.count if shared else watched.count
    modules: list[Any] = trunk.blocks if shared else [watched.module]
    for module in modules:
        inner = module.product if shared else module.first
        holder = {"module": module, "inner": inner, "weight": inner.weight}[where]
        object.__setattr__(holder, "me", REFERENCES[what](module))
    for _ in range(2):
        trunk.agrees() if shared else watched.agrees()
    assert sum(count.passed_on.values()) + count.replaced == (16 if shared else 12)
    known = (trunk if shared else watched).steps._known
    assert known
    gone = [weakref.ref(module) for module in modules]
    modules.clear()
    watched.module = None  # type: ignore[assignment]
    del module, inner, holder
    gc.collect()
    assert not any(ref() for ref in gone) and not known


def test_a_module_that_refers_to_itself_is_replayed(watched: Watched) -> None:
    watched.module.me = [watched.module]  # type: ignore[assignment]
    watched.module.run = watched.module.eval  # type: ignore[assignment]
    watched.agrees()
    assert watched.replayed == 3
    trunk = Trunk()
    for block in trunk.blocks:
        block.me = [block]  # type: ignore[assignment]
    trunk.agrees()
    assert (trunk.count.replaced, trunk.recorder.recorded) == (5, 1)


def write(module: nn.Module) -> None:
    """Write weights as averages of them do, and optimizers that keep copies. No version changes."""
    for weight in module.parameters():
        version = weight._version
        weight.data.copy_(1.5 * weight)
        assert weight._version == version


@pytest.mark.parametrize("loop", ["none", "around each", "around the first"])
def test_weights_written_through_data_are_read_under_autocast(watched: Watched, loop: str) -> None:
    """Autocast keeps casts of weights, and a recording may keep them as long as one loop runs."""
    parent = nn.Identity()

    def sample(_: nn.Module) -> None:
        for _ in range(14):
            with torch.autocast("cpu", torch.bfloat16):  # each has a cache of its own
                watched.agrees(1)

    for turn in range(4):
        within = loop == "around each" or (loop == "around the first" and turn == 0)
        (graphs.loop(sample, Count()) if within else sample)(parent)
        write(watched.module)
    assert watched.replayed >= 4 * 10 and watched.reasons == {FIRST}


def test_weights_of_blocks_written_through_data_are_read_under_autocast() -> None:
    trunk = Trunk()

    def sample(_: nn.Module) -> None:
        for block in trunk.blocks:
            with torch.autocast("cpu", torch.bfloat16):
                trunk.agrees()
            write(block)

    graphs.loop(sample, Count())(nn.ModuleList(trunk.blocks))
    assert trunk.count.replaced == 8 * 8 - 3


def test_casts_are_kept_in_a_loop(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[bool] = []
    record = watched.recorder.record

    def noting(*args: Any, once: bool, **named: Any) -> Any:
        kept.append(once)
        return record(*args, once=once, **named)

    monkeypatch.setattr(watched.recorder, "record", noting)
    graphs.loop(lambda _: watched.agrees(), Count())(nn.ModuleList([watched.module]))
    watched.agrees()
    trunk = Trunk()
    record = trunk.recorder.record
    monkeypatch.setattr(trunk.recorder, "record", noting)
    graphs.loop(lambda _: trunk.agrees(), Count())(nn.ModuleList(trunk.blocks))
    assert kept == [True, False, False]


def test_a_look_is_of_weights_too() -> None:
    layer = nn.Linear(4, 4).eval()
    seen = Seen(layer)
    assert seen.holds() and [x.shape for x in seen.weights] == [(4, 4), (4,)]
    layer.weight.detach().add_(1)
    assert not seen.holds()
