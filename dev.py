#!/usr/bin/env python3
"""Set up and run everything of a source checkout, with nothing but Python and git.

    python3 dev.py demo    the main job, beside dense torch: a table and a picture, in a minute
    python3 dev.py test    the tests, but for those that are marked slow
    python3 dev.py test-slow  those alone, and test-all: all tests
    python3 dev.py check   lint, format and types
    python3 dev.py lint    lint and format alone, of all files or of those that are named
    python3 dev.py docs    build the documentation
    python3 dev.py bench   speed, memory and error next to every peer that is installed
    python3 dev.py bench layers  whole layers; `sharded`: a block over several GPUs; `bounds`: kernels that leave out biases;
                           `ceilings RECORD`: the rates of the device, into a record
    python3 dev.py figures the pictures and tables of the pages, from the committed results
    python3 dev.py goals   the ratios that the project holds itself to on a CPU
    python3 dev.py fuzz    random calls and layers on every backend, judged against float64
    python3 dev.py proofs OUT  all machine code and launches as text, and compare BEFORE AFTER
    python3 dev.py instructions  registers, spills and loop lengths of compiled kernels, for a card or for all
    python3 dev.py clients the blocks of the clients, or of those that are named, with and without `evoattn.patch`
    python3 dev.py clients --whole  their whole programs, or those that are named, with and without `evoattn run`
    python3 dev.py setup   only make the environment

The first call makes .venv and installs the package and its tools there; EVOATTN_TORCH names another torch to install than
the one in tools/constraints.txt. What follows the command goes to the tool: `python3 dev.py test -k vmap`,
`python3 dev.py demo tri200`. `demo`, `doctor`, `bench` and `proofs` run in the folder that they are called from, and read
and write files there; the others run in the checkout. `clients` makes an environment for each client under build/clients.
"""

from __future__ import annotations

import hashlib
import os
import pathlib
import subprocess
import sys
import venv

ROOT = pathlib.Path(__file__).resolve().parent
ENVIRONMENT = ROOT / ".venv"
SCRIPTS = "Scripts" if os.name == "nt" else "bin"
CONSTRAINTS = ROOT / "tools" / "constraints.txt"
CLIENTS = ROOT / "tools" / "clients"
CODE = ["src", "tests", "benchmarks", "examples", "docs", "tools", "dev.py"]

PYTEST = ["python", "-m", "pytest", "-n", "2", "--dist", "worksteal"]

COMMANDS: dict[str, list[list[str]]] = {
    "setup": [],
    "demo": [["python", str(ROOT / "benchmarks" / "demo.py")]],
    "doctor": [["evoattn", "doctor"]],
    "test": [[*PYTEST, "-m", "not slow"]],
    "test-slow": [[*PYTEST, "-m", "slow"]],
    "test-all": [PYTEST],
    "check": [["ruff", "check", *CODE], ["ruff", "format", "--check", *CODE], ["mypy"]],
    "lint": [["ruff", "check"], ["ruff", "format", "--check"]],
    "format": [["ruff", "check", "--fix", *CODE], ["ruff", "format", *CODE]],
    "docs": [["sphinx-build", "-q", "-W", "--keep-going", "-b", "html", "docs", "build/docs"]],
    "bench": [["evoattn", "bench"]],
    "figures": [["python", "benchmarks/figures.py"]],
    "goals": [["python", "benchmarks/goals.py"]],
    "fuzz": [["python", "-m", "tests.fuzz"]],
    "instructions": [["python", "-m", "tests.helpers.instructions"]],
    "proofs": [["python", str(ROOT / "tools" / "proofs")]],
}

BENCHMARKS = {
    "layers": "layer_times.py",
    "sharded": "sharded_times.py",
    "bounds": "bounds.py",
    "ceilings": "ceilings.py",
}
"""The scripts of benchmarks/ that `bench NAME` runs."""

WHERE_CALLED = ("demo", "doctor", "bench", "proofs")
"""Commands whose arguments name files of the caller."""


