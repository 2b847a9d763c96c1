"""`evoattn run`: a program with its attention computed by evoattn, in all its processes, without a changed line."""

from __future__ import annotations

import argparse
import collections
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
from typing import Any

from evoattn.cli.terminal import RefusedError
from evoattn.clients import running
from evoattn.clients.patching import NAMES, UnknownRelease, client
from evoattn.clients.releases import check_files

__all__ = ["add_parser"]

_ABOUT = """\
Runs a program whose attention evoattn computes, as `evoattn.patch` does, in the program and in its child processes.
At the end one line on stderr says how many attention calls were ours, on which backends, and which were not and why.
"""

_EPILOG = """\
examples:
  evoattn run boltz predict input.yaml
  evoattn run --patch openfold3 run_openfold predict --query_json query.json
  evoattn run -m my_package.train --epochs 3
  evoattn run python train.py

Options of evoattn come before PROGRAM; all that follows it is the program's. Calls inside code that torch.compile made
are ours too, but are not counted. Python's options -E, -I and -S leave a program as it is.

exit status: the program's own; 2 if it cannot be started
"""

_PASSED_ON = ("SIGTERM", "SIGHUP")


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `run` to the command line."""
    parser = commands.add_parser(
        "run",
        help="a program with its attention computed by evoattn",
        usage="evoattn run [-h] [--patch NAME] (PROGRAM | -m MODULE) [ARGUMENTS ...]",
        description=_ABOUT,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--patch",
        action="append",
        choices=NAMES,
        metavar="NAME",
        help=f"a client; may be repeated; default: each that the program imports, of {', '.join(NAMES)}",
    )
    parser.add_argument("-m", dest="module", action="store_true", help="PROGRAM is a module, as after python -m")
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="PROGRAM", help="a command, with its arguments")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the program, say what was ours, and end as it ended."""
    command = _command(arguments)
    names = tuple(arguments.patch or NAMES)
    for name in arguments.patch or ():
        _refuse_unknown(name)
    with tempfile.TemporaryDirectory(prefix="evoattn-run-") as made:
        folder = pathlib.Path(made)
        (folder / "modules.json").write_text(json.dumps(running.modules(names)))
        paths = [str(running.STARTUP), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, running.FOLDER: made, "PYTHONPATH": os.pathsep.join(paths)}
        status = _wait(command, environment)
        print(f"evoattn run: {_found(folder, names)}", file=sys.stderr, flush=True)
    return status if status >= 0 else _die_of(-status)


def _command(arguments: argparse.Namespace) -> list[str]:
    """What to start."""
    program = arguments.program[1:] if arguments.program[:1] == ["--"] else arguments.program
    if not program:
        raise RefusedError("PROGRAM is missing: name a command, or -m and a module")
    if arguments.module:
        return [sys.executable, "-m", *program]
    ours = os.path.dirname(sys.executable)
    found = shutil.which(program[0], path=os.pathsep.join([ours, os.environ.get("PATH", os.defpath)]))
    if found is None:
        raise RefusedError(f"no command {program[0]!r} beside {sys.executable} or on PATH; a module is run with -m")
    python = _python_of(found)
    if python is not None and os.path.dirname(python) != ours:
        raise RefusedError(
            f"{found} runs with {python}, evoattn with {sys.executable}. Install evoattn beside the program and call that one"
        )
    return [found, *program[1:]]


def _python_of(path: str) -> str | None:
    """The Python that a script's first line names, if it does."""
    with open(path, "rb") as file:
        first = file.readline(1000)
    if not first.startswith(b"#!"):
        return None
    words = first[2:].decode(errors="replace").split()
    if words and os.path.basename(words[0]) == "env":
        words = [shutil.which(word) or word for word in words[1:] if not word.startswith("-")]
    return words[0] if words and os.path.basename(words[0]).startswith("python") else None


def _refuse_unknown(name: str) -> None:
    of = client(name)
    if of.installed is None:
        raise RefusedError(f"{name} is not installed here: no distribution {of.distribution}")
    try:
        check_files(of)
    except UnknownRelease as error:
        raise RefusedError(str(error)) from error


def _wait(command: list[str], environment: dict[str, str]) -> int:
    """The status with which a program ends, negative if of a signal.

    Ctrl-C and Ctrl-\\ reach it from the terminal; a signal for this process alone is passed on.
    """
    try:
        process = subprocess.Popen(command, env=environment)
    except OSError as error:
        raise RefusedError(f"{command[0]} cannot be started: {error.strerror}") from error
    numbers = [getattr(signal, name) for name in ("SIGINT", "SIGQUIT", *_PASSED_ON) if hasattr(signal, name)]

    def handle(number: int, _: Any) -> None:
        if signal.Signals(number).name in _PASSED_ON:
            process.send_signal(number)

    before = {number: signal.signal(number, handle) for number in numbers if signal.getsignal(number) is not signal.SIG_IGN}
    try:
        return process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _die_of(number: int) -> int:
    """End by the signal that ended the program, without a core of our own."""
    import resource  # POSIX alone has it, and such ends

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    return 128 + number  # the signal is blocked


def _found(folder: pathlib.Path, names: tuple[str, ...]) -> str:
    """What the processes counted, in a line."""
    ours = 0
    passed_on: collections.Counter[str] = collections.Counter()
    backends, patched, refused = set(), set(), set()
    for name, count in running.totals(folder).items():
        match name:
            case ("call", _, ""):
                ours += count
            case ("call", _, reason):
                passed_on[reason] += count
            case ("backend", backend):
                backends.add(backend)
            case ("patched", client_name, version):
                patched.add(f"{client_name} {version}")
            case ("refused", client_name, reason):
                refused.add(f"{client_name} was not patched: {reason}")
    refused |= {path.read_text() for path in folder.glob("*.lost")}
    if ours:
        parts = [f"{_calls(ours)} of {_list(patched)} computed by evoattn on {_list(backends)}"]
    elif patched:
        parts = [f"{_list(patched)} patched, but no attention was called"]
    elif refused:
        parts = []
    else:
        parts = [f"nothing to patch: the program imported no attention of {', '.join(names)}"]
    parts += [f"{_calls(count)} by the original: {reason}" for reason, count in passed_on.most_common()]
    return "; ".join([*parts, *sorted(refused)])


def _calls(count: int) -> str:
    return f"{count:,} attention call{'s' if count != 1 else ''}"


def _list(names: set[str]) -> str:
    """Names as a sentence has them."""
    *first, last = sorted(names)
    return f"{', '.join(first)} and {last}" if first else last
