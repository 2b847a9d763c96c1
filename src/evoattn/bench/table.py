"""A record as text: aligned columns for a terminal."""

from __future__ import annotations

from evoattn.bench.peers import PEERS
from evoattn.bench.record import Problem, Record, Result

_VERSIONS = {"torch": "torch", "triton": "Triton", "cute_dsl": "CuTe DSL"} | {x: x for x in ("driver", "evoattn", "commit")}


def title(name: str) -> str:
    """The name of a contender in tables."""
    return PEERS[name].title if name in PEERS else name.replace("evoattn/", "evoattn, ")


def headline(record: Record) -> str:
    """Device, versions, commit and date, in one line."""
    m = record.machine
    parts = [str(m.get("device", "unknown device"))]
    parts += [f"{word} {m[key]}" for key, word in _VERSIONS.items() if m.get(key)]
    return ", ".join([*parts, *([str(m["date"])] if m.get("date") else [])])


def worst_error(result: Result) -> float | None:
    """The largest relative error of output and gradients."""
    return max(result.errors.values(), default=None)


def rate(problem: Problem, result: Result | None, name: str) -> float | None:
    """Billions of scores a second."""
    time = result.times.get(name) if result else None
    return None if time is None else problem.workload.scores / time.median_ms / 1e6


def _number(value: float | None, digits: str = ".3f") -> str:
    return "-" if value is None else format(value, digits)


def _time(result: Result, name: str) -> str:
    time = result.times.get(name)
    if time is None:
        return "-"
    median = f"{time.median_ms:.{3 if time.median_ms < 100 else 1}f}"
    return median if time.spread_ms is None else f"{median} ±{50 * time.spread_ms / time.median_ms:.0f}%"


def problem_table(problem: Problem) -> list[list[str]]:
    """Rows of cells, the head first: one row for each contender that was verified."""
    passes = list(dict.fromkeys(name for result in problem.results for name in result.times))
    hosted = [name for name in passes if any(name in result.host_us for result in problem.results)]
    times, hosts = [f"{name.replace('_', ' ')} ms" for name in passes], [f"host {name} µs" for name in hosted]
    rows = [["", *times, "10⁹ scores/s", *hosts, "first call s", "peak MiB", "worst error", ""]]
    for result in (result for result in problem.results if result.times or result.errors):
        speed = rate(problem, result, "forward")
        backend = f"backend {result.backends(', backward ')}" if result.name == "evoattn" and result.backend else ""
        rows.append(
            [
                title(result.name),
                *(_time(result, name) for name in passes),
                _number(speed, ",.3g" if speed is not None and speed < 100 else ",.0f"),
                *(_number(result.host_us.get(name), ",.0f") for name in hosted),
                _number(result.first_call_s, ".2f"),
                _number(None if result.peak_bytes is None else result.peak_bytes / 2**20, ",.1f"),
                _number(worst_error(result), ".1e"),
                "; ".join(filter(None, (backend, "" if result.status == "ok" else result.status))),
            ]
        )
    return rows


def aligned(rows: list[list[str]]) -> str:
    """Columns aligned with spaces: numbers to the right, the first and the last to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *numbers, last in rows:
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(numbers, widths[1:], strict=False)), last]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def describe(problem: Problem) -> str:
    """A workload's sizes and biases, in one line."""
    w = problem.workload
    heads = f"H {w.h}" + (f" ({w.kv_heads} of keys)" if w.kv_heads else "")
    lengths = f"L {w.lq}" if w.lq == w.lk else f"Lq {w.lq}, Lk {w.lk}"
    biases = " and ".join(name for name, has in (("mask", w.key_mask), ("pair bias", w.pair_bias)) if has) or "no bias"
    batch = f"B {w.b}, " if w.b > 1 else ""
    return f"{w.name}, {problem.dtype}: {w.where}; {batch}N {w.n}, {lengths}, {heads}, D {w.d}, {biases}"


def reasons(problems: list[Problem]) -> dict[tuple[str, str, str], list[str]]:
    """Why times are missing: by contender, status and reason, the names of the workloads."""
    workloads: dict[tuple[str, str, str], list[str]] = {}
    for problem in problems:
        for result in problem.results:
            if result.status != "ok":
                workloads.setdefault((result.name, result.status, result.reason), []).append(problem.workload.name)
    return workloads


def as_text(record: Record) -> str:
    """The whole record for a terminal: a table for each problem, and below them the reasons for missing times."""
    note = record.settings.get("note")
    parts = [headline(record) + (f"\nnote: {note}" if note else "")]
    for problem in record.problems:
        rows = problem_table(problem)
        parts.append(describe(problem) + (f"\n{aligned(rows)}" if len(rows) > 1 else ""))
    lines = [
        f"{title(name)}, {'all' if len(where) == len(record.problems) else ', '.join(where)}: {status}: {reason}"
        for (name, status, reason), where in reasons(record.problems).items()
    ]
    return "\n\n".join([*parts, *(["\n".join(lines)] if lines else [])])


def wrong(record: Record) -> list[str]:
    """A line for each result of evoattn that is wrong."""
    return [
        f"WRONG: {problem.workload.name}, {problem.dtype}, {title(result.name)}: {result.reason}"
        for problem in record.problems
        for result in problem.results
        if result.is_evoattn and "is wrong" in result.reason
    ]
