"""The doctor, on a healthy and on a broken machine."""

import dataclasses
import json
import re
import sys
from typing import Any

import pytest
import torch

import evoattn
from evoattn import cli
from evoattn.backends import Inputs, Outputs, Plan, tiled
from evoattn.cli import doctor
from evoattn.core.config import Config
from evoattn.core.problem import Problem


def test_doctor_lists_backends_and_holds(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "SECONDS", 600.0)  # a busy machine may take longer than a person wants to wait
    assert cli.main(["doctor"]) == 0
    text = capsys.readouterr().out
    for expected in ("versions", f"evoattn   {evoattn.__version__}", f"torch     {torch.__version__}", "devices", "backends"):
        assert expected in text
    for status in evoattn.backends():
        assert re.search(rf"^  {status.name} +(available|not available: .+)$", text, re.MULTILINE)
    assert re.search(rf"^  tiled +cpu +float32 +{len(doctor.CASES)} held$", text, re.MULTILINE)
    assert text.endswith("the self-check held\n")


def test_doctor_json_reports_checks_and_devices(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "SECONDS", 600.0)
    monkeypatch.setattr(doctor, "CASES", doctor.CASES[:2])
    assert cli.main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is True
    assert report["versions"]["torch"] == torch.__version__
    assert report["devices"][0]["device"] == "cpu"
    assert {status["name"] for status in report["backends"]} == {status.name for status in evoattn.backends()}
    assert report["auto"]["cpu"]["float64"]["backend"] == "tiled"
    passed = {(check["backend"], check["dtype"]): check["held"] for check in report["checks"] if check["device"] == "cpu"}
    for backend in ("tiled", "reference"):
        for dtype in ("float32", "bfloat16", "float16", "float64"):
            assert passed[backend, dtype] == list(doctor.CASES)


_right_forward = tiled.plan_forward


def broken_numbers(*arguments: Any, **options: Any) -> Plan:
    plan = _right_forward(*arguments, **options)

    def run(inputs: Inputs, outputs: Outputs) -> None:
        plan.run(inputs, outputs)
        outputs.o.mul_(1.01)

    return dataclasses.replace(plan, run=run)


def broken_call(*_: object, **__: object) -> None:
    raise RuntimeError("the kernel\nfell over")


@pytest.mark.parametrize(
    ("broken", "message"),
    [(broken_numbers, r"error of o: 1\.00e-02, allowed"), (broken_call, r"RuntimeError: the kernel fell over")],
)
def test_doctor_finds_a_broken_backend(
    broken: object, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiled, "plan_forward", broken)
    monkeypatch.setattr(doctor, "CASES", doctor.CASES[:2])
    monkeypatch.setattr(doctor, "SECONDS", 600.0)  # a busy machine may take longer than a person wants to wait
    assert cli.main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert re.search(rf"^    FAILED  case mask_and_both_biases: .*{message}", text, re.MULTILINE)
    assert re.search(r"^  tiled +cpu +float32 +.*2 FAILED$", text, re.MULTILINE)
    assert re.search(r"^  reference +cpu +float32 +2 held$", text, re.MULTILINE)
    assert "THE SELF-CHECK DID NOT HOLD" in text
    assert cli.main(["doctor", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    assert any(check["failed"] for check in report["checks"] if check["backend"] == "tiled")


def test_doctor_stops_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of time, every backend, device and dtype has still had the first case that it takes; the rest is not run."""
    right = tiled.unsupported

    def takes_no_mask_bias(problem: Problem, config: Config) -> list[str]:
        return ["takes no mask_bias"] if problem.mask_bias is not None else right(problem, config)

    monkeypatch.setattr(tiled, "unsupported", takes_no_mask_bias)
    monkeypatch.setattr(doctor, "SECONDS", 0.0)
    report = doctor.examine()
    assert report["ok"] is True
    for check in (check for check in report["checks"] if check["device"] == "cpu" and check["backend"] != "triton"):
        place = 1 if check["backend"] == "tiled" else 0
        assert check["held"] == [doctor.CASES[place]], check
        assert list(check["refused"]) == list(doctor.CASES[:place])
        assert check["not_run"] == list(doctor.CASES[place + 1 :])


def test_doctor_without_rich(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(doctor, "CASES", doctor.CASES[:1])
    assert cli.main(["doctor"]) == 0
    assert "the self-check held" in capsys.readouterr().out
