"""What modules contain: recordings see its changes, and a call that makes such changes is not recorded."""

import collections
import dataclasses
import functools
import itertools
import math
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evoattn.clients import graphs
from evoattn.clients.graphs import FIRST
from evoattn.clients.graphs.modules import Seen
from tests.clients.recording import Block, Trunk, Watched, draw


@dataclasses.dataclass
class Settings:
    by: float = 2.0
    inner: Any = None


@dataclasses.dataclass(slots=True)
class Slots:
    by: float = 2.0


class Defaults:
    by = 2.0


class Fields:
    """As ConfigDict of ml_collections: attributes are items of a dict inside."""

    def __init__(self, **fields: Any) -> None:
        object.__setattr__(self, "_fields", fields)

    def __getattr__(self, name: str) -> Any:
        return object.__getattribute__(self, "_fields")[name]

    def __setattr__(self, name: str, value: Any) -> None:
        self._fields[name] = value

    def times(self, x: Tensor) -> Tensor:
        return x * self.by


def closure(by: dict[str, float]) -> Callable[[Tensor], Tensor]:
    return lambda x: x * by["by"]


def set_items(held: Any, by: float) -> None:
    held.clear()
    held.add(by)


# What a module holds, how its forward reads it, and how it is changed.
HELD: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "list": (lambda: [2.0], lambda held: held[0], lambda held: held.__setitem__(0, 3.0)),
    "dict": (lambda: {"by": 2.0}, lambda held: held["by"], lambda held: held.update(by=3.0)),
    "dict in a list": (lambda: [{"by": 2.0}], lambda held: held[0]["by"], lambda held: held[0].update(by=3.0)),
    "list in a tuple": (lambda: ([2.0], 1), lambda held: held[0][0], lambda held: held[0].__setitem__(0, 3.0)),
    "set": (lambda: {2.0}, lambda held: max(held), lambda held: set_items(held, 3.0)),
    "deque": (lambda: collections.deque([2.0]), lambda held: held[0], lambda held: held.__setitem__(0, 3.0)),
    "defaultdict": (
        lambda: collections.defaultdict(float, by=2.0),
        lambda held: held["by"],
        lambda held: held.update(by=3.0),
    ),
    "bytearray": (lambda: bytearray([2]), lambda held: held[0], lambda held: held.__setitem__(0, 3)),
    "array": (lambda: torch.tensor([2.0]).numpy(), lambda held: float(held[0]), lambda held: held.__setitem__(0, 3.0)),
    "dataclass": (Settings, lambda held: held.by, lambda held: setattr(held, "by", 3.0)),
    "dataclass with slots": (Slots, lambda held: held.by, lambda held: setattr(held, "by", 3.0)),
    "namespace": (
        lambda: types.SimpleNamespace(by=2.0),
        lambda held: held.by,
        lambda held: setattr(held, "by", 3.0),
    ),
    "objects in turn": (
        lambda: Settings(inner=[Fields(by=2.0)]),
        lambda held: held.inner[0].by,
        lambda held: setattr(held.inner[0], "by", 3.0),
    ),
    "class of an object": (Defaults, lambda held: held.by, lambda held: setattr(type(held), "by", 3.0)),
    "class": (lambda: Defaults, lambda held: held.by, lambda held: setattr(held, "by", 3.0)),
    "partial": (
        lambda: functools.partial(lambda by: by["by"], {"by": 2.0}),
        lambda held: held(),
        lambda held: held.args[0].update(by=3.0),
    ),
    "bound method": (
        lambda: Fields(by=2.0).times,
        lambda held: held(torch.ones(())),
        lambda held: setattr(held.__self__, "by", 3.0),
    ),
    "closure": (
        lambda: [closure({"by": 2.0})],
        lambda held: held[0](torch.ones(())),
        lambda held: held[0].__closure__[0].cell_contents.update(by=3.0),
    ),
    "module that is not inside": (
        lambda: [nn.Linear(1, 1).eval()],
        lambda held: held[0].weight,
        lambda held: setattr(held[0].weight, "data", torch.full((1, 1), 3.0)),
    ),
    "tensor": (lambda: [torch.tensor(2.0)], lambda held: held[0], lambda held: setattr(held[0], "data", torch.tensor(3.0))),
    "sign of 0": (lambda: [0.0], lambda held: math.copysign(2.0, held[0]), lambda held: held.__setitem__(0, -0.0)),
}


@pytest.fixture(autouse=True)
def _defaults() -> Any:
    yield
    Defaults.by = 2.0