def set_up(environment: pathlib.Path, requirements: pathlib.Path | None = None) -> pathlib.Path:
    """Make an environment, unless one with these very requirements stands.

    Args:
        environment: its folder.
        requirements: a file of pinned packages, installed without what they ask for. None: the tools of this project.

    Returns:
        The folder of its programs.
    """
    programs, stamp = environment / SCRIPTS, environment / "evoattn-installed"
    python = str(programs / "python")
    torch = os.environ.get("EVOATTN_TORCH", "")
    files = [ROOT / "pyproject.toml", CONSTRAINTS, *([requirements] if requirements else [])]
    wanted = hashlib.sha256(b"".join(file.read_bytes() for file in files) + torch.encode()).hexdigest()
    if stamp.exists() and stamp.read_text() == wanted:
        return programs
    print(f"setting up {environment} (once; a few minutes)", file=sys.stderr)
    if not (programs / "python").exists():
        venv.create(environment, with_pip=True)
    elif not has_pip(python):  # it was interrupted while it was made, or another tool made it
        run([python, "-m", "ensurepip"])
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    constraints = [] if torch else ["--constraint", str(CONSTRAINTS)]
    run([*pip, torch or "torch", *constraints])  # first and alone, so that nothing else chooses its build
    if requirements:  # clients ask for another torch, and for much that their blocks do not import
        run([*pip, "--no-deps", "--requirement", str(requirements), "--editable", str(ROOT)])
    else:
        run([*pip, *constraints, "--editable", f"{ROOT}[cli,triton,hopper,test,lint,docs,release]"])
    stamp.write_text(wanted)
    return programs


def has_pip(python: str) -> bool:
    """True if an environment has pip."""
    return subprocess.run([python, "-m", "pip", "--version"], capture_output=True, check=False).returncode == 0


def compare_clients(names: list[str], whole: bool = False) -> None:
    """Compare clients with and without ours, each in an environment of its own; end with status 1 if one of them differs.

    Args:
        names: the clients; none: all.
        whole: compare the structures that their programs write, rather than their blocks.
    """
    pins, module, suffix = (CLIENTS / "whole", "clients.whole", "-whole") if whole else (CLIENTS, "clients", "")
    known = sorted(file.stem for file in pins.glob("*.txt"))
    if unknown := sorted(set(names) - set(known)):
        sys.exit(f"unknown: {', '.join(unknown)}; the {'whole programs' if whole else 'clients'} are {', '.join(known)}")
    failed = []
    for name in names or known:
        programs = set_up(ROOT / "build" / "clients" / f"{name}{suffix}", pins / f"{name}.txt")
        try:
            run([str(programs / "python"), "-m", module, name], CLIENTS.parent)
        except SystemExit as ended:
            if ended.code == 130:
                raise
            failed.append(name)
    if failed:
        sys.exit(f"not the same with and without the patch: {', '.join(failed)}")


def run(command: list[str], folder: pathlib.Path = ROOT) -> None:
    """Run one command; end with its status if it fails, and with 130 on Ctrl-C, once it has ended in its own way.

    It keeps compiled Python modules: the tests start a hundred processes, each of which would compile ours anew.
    """
    interrupted = False
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    with subprocess.Popen(command, cwd=folder, env=environment) as process:
        while process.returncode is None:
            try:
                process.wait()
            except KeyboardInterrupt:  # the terminal has told the command too
                interrupted = True
    if interrupted:
        sys.exit(130)
    if process.returncode:
        sys.exit(process.returncode if process.returncode > 0 else 128 - process.returncode)


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["clients"]:
        return compare_clients([x for x in arguments[1:] if x != "--whole"], "--whole" in arguments)
    if not arguments or arguments[0] not in COMMANDS:
        print(__doc__.strip())
        sys.exit(0 if arguments in (["-h"], ["--help"]) else 2)
    programs = set_up(ENVIRONMENT)
    command, *rest = arguments
    steps = COMMANDS[command]
    if command == "bench" and rest and rest[0] in BENCHMARKS:
        steps = [["python", str(ROOT / "benchmarks" / BENCHMARKS[rest.pop(0)])]]
    folder = pathlib.Path.cwd() if command in WHERE_CALLED else ROOT
    for tool, *options in steps:
        run([str(programs / tool), *options, *rest], folder)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except KeyboardInterrupt:
        sys.exit(130)
