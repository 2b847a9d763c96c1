"""Steps that are recorded and replayed, with a recorder that needs no GPU: what is replayed, what is not, and why."""

import collections
import contextlib
import functools
import gc
import importlib
import pathlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import evoattn
from evoattn.clients import graphs, patching
from evoattn.clients.graphs import ELSEWHERE, FIRST, call_kinds, recorder, trees
from evoattn.clients.releases import digest, sources
from evoattn.clients.site import Client, Count, Site
from tests.helpers.recorders import Traced

OF_ATTENTION = Count()


class Denoiser(nn.Module):
    """A step of two products, in eval mode. `body` is what a test wants it to do besides."""

    def __init__(self, body: Callable[..., Any] = lambda self, x, *_, **__: x) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
        self.scale, self.body = 1.0, body
        self.eval()

    def original(self, x: Tensor, z: Tensor, *given: Any, **named: Any) -> Any:
        OF_ATTENTION.count_replaced()
        return self.body(self, self.second(self.first(x) * self.scale + z), *given, **named)

    forward = original


class Watched:
    """A denoiser whose steps are recorded, and what was counted."""

    def __init__(self, body: Callable[..., Any] | None = None) -> None:
        self.recorder, self.count = Traced(), Count()
        forward = graphs.step(Denoiser.original, self.count, self.recorder)
        self.steps: graphs.Steps = forward._evoattn_steps  # type: ignore[attr-defined]
        kind = type("Denoiser", (Denoiser,), {"forward": forward})
        torch.manual_seed(0)
        self.module = kind(body) if body else kind()
        self.z = draw(1)

    def __call__(self, x: Tensor, *given: Any, **named: Any) -> Any:
        """A call without gradients."""
        with torch.no_grad():
            return self.module(x, self.z, *given, **named)

    def agrees(self, times: int = 6, *given: Any, **named: Any) -> None:
        """Calls with new tensors return what the original returns."""
        for seed in range(times):
            x = draw(seed + 2)
            with torch.no_grad():
                expected = self.module.original(x, self.z, *given, **named)
            assert torch.equal(self(x, *given, **named), expected)

    @property
    def replayed(self) -> int:
        return self.count.replaced

    @property
    def reasons(self) -> set[str]:
        return set(self.count.passed_on)


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*(shape or (3, 4)), generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def watched() -> Watched:
    return Watched()


def test_the_fourth_call_is_the_first_that_is_replayed(watched: Watched) -> None:
    watched.agrees(10)
    assert (watched.replayed, watched.count.passed_on) == (7, {FIRST: 3})
    assert watched.recorder.recorded == 1


