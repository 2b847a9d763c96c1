"""A record as text: aligned columns for a terminal, CSV for spreadsheets."""

from __future__ import annotations

import csv
import dataclasses
import io

from evoattn.bench.layers import WAYS
from evoattn.bench.peers import PEERS
from evoattn.bench.record import TIMED, Problem, Record, Result

_ERRORS = ("o", "dq", "dk", "dv", "dpair_bias", "da", "dm", "ds", "dz", "dparameters")


def title(name: str) -> str:
    """The name of a contender in tables."""
    if name in PEERS:
        return PEERS[name].title
    layers = (way.title for way in WAYS if way.name == name != "evoattn")
    return next(layers, name.replace("evoattn/", "evoattn, "))


def is_bound(name: str) -> bool:
    """True if a contender solves an easier problem: no speed-up over it is claimed."""
    return name in PEERS and not PEERS[name].biased


def headline(record: Record) -> str:
    """Device, versions, commit and date, in one line."""
    m = record.machine
    parts = [str(m.get("device", "unknown device"))]
    parts += [f"{word} {m[key]}" for key, word in _VERSIONS.items() if m.get(key)]
    return ", ".join([*parts, *([str(m["date"])] if m.get("date") else [])])


_VERSIONS = {"torch": "torch", "triton": "Triton", "cute_dsl": "CuTe DSL"} | {x: x for x in ("driver", "evoattn", "commit")}


def worst_error(result: Result) -> float | None:
    """The largest relative error of output and gradients."""
    return max(result.errors.values(), default=None)


def rate(problem: Problem, result: Result | None, name: str) -> float | None:
    """Billions of scores a second."""
    time = result.times.get(name) if result else None
    return None if time is None else problem.workload.scores / time.median_ms / 1e6


def roofs(record: Record, problem: Problem, name: str) -> dict[str, float]:
    """The bounds of a pass, in billions of scores a second, by the ceiling; those that were measured.

    A score takes one exponential, and four operations a channel in the forward's two products, ten in the backward's five. A
    backward moves the inputs and the output again, and as many gradients.
    """
    if name == "both":
        return {}
    w, measured = problem.workload, record.ceilings
    product = measured.product_flops_per_s.get(problem.dtype)
    bounds = {
        "exp2": measured.exp2_per_s,
        "products": product and product / ((4 if name == "forward" else 10) * w.d),
        "memory": measured.copy_bytes_per_s
        and problem.bytes
        and measured.copy_bytes_per_s * w.scores / (problem.bytes * (1 if name == "forward" else 2)),
    }
    return {what: bound / 1e9 for what, bound in bounds.items() if bound}


def ceilings(record: Record) -> str:
    """The ceilings in words, or an empty text."""
    measured = record.ceilings
    words = [
        *([f"{measured.exp2_per_s / 1e9:,.1f} x 10⁹ exp2/s"] if measured.exp2_per_s else []),
        *([f"{measured.copy_bytes_per_s / 1e9:,.1f} GB/s copied"] if measured.copy_bytes_per_s else []),
        *(f"{flops / 1e12:,.3g} Tflop/s of {dtype} products" for dtype, flops in measured.product_flops_per_s.items()),
    ]
    return f"{', '.join(words)} ({measured.how})" if words else ""


def _number(value: float | None, digits: str = ".3f") -> str:
    return "-" if value is None else format(value, digits)


def _time(result: Result, name: str) -> str:
    time = result.times.get(name)
    if time is None:
        return "-"
    digits = 3 if time.median_ms < 100 else 1
    if time.spread_ms is None:
        return f"{time.median_ms:.{digits}f}"
    return f"{time.median_ms:.{digits}f} ±{50 * time.spread_ms / time.median_ms:.0f}%"


def problem_table(problem: Problem) -> list[list[str]]:
    """Rows of cells, the head first: one row a contender; without a time, the reason fills the last cell."""
    passes = [name for name in TIMED if any(name in result.times for result in problem.results)]
    hosted = [name for name in passes if any(name in result.host_us for result in problem.results)]
    times, hosts = [f"{name.replace('_', ' ')} ms" for name in passes], [f"host {name} µs" for name in hosted]
    rows = [["", *times, "10⁹ scores/s", *hosts, "first call s", "peak MiB", "worst error", ""]]
    for result in problem.results:
        speed = rate(problem, result, "forward")
        cells = ["-"] * (len(rows[0]) - 2)
        if result.times or result.errors:
            cells = [
                *(_time(result, name) for name in passes),
                _number(speed, ",.3g" if speed is not None and speed < 100 else ",.0f"),
                *(_number(result.host_us.get(name), ",.0f") for name in hosted),
                _number(result.first_call_s, ".2f"),
                _number(None if result.peak_bytes is None else result.peak_bytes / 2**20, ",.1f"),
                _number(worst_error(result), ".1e"),
            ]
        reason = f"{result.status}: {result.reason}" if result.reason else ""
        note = f"backend {result.backends(', backward ')}" if result.name == "evoattn" and result.backend else ""
        rows.append([title(result.name), *cells, "; ".join(filter(None, (note, reason)))])
    return rows


