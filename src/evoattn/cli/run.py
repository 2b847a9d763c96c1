"""`evoattn run`: a program with its attention computed by evoattn, in all its processes, without a changed line."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import errno
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from evoattn.cli.terminal import RefusedError, tell
from evoattn.clients import parent
from evoattn.clients.registry import NAMES, client
from evoattn.core.precisions import PRECISIONS

HELP = "a program with its attention computed by evoattn"

ABOUT = """\
Runs a program whose attention evoattn computes, as `evoattn.patch` does, in the program and in its child processes.
While kernels that are not kept are compiled by other processes, the program's own code computes the calls that need them.
At the end one line on stderr counts the attentions, layers and blocks that were ours, the backends, and all others and why.
"""

EPILOG = """\
examples:
  evoattn run boltz predict input.yaml
  evoattn run --patch openfold3 run_openfold predict --query_json query.json
  evoattn run -m my_package.train --epochs 3
  evoattn run python train.py

Options of evoattn come before PROGRAM; all that follows it is the program's. Calls inside code that torch.compile made
are ours too, but are not counted. Python's options -E, -I and -S leave a program as it is.

exit status: the program's own; 2 if it cannot be started
"""

_NOT_FORWARDED = {
    getattr(signal, name, None)
    for name in ("SIGKILL", "SIGSTOP", "SIGCHLD", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGTTIN", "SIGTTOU")
}
"""Signals that are not passed on: they cannot be caught, or they tell of this process itself."""

_TERMINAL_SIGNALS = {getattr(signal, name, None) for name in ("SIGINT", "SIGQUIT", "SIGTSTP", "SIGWINCH")}
"""Signals that a terminal sends to every process of its foreground group."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `run`."""
    parser.usage = (
        "evoattn run [-h] [--patch NAME] [--no-layers] [--no-graphs] [--precision NAME] [--wait] (PROGRAM | -m MODULE) "
        "[ARGUMENTS ...]"
    )
    parser.add_argument(
        "--patch",
        action="append",
        choices=NAMES,
        metavar="NAME",
        help=f"a client; may be repeated; default: each that the program imports, of {', '.join(NAMES)}",
    )
    parser.add_argument(
        "--no-layers",
        action="store_false",
        dest="layers",
        help="replace functions that compute attention alone, as evoattn.patch(layers=False) does",
    )
    parser.add_argument(
        "--no-graphs",
        action="store_false",
        dest="graphs",
        help="do not replay steps and blocks on a GPU as CUDA graphs, as evoattn.patch(graphs=False) does",
    )
    parser.add_argument(
        "--precision",
        choices=PRECISIONS,
        default="exact",
        metavar="NAME",
        help=f"of diffusion transformers that are sampled in float32 on a GPU, of {', '.join(PRECISIONS)}; default: exact",
    )
    parser.add_argument(
        "--wait",
        action="store_true",
        help="wait for kernels that are not kept; default: the program's own code computes while they are compiled",
    )
    parser.add_argument("-m", dest="module", action="store_true", help="PROGRAM is a module, as after python -m")
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="PROGRAM", help="a command, with its arguments")


def run(arguments: argparse.Namespace) -> int:
    """Run the program, tell which calls evoattn computed, and end as it ended."""
    command = command_of(arguments)
    names = tuple(arguments.patch or NAMES)
    if arguments.patch or arguments.precision != "exact":
        _check(arguments, names)
    options = {name: getattr(arguments, name) for name in ("layers", "graphs", "precision", "wait")}
    with contextlib.ExitStack() as at_end:
        folder, why = _folder(at_end)
        status = _wait(command, parent.environment(folder, parent.modules(names), **options))
        line = f"calls were not counted: {why}" if folder is None else parent.summary(folder, names, arguments.precision)
        tell(f"evoattn run: {line}")
    return status if status >= 0 else _die_of(-status)


def _check(arguments: argparse.Namespace, names: tuple[str, ...]) -> None:
    """Refuse clients that are not installed or not known, and a precision that nothing would have."""
    from evoattn.clients.patching import check_reach
    from evoattn.clients.releases import UnknownRelease, check_files

    try:
        for asked in map(client, arguments.patch or ()):
            if asked.installed is None:
                raise RefusedError(f"{asked.name} is not installed here: no distribution {asked.distribution}")
            check_files(asked)
        check_reach(arguments.precision, names, arguments.layers, arguments.graphs)
    except (UnknownRelease, ValueError) as error:
        raise RefusedError(str(error)) from error


def _folder(at_end: contextlib.ExitStack) -> tuple[pathlib.Path | None, str]:
    """A folder for the counts that is removed at the end, or None and the reason."""
    try:
        folder = tempfile.TemporaryDirectory(prefix="evoattn-run-", ignore_cleanup_errors=True)
    except OSError as error:
        return None, f"no temporary folder can be made ({error.strerror}); TMPDIR names another place"
    return pathlib.Path(at_end.enter_context(folder)), ""


