#!/usr/bin/env python3
"""Set up and run everything of a source checkout, with nothing but Python and git.

    python3 dev.py demo    the main job: Evoformer attention on a real alignment, a table and a picture
    python3 dev.py test    the tests
    python3 dev.py check   lint, format and types
    python3 dev.py docs    build the documentation
    python3 dev.py bench   speed, memory and error next to every peer that is installed
    python3 dev.py figures the pictures and tables of the pages, from the committed results
    python3 dev.py goals   the ratios that the project holds itself to on a CPU
    python3 dev.py setup   only make the environment

The first call makes .venv and installs the package and its tools there; EVOATTN_TORCH names another torch to install than
the one in tools/constraints.txt. What follows the command goes to the tool: `python3 dev.py test -k vmap`,
`python3 dev.py demo my.a3m`. `demo`, `doctor` and `bench` run in the folder that they are called from, and read and write
files there; the others run in the checkout.
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
BIN = ENVIRONMENT / ("Scripts" if os.name == "nt" else "bin")
STAMP = ENVIRONMENT / "evoattn-installed"
CONSTRAINTS = ROOT / "tools" / "constraints.txt"
CODE = ["src", "tests", "benchmarks", "examples", "docs", "dev.py"]

COMMANDS: dict[str, list[list[str]]] = {
    "setup": [],
    "demo": [["evoattn", "demo"]],
    "doctor": [["evoattn", "doctor"]],
    "test": [["python", "-m", "pytest", "-n", "2", "--dist", "worksteal"]],
    "check": [["ruff", "check", *CODE], ["ruff", "format", "--check", *CODE], ["mypy"]],
    "format": [["ruff", "check", "--fix", *CODE], ["ruff", "format", *CODE]],
    "docs": [["sphinx-build", "-q", "-W", "--keep-going", "-b", "html", "docs", "build/docs"]],
    "bench": [["evoattn", "bench"]],
    "figures": [["python", "benchmarks/figures.py"]],
    "goals": [["python", "benchmarks/goals.py"]],
}

WHERE_CALLED = ("demo", "doctor", "bench")
"""Commands whose arguments name files of the caller."""


def set_up() -> None:
    """Make the environment, unless one with these very requirements stands."""
    torch = os.environ.get("EVOATTN_TORCH", "")
    wanted = hashlib.sha256((ROOT / "pyproject.toml").read_bytes() + CONSTRAINTS.read_bytes() + torch.encode()).hexdigest()
    if STAMP.exists() and STAMP.read_text() == wanted:
        return
    print(f"setting up {ENVIRONMENT} (once; a few minutes)", file=sys.stderr)
    if not (BIN / "python").exists():
        venv.create(ENVIRONMENT, with_pip=True)
    elif not has_pip():  # it was interrupted while it was made, or another tool made it
        run([str(BIN / "python"), "-m", "ensurepip"])
    pip = [str(BIN / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    constraints = [] if torch else ["--constraint", str(CONSTRAINTS)]
    run([*pip, torch or "torch", *constraints])  # first and alone, so that nothing else chooses its build
    run([*pip, *constraints, "--editable", f"{ROOT}[cli,triton,hopper,test,lint,docs]"])
    STAMP.write_text(wanted)


def has_pip() -> bool:
    """Whether the environment has pip."""
    return subprocess.run([str(BIN / "python"), "-m", "pip", "--version"], capture_output=True, check=False).returncode == 0


def run(command: list[str], folder: pathlib.Path = ROOT) -> None:
    """Run one command; end with its status if it fails, and with 130 on Ctrl-C, once it has ended in its own way."""
    interrupted = False
    with subprocess.Popen(command, cwd=folder) as process:
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
    if not arguments or arguments[0] not in COMMANDS:
        print(__doc__.strip())
        sys.exit(0 if arguments in (["-h"], ["--help"]) else 2)
    set_up()
    folder = pathlib.Path.cwd() if arguments[0] in WHERE_CALLED else ROOT
    for tool, *options in COMMANDS[arguments[0]]:
        run([str(BIN / tool), *options, *arguments[1:]], folder)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except KeyboardInterrupt:
        sys.exit(130)
