"""`evoattn run`: a toy client in programs that end in all ways, and what the line at the end says. ESMFold once, for real."""

import fcntl
import functools
import json
import os
import pathlib
import signal
import subprocess
import sys
import termios
import textwrap
import types
from typing import Any

import pytest

from evoattn.cli import main, run
from evoattn.clients import running

SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)

LAYERS = """
import torch


def _attention(query, key, value, biases):
    scores = query @ key.transpose(-1, -2)
    for bias in biases:
        scores = scores + bias
    return torch.softmax(scores, -1) @ value
"""

TOY = """
from evoattn.clients.calls import additive
from evoattn.clients.site import Client, Site


def times(original, count):
    def forward(x):
        count.count_passed_on("too long")
        return original(x)

    return forward


SITES = (Site("toy_client.layers", "_attention", additive), Site("toy_client.model", "long", times))
CLIENTS = {"toy": Client("toy", "toy", SITES)}
"""

MODEL = """
from toy_client.layers import _attention as attend


def long(x):
    return attend(x, x, x, [])
"""

# What makes the toy known in a program, before it is imported.
PREPARE = """
import evoattn.clients.patching, evoattn.clients.releases, torch
from evoattn.clients.releases import sources
evoattn.clients.__path__.append({folder!r})
evoattn.clients.patching.NAMES = ("toy",)
from evoattn.clients.toy import CLIENTS
sources()["toy"] = {{"1.0": {{str(site): {known} for site in CLIENTS["toy"].sites}}}}
x = torch.randn(1, 2, 5, 8)
"""
KNOWN = "max(evoattn.clients.releases.digests_in_file(site))"


class Program:
    """A script beside the toy client, run by `python -m evoattn run`."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        (folder / "toy_client").mkdir()
        (folder / "toy-1.0.dist-info").mkdir()
        (folder / "toy-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n")
        for name, text in (("__init__.py", ""), ("layers.py", LAYERS), ("model.py", MODEL)):
            (folder / "toy_client" / name).write_text(text)
        (folder / "toy.py").write_text(TOY)

    def write(self, text: str, known: str = KNOWN) -> None:
        prepare = PREPARE.format(folder=str(self.folder), known=known)
        (self.folder / "program.py").write_text(prepare + textwrap.dedent(text))

    def start(self, *command: str, before: str = "", terminal: int | None = None) -> subprocess.Popen[str]:
        """`evoattn run` in a process of its own, in which the toy is known too.

        Args:
            command: what to run.
            before: Python to run first.
            terminal: a descriptor of one to run at, in its foreground.
        """
        prepare = PREPARE.format(folder=str(self.folder), known="''")
        begin = f"{prepare}\nimport sys, evoattn.cli.run\nevoattn.cli.run.NAMES = ('toy',)\nfrom evoattn.cli import main"
        line = f"{before}\n{begin}\nsys.exit(main(['run', *sys.argv[1:]]))"
        return subprocess.Popen(
            [sys.executable, "-c", line, *command],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": str(self.folder), "TMPDIR": str(self.folder)},
            start_new_session=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=functools.partial(_begin, terminal),
        )

    def run(self, *command: str) -> tuple[int, str, str]:
        """Its status, output and the last line of its errors."""
        process = self.start(*(command or ("python", "program.py")))
        out, errors = process.communicate(timeout=120)
        return process.returncode, out, errors.strip().splitlines()[-1]


def _begin(terminal: int | None) -> None:
    """Heed signals that nohup, or a shell's background, had this process ignore. A terminal becomes the controlling one."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    if terminal is not None:
        fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)


@pytest.fixture
def program(tmp_path: pathlib.Path) -> Program:
    return Program(tmp_path)


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
    ours, others = line.removeprefix("evoattn run: ").split("; ")
    assert ours == "114 attention calls of toy 1.0 computed by evoattn on tiled"
    assert others == "2 attention calls by the original: too long"


@pytest.mark.slow
def test_a_module_with_arguments(program: Program) -> None:
    program.write("import sys, toy_client.layers\nprint(sys.argv[1:])")
    status, out, line = program.run("-m", "program", "-m", "--patch", "--help")
    assert (status, out) == (0, "['-m', '--patch', '--help']\n")
    assert line == "evoattn run: toy 1.0 patched, but no attention was called"


