"""Two records: noise is no change, a change beyond it is named, a regression above the threshold is exit status 1."""

import dataclasses
from pathlib import Path

import pytest

from evoattn import cli
from evoattn.bench import compare
from evoattn.bench import record as records
from evoattn.bench.compare import Change
from evoattn.bench.record import Record

from .conftest import a_record

STEADY = [1.00, 1.01, 0.99, 1.00, 1.02]
SLOWER = [1.10, 1.11, 1.09, 1.10, 1.12]


def compared(before: Record, after: Record) -> list[Change]:
    changes = compare.compare(before, after)
    assert changes is not None
    return changes


def regressions(before: Record, after: Record) -> list[tuple[str, str]]:
    return [(change.name, change.what) for change in compared(before, after) if change.is_regression]


def test_noise_is_no_change() -> None:
    noisy = [1.0, 1.4, 0.8, 1.2, 1.3]
    assert regressions(a_record(evoattn=noisy), a_record(evoattn=[x * 1.1 for x in noisy])) == []
    changes = compared(a_record(evoattn=noisy), a_record(evoattn=[x * 1.1 for x in noisy]))
    assert [change.beyond_noise for change in changes if change.what == "forward"] == [False]


def test_slower_beyond_noise_and_threshold() -> None:
    assert regressions(a_record(evoattn=STEADY), a_record(evoattn=SLOWER)) == [("evoattn", "forward")]
    assert regressions(a_record(evoattn=STEADY), a_record(evoattn=[1.04 * x for x in STEADY])) == []
    assert regressions(a_record(evoattn=SLOWER), a_record(evoattn=STEADY)) == []


def test_peers_are_no_regression() -> None:
    before, after = a_record(evoattn=STEADY, flex=STEADY), a_record(evoattn=STEADY, flex=SLOWER)
    assert regressions(before, after) == []
    text = compare.as_text(compared(before, after), before, after)
    assert "peers: 1 of 2 changed beyond noise and 1%" in text
    assert "the peers' times moved by +10.0% in the median" in text


def test_a_lost_time_is_a_regression_and_one_not_measured_is_not() -> None:
    before, after = a_record(evoattn=STEADY), a_record(evoattn=STEADY)
    after.problems[0].results[0] = dataclasses.replace(
        after.problems[0].results[0], times={}, status="wrong", reason="o is wrong"
    )
    assert regressions(before, after) == [("evoattn", "forward")]
    assert "wrong: o is wrong" in compare.as_text(compared(before, after), before, after)
    after.problems[0].results[0].status = "left out"
    assert regressions(before, after) == []


def test_more_memory_is_a_regression() -> None:
    before, after = a_record(evoattn=STEADY), a_record(evoattn=STEADY)
    after.problems[0].results[0].peak_bytes = 2 << 20
    assert regressions(before, after) == [("evoattn", "peak memory")]


def test_problems_are_matched_by_size_not_by_name() -> None:
    before, after = a_record(evoattn=STEADY), a_record(evoattn=SLOWER)
    after.problems[0].workload = dataclasses.replace(after.problems[0].workload, name="renamed", where="elsewhere")
    assert regressions(before, after) == [("evoattn", "forward")]
    after.problems[0].workload = dataclasses.replace(after.problems[0].workload, n=17)
    assert compare.compare(before, after) is None


def test_another_machine_is_named() -> None:
    before, after = a_record(evoattn=STEADY), a_record(evoattn=STEADY)
    after.machine["device"] = "another"
    after.machine["cute_dsl"] = "4.8.1"  # of which the older record knows nothing
    text = compare.as_text(compared(before, after), before, after)
    assert "NOTE    not the same device:" in text


@pytest.mark.parametrize(("after", "status", "said"), [(SLOWER, 1, "REGRESSION: 1 of"), (STEADY, 0, "no regression above 5%")])
def test_compare_exits_with_1_after_a_regression(
    after: list[float], status: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records.write(a_record(evoattn=STEADY), tmp_path / "a.json")
    records.write(a_record(evoattn=after), tmp_path / "b.json")
    assert cli.main(["bench", "--compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == status
    assert said in capsys.readouterr().out


def test_compare_refuses_records_without_a_common_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records.write(a_record(evoattn=STEADY), tmp_path / "a.json")
    other = a_record(evoattn=STEADY)
    other.problems[0].dtype = "float16"
    records.write(other, tmp_path / "b.json")
    assert cli.main(["bench", "--compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 2
    assert "no problem of the same sizes and dtype in common" in capsys.readouterr().err
    assert cli.main(["bench", "--compare", str(tmp_path / "a.json"), str(tmp_path / "none.json")]) == 2
    assert "none.json': cannot be read: No such file" in capsys.readouterr().err
    (tmp_path / "c.json").write_text("{}")
    assert cli.main(["bench", "--compare", str(tmp_path / "a.json"), str(tmp_path / "c.json")]) == 2
    assert 'c.json\': has no "schema"' in capsys.readouterr().err