def command_of(arguments: argparse.Namespace) -> list[str]:
    """The words of the program that follows the options, beginning with the path of its command."""
    program = arguments.program[1:] if arguments.program[:1] == ["--"] else arguments.program
    if not program:
        raise RefusedError("PROGRAM is missing: name a command, or -m and a module")
    if arguments.module:
        return [sys.executable, "-m", *program]
    folder = os.path.dirname(sys.executable)
    path = shutil.which(program[0], path=os.pathsep.join([folder, os.environ.get("PATH", os.defpath)]))
    if path is None:
        if program[0].endswith(".py") and os.path.isfile(program[0]):
            raise RefusedError(f"{program[0]!r} is a script, not a command: evoattn run python {program[0]}")
        raise RefusedError(_no_command(program[0]))
    python = _python_of(path)
    if python is not None and os.path.realpath(os.path.dirname(python)) != os.path.realpath(folder):
        raise RefusedError(
            f"{path} runs with {python}, evoattn with {sys.executable}. Install evoattn beside the program and call that one"
        )
    return [path, *program[1:]]


def _no_command(program: str) -> str:
    """Why a program is no command."""
    if os.path.isdir(program):
        return f"{program!r} is a directory, not a command"
    if os.path.isfile(program) and os.access(program, os.X_OK):
        return f"{program!r} is neither beside evoattn nor on PATH: evoattn run {os.path.join(os.curdir, program)}"
    if os.path.isfile(program):
        return f"{program!r} is not executable: its permissions do not allow it"
    if os.path.islink(program):
        return f"{program!r} is a link to {os.readlink(program)!r}, which does not exist"
    if os.path.dirname(program):
        return f"there is no file {program!r}"
    return f"no command {program!r} beside {sys.executable} or on PATH; -m runs a module, sh -c runs a shell's own command"


def _python_of(path: str) -> str | None:
    """The Python that a script's first line names, or None. A program may be one to execute and not to read."""
    try:
        with open(path, "rb") as file:
            first = file.readline(1000)
    except OSError:
        return None
    if not first.startswith(b"#!"):
        return None
    words = first[2:].decode(errors="replace").split()
    if words and os.path.basename(words[0]) == "env":
        words = [shutil.which(word) or word for word in words[1:] if not word.startswith("-")]
    return words[0] if words and os.path.basename(words[0]).startswith("python") else None


def _wait(command: list[str], environment: dict[str, str]) -> int:
    """Run a program and return its status, negative if of a signal. Signals for this process meanwhile go to the program.

    The terminal's own signals reach the program too if both are in its foreground group. They are not sent twice then.
    """
    process: subprocess.Popen[bytes] | None = None
    early: list[int] = []
    handlers: dict[int, Any] = {}

    def pass_on(number: int, _: object) -> None:
        if process is None:
            early.append(number)
        elif number not in _TERMINAL_SIGNALS or not in_foreground(process.pid):
            process.send_signal(number)
        if process is not None and number == getattr(signal, "SIGTSTP", None):  # stop too, and go on when continued
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            signal.signal(number, pass_on)

    for caught in signal.valid_signals() - _NOT_FORWARDED:
        if signal.getsignal(caught) not in (signal.SIG_IGN, None):
            handlers[caught] = signal.signal(caught, pass_on)
    try:
        process = start(command, environment)
        for number in early:
            process.send_signal(number)
        return process.wait()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def in_foreground(child: int) -> bool:
    """True if this process and its child are in the foreground group of their terminal."""
    try:
        with open("/dev/tty", "rb", buffering=0) as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp() == os.getpgid(child)
    except (AttributeError, OSError):  # Windows; there is no terminal
        return False


def start(command: list[str], environment: dict[str, str], **streams: Any) -> subprocess.Popen[bytes]:
    """Start a program, which ends with this process.

    Raises:
        RefusedError: it cannot be started.
    """
    try:
        return subprocess.Popen(command, env=environment, preexec_fn=_ends_with_this_process(), **streams)
    except OSError as error:
        raise RefusedError(f"{command[0]} cannot be started: {_why_not_started(command[0], error)}") from error


def _why_not_started(path: str, error: OSError) -> str:
    if error.errno == errno.ENOEXEC:
        return f"it is no program for this machine, and no first line '#!' names one that runs it: evoattn run sh {path}"
    if error.errno == errno.ENOENT and os.path.exists(path):
        return "the interpreter that it names does not exist"
    return error.strerror or str(error)


def _ends_with_this_process() -> Callable[[], None] | None:
    """Return a function that a new process calls on Linux, so that the kernel kills it if this process is killed.

    All is looked up before the fork, because other threads may hold locks then.
    """
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl
    set_parent_death_signal, number, parent = ctypes.c_int(1), ctypes.c_ulong(int(signal.SIGKILL)), os.getpid()

    def call() -> None:
        prctl(set_parent_death_signal, number)
        if os.getppid() != parent:  # killed before the call
            os._exit(1)

    return call


def _die_of(number: int) -> int:
    """End by the signal that ended the program, without a core of our own."""
    import resource  # POSIX alone has it, and such ends

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    return 128 + number  # the signal is blocked