def test_tensors_that_stay_are_read_where_they_are(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[int] = []
    original = call_kinds._copy

    def copy(there: list[Any], tensors: list[Tensor]) -> None:
        copies.append(sum(isinstance(x, Tensor) for x in there))
        original(there, tensors)

    monkeypatch.setattr(call_kinds, "_copy", copy)
    watched.agrees(6)
    assert copies == [1] * 6, "one to record, two to compare, three to replay; z is never copied"
    x = draw(9)
    for _ in range(6):
        watched(x)
    assert watched.replayed == 3 + 6


def test_results_are_the_callers_own(watched: Watched) -> None:
    made = [watched(draw(1)) for _ in range(6)]
    assert len({x.data_ptr() for x in made}) == 6
    made[-1].zero_()
    assert torch.equal(watched(draw(1)), made[0]) and made[-2].any()


Pair = collections.namedtuple("Pair", ("left", "right"))


def times(x: Tensor, by: Tensor, more: int = 1) -> Tensor:
    return x * by * more


def test_nested_arguments_and_results() -> None:
    def body(self: Any, x: Tensor, feats: Any, keys: Any, *, more: Any = None) -> Any:
        y = keys(x) + feats["pair"].left[0] + (more or 0)
        return {"x": y, "rest": [None, Pair(y[:1], 3), (y.T, "a")]}

    watched = Watched(body)
    feats = {"pair": Pair([draw(5)], None), "name": "ubiquitin"}
    keys = functools.partial(times, by=draw(6), more=2)
    for more in (1, 1, 1, 1, 1, 2, 2, 2, 2, 2):
        x = draw(more)
        with torch.no_grad():
            expected = watched.module.original(x, watched.z, feats, keys, more=more)
        found = watched(x, feats, keys, more=more)
        torch.testing.assert_close(found["x"], expected["x"], rtol=0, atol=0)
        assert found["rest"][0] is None and type(found["rest"][1]) is Pair and found["rest"][1].right == 3
        assert torch.equal(found["rest"][1].left, expected["rest"][1].left) and found["rest"][2][1] == "a"
        assert torch.equal(found["rest"][2][0], expected["rest"][2][0])
    assert (watched.replayed, watched.recorder.recorded) == (4, 2)


@pytest.mark.parametrize(
    "change",
    [
        lambda module: module.first.weight.detach().add_(1),
        lambda module: module.load_state_dict({name: x + 1 for name, x in module.state_dict().items()}),
        lambda module: setattr(module.first.weight, "data", draw(8, 4, 4)),
        lambda module: setattr(module.first, "weight", nn.Parameter(draw(8, 4, 4))),
        lambda module: module.second.__setitem__(0, nn.Linear(4, 4)),
        lambda module: setattr(module, "scale", 2.0),
        lambda module: setattr(module, "first", nn.Sequential(module.first, nn.ReLU())),
    ],
    ids=["in place", "load_state_dict", "data", "parameter", "module", "attribute", "wrapped"],
)
def test_a_changed_module_is_seen(watched: Watched, change: Callable[[nn.Module], Any]) -> None:
    watched.agrees()
    with torch.no_grad():
        change(watched.module)
    watched.module.eval()
    watched.agrees()
    assert (watched.replayed, watched.recorder.recorded) == (6, 2)


def test_gradients_are_those_of_the_original(watched: Watched) -> None:
    watched.agrees()
    x = draw(7).requires_grad_()
    for _ in range(5):
        watched.module(x, watched.z).sum().backward()
    assert x.grad is not None and watched.module.first.weight.grad is not None
    assert watched.count.passed_on["a gradient may be wanted"] == 5
    watched.module.requires_grad_(False)
    for _ in range(5):
        watched.module(draw(3), watched.z)
    assert watched.replayed == 3 + 2, "nothing requires a gradient"


def test_hooks_run(watched: Watched) -> None:
    watched.agrees()
    heard: list[int] = []
    hook = watched.module.first.register_forward_hook(lambda *_: heard.append(1))
    watched.agrees()
    hook.remove()
    assert len(heard) == 12 and watched.count.passed_on["a module inside has hooks"] == 6
    everywhere = nn.modules.module.register_module_forward_pre_hook(lambda *_: heard.append(2))
    try:
        watched.agrees()
    finally:
        everywhere.remove()
    assert watched.count.passed_on["a module inside has hooks"] == 12
    outside = watched.module.register_forward_hook(lambda *_: heard.append(3))
    watched.agrees()
    outside.remove()
    assert heard.count(3) == 6 and watched.replayed == 3 + 6, "a hook of the module itself runs around the replay"


def test_training_is_not_replayed(watched: Watched) -> None:
    watched.module.train()
    for _ in range(5):
        watched(draw(1))
    watched.module.eval()
    watched.module.second[1].train()
    for _ in range(5):
        watched(draw(1))
    assert watched.count.passed_on == {"the module is in training mode": 10}


def test_a_number_that_code_writes_into_a_tensor_is_recorded() -> None:
    """On a GPU `x[0] = 1` fills a slice with a tensor on the CPU. Here meta stands in for the GPU."""
    x, elsewhere = torch.empty(3, device="meta"), torch.tensor(1.0)
    recorder.scout(lambda: x[:2].fill_(torch.tensor(1.0)), x.device)
    with pytest.raises(trees.NotCaptured, match="another device"):
        recorder.scout(lambda: x[:2].fill_(elsewhere), x.device)
    with pytest.raises(trees.NotCaptured, match="another device"):
        recorder.scout(lambda: torch.tensor(1.0) + 1, x.device)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (lambda self, x: x + torch.rand_like(x), "it draws random numbers (aten.rand_like"),
        (lambda self, x: x * x.sum().item(), "its operations depend on values (aten._local_scalar_dense"),
        (lambda self, x: x if x.sum() > 0 else -x, "its operations depend on values (aten._local_scalar_dense"),
        (lambda self, x: x[x > 0], "its operations depend on values (aten.index"),
        (lambda self, x: x + x.to("meta").shape[0], "it computes on another device (aten._to_copy"),
        (lambda self, x: [x, object()], "a replay cannot return a object"),
    ],
    ids=["random", "item", "branch", "mask", "device", "result"],
)
def test_what_cannot_be_recorded_runs_as_it_was(body: Any, reason: str) -> None:
    watched = Watched(body)
    for seed in range(5):
        torch.manual_seed(seed)
        with torch.no_grad():
            expected = watched.module.original(draw(seed), watched.z)
        torch.manual_seed(seed)
        found = watched(draw(seed))
        if isinstance(found, Tensor):
            assert torch.equal(found, expected)
        torch.manual_seed(seed)
        watched(draw(seed))
        state = torch.get_rng_state()
        torch.manual_seed(seed)
        with torch.no_grad():
            watched.module.original(draw(seed), watched.z)
        assert torch.equal(torch.get_rng_state(), state), "no other random numbers are drawn"
    assert watched.count.passed_on.pop(FIRST) == 2 and not watched.replayed
    (found_reason,) = watched.reasons
    assert found_reason.startswith(reason) and watched.count.passed_on[found_reason] == 8


def test_indices_are_no_masks() -> None:
    at = torch.tensor([2, 0, 0])
    watched = Watched(lambda self, x, at: x[at])
    watched.agrees(6, at)
    assert watched.replayed == 3


def test_attention_without_dropout_draws_nothing() -> None:
    watched = Watched(lambda self, x: nn.functional.scaled_dot_product_attention(x[None], x[None], x[None])[0])
    watched.agrees()
    assert watched.replayed == 3
    other = Watched(lambda self, x: nn.functional.scaled_dot_product_attention(x[None], x[None], x[None], None, 0.5)[0])
    for _ in range(5):
        other(draw(1))
    assert not other.replayed and any(x.startswith("it draws random numbers") for x in other.reasons)
    of_a_gpu = torch.ops.aten._scaled_dot_product_flash_attention.default
    q = draw(1, 1, 1, 3, 4)
    assert torch.Tag.nondeterministic_seeded in of_a_gpu.tags
    assert recorder._is_off(of_a_gpu, (q, q, q)) and recorder._is_off(of_a_gpu, (q, q, q, 0.0))
    assert not recorder._is_off(of_a_gpu, (q, q, q, 0.5))


