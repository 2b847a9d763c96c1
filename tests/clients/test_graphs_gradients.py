"""Blocks that a checkpoint computes again, replayed from recordings of both passes."""

from __future__ import annotations

import gc
import itertools
import weakref
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from torch import Tensor

from evoattn.clients.graphs import FIRST, call_kinds, gradients, steps
from tests.clients.recording import Block, Trained, draw, saved


def test_steps_of_a_trunk_have_the_gradients_of_the_originals() -> None:
    trunk = Trained()
    for seed in range(3):
        trunk.step(10 * seed)
        trunk.update(0.9)
    assert trunk.count.passed_on == {FIRST: 6} and trunk.count.replaced == 3 * 12 - 6
    assert trunk.recorder.recorded == 2, "the forward without gradients, and both passes"


def test_other_calls_that_autograd_sees_run_as_they_were() -> None:
    """Without a checkpoint whatever the forward saves is kept until the backward comes."""
    trunk = Trained()
    for seed in range(3):
        trunk.step(seed, lambda block, *args: block(*args))
    assert set(trunk.count.passed_on) == {"a gradient may be wanted"} and not trunk.recorder.recorded


def test_hooks_that_see_what_is_saved_see_what_the_original_saves() -> None:
    trunk, seen = Trained(), list[Tensor]()
    for seed in range(3):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: seen.append(x) or x.detach(), lambda x: x):
            trunk.step(seed)
    assert seen and trunk.count.passed_on["a gradient may be wanted"] == 18


def test_a_length_of_its_own_has_its_own_recording() -> None:
    trunk = Trained()
    for seed, length in enumerate((3, 5, 3, 5)):
        trunk.step(seed, length=length)
    assert trunk.recorder.recorded == 4


