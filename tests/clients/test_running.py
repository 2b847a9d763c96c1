"""`evoattn run` of a toy client: in children, at signals, and in programs that end in all ways."""

import os
import pathlib
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from evoattn.cli import run
from tests.clients.program import SIGNALS, Program


def test_a_program_and_its_children_are_patched(program: Program) -> None:
    """A spawned process, a forked one that is killed, and one that replaces itself."""
    program.write(
        """
        import multiprocessing, os, signal, subprocess, sys
        from toy_client import layers, model

        def one(times):
            for _ in range(times):
                layers._attention(x, x, x, [])

        if __name__ == "__main__":
            assert "startup" not in " ".join(sys.path), sys.path
            one(1)
            model.long(x)
            if sys.argv[1:] == ["last"]:
                sys.exit(7)
            spawned = multiprocessing.get_context("spawn").Process(target=one, args=(10,))
            spawned.start()
            spawned.join()
            if os.fork() == 0:
                one(100)
                os.kill(os.getpid(), signal.SIGKILL)
            os.wait()
            os.execv(sys.executable, [sys.executable, __file__, "last"])
        """
    )
    status, _, line = program.run()
    assert status == 7
    # Two of the program, and two more once it has replaced itself; 10 and 100.
    summary, others = line.removeprefix("evoattn run: ").split("; ")
    assert summary == "114 attention calls of toy 1.0 computed by evoattn on tiled"
    assert others == "2 attention calls by the original: too long"


@pytest.mark.slow
def test_a_module_with_arguments(program: Program) -> None:
    program.write("import sys, toy_client.layers\nprint(sys.argv[1:])")
    status, out, line = program.run("-m", "program", "-m", "--patch", "--help")
    assert (status, out) == (0, "['-m', '--patch', '--help']\n")
    assert line.startswith("evoattn run: toy 1.0 patched, but no attention was called in the Python process that read ")


def test_a_sitecustomize_of_the_user_runs_too(program: Program) -> None:
    (program.folder / "sitecustomize.py").write_text("import builtins\nbuiltins.of_the_user = __file__\n")
    (program.folder / "program.py").write_text("import sitecustomize\nassert of_the_user == sitecustomize.__file__\n")
    status, _, line = program.run()
    assert status == 0 and line.startswith("evoattn run: nothing was patched: no attention of toy was imported in the Python ")


@pytest.mark.slow
def test_a_release_that_is_not_known_is_left_alone_and_named(program: Program) -> None:
    program.write("from toy_client.layers import _attention\nassert not hasattr(_attention, '__wrapped__')", known="''")
    status, _, line = program.run()
    assert status == 0
    assert line.startswith("evoattn run: toy was not patched: toy 1.0 has another toy_client.layers:_attention; known are 1.0")
    status, out, line = program.run("--patch", "toy", "python", "-c", "print('ran')")
    assert (status, out) == (2, "") and "has another toy_client.layers:_attention" in line


@pytest.mark.parametrize(
    "number",
    [pytest.param(x, id=x.name, marks=[] if x == signal.SIGTERM else pytest.mark.slow) for x in SIGNALS],
)
def test_signals_are_the_programs(program: Program, number: signal.Signals) -> None:
    """It handles the first, and dies of the second; calls before that count."""
    program.write(
        f"""
        import os, signal, time
        from toy_client import layers
        layers._attention(x, x, x, [])
        def handle(*_):
            signal.signal({int(number)}, signal.SIG_DFL)
            os.write(1, b"handled\\n")  # print may still be at "ready"
        signal.signal({int(number)}, handle)
        print("ready", flush=True)
        while True:
            time.sleep(0.05)
        """
    )
    process = program.start("python", "program.py")
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for answer in ("handled\n", ""):
        process.send_signal(number)
        assert process.stdout.readline() == answer
    _, errors = process.communicate(timeout=60)
    assert process.returncode == -number
    assert "1 attention call of toy 1.0 computed by evoattn on tiled" in errors


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT], ids=lambda x: x.name)
def test_a_signal_for_evoattn_run_alone_is_passed_on(program: Program, tmp_path: pathlib.Path, number: signal.Signals) -> None:
    """As `kill -INT`, Slurm and supervisors send it. No temporary folder stays."""
    handle = f"signal.signal({int(number)}, lambda *_: sys.exit(5)); print('ready', flush=True)"
    wait = "[time.sleep(0.1) for _ in range(300)]"  # a signal just before a sleep is handled after it
    process = program.start("python", "-c", f"import signal, sys, time; {handle}; {wait}")
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(number)
    process.communicate(timeout=20)
    assert process.returncode == 5
    assert not list(tmp_path.glob("evoattn-run-*"))


