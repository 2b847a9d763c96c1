"""Records that are a list of cases in a JSON file: begun, added to, and read for the pages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from evoattn.compile.cache import write

__all__ = ["add", "begun", "card", "read_all"]

Case = dict[str, Any]


def read_all(folder: Path) -> dict[Path, dict[str, Any]]:
    """Every record of a folder, by its file."""
    return {path: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}


def card(record: dict[str, Any]) -> str:
    """The kind of card of a record, such as "H200"."""
    name: str = record["machine"]["device"]
    return name.removeprefix("NVIDIA ").partition(" ")[0]


def begun(path: Path | None, fresh: dict[str, Any]) -> dict[str, Any]:
    """The record in a file, if there is one; else the fresh one.

    Raises:
        ValueError: the file holds the record of another machine or commit, or of other clients.
    """
    if path is None or not path.exists():
        return fresh
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    differ = [key for key, value in fresh["machine"].items() if key != "date" and record["machine"].get(key) != value]
    differ += ["client"] if record.get("clients") != fresh.get("clients") else []
    if differ:
        raise ValueError(f"{path} is of another machine or commit ({', '.join(differ)}); name another file")
    return record


def add(case: Case, record: dict[str, Any], names: tuple[str, ...], path: Path | None) -> None:
    """Put a case in the place of one with the same values of `names`, and write the record, whole or not at all."""
    record["cases"] = [x for x in record["cases"] if any(x.get(key) != case[key] for key in names)] + [case]
    if path is not None:
        write(path, f"{json.dumps(record, indent=1, allow_nan=False)}\n".encode())
