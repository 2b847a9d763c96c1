"""Records of a block over several processes: read, written, and shown as a table."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from evoattn.bench import record as records
from evoattn.bench.table import aligned, headline, markdown

Data = dict[str, Any]
"""A record: "machine", "processes", "settings", "finished", and lists: "errors" of one entry, and "times" of one for each job.
Records from before the command have no settings and do not say whether they are finished."""

_WAYS = {"inference": "inference", "graph": "inference, CUDA graph", "training": "training step"}


def write(record: Data, path: Path) -> None:
    """Write a record, whole or not at all. An infinite error is the text "inf".

    Raises:
        OSError: it cannot be written.
    """
    errors = [{key: x if math.isfinite(x) else str(x) for key, x in entry.items()} for entry in record.get("errors", [])]
    records.write_text(json.dumps({**record, "errors": errors}, indent=1, allow_nan=False) + "\n", path)


def read(path: Path) -> Data:
    """Read what `write` wrote.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no such record.
    """
    record: Data = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(record, dict) or not {"machine", "processes", "times"} <= record.keys():
        raise ValueError("is no record of several GPUs; expected a file that evoattn bench --gpus N --json wrote")
    return record


def _unit(record: Data, count: str) -> str:
    one, several = ("GPU", "GPUs") if record["machine"].get("kind") == "gpu" else ("process", "processes")
    return f"{count} {one if count == 'one' else several}"


def _about(record: Data) -> list[str]:
    """Machine, what is measured, and the errors, a line each."""
    lines = [
        f"{headline(records.Record(record['machine'], {}))}; {_unit(record, str(record['processes']))}",
        "a PairformerBlock of Boltz-2's size, bfloat16 autocast around a float32 z that is split by rows",
    ]
    for errors in record.get("errors", []):
        one, several = (f"{float(errors[key]):.3f}" for key in ("one", "all"))
        lines.append(
            f"largest error of outputs and gradients against float64 at {errors.get('residues', 256)} residues: {one} of "
            f"{_unit(record, 'one')}, {several} of {_unit(record, str(record['processes']))}; each at most "
            f"{float(errors['largest ratio']):.2f} times that of {_unit(record, 'one')}"
        )
    return lines


def _rows(record: Data) -> list[list[str]]:
    """The head, and a row for each job: times and memory of one process and of all, and how both scale."""
    processes = record["processes"]
    sides = (_unit(record, "one"), _unit(record, str(processes)))
    rows = [["residues", "pass", *(cell for x in sides for cell in (f"{x}, ms", "host ms", "GiB")), "of linear", "memory"]]
    for entry in record["times"]:
        one, several = entry["one"], entry["all"]
        cells = [f"{entry['length']:,}", ", ".join(filter(None, (entry.get("layer"), _WAYS[entry["way"]])))]
        for side in (one, several):
            peak = f"{side['gib']:.1f}" if side and side["gib"] else "-"
            cells += [f"{side['ms']:.1f}", f"{side['host_ms']:.1f}", peak] if side else ["does not fit", "-", "-"]
        cells.append(f"{100 * one['ms'] / (processes * several['ms']):.0f}%" if one else "-")
        cells.append(f"{processes * several['gib'] / one['gib']:.2f}" if one and one["gib"] else "-")
        rows.append(cells)
    return rows


def as_text(record: Data) -> str:
    """The table for a terminal."""
    if not record["times"]:
        return "\n".join([*_about(record), "", "no time was measured"])
    of = _unit(record, "one")
    lines = [*_about(record), "", aligned(_rows(record)), ""]
    lines += [
        "ms: median, the host's part included; host ms: until a call returns, the least; GiB: peak of the largest process",
        f"of linear: time of {of} / (time x {record['processes']}); memory: peak x {record['processes']} / peak of {of}",
    ]
    return "\n".join(lines)


def as_markdown(record: Data) -> str:
    """The same for a page, without the words on its columns."""
    return "\n".join([*(f"- {line}" for line in _about(record)), "", markdown(_rows(record))])
