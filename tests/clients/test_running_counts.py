"""`evoattn run`: what is counted, the line at the end, and refusals. ESMFold once, for real."""

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import textwrap
from typing import Any

import pytest

from evoattn.cli import main, run
from evoattn.clients import parent, running
from evoattn.clients.registry import NAMES, client
from tests.clients.program import TOY, Program


@pytest.mark.parametrize("option", ["-I", "-E", "-S"])
def test_a_program_that_never_read_the_startup_file(program: Program, option: str) -> None:
    status, out, line = program.run("python", option, "-c", "print('ran')")
    assert (status, out) == (0, "ran\n")
    assert "nothing was counted: no Python process reported that it read evoattn's start-up file. A Python" in line


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
    assert program.run("--no-layers", "python", "program.py")[:2] == (0, "theirs\n")
    assert program.run("python", "program.py")[:2] == (0, "ours\n")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What `evoattn run` tells the processes of a program, which does not run."""
    found: dict[str, Any] = {}

    def wait(command: list[str], environment: dict[str, str]) -> int:
        found.update(json.loads(environment[parent.VARIABLE]))
        return 0

    monkeypatch.setattr(run, "_wait", wait)
    return found


@pytest.mark.parametrize(("options", "graphs"), [((), True), (("--no-graphs",), False)])
def test_steps_are_recorded_by_default(options: tuple[str, ...], graphs: bool, told: dict[str, Any]) -> None:
    assert main(["run", "--no-layers", *options, "python"]) == 0
    assert told["options"]["graphs"] is graphs


def test_every_module_of_a_client_is_watched() -> None:
    for name in NAMES:
        watched = {module for module, names in parent.modules().items() if name in names}
        modules = running.modules_of(name, True, True)
        assert modules and running.modules_of(name, False, False) <= modules <= watched


def test_a_program_starts_before_torch_is_imported() -> None:
    """It takes seconds, and the program imports it itself."""
    code = (
        "import sys; sys.argv = [{argv}]\n"
        "from evoattn.cli import main, run; from evoattn.clients import parent\n"
        "run._wait = lambda command, environment: print(parent.VARIABLE in environment, 'torch' in sys.modules) or 0\n"
        "import evoattn; main(sys.argv[1:]); print(evoattn.backends.__module__, evoattn.patch.__module__)"
    )
    for program, imported in (("evoattn", False), ("other", True)):
        text = code.format(argv=f"'/bin/{program}', 'run', 'python'")
        done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
        assert done.stdout.splitlines() == [f"True {imported}", "evoattn.api evoattn.clients.patching"], done.stderr


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
        from evoattn.clients.patching import active
        print(active["toy"].steps if "toy" in active else None)
        """
    )
    status, out, last = program.run(*options, "python", "program.py")
    counted = "{'toy_client.denoiser:Denoiser.forward': {'': 0, 'not on a GPU': 1}}"
    assert (status, out.strip()) == (0, "None" if options else counted), last
    assert "graph" not in last


@pytest.mark.parametrize("precision", ["exact", "tf32", "bf16"])
def test_the_processes_are_told_of_a_precision(precision: str, told: dict[str, Any]) -> None:
    options = [] if precision == "exact" else ["--precision", precision]
    assert main(["run", *options, "python"]) == 0
    assert told["options"] == {"layers": True, "graphs": True, "precision": precision, "wait": False}


def test_the_processes_are_told_to_wait(told: dict[str, Any]) -> None:
    assert main(["run", "--wait", "python"]) == 0
    assert told["options"]["wait"]


REFUSED = {
    "argument --precision: invalid choice: 'fp8'": ("--precision", "fp8"),
    "unless layers and graphs are True, got 'bf16'": ("--precision", "bf16", "--no-graphs"),
    "unless layers and graphs are True, got 'tf32'": ("--precision", "tf32", "--no-layers"),
}


