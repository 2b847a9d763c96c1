"""Recordings of several kinds of calls: what tells calls apart, predictions in turn, tensors that move, threads."""

import contextlib
import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evoattn.clients import graphs
from evoattn.clients.graphs import FIRST, call_kinds, trees
from evoattn.clients.site import Count
from evoattn.core import keeping
from tests.clients.recording import OF_ATTENTION, Denoiser, Watched, draw, recordings
from tests.helpers.recorders import Traced


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
                actual = watched.module(draw(seed), watched.z) if mode is not None else None
            if not isinstance(mode, torch.autocast):
                assert torch.equal(actual, expected) and actual.is_inference() == isinstance(mode, torch.inference_mode)
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


def test_the_least_recently_used_recording_goes(watched: Watched) -> None:
    watched.z, lengths = draw(1, 4), [draw(1, length, 4) for length in range(1, 10)]
    for x in lengths:
        for _ in range(3):
            watched(x)
        watched(lengths[0])
    assert recordings(watched) == 8
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
@pytest.mark.parametrize("kept", [False, True])
def test_small_recordings_are_kept_after_the_loop(
    watched: Watched, kept: bool, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes after a diffusion needs the memory of the large ones. What is known of the calls stays."""
    if not kept:
        monkeypatch.setattr(call_kinds, "MOST_COPIED", 0)

    def sample(_: object) -> None:
        watched.agrees(10)
        assert recordings(watched) == 1
        if fails:
            raise KeyError("fails")

    run = graphs.loop(sample, Count())
    for predictions in (1, 2):
        watched.z = draw(predictions)
        with pytest.raises(KeyError) if fails else contextlib.nullcontext():
            run(object())
        assert recordings(watched) == kept and watched.recorder.recorded == (1 if kept else predictions)
        assert watched.replayed == (predictions * 10 - 3 if kept else predictions * 7)


def test_recordings_that_fail_are_not_tried_again(watched: Watched) -> None:
    watched.recorder.fails = RuntimeError("no more")
    for _ in range(2):
        watched.agrees(4)
        graphs.loop(lambda self: None, Count())(object())
    assert watched.count.passed_on["it cannot be recorded: RuntimeError: no more"] == 8 - 2, "not tried again"


def test_what_a_loop_shares_is_copied_once(watched: Watched) -> None:
    """A run may share other tensors than the one before, but none that moves in a run."""
    run = graphs.loop(lambda _: watched.agrees(8), Count())
    run(object())
    count = watched.replayed
    watched.z = draw(7)
    run(object())
    assert (watched.replayed - count, watched.recorder.recorded) == (8, 1)

    def moving(_: object) -> None:
        for turn in range(8):
            watched.z = draw(turn)
            watched.agrees(1)

    graphs.loop(moving, Count())(object())
    assert watched.recorder.recorded == 2
    watched.z.mul_(2)
    run(object())


def test_weights_that_change_between_loops_are_seen(watched: Watched) -> None:
    run = graphs.loop(lambda _: watched.agrees(8), Count())
    run(object())
    with torch.no_grad():
        watched.module.first.weight.mul_(2)
    run(object())
    assert watched.recorder.recorded == 2


def test_a_recording_of_tensors_without_versions_is_not_kept(watched: Watched) -> None:
    with torch.inference_mode():
        watched.z = draw(3)

        def sample(_: object) -> None:
            watched.agrees(8)
            watched.z.mul_(2)
            watched.agrees(4)

        graphs.loop(sample, Count())(object())
        assert recordings(watched) == 0


def test_what_a_graph_cannot_make_is_read_where_it_is() -> None:
    """It is made once in each run of a loop, so the recording ends with the run."""

    def body(_: Denoiser, x: Tensor, z: Tensor) -> Tensor:
        return x * keeping.made_once("sum", (z,), lambda: torch.tensor(z.sum().item()))

    watched = Watched(body)
    for turn in (1, 2):
        watched.z = draw(turn)
        graphs.loop(lambda _: watched.agrees(8, watched.z), Count())(object())
        assert (watched.recorder.recorded, watched.replayed, recordings(watched)) == (turn, turn * 5, 0)


def test_what_is_made_of_an_argument_that_moves_is_noticed(watched: Watched) -> None:
    """A recording makes it once, but each call has another argument."""

    def body(_: Denoiser, x: Tensor, new: Tensor) -> Tensor:
        return x * keeping.made_once("sum", (new,), lambda: new.sum(0))

    watched = Watched(body)
    graphs.loop(lambda _: [watched.agrees(1, draw(turn)) for turn in range(10)], Count())(object())
    assert watched.reasons == {FIRST, "a replay of its recording returned something else"}


def test_a_loop_keeps_no_module() -> None:
    watched, gone = Watched(), []
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(call_kinds, "MOST_COPIED", 0)
        graphs.loop(lambda _: watched.agrees(8), Count())(object())
    gone.append(weakref.ref(watched.module))
    watched.module = None  # type: ignore[assignment]
    gc.collect()
    assert gone[0]() is None


def test_a_beginning_that_fails_is_tried_again(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    run = graphs.loop(lambda _: watched.agrees(8), Count())
    run(object())
    kind = next(iter(next(iter(watched.steps._known.values())).kinds.values()))
    recording = kind._recording
    begin, watched.z = recording.begin, draw(9)

    def fails_once() -> None:
        recording.begin = begin
        raise RuntimeError("no memory")

    recording.begin = fails_once

    def sample(_: object) -> None:
        with torch.no_grad(), pytest.raises(RuntimeError, match="no memory"):
            watched.module(draw(2), watched.z)
        watched.agrees(8)

    graphs.loop(sample, Count())(object())
    assert watched.recorder.recorded == 1


def test_a_sampling_has_recordings_of_its_own(watched: Watched) -> None:
    """Layers may compute otherwise in it."""

    def body(_: Denoiser, x: Tensor) -> Tensor:
        return 2 * x if keeping.keeps() else x

    watched = Watched(body)
    watched.agrees(6)
    graphs.loop(lambda _: watched.agrees(6), Count())(object())
    watched.agrees(6)
    assert watched.replayed == 3 + 3 + 6


class Sampler(nn.Module):
    """A module whose steps are recorded whole, and how often its function ran."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.by, self.ran, self.settings = nn.Linear(4, 4), 2.0, [0], {"more": 1.0}
        self.eval()

    def net_of(self, x: Tensor) -> Tensor:
        self.ran[0] += 1
        return self.net(x) * self.by + self.settings["more"]

    def sample(self, step: Any) -> list[Tensor]:
        results = [step(self, draw(turn)) for turn in range(6)]
        assert all(torch.equal(x, self.net_of(draw(turn))) for turn, x in enumerate(results))
        return results


@torch.no_grad()
def test_a_whole_step_sees_what_its_module_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attributes, methods, methods of base classes, and hooks of the part that it calls."""
    monkeypatch.setattr(graphs, "Recorder", Traced)
    step = graphs.whole(lambda self, x: self.net_of(x), "net", "sample")
    module, called = type("Outer", (Sampler,), {})(), []
    sample = graphs.loop(lambda self: Sampler.sample(self, step), Count())
    for change in (
        lambda: None,
        lambda: setattr(module, "by", 3.0),
        lambda: module.settings.update(more=4.0),
        lambda: setattr(Sampler, "net_of", lambda self, x: self.net(x) * 5),
        lambda: setattr(module, "net_of", lambda x: module.net(x) * 7),
        lambda: module.net.register_forward_hook(lambda *_: called.append(1)),
    ):
        with monkeypatch.context():
            change()
            sample(module)
            module.sample = object()  # somebody wraps it to measure it
            before = module.ran[0]
            sample(module)
    assert len(called) == 2 * 2 * 6 and before == module.ran[0]


def test_a_fact_that_differs_is_recorded_anew() -> None:
    """What the host reads of a tensor decides what is recorded."""

    def body(_: Denoiser, x: Tensor, z: Tensor) -> Tensor:
        return x * 2 if keeping.fact("positive", z, lambda z: bool((z > 0).all())) else x

    watched = Watched(body)
    watched.z = torch.ones(3, 4)
    run = graphs.loop(lambda _: watched.agrees(8, watched.z), Count())
    earlier = []
    for value, recorded in ((1, 1), (2, 1), (-1, 2), (-2, 2), (3, 3)):
        watched.z = torch.full((3, 4), float(value))
        earlier.append(watched.z)
        run(object())
        assert watched.recorder.recorded == recorded


def test_calls_from_two_threads_give_the_same_bits(watched: Watched) -> None:
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