def aligned(rows: list[list[str]], *, rule: bool = False) -> str:
    """Columns aligned with spaces: numbers to the right, the first and the last to the left; with a rule below the head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *numbers, last in rows:
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(numbers, widths[1:], strict=False)), last]
        lines.append("  ".join(cells).rstrip())
    if rule:
        lines.insert(1, "\u2500" * max(map(len, lines)))
    return "\n".join(lines)


def describe(problem: Problem) -> str:
    """A workload's sizes and biases, in one line."""
    w = problem.workload
    heads = f"H {w.h}" + (f" ({w.kv_heads} of keys)" if w.kv_heads else "")
    lengths = f"L {w.lq}" if w.lq == w.lk else f"Lq {w.lq}, Lk {w.lk}"
    biases = " and ".join(name for name, has in (("mask", w.key_mask), ("pair bias", w.pair_bias)) if has) or "no bias"
    batch = f"B {w.b}, " if w.b > 1 else ""
    return f"{w.name}, {problem.dtype}: {w.where}; {batch}N {w.n}, {lengths}, {heads}, D {w.d}, {biases}"


def as_text(record: Record) -> str:
    """The whole record for a terminal."""
    parts = [headline(record)]
    if ceilings(record):
        parts[0] += f"\nceilings: {ceilings(record)}"
    if record.settings.get("note"):
        parts[0] += f"\nnote: {record.settings['note']}"
    everywhere = _said_once(record)
    for problem in record.problems:
        shown = [result for result in problem.results if (result.name, result.reason) not in everywhere]
        reasons = {f"{result.status}: {result.reason}" for result in shown}
        if shown and len(reasons) == 1 and not any(result.times or result.errors for result in shown):
            parts.append(f"{describe(problem)}\n{reasons.pop()}")
        else:
            parts.append(f"{describe(problem)}\n{aligned(problem_table(dataclasses.replace(problem, results=shown)))}")
    if everywhere:
        parts.append("\n".join(f"{title(name)}: {status}: {why}" for (name, why), status in everywhere.items()))
    return "\n\n".join(parts)


def _said_once(record: Record) -> dict[tuple[str, str], str]:
    """(name, reason) -> status of contenders without any time, always for the same reason: told once, below all tables."""
    seen: dict[str, set[tuple[str, str]]] = {}
    for problem in record.problems:
        for result in problem.results:
            timed = bool(result.times or result.errors)
            if result.status != "left out":
                seen.setdefault(result.name, set()).add(("", "") if timed else (result.status, result.reason))
    same = {name: outcomes.pop() for name, outcomes in seen.items() if len(outcomes) == 1}
    return {(name, why): status for name, (status, why) in same.items() if why and status in ("absent", "refused", "failed")}


def as_csv(record: Record) -> str:
    """One line a contender, problem and pass; a contender without a time has one line with its reason."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    sizes = ("b", "n", "h", "kv_heads", "lq", "lk", "d", "key_mask", "pair_bias")
    facts = ("dtype", "scores", "by", "backend", "backward_backend", "status", "pass")
    numbers = ("median_ms", "spread_ms", "rounds", "host_us", "first_call_s", "peak_bytes")
    writer.writerow(["workload", *sizes, *facts, *numbers, *(f"error_{name}" for name in _ERRORS), "reason"])
    for problem in record.problems:
        w = problem.workload
        for result in problem.results:
            for name in result.times or [""]:
                time = result.times.get(name)
                times = [None] * 3 if time is None else [time.median_ms, time.spread_ms, len(time.samples_ms) or None]
                writer.writerow(
                    [
                        *(w.name, *(getattr(w, size) for size in sizes), problem.dtype, w.scores),
                        *(result.name, result.backend, result.backward_backend, result.status, name),
                        *(*times, result.host_us.get(name), result.first_call_s, result.peak_bytes),
                        *(*(result.errors.get(error) for error in _ERRORS), result.reason),
                    ]
                )
    return text.getvalue()
