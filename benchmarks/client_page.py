"""The pages' part on the records of `client_blocks.py`: a table for each client, of its newest cases."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import case_records
from client_cases import CLIENTS, PASSES
from record_tables import markdown

__all__ = ["Pair", "block", "newest", "summary"]

Case = dict[str, Any]

_TITLES = {"inference": "inference", "training": "training step"}
BETWEEN = (384, 768)
"""Lengths that the tables leave out: their times lie between those of the lengths around them."""

_VALUES = {"z": "z", "dz": "gradient of z"}


class Pair(NamedTuple):
    """A client's default setting without and with the patch, in the newest record that has both.

    Args:
        card, release: the kind of card, and the client's release.
        source: the record's file.
    """

    client: str
    dtype: str
    name: str
    residues: int
    before: Case
    after: Case
    card: str
    release: str
    source: str


def newest(results: Path) -> list[Pair]:
    """A pair for each client, dtype, pass and length, in this order. The original may be out of memory.

    All lengths of one client, dtype and pass are of the newest day: older records are of other patches.
    """
    found: dict[tuple[str, str, str, int], Pair] = {}
    records = case_records.read_all(results / "clients")
    days: dict[tuple[str, str, str], str] = {}
    for path, record in sorted(records.items(), key=lambda x: (x[1]["machine"]["date"], x[0])):
        cases = {(x["client"], x["dtype"], x["pass"], x["residues"], x["switch"], x["patched"]): x for x in record["cases"]}
        card = case_records.card(record)
        for (client, dtype, name, residues, switch, patched), after in cases.items():
            before = cases.get((client, dtype, name, residues, switch, False))
            if not patched or switch != CLIENTS[client].default[name] or before is None or "median_ms" not in after:
                continue
            if "median_ms" in before or before["status"] == "out of memory":
                release = str(record["clients"].get(client, "?"))
                day, key = record["machine"]["date"], (client, dtype, name, residues)
                if days.get(key[:3], day) != day:
                    found = {x: pair for x, pair in found.items() if x[:3] != key[:3]}
                days[key[:3]] = day
                found[key] = Pair(*key, before, after, card, release, path.name)
    order = {client: number for number, client in enumerate(CLIENTS)}
    passes = {name: number for number, name in enumerate(PASSES)}
    return sorted(found.values(), key=lambda x: (order[x.client], x.dtype, passes[x.name], x.residues))


def summary(results: Path) -> str:
    """README's table: a training step of each client at its longest length in bfloat16."""
    steps = {x.client: x for x in newest(results) if (x.dtype, x.name) == ("bfloat16", "training")}
    rows = [["program", "residues", "as installed", "with the patch"]]
    for client, pair in steps.items():
        name = f"{CLIENTS[client].title} {pair.release}, {pair.card}"
        rows.append([name, f"{pair.residues:,}", _cell(pair.before), _cell(pair.after)])
    return markdown(rows)


def block(results: Path) -> str:
    """The marked part of docs/clients/speed.md."""
    pairs, lines = newest(results), list[str]()
    for name in dict.fromkeys(pair.client for pair in pairs):
        of = [pair for pair in pairs if pair.client == name]
        releases = sorted({pair.release for pair in of})
        blocks = f"{CLIENTS[name].title} {', '.join(releases)}, ms / GiB"
        sources = ", ".join(f"`{source}`" for source in sorted({pair.source for pair in of}))
        lines += [f"{blocks}, from {sources}:", "", _table(of), ""]
    if pairs:
        lines += ["Relative errors in the L2 norm, the largest of all lengths:", "", _errors(pairs), ""]
    return "\n".join(lines).rstrip() or "Not measured yet."


def _table(pairs: list[Pair]) -> str:
    rows = [["dtype, card", "pass", "residues", "as installed", "with the patch", "times as fast", "of the memory"]]
    for pair in filter(lambda pair: pair.residues not in BETWEEN, pairs):
        speed = share = "-"
        if "median_ms" in pair.before:
            speed = f"{pair.before['median_ms'] / pair.after['median_ms']:.2f}"
            share = f"{100 * pair.after['peak_bytes'] / pair.before['peak_bytes']:.0f}%"
        cells = [_TITLES[pair.name], str(pair.residues), _cell(pair.before), _cell(pair.after), speed, share]
        rows.append([f"{pair.dtype}, {pair.card}", *cells])
    return markdown(rows)


def _cell(case: Case) -> str:
    """Time and memory, or why there are none."""
    if "median_ms" not in case:
        return str(case["status"])
    return f"{case['median_ms']:,.1f} / {case['peak_bytes'] / 2**30:.2f}"


def _errors(pairs: list[Pair]) -> str:
    ways = [f"{value}, {way}" for value in _VALUES.values() for way in ("as installed", "with the patch")]
    rows = [["program", "dtype", *ways]]
    for client, dtype in dict.fromkeys((pair.client, pair.dtype) for pair in pairs):
        of, cells = [pair for pair in pairs if (pair.client, pair.dtype) == (client, dtype)], []
        for key in _VALUES:
            for cases in zip(*((pair.before, pair.after) for pair in of), strict=True):
                errors = [float(case["errors"][key]) for case in cases if key in case.get("errors", {})]
                cells.append(f"{max(errors):.1e}" if errors else "-")
        rows.append([CLIENTS[client].title, dtype, *cells])
    return markdown(rows)
