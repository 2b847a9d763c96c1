"""Steps recorded as CUDA graphs on a GPU. python -m pytest -m gpu tests/clients/test_graphs_gpu.py"""

import functools
import gc
import math
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

import evoattn
from evoattn.clients import graphs
from evoattn.clients.graphs import FIRST, call_kinds
from evoattn.clients.graphs.steps import AGAIN
from evoattn.clients.site import Count
from evoattn.pair import linear

pytestmark = pytest.mark.gpu

SIZE = 64


@pytest.fixture(autouse=True)
def _a_replay_may_be_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may wait for another thread, or for another process on the card."""
    monkeypatch.setattr(call_kinds, "GAIN", math.inf)


class Denoiser(nn.Module):
    """Products, norms and an attention, in eval mode. `body` is what a test wants it to do besides."""

    def __init__(self, body: Callable[..., Any] = lambda self, x: x) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(SIZE), nn.Linear(SIZE, SIZE), nn.ReLU()) for _ in range(6))
        self.dropout, self.body = nn.Dropout(0.5), body
        self.eval()

    def original(self, x: Tensor, z: Tensor) -> Any:
        for layer in self.layers:
            x = self.dropout(x + layer(x))
            q = x.unflatten(-1, (2, 32))[None, None]
            x = x + evoattn.evoformer_attention(q, q, q, pair_bias=z[None].to(q.dtype))[0, 0].flatten(-2)
        return {"x": self.body(self, x), "first": x[:1]}

    forward = original


class Watched:
    """A denoiser whose steps are recorded, and what was counted."""

    def __init__(self, body: Callable[..., Any] | None = None) -> None:
        self.count = Count()
        forward = graphs.step(Denoiser.original, self.count)
        self.steps: graphs.Steps = forward._evoattn_steps  # type: ignore[attr-defined]
        torch.manual_seed(0)
        kind = type("Denoiser", (Denoiser,), {"forward": forward})
        self.module = (kind(body) if body else kind()).cuda()

    def agrees(self, times: int, length: int = 48, dtype: torch.dtype | None = None, seed: int = 1) -> None:
        """Calls with new inputs return the bits that the original returns."""
        z = draw(seed, 2, length, length)
        for seed in range(times):
            x = draw(seed, length, SIZE)
            with torch.no_grad(), torch.autocast("cuda", dtype or torch.bfloat16, enabled=dtype is not None):
                expected = self.module.original(x, z)
                actual = self.module(x, z)
            for name in ("x", "first"):
                assert torch.equal(actual[name], expected[name]) and actual[name].stride() == expected[name].stride()
            overwrite()

    @property
    def reasons(self) -> set[str]:
        return set(self.count.passed_on) - {FIRST}


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).cuda()


def overwrite() -> None:
    """Fill memory that the allocator has cached with NaN: a graph must not read it."""
    for bytes_ in (1 << 10, 1 << 14, 1 << 18, 1 << 22):
        _ = [torch.full((bytes_ // 4,), torch.nan, device="cuda") for _ in range(16)]


def in_loop(watched: Watched, sample: Callable[[], None]) -> None:
    """Call something in a loop, inside which a recording keeps casts of weights."""
    graphs.loop(lambda _: sample(), Count())(nn.ModuleList([watched.module]))


@pytest.mark.parametrize("loop", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16], ids=str)
def test_a_replay_has_the_same_bits(dtype: torch.dtype | None, loop: bool) -> None:
    """Each call leaves autocast, so its casts of weights are gone when the next one is replayed."""
    watched = Watched()
    if loop:
        in_loop(watched, lambda: watched.agrees(10, dtype=dtype))
    else:
        watched.agrees(10, dtype=dtype)
    assert (watched.count.replaced, watched.count.passed_on) == (7, {FIRST: 3})


def test_one_autocast_around_all_calls() -> None:
    watched, z = Watched(), draw(1, 2, 48, 48)
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        for seed in range(10):
            expected = watched.module.original(draw(seed, 48, SIZE), z)["x"]
            assert torch.equal(watched.module(draw(seed, 48, SIZE), z)["x"], expected)
            overwrite()
    watched.agrees(4, dtype=torch.bfloat16)
    assert watched.count.replaced >= 7


def test_replays_in_inference_mode_give_the_same_bits() -> None:
    watched, z = Watched(), draw(1, 2, 48, 48)
    with torch.inference_mode(), torch.autocast("cuda", torch.bfloat16):
        for seed in range(8):
            expected = watched.module.original(draw(seed, 48, SIZE), z)["x"]
            actual = watched.module(draw(seed, 48, SIZE), z)["x"]
            assert torch.equal(actual, expected) and actual.is_inference()
    assert watched.count.replaced == 5, watched.count.passed_on


def test_an_attention_of_torch() -> None:
    """Its operations say that they draw random numbers, which they do not without dropout."""

    def body(self: Any, x: Tensor) -> Tensor:
        q = x.unflatten(-1, (2, 32)).transpose(0, 1)[None]
        return nn.functional.scaled_dot_product_attention(q, q, q)[0].transpose(0, 1).flatten(-2)

    watched = Watched(body)
    watched.agrees(6, dtype=torch.bfloat16)
    watched.agrees(6)
    assert watched.count.replaced == 6, watched.count.passed_on


@pytest.mark.parametrize("loop", [False, True])
def test_autocast_that_keeps_nothing(loop: bool) -> None:
    """As Lightning has it. In a loop the recording keeps casts of its own all the same."""
    watched, z = Watched(), draw(1, 2, 48, 48)

    def sample() -> None:
        for seed in range(8):
            with torch.inference_mode(), torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
                expected = watched.module.original(draw(seed, 48, SIZE), z)["x"]
                assert torch.equal(watched.module(draw(seed, 48, SIZE), z)["x"], expected)
                assert not torch.is_autocast_cache_enabled()
            overwrite()

    if loop:
        in_loop(watched, sample)
    else:
        sample()
    assert watched.count.replaced == 5, watched.count.passed_on


def test_two_lengths_in_turn() -> None:
    watched, zs = Watched(), {length: draw(1, 2, length, length) for length in (32, 80)}
    with torch.no_grad():
        for seed in range(16):
            length = (32, 80)[seed % 2]
            x = draw(seed, length, SIZE)
            assert torch.equal(watched.module(x, zs[length])["x"], watched.module.original(x, zs[length])["x"])
    assert watched.count.replaced == 16 - 6


def test_replays_see_changed_weights() -> None:
    watched = Watched()
    for change in (
        lambda weight: weight.mul_(2),
        lambda weight: setattr(weight, "data", weight.data * 0.5),
        lambda weight: weight.copy_(draw(5, SIZE, SIZE)),
    ):
        watched.agrees(6, dtype=torch.bfloat16)
        with torch.no_grad():
            change(watched.module.layers[0][1].weight)
    watched.agrees(6, dtype=torch.bfloat16)
    assert watched.count.replaced == 12


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("loop", [False, True])
def test_replays_read_weights_written_through_data(loop: bool, dtype: torch.dtype | None) -> None:
    """As averages of weights and optimizers that keep copies write them. Neither address nor version changes."""
    watched = Watched()
    for _ in range(3):
        if loop:
            in_loop(watched, lambda: watched.agrees(14, dtype=dtype))
        else:
            watched.agrees(14, dtype=dtype)
        for weight in watched.module.parameters():
            weight.data.mul_(1.25)
    assert watched.count.replaced >= 30 and not watched.reasons


def by_split_weights(self: Denoiser, x: Tensor) -> Tensor:
    return x + linear(x.float(), self.layers[0][1].weight, precision="exact")


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_a_recording_is_kept_for_another_loop(dtype: torch.dtype | None) -> None:
    """Each loop splits and casts the weights anew, and shares another pair bias. The recording's memory is its own."""
    watched = Watched(by_split_weights)
    for turn in range(4):
        in_loop(watched, lambda turn=turn: watched.agrees(8, dtype=dtype, seed=turn))
        overwrite()
        for weight in watched.module.parameters():
            weight.data.mul_(1.25)
    assert watched.count.replaced == 4 * 8 - 3 and not watched.reasons


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (lambda self, x: x * x.sum().item(), "its operations depend on values (aten._local_scalar_dense"),
        (lambda self, x: x + 0 * nn.functional.dropout(x, training=True), "it draws random numbers (aten"),
        (lambda self, x: (torch.cuda.synchronize(), x)[1], "it cannot be recorded: "),
        (lambda self, x: x + torch.ones(SIZE).cuda(), "it computes on another device (aten"),
    ],
    ids=["item", "dropout", "synchronize", "from the CPU"],
)
def test_what_cannot_be_recorded(body: Any, reason: str) -> None:
    """Afterwards random numbers, the allocator and other recordings work as if nothing had been tried."""
    watched, z = Watched(body), draw(1, 2, 48, 48)
    for seed in range(5):
        torch.manual_seed(seed)
        with torch.no_grad():
            expected = watched.module.original(draw(seed, 48, SIZE), z)["x"]
        after = torch.rand(3, device="cuda")
        torch.manual_seed(seed)
        with torch.no_grad():
            actual = watched.module(draw(seed, 48, SIZE), z)["x"]
        assert torch.equal(actual, expected)
        assert torch.equal(torch.rand(3, device="cuda"), after), "no other random numbers are drawn"
    (why,) = watched.reasons
    assert why.startswith(reason) and watched.count.passed_on == {FIRST: 2, why: 3}
    assert not torch.cuda.is_current_stream_capturing()
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    torch.cuda.empty_cache()
    other = Watched()
    other.agrees(6, dtype=torch.bfloat16)
    assert other.count.replaced == 3