def test_the_forward_is_replayed_before_a_backward_only_if_it_must_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here two blocks are computed again together."""
    trunk, forwards = Trained(2), list[int]()
    for seed in range(3):
        trunk.step(seed)
    replay = gradients.Passes._replay
    monkeypatch.setattr(gradients.Passes, "_replay", lambda *args: forwards.append(1) or replay(*args))
    expected = []
    for together in (False, True):
        torch.manual_seed(0)
        x = draw(7).requires_grad_()
        if together:
            y = saved(lambda x: trunk.blocks[1](trunk.blocks[0](x, trunk.mask), trunk.mask), x)
        else:
            y = saved(trunk.blocks[1], saved(trunk.blocks[0], x, trunk.mask), trunk.mask)
        y.square().sum().backward()
        expected.append(x.grad)
        assert len(forwards) == (5 if together else 2), "the second time one more"
    assert torch.equal(*expected)  # type: ignore[arg-type]


@pytest.mark.parametrize("frozen", ["weights", "one weight"])
def test_what_is_frozen_has_no_gradient(frozen: str) -> None:
    trunk = Trained(3)
    for block in trunk.blocks:
        for name, weight in block.named_parameters():
            weight.requires_grad_(frozen == "one weight" and name != "product.weight")
    for seed in range(3):
        x = y = draw(seed).requires_grad_()
        for block in trunk.blocks:
            block.zero_grad()
            y = saved(block, y, trunk.mask)
        y.sum().backward()
        assert x.grad is not None
        for weight in trunk.blocks[0].parameters():
            assert (weight.grad is None) == (not weight.requires_grad)
    assert trunk.count.replaced == 18 - 6


def test_gradients_add_up_and_hooks_of_weights_run() -> None:
    trunk = Trained(1)
    kind = trunk.settled()
    weight, seen = trunk.blocks[0].product.weight, list[Tensor]()
    handle = weight.register_hook(lambda g: seen.append(g) or 2 * g)
    for _ in range(2):
        trunk.replayed(kind, draw(1)).sum().backward()
    handle.remove()
    assert len(seen) == 2 and torch.equal(weight.grad, 2 * (seen[0] + seen[1]))


def test_a_graph_that_is_kept_gives_the_same_gradients_twice() -> None:
    trunk = Trained(1)
    kind = trunk.settled()
    x, weight = draw(7).requires_grad_(), trunk.blocks[0].product.weight
    y = trunk.replayed(kind, x)
    first, second = (torch.autograd.grad(y, [x, weight], draw(8), retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("which", ["the input", "a weight"])
def test_what_is_written_to_raises_as_torch_does(which: str) -> None:
    trunk = Trained(1)
    kind = trunk.settled()
    x = draw(1).requires_grad_() * 1
    y = trunk.replayed(kind, x).sum()
    with torch.no_grad():
        (x.detach() if which == "the input" else trunk.blocks[0].product.weight).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_other_inputs_may_be_written_to_unless_the_forward_is_needed_again() -> None:
    """A mask that is only multiplied by what needs no gradient, say: torch would not save it."""
    trunk = Trained(1)
    kind, block = trunk.settled(), trunk.blocks[0]
    for again in (False, True):
        x, mask = draw(1).requires_grad_(), trunk.mask.clone()
        y = kind.replay([x, mask], trunk.steps._known[block].seen, None)
        if again:
            trunk.replayed(kind, draw(2))
        mask.zero_()
        if again:
            with pytest.raises(RuntimeError, match="an input without a gradient was written to"):
                y.sum().backward()
        else:
            y.sum().backward()
            assert x.grad is not None and x.grad.abs().sum() > 0


def test_a_mask_of_inference_mode_is_taken() -> None:
    trunk = Trained(1)
    with torch.inference_mode():
        mask = torch.ones(3, 1)
    for seed in range(4):
        x = draw(seed).requires_grad_()
        saved(lambda x: trunk.blocks[0](x, mask), x).sum().backward()
        assert x.grad is not None
    assert trunk.count.replaced >= 2


def test_results_may_be_changed_in_place() -> None:
    trunk = Trained(1)
    kind, found = trunk.settled(), []
    for place in (True, False):
        torch.manual_seed(0)
        x = draw(1).requires_grad_()
        y = trunk.replayed(kind, x)
        y = y.add_(1) if place else y + 1
        (y * draw(2)).square().sum().backward()
        found.append(x.grad)
    assert torch.equal(*found)  # type: ignore[arg-type]


def test_a_weight_that_is_there_twice_has_one_gradient() -> None:
    trunk = Trained(2)
    for blocks in (trunk.blocks, trunk.twin):
        for block in blocks:
            block.wide.weight = block.product.weight
    for seed in range(4):
        trunk.step(seed)
    assert trunk.count.replaced >= 8


def test_hooks_of_a_backward_inside_run() -> None:
    trunk, seen = Trained(3), list[int]()
    for block in trunk.blocks:
        block.product.register_full_backward_hook(lambda *_: seen.append(1))
    for seed in range(3):
        trunk.step(seed)
    assert len(seen) == 9 and trunk.count.replaced == 0


def test_another_kind_that_is_recorded_before_a_backward_leaves_the_right_weights() -> None:
    """Kinds of one structure share a twin: what it has of the first block is gone when the second one is recorded."""
    trunk = Trained(2)
    trunk.settled()

    def both(first: Any, second: Any, x: Tensor) -> Tensor:
        return second(first(x, torch.ones(3, 1))[:2], torch.ones(2, 1))  # type: ignore[no-any-return]

    for seed in range(4):
        found = []
        for first, second in (trunk.blocks, [x.original for x in trunk.twin]):
            torch.manual_seed(seed)
            x = draw(seed).requires_grad_()
            saved(lambda x, f=first, g=second: both(f, g, x), x).square().sum().backward()
            found.append(x.grad)
        assert torch.equal(*found), seed  # type: ignore[arg-type]


def test_a_replay_that_fails_leaves_the_backward_before_right(monkeypatch: pytest.MonkeyPatch) -> None:
    trunk = Trained(2)
    kind = trunk.settled()
    found = []
    for fails in (False, True):
        torch.manual_seed(0)
        x = draw(1).requires_grad_()
        y = trunk.replayed(kind, x)
        if fails:
            assert kind._passes is not None
            other = trunk.steps._known[trunk.blocks[1]].seen
            with monkeypatch.context() as patched:
                patched.setattr(kind._passes._forward, "replay", mock.Mock(side_effect=MemoryError))
                with pytest.raises(MemoryError):
                    kind.replay([draw(2), trunk.mask], other, None)
        state = torch.get_rng_state()
        y.square().sum().backward()
        assert torch.equal(torch.get_rng_state(), state)
        found.append(x.grad)
    assert torch.equal(*found)  # type: ignore[arg-type]


def test_recordings_that_do_not_pay_end() -> None:
    trunk = Trained(1)
    for length in range(2, 14):
        for seed in range(3):
            trunk.step(seed, length=length)
    assert trunk.recorder.recorded <= steps._TRIED + 1 and trunk.count.passed_on[call_kinds.MOVES] > 0


def test_second_derivatives_are_refused() -> None:
    trunk = Trained(1)
    x = draw(1).requires_grad_()
    (dx,) = torch.autograd.grad(trunk.replayed(trunk.settled(), x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        dx.sum().backward()


def test_a_recording_that_was_dropped_still_has_its_backward() -> None:
    trunk = Trained(1)
    kind, x = trunk.settled(), draw(1).requires_grad_()
    y, passes = trunk.replayed(kind, x), weakref.ref(kind._passes)  # type: ignore[arg-type]
    kind.drop()
    trunk.steps.release()
    y.sum().backward()
    assert x.grad is not None
    del y
    gc.collect()
    assert passes() is None


def test_a_backward_whose_forward_is_lost_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    trunk = Trained(1)
    kind = trunk.settled()
    first, _ = (trunk.replayed(kind, draw(seed).requires_grad_()).sum() for seed in (1, 2))
    assert kind._passes is not None
    monkeypatch.setattr(kind._passes._forward, "is_valid", lambda: False)
    with pytest.raises(RuntimeError, match="run the step again"):
        first.backward()


@pytest.mark.parametrize("wrong", ["a gradient", "a result", "random numbers"])
def test_a_recording_that_does_something_else_is_not_used(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trunk = Trained()
    forward, backward = gradients.Passes.forward, gradients.Passes.backward

    def other_forward(self: Any, *args: Any) -> Any:
        if wrong == "random numbers":
            torch.rand(1)
        results, turn = forward(self, *args)
        return [x + (wrong == "a result") for x in results], turn

    def other_backward(self: Any, *args: Any) -> Any:
        return [None if x is None else x * (1.1 if wrong == "a gradient" else 1.0) for x in backward(self, *args)]

    monkeypatch.setattr(gradients.Passes, "forward", other_forward)
    monkeypatch.setattr(gradients.Passes, "backward", other_backward)
    for seed in range(3):
        trunk.step(seed)
    why = "it draws other random numbers" if wrong == "random numbers" else "a replay of its recording returned something else"
    assert trunk.count.replaced == 18 - 3 and trunk.count.passed_on[why] == 18 - 3


class Saving(torch.autograd.Function):
    """x, which its backward reads."""

    results: ClassVar[list[weakref.ref[Tensor]]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        result = x.clone()
        ctx.save_for_backward(result)
        Saving.results.append(weakref.ref(result))
        return result

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> Tensor:
        return dx + 0 * ctx.saved_tensors[0]


def test_a_recording_keeps_no_nodes_of_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    """They know the stream that they were made on. A result that its own function saves would keep itself."""
    trunk, original = Trained(2), Block.original
    monkeypatch.setattr(trunk.steps, "_original", lambda self, *args: Saving.apply(original(self, *args)))
    gc.collect()
    gc.disable()
    try:
        for seed in range(3):
            trunk.step(seed)
        alive = [x for x in Saving.results if x() is not None]
    finally:
        gc.enable()
    assert trunk.count.replaced and len(alive) <= 2, "those of the recording itself"


def test_a_replay_that_is_not_faster_is_not_used() -> None:
    trunk = Trained()
    trunk.recorder.takes = [*itertools.repeat(1.0, 40)]
    for seed in range(2):
        trunk.step(seed)
    assert trunk.count.replaced == 0 and trunk.count.passed_on["a replay of its recording is not faster"] == 2 * (12 - 3)


def test_other_threads_compute_as_they_are_while_a_backward_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd may compute a backward in a thread of its own, for which the recording one waits."""
    trunk = Trained(1)
    monkeypatch.setattr(gradients, "_recorders", [-1])
    trunk.step(1)
    assert trunk.count.passed_on == {"recorded by others": 2}


def test_a_gradient_that_is_nothing_but_rounding_may_be_another_one() -> None:
    generator = torch.Generator().manual_seed(0)
    true, *noises = (torch.randn(300, generator=generator) for _ in range(4))
    y, again, other = (1e-9 * x for x in noises)
    assert gradients._is_near(other, y, again)
    little = true + 0.004 * noises[0]
    assert gradients._is_near(true + 1e-3 * noises[1], true, little)
    assert not gradients._is_near(true * 1.1, true, little), "a value of another call"
    assert gradients._is_near(None, None, None) and not gradients._is_near(None, y, again)
    large = 1000 * torch.randn(10_000, generator=generator).half()
    assert not gradients._is_near(torch.zeros_like(large), large, large), "a norm that float16 cannot hold"
