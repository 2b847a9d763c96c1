"""`dev.py fuzz`: shrinking, workers that die or hang, what is printed and written, Ctrl-C, exit status."""

import dataclasses
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import evoattn
from evoattn import testing
from tests.fuzz import RandomProblem, random_problem
from tests.fuzz import __main__ as command
from tests.fuzz.shrinking import shrink, smaller
from tests.fuzz.trials import Trial, Workers

JUDGES = "tests.helpers.fuzz_judges"
ROOT = Path(__file__).parents[2]


def wish(judge: str, **words: object) -> command.Settings:
    usual = {
        "cases": 6,
        "minutes": None,
        "seed": 0,
        "jobs": 2,
        "backends": ("tiled",),
        "dtypes": ("float32",),
        "device": "cpu",
        "largest": 1000,
    }
    return command.Settings(**{**usual, **words}, judge=f"{JUDGES}:{judge}")  # type: ignore[arg-type]


def some_trials(count: int) -> list[Trial]:
    return [Trial(random_problem(seed, largest=1000), "tiled") for seed in range(count)]


def test_shrinks_to_the_smallest() -> None:
    """All that a planted failure does not need goes: sizes, masks, strides, gradients, determinism."""
    trials = 0

    def first_failing(problems: Sequence[RandomProblem]) -> int | None:
        nonlocal trials
        trials += len(problems)
        fails = [p.case.lk >= 7 and p.case.h >= 3 and p.case.mask_bias is not None for p in problems]
        return fails.index(True) if any(fails) else None

    problem = next(
        p
        for p in map(random_problem, range(500))
        if p.case.mask_bias and p.case.lk > 60 and p.case.h > 3 and p.case.mask and p.case.gate
    )
    smallest = shrink(problem, first_failing)
    case = smallest.case
    assert (case.n, case.h, case.lq, case.lk, case.d) == (1, 3, 1, 7, 1)
    assert case.mask is None and case.pair_bias is None and case.mask_bias == "finite" and case.gradients == ()
    assert case.gate is None and case.gate_strides == "contiguous"
    assert (case.strides, case.bias_strides, case.cotangent, case.layout) == ("contiguous", "contiguous", "random", "bnlhd")
    assert not smallest.deterministic and smallest.seed == problem.seed
    assert trials <= 200


def test_shrinking_is_bounded() -> None:
    trials = 0

    def first_failing(problems: Sequence[RandomProblem]) -> int | None:
        nonlocal trials
        trials += len(problems)
        return None

    problem = random_problem(3)
    assert shrink(problem, first_failing, trials=7) == problem
    assert trials == 7
    assert shrink(problem, first_failing, seconds=-1.0) == problem
    assert trials == 7


def test_smaller_problems_can_be_made() -> None:
    """Every step of shrinking is a call that the public function takes."""
    steps = 0
    for seed in range(40):
        for problem in smaller(random_problem(seed, largest=300, longest=12)):
            inputs = problem.make()
            tensors = {name: getattr(inputs, name) for name in ("q", "k", "v", "mask", "mask_bias", "pair_bias")}
            assert evoattn.explain(**tensors, layout=inputs.case.layout, backend="tiled").backend == "tiled"
            assert inputs.do.shape[:-1] == inputs.q.shape[:-1]
            steps += 1
    assert steps > 500


@pytest.mark.slow
def test_a_worker_that_dies_fails_its_problem_alone() -> None:
    with Workers(1, f"{JUDGES}:dies") as workers:
        reports = {trial.problem.seed: outcome for trial, outcome in workers.run(some_trials(4)[1:])}
        again = [outcome.status for _, outcome in workers.run(some_trials(2)[1:])]
    assert {seed for seed, outcome in reports.items() if outcome.status == "held"} == {1, 2} and again == ["held"]
    assert reports[3] == testing.Outcome("failed", "the worker process died: signal SIGKILL", ("died",))


def test_a_problem_that_takes_too_long_fails() -> None:
    with Workers(1, f"{JUDGES}:hangs", limit_s=30.0) as workers:
        _, first = next(workers.run(some_trials(1)))
        assert first.status == "held"
        for worker in workers.pool.workers:
            worker.limit_s = 1.0
        reports = {trial.problem.seed: outcome for trial, outcome in workers.run(some_trials(2)[1:])}
    assert reports[1] == testing.Outcome("failed", "took longer than 1 s", ("took longer",))


@pytest.mark.slow
def test_a_worker_that_lost_its_gpu_is_replaced() -> None:
    with Workers(1, f"{JUDGES}:loses_the_gpu") as workers:
        first, second, third = (outcome for _, outcome in workers.run(some_trials(3)))
    assert first.status == "failed"
    assert second.what == third.what  # one process
    assert second.what not in first.what


