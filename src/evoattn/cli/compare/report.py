"""The report of a comparison: a table for people, and the same as JSON."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from evoattn.cli.compare.programs import OURS, PLAIN, SEED, THREADS, Run
from evoattn.cli.compare.structures import Difference, Structure, compare

SAME = 0.01
"""Å. Structures that differ by less are the same: files have three decimals."""

_SCORES = 6
"""Scores that are shown of a structure. The JSON file has all."""


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
            return f"the same to {SAME} Å"
        for way, words in ((THREADS, "another number of threads"), (SEED, "another seed")):
            spread = self.differences.get(way)
            if spread is not None and ours.rmsd <= spread.rmsd:
                return f"within what {words} changes"
        return ""

    @property
    def verdict(self) -> str:
        if self.differences[OURS] is None:
            return "not compared: one run has no such structure, or other atoms"
        if not self.within and SEED not in self.differences:
            return "differs; without --quick it is compared with what another seed changes"
        return self.within or "DIFFERS by more than another seed or number of threads changes"


def compared(runs: Mapping[str, Run]) -> list[Compared]:
    """Compare each structure with the one as installed."""
    plain, result = runs[PLAIN].structures, []
    samples = {way: _samples(plain, run.structures, ranked=way != SEED) for way, run in runs.items() if way != PLAIN}
    for name in sorted({*plain, *runs[OURS].structures}):
        differences, sample = dict[str, Difference | None](), ""
        for way, of in samples.items():
            other, differences[way] = of.get(name, (name, None))
            sample = other if way == OURS and other != name else sample
        result.append(Compared(name, len((plain.get(name) or runs[OURS].structures[name]).atoms), differences, sample))
    return result


def _samples(
    plain: Mapping[str, Structure], other: Mapping[str, Structure], *, ranked: bool
) -> dict[str, tuple[str, Difference]]:
    """The structure as installed that belongs to each of another run, and their difference.

    That is the one of the same name. If some of those differ and samples may be `ranked` in another order, the nearest ones of
    a folder belong together.
    """
    same = {
        name: (name, compare(plain[name], x)) for name, x in other.items() if name in plain and plain[name].atoms == x.atoms
    }
    if not ranked or all(difference.rmsd <= SAME for _, difference in same.values()):
        return same
    pairs = [
        (first, second, compare(plain[first], other[second]))
        for first, second in itertools.product(same, same)
        if Path(first).parent == Path(second).parent and plain[first].atoms == other[second].atoms
    ]
    found: dict[str, tuple[str, Difference]] = {}
    taken: set[str] = set()
    for first, second, difference in sorted(pairs, key=lambda x: (math.isnan(x[2].rmsd), x[2].rmsd)):
        if first not in taken and second not in found:
            found[second] = first, difference
            taken.add(first)
    return found


def shown(result: list[Compared], runs: Mapping[str, Run]) -> Iterator[str]:
    """The tables, and a sentence at the end."""
    yield f"{'':44}" + "".join(f"{way:>16}" for way in runs)
    yield f"{'seconds of the command':44}" + "".join(f"{run.seconds:16.1f}" for run in runs.values())
    yield f"{'peak memory, GiB':44}" + "".join(f"{run.peak_gib:16.2f}" for run in runs.values())
    for each in result:
        yield ""
        yield f"{each.name}, {each.atoms:,} atoms"
        values = [each.differences.get(way) for way in runs]
        yield f"{'  RMSD from as installed, Å':44}" + "".join(f"{_text(None if x is None else x.rmsd):>16}" for x in values)
        yield f"{'  lDDT to as installed':44}" + "".join(f"{_text(None if x is None else x.lddt):>16}" for x in values)
        for key in _scores_of(each.name, runs[PLAIN].scores)[:_SCORES]:
            yield f"{'  ' + key[1]:44}" + "".join(f"{_text(run.scores.get(key)):>16}" for run in runs.values())
        if each.sample:
            yield f"  compared with {each.sample} as installed, which is nearest: samples are ranked in another order"
        yield f"  {each.verdict}"
    yield ""
    yield runs[OURS].report
    differ = sum(not each.within for each in result)
    structures = f"structure{'s differ' if len(result) != 1 else ' differs'}"
    yield f"{differ} of {len(result)} {structures} by more than the program's own spread."


def _scores_of(structure: str, scores: Mapping[tuple[str, str], float]) -> list[tuple[str, str]]:
    """The scores in the file of confidence that belongs to a structure: that of its folder with the same ending of its name."""
    path = Path(structure)
    for name in dict.fromkeys(file for file, _ in scores if Path(file).parent == path.parent):
        words = Path(name).stem.split("_")
        if set(path.stem.split("_")) <= set(words):
            return [key for key in scores if key[0] == name]
    return []


def _text(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def as_json(result: list[Compared], runs: Mapping[str, Run]) -> dict[str, Any]:
    """All numbers."""
    ways = {
        way: {
            "seconds": run.seconds,
            "peak_gib": run.peak_gib,
            "scores": {f"{file}: {name}": value for (file, name), value in run.scores.items()},
        }
        for way, run in runs.items()
    }
    structures = [
        {
            "name": each.name,
            "atoms": each.atoms,
            "differences": {way: x and dataclasses.asdict(x) for way, x in each.differences.items()},
            "sample": each.sample,
            "within": each.within,
        }
        for each in result
    ]
    return {"ways": ways, "structures": structures, "report": runs[OURS].report}
