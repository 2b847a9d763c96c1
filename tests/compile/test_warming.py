"""What `evoattn warm` keeps without a GPU is what a call on the GPU looks for."""

import dataclasses
import os
import pathlib
from typing import Any

import pytest
import torch

os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")

from evoattn.cli.terminal import RefusedError
from evoattn.cli.warm import calls
from evoattn.cli.warm.calls import Call
from evoattn.cli.warm.cards import ARCHITECTURES, cards_of, local_cards
from evoattn.cli.warm.families import DTYPES, FAMILIES, LENGTHS, Attention
from evoattn.compile import workers
from evoattn.core import devices
from evoattn.core.config import Config
from evoattn.core.inputs import Cotangents, Inputs
from evoattn.core.layouts import empty_gradients, empty_outputs
from evoattn.dispatch.axes import canonicalise

TRIANGLE = Attention("triangle", 4, 32, n=40)
H200 = cards_of("sm_90a")[0]
PASSES = pytest.mark.parametrize(
    "training", [pytest.param(False, id="forward"), pytest.param(True, id="backward", marks=pytest.mark.slow)]
)


@pytest.fixture
def cache(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """An empty cache folder, of Triton too."""
    monkeypatch.setenv("EVOATTN_CACHE_DIR", str(tmp_path / "evoattn"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    return tmp_path


def warmed(call: Call) -> list[calls.Launched]:
    """All kernels of a call, compiled and kept as a worker does it."""
    found_calls = calls.find_all([call], H200)
    assert found_calls and not any(found_call.kernel.bytes for found_call in found_calls)
    sizes = [workers._done(found_call.kernel.task) for found_call in found_calls]
    kept = calls.find_all([call], H200)
    assert sizes == [(found_call.kernel.bytes, None) for found_call in kept]
    return kept


def on_cpu(call: Call) -> Inputs:
    """The same tensors with memory."""
    return Inputs(*(None if x is None else torch.empty_strided(x.shape, x.stride(), dtype=x.dtype) for x in call.inputs()))


def planned(call: Call, backend: Any) -> tuple[Any, tuple[Any, ...]]:
    """The plan that a call on the CPU would have if that were the card, made by the backend itself, and what it runs with."""
    inputs = canonicalise(on_cpu(call), "bnhld")[0]
    outputs = empty_outputs(inputs, "bnhld")
    options: dict[str, Any] = {"scale": 1.0, "layout": "bnhld", "config": Config()}
    if not call.training:
        return backend.plan_forward(inputs, **options), (inputs, outputs)
    needs = (True, True, True, False, True, False)
    values = Cotangents(torch.empty_like(inputs.q)), inputs, outputs
    plan = backend.plan_backward(*values, needs=needs, deterministic=False, **options)
    return plan, (*values, empty_gradients(inputs, "bnhld", needs))


@PASSES
def test_a_launch_reads_what_was_kept_for_hopper(training: bool, cache: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed: pip install '.[hopper]'")
    from evoattn.backends import hopper
    from evoattn.backends.hopper import ahead, launch

    call = Call(TRIANGLE, 96, torch.bfloat16, training)
    kept = warmed(call)
    assert {found_call.backend for found_call in kept} == {"hopper"}
    assert all(found_call.kernel.bytes > 10_000 for found_call in kept)
    assert {found_call.kernel.path for found_call in kept} == set((cache / "evoattn" / "hopper").iterdir())
    monkeypatch.setattr(ahead, "functions", {})
    monkeypatch.setattr(launch, "build", lambda kernel: pytest.fail(f"{kernel.name} is compiled"))
    loaded: list[str] = []

    def run(kernel: launch.KernelVariant) -> Any:
        assert callable(compiled(kernel))
        loaded.append(kernel.name)
        return lambda *arguments: None

    compiled = launch.load_kernel
    monkeypatch.setattr(launch, "load_kernel", run)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    plan, arguments = planned(call, hopper)
    plan.run(*arguments)
    assert set(loaded) == {found_call.kernel.name for found_call in kept}


@PASSES
def test_a_launch_reads_what_was_kept_for_triton(training: bool, cache: pathlib.Path) -> None:
    pytest.importorskip("triton.runtime._async_compile", reason="no Triton, or one that compiles no kernel ahead")
    import triton

    from evoattn.backends import triton as backend
    from tests.helpers.ahead_of_time import target

    call = Call(TRIANGLE, 96, torch.float32, training)
    kept = warmed(call)
    assert {found_call.backend for found_call in kept} == {"triton"}
    assert all(found_call.kernel.bytes > 10_000 for found_call in kept)
    hits: list[bool] = []
    with triton.knobs.compilation.scope(), devices.planned_for(H200), target("sm_90") as compiled:
        triton.knobs.compilation.listener = lambda cache_hit, **_: hits.append(cache_hit)
        plan, arguments = planned(call, backend)
        forget(compiled)
        plan.run(*arguments)
    assert hits and all(hits)
    assert {kernel.hash for kernel in compiled} == {found_call.kernel.key for found_call in kept}


def forget(compiled: list[Any]) -> None:
    """Have Triton look on disk for all kernels, as a new process does."""
    from tests.helpers.triton_kernels import KERNELS

    assert not compiled
    for kernel in KERNELS:
        kernel.jitted.device_caches.clear()


def test_finding_kernels_writes_nothing(cache: pathlib.Path) -> None:
    assert calls.find_all([Call(TRIANGLE, 96, torch.float32)], H200)
    assert calls.find_all([Call(TRIANGLE, 96, torch.bfloat16)], H200)
    assert list(cache.iterdir()) == []


def test_plans_for_another_card_are_not_kept() -> None:
    """Else a call on meta tensors, or one for another card, would find them."""
    attention = Attention("few", 4, 32, n=40)
    of = {
        arch: {call.backend for call in calls.find_all([Call(attention, 96, torch.bfloat16)], cards_of(arch)[0])}
        for arch in ("sm_80", "sm_90")
    }
    assert of["sm_80"] == {"triton"} and "hopper" in of["sm_90"]
    assert devices.planned() is None


ATTENTIONS = {attentions: name for name, attentions in FAMILIES.items()}
"""Each tuple of attentions once: some families have the same."""

QUICK = ("esmfold", "opendde")


@pytest.mark.parametrize(
    "attentions",
    [pytest.param(x, id=name, marks=[] if name in QUICK else pytest.mark.slow) for x, name in ATTENTIONS.items()],
)
def test_every_attention_of_a_family_has_plans(attentions: tuple[Attention, ...]) -> None:
    """On every architecture, in all its dtypes, at a length that divides by nothing."""
    for arch in ARCHITECTURES:
        for call in calls.calls_of(attentions, (77,), DTYPES, training=True):
            assert calls.find_all([call], cards_of(arch)[-1]), f"{call} on {arch}"


@pytest.mark.slow
def test_the_default_lengths_stand_for_others() -> None:
    """Kernels of lengths that nobody chose are among those of the default lengths."""

    def keys(lengths: tuple[int, ...]) -> set[tuple[str, str]]:
        planned = calls.calls_of(FAMILIES["esmfold"], lengths, (torch.bfloat16,), training=False)
        return {(call.backend, call.kernel.key) for call in calls.find_all(list(planned), H200)}

    assert keys((61, 143, 217, 322, 397, 486, 605, 751, 960, 1120, 1409, 1777)) <= keys(LENGTHS)


def test_the_cards_of_a_machine_know_what_their_plans_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kind once, since workers compile for a kind."""
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed: pip install '.[hopper]'")
    pytest.importorskip("triton")
    from evoattn.backends.hopper import clusters
    from evoattn.kit import cards as of_triton

    a100, h200 = (dataclasses.replace(cards_of(arch)[0], shared_memory=0, cache_bytes=0) for arch in ("sm_80", "sm_90"))
    cards = [a100, h200, h200]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(cards))
    monkeypatch.setattr(devices, "local_card", lambda device: cards[device.index])
    monkeypatch.setattr(of_triton, "_shared_memory", lambda device: 1000 + device.index)
    monkeypatch.setattr(of_triton, "cache_bytes", lambda device: 2000)
    monkeypatch.setattr(clusters, "count_on_this_machine", lambda size, shared, device: 132 // size - 1)
    local = local_cards()
    assert [(card.shared_memory, card.cache_bytes) for card in local] == [(1000, 2000), (1001, 2000), (1002, 2000)]
    assert local[0].clusters == () and local[1].clusters == (131, 65, 43, 32, 25, 21, 17, 15)
    monkeypatch.setattr(of_triton, "_shared_memory", lambda device: 1000)
    assert len(local_cards()) == 2


@pytest.mark.parametrize("arch", ["sm_70", "hopper", ""])
def test_an_unknown_architecture_is_refused(arch: str) -> None:
    with pytest.raises(RefusedError, match=r"unknown architecture .*; expected one of sm_80, .*, or sm_90a"):
        cards_of(arch)