def test_a_terminal_tells_the_program_itself(program: Program) -> None:
    """Ctrl-C is handled once, not once more because `evoattn run` passes it on."""
    handle = "signal.signal(2, lambda *_: print('got', flush=True)); print('ready', flush=True)"
    wait = "[time.sleep(0.1) for _ in range(15)]"
    master, slave = os.openpty()
    process = program.start("python", "-c", f"import signal, time; {handle}; {wait}", terminal=os.ttyname(slave))
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    os.write(master, b"\x03")
    out, _ = process.communicate(timeout=20)
    assert (process.returncode, out) == (0, "got\n")


def wait(monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[], object], *command: str) -> int:
    """The status of a command, after something that is done before it starts."""
    right = run.start

    def start(*arguments: Any) -> subprocess.Popen[bytes]:
        meanwhile()
        return right(*arguments)

    monkeypatch.setattr(run, "start", start)
    return run._wait([shutil.which(command[0]) or "", *command[1:]], {**os.environ})


def test_a_signal_before_there_is_a_program_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    assert wait(monkeypatch, lambda: os.kill(os.getpid(), signal.SIGUSR1), "sleep", "30") == -signal.SIGUSR1


def test_handlers_are_put_back_and_ignored_signals_stay_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """As nohup and a shell's background ignore some."""
    handler = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    try:
        before = {number: signal.getsignal(number) for number in signal.valid_signals()}

        def look() -> None:
            assert signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGUSR1) != before[signal.SIGUSR1]
            assert signal.getsignal(signal.SIGCHLD) == before[signal.SIGCHLD]

        assert wait(monkeypatch, look, "true") == 0
        assert {number: signal.getsignal(number) for number in signal.valid_signals()} == before
    finally:
        signal.signal(signal.SIGUSR2, handler)


def test_evoattn_run_stops_with_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-Z reaches the program, then stops this process by the signal's default, and is handled again afterwards."""
    seen: list[object] = []

    class Stopped:
        """A program that is stopped while it is waited for."""

        pid = os.getpid()

        def send_signal(self, number: int) -> None:
            seen.append(("program", number))

        def wait(self) -> int:
            handler: Any = signal.getsignal(signal.SIGTSTP)
            handler(signal.SIGTSTP, None)
            assert signal.getsignal(signal.SIGTSTP) == handler
            return 0

    monkeypatch.setattr(run, "in_foreground", lambda child: False)
    monkeypatch.setattr(run, "start", lambda *_: Stopped())
    monkeypatch.setattr(run.os, "kill", lambda pid, number: seen.append((pid, number, signal.getsignal(number))))
    assert run._wait([], {}) == 0
    assert seen == [("program", signal.SIGTSTP), (os.getpid(), signal.SIGTSTP, signal.SIG_DFL)]


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone ends a process with its parent")
def test_a_program_dies_with_evoattn_run(program: Program) -> None:
    process = program.start("python", "-c", "import time; print('ready', flush=True); time.sleep(30)")
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.kill()
    process.communicate(timeout=10)  # the program holds the other end until it ends
