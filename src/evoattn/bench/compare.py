"""Compare two records of the same problems: times and memory that changed beyond the noise of both."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator

from evoattn.bench import table
from evoattn.bench.record import TIMED, Problem, Record, Result


@dataclasses.dataclass(frozen=True)
class Change:
    """One contender's pass on one problem, before and after.

    Args:
        problem: the workload's name and the dtype.
        name: the contender.
        what: the pass, or "peak memory".
        before, after: milliseconds or bytes, or None.
        beyond_noise: true if the ranges in which another run is expected do not overlap.
        note: a reason in words, or empty.
    """

    problem: str
    name: str
    what: str
    before: float | None
    after: float | None
    beyond_noise: bool
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """After over before: above 1 is slower, or more memory."""
        return self.after / self.before if self.before and self.after else None

    @property
    def is_evoattn(self) -> bool:
        """True if it is evoattn that changed."""
        return self.name.startswith("evoattn")


@dataclasses.dataclass
class Comparison:
    """All differences between two records.

    Args:
        pairs: the number of problems that are in both records.
        changes: each time and peak memory of a contender that both records have. Changes within noise are included.
        threshold: how much slower evoattn may become, or how much more memory it may need, as a fraction.
    """

    pairs: int
    changes: list[Change]
    threshold: float

    @property
    def regressions(self) -> list[Change]:
        """Changes of evoattn for the worse: beyond noise, and by more than the threshold; or a time that is lost."""
        worse = [change for change in self.changes if change.is_evoattn and change.beyond_noise]
        return [change for change in worse if change.after is None or (change.ratio or 0) > 1 + self.threshold]


def compare(before: Record, after: Record, threshold: float) -> Comparison:
    """Every contender on every problem of the same sizes and dtype in both."""
    comparison, by_sizes = Comparison(0, [], threshold), {_sizes(problem): problem for problem in after.problems}
    for old in before.problems:
        if (new := by_sizes.get(_sizes(old))) is None:
            continue
        comparison.pairs += 1
        for result in old.results:
            other = new.result(result.name)
            if other is not None and other.status not in ("left out", "absent"):
                comparison.changes += _changes(f"{old.workload.name}, {old.dtype}", result, other)
    return comparison


def _sizes(problem: Problem) -> tuple[object, ...]:
    return (*dataclasses.astuple(dataclasses.replace(problem.workload, name="", where="", most_rows=None)), problem.dtype)


def _changes(problem: str, before: Result, after: Result) -> Iterator[Change]:
    for name in TIMED:
        old, new = before.times.get(name), after.times.get(name)
        if old is not None and new is not None:
            (low, high), (new_low, new_high) = old.range_ms, new.range_ms
            yield Change(problem, before.name, name, old.median_ms, new.median_ms, new_low > high or new_high < low)
        elif old is not None and (after.reason or not after.times):
            yield Change(problem, before.name, name, old.median_ms, None, True, f"{after.status}: {after.reason}")
    if before.peak_bytes and after.peak_bytes:
        differ = before.peak_bytes != after.peak_bytes
        yield Change(problem, before.name, "peak memory", before.peak_bytes, after.peak_bytes, differ)


def _cells(change: Change) -> list[str]:
    scale, unit = (2**20, "MiB") if change.what == "peak memory" else (1, "ms")
    before = "-" if change.before is None else f"{change.before / scale:.4g} {unit}"
    after = "-" if change.after is None else f"{change.after / scale:.4g} {unit}"
    ratio = "lost" if change.ratio is None else f"{100 * (change.ratio - 1):+.1f}%"
    return [f"{change.problem}, {table.title(change.name)}", change.what, before, after, ratio, change.note]


def as_text(comparison: Comparison, before: Record, after: Record) -> str:
    """Changes of evoattn, then of its peers, the largest first. The peers' median shows the machine's part."""
    lines = [f"before  {table.headline(before)}", f"after   {table.headline(after)}"]
    facts = ("device", "driver", "torch", "triton", "cute_dsl")
    said = {fact: {record.machine.get(fact) for record in (before, after)} for fact in facts}
    if differing := [fact for fact in facts if len(said[fact] - {None}) > 1]:  # an older record knows less
        lines.append(f"NOTE    not the same {', '.join(differing)}: that may be all the difference")
    beyond = [change for change in comparison.changes if change.beyond_noise and abs((change.ratio or 9) - 1) >= 0.01]
    for title, is_evoattn in (("evoattn", True), ("peers", False)):
        rows = [change for change in beyond if change.is_evoattn == is_evoattn]
        rows.sort(key=lambda change: -(change.ratio or float("inf")))
        compared = sum(change.is_evoattn == is_evoattn for change in comparison.changes)
        lines.append(f"\n{title}: {len(rows)} of {compared} changed beyond noise and 1%")
        if rows:
            lines.append(table.aligned([["", "", "before", "after", "change", ""], *map(_cells, rows)]))
    moved = [change.ratio for change in comparison.changes if not change.is_evoattn and change.what in TIMED and change.ratio]
    if moved:
        lines.append(
            f"\nthe peers' times moved by {100 * (statistics.median(moved) - 1):+.1f}% in the median: the machine's part"
        )
    worse = comparison.regressions
    lines.append(
        f"\nREGRESSION: {len(worse)} of evoattn's are worse by more than {100 * comparison.threshold:g}%"
        if worse
        else f"\nno regression above {100 * comparison.threshold:g}% in {comparison.pairs} problems"
    )
    return "\n".join(lines)
