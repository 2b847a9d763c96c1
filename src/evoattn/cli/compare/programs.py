"""Programs that predict structures: their options, and a run of one in one way."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from evoattn.cli.compare.structures import SUFFIXES, Structure, read
from evoattn.cli.run import start
from evoattn.cli.terminal import RefusedError
from evoattn.clients import parent
from evoattn.clients.registry import NAMES


class Options(NamedTuple):
    """The names of a program's options for the folder of its results and for its seed. The first of each is the one to add."""

    out: tuple[str, ...]
    seed: tuple[str, ...] = ()


PROGRAMS = {
    "boltz": Options(("--out_dir",), ("--seed",)),
    "protenix": Options(("--out_dir", "-o"), ("--seeds", "-s")),
    "run_openfold": Options(("--output-dir", "--output_dir")),
}
"""Programs by the names of their commands. OpenFold-3 takes its seeds from a file: only its features are seeded here."""

PLAIN, OURS, SEED, THREADS = WAYS = ("as installed", "evoattn", "another seed", "other threads")
"""The runs of a comparison, as they are shown. That of another seed comes first: it finds files that nothing has read yet."""


@dataclasses.dataclass
class Run:
    """A run of the program: its results, time and memory.

    Attributes:
        seconds: of the whole command.
        gpu_gib: the most memory that torch had on one GPU. None: no process told of it.
        process_gib: the most memory of one process.
        structures: by the path of the file, with a rank in the place of a seed.
        scores: by such a path and the name of the score.
        report: what evoattn computed.
    """

    seconds: float
    gpu_gib: float | None
    process_gib: float
    structures: dict[str, Structure]
    scores: dict[tuple[str, str], float]
    report: str = ""


def with_options(command: list[str], out: str, seed: int) -> list[str]:
    """The command with this folder of results and this seed.

    Raises:
        RefusedError: the program is not known, and its arguments do not say where the folder stands.
    """
    name = command[2].partition(".")[0] if command[1:2] == ["-m"] and command[2:] else Path(command[0]).stem
    known = PROGRAMS.get(name, Options(()))
    marked = any("{out}" in word for word in command)
    if not marked and not known.out:
        raise RefusedError(
            f"{command[0]} is none of {', '.join(PROGRAMS)}: write {{out}} where its folder of results stands in its arguments"
        )
    words = [word.replace("{out}", out).replace("{seed}", str(seed)) for word in command]
    if not marked:
        words = with_value(words, known.out, out)
    return with_value(words, known.seed, str(seed)) if known.seed else words


def with_value(words: list[str], names: tuple[str, ...], value: str) -> list[str]:
    """A command whose option has this value, whatever it had before. names: of the option."""
    kept, skip = [], False
    for word in words:
        if not skip and not any(word == name or word.startswith(f"{name}=") for name in names):
            kept.append(word)
        skip = not skip and word in names
    return [*kept, names[0], value]


def run_once(way: str, command: list[str], seed: int, folder: Path, precision: str = "exact") -> Run:
    """Run the program in one way, and read what it wrote. precision: that of evoattn.

    Raises:
        RefusedError: it failed, wrote no structure, or evoattn computed nothing of it.
    """
    out = folder / "results"
    counts = folder / "counts"
    counts.mkdir(parents=True)
    seed += way == SEED
    watched = parent.modules(NAMES) if way == OURS else {}
    environment = parent.environment(counts, watched, precision=precision, seed=seed)
    if way == THREADS:
        environment["OMP_NUM_THREADS"] = str(other_threads(environment.get("OMP_NUM_THREADS", "")))
    log = folder / "log.txt"
    begin = time.monotonic()
    with log.open("w") as file:
        words = with_options(command, str(out), seed)
        process = start(words, environment, stdout=file, stderr=file, stdin=subprocess.DEVNULL)
        status, bytes_ = waited(process)
    seconds = time.monotonic() - begin
    last = " / ".join(log.read_text(errors="replace").strip().splitlines()[-3:])
    if status:
        raise RefusedError(f"{way}: the program ended with status {status} (--out keeps its log): {last}")
    found = {str(path.relative_to(out)): read(path) for path in sorted(out.rglob("*")) if path.suffix in SUFFIXES}
    if not any(found.values()):
        raise RefusedError(f"{way}: no {' or '.join(SUFFIXES)} with atoms below the folder of results (--out keeps it): {last}")
    report = parent.summary(counts, NAMES, precision) if watched else ""
    if watched and not parent.has_computed(counts):
        raise RefusedError(f"evoattn computed nothing, so there is nothing to compare: {report}")
    numbers = dict(scores(out))
    ranks = seeds_ranked([*found, *(file for file, _ in numbers)])
    structures = {ranks[name]: x for name, x in found.items() if x is not None}
    peaks = [int(text) for path in counts.glob("*.peak") if (text := path.read_text()).isdecimal()]
    gpu = max(peaks) / 2**30 if peaks else None
    ranked = {(ranks[file], name): value for (file, name), value in numbers.items()}
    return Run(seconds, gpu, bytes_ / 2**30, structures, ranked, report)


def seeds_ranked(names: list[str]) -> dict[str, str]:
    """Each path with ranks in the place of seeds: runs of another seed write folders and files of other names."""
    seeds = sorted({int(x) for name in names for x in _SEED.findall(name)})
    ranks = {seed: str(rank) for rank, seed in enumerate(seeds)}
    return {name: _SEED.sub(lambda found: f"seed_{ranks[int(found[1])]}", name) for name in names}


_SEED = re.compile(r"seed_(\d+)")


def waited(process: subprocess.Popen[bytes]) -> tuple[int, int]:
    """Wait for a program. Return its status and the bytes of the largest of its processes."""
    try:
        _, status, usage = os.wait4(process.pid, 0)
    except BaseException:
        process.kill()
        process.wait()
        raise
    process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode, usage.ru_maxrss << (0 if sys.platform == "darwin" else 10)


def other_threads(asked: str) -> int:
    """Another number of threads than torch takes."""
    count = int(asked) if asked.isdecimal() and int(asked) else torch.get_num_threads()
    return count // 2 if count > 1 else 2


def scores(out: Path) -> Iterator[tuple[tuple[str, str], float]]:
    """The numbers in the files of confidence and affinity. A file that is no JSON has none."""
    for path in sorted({*out.rglob("*confidence*.json"), *out.rglob("*affinity*.json")}):
        found = None
        with contextlib.suppress(ValueError):
            found = json.loads(path.read_text())
        for name, value in found.items() if isinstance(found, dict) else ():
            if isinstance(value, int | float) and not isinstance(value, bool):
                yield (str(path.relative_to(out)), name), float(value)
