"""Blocks of one structure that share a recording."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evoattn.clients import graphs
from evoattn.clients.graphs import FIRST, call_kinds
from evoattn.clients.graphs.modules import Seen
from evoattn.clients.graphs.twins import Twin
from evoattn.clients.site import Count
from tests.clients.recording import Block, Trunk, Watched, draw


def test_blocks_share_a_recording() -> None:
    trunk = Trunk()
    before = [[x.clone() for x in (*block.parameters(), *block.buffers())] for block in trunk.blocks]
    trunk.agrees()
    assert (trunk.count.replaced, trunk.count.passed_on, trunk.recorder.recorded) == (5, {FIRST: 3}, 1)
    trunk.agrees(3)
    assert (trunk.count.replaced, trunk.recorder.recorded) == (13, 1)
    for block, were in zip(trunk.blocks, before, strict=True):
        assert all(map(torch.equal, (*block.parameters(), *block.buffers()), were)), "a block was written to"


def test_weights_that_change_are_read_by_a_shared_recording() -> None:
    trunk = Trunk()
    trunk.agrees()
    with torch.no_grad():
        trunk.blocks[6].product.weight.mul_(3)
    trunk.blocks[7].norm = nn.LayerNorm(4).eval()
    trunk.blocks[5].load_state_dict(trunk.blocks[4].state_dict())
    trunk.agrees()
    assert (trunk.count.replaced, trunk.recorder.recorded) == (13, 1)


@pytest.mark.parametrize("what", ["an attribute", "a list", "a width", "a class", "an object", "training"])
def test_blocks_of_another_structure_have_a_recording_of_their_own(what: str) -> None:
    trunk = Trunk()
    block = trunk.blocks[4]
    if what == "an attribute":
        block.norm.eps = 0.5
    elif what == "a list":
        block.p = [0.5]
    elif what == "a width":
        trunk.blocks[4] = trunk.kind(width=5)
    elif what == "a class":
        block.drop = nn.Identity()
    elif what == "an object":
        block.p = type("Mine", (), {"__getitem__": lambda self, i: 0.75})()
    else:
        block.drop.train()
        block.drop.p = 0.0
    trunk.agrees()
    assert trunk.count.replaced == 4 and sum(trunk.count.passed_on.values()) == 4


def test_blocks_in_inference_mode() -> None:
    trunk = Trunk()
    with torch.inference_mode():
        trunk.agrees()
    trunk.agrees()
    assert trunk.count.replaced == 10, "a mode has a recording of its own"


def test_a_block_that_draws_from_a_generator_of_its_own_is_not_recorded() -> None:
    trunk = Trunk()
    generator = torch.Generator()
    original = Block.original

    def drawing(self: Block, x: Tensor, mask: Tensor) -> Tensor:
        return original(self, x, mask) + torch.rand(1, generator=generator)

    trunk.steps._original = drawing
    with torch.no_grad():
        for block in trunk.blocks:
            block(draw(1), trunk.mask)
    assert trunk.count.replaced == 0
    assert any("it draws random numbers" in reason for reason in trunk.count.passed_on)


def test_what_a_block_makes_at_its_first_call_is_not_recorded() -> None:
    """A client's layer makes ours at its first call. That draws random numbers for weights."""
    trunk = Trunk()
    cache: weakref.WeakKeyDictionary[Block, Tensor] = weakref.WeakKeyDictionary()
    original, generator = Block.original, torch.Generator()

    def making(self: Block, x: Tensor, mask: Tensor) -> Tensor:
        if self not in cache:
            cache[self] = torch.rand(1, generator=generator)
        return original(self, x, mask)

    trunk.steps._original = making
    trunk.agrees()
    assert trunk.count.replaced == 5


def test_a_block_that_draws_more_when_it_is_replayed_is_not_replayed() -> None:
    trunk = Trunk()
    replay = call_kinds.CallKind.replay

    def more(self: Any, *args: Any, **named: Any) -> Any:
        torch.rand(1)
        return replay(self, *args, **named)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(call_kinds.CallKind, "replay", more)
        trunk.agrees()
    assert trunk.count.replaced == 0 and trunk.count.passed_on["it draws other random numbers"] == 5


def kinds(trunk: Trunk) -> list[call_kinds.CallKind]:
    """The kinds of calls of all blocks."""
    return [kind for group in trunk.steps._kinds.values() for kind in group.values()]


