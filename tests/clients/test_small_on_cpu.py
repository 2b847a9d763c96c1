"""On a CPU the client's own code computes small calls, which take evoattn longer, and no call is prepared for a compiler."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evoattn.clients import calls, layers, site
from evoattn.clients.calls import FEW_ON_CPU, additive
from evoattn.clients.layers import TRANSITION_ON_CPU
from evoattn.clients.openfold3 import _additive
from evoattn.clients.protenix import _single
from evoattn.clients.site import Count, repeated
from evoattn.core import attempts
from evoattn.nn import AttentionPairBias, Transition
from evoattn.nn.submodules import has_hooks_inside
from tests.clients.standins import CHANNELS, edges, filled, normal, pair_blocks
from tests.clients.standins.pair_blocks import Pairs

HEADS, LENGTH = 4, 7


def limit(monkeypatch: pytest.MonkeyPatch, residues: int) -> None:
    monkeypatch.setattr(calls, "few_on_cpu", lambda _: residues)


@pytest.mark.parametrize("replace", [additive, _additive, _single])
def test_an_attention_of_few_scores_is_left_to_the_client(replace: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not while a graph is recorded."""
    q, bias, count = normal(LENGTH, HEADS, LENGTH, 4), normal(1, HEADS, LENGTH, LENGTH), Count()
    forward = replace(lambda *_: torch.zeros(()), count)

    def is_left() -> bool:
        return not forward(q, q, q, bias if replace is _single else [bias]).ndim

    limit(monkeypatch, LENGTH + 1)
    assert is_left()
    with repeated():
        assert not is_left()
    limit(monkeypatch, LENGTH)
    assert not is_left()
    assert (count.replaced, dict(count.passed_on)) == (2, {FEW_ON_CPU: 1})


def test_a_block_of_few_entries_is_left_to_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its modules are not looked at. A larger call is ours, with gradients and without."""
    pair_blocks.stand_in(monkeypatch)
    block, z, mask, count = filled(Pairs()).eval(), normal(1, LENGTH, LENGTH, CHANNELS), edges(1), Count()
    forward, swaps = layers.layer(Pairs.forward, count), layers._swaps
    limit(monkeypatch, LENGTH + 1)
    for gradients in (False, True):
        with torch.set_grad_enabled(gradients):
            assert torch.equal(forward(block, z, mask), block(z, mask))
    assert block not in swaps and (count.replaced, dict(count.passed_on)) == (0, {FEW_ON_CPU: 2})
    limit(monkeypatch, LENGTH)
    torch.testing.assert_close(forward(block, z, mask), block(z, mask))
    assert count.replaced == 1


def test_a_call_that_asks_for_a_kernel_is_never_left_to_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client's kernels may fail on a CPU."""
    limit(monkeypatch, 2)
    monkeypatch.setattr(layers, "_current", lambda *_: (None, "ours"))

    def original(self: Any, z: Tensor, use_lma: bool = False, triangle_attention: str = "torch") -> None:
        """Computes nothing."""

    forward, z = layers.layer(original, count := Count()), torch.ones(1, 2)
    forward(nn.Identity(), z, use_lma=False, triangle_attention="torch")
    assert count.passed_on == {FEW_ON_CPU: 1}
    forward(nn.Identity(), z, use_lma=True)
    forward(nn.Identity(), z, True)
    forward(nn.Identity(), z, triangle_attention="cuequivariance")
    assert count.passed_on == {FEW_ON_CPU: 1, "ours": 3}


def test_entries_are_those_of_the_largest_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    s, z, mask = torch.ones(1, LENGTH, 5), torch.ones(1, LENGTH, LENGTH, 2), torch.ones(1, LENGTH, LENGTH)
    limit(monkeypatch, LENGTH)
    assert calls.has_few_entries_on_cpu((None, s, "x", mask)) and not calls.has_few_entries_on_cpu((s, z, mask))
    assert not calls.has_few_entries_on_cpu(()) and not calls.has_few_entries_on_cpu((s.to("meta"),))
    with repeated():
        assert not calls.has_few_entries_on_cpu((s,))


