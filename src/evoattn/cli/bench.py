"""`evoattn bench`: evoattn and its peers on the attentions of the AlphaFold family, as a table, a page, pictures, data."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from evoattn.backends import BACKENDS
from evoattn.bench import ceilings, compare, machine, plots, sharded_table, table
from evoattn.bench.clock import clock_for
from evoattn.bench.peers import PEERS
from evoattn.bench.plan import Plan, default_plan, plan_of, plan_settings, remaining, select_workloads
from evoattn.bench.record import PASSES, Record, read, write, write_text
from evoattn.bench.run import run
from evoattn.cli.terminal import (
    RefusedError,
    add_command,
    among,
    check_output,
    names_in,
    need_extra,
    number,
    pick,
    problem_progress,
    refusing,
    try_to_write,
    whole_number,
)
from evoattn.workloads import LAYERS, WORKLOADS, Workload

_DTYPES = ("bfloat16", "float16", "float32", "float64")
_PLAN_OPTIONS = ("workloads", "lengths", "dtypes", "passes", "backends", "peers", "device", "quick", "rounds", "note")
_RUN_OPTIONS = ("budget", "commit")
_FILE_OPTIONS = ("json", "csv", "png")
_OF_KERNELS = ("list", "workloads", "dtypes", "passes", "backends", "peers", "budget", "csv", "png", "resume", "from")
"""Options that say nothing of a block over several GPUs."""

_THRESHOLD = 5.0

_ABOUT = """\
Measures attention as the AlphaFold family runs it, forward and backward: evoattn's backends and every peer that is
installed (FlexAttention, cuEquivariance, TriFast, TurboPairFormer, OpenFold-3's Triton kernel, DeepSpeed, SDPA, dense
torch, the same compiled), and two bounds on easier problems: cuDNN without a mask, FlashAttention without a bias. All run
in one process on the same inputs, in interleaved rounds, over more inputs than the cache holds. Outputs and gradients are
compared with float64 first: what is wrong gets no time.
"""

_EPILOG = """\
examples:
  evoattn bench                                      what fits this machine and a few minutes
  evoattn bench --quick                              half a minute: a look, not a measurement
  evoattn bench --workloads tri384 msa_row tri500 --dtypes bfloat16 float16 --json mine.json
  evoattn bench --workloads layer384 layer_msa_row384   whole layers, norm to output, in several ways
  evoattn bench --lengths 100 200 397 --peers dense  triangle attention at these lengths, next to dense torch alone
  evoattn bench --resume mine.json --budget 600      what Ctrl-C or the budget left out, into the same record
  evoattn bench --from mine.json --png speed.png     the plots of what was measured before
  evoattn bench --compare before.json after.json     what became faster or slower beyond the noise of both
  evoattn bench --gpus 2 --lengths 1024 2048         a pair block over two GPUs, beside the same block on one

