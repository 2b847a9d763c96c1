"""Calls of clients that do not wait for their kernels: the client's own code computes them, as if nothing had been tried."""

import contextlib
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evoattn.clients import arguments, diffusion, graphs, layers, site
from evoattn.clients.boltz import _pair_bias
from evoattn.clients.graphs import FIRST
from evoattn.clients.site import COMPILING, Count, PassedOn, replacement
from evoattn.core import attempts, keeping
from evoattn.nn.pair_layer import PairLayer
from evoattn.nn.transition import Transition
from tests.clients.recording import Denoiser, draw
from tests.clients.standins import CHANNELS, edges, filled, normal, pair_blocks
from tests.clients.standins.pair_blocks import Layer, Pairs
from tests.helpers.recorders import Traced


class Kernels:
    """Kernels by name, which are compiled when a test says so. A launch asks for one."""

    def __init__(self) -> None:
        self.compiling: dict[str, Future[None]] = {}
        self.asked: list[str] = []

    def launch(self, name: str) -> None:
        attempt = attempts.current()
        if attempt is None:
            return
        self.asked.append(name)
        future = self.compiling.setdefault(name, Future())
        if not future.done():
            attempt.give_up(future)

    def finish(self, *names: str) -> None:
        for name in names or tuple(self.compiling):
            self.compiling.setdefault(name, Future()).set_result(None)


@pytest.fixture
def kernels() -> Kernels:
    return Kernels()


def impatient(told: list[str] | None = None) -> Count:
    return Count(None if told is None else told.append, waits=False)


def doubled(kernels: Kernels, count: Count) -> Callable[..., Tensor]:
    """A client's function that subtracts. Its replacement doubles, by two kernels."""

    @replacement
    def double(x: Tensor) -> Tensor:
        kernels.launch("first")
        torch.rand(3)
        kernels.launch("second")
        return 2 * x

    return double(lambda x: -x, count)


X = torch.ones(2)


@torch.no_grad()
def test_the_client_computes_until_the_kernels_are_there(kernels: Kernels) -> None:
    """All are asked for at the first call. Until they are there the replacement is not tried again."""
    told: list[str] = []
    count = impatient(told)
    call = doubled(kernels, count)
    assert torch.equal(call(X), -X)
    assert kernels.asked == ["first", "second"]
    kernels.finish("first")
    assert torch.equal(call(X), -X)
    assert kernels.asked == ["first", "second"]
    kernels.finish("second")
    assert torch.equal(call(X), 2 * X)
    assert torch.equal(call(X), 2 * X)
    assert told == [COMPILING, COMPILING, "", ""]
    assert (count.replaced, count.passed_on) == (2, {COMPILING: 2})


@torch.no_grad()
def test_another_kind_of_call_asks_for_its_own(kernels: Kernels) -> None:
    call = doubled(kernels, impatient())
    call(X)
    for other in (torch.ones(3), torch.ones(2, dtype=torch.float64)):
        kernels.asked.clear()
        call(other)
        call(other)
        assert kernels.asked == ["first", "second"]


@torch.no_grad()
def test_the_client_draws_as_if_nothing_had_been_tried(kernels: Kernels) -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    doubled(kernels, impatient())(X)
    assert torch.equal(torch.rand(2), expected)


def test_who_waits_and_who_records_gradients_is_never_left_to_the_client(kernels: Kernels) -> None:
    """The backward of a call would have to wait."""
    with torch.no_grad():
        assert torch.equal(doubled(kernels, Count())(X), 2 * X)
    x = X.clone().requires_grad_()
    count = impatient()
    y = doubled(kernels, count)(x)
    y.sum().backward()
    assert x.grad is not None and torch.equal(x.grad, 2 * X)
    assert count.replaced == 1 and not kernels.asked


@torch.no_grad()
def test_calls_inside_count_only_if_the_call_around_them_does(kernels: Kernels) -> None:
    inner, outer = impatient(), impatient()
    plain = replacement(lambda x: x + 1)(lambda x: x, inner)

    @replacement
    def around(x: Tensor) -> Tensor:
        y = plain(x)
        kernels.launch("around")
        return y

    call = around(lambda x: x, outer)
    call(X)
    assert (inner.replaced, outer.replaced) == (0, 0)
    kernels.finish()
    call(X)
    assert (inner.replaced, outer.replaced) == (1, 1)