def test_an_attention_with_pair_bias_of_few_scores_is_left_to_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pair representation has more entries than itself."""
    a, z = normal(LENGTH, LENGTH, 8), normal(LENGTH, LENGTH, LENGTH, 4)
    swap: Any = type("Swap", (), {"layer": AttentionPairBias(8, 4, 4, HEADS)})
    limit(monkeypatch, LENGTH + 1)
    assert layers.slower_on_cpu(swap, (a, None, z)) == FEW_ON_CPU
    swap.layer = nn.Identity()
    assert not layers.slower_on_cpu(swap, (a, None, z))
    swap.layer = AttentionPairBias(8, 4, 4, HEADS)
    limit(monkeypatch, LENGTH)
    assert not layers.slower_on_cpu(swap, (a, None, z))


def test_a_transition_of_any_size_is_left_to_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    swap: Any = type("Swap", (), {"layer": Transition(8)})
    limit(monkeypatch, 1)
    for x, left in ((torch.empty(1).expand(1 << 40, 8), True), (torch.empty(8, device="meta"), False)):
        assert layers.slower_on_cpu(swap, (x,)) == (TRANSITION_ON_CPU if left else "")
    with repeated():
        assert not layers.slower_on_cpu(swap, (torch.ones(8),))


@pytest.mark.parametrize(
    ("dtype", "trains", "residues"),
    [
        (torch.bfloat16, False, 144),
        (torch.bfloat16, True, 192),
        (torch.float32, False, 288),
        (torch.float32, True, 288),
    ],
)
def test_the_limits(dtype: torch.dtype, trains: bool, residues: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other tests of this folder have none. Autocast counts."""
    monkeypatch.undo()
    for kind, autocasts in ((dtype, False), (torch.float32, dtype != torch.float32)):
        with torch.set_grad_enabled(trains), torch.autocast("cpu", dtype, enabled=autocasts):
            for few in (True, False):
                pairs = torch.empty(1, 1, dtype=kind).expand(residues**2 - few, 1)
                assert calls.has_few_entries_on_cpu((pairs,)) is few
                reason = calls.faster_as_installed(pairs, 9, 9, 4 * residues**3 - few)
                assert reason == (FEW_ON_CPU if few else "")


@torch.no_grad()
def test_no_call_of_a_dtensor_is_left_to_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client's code would mix its weights with DTensors."""
    monkeypatch.setattr(calls, "few_on_cpu", lambda _: 288)
    x = torch.ones(1, 4, 4, 8)
    assert calls.has_few_entries_on_cpu([x]) and calls.is_small_on_cpu(x, 64)
    monkeypatch.setattr(calls, "is_distributed", lambda _: True)
    assert not calls.has_few_entries_on_cpu([x]) and not calls.is_small_on_cpu(x, 64)


def test_without_a_gpu_no_call_is_an_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compiled there. So modules are not looked through, and no state of a generator is read."""
    monkeypatch.setattr(site, "_has_kernels", lambda: False)
    monkeypatch.setattr(site, "_must_wait", None)
    monkeypatch.setattr(site, "_random_states", None)

    def attempted(_: Tensor) -> bool:
        return attempts.current() is not None

    assert Count(waits=False).compute(attempted, torch.ones(2)) is False


def test_hooks_are_found_in_all_modules_inside() -> None:
    inner, outer = nn.Linear(2, 2), nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Identity())
    outer[0].append(inner)
    outer.register_module("nothing", None)
    outer[0]._modules["outer"] = outer
    assert not has_hooks_inside(outer)
    handle = inner.register_forward_pre_hook(lambda *_: None)
    assert has_hooks_inside(outer) and has_hooks_inside(inner) and not has_hooks_inside(outer[1])
    handle.remove()
    outer.register_full_backward_hook(lambda *_: None)
    assert has_hooks_inside(outer)
