"""Programs that predict structures: their options, and a run of one in one way."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from evoattn.cli.compare.structures import SUFFIXES, Structure, read
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
"""The runs of a comparison."""


@dataclasses.dataclass
class Run:
    """A run of the program: its results, time and memory.

    Attributes:
        seconds, peak_gib: of the whole command. The peak is that of a GPU if one was used, else of the largest process.
        structures: by the path of the file.
        scores: by the path of the file and the name of the score.
        report: what evoattn computed.
    """

    seconds: float
    peak_gib: float
    structures: dict[str, Structure]
    scores: dict[tuple[str, str], float]
    report: str = ""


def with_options(command: list[str], out: str, seed: int) -> list[str]:
    """The command with this folder of results and this seed.

    Raises:
        RefusedError: the program is not known, and its arguments do not say where the folder stands.
    """
    known = next((PROGRAMS[name] for word in command[:4] if (name := Path(word).stem) in PROGRAMS), Options(()))
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


def run_once(way: str, command: list[str], seed: int, folder: Path) -> Run:
    """Run the program in one way, and read what it wrote.

    Raises:
        RefusedError: it failed, wrote no structure, or evoattn computed nothing of it.
    """
    out = folder / "results"
    counts = folder / "counts"
    counts.mkdir(parents=True)
    seed += way == SEED
    watched = parent.modules(NAMES) if way == OURS else {}
    environment = parent.environment(counts, watched, graphs=True, seed=seed)
    if way == THREADS:
        environment["OMP_NUM_THREADS"] = str(other_threads(environment.get("OMP_NUM_THREADS", "")))
    log = folder / "log.txt"
    begin = time.monotonic()
    with log.open("w") as file:
        words = with_options(command, str(out), seed)
        process = subprocess.Popen(words, env=environment, stdout=file, stderr=file, stdin=subprocess.DEVNULL)
        status, bytes_ = waited(process)
    seconds = time.monotonic() - begin
    peaks = [int(path.read_text()) for path in counts.glob("*.peak")]
    last = log.read_text(errors="replace").strip().splitlines()[-3:]
    if status:
        raise RefusedError(f"{way}: the program ended with status {status}: {' / '.join(last)}")
    structures = {str(x.relative_to(out)): read(x) for x in sorted(out.rglob("*")) if x.suffix in SUFFIXES}
    if not structures:
        raise RefusedError(f"{way}: no {' or '.join(SUFFIXES)} below the folder of results: {' / '.join(last)}")
    report = parent.summary(counts, NAMES) if watched else ""
    if watched and not parent.has_computed(counts):
        raise RefusedError(f"evoattn computed nothing, so there is nothing to compare: {report}")
    return Run(seconds, max(peaks, default=bytes_) / 2**30, structures, dict(scores(out)), report)


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
    """Another number of threads than a program has."""
    count = int(asked) if asked.isdecimal() and int(asked) else os.cpu_count() or 1
    return count // 2 if count > 1 else 2


def scores(out: Path) -> Iterator[tuple[tuple[str, str], float]]:
    """The numbers in the files of confidence."""
    for path in sorted(out.rglob("*confidence*.json")):
        found = json.loads(path.read_text())
        for name, value in found.items() if isinstance(found, dict) else ():
            if isinstance(value, int | float) and not isinstance(value, bool):
                yield (str(path.relative_to(out)), name), float(value)