def reading(read: Callable[[Any], Any]) -> Watched:
    watched = Watched()
    kind = type(watched.module)
    watched.module = kind(functools.partial(apply, read=read))
    return watched


def apply(self: Any, x: Tensor, read: Callable[[Any], Any]) -> Tensor:
    return x * read(self.held)


@pytest.mark.parametrize("what", HELD)
@pytest.mark.parametrize("where", ["module", "inner", "class"])
def test_a_change_inside_what_a_module_holds_is_seen(what: str, where: str) -> None:
    make, read, change = HELD[what]
    watched = reading(read)
    held = make()
    if where == "module":
        watched.module.held = held
    elif where == "class":
        type(watched.module).held = held  # type: ignore[attr-defined]
    else:
        watched.module.first.held = held
        watched.module.body = lambda self, x: x * read(self.first.held)
    watched.agrees()
    assert watched.replayed == 3, watched.reasons
    change(held)
    watched.agrees()
    assert (watched.replayed, watched.recorder.recorded) == (6, 2), watched.reasons


@pytest.mark.parametrize("what", ["list", "dict", "dataclass", "namespace", "sign of 0"])
def test_blocks_whose_settings_change_share_no_old_recording(what: str) -> None:
    make, read, change = HELD[what]
    trunk = Trunk()
    original = Block.original

    def reads(self: Any, x: Tensor, mask: Tensor) -> Tensor:
        return original(self, x, mask) * read(self.held)

    kind = type("Block", (Block,), {"original": reads, "forward": graphs.step(reads, trunk.count, trunk.recorder, shared=True)})
    trunk.blocks = [kind() for _ in range(8)]
    held = make()
    for block in trunk.blocks:
        block.held = held  # type: ignore[assignment]
    trunk.agrees()
    assert trunk.count.replaced == 5
    change(held)
    trunk.agrees()
    assert (trunk.count.replaced, trunk.recorder.recorded) == (10, 2)


def test_equal_settings_of_their_own_do_not_part_blocks() -> None:
    trunk = Trunk()
    for block in trunk.blocks:
        block.settings = Settings(inner=[1, 2])  # type: ignore[assignment]
    trunk.agrees()
    assert (trunk.count.replaced, trunk.recorder.recorded) == (5, 1)


def test_a_value_that_is_set_again_is_no_change(watched: Watched) -> None:
    watched.module.held, watched.module.scale = {"size": 1000}, 1000.5
    watched.agrees()
    for seed in range(4):
        watched.module.held = {"size": int(f"{1000}")}
        watched.module.scale = float(f"{1000.5}")
        watched(draw(seed))
    assert watched.replayed == 7
    watched.module.held = {"size": 1000.0}
    watched(draw(1))
    assert watched.replayed == 7, "1000 and 1000.0 are equal, and not the same"


class Gelu(nn.Module):
    def activate(self, x: Tensor) -> Tensor:
        return x + 1

    def forward(self, x: Tensor) -> Tensor:
        return self.activate(x)