@torch.no_grad()
def test_an_error_of_a_call_that_has_its_kernels_is_the_users(kernels: Kernels) -> None:
    @replacement
    def fails(x: Tensor) -> Tensor:
        kernels.launch("one")
        raise ValueError("x is odd")

    call = fails(lambda x: x, impatient())
    assert call(X) is X
    kernels.finish()
    with pytest.raises(ValueError, match="x is odd"):
        call(X)


PLACES = ("tri_mul_out", "tri_mul_in", "tri_att_start", "tri_att_end", "transition")


@pytest.fixture
def launching(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """Each layer of a pair block launches a kernel of its own."""
    pair_blocks.stand_in(monkeypatch)
    place = [0]

    def watched(original: Any) -> Any:
        def add_to(self: Any, *args: Any, **kwargs: Any) -> Any:
            kernels.launch(PLACES[place[0] % len(PLACES)])
            place[0] += 1
            return original(self, *args, **kwargs)

        return add_to

    for kind in (PairLayer, Transition):
        if "add_to" in vars(kind):
            monkeypatch.setattr(kind, "add_to", watched(kind.add_to))
    return kernels


def patched(block: nn.Module, count: Count) -> Callable[..., Any]:
    forward = layers.layer(type(block).forward, count)
    return lambda *args, **kwargs: forward(block, *args, **kwargs)


@pytest.mark.parametrize("missing", PLACES)
@torch.no_grad()
def test_a_block_leaves_its_arguments_as_they_were(missing: str, launching: Kernels) -> None:
    """Also one that may overwrite z, and that lacks the kernel of a later layer alone."""
    block = filled(Pairs()).eval()
    z, mask = normal(2, 7, 7, CHANNELS).detach(), edges(2)
    expected, waited = block(z, mask), patched(block, Count())(z, mask)
    launching.finish(*(place for place in PLACES if place != missing))
    call, mine = patched(block, count := impatient()), z.clone()
    assert torch.equal(call(mine, mask, inplace_safe=True), expected)
    assert torch.equal(mine, z)
    assert set(launching.asked[:5]) == set(PLACES), "all layers were asked"
    launching.finish(missing)
    assert torch.equal(call(mine, mask, inplace_safe=True), waited)
    assert torch.equal(mine, z), "it may still be given up"
    assert count.passed_on == {COMPILING: 1} and count.replaced == 1


@torch.no_grad()
def test_a_block_that_draws_is_as_the_clients(launching: Kernels) -> None:
    """The single track, which is the client's own, is not called in vain."""
    block, called = filled(Layer()).float().eval(), []
    s, z, mask = normal(2, 7, 6).detach().float(), normal(2, 7, 7, CHANNELS).detach().float(), edges(2).float()
    inputs = (s, z, mask.diagonal(0, -2, -1), mask)
    block.pre_norm_s.register_forward_hook(lambda *_: called.append(1))
    outcomes = []
    for call in (block, patched(block, impatient())):
        torch.manual_seed(5)
        called.clear()
        outcomes.append([*call(*inputs), torch.rand(3)])
        assert called == [1]
    assert all(map(torch.equal, *outcomes))
    launching.finish()
    torch.manual_seed(5)
    ours = [*patched(block, count := impatient())(*inputs), torch.rand(3)]
    assert torch.equal(ours[2], outcomes[0][2]) and count.replaced == 1
    torch.testing.assert_close(ours[:2], outcomes[0][:2], rtol=2e-4, atol=2e-4)


@torch.no_grad()
def test_an_update_in_place_is_not_added_for_a_call_that_was_given_up(kernels: Kernels) -> None:
    def layer(z: Tensor) -> Tensor:
        kernels.launch("update")
        return torch.ones_like(z)

    z, count = torch.zeros(2), impatient()
    update = {"z": z, "inplace_safe": True, "_add_with_inplace": True}
    assert isinstance(count.compute(arguments.multiplication, layer, **update), PassedOn)
    assert torch.equal(z, torch.zeros(2))
    kernels.finish()
    assert count.compute(arguments.multiplication, layer, **update) is z
    assert torch.equal(z, torch.ones(2))


@torch.no_grad()
def test_a_clients_cache_has_nothing_of_a_call_that_was_given_up(kernels: Kernels) -> None:
    class Stub:
        def pair_bias(self, z: Tensor) -> Tensor:
            return z.movedim(-1, -3)

        def __call__(self, s: Tensor, *_: Any, **__: Any) -> Tensor:
            kernels.launch("attention")
            return s

    cache: dict[str, Any] = {}
    s, z, mask = torch.ones(1, 3, 4), torch.ones(1, 3, 3, 2), torch.ones(1, 3)
    count = impatient()
    call = {"model_cache": cache}
    assert isinstance(count.compute(_pair_bias, Stub(), s, z, mask, **call), PassedOn)
    assert not cache
    kernels.finish()
    count.compute(_pair_bias, Stub(), s, z, mask, **call)
    assert list(cache) == ["z"]


@torch.no_grad()
def test_the_cache_of_a_transformer_has_nothing_either(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(fused: Any, a: Tensor, *_: Any) -> Tensor:
        kernels.launch("product")
        return a

    monkeypatch.setattr(diffusion, "prepared", lambda *_: None)
    monkeypatch.setattr(diffusion, "_run", run)
    transformer, block = nn.Module(), nn.Module()
    block.attention_pair_bias = nn.Module()
    block.attention_pair_bias.pair_bias = lambda z: z.movedim(-1, -3)  # type: ignore[assignment]
    transformer.blocks = nn.ModuleList([block, block])
    transformer.eval()
    cache: dict[str, Any] = {}
    a, z = torch.ones(1, 3, 4), torch.ones(1, 3, 3, 2)
    count = impatient()
    call = {"model_cache": cache}
    assert isinstance(count.compute(diffusion._call_boltz1, transformer, a, a, z, a, **call), PassedOn)
    assert not cache
    kernels.finish()
    count.compute(diffusion._call_boltz1, transformer, a, a, z, a, **call)
    assert sorted(cache) == ["layer_0", "layer_1"] and all("z" in x for x in cache.values())


class Transitions(nn.Module):
    """As Boltz names the modules of a transition."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc1, self.fc2, self.fc3 = (nn.Linear(2, 2, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc3(self.fc1(x))  # type: ignore[no-any-return]


Transitions.__qualname__ = "Transition"


@torch.no_grad()
def test_a_transition_of_the_condition_waits_for_no_kernel(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    def add(s: Tensor, *_: nn.Module) -> Tensor:
        kernels.launch("product")
        return 2 * s

    monkeypatch.setattr(diffusion, "add_transition", add)
    transition, count = Transitions().eval(), impatient()
    assert torch.equal(diffusion._moved(X, transition, count), transition(X) + X)
    assert count.passed_on == {COMPILING: 1}, "a recording must not be made of it"
    kernels.finish()
    assert torch.equal(diffusion._moved(X, transition, count), 2 * X)


class Recorded:
    """A denoiser whose steps are recorded, and in which a replaced function adds 1."""

    def __init__(self, kernels: Kernels) -> None:
        self.recorder, self.steps, self.inner = Traced(), Count(), impatient()

        @replacement
        def one_more(x: Tensor) -> Tensor:
            kernels.launch("one")
            return x + 1

        added = one_more(lambda x: x + 1.001, self.inner)
        forward = graphs.step(Denoiser.original, self.steps, self.recorder)
        self.module = type("Denoiser", (Denoiser,), {"forward": forward})(lambda _, x: added(x))
        self.z = draw(1)

    @torch.no_grad()
    def __call__(self, seed: int) -> bool:
        """Whether a call has the bits of what is not recorded."""
        x = draw(seed)
        expected = self.module.original(x, self.z)
        return torch.equal(self.module(x, self.z), expected)


def test_no_step_is_recorded_while_the_client_computes_a_part(kernels: Kernels) -> None:
    """Such calls are among the first of their kind. When the kernels are there the step is recorded as any other."""
    recorded = Recorded(kernels)
    assert all(recorded(seed) for seed in range(5))
    assert recorded.recorder.recorded == 0 and recorded.steps.passed_on == {FIRST: 5}
    kernels.finish()
    assert all(recorded(seed) for seed in range(6))
    assert recorded.recorder.recorded == 1 and recorded.steps.replaced == 3
    assert recorded.steps.passed_on == {FIRST: 5 + 3}


def test_a_step_that_lacks_a_kernel_when_it_is_recorded_is_recorded_later(kernels: Kernels) -> None:
    recorded = Recorded(kernels)
    kernels.finish("one")
    record = recorded.recorder.record

    def lacks(run: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        kernels.compiling["one"] = Future()
        return record(run, *args, **kwargs)

    recorded.recorder.record = lacks  # type: ignore[method-assign]
    assert recorded(0) and recorded(1)
    recorded.recorder.record = record  # type: ignore[method-assign]
    assert recorded(2) and recorded.steps.replaced == 0
    kernels.finish()
    assert all(recorded(seed) for seed in range(6))
    assert recorded.steps.replaced > 0 and set(recorded.steps.passed_on) == {FIRST}


def test_a_step_that_lacks_a_kernel_when_it_is_compared_keeps_its_recording(kernels: Kernels) -> None:
    """Its result differs from a replay's, which says nothing about the recording."""
    recorded = Recorded(kernels)
    kernels.finish("one")
    assert recorded(0) and recorded(1)
    assert recorded.recorder.recorded == 1
    kernels.compiling["one"] = Future()
    with torch.no_grad():
        recorded.module(draw(2), recorded.z)
    kernels.finish()
    assert all(recorded(seed) for seed in range(3))
    assert recorded.recorder.recorded == 1 and recorded.steps.replaced == 2


@torch.no_grad()
def test_a_module_that_is_left_to_the_client_is_not_converted(launching: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """That takes the host milliseconds, for each of 64 blocks. Its steps are not recorded either."""
    swaps: list[nn.Module] = []
    swap = layers.Swap

    def noted(client: nn.Module, **options: Any) -> Any:
        swaps.append(client)
        return swap(client, **options)

    monkeypatch.setattr(layers, "Swap", noted)
    first, second, count = filled(Pairs()).eval(), filled(Pairs()).eval(), impatient()
    z, mask = normal(2, 7, 7, CHANNELS).detach(), edges(2)
    declined = site.declined()
    forward = layers.layer(Pairs.forward, count)
    forward(first, z, mask)
    forward(second, z, mask)
    assert swaps == [first] and site.declined() == declined + 2 and count.passed_on == {COMPILING: 2}
    with torch.enable_grad():
        forward(second, z, mask)
    launching.finish()
    forward(second, z, mask)
    assert swaps == [first, second] and count.replaced == 2


@torch.no_grad()
def test_a_sampling_has_whole_weights_after_a_call_that_was_given_up(kernels: Kernels) -> None:
    weight, count = torch.ones(2), impatient()
    made: list[str] = []

    def halves() -> str:
        kernels.launch("split")
        made.append("garbage" if attempts.given_up() else "halves")
        return made[-1]

    def layer() -> str:
        return keeping.made_once("weights", (weight,), halves)

    with keeping.sampling():
        assert isinstance(count.compute(layer), PassedOn)
        kernels.finish()
        assert (count.compute(layer), count.compute(layer)) == ("halves", "halves")
    assert made == ["garbage", "halves"]


@torch.no_grad()
@pytest.mark.parametrize("what", ["a hook", "training", "capture"])
def test_a_call_that_must_not_be_given_up_waits(what: str, kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks would see what has no values, a checkpoint's backward would have to wait, and a graph would lack a launch."""
    seen: list[Any] = []

    @replacement
    def double(module: nn.Module, x: Tensor) -> Tensor:
        seen.append(attempts.current())
        kernels.launch("one")
        return 2 * x

    module = nn.Sequential(nn.Linear(2, 2)).eval()
    call = double(lambda _, x: -x, impatient())
    assert torch.equal(call(module, X), -X)
    kernels.compiling.clear()
    if what == "a hook":
        module[0].register_forward_hook(lambda *_: None)
    elif what == "training":
        module[0].train()
        module.training = True
    else:
        monkeypatch.setattr(keeping, "is_capturing", lambda: True)
    with attempts.attempt() if what == "capture" else contextlib.nullcontext():
        assert torch.equal(double(lambda _, x: -x, impatient())(module, X), 2 * X)
    assert seen[-1] is None


@torch.no_grad()
def test_a_block_under_autocast_leaves_its_arguments_too(launching: Kernels) -> None:
    """Its kernels are others than those of the call in float32 that ran before."""
    block, z, mask = filled(Pairs()).eval(), normal(2, 7, 7, CHANNELS).detach(), edges(2)
    launching.finish(*PLACES)
    call = patched(block, count := impatient())
    call(z.clone(), mask, inplace_safe=True)
    assert count.replaced == 1
    launching.compiling[PLACES[2]] = Future()
    mine = z.clone()
    with torch.autocast("cpu", torch.bfloat16):
        expected = block(z.clone(), mask)
        assert torch.equal(call(mine, mask, inplace_safe=True), expected) and torch.equal(mine, z)
