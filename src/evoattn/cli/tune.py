"""`evoattn tune`: better tiles for this card and these shapes, kept where later calls find them."""

from __future__ import annotations

import argparse
import sys

import torch

from evoattn.bench import attentions, machine, table
from evoattn.bench.clock import clock_for
from evoattn.cli import tile_search
from evoattn.cli.bench import add_problems, problems_of
from evoattn.cli.terminal import (
    count_progress,
    kept_folder,
    refusing_place,
    whole_number,
)
from evoattn.cli.tile_search import Tuned
from evoattn.compile.cache import try_to_write
from evoattn.core import tuned_tiles
from evoattn.workloads import Workload

HELP = "better tile sizes for this machine and your shapes: a luxury"

ABOUT = """\
Tries tile sizes around the built-in choice on this machine, and keeps what is faster beyond the noise and by 3% or
more in a table of yours, which later calls of any program read once and use for problems of about the same size.
The built-in choice is good without it. Every config is compared with float64 before it is timed.
"""

EPILOG = """\
examples:
  evoattn tune                                     usual shapes, a few minutes
  evoattn tune --workloads tri500 msa_row --dtypes bfloat16
  evoattn tune --show                              what is in the table
  evoattn tune --clear                             remove it

The table is a file a device, in EVOATTN_CACHE_DIR or the user's cache. It is good for the driver, the Triton and the
evoattn that it was made with; otherwise it is ignored, with a warning. `explain()` tells where a call uses it.

exit status: 0 all is well; 2 bad options, or a table that cannot be written; 130 interrupted: the results so far
are kept
"""

_DTYPES = ("bfloat16", "float16", "float32")
_USUAL = {
    "cuda": ("tri384", "tri256", "msa_row", "msa_column", "tri768", "diffusion768", "single768", "tri397"),
    "cpu": ("tri128", "msa_row128n128", "tri97", "msa_column32"),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `tune`."""
    add_problems(parser, _DTYPES)
    parser.add_argument("--budget", type=whole_number(1), default=300, metavar="S", help="seconds in all (default: 300)")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--show", action="store_true", help="print the table and measure nothing")
    instead.add_argument("--clear", action="store_true", help="remove the table and measure nothing")


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    device, workloads, dtypes = problems_of(arguments, _USUAL)
    on_cpu = device.type == "cpu"
    folder = kept_folder()
    if arguments.clear:
        removed = tuned_tiles.clear(on_cpu)
        print(f"removed {removed}" if removed else f"there was none at {tuned_tiles.path(on_cpu)}")
        return 0
    if arguments.show:
        _show(on_cpu)
        return 0
    with refusing_place(folder):  # before minutes of search: it could not be kept after them
        try_to_write(folder)
    findings: list[Tuned] = []
    try:
        _search([(w, dtype) for w in workloads for dtype in dtypes], device, arguments.budget, findings)
    finally:  # also where the table could not be written, or on Ctrl-C
        _print(findings, device)
    if any(one.config for one in findings):
        print(f"\nkept in {tuned_tiles.path(on_cpu)}; evoattn tune --clear removes it")
    return 0


def _search(problems: list[tuple[Workload, str]], device: torch.device, budget_s: int, findings: list[Tuned]) -> None:
    """Search each problem within its share of the time left, and write each finding at once."""
    on_cpu = device.type == "cpu"
    clock = clock_for(device)
    end = clock.now() + budget_s
    with count_progress(len(problems)) as progress:
        for done, (asked, dtype) in enumerate(problems):
            until = clock.now() + (end - clock.now()) / (len(problems) - done)
            what = f"{asked.name}, {dtype}"

            def say(config: str, done: int = done, what: str = what) -> None:
                progress(done, f"{what}: {config}")

            if reason := attentions.too_large(asked, getattr(torch, dtype), device):
                print(f"{what}: left out: {reason}", file=sys.stderr)
                continue
            say("built-in choice")
            for one in tile_search.tune(asked, dtype, device, clock, until, say):
                findings.append(one)
                if one.config is not None:
                    with refusing_place(kept_folder()):
                        tuned_tiles.save({one.key: one.entry()}, on_cpu)


def _print(findings: list[Tuned], device: torch.device) -> None:
    print(f"{machine.name(device)}\n")
    if not findings:
        print("nothing was searched to its end, or nothing has tiles to choose (few queries and few keys have none)")
        return
    rows = [["", "backend", "pass", "built-in ms", "tuned ms", "gain", "tried", ""]]
    for one in findings:
        better, after, gain = "nothing better by 3%", "", ""
        if one.config is not None:
            better, after, gain = _words(one.config.given()), f"{one.after_ms:.3f}", f"{one.gain:.2f}x"
        about = (f"{one.workload}, {one.dtype}", one.backend, one.direction, f"{one.before_ms:.3f}", after, gain)
        rows.append([*about, str(one.tried), better + ("; time was over" if one.cut else "")])
    print(table.aligned(rows))


def _words(fields: dict[str, int]) -> str:
    return ", ".join(f"{name}={value}" for name, value in fields.items())


def _show(on_cpu: bool) -> None:
    entries = tuned_tiles.entries(on_cpu)
    if not entries:
        print(f"nothing in {tuned_tiles.path(on_cpu)}: the built-in tables choose")
        return
    rows = [["problems like", "measured at", "built-in ms", "tuned ms", "config"]]
    for name, entry in entries.items():
        numbers = [str(entry.get(key, "-")) for key in ("workload", "before_ms", "after_ms")]
        rows.append([name, *numbers, _words(entry["config"])])
    print(f"{tuned_tiles.path(on_cpu)}\n\n{table.aligned(rows)}")
