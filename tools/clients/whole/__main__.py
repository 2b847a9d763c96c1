"""Run a program as it is and under `evoattn run`, and compare the structures: python -m clients.whole NAME ..."""

from __future__ import annotations

import contextlib
import importlib
import os
import pathlib
import re
import shutil
import subprocess
import sys

from clients.whole.compare import compare

ROOT = pathlib.Path(__file__).resolve().parents[3]
BUILD = ROOT / "build" / "whole"
ALIGNMENT = ROOT / "examples" / "ubiquitin.a3m"
"""Its first sequence, 76 residues, is the input of all programs."""

COLUMNS = "{:14}{:>7}{:>10}{:>15}  {}"


def main(names: list[str]) -> int:
    """Print a table, a line a model, and below it what is wrong. Return the exit status."""
    faults = []
    print(COLUMNS.format("model", "atoms", "size, Å", "difference, Å", "calls"), flush=True)
    for name in names:
        folder = BUILD / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        with contextlib.redirect_stdout(sys.stderr):  # the table has no lines of the client's
            program = importlib.import_module(f"clients.whole.{name}")
            program.prepare(folder, ALIGNMENT.read_text().splitlines()[1], ALIGNMENT)
        for model, command in program.COMMANDS.items():
            faults += [f"{model}: {fault}" for fault in _compare(folder, model, command, program.ENVIRONMENT)]
    for fault in faults:
        print(fault)
    return 1 if faults else 0


def _compare(folder: pathlib.Path, model: str, command: str, environment: dict[str, str]) -> list[str]:
    """Run a model twice and print its line; return what is wrong."""
    plain, ours = (folder / f"{model}-{way}" for way in ("plain", "evoattn"))
    _run(command, plain, environment)
    printed = _run(f"evoattn run --wait {command}", ours, environment)
    found = compare(plain, ours)
    calls = calls_of(printed)
    print(COLUMNS.format(model, found.atoms, f"{found.size:.3g}", f"{found.largest:.1e}", calls or 0), flush=True)
    return found.faults + ([] if calls else ["evoattn run replaced no call"])


def _run(command: str, out: pathlib.Path, environment: dict[str, str]) -> str:
    """Run one command in the folder of its files; keep and return what it prints. End with status 1 if it fails."""
    startup = pathlib.Path(__file__).parent / "startup"
    paths = {
        "PATH": f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": f"{startup}{os.pathsep}{ROOT}/tools",
    }
    settings = {**os.environ, **paths, "OMP_NUM_THREADS": "1", **environment}  # the models are small: more threads only wait
    log = out.with_suffix(".log")
    with log.open("w") as file:
        words = command.format(out=out.name).split()
        status = subprocess.run(words, cwd=out.parent, env=settings, stdout=file, stderr=file, check=False).returncode
    printed = log.read_text(errors="replace")
    if status:
        sys.exit(f"{printed[-2000:]}\n{command.format(out=out.name)}: status {status}; all that it printed is in {log}")
    return printed


def calls_of(printed: str) -> str:
    """The attentions, layers and blocks that `evoattn run` says that it computed, or ""."""
    found = re.search(r"^evoattn run: (\d[\w, ]*) of .* computed by evoattn", printed, re.MULTILINE)
    return found[1] if found else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