def test_a_sitecustomize_of_the_user_runs_too(program: Program) -> None:
    (program.folder / "sitecustomize.py").write_text("import builtins\nbuiltins.of_the_user = __file__\n")
    (program.folder / "program.py").write_text("import sitecustomize\nassert of_the_user == sitecustomize.__file__\n")
    status, _, line = program.run()
    assert (status, line) == (0, "evoattn run: nothing to patch: the program imported no attention of toy")


@pytest.mark.slow
def test_a_release_that_is_not_known_is_left_alone_and_named(program: Program) -> None:
    program.write("from toy_client.layers import _attention\nassert not hasattr(_attention, '__wrapped__')", known="''")
    status, _, line = program.run()
    assert status == 0
    assert line.startswith("evoattn run: toy was not patched: toy 1.0 has another toy_client.layers:_attention; known are 1.0")
    status, out, line = program.run("--patch", "toy", "python", "-c", "print('ran')")
    assert (status, out) == (2, "") and "has another toy_client.layers:_attention" in line


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
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
    process = program.start("python", "-c", f"import signal, time; {handle}; {wait}", terminal=slave)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    os.write(master, b"\x03")
    out, _ = process.communicate(timeout=20)
    assert (process.returncode, out) == (0, "got\n")


def test_a_signal_before_there_is_a_program_is_passed_on() -> None:
    with run._Signals() as signals:
        os.kill(os.getpid(), signal.SIGUSR1)
        process = subprocess.Popen(["sleep", "30"])
        signals.go_to(process)
        assert process.wait(20) == -signal.SIGUSR1


def test_handlers_are_put_back_and_ignored_signals_stay_ignored() -> None:
    """As nohup and a shell's background ignore some."""
    found = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    try:
        before = {number: signal.getsignal(number) for number in signal.valid_signals()}
        with run._Signals():
            assert signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGUSR1) != before[signal.SIGUSR1]
            assert signal.getsignal(signal.SIGCHLD) == before[signal.SIGCHLD]
        assert {number: signal.getsignal(number) for number in signal.valid_signals()} == before
    finally:
        signal.signal(signal.SIGUSR2, found)


def test_evoattn_run_stops_with_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-Z reaches the program, then stops this process by the signal's default, and is handled again afterwards."""
    seen: list[object] = []
    program = types.SimpleNamespace(pid=os.getpid(), send_signal=lambda number: seen.append(("program", number)))
    monkeypatch.setattr(run, "_in_foreground", lambda child: False)
    monkeypatch.setattr(run.os, "kill", lambda pid, number: seen.append((pid, number, signal.getsignal(number))))
    with run._Signals() as signals:
        signals.go_to(program)  # type: ignore[arg-type]
        signals._handle(signal.SIGTSTP, None)
        assert seen == [("program", signal.SIGTSTP), (os.getpid(), signal.SIGTSTP, signal.SIG_DFL)]
        assert signal.getsignal(signal.SIGTSTP) == signals._handle


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone ends a process with its parent")
def test_a_program_dies_with_evoattn_run(program: Program) -> None:
    process = program.start("python", "-c", "import time; print('ready', flush=True); time.sleep(30)")
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.kill()
    process.communicate(timeout=10)  # the program holds the other end until it ends


@pytest.mark.parametrize("option", ["-I", "-E", "-S"])
def test_a_program_that_never_read_the_startup_file(program: Program, option: str) -> None:
    status, out, line = program.run("python", option, "-c", "print('ran')")
    assert (status, out) == (0, "ran\n")
    assert "no Python process read evoattn's start-up file, so the program may have run unpatched" in line


def test_without_a_temporary_folder_nothing_is_counted(program: Program) -> None:
    program.write(
        "from toy_client import layers\nlayers._attention(x, x, x, [])\nprint(hasattr(layers._attention, '__wrapped__'))"
    )
    before = "import tempfile; tempfile._candidate_tempdir_list = lambda: ['/proc/none']"
    process = program.start("python", "program.py", before=before)
    out, errors = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "True\n")
    assert "evoattn run: calls were not counted: no temporary folder can be made" in errors


