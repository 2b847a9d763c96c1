"""The script that measures first calls has every case in its record."""

import json
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


@pytest.mark.slow
def test_a_process_that_fails_gives_no_times(first_calls: ModuleType, tmp_path: pathlib.Path) -> None:
    process = first_calls.Caches(tmp_path, tmp_path).start(0, {"length": 8, "device": "no such device", "channels": [8]})
    with pytest.raises(RuntimeError, match="status 1"):
        first_calls.measurements(process)
