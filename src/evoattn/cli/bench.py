"""`evoattn bench`: attention by evoattn and by every peer that is installed, verified and timed."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

from evoattn.backends import BACKENDS
from evoattn.bench import compare, machine, table
from evoattn.bench.clock import clock_for
from evoattn.bench.peers import PEERS
from evoattn.bench.record import PASSES, Record, read, write
from evoattn.bench.run import BenchPlan
from evoattn.bench.run import run as measure
from evoattn.cli.terminal import (
    RefusedError,
    check_json,
    count_progress,
    pick,
    refusing,
    whole_number,
)
from evoattn.workloads import WORKLOADS, Workload, workload

_DTYPES = ("bfloat16", "float16", "float32", "float64")
_BACKENDS = ("auto", *BACKENDS)

_USUAL = {"cuda": ("tri384", "tri397", "msa_row", "single768"), "cpu": ("tri64", "tri128", "msa_row128n128", "single256")}
"""Workloads that take minutes with all peers: kernels compile for each of them."""

HELP = "speed, memory and error next to every peer that is installed"

ABOUT = """\
Measures attention as the AlphaFold family runs it, forward and backward: evoattn's backends and every peer that is
installed (FlexAttention, cuEquivariance, TriFast, TurboPairFormer, OpenFold-3's Triton kernel, DeepSpeed, SDPA, dense
torch, the same compiled). All run in one process on the same inputs, in interleaved rounds, over more inputs than the
cache holds. Outputs and gradients are compared with float64 first: what is wrong gets no time.
"""

EPILOG = """\
examples:
  evoattn bench                                      four usual workloads, in minutes
  evoattn bench --workloads all --json mine.json     all of them
  evoattn bench --workloads tri384 msa_row tri500 --dtypes bfloat16 float16
  evoattn bench --workloads tri100 --peers dense     next to dense torch alone
  evoattn bench --compare before.json after.json     what became faster or slower beyond the noise of both

exit status: 0 all is well; 1 evoattn was wrong, or slower than before by more than 5%; 2 bad options or files;
130 interrupted: the problems so far are shown and written
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `bench`."""
    what = parser.add_argument_group("what is measured")
    what.add_argument("--list", action="store_true", help="print the workloads and end")
    add_problems(what, _DTYPES)
    what.add_argument("--passes", nargs="+", choices=PASSES, default=PASSES, help="default: all")
    what.add_argument("--backends", nargs="+", choices=_BACKENDS, default=_BACKENDS, help="of evoattn (default: all)")
    what.add_argument(
        "--peers",
        nargs="*",
        choices=tuple(PEERS),
        help="default: all, on the CPU those that do not compile; none: --peers alone",
    )
    what.add_argument("--rounds", type=whole_number(2), default=7, metavar="R", help="rounds of timing (default: 7)")
    out = parser.add_argument_group("the record")
    out.add_argument("--json", type=Path, metavar="FILE", help="all that was measured, written after every problem")
    out.add_argument("--commit", metavar="TEXT", help="what to record as the commit where git cannot tell")
    out.add_argument("--note", metavar="TEXT", help="what whoever reads the record has to know of this run")
    out.add_argument(
        "--compare", nargs=2, type=Path, metavar=("BEFORE", "AFTER"), help="measure nothing: what changed beyond noise"
    )


def add_problems(options: argparse._ActionsContainer, dtypes: tuple[str, ...]) -> None:
    """Add the options that choose problems, for `problems_of`."""
    names = "from evoattn bench --list, or at another length, such as tri500; or all"
    options.add_argument("--workloads", nargs="+", metavar="NAME", help=names)
    options.add_argument("--dtypes", nargs="+", choices=dtypes, help="default: bfloat16 on a GPU, float32 on the CPU")
    options.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto is the GPU if there is one")


def run(arguments: argparse.Namespace) -> int:
    """Run the command; everything that can be refused is, before any work."""
    if arguments.compare:
        return _compare(arguments)
    if arguments.list:
        print("\n".join(f"{w.name:<16} {w.where}" for w in WORKLOADS))
        return 0
    device, workloads, dtypes = problems_of(arguments, _USUAL)
    peers = arguments.peers
    if peers is None:
        peers = [name for name, peer in PEERS.items() if not (peer.compiles and device.type == "cpu")]
    passes, backends, peers = (tuple(dict.fromkeys(names)) for names in (arguments.passes, arguments.backends, peers))
    plan = BenchPlan(workloads, dtypes, passes, backends, peers, arguments.rounds)
    path: Path | None = arguments.json
    if path is not None:
        check_json(path)
    record = Record(machine.facts(device, arguments.commit), {**plan.settings(), "note": arguments.note})

    def keep(record: Record) -> None:
        if path is not None:
            write(record, path)

    def try_to_keep(record: Record) -> None:
        with contextlib.suppress(OSError):  # it is tried again at the end
            keep(record)

    with count_progress(len(plan.workloads) * len(plan.dtypes)) as progress:
        measure(plan, record, device, clock_for(device), progress, try_to_keep)
    try:
        with refusing(f"--json {str(path)!r}: cannot be written"):
            keep(record)
    finally:  # what was measured is shown all the same
        print(table.as_text(record))
        status = _status(record)
    return status


def _compare(arguments: argparse.Namespace) -> int:
    """Print what changed between two records. Return 1 if it is a regression."""
    for option, value in vars(arguments).items():
        if option not in ("command", "compare") and value != arguments.parser.get_default(option):
            raise RefusedError(f"--compare measures and writes nothing: leave out --{option}")
    before, after = map(_read, arguments.compare)
    changes = compare.compare(before, after)
    if changes is None:
        raise RefusedError("--compare: the two records have no problem of the same sizes and dtype in common")
    print(compare.as_text(changes, before, after))
    return 1 if any(change.is_regression for change in changes) else 0


def _read(path: Path) -> Record:
    try:
        with refusing(f"--compare {str(path)!r}: cannot be read"):
            return read(path)
    except ValueError as error:
        raise RefusedError(f"--compare {str(path)!r}: {error}") from None


def _status(record: Record) -> int:
    """Say on stderr how the run ended, and return the exit status."""
    lines, interrupted = table.wrong(record), record.finished == "interrupted"
    status = 130 if interrupted else 1 if lines else 0
    if interrupted:
        lines.append("interrupted: the problems so far are above, and in the file of --json")
    for line in lines:
        print(f"evoattn bench: {line}", file=sys.stderr)
    return status


def problems_of(
    arguments: argparse.Namespace, usual: Mapping[str, tuple[str, ...]]
) -> tuple[torch.device, tuple[Workload, ...], tuple[str, ...]]:
    """The device, and the workloads and dtypes without duplicates, that the options of `add_problems` name.

    Args:
        arguments: with these options.
        usual: names of the default workloads for "cuda" and "cpu".

    Raises:
        RefusedError: there is no such device or workload.
    """
    device = pick(arguments.device)
    names = arguments.workloads or usual[device.type]
    dtypes = arguments.dtypes or ["bfloat16" if device.type == "cuda" else "float32"]
    try:
        workloads = WORKLOADS if "all" in names else tuple(dict.fromkeys(map(workload, names)))
    except ValueError as error:
        raise RefusedError(f"--workloads: {error}") from None
    return device, workloads, tuple(dict.fromkeys(dtypes))
