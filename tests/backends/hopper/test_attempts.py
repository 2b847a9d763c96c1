"""Hopper kernels of calls that do not wait for them. Nothing here runs on a GPU."""

import importlib
import pathlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is not installed: pip install '.[hopper]'")

from evoattn.backends import hopper
from evoattn.backends.hopper import ahead, launch
from evoattn.cli.warm.cards import cards_of
from evoattn.compile import beside
from evoattn.core import attempts, devices
from evoattn.core.config import Config
from evoattn.core.inputs import Inputs
from tests.helpers.beside import no_workers_yet
from tests.helpers.kept_kernels import kept, new_process
from tests.helpers.small_kernels import kernels


@pytest.fixture(autouse=True)
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
    """An empty cache folder, no kernel in memory, and four cores."""
    monkeypatch.setenv("EVOATTN_CACHE_DIR", str(tmp_path))
    no_workers_yet(monkeypatch)
    hopper._was_empty.cache_clear()
    hopper._import_compiler.cache_clear()
    new_process()
    yield tmp_path
    new_process()
    hopper._was_empty.cache_clear()
    hopper._import_compiler.cache_clear()
    beside.tell.cache_clear()


def attempted(call: Any) -> tuple[Any, list[Any]]:
    """What a call returns, and the compilations for which it was given up."""
    try:
        with attempts.attempt() as attempt:
            found = call()
    except attempts.NotCompiled:
        return None, attempt.waits_for
    return found, []


def test_workers_compile_what_a_call_lacks(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "build", lambda kernel: pytest.fail(f"{kernel.name} is compiled here"))
    several = kernels()[:2]

    def call() -> list[Any]:
        return [ahead.load_kernel(kernel) for kernel in several]

    _, asked = attempted(call)
    assert len(asked) == 2
    assert [x.result(120).error for x in asked] == [None, None]
    assert len(kept(folder)) == 2
    found, asked = attempted(call)
    assert all(map(callable, found)) and not asked
    assert attempted(call)[0] == found


@pytest.mark.filterwarnings("ignore:.* each process compiles its kernels")
@pytest.mark.parametrize("place", ["", "a file"])
def test_kernels_that_cannot_be_handed_on_are_waited_for(
    place: str, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "a file").touch()
    monkeypatch.setenv("EVOATTN_CACHE_DIR", place and str(folder / place))
    with pytest.warns(UserWarning, match=r"calls wait for their kernels to be compiled: .*(is empty|cannot be written)"):
        found, asked = attempted(lambda: ahead.load_kernel(kernels()[0]))
    assert callable(found) and not asked


def plan() -> Any:
    """Plan a forward for an H100, which is not there."""
    q, pair = torch.empty(1, 32, 2, 128, 32, dtype=torch.bfloat16, device="meta"), torch.empty(1, 2, 128, 128, device="meta")
    with devices.planned_for(cards_of("sm_90a")[0]):
        return hopper.plan_forward(Inputs(q, q, q, None, None, pair), scale=0.2, layout="bnhld", config=Config())


@pytest.mark.slow
def test_the_first_call_on_a_bare_machine_does_not_import_the_compiler(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker plans it, and compiles its kernels. Then the process imports the compiler, and finds them."""
    monkeypatch.setattr(hopper, "_COMPILER", "evoattn.backends.hopper.launched")
    planned, asked = attempted(plan)
    assert planned is None and len(asked) == 1
    assert attempted(plan) == (None, asked)
    assert asked[0].result(120).error is None
    began, importing = threading.Event(), importlib.import_module
    monkeypatch.setattr(importlib, "import_module", lambda name: (began.wait(), importing(name.removesuffix("ed")))[1])
    planned, asked = attempted(plan)
    assert planned is None and len(asked) == 1, "a thread imports the compiler"
    assert attempted(plan) == (None, asked)
    began.set()
    assert asked[0].result(60) is None
    planned, asked = attempted(plan)
    assert planned is not None and not asked
    names = {kernel.name for kernel in planned.kernels}
    assert {path.name.rpartition("-")[0] for path in kept(folder)} == names and names


def test_where_kernels_are_kept_the_first_call_has_them(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "hopper").mkdir()
    (folder / "hopper" / "another.o").touch()
    monkeypatch.setattr(hopper, "_COMPILER", "evoattn.backends.hopper.launched")
    planned, asked = attempted(plan)
    assert planned is not None and not asked
