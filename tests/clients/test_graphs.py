"""Steps that are recorded and replayed, with a recorder that needs no GPU: what is replayed, what is not, and why."""

import collections
import functools
import itertools
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from evoattn.clients.graphs import FIRST, call_kinds, recorder, trees
from evoattn.core import guards
from tests.clients.recording import Watched, draw, recordings, times


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
    results = [watched(draw(1)) for _ in range(6)]
    assert len({x.data_ptr() for x in results}) == 6
    results[-1].zero_()
    assert torch.equal(watched(draw(1)), results[0]) and results[-2].any()


Pair = collections.namedtuple("Pair", ("left", "right"))


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
        actual = watched(x, feats, keys, more=more)
        torch.testing.assert_close(actual["x"], expected["x"], rtol=0, atol=0)
        assert actual["rest"][0] is None and type(actual["rest"][1]) is Pair and actual["rest"][1].right == 3
        assert torch.equal(actual["rest"][1].left, expected["rest"][1].left) and actual["rest"][2][1] == "a"
        assert torch.equal(actual["rest"][2][0], expected["rest"][2][0])
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


def test_hooks_run_and_pass_the_call_on(watched: Watched) -> None:
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


def test_a_look_at_a_call_sees_the_kernels_of_its_recording() -> None:
    """A call that torch has to see may launch others, which would be compiled for the look alone. Plans are on meta."""
    seen = []

    def run() -> None:
        seen.append(guards.only_computes())
        torch.empty(3, device="meta").new_zeros(2)
        with TorchFunctionMode():
            seen.append(guards.only_computes())
        with guards.Onlooker():
            seen.append(guards.only_computes())

    for precision, inference in itertools.product((None, torch.bfloat16), (False, True)):
        with torch.inference_mode(inference), torch.autocast("cpu", precision, enabled=precision is not None):
            recorder.scout(run, torch.device("cpu"))
            with TorchDispatchMode():
                seen.append(guards.only_computes())
    assert seen == [True, False, False, False] * 4


def test_what_computes_on_another_device_is_not_recorded() -> None:
    """Tensors without memory have no values: those of a call may stand beside them."""
    x = torch.ones(2)
    recorder.scout(lambda: x.new_empty(3, device="meta") + 1, x.device)
    with pytest.raises(trees.NotCaptured, match=r"it computes on another device \(aten.add"):
        recorder.scout(lambda: x + 1, torch.device("meta"))


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (lambda self, x: x + torch.rand_like(x), "it draws random numbers (aten.rand_like"),
        (lambda self, x: x * x.sum().item(), "its operations depend on values (aten._local_scalar_dense"),
        (lambda self, x: x if x.sum() > 0 else -x, "its operations depend on values (aten._local_scalar_dense"),
        (lambda self, x: x[x > 0], "its operations depend on values (aten.index"),
        (lambda self, x: [x, object()], "a replay cannot return a object"),
    ],
    ids=["random", "item", "branch", "mask", "result"],
)
def test_what_cannot_be_recorded_runs_as_it_was(body: Any, reason: str) -> None:
    watched = Watched(body)
    for seed in range(5):
        torch.manual_seed(seed)
        with torch.no_grad():
            expected = watched.module.original(draw(seed), watched.z)
        torch.manual_seed(seed)
        actual = watched(draw(seed))
        if isinstance(actual, Tensor):
            assert torch.equal(actual, expected)
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
    assert recorder.is_off(of_a_gpu, (q, q, q)) and recorder.is_off(of_a_gpu, (q, q, q, 0.0))
    assert not recorder.is_off(of_a_gpu, (q, q, q, 0.5))


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
    original = call_kinds.copies

    def no_memory(x: list[Tensor]) -> list[Tensor]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(call_kinds, "copies", no_memory)
    watched.agrees(3)
    monkeypatch.setattr(call_kinds, "copies", original)
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
        replayed_cache: dict[str, Any] = {}
        plain_cache: dict[str, Any] = {}
        for seed in range(start, start + 14):
            with torch.no_grad():
                expected = watched.module.original(draw(seed), watched.z, plain_cache)
            assert torch.equal(watched(draw(seed), replayed_cache), expected)
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


def test_a_look_at_a_step_does_not_import_torchs_compiler() -> None:
    """It takes seconds, in the first prediction of each process."""
    code = (
        "import sys, torch; from evoattn.clients.graphs.recorder import scout; from evoattn.core import guards\n"
        "x = torch.ones(3); scout(lambda: torch.softmax(x, -1) if guards.only_computes() else 1 / 0, x.device)\n"
        "print('torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
