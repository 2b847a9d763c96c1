"""Compare the blocks of installed clients with and without the patch, and with our layers: python -m clients NAME ..."""

from __future__ import annotations

import collections
import importlib
import os
import sys
import time
import warnings

import torch

import evoattn
from clients.blocks import Block
from clients.compare import DTYPES, RESIDUES, Result, compare
from clients.layers import faults_of

COLUMNS = "{:20}{:34}{:9}{:>13}{:>9}{:>11}{:>8}"


def main(names: list[str]) -> int:
    """Print a table, a line a block and dtype, and below it what is wrong. Return the exit status."""
    torch.set_num_threads(1)  # the blocks are small: two threads on a busy machine of two cores took 90 s, one takes 4
    os.environ.setdefault("LAYERNORM_TYPE", "torch")  # Protenix and OpenDDE compile an extension otherwise
    faults = []
    print(COLUMNS.format("client", "block", "dtype", "residues", "output", "gradients", "calls"))
    for name in names:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the clients' own
            blocks: tuple[Block, ...] = importlib.import_module(f"clients.{name}").BLOCKS
            faults += [f"{name}: {fault}" for fault in _client(name, blocks)]
    for fault in faults:
        print(fault)
    return 1 if faults else 0


def _client(name: str, blocks: tuple[Block, ...]) -> list[str]:
    """Compare the blocks of one client; return what is wrong."""
    faults: list[str] = []
    sites: collections.Counter[str] = collections.Counter()
    start = time.monotonic()
    for block in blocks:
        for dtype in DTYPES:
            result = compare(name, block, dtype, tell=_progress)
            _line(name, block, str(dtype).removeprefix("torch."), result)
            faults += result.faults
            sites += result.sites
    with evoattn.patch(name, layers=False, graphs=False, wait=True) as patched:
        version = patched.versions[name]
    faults += faults_of(name, blocks)
    faults += [f"no block calls {site}" for site in patched.calls_by_site if not sites[site]]
    print(f"{name} {version}: {len(blocks)} blocks in {time.monotonic() - start:.0f} s, {len(faults)} faults")
    return faults


def _line(name: str, block: Block, dtype: str, result: Result) -> None:
    _progress("")
    lengths = " ".join(map(str, RESIDUES))
    values = (name, block.name, dtype, lengths, f"{result.outputs:.0e}", f"{result.gradients:.0e}", result.calls)
    print(COLUMNS.format(*values) + ("  beyond" if result.faults else ""), flush=True)


def _progress(what: str) -> None:
    """Show what runs now, on a line that the next one overwrites."""
    if sys.stderr.isatty():
        print(f"\r\033[K{what}", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
