"""The demo: a table, a picture, the check against float64, and alignments that it refuses."""

import dataclasses
import re
import sys
from pathlib import Path
from typing import Any

import demo
import pytest

from evoattn.backends import Plan, tiled

FAMILY = """\
>query
MQIFVKTLTGKTITLEVEPS
>second
MQIFVKTLTGKTiaITLEVEAS
>third
MLI-VKTLTGK-ITLDVE..
>fourth
----VRTLDGRTQTLEVEPS
"""
NAMES = ("MSA row + pair bias", "MSA column", "triangle, start node", "triangle, end node")


@pytest.fixture
def family(tmp_path: Path) -> Path:
    path = tmp_path / "family.a3m"
    path.write_text(FAMILY)
    return path


def run(path: Path, length: int = 16) -> int:
    """The exit status of a small demo."""
    picture = path.with_suffix(".png")
    return demo.main([str(path), "--quick", "--max-length", str(length), "--device", "cpu", "--output", str(picture)])


def test_the_demo_prints_a_table_and_draws_a_picture(family: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(family, 40) == 0
    printed = capsys.readouterr().out
    assert "family.a3m: 4 sequences x 20 columns, of 4 x 20" in printed
    for name in NAMES:
        rows = re.findall(rf"^{re.escape(name)} +(evoattn|dense) +(.*)$", printed, re.MULTILINE)
        assert [by for by, _ in rows] == ["evoattn", "dense"]
        for _, numbers in rows:
            forward, backward, peak, *errors = map(float, numbers.split())
            assert 0 < forward < 1e5 and 0 <= backward < 1e5 and 0.05 < peak < 1e3
            assert all(0 < error < 2e-5 for error in errors)
    assert re.search(r"^ *40 +[\d.]+ +[\d.]+ +[\d.]+ x +[\d.]+ +[\d.]+$", printed, re.MULTILINE)
    assert f"picture: {family.with_suffix('.png')}" in printed and "What to do next" in printed
    assert family.with_suffix(".png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_a_way_that_takes_too_long_stops(family: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setattr(demo, "PATIENCE_S", {"evoattn": 1e9, "dense": 0.0})
    assert run(family, 80) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^ *80 +[\d.]+ +- +[\d.]+ +-$", printed, re.MULTILINE)
    assert "dense was not run at L = 80: it would take about 0 s" in printed


def test_wrong_numbers_are_named(family: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert run(family) == 1
    assert re.search(r"BEYOND ITS BUDGET  dk: relative error 1\.0e-03, allowed", capsys.readouterr().out)


def test_one_sequence_and_no_matplotlib(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "one.a3m"
    path.write_text(">one\nMQIFVKTLTGKTITLEVEPS\n")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run(path) == 0
    assert "The picture needs matplotlib: pip install '.[docs]'" in capsys.readouterr().out


def test_the_demo_has_an_alignment_of_its_own() -> None:
    rows = demo.read_alignment(demo.EXAMPLE)
    assert rows[0].startswith("MQIFVKTLTGKTITLEVEPSDTIENVKAKIQDKEGIPPDQQRLIFAGKQLEDGRTLSDYNIQKESTLHLVLRLRGG")
    assert len(rows) > 50


def test_insertions_and_gaps_of_the_query_are_dropped(family: Path) -> None:
    assert demo.read_alignment(family)[1:3] == ["MQIFVKTLTGKTITLEVEAS", "MLI-VKTLTGK-ITLDVE--"]
    family.write_text("# a comment\n>a\nM-QB\n>b\nAKaa.-\n")
    assert demo.read_alignment(family) == ["MQX", "A--"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected an A3M or aligned FASTA file"),
        (">a\nMKV\n>b\nMK\n", "record 2 has 2 aligned columns; expected 3"),
        (">a\nMKV\n>b\nMK1\n", "record 2: '1' is neither an amino acid nor a gap"),
        (">a\nXX\n", "the first sequence has no known residue"),
        (None, "No such file"),
    ],
)
def test_an_alignment_that_cannot_be_used(text: str | None, message: str, tmp_path: Path, capsys: Any) -> None:
    if text is not None:
        (tmp_path / "a.a3m").write_text(text)
    with pytest.raises(SystemExit) as refused:
        run(tmp_path / "a.a3m")
    assert refused.value.code == 2 and message in capsys.readouterr().err
