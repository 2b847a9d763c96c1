"""Record what this checkout compiles, launches and says, and compare two such records.

python dev.py proofs OUT [--quick]            write a record into a folder
python dev.py proofs compare BEFORE AFTER     say what differs between two; status 1 if anything does
python dev.py proofs host BEFORE AFTER        the host's time of a call in two checkouts, on the CPU
"""

from __future__ import annotations

import argparse
import os
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tools"), str(ROOT)]  # this checkout, whatever is installed
os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")


def main(arguments: list[str]) -> int:
    """Return the exit status."""
    parser = argparse.ArgumentParser(prog="dev.py proofs", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", nargs="+", metavar="OUT | compare BEFORE AFTER | host BEFORE AFTER")
    parser.add_argument("--quick", action="store_true", help="one card and fewer calls")
    parser.add_argument("--only", default="", metavar="REGEX", help="calls whose names have it, such as 'workload tri384'")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="how many work at once")
    given = parser.parse_args(arguments)
    match given.what:
        case ["compare", before, after]:
            from proofs.compare import compare

            return compare(pathlib.Path(before), pathlib.Path(after), given.processes)
        case ["host", before, after]:
            from proofs.host import compare_hosts

            return compare_hosts(pathlib.Path(before), pathlib.Path(after))
        case [out]:
            from proofs.record import write

            write(pathlib.Path(out), quick=given.quick, only=given.only, processes=given.processes)
            return 0
    parser.error("expected OUT, or compare BEFORE AFTER, or host BEFORE AFTER")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
