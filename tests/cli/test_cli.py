"""The command line of all commands: help, version, bad options, outputs that cannot be written."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import evoattn
from evoattn import cli
from evoattn.bench import record as records
from evoattn.workloads import workload

from .conftest import evoattn_run


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--help"], ("evoattn doctor", "evoattn run", "exit status")),
        (["doctor", "--help"], ("--json", "examples:", "exit status")),
    ],
)
def test_help_names_commands_and_options(
    arguments: list[str], expected: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 0
    text = capsys.readouterr().out
    for piece in expected:
        assert piece in text


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_an_output_that_is_full() -> None:
    with Path("/dev/full").open("w") as full:
        process = evoattn_run("bench", "--list", stdout=full)
    assert process == (2, "evoattn bench: error: what it found cannot be written: No space left on device\n")


def test_letters_that_the_output_does_not_have(tmp_path: Path) -> None:
    problem = records.Problem(workload("tri16"), "float32", 1000, [records.Result("evoattn")])
    path = tmp_path / "a.json"
    records.write(records.Record({"device": "a ± machine"}, {}, [problem]), path)
    with (tmp_path / "out").open("wb") as file:
        assert evoattn_run("bench", "--compare", str(path), str(path), stdout=file, PYTHONIOENCODING="ascii") == (0, "")
    assert (tmp_path / "out").read_bytes().startswith(b"before  a ? machine\n")


def test_version_option_prints_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"evoattn {evoattn.__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["doctor", "--nonsense"]])
def test_bad_command_line_exits_with_2_and_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert re.fullmatch(r"evoattn.*: error: .*\n", printed.err)


@pytest.mark.parametrize(("command", "extra"), [("bench", "extra"), ("doctor", "--foo"), ("tune", "--foo")])
def test_a_bad_option_points_to_the_help_of_its_command(command: str, extra: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([command, extra]) == 2
    expected = f"evoattn {command}: error: unrecognized arguments: {extra} (see evoattn {command} --help)\n"
    assert capsys.readouterr() == ("", expected)


def test_as_a_module() -> None:
    """In a fresh process: a refusal without a traceback; no plotting library is imported by the command line alone."""
    refused = subprocess.run([sys.executable, "-m", "evoattn", "run", "./gone"], capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert refused.stderr == "evoattn run: error: there is no file './gone'\n"
    code = "import sys, evoattn.cli; sys.exit(any(name in sys.modules for name in ('rich', 'matplotlib', 'triton')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