exit status: 0 all is well; 1 evoattn was wrong, or slower than before by more than the threshold, or a process of
--gpus died; 2 bad options or files, or a missing extra; 130 interrupted: the results so far are shown and
written
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `bench` to the command line."""
    parser = add_command(
        commands, "bench", run_command, "speed, memory and error next to every peer that is installed", _ABOUT, _EPILOG
    )
    what = parser.add_argument_group("what is measured")
    what.add_argument("--workloads", nargs="+", metavar="NAME", help="from the list of `evoattn bench --list`, or tri500")
    what.add_argument("--lengths", nargs="+", metavar="L", help="every workload named, or triangle attention, at these lengths")
    what.add_argument("--dtypes", nargs="+", metavar="DTYPE", help="bfloat16 (default on a GPU), float16, float32 (on the CPU)")
    what.add_argument("--passes", nargs="+", metavar="PASS", help="forward, backward, both (default: all three)")
    what.add_argument(
        "--backends", nargs="+", metavar="NAME", help="of evoattn: auto and any of `evoattn doctor` (default: all)"
    )
    what.add_argument("--peers", nargs="*", metavar="NAME", help=f"of {', '.join(PEERS)} (default: all; none: --peers alone)")
    what.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto is the GPU where there is one")
    what.add_argument("--quick", action="store_true", help="few and small problems, nothing that compiles for long")
    what.add_argument(
        "--gpus", type=whole_number(2), metavar="N", help="a pair block over N GPUs, beside the same block on one"
    )
    what.add_argument("--parts", action="store_true", help="with --gpus: each layer of the block alone too")
    what.add_argument("--list", action="store_true", help="print the workloads and end")
    how = parser.add_argument_group("how long")
    how.add_argument("--budget", type=whole_number(1), metavar="S", help="seconds in all (default: 300; quick: 30)")
    how.add_argument("--rounds", type=whole_number(2), metavar="R", help="interleaved rounds of timing (default: 7; quick: 3)")
    out = parser.add_argument_group("what is written")
    out.add_argument("--json", type=Path, metavar="FILE", help="all that was measured, after every problem")
    out.add_argument("--csv", type=Path, metavar="FILE", help="the same for a spreadsheet")
    out.add_argument("--png", type=Path, metavar="FILE", help="plots (needs matplotlib)")
    out.add_argument("--commit", metavar="TEXT", help="what to record as the commit where git cannot tell")
    out.add_argument("--note", metavar="TEXT", help="what whoever reads the record has to know of this run")
    old = parser.add_argument_group("what was measured before")
    old.add_argument("--resume", type=Path, metavar="FILE", help="measure what Ctrl-C or the budget cut short, into it")
    old.add_argument("--from", dest="source", type=Path, metavar="FILE", help="measure nothing, show and write this record")
    old.add_argument("--compare", nargs=2, type=Path, metavar=("BEFORE", "AFTER"), help="what changed beyond noise")
    old.add_argument(
        "--threshold",
        type=number(float, lambda percent: 0 <= percent < 1e6, "a percentage from 0 up"),
        metavar="PERCENT",
        help="of --compare (default: 5)",
    )


def run_command(arguments: argparse.Namespace) -> int:
    """Run the command; everything that can be refused is, before any work."""
    if arguments.gpus is not None:
        _refuse_with(arguments, "--gpus measures a pair block", *_OF_KERNELS, "compare", "threshold")
        if not torch.distributed.is_available():
            raise RefusedError("--gpus: this torch was built without torch.distributed; expected one with it")
        from evoattn.cli import gpus  # DTensors take a while to import, and other commands need none

        return gpus.run_command(arguments, _lengths(arguments))
    _refuse_with(arguments, "--parts is for --gpus", "parts")
    if arguments.list:
        print("\n".join(f"{w.name:<16} {w.where}" for w in (*WORKLOADS, *LAYERS)))
        return 0
    begun = None if arguments.resume is None else _begun(arguments)
    if arguments.compare:
        _refuse_with(arguments, "--compare measures and writes nothing", *_PLAN_OPTIONS, *_RUN_OPTIONS, *_FILE_OPTIONS, "from")
        before, after = (_read(path, "--compare") for path in arguments.compare)
        threshold = _THRESHOLD if arguments.threshold is None else arguments.threshold
        comparison = compare.compare(before, after, threshold / 100)
        if not comparison.pairs:
            raise RefusedError("--compare: the two records have no problem of the same sizes and dtype in common")
        print(compare.as_text(comparison, before, after))
        return 1 if comparison.regressions else 0
    _refuse_with(arguments, "--threshold is for --compare", "threshold")
    if arguments.source is not None:
        _refuse_with(arguments, "--from measures nothing", *_PLAN_OPTIONS, *_RUN_OPTIONS)
    outputs = _outputs(arguments)
    after_problem = outputs.get("json", lambda record: None)  # if it cannot be written now, there may be room at the end
    if arguments.source is not None:
        record = _read(arguments.source, "--from")
    elif begun is not None:
        record = _resume(arguments, begun, after_problem)
    else:
        record = _measure(arguments, after_problem)
    unwritten = [refused for output in outputs.values() if (refused := output(record))]  # a reader of the table may stop early
    print((sharded_table if "processes" in record.settings else table).as_text(record))
    status = _status(record)
    for refused in unwritten:
        print(f"evoattn bench: error: {refused}", file=sys.stderr)
    return 2 if unwritten else status


_ENDS = {
    "interrupted": "interrupted: the results so far are above, and in the files; --resume FILE continues",
    "out of time": "the budget ended before all was measured: the table lists what is missing; "
    "--budget gives more time, and --resume FILE continues what --json wrote",
}


def _status(record: Record) -> int:
    wrong = [
        f"WRONG: {problem.workload.name}, {problem.dtype}, {table.title(result.name)}: {result.reason}"
        for problem in record.problems
        for result in problem.results
        if result.is_evoattn and "is wrong" in result.reason
    ]
    for line in [*wrong, *filter(None, [_ENDS.get(record.finished)])]:
        print(f"evoattn bench: {line}", file=sys.stderr)
    return 130 if record.finished == "interrupted" else 1 if wrong else 0


def _outputs(arguments: argparse.Namespace) -> dict[str, Callable[[Record], RefusedError | None]]:
    """Functions that write a record, for every file asked for."""
    writers: dict[str, tuple[Callable[[Record, Path], None], tuple[str, ...]]] = {
        "json": (write, (".json",)),
        "csv": (lambda record, path: write_text(table.as_csv(record), path), (".csv",)),
        "png": (plots.write_png, (".png",)),
    }
    paths = {kind: path for kind in writers if (path := getattr(arguments, kind)) is not None}
    for kind, path in paths.items():
        check_output(path, f"--{kind}", *writers[kind][1])
    if "png" in paths:
        need_extra("matplotlib")

    def write_one(kind: str, record: Record) -> RefusedError | None:
        return try_to_write(f"--{kind}", paths[kind], lambda: writers[kind][0](record, paths[kind]))

    return {kind: functools.partial(write_one, kind) for kind in paths}


def _read(path: Path, option: str) -> Record:
    try:
        with refusing(f"{option} {str(path)!r}: cannot be read"):
            return read(path)
    except ValueError as error:
        raise RefusedError(f"{option} {str(path)!r}: {error}") from None


def _measure(arguments: argparse.Namespace, after_problem: Callable[[Record], object]) -> Record:
    device = pick(arguments.device)
    plan = _plan(arguments, default_plan(device.type, arguments.quick))
    clock = clock_for(device)
    settings = {**plan_settings(plan), "quick": arguments.quick, "note": arguments.note}
    record = Record(machine.facts(device, arguments.commit), settings)
    print(f"ceilings of {machine.name(device)}", file=sys.stderr, flush=True)
    record.ceilings = ceilings.measure(device, clock, plan.dtypes)
    with problem_progress(plan.budget_s) as progress:
        return run(plan, record, device, clock, progress, after_problem)


def _resume(arguments: argparse.Namespace, record: Record, after_problem: Callable[[Record], object]) -> Record:
    device = _the_same_device(arguments, record)
    try:
        plan = plan_of(record.settings, arguments.budget)
    except (KeyError, TypeError, ValueError) as error:
        raise RefusedError(f"--resume: the record does not say what was asked for: {error}") from None
    if not remaining(plan, record):
        return record
    record.settings |= {"budget_s": plan.budget_s, "resumed": (record.settings.get("resumed") or 0) + 1}
    with problem_progress(plan.budget_s) as progress:
        return run(plan, record, device, clock_for(device), progress, after_problem)


def _refuse_with(arguments: argparse.Namespace, why: str, *options: str) -> None:
    """Refuse options that cannot be combined with another one, rather than ignore them."""
    for option in options:
        value = getattr(arguments, "source" if option == "from" else option)
        if value is not None and value is not False and (option, value) != ("device", "auto"):
            raise RefusedError(f"{why}: leave out --{option}")


def _begun(arguments: argparse.Namespace) -> Record:
    """The record to continue. The result goes into it too, unless --json names another file."""
    _refuse_with(arguments, "--resume goes on with what the record was begun with", *_PLAN_OPTIONS, "from", "compare")
    record = _read(arguments.resume, "--resume")
    if record.finished != "complete" and any(problem.cut is None for problem in record.problems):
        raise RefusedError(f"--resume {str(arguments.resume)!r}: does not say what was cut short; an older version wrote it")
    if arguments.json is None:
        arguments.json = check_output(arguments.resume, "--resume", ".json")
    return record


def _the_same_device(arguments: argparse.Namespace, begun: Record) -> torch.device:
    """The device that a record was begun on, if it is here and all is as it was."""
    device = pick("cuda" if begun.machine.get("kind") == "gpu" else "cpu")
    now = machine.facts(device, arguments.commit)
    for fact in sorted({*now, *begun.machine} - {"date"}):
        was, there_is = begun.machine.get(fact), now.get(fact)
        if was != there_is:
            hint = "; --commit tells where git cannot" if fact == "commit" else ""
            raise RefusedError(
                f"--resume {str(arguments.resume)!r}: was measured with {fact} {was}, here it is {there_is}{hint}"
            )
    if str(now["commit"]).endswith("-dirty"):
        raise RefusedError("--resume: files differ from the commit, so this may not be what was measured; --commit says it is")
    return device


def _plan(arguments: argparse.Namespace, default: Plan) -> Plan:
    explicit = arguments.workloads is not None and not arguments.quick
    return Plan(
        workloads=workloads_of(arguments, default.workloads),
        dtypes=among("--dtypes", arguments.dtypes, _DTYPES, default.dtypes),
        passes=among("--passes", arguments.passes, PASSES, PASSES),
        backends=among("--backends", arguments.backends, ("auto", *BACKENDS), ("auto", *BACKENDS)),
        peers=among("--peers", arguments.peers, tuple(PEERS), default.peers),
        rounds=arguments.rounds or default.rounds,
        budget_s=arguments.budget or (None if explicit else default.budget_s),
    )


def workloads_of(arguments: argparse.Namespace, default: tuple[Workload, ...]) -> tuple[Workload, ...]:
    """The workloads that --workloads and --lengths ask for.

    Raises:
        RefusedError: there is no such workload, or no such length.
    """
    lengths = _lengths(arguments)
    try:
        return select_workloads(names_in(arguments.workloads), lengths, default)
    except ValueError as error:
        raise RefusedError(f"--workloads: {error}") from None


def _lengths(arguments: argparse.Namespace) -> list[int] | None:
    texts = names_in(arguments.lengths)
    try:
        return None if texts is None else [whole_number(1)(text) for text in texts]
    except argparse.ArgumentTypeError as error:
        raise RefusedError(f"--lengths: {error}") from None