def test_memory_is_free_after_release() -> None:
    watched = Watched(lambda self, x: x + torch.ones(1 << 22, device="cuda").sum())
    watched.agrees(3)
    watched.steps.release()
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    for length in (32, 48, 64, 80, 96, 112):
        watched.agrees(5, length)
    assert torch.cuda.memory_reserved() > before[0] + (16 << 20)
    watched.steps.release()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before[0] + (8 << 20)
    assert torch.cuda.memory_allocated() <= before[1] + (8 << 20)


def test_a_recording_goes_with_the_tensors_that_it_reads() -> None:
    watched, z = Watched(), draw(1, 2, 48, 48)
    with torch.no_grad():
        for seed in range(5):
            watched.module(draw(seed, 48, SIZE), z)
    (kind,) = next(iter(watched.steps._known.values())).kinds.values()
    assert kind.size is not None
    del z
    assert kind.size is None


def test_threads_with_streams() -> None:
    watched, failures = Watched(), []

    def work(seed: int) -> None:
        stream = torch.cuda.Stream()
        with torch.no_grad(), torch.cuda.stream(stream):
            z = draw(seed, 2, 48, 48)
            for step in range(30):
                x = draw(100 * seed + step, 48, SIZE)
                if not torch.equal(watched.module(x, z)["x"], watched.module.original(x, z)["x"]):
                    failures.append((seed, step))
        stream.synchronize()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and watched.count.replaced + sum(watched.count.passed_on.values()) == 60
    assert watched.count.replaced >= 40, watched.count.passed_on


