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

from evoattn.clients import graphs
from evoattn.clients.graphs import FIRST, checkpoints
from evoattn.clients.graphs.steps import AGAIN
from evoattn.clients.site import Count
from tests.clients.recording import Trained, draw
from tests.helpers.recorders import Traced

saved = functools.partial(checkpoint, use_reentrant=False)


def settled(blocks: int) -> Trained:
    """A trunk whose blocks are replayed by now."""
    trunk = Trained(blocks)
    for seed in range(4):
        trunk.step(seed, saved)
    return trunk


def surrounded(block: Any, x: Tensor, mask: Tensor) -> Tensor:
    """A block between operators that save tensors too, so that the checkpoint has a second pass."""
    y: Tensor = saved(lambda x: block(x.sin(), mask).cos() * x, x)
    return y


def agree(trunk: Trained, seed: int, run: Callable[..., Tensor]) -> None:
    """A function of x has the gradients of the original blocks. It gets what calls a block, and what a checkpoint is."""
    weights = [p for block in trunk.blocks for p in block.parameters()]
    found = []
    for call, around in (
        (lambda block, x: block(x, trunk.mask), saved),
        (lambda block, x: block.original(x, trunk.mask), lambda run, *args: run(*args)),
    ):
        torch.manual_seed(seed)
        x = draw(seed).requires_grad_()
        y = run(x, call, around)
        found.append([y.detach(), *torch.autograd.grad(y.square().sum(), [x, *weights], allow_unused=True)])
    for a, b in zip(*found, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


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
    trunk = Trained()

    def run(x: Tensor, call: Any, around: Any) -> Tensor:
        for block in trunk.blocks:
            x = around(lambda x, block=block: call(block, x.sin()).cos() * x, x)
        return x

    with set_checkpoint_early_stop(early):
        for seed in range(4):
            agree(trunk, seed, run)
    assert trunk.count.replaced == 4 * 6 - 3 and trunk.count.passed_on == {FIRST: 3, AGAIN: 4 * 6}


def test_several_blocks_in_one_checkpoint() -> None:
    trunk = Trained(4)

    def run(x: Tensor, call: Any, around: Any) -> Any:
        return around(lambda x: functools.reduce(lambda y, block: call(block, y), trunk.blocks, x), x)

    for seed in range(4):
        agree(trunk, seed, run)
    assert trunk.count.replaced == 4 * 4 - 3


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("blocks", [1, 2, 5])
def test_checkpoints_inside_a_checkpoint(blocks: int, early: bool) -> None:
    """The outer one has a second pass, in which each inner one begins anew."""
    trunk = Trained(blocks)

    def run(x: Tensor, call: Any, around: Any) -> Any:
        def every(x: Tensor) -> Tensor:
            for block in trunk.blocks:
                x = around(functools.partial(call, block), x.sin()).cos()
            return x

        return around(every, x)

    with set_checkpoint_early_stop(early):
        for seed in range(4):
            agree(trunk, seed, run)
    assert trunk.count.replaced > 0


def test_gradients_that_are_taken_inside_a_checkpoint() -> None:
    trunk = settled(2)
    first, second = trunk.blocks

    def run(x: Tensor, call: Any, around: Any) -> Any:
        def both(x: Tensor) -> Tensor:
            y = call(first, x.sin()).cos()
            (inner,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
            z: Tensor = call(second, y + inner).cos()
            return z

        return around(both, x)

    agree(trunk, 0, run)


class Outer(torch.nn.Module):
    """A block whose calls are recorded, with one inside whose calls are."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.block, self.linear = block, torch.nn.Linear(4, 4)

    def original(self, x: Tensor, mask: Tensor) -> Tensor:
        y: Tensor = self.linear(self.block(x, mask))
        return y

    forward = original


def test_a_frozen_block_that_is_recorded_beside_one_that_is_trained() -> None:
    trunk = settled(1)
    outer = type("Outer", (Outer,), {"forward": graphs.step(Outer.original, Count(), Traced(), shared=True)})
    torch.manual_seed(0)
    frozen, block = outer(trunk.kind().eval()).requires_grad_(False), trunk.blocks[0]

    def run(x: Tensor, call: Any, around: Any) -> Any:
        return around(lambda x: call(block, (call(block, x.sin()).cos() + call(frozen, x.detach())).cos()).cos(), x)

    for seed in range(5):
        agree(trunk, seed, run)


def test_a_second_derivative_is_an_error() -> None:
    trunk = settled(1)
    x = draw(1).requires_grad_()
    y = saved(trunk.blocks[0], x, trunk.mask)
    (gradient,) = torch.autograd.grad(y.sum() + x.pow(3).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(gradient.sum(), x)


def test_a_torch_with_other_names_replays_no_such_block(monkeypatch: pytest.MonkeyPatch) -> None:
    class Renamed:
        def __init__(self, target_frame_ref: Any, group: Any) -> None:
            def pack_hook(_: Any) -> Any:
                return target_frame_ref, group

            self.hook = pack_hook

    checkpoints.shows_checkpoints.cache_clear()
    monkeypatch.setattr("torch.utils.checkpoint._recomputation_hook", Renamed)
    assert not checkpoints.shows_checkpoints()
    monkeypatch.undo()
    monkeypatch.setattr(checkpoints, "shows_checkpoints", lambda: False)
    trunk = settled(2)
    assert set(trunk.count.passed_on) == {"a gradient may be wanted"}
    monkeypatch.undo()
    checkpoints.shows_checkpoints.cache_clear()
    assert checkpoints.shows_checkpoints()


def test_a_graph_that_is_kept_gives_the_same_gradients_twice() -> None:
    trunk = settled(1)
    for way in (saved, surrounded):
        x = draw(1).requires_grad_()
        y = way(trunk.blocks[0], x, trunk.mask) if way is surrounded else saved(trunk.blocks[0], x, trunk.mask)
        first, second = (torch.autograd.grad(y.square().sum(), x, retain_graph=True) for _ in range(2))
        assert torch.equal(first[0], second[0])
    assert trunk.count.replaced == 3


def test_a_replay_keeps_no_more_than_its_inputs() -> None:
    """Hooks around the checkpoint see what it and a replay save: inputs and weights."""
    trunk = settled(1)
    kept: list[Tensor] = []
    x = draw(1).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        y = saved(trunk.blocks[0], x, trunk.mask)
    inputs = {z.data_ptr() for z in (x, trunk.mask, *trunk.blocks[0].parameters())}
    assert trunk.count.replaced == 2 and inputs >= {y.data_ptr() for y in kept} >= inputs - {trunk.mask.data_ptr()}
    y.sum().backward()


def test_an_input_that_is_written_to_raises_as_torch_does() -> None:
    trunk = settled(1)
    x = draw(1).requires_grad_() * 1
    y = saved(trunk.blocks[0], x, trunk.mask).sum()
    x.detach().mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


@pytest.mark.parametrize("around", [saved, lambda run, x: run(x)])
def test_hooks_inside_a_checkpoint_see_what_the_original_saves(around: Callable[..., Tensor]) -> None:
    """Also those of another checkpoint than torch's."""
    trunk, seen = Trained(3), list[Tensor]()

    def way(block: Any, x: Tensor, mask: Tensor) -> Tensor:
        def run(x: Tensor) -> Tensor:
            with torch.autograd.graph.saved_tensors_hooks(lambda x: seen.append(x) or x.detach(), lambda x: x):
                y: Tensor = block(x, mask)
            return y

        return around(run, x)

    for seed in range(4):
        trunk.step(seed, way)
    assert set(trunk.count.passed_on) == {"a gradient may be wanted"} and not trunk.recorder.recorded
    assert len(seen) >= 4 * 3 * 6, "several tensors of each block"


def test_a_recording_that_is_dropped_between_both_passes() -> None:
    trunk = settled(2)
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
    trunk = settled(1)

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
