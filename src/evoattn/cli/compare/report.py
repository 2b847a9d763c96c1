"""The report of a comparison: a table for people, and the same as JSON."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from evoattn.cli.compare.programs import OURS, PLAIN, SEED, THREADS, Run
from evoattn.cli.compare.structures import Difference, Structure, compare, rmsd

SAME = 0.01
"""Å. Structures that differ by less are the same: files have three decimals."""

_SAME = f"the same to {SAME} Å"

_SCORES = 7
"""Scores that are shown of a structure. The JSON file has all. The seventh of OpenFold-3 is the one that ranks samples."""


@dataclasses.dataclass(frozen=True)
class Compared:
    """A structure in all ways.

    Attributes:
        name: the path of the file.
        atoms: how many.
        differences: from the one as installed, by way. None: that way has no such file, or other atoms.
        sample: the file of the run as installed that evoattn's belongs to, if it is another one: programs rank their samples.
    """

    name: str
    atoms: int
    differences: dict[str, Difference | None]
    sample: str = ""

    @property
    def within(self) -> str:
        """The change that moves the structure as much as evoattn does, in words, or ""."""
        ours = self.differences[OURS]
        if ours is None:
            return ""
        if ours.rmsd <= SAME:
            return _SAME
        for way, words in ((THREADS, "another number of threads"), (SEED, "another seed")):
            spread = self.differences.get(way)
            if spread is not None and ours.rmsd <= spread.rmsd:
                return f"within what {words} changes"
        return ""

    @property
    def verdict(self) -> str:
        if self.differences[OURS] is None:
            return "not compared: one run has no such structure, or other atoms"
        if self.within:
            return self.within
        if self.differences.get(SEED) is None:
            return "differs; what another seed changes is not known"
        return "DIFFERS by more than another seed or number of threads changes"


def compared(runs: Mapping[str, Run]) -> list[Compared]:
    """Compare each structure with the one as installed."""
    plain, result = runs[PLAIN].structures, []
    samples = {way: _samples(plain, run.structures) for way, run in runs.items() if way != PLAIN}
    for name in sorted({*plain, *runs[OURS].structures}):
        differences, sample = dict[str, Difference | None](), ""
        for way, of in samples.items():
            other, differences[way] = of.get(name, (name, None))
            sample = other if way == OURS and other != name else sample
        result.append(Compared(name, len((plain.get(name) or runs[OURS].structures[name]).atoms), differences, sample))
    return result


def _samples(plain: Mapping[str, Structure], other: Mapping[str, Structure]) -> dict[str, tuple[str, Difference]]:
    """The structure as installed that belongs to each of another run, and their difference.

    That is the one of the same name. If some of those differ, the nearest ones of a folder belong together, since programs rank
    their samples.
    """
    same = {name for name, x in other.items() if name in plain and plain[name].atoms == x.atoms}
    pairs = {(name, name): rmsd(plain[name].places, other[name].places) for name in same}
    if not all(distance <= SAME for distance in pairs.values()):
        for first, second in itertools.product(same, same):
            if Path(first).parent == Path(second).parent and plain[first].atoms == other[second].atoms:
                pairs[first, second] = rmsd(plain[first].places, other[second].places)
    found: dict[str, str] = {}
    taken: set[str] = set()
    for first, second in sorted(pairs, key=lambda x: (math.isnan(pairs[x]), pairs[x], x)):
        if first not in taken and second not in found:
            found[second] = first
            taken.add(first)
    return {second: (first, compare(plain[first], other[second])) for second, first in found.items()}


def shown(result: list[Compared], runs: Mapping[str, Run]) -> Iterator[str]:
    """The tables, and a sentence at the end."""
    yield f"{'':44}" + "".join(f"{way:>16}" for way in runs)
    yield f"{'seconds of the command':44}" + "".join(f"{run.seconds:16.1f}" for run in runs.values())
    on_gpu = any(run.gpu_gib is not None for run in runs.values())
    peaks = [run.gpu_gib if on_gpu else run.process_gib for run in runs.values()]
    title = f"peak memory of {'a GPU' if on_gpu else 'a process'}, GiB"
    yield f"{title:44}" + "".join(f"{_text(peak):>16}" for peak in peaks)
    for each in result:
        yield ""
        yield f"{each.name}, {each.atoms:,} atoms"
        values = [each.differences.get(way) for way in runs]
        yield f"{'  RMSD from as installed, Å':44}" + "".join(f"{_text(None if x is None else x.rmsd):>16}" for x in values)
        yield f"{'  lDDT to as installed':44}" + "".join(f"{_text(None if x is None else x.lddt):>16}" for x in values)
        of_plain = dict(_scores_of(each.sample or each.name, runs[PLAIN].scores))
        of_runs = {way: dict(_scores_of(each.name, run.scores)) for way, run in runs.items()} | {PLAIN: of_plain}
        for key in list(of_plain)[:_SCORES]:
            yield f"{'  ' + key:44}" + "".join(f"{_text(of_runs[way].get(key)):>16}" for way in runs)
        if each.sample:
            yield f"  compared with {each.sample} as installed, which is nearest: samples are ranked in another order"
        yield f"  {each.verdict}"
    yield ""
    yield runs[OURS].report
    yield sentence(result)


def sentence(result: list[Compared]) -> str:
    """The last line: how many structures there are of each verdict."""
    counts = collections.Counter(each.verdict.partition(":")[0] for each in result)
    return "; ".join(f"{count} of {len(result)} structures: {verdict}" for verdict, count in counts.most_common())


def _scores_of(structure: str, scores: Mapping[tuple[str, str], float]) -> list[tuple[str, float]]:
    """The scores in the file that belongs to a structure.

    It is in the same folder, and has all words of the structure's name, but for the "_model" at the end of OpenFold-3's.
    """
    path = Path(structure)
    words = collections.Counter(path.stem.removesuffix("_model").split("_"))
    for name in dict.fromkeys(file for file, _ in scores if Path(file).parent == path.parent):
        if not words - collections.Counter(Path(name).stem.split("_")):
            return [(score, value) for (file, score), value in scores.items() if file == name]
    return []


def _text(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _finite(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None


def as_json(result: list[Compared], runs: Mapping[str, Run]) -> dict[str, Any]:
    """All numbers."""
    ways = {
        way: {
            "seconds": run.seconds,
            "gpu_gib": run.gpu_gib,
            "process_gib": run.process_gib,
            "scores": {f"{file}: {name}": _finite(value) for (file, name), value in run.scores.items()},
        }
        for way, run in runs.items()
    }
    structures = [
        {
            "name": each.name,
            "atoms": each.atoms,
            "differences": {
                way: x and {name: _finite(value) for name, value in dataclasses.asdict(x).items()}
                for way, x in each.differences.items()
            },
            "sample": each.sample,
            "within": each.within,
        }
        for each in result
    ]
    return {"ways": ways, "structures": structures, "report": runs[OURS].report}