def test_a_recorder_that_fails_once_is_not_asked_again(watched: Watched) -> None:
    watched.recorder.fails = RuntimeError("CUDA error: operation not permitted when stream is capturing\nand more")
    watched.agrees(6)
    reason = "it cannot be recorded: RuntimeError: CUDA error: operation not permitted when stream is capturing"
    assert watched.count.passed_on == {FIRST: 2, reason: 4}
    watched.recorder.fails = None
    watched.agrees(3)
    assert not watched.recorder.recorded
    watched.z = draw(1, 1, 4)
    watched.agrees(6)
    assert watched.replayed == 3, "calls of another shape are another matter"


def test_a_replay_that_fails_when_it_is_compared(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    watched.agrees(2)
    original = call_kinds.room_for

    def no_memory(x: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(call_kinds, "room_for", no_memory)
    watched.agrees(3)
    monkeypatch.setattr(call_kinds, "room_for", original)
    watched.agrees(3)
    assert watched.count.passed_on == {FIRST: 3, "it cannot be recorded: OutOfMemoryError: CUDA out of memory": 5}
    assert recordings(watched) == 0


@pytest.mark.parametrize("what", ["a tensor", "a dict", "a number"])
def test_arguments_that_change_in_the_call(what: str) -> None:
    def body(self: Any, x: Tensor, cache: dict[str, Any]) -> Tensor:
        if what == "a tensor":
            cache["y"].add_(1)
        elif what == "a number":
            cache["n"] += 1
        else:
            cache.setdefault("z", 2 * x)
        return x + cache.get("z", 0)

    watched = Watched(body)
    for seed in range(5):
        with torch.no_grad():
            expected = watched.module.original(draw(seed), watched.z, {"y": draw(1), "n": 0})
        assert torch.equal(watched(draw(seed), {"y": draw(1), "n": 0}), expected)
    assert watched.count.passed_on == {FIRST: 1, "it changes its arguments": 4}


def test_a_cache_that_the_first_call_fills() -> None:
    """Boltz-1's denoiser keeps what its steps share in a dict that it is given."""

    def body(self: Any, x: Tensor, cache: dict[str, Any]) -> Tensor:
        kept = cache.setdefault("layer", {})
        if "z" not in kept:
            kept["z"] = x[:1] * 2
        return x + kept["z"]

    watched = Watched(body)
    for start in (0, 20):
        ours: dict[str, Any] = {}
        theirs: dict[str, Any] = {}
        for seed in range(start, start + 14):
            with torch.no_grad():
                expected = watched.module.original(draw(seed), watched.z, theirs)
            assert torch.equal(watched(draw(seed), ours), expected)
    assert watched.replayed == 2 * (14 - 4) and watched.recorder.recorded == 2, (
        "the cache of the second prediction is another one"
    )


STATE = [1.0]


def test_a_recording_that_does_something_else_is_not_used() -> None:
    watched = Watched(lambda self, x: x * STATE[0])
    watched(draw(0))
    watched(draw(1))
    STATE[0] = 2.0
    try:
        watched.agrees(4)
    finally:
        STATE[0] = 1.0
    assert watched.count.passed_on == {FIRST: 3, "a replay of its recording returned something else": 3}


def test_a_recording_that_is_not_faster_is_not_used(watched: Watched) -> None:
    watched.recorder.takes = [0, 1.0, 0, 0.95]
    watched.agrees(6)
    assert watched.count.passed_on == {FIRST: 3, "a replay of its recording is not faster": 3}


def test_what_is_read_of_objects(watched: Watched) -> None:
    record = object()
    watched.agrees(6, [record])
    watched.agrees(6, [object()])
    assert watched.replayed == 3 + 6, "nobody reads it, so another one is as good"

    class Settings:
        by = 2

    for body in (
        lambda self, x, settings: x * settings.by,
        lambda self, x, settings: x * 1 if isinstance(settings, Settings) else x,
        lambda self, x, settings: x if settings == 3 else x * 2,
    ):
        reader = Watched(body)
        reader.agrees(6, Settings())
        assert reader.count.passed_on == {FIRST: 2, "it reads an argument that is a Settings": 4}


def test_plain_values_tell_calls_apart() -> None:
    watched = Watched(lambda self, x, by: torch.copysign(x, torch.full_like(x, by)) if isinstance(by, float) else x * by)
    for by in (1, True, 1.0, 0.0, -0.0, 2):
        watched.agrees(5, by)
    assert watched.recorder.recorded == 6 and watched.replayed == 12


def test_modes_tell_calls_apart(watched: Watched) -> None:
    for mode in (torch.autocast("cpu", torch.bfloat16), torch.inference_mode(), torch.no_grad()):
        for seed in range(5):
            with mode:
                expected = watched.module.original(draw(seed), watched.z)
                found = watched.module(draw(seed), watched.z) if mode is not None else None
            if not isinstance(mode, torch.autocast):
                assert torch.equal(found, expected) and found.is_inference() == isinstance(mode, torch.inference_mode)
    assert watched.recorder.recorded == 2 and watched.replayed == 4
    with torch.no_grad():
        for dtype in (torch.bfloat16, torch.float16):
            with torch.autocast("cpu", dtype):
                watched.agrees(5)
                assert watched(draw(1)).dtype == dtype
    assert watched.recorder.recorded == 4


def test_expanded_and_strided_arguments(watched: Watched) -> None:
    for make in (
        lambda seed: draw(seed, 1, 4).expand(3, 4),
        lambda seed: draw(seed, 4, 3).T,
        lambda seed: draw(seed, 3, 8)[:, ::2],
    ):
        for seed in range(5):
            with torch.no_grad():
                expected = watched.module.original(make(seed), watched.z)
            assert torch.equal(watched(make(seed)), expected)
    assert watched.recorder.recorded == 3 and watched.replayed == 6


def recordings(watched: Watched) -> int:
    return sum(kind.is_recorded for known in watched.steps._known.values() for kind in known.kinds.values())


def test_the_least_recently_used_recording_goes(watched: Watched) -> None:
    watched.z, lengths = draw(1, 4), [draw(1, length, 4) for length in range(1, 6)]
    for x in lengths:
        for _ in range(3):
            watched(x)
        watched(lengths[0])
    assert recordings(watched) == 4
    before = watched.replayed
    watched(lengths[0])
    assert watched.replayed == before + 1, "used in between"
    watched(lengths[1])
    assert watched.replayed == before + 1, "the oldest"


def test_two_predictions_in_turn(watched: Watched) -> None:
    """Of one shape, each with a z of its own: at last z is copied, and one recording serves both."""
    both = draw(1), draw(2)
    for seed in range(12):
        watched.z = both[seed % 2]
        watched.agrees(1)
    assert watched.replayed >= 4 and watched.recorder.recorded <= 2
    before = watched.recorder.recorded, watched.replayed
    for seed in range(12):
        watched.z = both[seed % 2]
        watched.agrees(1)
    assert watched.recorder.recorded == before[0] and watched.replayed == before[1] + 12


def test_two_lengths_in_turn(watched: Watched) -> None:
    both = draw(1, 2, 3, 4), draw(2, 5, 3, 4)
    for seed in range(12):
        watched.z = both[seed % 2]
        watched.agrees(1)
    assert watched.recorder.recorded == 2 and watched.replayed == 12 - 6


def test_one_prediction_after_the_other(watched: Watched) -> None:
    """Memory is freed when a prediction's tensors are gone, and the next one is recorded anew, without copies of its z."""
    for seed in range(3):
        watched.agrees(14)
        assert recordings(watched) == 1
        watched.z = draw(seed + 20)
        gc.collect()  # the tracer leaves cycles
        assert recordings(watched) == 0
    assert watched.recorder.recorded == 3 and watched.replayed == 33


def test_arguments_that_move_too_often(watched: Watched) -> None:
    for seed in range(15):
        watched.z = draw(seed + 20)
        gc.collect()  # the tracer leaves cycles
        watched.agrees(4)
    assert watched.recorder.recorded <= 3
    assert watched.count.passed_on["its arguments move too often for a recording to pay"] > 20


def test_no_tensor_ever_the_same(watched: Watched) -> None:
    for seed in range(10):
        watched.z = draw(seed + 20)
        watched.agrees(1)
    assert (watched.recorder.recorded, watched.replayed) == (1, 10 - 4)


def test_a_tensor_that_is_written_to_is_seen(watched: Watched) -> None:
    watched.agrees()
    for _ in range(4):
        watched.z.add_(1)
        watched.agrees(3)
    assert watched.replayed


def test_a_tensor_with_other_memory_is_seen(watched: Watched) -> None:
    watched.agrees()
    watched.z.data = draw(8)
    watched.agrees()
    assert watched.replayed >= 5


def test_room_looks_like_the_tensor() -> None:
    for x in (draw(1, 1, 4).expand(3, 4), draw(1, 4, 3).T, draw(1, 3, 8)[:, ::2], draw(1, 2, 0, 3), draw(1, 1)[0]):
        room = trees.room_for(x)
        assert (room.shape, room.stride(), room.dtype) == (x.shape, x.stride(), x.dtype)
        trees.copied([room], [x])
        assert torch.equal(room, x) and room.untyped_storage().nbytes() <= x.untyped_storage().nbytes()


def test_calls_in_a_replay_are_counted(watched: Watched) -> None:
    before = OF_ATTENTION.replaced
    for _ in range(10):
        watched(draw(1))
    assert OF_ATTENTION.replaced - before == 10


def test_a_module_that_is_gone_takes_its_recordings_along(watched: Watched) -> None:
    watched.agrees()
    gone = weakref.ref(watched.module)
    watched.module = None  # type: ignore[assignment]
    gc.collect()
    assert gone() is None and not watched.steps._known


@pytest.mark.parametrize("fails", [False, True])
def test_recordings_are_dropped_after_the_loop(watched: Watched, fails: bool) -> None:
    """What comes after a diffusion needs the memory. What is known of the calls stays."""

    def sample(self: nn.Module) -> None:
        watched.agrees(10)
        assert recordings(watched) == 1
        if fails:
            raise KeyError("fails")

    parent = nn.ModuleList([watched.module, nn.Linear(1, 1)])
    run = graphs.loop(sample, Count())
    for predictions in (1, 2):
        watched.z = draw(predictions)
        with pytest.raises(KeyError) if fails else contextlib.nullcontext():
            run(parent)
        assert recordings(watched) == 0 and watched.recorder.recorded == predictions
        assert watched.replayed == predictions * 7
    watched.recorder.fails = RuntimeError("no more")
    for _ in range(2):
        watched.agrees(4)
        graphs.loop(lambda self: None, Count())(parent)
    assert watched.count.passed_on["it cannot be recorded: RuntimeError: no more"] == 8 - 1, "not tried again"


def test_threads(watched: Watched) -> None:
    failures: list[Any] = []

    def work(seed: int) -> None:
        z = draw(seed)
        with torch.no_grad():
            for step in range(40):
                x = draw(100 * seed + step)
                if not torch.equal(watched.module(x, z), watched.module.original(x, z)):
                    failures.append((seed, step))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and watched.replayed > 10
    assert watched.replayed + sum(watched.count.passed_on.values()) == 80


def test_a_compiled_step_is_the_original(watched: Watched) -> None:
    torch.compiler.reset()
    compiled = torch.compile(watched.module, backend="eager", fullgraph=True)
    with torch.no_grad():
        for seed in range(5):
            expected = watched.module.original(draw(seed), watched.z)
            torch.testing.assert_close(compiled(draw(seed), watched.z), expected)
    assert not watched.replayed and not watched.count.passed_on


def test_a_call_that_others_look_at(watched: Watched) -> None:
    watched.agrees()
    with torch.no_grad(), torch.device("cpu"):
        watched.module(draw(1), watched.z)
    (reason,) = watched.reasons - {FIRST}
    assert reason == "torch compiles, traces or transforms them, or a mode is on"


DENOISER = """
from torch import nn


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, z):
        return self.activate(self.linear(x)) + z

    def activate(self, x):
        return x
"""
SITE = Site("stepping_client", "Denoiser.forward", graphs.step)
LAYER = Site("stepping_client", "Denoiser.activate", lambda original, count: lambda self, x: 2 * x)


@pytest.fixture
def stepping(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The denoiser of an installed client that `patch` knows."""
    (tmp_path / "stepping_client.py").write_text(DENOISER)
    (tmp_path / "stepping-1.0.dist-info").mkdir()
    (tmp_path / "stepping-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: stepping\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    known = {
        "stepping": Client("stepping", "stepping", (), layers=(LAYER,), steps=(SITE,)),
        "still": Client("still", "stepping", ()),
    }
    monkeypatch.setattr(patching, "NAMES", tuple(known))
    monkeypatch.setattr(patching, "client", known.__getitem__)
    module = importlib.import_module("stepping_client")
    found = {str(SITE): digest(module.Denoiser.forward), str(LAYER): digest(module.Denoiser.activate)}
    monkeypatch.setitem(sources(), "stepping", {"1.0": found})
    monkeypatch.setitem(sources(), "still", {"1.0": {}})
    yield module.Denoiser().eval()
    sys.modules.pop("stepping_client", None)
    patching._active.clear()


def test_patch_records_if_it_is_asked_to(stepping: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    traced, original = Traced(), type(stepping).forward
    monkeypatch.setattr(graphs, "Recorder", lambda: traced)
    z = draw(1)
    with evoattn.patch("stepping", layers=False) as patched, torch.no_grad():
        assert not patched.sites and type(stepping).forward is original
        assert evoattn.patch("stepping", layers=False, graphs=True) is patched and patched.sites == (str(SITE),)
        for seed in range(8):
            assert torch.equal(stepping(draw(seed), z), original(stepping, draw(seed), z))
        assert patched.steps == {str(SITE): {"": 5, FIRST: 3}} and patched.calls == 0
        steps = type(stepping).forward._evoattn_steps
        assert steps._known
    assert type(stepping).forward is original and not steps._known, "undone"
    for line in (f"5  replayed as a CUDA graph: {SITE}", f"3  not replayed, {FIRST}: {SITE}"):
        assert line in str(patched)
    with patched, torch.no_grad():
        for seed in range(8):
            stepping(draw(seed), z)
    assert patched.steps == {str(SITE): {"": 10, FIRST: 6}} and traced.recorded == 2


def test_what_is_replaced_later_is_recorded_anew(stepping: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "Recorder", Traced)
    x, z = draw(1), draw(2)
    with evoattn.patch("stepping", layers=False, graphs=True) as patched, torch.no_grad():
        for _ in range(5):
            once = stepping(x, z)
        evoattn.patch("stepping", layers=True)
        for _ in range(5):
            torch.testing.assert_close(stepping(x, z) - z, 2 * (once - z))
        assert patched.steps[str(SITE)][""] == 4


def test_patch_without_a_gpu(stepping: Any) -> None:
    with evoattn.patch("stepping", layers=False, graphs=True) as patched, torch.no_grad():
        stepping(draw(1), draw(2))
    assert patched.steps == {str(SITE): {"": 0, ELSEWHERE: 1}}


def test_what_has_no_steps_and_what_has_moved(stepping: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="graphs must be False for 'still': CUDA graphs are recorded of 'stepping'"):
        evoattn.patch("still", layers=False, graphs=True)
    with evoattn.patch(layers=False, graphs=True) as every:
        assert every.sites == (str(SITE),)
    monkeypatch.setitem(sources(), "stepping", {"1.0": {str(SITE): "another"}})
    original = type(stepping).forward
    with pytest.raises(evoattn.clients.UnknownRelease, match="stepping_client:Denoiser"):
        evoattn.patch("stepping", layers=False, graphs=True)
    assert type(stepping).forward is original and not patching._active


def second(module: Any, samples: int, steps: int, length: int = 8) -> Tensor:
    """Coordinates that Boltz-2's diffusion samples, of random features."""
    from boltz.model.modules.encodersv2 import get_indexing_matrix, single_to_keys

    windows, tokens = 2, length
    atoms = 32 * windows
    indexing = get_indexing_matrix(windows, 32, 128, torch.device("cpu"))
    to_keys = functools.partial(single_to_keys, indexing_matrix=indexing, W=32, H=128)
    feats = {
        "ref_pos": draw(1, 1, atoms, 3),
        "atom_pad_mask": torch.ones(1, atoms),
        "token_pad_mask": torch.ones(1, tokens),
        "atom_to_token": nn.functional.one_hot(torch.arange(atoms) % tokens, tokens)[None],
        "record": [object()],
    }
    given = {
        "q": draw(2, 1, atoms, 16),
        "c": draw(3, 1, atoms, 16),
        "to_keys": to_keys,
        "atom_enc_bias": draw(4, 1, windows, 32, 128, 4),
        "atom_dec_bias": draw(5, 1, windows, 32, 128, 4),
        "token_trans_bias": draw(6, 1, tokens, tokens, 4),
    }
    torch.manual_seed(1)
    with torch.no_grad():
        found = module.sample(
            atom_mask=feats["atom_pad_mask"],
            num_sampling_steps=steps,
            multiplicity=samples,
            max_parallel_samples=None,
            steering_args=dict.fromkeys(("fk_steering", "physical_guidance_update", "contact_guidance_update"), False),
            s_trunk=draw(7, 1, tokens, 8),
            s_inputs=draw(8, 1, tokens, 8),
            feats=feats,
            diffusion_conditioning=given,
        )
    coordinates: Tensor = found["sample_atom_coords"]
    return coordinates


def first(module: Any, samples: int, steps: int, length: int = 8) -> Tensor:
    """The same of Boltz-1, whose first step fills a cache."""
    atoms, tokens = 64, length
    feats = {
        "ref_pos": draw(1, 1, atoms, 3),
        "ref_charge": draw(2, 1, atoms),
        "ref_element": draw(3, 1, atoms, 128),
        "ref_atom_name_chars": draw(4, 1, atoms, 4, 64),
        "token_index": torch.arange(tokens)[None],
        "ref_space_uid": torch.arange(atoms)[None] // 8,
        "atom_pad_mask": torch.ones(1, atoms),
        "token_pad_mask": torch.ones(1, tokens),
        "atom_to_token": nn.functional.one_hot(torch.arange(atoms) % tokens, tokens)[None].float(),
    }
    torch.manual_seed(1)
    with torch.no_grad():
        found = module.sample(
            atom_mask=feats["atom_pad_mask"],
            num_sampling_steps=steps,
            multiplicity=samples,
            max_parallel_samples=samples,
            steering_args=None,
            s_trunk=draw(7, 1, tokens, 8),
            s_inputs=draw(8, 1, tokens, 79),
            z_trunk=draw(9, 1, tokens, tokens, 8),
            relative_position_encoding=draw(10, 1, tokens, tokens, 8),
            feats=feats,
        )
    coordinates: Tensor = found["sample_atom_coords"]
    return coordinates


SMALL = {
    "token_s": 8,
    "atom_s": 16,
    "dim_fourier": 8,
    "atom_encoder_depth": 1,
    "atom_decoder_depth": 1,
    "token_transformer_depth": 1,
    "token_transformer_heads": 4,
}


@pytest.mark.slow
@pytest.mark.parametrize("version", [1, 2])
def test_boltz(version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("boltz.model.modules.diffusionv2", reason="Boltz is not installed", exc_type=ImportError)
    monkeypatch.setattr(graphs, "Recorder", Traced)
    name = "boltz.model.modules.diffusion" + ("v2" if version == 2 else "")
    kind = importlib.import_module(name).AtomDiffusion
    torch.manual_seed(0)
    if version == 2:
        module, sample = kind(SMALL), second
    else:
        more = {"token_z": 8, "atom_z": 8, "atom_feature_dim": 3 + 1 + 1 + 128 + 256}
        module, sample = kind({**SMALL, **more}, use_inference_model_cache=True), first
    module.eval()
    with torch.no_grad():
        for x in module.parameters():
            x.normal_(0, 0.3)
    calls = ((1, 6, 8), (2, 6, 12), (1, 6, 8))
    with evoattn.patch("boltz", layers=False):
        expected = [sample(module, *call) for call in calls]
    with evoattn.patch("boltz", layers=False, graphs=True) as patched:
        found = [sample(module, *call) for call in calls]
    assert all(map(torch.equal, found, expected))
    steps = patched.steps[f"{name}:DiffusionModule.forward"]
    eager = 3 if version == 2 else 4
    assert steps[""] == 3 * (6 - eager)
    assert patched.calls == 3 * 6 * 3


@pytest.mark.slow
@pytest.mark.parametrize("layers", [False, True])
def test_boltz_trunk(layers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trunk's blocks share a recording, with the random numbers that Boltz' blocks draw."""
    pytest.importorskip("boltz.model.layers.pairformer", reason="Boltz is not installed", exc_type=ImportError)
    monkeypatch.setattr(graphs, "Recorder", Traced)
    trunk = importlib.import_module("boltz.model.layers.pairformer").PairformerModule(16, 8, 6, 2, 0.25, 4, 2, v2=True).eval()
    with torch.no_grad():
        for x in trunk.parameters():
            x.normal_(0, 0.3)
    s, z, mask = draw(1, 1, 9, 16), draw(2, 1, 9, 9, 8), torch.ones(1, 9)

    def fold() -> tuple[Tensor, ...]:
        torch.manual_seed(5)
        made = s, z
        with torch.no_grad():
            for _ in range(3):
                made = trunk(*made, mask, pair_mask)
        return *made, torch.rand(3)

    pair_mask = mask[:, :, None] * mask[:, None]
    with evoattn.patch("boltz", layers=layers):
        expected = fold()
    with evoattn.patch("boltz", layers=layers, graphs=True) as patched:
        found = fold()
    assert all(map(torch.equal, found, expected))
    assert patched.steps["boltz.model.layers.pairformer:PairformerLayer.forward"] == {"": 15, FIRST: 3}


class Block(nn.Module):
    """A block of a trunk, in eval mode, which draws random numbers as Boltz' does."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.norm, self.product, self.drop, self.p = nn.LayerNorm(4), nn.Linear(4, 4), nn.Dropout(0.5), [0.25]
        self.wide = nn.Linear(4, width)
        self.register_buffer("offset", torch.rand(4))
        self.eval()

    def original(self, x: Tensor, mask: Tensor) -> Tensor:
        kept = (torch.rand(x.shape[:1]) >= 0).float()[:, None]
        return x + kept * mask * self.drop(self.product(self.norm(x))) * self.p[0] + self.offset + self.wide(x).sum(-1, True)

    forward = original


class Trunk:
    """Blocks that share recordings."""

    def __init__(self, blocks: int = 8) -> None:
        self.recorder, self.count = Traced(), Count()
        forward = graphs.step(Block.original, self.count, self.recorder, shared=True)
        self.kind = type("Block", (Block,), {"forward": forward})
        self.steps: graphs.Steps = forward._evoattn_steps  # type: ignore[attr-defined]
        torch.manual_seed(0)
        self.blocks = [self.kind() for _ in range(blocks)]
        self.mask = torch.ones(3, 1)

    def agrees(self, seed: int = 2) -> None:
        """The blocks return what the originals return, and leave the same random numbers."""
        found = expected = draw(seed)
        with torch.no_grad():
            state = torch.get_rng_state()
            for block in self.blocks:
                expected = block.original(expected, self.mask)
            after = torch.get_rng_state()
            torch.set_rng_state(state)
            for block in self.blocks:
                found = block(found, self.mask)
        assert torch.equal(found, expected) and torch.equal(torch.get_rng_state(), after)


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
    other = trunk.blocks[4]
    if what == "an attribute":
        other.norm.eps = 0.5
    elif what == "a list":
        other.p = [0.5]
    elif what == "a width":
        trunk.blocks[4] = trunk.kind(width=5)
    elif what == "a class":
        other.drop = nn.Identity()
    elif what == "an object":
        other.p = type("Mine", (), {"__getitem__": lambda self, i: 0.75})()
    else:
        other.drop.train()
        other.drop.p = 0.0
    trunk.agrees()
    assert trunk.count.replaced == 4 and sum(trunk.count.passed_on.values()) == 4


def test_blocks_in_inference_mode_and_blocks_that_want_gradients() -> None:
    trunk = Trunk()
    with torch.inference_mode():
        trunk.agrees()
    trunk.agrees()
    assert trunk.count.replaced == 10, "a mode has a recording of its own"
    x = draw(3)
    expected = trunk.blocks[0].original(x, trunk.mask)
    assert trunk.blocks[0](x, trunk.mask).requires_grad and torch.equal(trunk.blocks[0](x, trunk.mask), expected)
    assert trunk.count.passed_on["a gradient may be wanted"] == 2


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
    made: weakref.WeakKeyDictionary[Block, Tensor] = weakref.WeakKeyDictionary()
    original, generator = Block.original, torch.Generator()

    def making(self: Block, x: Tensor, mask: Tensor) -> Tensor:
        if self not in made:
            made[self] = torch.rand(1, generator=generator)
        return original(self, x, mask)

    trunk.steps._original = making
    trunk.agrees()
    assert trunk.count.replaced == 5


def test_a_block_that_draws_more_when_it_is_replayed_is_not_replayed() -> None:
    trunk = Trunk()
    replay = call_kinds.CallKind.replay

    def more(self: Any, *given: Any) -> Any:
        torch.rand(1)
        return replay(self, *given)

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
    assert not {id(x) for x in first._weights} & {id(x) for x in second._weights}
    assert all(x._weights for x in (first, second))


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


def test_what_is_computed_does_not_depend_on_a_clock() -> None:
    """Blocks whose recording is not faster go on as the ones before them."""
    from evoattn.clients import site

    trunk, seen, original = Trunk(), list[bool](), Block.original

    def watching(self: Block, x: Tensor, mask: Tensor) -> Tensor:
        seen.append(site.is_repeated())
        return original(self, x, mask)

    trunk.steps._original = watching
    trunk.recorder.takes = [0, 1.0, 0, 0.95]
    with torch.no_grad():
        for block in trunk.blocks:
            block(draw(1), trunk.mask)
    assert trunk.count.passed_on["a replay of its recording is not faster"] == 5
    assert len(seen) > 8 and all(seen[3:])


def test_blocks_are_ours_at_any_length_if_they_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short pair representation is left to the client because of the host, which a recording does not ask."""
    from evoattn.clients import layers, site

    seen: list[bool] = []
    monkeypatch.setattr(layers, "residues", lambda _: 6)
    monkeypatch.setattr(layers, "_counterpart", lambda module, arguments: (seen.append(site.is_repeated()), ""))
    count = Count()
    forward = graphs.step(layers.layer(Block.original, count, least=100), Count(), Traced(), shared=True)
    kind = type("Block", (Block,), {"forward": forward})
    with torch.no_grad():
        for block in [kind() for _ in range(3)]:
            block(draw(1), torch.ones(3, 1))
        layers.layer(Block.original, count, least=100)(kind(), draw(1), torch.ones(3, 1))
    assert seen == [True] * len(seen) and len(seen) >= 3
    assert count.passed_on.total() == 1


@pytest.mark.parametrize(
    ("least", "trained", "inference", "training"), [(5, None, 0, 0), (7, None, 1, 1), (0, 7, 0, 1), (7, 0, 1, 0)]
)
def test_short_inputs_are_left_to_the_client(
    least: int, trained: int | None, inference: int, training: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from evoattn.clients import layers

    monkeypatch.setattr(layers, "residues", lambda _: 6)
    monkeypatch.setattr(layers, "_counterpart", lambda module, arguments: (None, ""))
    for grad, left in ((False, inference), (True, training)):
        count = Count()
        with torch.set_grad_enabled(grad):
            layers.layer(Block.original, count, least, trained)(Block(), draw(1), torch.ones(3, 1))
        assert count.passed_on.total() == left


def test_large_blocks_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "residues", lambda *_: 7)
    count, recorder = Count(), Traced()
    forward = graphs.step(Block.original, count, recorder, shared=True, most=6)
    block = type("Block", (Block,), {"forward": forward})()
    with torch.no_grad():
        for _ in range(5):
            block(draw(1), torch.ones(3, 1))
    assert count.passed_on == {"more than 6 residues, which keep a GPU busy": 5} and not recorder.recorded


class Writer(Block):
    """A block that writes into its input, as blocks of trunks do in inference, unless it is told not to."""

    def original(self, x: Tensor, mask: Tensor, inplace_safe: bool = False) -> Tensor:
        update = mask * self.product(x)
        return x.add_(update) if inplace_safe else x + update

    forward = original


@pytest.mark.parametrize(
    ("instead", "training", "reasons"),
    [
        ({"inplace_safe": False}, False, {FIRST: 3}),
        (None, False, {FIRST: 1, "it changes its arguments": 7}),
        ({"inplace_safe": False}, True, {"the module is in training mode": 8}),
    ],
)
def test_what_is_recorded_does_not_write_into_its_input(
    instead: dict[str, bool] | None, training: bool, reasons: dict[str, int]
) -> None:
    count = Count()
    kind = type("Writer", (Writer,), {"forward": graphs.step(Writer.original, count, Traced(), shared=True, instead=instead)})
    blocks = [kind().train(training) for _ in range(8)]
    writes, mask = instead is None or training, torch.ones(3, 1)
    with torch.no_grad():
        for block in blocks:
            x = draw(1)
            expected = block.original(x, mask)
            assert torch.equal(block(x, mask, inplace_safe=True), expected)
            assert torch.equal(x, expected if writes else draw(1))
    assert count.passed_on == reasons and count.replaced == 8 - sum(reasons.values())


def test_an_argument_that_is_not_passed_is_not_replaced() -> None:
    seen: list[dict[str, Any]] = []

    def original(self: nn.Module, x: Tensor, **named: Any) -> Tensor:
        seen.append(named)
        return x + 1

    kind = type("Block", (Block,), {"forward": graphs.step(original, Count(), Traced(), instead={"inplace_safe": False})})
    with torch.no_grad():
        kind()(draw(1), chunk_size=4)
        kind()(draw(1), chunk_size=4, inplace_safe=True)
    assert seen == [{"chunk_size": 4}, {"chunk_size": 4, "inplace_safe": False}]


def test_a_limit_for_pairs_without_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Protenix, OpenDDE and OpenFold have no batch axis."""
    asked: list[int] = []
    monkeypatch.setattr(graphs, "residues", lambda _, axes: asked.append(axes))
    forward = graphs.step(Block.original, Count(), Traced(), shared=True, most=6)
    with torch.no_grad():
        type("Block", (Block,), {"forward": forward})()(draw(1), torch.ones(3, 1))
    assert asked == [3]


def test_a_loop_of_a_module_that_it_is_given(watched: Watched) -> None:
    """RosettaFold-3's sampler is no module. It is given the one whose parts are recorded."""

    def sample(self: object, *, diffusion_module: nn.Module) -> None:
        watched.agrees(10)
        assert recordings(watched) == 1

    parent = nn.ModuleList([watched.module])
    graphs.loop(sample, Count(), of="diffusion_module")(object(), diffusion_module=parent)
    assert recordings(watched) == 0 and watched.replayed == 7


def test_only_the_transformer_of_tokens_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """RosettaFold-3's transformers of atoms are of the same class, and have a pair representation of all atoms."""
    from evoattn.clients import rf3

    monkeypatch.setattr(graphs, "Recorder", Traced)
    count, original = Count(), Denoiser.original
    forward = rf3._tokens(lambda self, a, s, z, beta: original(self, a, s), count)
    kind = type("Denoiser", (Denoiser,), {"forward": forward})
    module, z = kind(), draw(1)
    assert kind.forward._evoattn_steps is forward._evoattn_steps
    with torch.no_grad():
        for beta in (None, True):
            for seed in range(6):
                assert torch.equal(module(draw(seed), z, z, beta), original(module, draw(seed), z))
    assert count.replaced == 3
    assert count.passed_on == {FIRST: 3, "a transformer of atoms, whose pairs take too much memory": 6}


def test_blocks_that_are_offloaded_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from evoattn.clients import openfold

    monkeypatch.setattr(graphs, "Recorder", Traced)
    count, seen = Count(), list[Any]()

    def original(self: nn.Module, m: Any, z: Any, **options: Any) -> Any:
        seen.append(options["inplace_safe"])
        return None if z is None else m + z

    module = type("Block", (Block,), {"forward": openfold._block(original, count)})()
    with torch.no_grad():
        for _ in range(5):
            assert module(None, None, inplace_safe=True, _offload_inference=True, _offloadable_inputs=[draw(1)]) is None
    assert seen == [True] * 5 and count.passed_on == {"MSA and pairs take turns on the GPU": 5}
    with torch.no_grad():
        z = draw(2)
        for _ in range(5):
            module(draw(1), z, inplace_safe=True)
    assert not any(seen[5:]) and count.replaced == 2