@pytest.mark.parametrize(("message", "options"), REFUSED.items(), ids=REFUSED)
def test_a_precision_that_nothing_has_is_refused(
    message: str, options: tuple[str, ...], told: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    with contextlib.suppress(SystemExit):
        assert main(["run", *options, "python"]) == 2
    assert message in capfd.readouterr().err and not told


def test_the_line_names_a_precision(tmp_path: pathlib.Path) -> None:
    """And says so if nothing had it, as on a CPU."""
    tally = running.Tally(tmp_path)
    tally.add("patched", "boltz", "2.2.1")
    tally.add("call", "boltz", "", "pair block")
    assert "exact" not in parent.summary(tmp_path, ("boltz",))
    line = parent.summary(tmp_path, ("boltz",), "bf16")
    assert "; bf16 in no call, because it is that of diffusion transformers sampled in float32 on a GPU" in line
    for _ in range(1200):
        tally.add("call", "boltz", "", "diffusion transformer")
    line = parent.summary(tmp_path, ("boltz",), "bf16")
    assert "; bf16 in 1,200 diffusion transformers, and the client's own precision in all other calls" in line


def test_the_line_about_steps(tmp_path: pathlib.Path) -> None:
    tally = running.Tally(tmp_path)
    tally.add("patched", "boltz", "2.2.1")
    for _ in range(1500):
        tally.add("step", "boltz", "")
    for reason in ("among the first calls of their kind", "among the first calls of their kind", "not on a GPU"):
        tally.add("step", "boltz", reason)
    line = parent.summary(tmp_path, ("boltz",))
    expected = "; 1,500 steps and blocks replayed as CUDA graphs and 2 not (2 among the first calls of their kind)"
    assert line.endswith(expected)


def test_the_line_names_what_was_computed(tmp_path: pathlib.Path) -> None:
    tally = running.Tally(tmp_path)
    tally.add("patched", "boltz", "2.2.1")
    tally.add("backend", "tiled")
    for kind, calls in (("pair block", 2), ("attention call", 37), ("transition", 1), ("triangle multiplication", 3)):
        for _ in range(calls):
            tally.add("call", "boltz", "", kind)
            tally.add("call", "boltz", "too long", kind)
    assert parent.summary(tmp_path, ("boltz",)) == (
        "37 attention calls, 3 triangle multiplications, 1 transition and 2 pair blocks of boltz 2.2.1 computed by evoattn on "
        "tiled; 37 attention calls, 3 triangle multiplications, 1 transition and 2 pair blocks by the original: too long"
    )


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


def test_commands_that_cannot_be_started(
    capfd: pytest.CaptureFixture[str], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in (("other", "#!/somewhere/else/bin/python3\n"), ("lost", "#!/no/interpreter\n"), ("bare", "exit 3\n")):
        pathlib.Path(name).write_text(text)
        pathlib.Path(name).chmod(0o755)
    pathlib.Path("text").write_text("")
    pathlib.Path("folder").mkdir()
    pathlib.Path("link").symlink_to("/gone")
    missing = next(name for name in NAMES if client(name).installed is None)
    for command, words in (
        ([], "PROGRAM is missing"),
        (["no_such_command"], "no command 'no_such_command'"),
        (["./gone"], "there is no file './gone'"),
        (["cd", "/"], "sh -c runs a shell's own command"),
        (["./folder"], "'./folder' is a directory, not a command"),
        (["./text"], "'./text' is not executable"),
        (["bare"], "'bare' is neither beside evoattn nor on PATH: evoattn run ./bare"),
        (["./link"], "'./link' is a link to '/gone', which does not exist"),
        (["./lost"], "./lost cannot be started: the interpreter that it names does not exist"),
        (["./bare"], "it is no program for this machine, and no first line '#!' names one that runs it: evoattn run sh ./bare"),
        (["./other"], "runs with /somewhere/else/bin/python3"),
        (["--patch", missing, "python"], f"{missing} is not installed here"),
        (["--patch", "nothing", "python"], "invalid choice: 'nothing'"),
    ):
        assert main(["run", *command]) == 2, command
        assert words in capfd.readouterr().err


def test_an_environment_without_evoattn_is_named(tmp_path: pathlib.Path) -> None:
    for name, text in (("watched", ""), ("evoattn", "raise ImportError('not here')")):
        (tmp_path / f"{name}.py").write_text(text)
    for folder in (tmp_path, tmp_path / "gone", None):  # a child may outlive the run, and its folder
        told = parent.environment(folder, {"watched": ["boltz"]})[parent.VARIABLE]
        environment = {"EVOATTN_RUN": told, "PYTHONPATH": f"{parent.STARTUP}{os.pathsep}{tmp_path}"}
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
    totals = parent.totals(tmp_path)
    assert totals["call", "0"] == 1101 and len(totals) == 1024


def test_a_fork_counts_for_itself(tmp_path: pathlib.Path) -> None:
    tally = running.Tally(tmp_path)
    tally.add("before")
    child = os.fork()
    for _ in range(5 if child == 0 else 7):
        tally.add("of the child" if child == 0 else "of the parent")
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    assert parent.totals(tmp_path) == {("before",): 1, ("of the child",): 5, ("of the parent",): 7}


@pytest.mark.slow
def test_run_counts_calls_of_esmfold(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "program.py").write_text(
        textwrap.dedent("""
        import evoattn.clients.calls, torch
        from transformers.models.esm.modeling_esmfold import EsmFoldAttention
        evoattn.clients.calls.few_on_cpu = lambda x: 0
        torch.manual_seed(0)
        EsmFoldAttention(16, 16, 16, 4, 2)(torch.randn(1, 3, 5, 16), torch.randn(1, 3, 5, 16), [torch.randn(1, 3, 1, 1, 5)])
        """)
    )
    done = subprocess.run(
        [sys.executable, "-m", "evoattn", "run", "--patch", "esmfold", "python", "program.py"],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stderr.strip().splitlines()[-1].startswith("evoattn run: 1 attention call of esmfold 5.")
