"""The script that times first predictions tells of each case in a line."""

import pathlib
from types import ModuleType

import pytest

from tests.helpers.scripts import load


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """benchmarks/first_predictions.py, which is a script."""
    return load("benchmarks/first_predictions.py")


SPEC = {"program": "boltz2", "length": 152, "case": "beside"}


def test_a_line_has_the_first_prediction_and_what_the_client_computed(script: ModuleType) -> None:
    record = {"seconds": [5.0, 4.0, 1.0, 0.5, 0.5, 0.4], "left": [120, 130, 130, 130, 130, 130]}
    record |= {"patch_s": 0.1, "build_s": 12.0}
    line = script.line(SPEC, record)
    assert "first 5.00 s, all 5.00 4.00 1.00 ... 0.50 0.40" in line
    assert "120 calls of the first by the client meanwhile, 130 in all" in line
    assert script.line(SPEC, "not done after 3 s").endswith("beside       not done after 3 s")


def test_imports_of_the_first_prediction_are_told(script: ModuleType) -> None:
    """Those between the marks that no other module imports."""
    lines = [
        "import time:       10 |    9000000 | before",
        script._MARK,
        "import time:      100 |     300000 |   inner",
        "import time:      100 |    2400000 | cutlass",
        "import time:      100 |     500000 | triton",
        script._MARK,
        "import time:      100 |    9000000 | after",
    ]
    assert script.slowest("\n".join(lines)) == ["cutlass 2.40 s", "triton 0.50 s"]


def test_a_process_that_takes_too_long_or_fails_has_no_times(script: ModuleType, tmp_path: pathlib.Path) -> None:
    spec = SPEC | {"steps": 1, "device": "no such device"}
    record, imports = script.Process(spec, tmp_path).run(0.01)
    assert record == "not done after 0 s" and not imports
    record, _ = script.Process(spec, tmp_path).run(60)
    assert record.startswith("failed: ")