@pytest.mark.parametrize("where", ["class", "object", "forward", "torch's class"])
def test_methods_that_are_put_in_place_are_called(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(lambda self, x: self.gelu(x))
    watched.module.gelu = Gelu().eval()
    watched.agrees()

    def activate(self: Any, x: Tensor) -> Tensor:
        return 2 * x

    if where == "class":
        monkeypatch.setattr(Gelu, "activate", activate)
    elif where == "forward":
        monkeypatch.setattr(Gelu, "forward", activate)
    elif where == "object":
        watched.module.gelu.activate = types.MethodType(activate, watched.module.gelu)
    else:
        forward = nn.Linear.forward
        monkeypatch.setattr(nn.Linear, "forward", lambda self, x: 2 * forward(self, x))
    watched.agrees()
    assert (watched.replayed, watched.recorder.recorded) == (6, 2)


def count_up(self: Any) -> None:
    self.calls = getattr(self, "calls", 0) + 1


def of_class(self: Any) -> None:
    type(self).seen = getattr(type(self), "seen", 0) + 1


EFFECTS: dict[str, Callable[[Any], None]] = {
    "attribute": count_up,
    "attribute of an inner module": lambda self: count_up(self.second[0]),
    "list": lambda self: self.held["log"].append(1),
    "object": lambda self: count_up(self.held["settings"]),
    "method of a list": lambda self: self.note(1),
    "class": of_class,
    "buffer": lambda self: self.steps.add_(1),
    "module that is not inside": lambda self: count_up(self.held["parent"][0]),
}


@pytest.mark.parametrize("what", EFFECTS)
def test_what_a_forward_does_to_its_modules_goes_on(what: str) -> None:
    done: list[int] = []

    def body(self: Any, x: Tensor) -> Tensor:
        EFFECTS[what](self)
        STEPS[0] += 1
        return x

    watched = Watched(body)
    module = watched.module
    module.held = {"log": [], "settings": Settings(), "parent": [nn.Identity()]}
    module.note = done.append
    module.register_buffer("steps", torch.zeros(()))
    STEPS[0] = 0
    for seed in range(12):
        watched(draw(seed))
    assert STEPS[0] == 12 and not watched.recorder.recorded
    assert watched.count.passed_on == {FIRST: 3, "it changes its modules": 9}


STEPS = [0]
"""How often a body ran. Functions do not hold it, so it is not compared."""


def test_a_cache_that_the_first_call_of_a_module_fills() -> None:
    def body(self: Any, x: Tensor) -> Tensor:
        self.cache.setdefault(x.shape[-1], 2.0)
        return x * self.cache[x.shape[-1]]

    watched = Watched(body)
    watched.module.cache = {}
    for seed in range(10):
        watched(draw(seed))
    assert watched.replayed == 6, "one call later than without a cache"
    watched.agrees(2)


def test_blocks_that_count_their_calls_are_not_recorded() -> None:
    trunk, original = Trunk(), Block.original

    def counting(self: Any, x: Tensor, mask: Tensor) -> Tensor:
        count_up(self)
        return original(self, x, mask)

    trunk.steps._original = counting
    for seed in range(6):
        trunk.agrees(seed)
    assert [block.calls for block in trunk.blocks] == [6] * 8
    assert not trunk.recorder.recorded and trunk.count.passed_on == {FIRST: 24, "it changes its modules": 24}


@pytest.mark.parametrize(
    ("held", "reason"),
    [
        (itertools.count(), "a module inside has a count, whose changes cannot be seen"),
        (torch.zeros(100_000).numpy(), "a module inside has an array of more than 64 KB, whose changes cannot be seen"),
        ([[] for _ in range(2000)], "a module inside has more than 1,024 lists, dicts and objects in its attributes"),
    ],
    ids=["iterator", "array", "many"],
)
def test_what_cannot_be_compared_is_not_recorded(held: Any, reason: str) -> None:
    watched = Watched()
    watched.module.held = [held]
    watched.agrees()
    assert watched.count.passed_on == {reason: 6} and not watched.recorder.recorded


def test_blocks_that_cannot_be_compared_are_not_recorded() -> None:
    trunk = Trunk()
    for block in trunk.blocks:
        block.held = itertools.count()  # type: ignore[assignment]
    trunk.agrees()
    assert trunk.count.passed_on == {"a module inside has a count, whose changes cannot be seen": 8}


class Unreadable:
    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("nobody may look")


def test_what_cannot_be_looked_at_is_not_recorded() -> None:
    for held, reason in (
        (torch.jit.script(nn.Linear(4, 4)), "a module inside is a ScriptModule"),
        (Unreadable(), "a module inside cannot be compared: RuntimeError: nobody may look"),
    ):
        watched = Watched()
        watched.module.held = held
        watched.module.eval()
        watched.agrees()
        assert watched.count.passed_on == {reason: 6}


def test_what_is_no_obstacle_any_more_is_recorded() -> None:
    watched = Watched(lambda self, x: self.lazy(x))
    watched.module.lazy = nn.LazyLinear(4).eval()
    assert Seen(watched.module).obstacle == "a weight is of a subclass of Tensor"
    watched.agrees(7)
    assert watched.replayed == 4, watched.reasons
    watched.module.first.weight = nn.Parameter(draw(2, 4, 4).as_subclass(Mine))
    assert Seen(watched.module).obstacle
    watched(draw(1))
    watched.module.first.weight = nn.Parameter(draw(1, 4, 4))
    watched.agrees()
    assert watched.replayed == 7 and watched.reasons == {FIRST, "a weight is of a subclass of Tensor"}


class Mine(Tensor):
    pass


def test_objects_that_refer_to_each_other() -> None:
    first, second = Settings(), Settings()
    first.inner, second.inner = second, [first]
    watched = Watched(lambda self, x: x * self.held.inner.by)
    watched.module.held = first
    watched.agrees()
    second.by = 3.0
    watched.agrees()
    assert watched.replayed == 6
