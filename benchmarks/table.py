#!/usr/bin/env python3
"""The result files of gpu.py as Markdown tables: `python benchmarks/table.py benchmarks/results/h200-bfloat16.json`."""

from __future__ import annotations

import argparse
import json
import pathlib
from typing import Any


def cell(numbers: dict[str, Any] | None) -> str:
    """Forward / backward in ms, or a dash where a peer refused or failed."""
    if numbers is None or "forward_ms" not in numbers:
        return "-"
    return f"{numbers['forward_ms']:.3f} / {numbers['backward_ms']:.3f}"


def table(report: dict[str, Any]) -> str:
    """One row a workload, one column a library, and evoattn's scores per second."""
    peers = list(dict.fromkeys(peer for result in report["workloads"].values() for peer in result["peers"]))
    rows = [["workload", *peers, "10⁹ scores/s", "MiB"]]
    for name, result in report["workloads"].items():
        ours = result["peers"]["evoattn"]
        rate = f"{result['scores'] / ours['forward_ms'] / 1e6:,.0f} / {result['scores'] / ours['backward_ms'] / 1e6:,.0f}"
        memory = f"{ours['peak_bytes'] / 2**20:,.0f}"
        rows.append([name, *(cell(result["peers"].get(peer)) for peer in peers), rate, memory])
    rows.insert(1, ["---"] * len(rows[0]))
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", nargs="+", type=pathlib.Path)
    for path in parser.parse_args().results:
        report = json.loads(path.read_text())
        machine = report["machine"]
        about = [
            report["dtype"],
            machine["device"],
            f"torch {machine['torch']}",
            f"commit {machine['commit']}",
            machine["date"],
        ]
        print("\n" + ", ".join(about) + "\n")
        print(table(report))


if __name__ == "__main__":
    main()