MADE: weakref.WeakKeyDictionary[nn.Module, Tensor] = weakref.WeakKeyDictionary()
"""What blocks make at their first call."""


class Block(nn.Module):
    """A block of a trunk, in eval mode, which draws random numbers as Boltz' does, and makes something at its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.product, self.back = nn.LayerNorm(SIZE), nn.Linear(SIZE, 4 * SIZE), nn.Linear(4 * SIZE, SIZE)
        self.eval()

    def original(self, x: Tensor, z: Tensor) -> Tensor:
        if self not in MADE:
            MADE[self] = torch.empty(1)  # on the CPU, which a recording does not allow
        x = x + (torch.rand(x.shape, device=x.device) > 0.1) * self.back(self.product(self.norm(x)).relu())
        q = x.unflatten(-1, (2, 32))[None, None]
        return x + evoattn.evoformer_attention(q, q, q, pair_bias=z[None].to(q.dtype))[0, 0].flatten(-2)

    forward = original


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("inference", [False, True])
def test_blocks_share_a_graph_and_draw_the_same_random_numbers(dtype: torch.dtype | None, inference: bool) -> None:
    count = Count()
    kind = type("Block", (Block,), {"forward": graphs.step(Block.original, count, shared=True)})
    torch.manual_seed(0)
    blocks = [kind().cuda() for _ in range(8)]
    z = draw(1, 2, 48, 48)
    for seed in range(3):
        mode = torch.inference_mode() if inference else torch.no_grad()
        with mode, torch.autocast("cuda", dtype or torch.bfloat16, enabled=dtype is not None):
            actual = expected = draw(seed, 48, SIZE)
            state = torch.cuda.get_rng_state()
            for block in blocks:
                expected = block.original(expected, z)
            after = torch.cuda.get_rng_state()
            torch.cuda.set_rng_state(state)
            for block in blocks:
                actual = block(actual, z)
            assert torch.equal(actual, expected) and torch.equal(torch.cuda.get_rng_state(), after)
        with torch.no_grad():
            blocks[seed].product.weight.mul_(2)
        overwrite()
    assert (count.replaced, set(count.passed_on)) == (21, {FIRST})


def test_rotations_without_a_decomposition() -> None:
    from evoattn.nn.alignment import align, rotation

    covariance, x, y = draw(1, 50, 3, 3), draw(2, 2, 1500, 3), draw(3, 2, 1500, 3)
    weights = torch.rand(2, 1500, device="cuda")
    torch.testing.assert_close(rotation(covariance).cpu(), rotation(covariance.cpu()), rtol=0, atol=1e-10)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        aligned = align(x, y, weights)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = align(x.cpu().double(), y.cpu().double(), weights.cpu().double())
    torch.testing.assert_close(aligned.cpu().double(), expected, rtol=0, atol=2e-6)


def test_atoms_are_added_in_one_order_and_in_a_graph() -> None:
    """Tokens of eight atoms, which `scatter_add` would add in another order at each call."""
    from evoattn.clients import aggregation

    def never(*_: Any, **__: Any) -> Tensor:
        raise AssertionError("the original was called")

    tokens, counts = 48, torch.full((1, 48), 8, device="cuda")
    group = torch.arange(8 * tokens).div(8, rounding_mode="floor")[None].cuda()
    batch = {"token_mask": torch.ones(1, tokens).cuda(), "atom_mask": torch.ones(1, 8 * tokens).cuda()}
    mean = aggregation.means_by_token(never, Count())
    masked = aggregation.means_by_mask(never, Count())
    spread = aggregation.from_tokens(never, Count())

    def atoms(self: Any, batch: dict[str, Tensor], x: Tensor) -> Tensor:
        return spread(batch["token_mask"], counts, x, token_dim=-2)

    def body(self: Any, x: Tensor) -> Tensor:
        output = aggregation.counting_atoms(atoms, Count())(self, batch, x.expand(5, -1, -1))
        output = output * torch.arange(output.shape[-2], device=x.device)[:, None].sin()
        return mean(output, group, tokens) + masked(batch["token_mask"], group, batch["atom_mask"], output, -2)

    watched = Watched(body)
    watched.agrees(10, length=tokens)
    assert (watched.count.replaced, watched.count.passed_on) == (7, {FIRST: 3})


def test_pairs_without_a_batch_have_a_limit() -> None:
    """A block of Protenix has no batch axis."""
    from evoattn.clients.calls import residues

    s, z = torch.empty(9, 4, device="cuda"), torch.empty(9, 9, 4, device="cuda")
    assert residues([s, z], 3) == 9 and residues([s, z]) is None and residues([s, z[None]]) == 9


class TrainedBlock(nn.Module):
    """An attention with a pair bias, a norm, products and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(SIZE), nn.Linear(SIZE, 3 * SIZE), nn.Linear(SIZE, SIZE)
        self.bias, self.dropout = nn.Linear(8, 2), nn.Dropout(0.25)

    def original(self, x: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = (y.unflatten(-1, (2, 32))[None, None] for y in self.qkv(self.norm(x)).chunk(3, -1))
        bias = self.bias(z).movedim(-1, -3)[None, None].to(q.dtype)
        o = evoattn.evoformer_attention(q, k, v, pair_bias=bias)[0, 0].flatten(-2)
        return x + self.dropout(self.out(o)), z + self.dropout(z)

    forward = original


@pytest.mark.parametrize("reentrant", [True, False, None])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_blocks_are_trained_by_replays(dtype: torch.dtype | None, reentrant: bool | None) -> None:
    """Also after updates of the weights, with dropout, and with what the allocator has cached overwritten."""
    count = Count()
    forward = graphs.step(TrainedBlock.original, count, shared=True)
    kind = type("TrainedBlock", (TrainedBlock,), {"forward": forward})
    torch.manual_seed(0)
    blocks = nn.ModuleList(kind() for _ in range(4)).cuda().train()
    weights, length = list(blocks.parameters()), 80

    def train(original: bool) -> list[Tensor]:
        torch.manual_seed(7)
        x, z = draw(1, length, SIZE).requires_grad_(), draw(2, length, length, 8).requires_grad_()
        state = x, z
        with torch.autocast("cuda", dtype or torch.bfloat16, enabled=dtype is not None):
            for block in blocks:
                run = functools.partial(TrainedBlock.original, block) if original else block
                if reentrant is None:
                    state = run(*state)
                else:
                    state = torch.utils.checkpoint.checkpoint(run, *state, use_reentrant=reentrant)
                overwrite()
        loss = (state[0].float() * draw(3, length, SIZE)).sum() + (state[1].float() * draw(4, length, length, 8)).sum()
        blocks.zero_grad()
        loss.backward()
        return [x.detach() for x in state] + [x.grad for x in (x, z, *weights)]  # type: ignore[misc]

    for _ in range(4):
        for actual, expected in zip(train(False), train(True), strict=True):
            assert (actual - expected).norm() <= 1e-3 * expected.norm()
        overwrite()
        with torch.no_grad():
            for x in weights:
                x.mul_(0.97)
    if reentrant is True:
        assert set(count.passed_on) == {FIRST} and count.replaced == 4 * 8 - 6
    elif reentrant is False:
        assert set(count.passed_on) == {FIRST, AGAIN} and count.replaced == 4 * 4 - 3
    else:
        assert set(count.passed_on) == {"a gradient may be wanted"}
