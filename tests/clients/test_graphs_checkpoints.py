"""Blocks in a checkpoint that is not reentrant, replayed from recordings of both passes."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from evoattn.clients.graphs import FIRST
from evoattn.clients.graphs.steps import AGAIN
from tests.clients.recording import draw
from tests.clients.test_graphs_gradients import Trained

saved = functools.partial(checkpoint, use_reentrant=False)


def surrounded(block: Any, x: Tensor, mask: Tensor) -> Tensor:
    """A block between operators that save tensors too, so that the checkpoint has a second pass."""
    y: Tensor = saved(lambda x: block(x.sin(), mask).cos() * x, x)
    return y


def original(block: Any, x: Tensor, mask: Tensor) -> Tensor:
    y: Tensor = block.original(x.sin(), mask).cos() * x
    return y


def test_steps_of_a_trunk_have_the_gradients_of_the_originals() -> None:
    """The second pass of the first blocks runs as the first did, though their recording is there by then."""
    trunk = Trained()
    for seed in range(3):
        trunk.step(10 * seed, saved)
        trunk.update(0.9)
    assert trunk.count.passed_on == {FIRST: 3, AGAIN: 3} and trunk.count.replaced == 3 * 6 - 3
    assert trunk.recorder.recorded == 1, "both passes"


@pytest.mark.parametrize("early", [False, True])
def test_operators_around_a_block_are_computed_again(early: bool) -> None:
    trunk, twin = Trained(), Trained()
    with set_checkpoint_early_stop(early):
        for seed in range(4):
            found = []
            for of, way in ((trunk, surrounded), (twin, original)):
                torch.manual_seed(seed)
                x = y = draw(seed).requires_grad_()
                for block in of.blocks:
                    y = way(block, y, of.mask)
                weights = [p for block in of.blocks for p in block.parameters()]
                found.append([y, *torch.autograd.grad(y.square().sum(), [x, *weights], allow_unused=True)])
            for a, b in zip(*found, strict=True):
                assert (a is None and b is None) or torch.equal(a, b)
    assert trunk.count.replaced == 4 * 6 - 3 and trunk.count.passed_on == {FIRST: 3, AGAIN: 4 * 6}


def test_several_blocks_in_one_checkpoint() -> None:
    trunk, expected = Trained(4), Trained(4)
    for seed in range(4):
        found = []
        for of, way in ((trunk, saved), (expected, lambda run, x: run(x))):

            def run(x: Tensor, of: Trained = of) -> Tensor:
                for block in of.blocks:
                    x = (block if of is trunk else block.original)(x, of.mask)
                return x

            torch.manual_seed(seed)
            x = draw(seed).requires_grad_()
            found.append(torch.autograd.grad(way(run, x).square().sum(), x))
        assert torch.equal(found[0][0], found[1][0])
    assert trunk.count.replaced == 4 * 4 - 3


def test_a_checkpoint_inside_a_checkpoint() -> None:
    trunk, expected = Trained(2), Trained(2)
    for seed in range(4):
        found = []
        for of, way in ((trunk, saved), (expected, lambda run, *args: run(*args))):
            blocks = [block if of is trunk else functools.partial(type(block).original, block) for block in of.blocks]
            torch.manual_seed(seed)
            x = draw(seed).requires_grad_()
            y = way(lambda x, way=way, blocks=blocks, of=of: way(blocks[1], way(blocks[0], x.sin(), of.mask).cos(), of.mask), x)
            found.append(torch.autograd.grad(y.square().sum(), x))
        assert torch.equal(found[0][0], found[1][0])


def test_a_graph_that_is_kept_gives_the_same_gradients_twice() -> None:
    trunk = Trained(1)
    for seed in range(4):
        trunk.step(seed, saved)
    for way in (saved, surrounded):
        x = draw(1).requires_grad_()
        y = way(trunk.blocks[0], x, trunk.mask) if way is surrounded else saved(trunk.blocks[0], x, trunk.mask)
        first, second = (torch.autograd.grad(y.square().sum(), x, retain_graph=True) for _ in range(2))
        assert torch.equal(first[0], second[0])
    assert trunk.count.replaced == 3


def test_a_replay_keeps_no_more_than_its_inputs() -> None:
    """Hooks around the checkpoint see what it and a replay save: inputs and weights."""
    trunk = Trained(1)
    for seed in range(4):
        trunk.step(seed, saved)
    kept: list[Tensor] = []
    x = draw(1).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        y = saved(trunk.blocks[0], x, trunk.mask)
    inputs = {z.data_ptr() for z in (x, trunk.mask, *trunk.blocks[0].parameters())}
    assert trunk.count.replaced == 2 and inputs >= {y.data_ptr() for y in kept} >= inputs - {trunk.mask.data_ptr()}
    y.sum().backward()


def test_an_input_that_is_written_to_raises_as_torch_does() -> None:
    trunk = Trained(1)
    for seed in range(4):
        trunk.step(seed, saved)
    x = draw(1).requires_grad_() * 1
    y = saved(trunk.blocks[0], x, trunk.mask).sum()
    x.detach().mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def hooks_inside(block: Any, x: Tensor, mask: Tensor) -> Tensor:
    """Hooks of somebody else, inside the checkpoint."""

    def run(x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x):
            y: Tensor = block(x, mask)
        return y

    return run(x) if not torch.is_grad_enabled() else saved(run, x)  # type: ignore[no-any-return]


def of_another_kind(block: Any, x: Tensor, mask: Tensor) -> Tensor:
    """A checkpoint whose hooks are not those of torch's."""
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        y: Tensor = block(x, mask)
    return y


@pytest.mark.parametrize("way", [hooks_inside, of_another_kind])
def test_other_hooks_see_what_the_original_saves(way: Callable[..., Tensor]) -> None:
    trunk = Trained(3)
    for seed in range(4):
        trunk.step(seed, way)
    assert set(trunk.count.passed_on) == {"a gradient may be wanted"} and not trunk.recorder.recorded


def test_a_recording_that_is_dropped_between_both_passes() -> None:
    trunk = Trained(2)
    for seed in range(4):
        trunk.step(seed, saved)
    found: list[Tensor] = []
    for drop in (False, True):
        torch.manual_seed(0)
        x = draw(1).requires_grad_()
        y = surrounded(trunk.blocks[1], surrounded(trunk.blocks[0], x, trunk.mask), trunk.mask)
        if drop:
            trunk.steps.release()
        found += torch.autograd.grad(y.square().sum(), x)
    assert torch.equal(*found)


def test_a_first_pass_that_fails_leaves_hooks_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    trunk = Trained(1)
    for seed in range(4):
        trunk.step(seed, saved)

    def failing(*_: Any) -> None:
        raise ValueError("no memory")

    [kind] = [x for kinds in trunk.steps._kinds.values() for x in kinds.values() if x.checked]
    monkeypatch.setattr(type(kind), "replay", failing)
    outer: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: outer.append(1) or x, lambda x: x):
        with contextlib.suppress(ValueError):
            saved(trunk.blocks[0], draw(1).requires_grad_(), trunk.mask)
        outer.clear()
        draw(1).requires_grad_().sin()
    assert len(outer) == 1