@pytest.mark.slow
def test_a_full_disk_leaves_the_program_running(program: Program) -> None:
    program.write(
        """
        import resource
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
        from toy_client import layers
        layers._attention(x, x, x, [])
        print("ran")
        """
    )
    status, out, line = program.run()
    assert (status, out) == (0, "ran\n")
    assert "not all calls were counted" in line


def test_counts_have_room_on_the_disk(tmp_path: pathlib.Path) -> None:
    """A store to a hole would end the process if the disk is full."""
    running.Tally(tmp_path).add("call")
    (counts,) = tmp_path.glob("*.counts")
    assert counts.stat().st_blocks * 512 >= counts.stat().st_size == 8192


@pytest.mark.slow
def test_layers_are_watched_too(program: Program, capfd: pytest.CaptureFixture[str]) -> None:
    toy = TOY.replace("SITES)}", "SITES, (), (Site('toy_client.blocks', 'Block.forward', additive_layer),))}")
    layer = "def additive_layer(original, count):\n    return lambda self, x: 'ours'\n"
    (program.folder / "toy.py").write_text(toy.replace("SITES =", f"{layer}\n\nSITES =", 1))
    (program.folder / "toy_client" / "blocks.py").write_text(
        "class Block:\n    def forward(self, x):\n        return 'theirs'\n"
    )
    program.write("from toy_client.blocks import Block\nprint(Block().forward(x))")
    path = program.folder / "program.py"
    sites = 'CLIENTS["toy"].sites'
    path.write_text(path.read_text().replace(sites, f'{sites} + CLIENTS["toy"].layers'))
    assert program.run("--no-layers", "python", "program.py")[:2] == (0, "theirs\n")
    assert program.run("python", "program.py")[:2] == (0, "ours\n")


@pytest.mark.parametrize(("options", "graphs"), [((), True), (("--no-graphs",), False)])
def test_steps_are_recorded_by_default(options: tuple[str, ...], graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, Any] = {}

    def wait(command: list[str], environment: dict[str, str], signals: object) -> int:
        told.update(json.loads(environment[running.VARIABLE]))
        return 0

    monkeypatch.setattr(run, "_wait", wait)
    assert main(["run", "--no-layers", *options, "python"]) == 0
    assert told["graphs"] is graphs and ("boltz.model.modules.diffusionv2" in told["modules"]) is graphs


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--no-graphs",)])
def test_steps_of_the_toy(program: Program, options: tuple[str, ...]) -> None:
    """It has no GPU, so the line at the end does not speak of steps; the report of the patch does."""
    toy = TOY.replace("SITES)}", "SITES, steps=(Site('toy_client.denoiser', 'Denoiser.forward', graphs.step),))}")
    (program.folder / "toy.py").write_text(f"from evoattn.clients import graphs\n{toy}")
    (program.folder / "toy_client" / "denoiser.py").write_text(
        "from torch import nn\n\n\nclass Denoiser(nn.Linear):\n    def forward(self, x):\n        return super().forward(x)\n"
    )
    program.write(
        """
        from toy_client.denoiser import Denoiser
        Denoiser(8, 8)(x)
        from evoattn.clients.patching import _active
        print(_active["toy"].steps if "toy" in _active else None)
        """
    )
    path = program.folder / "program.py"
    sites = 'CLIENTS["toy"].sites'
    path.write_text(path.read_text().replace(sites, f'{sites} + CLIENTS["toy"].steps'))
    status, out, last = program.run(*options, "python", "program.py")
    counted = "{'toy_client.denoiser:Denoiser.forward': {'': 0, 'not on a GPU': 1}}"
    assert (status, out.strip()) == (0, "None" if options else counted), last
    assert "graph" not in last


