"""`evoattn run`: its last line says no more than is known, and its status is the program's whatever becomes of the line."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from evoattn.cli import main, run
from evoattn.clients import parent, running
from tests.clients.program import Program

WITHOUT = "env={name: text for name, text in os.environ.items() if name != 'PYTHONPATH'}"


def test_a_worker_with_a_clean_environment_is_not_denied(program: Program) -> None:
    """Its launcher reads the start-up file and imports nothing; the worker reads nothing and imports all."""
    (program.folder / "program.py").write_text(
        f"import os, subprocess, sys\nsubprocess.run([sys.executable, '-c', 'print(1)'], {WITHOUT})\n"
    )
    status, out, line = program.run()
    assert (status, out) == (0, "1\n")
    command = parent._shown(f"{shutil.which('python', path=os.path.dirname(sys.executable))} program.py")
    assert line == (
        "evoattn run: nothing was patched: no attention of toy was imported in the Python process that read evoattn's start-up "
        f"file ({command}). {parent.UNREAD}"
    )


def test_processes_that_read_the_file_are_named(tmp_path: pathlib.Path) -> None:
    for number, command in enumerate(("python launch.py", "python\n\x1b[31m worker.py", "python " + "x " * 99, "4", "5")):
        (tmp_path / f"{number}{parent.BEGAN}").write_text(command)
        os.utime(tmp_path / f"{number}{parent.BEGAN}", (number, number))
    line = parent.summary(tmp_path, ("boltz", "esmfold"))
    assert "in the 5 Python processes that read evoattn's start-up file (python launch.py; python ?[31m worker.py; " in line
    assert line.endswith(f"x ...; 2 more). {parent.UNREAD}")
    running.Tally(tmp_path).add("patched", "boltz", "2.2.1")
    line = parent.summary(tmp_path, ("boltz",))
    assert line.startswith("boltz 2.2.1 patched, but no attention was called in the 5 Python processes that read")


def test_a_folder_that_the_program_removed_is_named(tmp_path: pathlib.Path) -> None:
    gone = tmp_path / "gone"
    line = parent.summary(gone, ("boltz",))
    assert line.startswith(f"nothing was counted: the program removed {gone}. A Python process that")


@pytest.mark.parametrize(
    "where", ["2>/dev/full", "<&- >&- 2>&-", *(pytest.param(x, marks=pytest.mark.slow) for x in ("2>&-", "2>pipe"))]
)
def test_the_status_is_the_programs_if_the_line_cannot_be_written(where: str, tmp_path: pathlib.Path) -> None:
    """Standard error is full, closed, or has no reader."""
    where = where.replace("2>pipe", "2> >(exec true)")
    command = f"sleep 0.1; {sys.executable} -m evoattn run sh -c 'exit 4' {where}; exit $?"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 4
    assert done.stdout == "", "the line is no output of the program"


def test_a_refusal_has_its_status_if_it_cannot_be_written(tmp_path: pathlib.Path) -> None:
    for where in ("2>/dev/full", "2>&-"):
        command = f"{sys.executable} -m evoattn run no_such_command {where}; exit $?"
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=tmp_path, check=False)
        assert (done.returncode, done.stdout) == (2, "")


def test_a_program_to_execute_and_not_to_read(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As root, permissions refuse nothing: the error of the system is made by hand."""
    program = shutil.copy(shutil.which("true") or "", tmp_path / "program")

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(run, "open", refuse, raising=False)
    assert main(["run", str(program)]) == 0
    assert "Traceback" not in capfd.readouterr().err