def test_recordings_of_blocks_are_freed() -> None:
    trunk = Trunk()
    trunk.agrees()
    [kind] = kinds(trunk)
    assert kind._twin is not None
    twin = weakref.ref(kind._twin)
    del kind
    trunk.steps.release()
    gc.collect()
    assert twin() is None


def test_recordings_go_with_the_last_block_of_a_structure() -> None:
    trunk = Trunk()
    trunk.agrees()
    twin = weakref.ref(kinds(trunk)[0]._twin)  # type: ignore[arg-type]
    for block in trunk.blocks:
        block.p = [0.5]
    trunk.agrees()
    assert len(kinds(trunk)) == 1, "nobody is of the first structure any more"
    del block
    trunk.blocks.clear()
    gc.collect()
    assert not kinds(trunk) and twin() is None


def test_streams_share_no_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream may read the twin's weights while another one writes them."""
    trunk = Trunk()
    for stream in (1, 2):
        monkeypatch.setattr(trunk.recorder, "state", lambda device, stream=stream: (stream,))
        trunk.agrees()
    first, second = kinds(trunk)
    addresses = [{y.data_ptr() for y in x._twin.module.parameters()} for x in (first, second)]  # type: ignore[union-attr]
    assert all(addresses) and not addresses[0] & addresses[1]


def test_lengths_share_a_twin() -> None:
    """It is made for the first one, and gone with the last recording."""
    trunk = Trunk()
    for length in (3, 5, 4):
        trunk.agrees(2, length)
    made: Any = {x._twin for x in kinds(trunk)}
    (twin,) = map(weakref.ref, made)
    assert (len(kinds(trunk)), trunk.recorder.recorded, trunk.count.replaced) == (3, 3, 15)
    with torch.no_grad():
        trunk.blocks[3].product.weight.mul_(3)
    trunk.agrees(6, 3)
    assert (trunk.recorder.recorded, trunk.count.replaced) == (3, 23), "an earlier length reads the weights of now"
    made.clear()
    trunk.steps.release()
    gc.collect()
    assert twin() is None


def test_another_length_is_recorded_without_a_look() -> None:
    """Once a recording has been checked, in the same state of torch. Another structure, or another argument, has a look."""
    trunk = Trunk(2)
    trunk.agrees(1, 3)
    trunk.agrees(1, 5)
    assert trunk.recorder.looked == [True, True], "the first length has not been checked yet"
    trunk.agrees(2, 3)
    trunk.agrees(2, 6)
    with torch.inference_mode():
        trunk.agrees(1, 7)
    trunk.blocks = [trunk.kind(width=5) for _ in range(2)]
    trunk.agrees(1, 3)
    assert trunk.recorder.looked == [True, True, False, True, True]


def test_another_argument_has_a_look() -> None:
    watched = Watched(lambda _, x, by, more=1: x * by * more)
    watched.agrees(4, torch.ones(1))
    watched.agrees(4, torch.ones(1), 2)
    watched.z = draw(1, 5, 4)
    for seed in range(4):
        watched(draw(seed, 5, 4), torch.ones(1), 2)
    assert watched.recorder.looked == [True, True, False]


def test_lengths_have_a_look_again_once_a_recording_without_one_fails() -> None:
    trunk = Trunk(4)
    original = Block.original

    def waiting(self: Block, x: Tensor, mask: Tensor) -> Tensor:
        return original(self, x, mask) * (1 if len(x) < 5 else float(mask.max()))

    forward = graphs.step(waiting, trunk.count, trunk.recorder, shared=True)
    trunk.kind = type("Block", (Block,), {"original": waiting, "forward": forward})
    trunk.blocks = [trunk.kind() for _ in range(4)]
    for length in (3, 4, 5, 6, 7):
        trunk.agrees(2, length)
    assert trunk.recorder.looked == [True, False, False, True, True, True]
    assert trunk.recorder.recorded == 2 and any("depend on values" in x for x in trunk.count.passed_on)


