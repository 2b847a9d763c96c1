"""dev.py: folders that commands run in, environments, Ctrl-C."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.helpers.scripts import ROOT, load


@pytest.fixture
def dev(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """dev.py of a checkout in a folder of its own, called from another one."""
    module = load("dev.py", "evoattn_dev")
    (tmp_path / "checkout").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setattr(module, "ROOT", tmp_path / "checkout")
    monkeypatch.setattr(module, "ENVIRONMENT", tmp_path / ".venv")
    monkeypatch.chdir(tmp_path / "elsewhere")
    return module


def test_dev_runs_what_takes_files_where_it_is_called(dev: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    called: dict[str, Path] = {}
    monkeypatch.setattr(dev, "set_up", lambda environment: environment)
    for command in dev.COMMANDS:
        monkeypatch.setattr(dev, "run", lambda arguments, folder, command=command: called.update({command: folder}))
        dev.main([command, "my.a3m"])
    assert {command for command, folder in called.items() if folder == Path.cwd()} == {"demo", "doctor", "bench", "proofs"}
    assert {folder for folder in called.values() if folder != Path.cwd()} == {dev.ROOT}


def test_dev_runs_a_script_of_the_benchmarks(dev: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its short name, with what follows; other arguments are those of `evoattn bench`."""
    called: list[list[str]] = []
    monkeypatch.setattr(dev, "set_up", lambda environment: environment)
    monkeypatch.setattr(dev, "run", lambda arguments, folder: called.append(arguments))
    for name, script in dev.BENCHMARKS.items():
        dev.main(["bench", name, "--json", "a.json"])
        assert called[-1][1:] == [str(dev.ROOT / "benchmarks" / script), "--json", "a.json"]
        assert (ROOT / "benchmarks" / script).exists()
    dev.main(["bench", "--list"])
    assert called[-1][1:] == ["bench", "--list"]


@pytest.mark.slow
def test_dev_gives_a_half_made_environment_its_pip(dev: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """What else is in it stays."""
    for name in ("pyproject.toml", "constraints.txt"):
        (dev.ROOT / name).write_text("")
    monkeypatch.setattr(dev, "CONSTRAINTS", dev.ROOT / "constraints.txt")
    dev.venv.create(dev.ENVIRONMENT, with_pip=False)
    (dev.ENVIRONMENT / "mine").write_text("")
    python = str(dev.ENVIRONMENT / dev.SCRIPTS / "python")
    assert not dev.has_pip(python)
    run, commands = dev.run, []
    monkeypatch.setattr(dev, "run", lambda command, *_: run(command) if "ensurepip" in command else commands.append(command))
    dev.set_up(dev.ENVIRONMENT)
    assert dev.has_pip(python) and (dev.ENVIRONMENT / "mine").exists()
    assert len(commands) == 2 and all("install" in command for command in commands)


def test_dev_compares_every_client_in_an_environment_of_its_own(dev: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that differs does not keep the others from running."""
    environments, compared, modules = [], [], []

    def run(command: list[str], folder: Path) -> None:
        assert folder == dev.CLIENTS.parent
        compared.append(command[-1])
        modules.append(command[-2])
        if command[-1] == "boltz":
            sys.exit(1)

    monkeypatch.setattr(
        dev, "set_up", lambda environment, requirements: (environments.append((environment, requirements)), environment)[1]
    )
    monkeypatch.setattr(dev, "run", run)
    with pytest.raises(SystemExit, match="not the same with and without the patch: boltz"):
        dev.main(["clients"])
    assert environments == [(dev.ROOT / "build" / "clients" / name, dev.CLIENTS / f"{name}.txt") for name in compared]
    assert {"boltz", "esmfold"} <= set(compared)
    dev.main(["clients", "esmfold"])
    assert compared[-1] == "esmfold"
    with pytest.raises(SystemExit, match="unknown: bolz; the clients are .*boltz, "):
        dev.main(["clients", "bolz"])
    with pytest.raises(SystemExit, match="not the same with and without the patch: boltz"):
        dev.main(["clients", "--whole", "boltz"])
    assert environments[-1] == (dev.ROOT / "build" / "clients" / "boltz-whole", dev.CLIENTS / "whole" / "boltz.txt")
    assert set(modules[:-1]) == {"clients"} and modules[-1] == "clients.whole"
    with pytest.raises(SystemExit, match="unknown: esmfold; the whole programs are boltz"):
        dev.main(["clients", "esmfold", "--whole"])


@pytest.mark.skipif(os.name == "nt", reason="needs signals of POSIX")
def test_dev_waits_for_what_ctrl_c_ends() -> None:
    """The command has its time to write what it has; then the status is 130, without a traceback."""
    child = (
        "import os, signal, sys, time\n"  # print may still be at "ready" when the signal comes
        "signal.signal(signal.SIGINT, lambda *_: (time.sleep(1), os.write(1, b'written\\n'), sys.exit(130)))\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)"
    )
    code = f"import sys, dev; dev.run([sys.executable, '-c', {child!r}])"
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        os.killpg(process.pid, signal.SIGINT)
        printed = process.communicate(timeout=60)
    assert (process.returncode, *printed) == (130, "written\n", "")
