"""The part of docs/layer-time.md on the records of `block_parts.py`: a block, layer by layer, beside its floor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import case_records
from block_parts import BLOCK, EVOATTN, PLAIN
from record_tables import markdown

from evoattn.bench.record import Record
from evoattn.bench.table import headline

__all__ = ["block", "floor", "records"]

BANDWIDTH, RATE = 3.0e12, 660e12
"""Bytes and operations of a second: what an H100 reaches in long kernels."""

C, HEADS, WIDTH, SINGLE_HEADS, SINGLE_WIDTH = 128, 4, 128, 16, 384
WIDE, NARROW = 4 * C, 2 * C
"""Bytes of an edge in float32 and in bfloat16."""

_NAMES = {"float32": "float32", "tf32": "float32 with TF32 products"}


def records(results: Path) -> dict[Path, dict[str, Any]]:
    """Every record of blocks, by its file."""
    return case_records.read_all(results / "blocks")


def floor(part: str, length: int) -> float:
    """Milliseconds that a forward takes at the least: of each step the time of its bytes or of its products.

    Steps are those of `evoattn.nn`. What has no L^2 entries is left out, and so are exponentials.
    """
    steps = [step for name, of in _steps(length).items() if part in (name, BLOCK) for step in of]
    return 1e3 * sum(max(size / BANDWIDTH, operations / RATE) for size, operations in steps) * length**2


def _steps(length: int) -> dict[str, list[tuple[int, int]]]:
    """The bytes and the operations for each edge, by layer and step."""
    projected = 4 * NARROW + 2 * HEADS  # q, k, v, gate and the pair bias
    multiplication = [
        (WIDE + 2 * NARROW, 2 * C * 4 * C),  # norm, both halves and their gates
        (3 * NARROW, 2 * C * length),
        (2 * WIDE + NARROW, 2 * C * 2 * C),  # norm, output product and gate, residual
    ]
    attention = [
        (WIDE + NARROW, 0),  # norm
        (NARROW + projected, 2 * C * (4 * WIDTH + HEADS)),
        (projected + NARROW, 4 * length * WIDTH),
        (2 * NARROW, 2 * WIDTH * C),
        (2 * WIDE + NARROW, 0),  # residual
    ]
    pair_bias = [
        (WIDE + NARROW, 0),
        (NARROW + 2 * SINGLE_HEADS, 2 * C * SINGLE_HEADS),
        (2 * SINGLE_HEADS, 4 * SINGLE_WIDTH),
    ]
    return {
        "tri_mul_out": multiplication,
        "tri_mul_in": multiplication,
        "tri_att_start": attention,
        "tri_att_end": attention,
        "pair_transition": [(2 * WIDE, 3 * 2 * C * 4 * C)],
        "attn_pair_bias": pair_bias,
    }


def block(records: dict[Path, dict[str, Any]]) -> str:
    """A table for each record and length that plain torch was measured at: every layer in bfloat16. Then the whole block."""
    lines: list[str] = []
    for path, record in records.items():
        lines += [f"{headline(Record(record['machine'], {}))}. `{path.name}`.", ""]
        times = {tuple(x[key] for key in ("length", "dtype", "way", "part", "pass")): x for x in record["cases"]}
        for length in sorted({length for length, dtype, way, *_ in times if dtype == "bfloat16" and way == PLAIN}):
            lines += [f"{length:,} residues, bfloat16:", "", markdown(_rows(times, length)), ""]
        if others := _others(times):
            lines += ["The whole block:", "", markdown(others), ""]
    return "\n".join(lines).rstrip() or "Not measured yet."


def _rows(times: dict[tuple[Any, ...], dict[str, Any]], length: int) -> list[list[str]]:
    rows = [["part", "inference, ms", "floor, ms", f"{PLAIN}, ms", "training step, ms", f"{PLAIN}, ms", "host, ms"]]
    for part in dict.fromkeys(
        part for of, dtype, way, part, _ in times if of == length and dtype == "bfloat16" and way == EVOATTN
    ):
        at = (length, "bfloat16")
        cells = [_cell(times.get((*at, way, part, of))) for of in ("inference", "training") for way in (EVOATTN, PLAIN)]
        host = [times.get((*at, EVOATTN, part, of), {}).get("host_ms") for of in ("inference", "training")]
        name = part if part == BLOCK else f"`{part}`"
        rows.append(
            [name, cells[0], f"{floor(part, length):.2f}", *cells[1:], " / ".join(f"{x:.1f}" if x else "-" for x in host)]
        )
    return rows


def _others(times: dict[tuple[Any, ...], dict[str, Any]]) -> list[list[str]]:
    rows = [["residues", "computed by", "products", "inference, ms / GiB", "training step, ms / GiB"]]
    for length, dtype, way in dict.fromkeys((length, dtype, way) for length, dtype, way, part, _ in times if part == BLOCK):
        both = [times.get((length, dtype, way, BLOCK, of)) for of in ("inference", "training")]
        cells = [_cell(x) + (f" / {x['peak_gib']:.1f}" if x and "peak_gib" in x else "") for x in both]
        rows.append([f"{length:,}", way, _NAMES.get(dtype, dtype), *cells])
    return rows if len(rows) > 1 else []


def _cell(case: dict[str, Any] | None) -> str:
    if case is None:
        return "-"
    return case["failed"] if "failed" in case else f"{case['ms']:.2f}"
