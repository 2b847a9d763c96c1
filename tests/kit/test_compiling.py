"""Launches of a call that does not wait: workers compile the kernels that it would launch. Nothing here runs on a GPU."""

import pathlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton.runtime._async_compile", reason="no Triton, or one that compiles no kernel ahead")

from triton.runtime.jit import JITFunction

from evoattn.backends import triton as backend
from evoattn.cli.warm.cards import cards_of
from evoattn.compile import beside, cache
from evoattn.core import attempts, devices
from evoattn.core.config import Config
from evoattn.core.inputs import Inputs, Outputs
from evoattn.kit import compiling, launch, norm
from evoattn.pair.products import steps
from tests.helpers.beside import no_workers_yet


@pytest.fixture(autouse=True)
def launched(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of kernels that are launched on an H100, which is not there. None is kept."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    no_workers_yet(monkeypatch, idle_s=2.0)  # a start takes longer
    launch._plan_once.cache_clear()
    compiling._takes_files.cache_clear()
    compiling.digest_of_triton().result()
    names: list[str] = []
    run = JITFunction.run

    def note(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if warmup:
            return run(self, *args, grid=grid, warmup=True, **kwargs)
        names.append(self.__name__)
        return None

    monkeypatch.setattr(JITFunction, "run", note)
    with devices.planned_for(cards_of("sm_90a")[0]), compiling.named_driver((9, 0)):
        yield names
    launch._plan_once.cache_clear()
    compiling._takes_files.cache_clear()
    beside.tell.cache_clear()


def plan(dtype: torch.dtype) -> tuple[Any, tuple[Any, ...]]:
    """A plan of an attention, and what it is called with."""
    q, o = (torch.empty(1, 64, 2, 64, 32, dtype=dtype) for _ in range(2))
    mask, pair, lse = torch.ones(1, 64, 64, dtype=torch.bool), torch.empty(1, 2, 64, 64, dtype=dtype), torch.empty(1, 64, 2, 64)
    inputs = Inputs(q, q, q, mask, None, pair)
    run = backend.plan_forward(inputs, scale=0.25, layout="bnhld", config=Config()).run
    return run, (inputs, Outputs(o, lse, torch.zeros_like(lse)))


def normalise(x: torch.Tensor | None = None) -> None:
    norm.normalise(torch.ones(64, 128) if x is None else x, None, None, 1e-5, torch.bfloat16)


def attempted(call: Any) -> list[Any]:
    """The compilations for which a call was given up."""
    try:
        with attempts.attempt() as attempt:
            call()
    except attempts.NotCompiled:
        return attempt.waits_for
    return []


def finished(compilations: list[Any]) -> list[str | None]:
    return [x.result(120).error for x in compilations]


def test_all_kernels_of_a_call_are_asked_for_at_once_and_then_found(launched: list[str]) -> None:
    """Also those of plans with a tensor map, and with launches that overlap. The process itself compiles none."""
    calls = [plan(dtype) for dtype in (torch.bfloat16, torch.float32)]

    def call() -> None:
        normalise()
        for run, arguments in calls:
            run(*arguments)
        x = steps.split(torch.ones(64, 128), kind="norm")
        steps.product(x, steps.split(torch.ones(256, 128)))

    asked = attempted(call)
    assert len(asked) == 8 and not launched
    assert finished(asked) == [None] * 8
    assert attempted(call) == []
    attention = ["key_bias_kernel", "forward_kernel"]
    assert launched == ["norm_kernel", *attention, *attention, "split_kernel", "split_kernel", "product_kernel"]
    assert set(beside._submitted.values()) == set(asked)


def test_nothing_is_launched_after_a_kernel_that_is_missing(launched: list[str]) -> None:
    finished(attempted(normalise))
    normalise()
    assert launched == ["norm_kernel"]

    def call() -> None:
        steps.split(torch.ones(64, 128))
        normalise()

    (missing,) = attempted(call)
    assert launched == ["norm_kernel"]
    assert finished([missing]) == [None]


def test_a_repeated_launch_is_left_out_too() -> None:
    """It goes past Triton, and would write to the caller's memory."""
    one, repeated = launch.Launch(norm.norm_kernel, 1, (), {}), list[Any]()
    one._again = repeated.append
    x = torch.ones(2)

    def call() -> None:
        one(x)
        normalise()
        one(x)

    assert len(attempted(call)) == 1 and len(repeated) == 1


@pytest.mark.parametrize("empty", [True, False])
def test_no_call_waits_for_the_digest_of_triton_where_nothing_is_kept(
    empty: bool, launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where kernels are kept it does: else calls after `evoattn warm` would be left to the client."""
    digest: beside.Future[Any] = beside.Future()
    monkeypatch.setattr(compiling, "digest_of_triton", lambda: digest)
    monkeypatch.setattr(compiling, "_was_empty", lambda _: empty)
    if empty:
        assert attempted(normalise) == [digest] and not beside._submitted
    else:
        threading.Timer(0.2, digest.set_result, (None,)).start()
        assert attempted(normalise)[0] is not digest and digest.done()


@pytest.mark.slow
def test_a_kernel_of_unaligned_tensors_is_another(launched: list[str]) -> None:
    aligned, other = attempted(normalise), attempted(lambda: normalise(torch.ones(64 * 128 + 1)[1:].view(64, 128)))
    assert aligned[0] is not other[0]
    assert finished([*aligned, *other]) == [None, None]
    assert attempted(lambda: normalise(torch.ones(64 * 128 + 1)[1:].view(64, 128))) == []


def test_a_kernel_that_is_being_compiled_is_not_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    (first,) = attempted(normalise)
    monkeypatch.setattr(JITFunction, "run", lambda *_, **__: pytest.fail("Triton was asked"))
    monkeypatch.setattr(launch.Launch, "_compiling", beside.Future(), raising=False)
    assert attempted(normalise) == [first]


def test_a_process_without_workers_compiles_and_says_why(launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(beside.VARIABLE, "0")
    with pytest.warns(UserWarning, match=r"calls wait .* EVOATTN_COMPILERS is 0"):
        assert attempted(normalise) == []
    assert launched == ["norm_kernel"]


@pytest.mark.parametrize("place", ["unwritable", "old"])
def test_what_cannot_be_handed_on_is_compiled_here(place: str, launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    if place == "old":
        monkeypatch.setattr(compiling, "COMPILES_AHEAD", False)
    else:
        monkeypatch.setattr(cache, "takes_files", lambda _: False)
    with pytest.warns(UserWarning, match="calls wait for their kernels"):
        assert attempted(normalise) == []
    assert launched == ["norm_kernel"] and not beside._submitted


def test_a_worker_that_fails_leaves_the_kernel_to_the_call(launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "Task", lambda function, arguments: beside.Task("os:_exit", (3,)))
    (asked,) = attempted(normalise)
    assert "died" in str(finished([asked])[0])
    with pytest.warns(UserWarning, match=r"a worker did not compile a kernel: .* exit status 3"):
        assert attempted(normalise) == []
    assert launched == ["norm_kernel"]


def test_a_damaged_kernel_is_compiled_anew(tmp_path: pathlib.Path, launched: list[str]) -> None:
    """Half of a kernel's metadata is there, as a full disk leaves it."""
    finished(attempted(normalise))
    norm.norm_kernel.jitted.device_caches.clear()
    launch._plan_once.cache_clear()
    for file in tmp_path.glob("*/*.json"):
        if "__grp__" not in file.name:
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.warns(UserWarning, match="in Triton's cache is damaged"):
        assert attempted(normalise) == []
    assert launched == ["norm_kernel"]


def test_a_kernel_in_a_folder_that_was_moved_is_not_kept(tmp_path: pathlib.Path) -> None:
    """Triton looks for it where it was written."""
    finished(attempted(normalise))
    (group,) = tmp_path.glob("*/__grp__*")
    assert compiling.kept_bytes(group.parent) > 0
    assert compiling.kept_bytes(group.parent.rename(tmp_path / "moved")) == 0


def test_a_call_that_is_no_attempt_compiles_as_before(launched: list[str]) -> None:
    normalise()
    assert launched == ["norm_kernel"] and not beside._submitted
