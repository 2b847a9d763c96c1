"""The demo: a table, a picture, the check against float64, and names that it does not know."""

import dataclasses
import re
import sys
from pathlib import Path
from typing import Any

import demo
import pytest

from evoattn.backends import Plan, tiled

SMALL = ("tri16", "msa_row20n4", "diffusion16n2")


def run(folder: Path, *arguments: str) -> int:
    """The exit status of a small demo."""
    return demo.main([*(arguments or SMALL), "--device", "cpu", "--output", str(folder / "demo.png")])


def test_the_demo_prints_a_table_and_draws_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path) == 0
    printed = capsys.readouterr().out
    for title in (
        "triangle attention, 16 tokens",
        "MSA row attention with pair bias, 20 tokens",
        "diffusion transformer, 16 tokens",
    ):
        assert title in printed
    rows = re.findall(r" (evoattn|dense torch) +([\d.]+) ms +(\d+) MiB +([\d.]+) ms +(\d+) MiB +(\S+)$", printed, re.MULTILINE)
    assert [row[0] for row in rows] == ["evoattn", "dense torch"] * len(SMALL)
    for _, forward, _, both, peak, error in rows:
        assert 0 < float(forward) < 1e5 and 0 < float(both) < 1e5 and int(peak) < 100 and 0 < float(error) < 2e-5
    assert "Every error of evoattn is within its budget." in printed and "What to do next" in printed
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_what_does_not_fit_is_left_out(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "too_much", lambda needed, device: "too much" if needed else None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run(tmp_path, "tri16") == 0
    printed = capsys.readouterr().out
    assert re.search(r"^ +dense torch +not enough memory$", printed, re.MULTILINE)
    assert "The picture needs matplotlib: pip install '.[docs]'" in printed


def test_a_picture_of_what_does_not_fit(tmp_path: Path) -> None:
    cost = demo.Cost(dict.fromkeys(demo.PASSES, 1.0), dict.fromkeys(demo.PASSES, 1.0))
    demo.draw({"one": {"evoattn": cost}, "none": {}}, "about", tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 1000


def test_wrong_numbers_are_named(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backward that is off by a part in a thousand gives exit status 1."""
    right = tiled.plan_backward

    def wrong(*arguments: Any, **options: Any) -> Plan:
        plan = right(*arguments, **options)

        def run(*args: Any) -> Any:
            of_biases = plan.run(*args)
            args[-1][1].mul_(1.001)
            return of_biases

        return dataclasses.replace(plan, run=run)

    monkeypatch.setattr(tiled, "plan_backward", wrong)
    assert run(tmp_path, "tri17") == 1
    expected = r"BEYOND ITS BUDGET  triangle attention, 17 tokens, dk: relative error 1\.0e-03, allowed"
    assert re.search(expected, capsys.readouterr().out)


def test_an_attention_that_is_not_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        run(tmp_path, "square9")
    assert refused.value.code == 2 and "no workload 'square9'" in capsys.readouterr().err


def test_what_is_usual_has_names() -> None:
    assert all(demo.workload(name) for names in (*demo.USUAL.values(), demo.QUICK) for name in names)