def test_the_line_about_steps(tmp_path: pathlib.Path) -> None:
    tally = running.Tally(tmp_path)
    tally.add("patched", "boltz", "2.2.1")
    for _ in range(1500):
        tally.add("step", "boltz", "")
    for reason in ("among the first calls of their kind", "among the first calls of their kind", "not on a GPU"):
        tally.add("step", "boltz", reason)
    line = run._summary(tmp_path, ("boltz",))
    expected = "; 1,500 steps and blocks replayed as CUDA graphs and 2 not (2 among the first calls of their kind)"
    assert line.endswith(expected)


def test_an_environment_behind_a_symbolic_link(tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "link").symlink_to(pathlib.Path(sys.executable).parent)
    script = tmp_path / "tool"
    script.write_text(f"#!{tmp_path}/link/{pathlib.Path(sys.executable).name}\nprint('ran')\n")
    script.chmod(0o755)
    assert main(["run", str(script)]) == 0
    assert capfd.readouterr().out == "ran\n"


def test_a_script_that_is_no_command(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "fold.py").write_text("")
    monkeypatch.chdir(tmp_path)
    assert main(["run", "fold.py"]) == 2
    assert "'fold.py' is a script, not a command: evoattn run python fold.py" in capsys.readouterr().err


def test_commands_that_cannot_be_started(capfd: pytest.CaptureFixture[str], tmp_path: pathlib.Path) -> None:
    other = tmp_path / "other"
    other.write_text("#!/somewhere/else/bin/python3\n")
    other.chmod(0o755)
    for command, words in (
        ([], "PROGRAM is missing"),
        (["no_such_command"], "no command 'no_such_command'"),
        ([str(other)], "runs with /somewhere/else/bin/python3"),
        (["--patch", "boltz", "python"], "boltz is not installed here"),
        (["--patch", "nothing", "python"], "invalid choice: 'nothing'"),
    ):
        assert main(["run", *command]) == 2, command
        assert words in capfd.readouterr().err


def test_an_environment_without_evoattn_is_named(tmp_path: pathlib.Path) -> None:
    for name, text in (("watched", ""), ("evoattn", "raise ImportError('not here')")):
        (tmp_path / f"{name}.py").write_text(text)
    for folder in (tmp_path, tmp_path / "gone", None):  # a child may outlive the run, and its folder
        told = running.instructions(folder, {"watched": ["boltz"]})
        environment = {"EVOATTN_RUN": told, "PYTHONPATH": f"{running.STARTUP}{os.pathsep}{tmp_path}"}
        subprocess.run([sys.executable, "-c", "import watched"], env=environment, check=True, cwd=tmp_path)
    (lost,) = tmp_path.glob("*.lost")
    assert "cannot import evoattn" in lost.read_text()


def test_counts_of_a_folder_that_is_gone_are_dropped(tmp_path: pathlib.Path) -> None:
    tally = running.Tally(tmp_path / "gone")
    tally.add("call", "toy", "")
    assert not list(tmp_path.iterdir())
    kept = running.Tally(tmp_path)
    for x in range(1100):  # more names than there is room for
        kept.add("call", str(x))
        kept.add("call", "0")
    found = running.totals(tmp_path)
    assert found["call", "0"] == 1101 and len(found) == 1024


def test_a_fork_counts_for_itself(tmp_path: pathlib.Path) -> None:
    tally = running.Tally(tmp_path)
    tally.add("before")
    child = os.fork()
    for _ in range(5 if child == 0 else 7):
        tally.add("of the child" if child == 0 else "of the parent")
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    assert running.totals(tmp_path) == {("before",): 1, ("of the child",): 5, ("of the parent",): 7}


@pytest.mark.slow
def test_esmfold(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "program.py").write_text(
        textwrap.dedent("""
        import torch
        from transformers.models.esm.modeling_esmfold import EsmFoldAttention
        torch.manual_seed(0)
        EsmFoldAttention(16, 16, 16, 4, 2)(torch.randn(1, 3, 5, 16), torch.randn(1, 3, 5, 16), [torch.randn(1, 3, 1, 1, 5)])
        """)
    )
    done = subprocess.run(
        [sys.executable, "-m", "evoattn", "run", "--patch", "esmfold", "python", "program.py"],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stderr.strip().splitlines()[-1].startswith("evoattn run: 1 attention call of esmfold 5.")