def test_a_twin_gets_weights_of_all_kinds() -> None:
    """Of several dtypes, strides and sizes, and those that are there twice. Autocast changes nothing."""

    def module(seed: int) -> nn.Module:
        a, b, turned, odd = (draw(seed + i, *shape) for i, shape in enumerate(((16, 8), (256,), (8, 16), (3,))))
        twice, half, short = draw(seed + 4, 128), draw(seed + 5, 256).half(), draw(seed + 6, 16)
        made = nn.Module()
        for i, x in enumerate((a, turned.t(), b, odd, half, twice, twice, torch.empty(0), short)):
            made.register_buffer(f"w{i}", x)
        return made

    first = module(0)
    twin, other = Twin(first, Seen(first)), module(100)
    targets, sources = Seen(twin.module).weights, Seen(other).weights
    assert all(map(torch.equal, targets, Seen(first).weights)), "their values stay"
    assert not {x.data_ptr() for x in targets if x.numel()} & {x.data_ptr() for x in Seen(first).weights}
    with torch.autocast("cpu", torch.bfloat16):
        twin.write(sources)
    assert all(map(torch.equal, targets, sources))
    assert [(x.dtype, x.stride()) for x in targets] == [(x.dtype, x.stride()) for x in sources]


def test_a_twin_of_tensors_that_share_memory() -> None:
    """Another module of the structure may have them apart."""

    def module(*buffers: Tensor) -> nn.Module:
        made = nn.Module()
        for i, x in enumerate(buffers):
            made.register_buffer(f"w{i}", x)
        return made

    base = torch.arange(512.0)
    together = module(base[:128], base[:128], base, base.view(-1))
    twin = Twin(together, Seen(together))
    apart = module(base[:128], base[128:256], base + 1, base + 2)
    twin.write(Seen(apart).weights)
    assert all(map(torch.equal, twin.weights, Seen(apart).weights))


class Setting:
    """What a block may have as an attribute."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __getitem__(self, which: int) -> float:
        return self.value


def test_an_object_at_the_address_of_another_one() -> None:
    trunk = Trunk(0)
    for value in (0.1, 0.2, 0.3, 0.4):  # each object dies with its blocks, and the next one gets its address
        setting = Setting(value)
        trunk.blocks = [trunk.kind() for _ in range(5)]
        for block in trunk.blocks:
            block.p = setting  # type: ignore[assignment]
        trunk.agrees()
        del block, setting
        trunk.blocks.clear()
    assert trunk.count.replaced == 8


class Refusing:
    """What cannot be copied."""

    def __deepcopy__(self, memo: object) -> Any:
        raise TypeError("there is one of these")

    def __getitem__(self, which: int) -> float:
        return 0.5


@pytest.mark.parametrize("what", ["copy", "first call"])
def test_a_twin_that_cannot_be_made(what: str) -> None:
    trunk, refusing, original = Trunk(), Refusing(), Block.original

    def failing(self: Block, x: Tensor, mask: Tensor) -> Tensor:
        if self not in trunk.blocks:
            torch.rand(1)
            raise torch.OutOfMemoryError("no room for a twin")
        return original(self, x, mask)

    if what == "copy":
        for block in trunk.blocks:
            block.p = refusing  # type: ignore[assignment]
    else:
        trunk.steps._original = failing
    trunk.agrees()
    assert trunk.count.replaced == 0
    assert any("there is one" in reason or "no room" in reason for reason in trunk.count.passed_on)


def test_tensors_that_are_no_buffers_are_not_shared() -> None:
    trunk = Trunk()
    for block in trunk.blocks:
        block.p = [torch.tensor(0.5)]  # type: ignore[list-item]
    trunk.agrees()
    assert trunk.count.passed_on == {"a module inside has a tensor that is neither parameter nor buffer": 8}


def test_tied_weights_are_another_structure() -> None:
    trunk = Trunk()
    for block in trunk.blocks[:4]:
        block.wide.weight = block.product.weight
    trunk.agrees()
    assert trunk.recorder.recorded == 2 and trunk.count.replaced == 2


def test_a_recording_that_is_not_valid_any_more_is_made_anew() -> None:
    trunk = Trunk()
    trunk.agrees()
    [kind] = kinds(trunk)
    assert kind._recording is not None
    kind._recording.is_valid = lambda: False
    trunk.agrees()
    assert trunk.recorder.recorded == 2 and trunk.count.replaced == 5 + 8 - 2


def test_the_first_call_of_a_twin_is_not_counted() -> None:
    trunk, counted, original = Trunk(), Count(), Block.original

    def counting(self: Block, x: Tensor, mask: Tensor) -> Tensor:
        counted.count_replaced()
        return original(self, x, mask)

    trunk.steps._original = counting
    with torch.no_grad():
        for block in trunk.blocks:
            block(draw(1), trunk.mask)
    assert counted.replaced == len(trunk.blocks)
