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
    """The names of a program's options. The first of each is the one to add.

    Attributes:
        out: of the folder of its results.
        seed: of its seed.
        settings: of a YAML file that has its seeds, as OpenFold-3's.
        dropped: options that would replace the seed.
    """

    out: tuple[str, ...] = ()
    seed: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()


PROGRAMS = {
    "boltz": Options(out=("--out_dir",), seed=("--seed",)),
    "protenix": Options(out=("--out_dir", "-o"), seed=("--seeds", "-s"), dropped=("--use_seeds_in_json",)),
    "run_openfold": Options(
        out=("--output-dir", "--output_dir"),
        settings=("--runner-yaml", "--runner_yaml"),
        dropped=("--num-model-seeds", "--num_model_seeds"),
    ),
}
"""Programs by the names of their commands."""

PLAIN, OURS, SEED, THREADS = WAYS = ("as installed", "evoattn", "another seed", "other threads")
"""The runs of a comparison, as they are shown. That of another seed comes first: it finds files that nothing has read yet."""


@dataclasses.dataclass
class Run:
    """A run of the program: its results, time and memory.

    Attributes:
        seconds: of the whole command.
        gpu_gib: the most memory that torch had on one GPU. None: no process told of it.
        process_gib: the most memory of one process.
        structures: by the path of the file.
        scores: by the path of the file and the name of the score.
        report: what evoattn computed.
    """

    seconds: float
    gpu_gib: float | None
    process_gib: float
    structures: dict[str, Structure]
    scores: dict[tuple[str, str], float]
    report: str = ""


def options_of(command: list[str]) -> Options:
    """The options of the program that a command calls, as it is or as `python -m`. They are none if it is not known."""
    names = command[2].split(".") if command[1:2] == ["-m"] and command[2:] else [Path(command[0]).stem]
    return next((PROGRAMS[name] for name in names if name in PROGRAMS), Options())


def with_options(command: list[str], out: str, seed: int) -> list[str]:
    """The command with this folder of results and this seed.

    Raises:
        RefusedError: the program is not known, and its arguments do not say where the folder stands.
    """
    known = options_of(command)
    marked = any("{out}" in word for word in command)
    if not marked and not known.out:
        raise RefusedError(
            f"{command[0]} is none of {', '.join(PROGRAMS)}: write {{out}} where its folder of results stands in its arguments"
        )
    words = [word.replace("{out}", out).replace("{seed}", str(seed)) for word in command]
    words, _ = without(words, known.dropped)
    if not marked:
        words = with_value(words, known.out, out)
    return with_value(words, known.seed, str(seed)) if known.seed else words


def with_value(words: list[str], names: tuple[str, ...], value: str) -> list[str]:
    """A command whose option has this value, whatever it had before. names: of the option."""
    return [*without(words, names)[0], names[0], value]


def without(words: list[str], names: tuple[str, ...]) -> tuple[list[str], str]:
    """A command without an option, and the last value that it had, or "". names: of the option."""
    joined = tuple(f"{name}=" if name.startswith("--") else name for name in names)
    kept, value, follows = list[str](), "", False
    for word in words:
        if follows:
            value, follows = word, False
        elif word in names:
            follows = True
        elif word.startswith(joined):
            value = next(word.removeprefix(name) for name in joined if word.startswith(name))
        else:
            kept.append(word)
    return kept, value


def with_settings(words: list[str], names: tuple[str, ...], seed: int, copy: Path) -> list[str]:
    """A command with a copy of its file of settings that has this seed alone. names: of the option for the file.

    Raises:
        RefusedError: the file cannot be read.
    """
    import yaml  # a program with such a file has it

    words, path = without(words, names)
    try:
        settings = (yaml.safe_load(Path(path).read_text()) if path else None) or {}
        experiment = {**(settings.get("experiment_settings") or {}), "seeds": [seed]}
    except (OSError, ValueError, TypeError, AttributeError, yaml.YAMLError) as error:  # unreadable, or no mapping
        raise RefusedError(f"{names[0]} cannot be read: {error}") from error
    copy.write_text(yaml.safe_dump({**settings, "experiment_settings": experiment}))
    return [*words, names[0], str(copy)]


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
    words = with_options(command, str(out), seed)
    if options_of(command).settings:
        words = with_settings(words, options_of(command).settings, seed, folder / "settings.yml")
    with log.open("w") as file:
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
    structures = {name: x for name, x in found.items() if x is not None}
    peaks = [int(text) for path in counts.glob("*.peak") if (text := path.read_text()).isdecimal()]
    gpu = max(peaks) / 2**30 if peaks else None
    return Run(seconds, gpu, bytes_ / 2**30, structures, dict(scores(out)), report)


def named_as(run: Run, other: Run) -> Run:
    """The run with the seeds of another one in the names of its files, by their order: programs name files after seeds."""
    seeds, names = seeds_of(run), seeds_of(other)
    if len(seeds) != len(names):
        return run
    by_seed = dict(zip(seeds, names, strict=True))

    def renamed(path: str) -> str:
        return _SEED.sub(lambda found: f"seed_{by_seed[int(found[1])]}", path)

    structures = {renamed(path): x for path, x in run.structures.items()}
    return dataclasses.replace(
        run, structures=structures, scores={(renamed(path), name): x for (path, name), x in run.scores.items()}
    )


def seeds_of(run: Run) -> list[int]:
    """The seeds in the names of a run's files, sorted."""
    paths = [*run.structures, *(path for path, _ in run.scores)]
    return sorted({int(seed) for path in paths for seed in _SEED.findall(path)})


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
