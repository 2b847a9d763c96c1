"""`evoattn compare`: a program as it is installed and with evoattn, on the same noise: structures, scores, seconds, memory."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from evoattn.cli.compare.programs import OURS, PLAIN, SEED, THREADS, WAYS, named_as, run_once, with_options
from evoattn.cli.compare.report import as_json, compared, shown
from evoattn.cli.compare.structures import check_reader
from evoattn.cli.run import command_of
from evoattn.cli.terminal import RefusedError, check_json, count_progress, whole_number
from evoattn.compile.cache import write
from evoattn.core.precisions import PRECISIONS

HELP = "a program with and without evoattn: are the answers the same, and how much faster"

ABOUT = """\
Runs a program that predicts structures four times: as it is installed, with evoattn on the same noise, and as it is
installed again with another seed and with another number of threads. Then it shows how far each structure of evoattn lies
from the one as installed, beside how far another seed and another number of threads move it.
"""

EPILOG = """\
examples:
  evoattn compare boltz predict input.yaml
  evoattn compare protenix pred --input input.json
  evoattn compare run_openfold predict --query_json query.json
  evoattn compare python fold.py input.fasta {out}      {out}: the folder of results; {seed}: the seed

Options of evoattn come before PROGRAM; all that follows is the program's. Its folder of results is chosen by evoattn: --out
keeps it. Kernels that are not kept are compiled first: run it again for the seconds.

exit status: 0 no structure differs by more than another seed or number of threads makes; 1 one does, or could not be
compared; 2 a run failed
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `compare`."""
    parser.usage = (
        "evoattn compare [-h] [--seed N] [--out FOLDER] [--json FILE] [--precision NAME] [--quick] (PROGRAM | -m MODULE) "
        "[ARGUMENTS ...]"
    )
    seeds = "of all runs but that with another seed, which has N + 1; default: 1"
    parser.add_argument("--seed", type=whole_number(0), default=1, metavar="N", help=seeds)
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="keep results and logs here; default: they are removed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers")
    parser.add_argument("--precision", choices=PRECISIONS, default="exact", metavar="NAME", help="as of `evoattn run`")
    parser.add_argument("--quick", action="store_true", help="leave out another seed and another number of threads")
    parser.add_argument("-m", dest="module", action="store_true", help="PROGRAM is a module, as after python -m")
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="PROGRAM", help="a command, with its arguments")


def run(arguments: argparse.Namespace) -> int:
    """Run the program in all ways, compare, and print."""
    command = command_of(arguments)
    with_options(command, "out", arguments.seed)  # refuse before any work
    check_reader()
    if arguments.json is not None:
        check_json(arguments.json)
    if arguments.out is not None:
        check_out(arguments.out)
    ways = (PLAIN, OURS) if arguments.quick else (SEED, PLAIN, OURS, THREADS)
    with tempfile.TemporaryDirectory(prefix="evoattn-compare-", ignore_cleanup_errors=True) as temporary:
        folder = (arguments.out or Path(temporary)).resolve()
        runs = {}
        with count_progress(len(ways)) as count:
            for number, way in enumerate(ways):
                count(number, f"{way}: {' '.join(command)}")
                place = folder / way.replace(" ", "-")
                runs[way] = run_once(way, command, arguments.seed, place, arguments.precision)
    runs = {way: named_as(runs[way], runs[PLAIN]) for way in WAYS if way in runs}
    result = compared(runs)
    if arguments.json is not None:
        write(arguments.json, f"{json.dumps(as_json(result, runs), indent=1, allow_nan=False)}\n".encode())
    print("\n".join(shown(result, runs)))
    return 0 if all(x.within for x in result) else 1


def check_out(folder: Path) -> None:
    """Refuse a folder that is no new one: a program may leave out what it finds there."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RefusedError(f"--out {str(folder)!r}: expected a folder that is empty or not there yet")
