"""The script that measures first calls has every case in its record, and sees what compiles where."""

import json
import os
import pathlib
import sys
from types import ModuleType

import pytest

from tests.helpers.scripts import load


@pytest.fixture(scope="module")
def first_calls() -> ModuleType:
    """benchmarks/first_calls.py, which is a script."""
    return load("benchmarks/first_calls.py")


@pytest.mark.slow
def test_every_case_is_in_the_record(
    first_calls: ModuleType, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "record.json"
    words = ["--device", "cpu", "--length", "8", "--rounds", "1", "--crowd", "2", "--workers", "0", "--json", str(out)]
    monkeypatch.setattr(sys, "argv", ["first_calls.py", *words])
    first_calls.main()
    cases = json.loads(out.read_text())["cases"]
    assert [case["case"] for case in cases] == ["empty folders", "kept kernels", "2 processes at once"]
    for case in cases[:2]:
        assert [call["channels"] for call in case["calls"]] == [32, 48]
        assert all(call["forward_s"] > 0 and call["backward_s"] > 0 for call in case["calls"])
    assert len(cases[2]["done_s"]) == 2
    assert "last done after" in capsys.readouterr().out


def test_a_process_that_fails_gives_no_times(first_calls: ModuleType, tmp_path: pathlib.Path) -> None:
    process = first_calls.Caches(tmp_path, tmp_path).start(0, {"length": 8, "device": "no such device", "channels": [8]})
    with pytest.raises(RuntimeError, match="status 1"):
        first_calls.found(process)


def test_it_sees_what_this_process_and_its_workers_compile(
    first_calls: ModuleType, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90a")
    cutlass = pytest.importorskip("cutlass", reason="CuTe DSL is not installed: pip install 'evoattn[hopper]'")
    from evoattn.backends.hopper.backward.statistics import Statistics
    from evoattn.backends.hopper.host import launch, together
    from tests.hopper.test_kept_kernels import new_process
    from tests.hopper.test_together import until

    monkeypatch.setenv("EVOATTN_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv(together.VARIABLE, "1")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(together, "_PLACE", f"evoattn-test-{os.getpid()}-")
    monkeypatch.setattr(together, "_workers", together._Workers())
    monkeypatch.setattr(together, "_IDLE_S", 0.0)
    for of, name in ((together, "claim"), (together.Worker, "run"), (launch, "build")):
        monkeypatch.setattr(of, name, getattr(of, name))  # so that what the script puts there is undone
    new_process()
    watch = first_calls.Watch(0.0)
    watch.begin()
    first, last = (Statistics(cutlass.BFloat16, channels, dlse=False) for channels in (8, 16))
    launch.begin([first, last])
    launch.compiled(first)
    assert [name for name, _, _ in watch.lists["compiled"]] == [first.name]
    until(lambda: watch.lists["by_workers"])
    assert watch.lists["by_workers"][0][0] == "start"
    until(lambda: not together._workers.places)
    new_process()