def test_fuzz_reports_the_smallest_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Counts, the smallest problem, a line that runs, the file, and exit status 1."""
    output = tmp_path / "found.json"
    assert command.fuzz(wish("five_keys", backends=("tiled", "reference"), cases=8), output) == 1
    printed = capsys.readouterr().out
    record = json.loads(output.read_text())
    assert (
        record["finished"] == "complete"
        and record["settings"]["seed"] == 0
        and record["versions"]["torch"] == torch.__version__
    )
    counts = {entry["backend"]: entry for entry in record["counts"]}
    assert counts["reference"] == {"backend": "reference", "dtype": "float32", "held": 8, "refused": 0, "failed": 0}
    assert counts["tiled"]["failed"] == len(record["failures"]) > 0
    failure = record["failures"][0]
    names = {"Case": testing.Case, "RandomProblem": RandomProblem, "torch": torch}
    case = eval(failure["smallest"], names).case
    assert (case.h, case.lk, case.n, case.lq) == (2, 5, 1, 1)
    assert eval(failure["problem"], names) == random_problem(failure["seed"], dtypes=(torch.float32,), largest=1000)
    assert f"FAILED  seed {failure['seed']}, tiled on cpu: error of o: planted" in printed
    assert re.search(rf"^tiled +float32 +8 +0 +{len(record['failures'])}$", printed, re.MULTILINE)
    assert "seeds from 0 to 7, " in printed
    line = next(text.split("again", 1)[1].strip() for text in printed.splitlines() if text.startswith("  again"))
    assert line == failure["line"]
    python, *arguments = shlex.split(line)
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False, cwd=ROOT)
    assert python == "python" and done.stdout.startswith("Outcome(status='held'"), done.stderr  # by the true judge


def test_nothing_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The true judge, by the command line."""
    output = tmp_path / "found.json"
    arguments = ["--cases", "3", "--seed", "22", "--largest", "500", "--jobs", "1", "--backends", "tiled", "triton"]
    settings = command.settings_of([*arguments, "--device", "cpu", "--dtypes", "float32", "--json", str(output)])
    assert command.fuzz(*settings) == 0
    assert re.search(r"^triton +float32 +0 +3 +0$", capsys.readouterr().out, re.MULTILINE)
    assert json.loads(output.read_text())["failures"] == []


@pytest.mark.slow
def test_time_decides(capsys: pytest.CaptureFixture[str]) -> None:
    begun = time.monotonic()
    assert command.fuzz(wish("slowly", cases=None, minutes=1.5 / 60, seed=5, jobs=1)) == 0
    assert time.monotonic() - begun < 60
    assert "seeds from 5, " in capsys.readouterr().out


REFUSED = {
    "dtype": (["--dtypes", "int8"], "argument --dtypes: invalid choice: 'int8'"),
    "backend": (["--backends", "cuda"], "argument --backends: invalid choice: 'cuda'"),
    "both": (["--cases", "3", "--minutes", "1"], "not allowed with argument"),
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.values(), ids=REFUSED)
def test_bad_options_are_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        command.settings_of(arguments)
    assert refused.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="needs signals of POSIX")
def test_ctrl_c_prints_what_was_found(tmp_path: Path) -> None:
    """The terminal tells every process; workers leave it to the parent, which prints, writes, and ends them."""
    output = tmp_path / "found.json"
    usual = dataclasses.asdict(wish("slowly", cases=400))
    code = (
        "import pathlib\nfrom tests.fuzz import __main__ as command\n"
        "if __name__ == '__main__':\n"
        "    command.EVERY_S = 0.0\n"
        f"    raise SystemExit(command.fuzz(command.Settings(**{usual!r}), pathlib.Path({str(output)!r})))\n"
    )
    script = tmp_path / "run.py"
    script.write_text(code)
    folders = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    with subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # as at a terminal, under nohup too
        env={**os.environ, "PYTHONPATH": os.pathsep.join(folders)},
    ) as process:
        assert process.stderr is not None
        lines = [process.stderr.readline() for _ in range(3)]
        assert "FAILED  seed 0, tiled on cpu: error of o: planted\n" in lines  # at once
        assert "1 held, 0 refused, 1 failed; seed " in lines[2]
        os.killpg(process.pid, signal.SIGINT)
        printed, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "FAILED  seed 0, tiled on cpu: error of o: planted" in printed
    assert "1 failed" in printed
    assert errors.endswith("dev.py fuzz: interrupted: the results so far are above\n") and "Traceback" not in errors
    assert json.loads(output.read_text())["finished"] == "interrupted"
    end = time.monotonic() + 20
    while running_in(process.pid) and time.monotonic() < end:
        time.sleep(0.1)
    assert running_in(process.pid) == []


def running_in(session: int) -> list[str]:
    """The processes of a session that have not ended."""
    processes = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, pid = path.read_text().rpartition(") ")
        except OSError:  # it ended meanwhile
            continue
        state, _, _, of_session = pid.split()[:4]
        if int(of_session) == session and state != "Z":
            processes.append(name)
    return processes
