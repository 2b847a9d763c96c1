"""Compare two records of the same problems: times and memory that changed beyond the noise of both."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator

from evoattn.bench import table
from evoattn.bench.record import Problem, Record, Result

THRESHOLD = 0.05
"""A regression is slower, or needs more memory, by more than this share."""

_PEAK = "peak memory"
_FACTS = ("device", "driver", "torch", "triton", "cute_dsl")
"""Facts of a machine that may be all the difference."""


@dataclasses.dataclass(frozen=True)
class Change:
    """One contender's pass on one problem, before and after.

    Args:
        problem: the workload's name and the dtype.
        name: the contender.
        what: the pass, or "peak memory".
        before, after: milliseconds or bytes; `after` is None if the time is lost.
        beyond_noise: true if the ranges in which another run is expected do not overlap.
        note: a reason in words, or empty.
    """

    problem: str
    name: str
    what: str
    before: float
    after: float | None
    beyond_noise: bool
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """After over before: above 1 is slower, or more memory."""
        return None if self.after is None else self.after / self.before

    @property
    def is_evoattn(self) -> bool:
        """True if it is evoattn that changed."""
        return self.name.startswith("evoattn")

    @property
    def is_regression(self) -> bool:
        """True if evoattn became worse beyond noise and by more than the threshold, or lost a time."""
        return self.is_evoattn and self.beyond_noise and (self.ratio is None or self.ratio > 1 + THRESHOLD)


def compare(before: Record, after: Record) -> list[Change] | None:
    """Each time and peak memory of a contender that both records have, changed or not.

    Problems are matched by sizes and dtype. Without a common one the result is None.
    """
    by_sizes = {_sizes(problem): problem for problem in after.problems}
    pairs = [(old, by_sizes[_sizes(old)]) for old in before.problems if _sizes(old) in by_sizes]
    changes: list[Change] = []
    for old, new in pairs:
        for result in old.results:
            other = new.result(result.name)
            if other is not None and other.status not in ("left out", "absent"):
                changes += _changes(f"{old.workload.name}, {old.dtype}", result, other)
    return changes if pairs else None


def _sizes(problem: Problem) -> tuple[object, ...]:
    return (*dataclasses.astuple(dataclasses.replace(problem.workload, name="", where="", most_rows=None)), problem.dtype)


def _changes(problem: str, before: Result, after: Result) -> Iterator[Change]:
    for name, old in before.times.items():
        new = after.times.get(name)
        if new is not None:
            (low, high), (new_low, new_high) = old.range_ms, new.range_ms
            yield Change(problem, before.name, name, old.median_ms, new.median_ms, new_low > high or new_high < low)
        elif after.reason or not after.times:
            yield Change(problem, before.name, name, old.median_ms, None, True, f"{after.status}: {after.reason}")
    if before.peak_bytes and after.peak_bytes:
        differ = before.peak_bytes != after.peak_bytes
        yield Change(problem, before.name, _PEAK, before.peak_bytes, after.peak_bytes, differ)


def _cells(change: Change) -> list[str]:
    scale, unit = (2**20, "MiB") if change.what == _PEAK else (1, "ms")
    after = "-" if change.after is None else f"{change.after / scale:.4g} {unit}"
    ratio = "lost" if change.ratio is None else f"{100 * (change.ratio - 1):+.1f}%"
    name = f"{change.problem}, {table.title(change.name)}"
    return [name, change.what, f"{change.before / scale:.4g} {unit}", after, ratio, change.note]


def as_text(changes: list[Change], before: Record, after: Record) -> str:
    """Changes of evoattn, then of its peers, the largest first. The peers' median shows the machine's part."""
    lines = [f"before  {table.headline(before)}", f"after   {table.headline(after)}"]
    said = {fact: {record.machine.get(fact) for record in (before, after)} for fact in _FACTS}
    if differing := [fact for fact in _FACTS if len(said[fact] - {None}) > 1]:  # an older record knows less
        lines.append(f"NOTE    not the same {', '.join(differing)}: that may be all the difference")
    for title, is_evoattn in (("evoattn", True), ("peers", False)):
        compared = [change for change in changes if change.is_evoattn == is_evoattn]
        rows = [change for change in compared if change.beyond_noise and abs((change.ratio or 9) - 1) >= 0.01]
        rows.sort(key=lambda change: -(change.ratio or float("inf")))
        lines.append(f"\n{title}: {len(rows)} of {len(compared)} changed beyond noise and 1%")
        if rows:
            lines.append(table.aligned([["", "", "before", "after", "change", ""], *map(_cells, rows)]))
    moved = [change.ratio for change in changes if not change.is_evoattn and change.what != _PEAK and change.ratio]
    if moved:
        median = 100 * (statistics.median(moved) - 1)
        lines.append(f"\nthe peers' times moved by {median:+.1f}% in the median: the machine's part")
    worse, limit = sum(change.is_regression for change in changes), f"{100 * THRESHOLD:g}%"
    regression = f"REGRESSION: {worse} of evoattn's are worse by more than {limit}"
    return "\n".join([*lines, "", regression if worse else f"no regression above {limit}"])
