"""The command line: doctor, run, compare, warm, bench and tune. Exit status 0 is good, 1 a failed check, 2 bad input."""

from __future__ import annotations

import errno
import importlib
import io
import sys

from evoattn._version import __version__
from evoattn.cli.terminal import Parser, RefusedError, tell, write_no_more

_ABOUT = """\
Evoformer attention, the attention of the AlphaFold family: exact and memory-efficient.

  evoattn doctor    what is installed, what runs where, and whether its numbers are right
  evoattn run       a program, such as boltz, whose attention evoattn computes, without a changed line
  evoattn compare   a program with and without evoattn: whether its answers are the same, and how much faster
  evoattn warm      compiles what a model family needs, on all cores, before its first call
  evoattn bench     speed, memory and error next to every peer that is installed
  evoattn tune      better tile sizes for this machine and your shapes: a luxury, not a need
"""

_EPILOG = """\
`evoattn COMMAND --help` explains a command. In Python: `from evoattn import evoformer_attention`.

exit status: 0 all is well; 1 numbers were wrong, or slower than before, or a kernel did not compile; 2 bad options,
bad input or a missing extra; 130 interrupted
"""


_COMMANDS = ("doctor", "run", "compare", "warm", "bench", "tune")
"""The module of each has its texts `HELP`, `ABOUT` and `EPILOG`, the functions `add_options` and `run`."""

_CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def _parser(first: str) -> Parser:
    """The parser. If the first argument is a command, no other is imported: all but `run` import torch, which takes seconds."""
    parser = Parser(prog="evoattn", description=_ABOUT, epilog=_EPILOG)
    parser.add_argument("--version", action="version", version=f"evoattn {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in [first] if first in _COMMANDS else _COMMANDS:
        command = importlib.import_module(f"evoattn.cli.{name}")
        one = commands.add_parser(name, help=command.HELP, description=command.ABOUT, epilog=command.EPILOG)
        one.set_defaults(run=command.run, parser=one)
        command.add_options(one)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit status.

    Args:
        argv: the arguments after the command's name; None takes them from `sys.argv`.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a ± is a question mark where the terminal has no such letter
    try:
        given = sys.argv[1:] if argv is None else argv
        arguments, unknown = _parser(given[0] if given else "").parse_known_args(given)
        if unknown:
            arguments.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 0
    try:
        status: int = arguments.run(arguments)
        if sys.stdout is not None:
            sys.stdout.flush()
    except RefusedError as refused:
        tell(f"evoattn {arguments.command}: error: {refused}")
        return 2
    except KeyboardInterrupt:
        tell(f"evoattn {arguments.command}: interrupted")
        return 130
    except BrokenPipeError:  # the reader, such as `head`, has all it wanted
        write_no_more(sys.stdout)
        return 0
    except OSError as error:
        if error.errno not in _CANNOT_WRITE:
            raise
        write_no_more(sys.stdout)
        tell(f"evoattn {arguments.command}: error: what it found cannot be written: {error.strerror}")
        return 2
    return status
