"""A record of a block over several processes: the names of its results, and its table."""

from __future__ import annotations

from evoattn.bench.record import Record, Result
from evoattn.bench.table import aligned, headline

WAYS = {
    "inference": ("forward", "inference"),
    "graph": ("graph_forward", "inference, CUDA graph"),
    "training": ("both", "training step"),
}
"""Ways to run a block: the pass of a record, and what the table calls it. A result is called "evoattn/" and its way."""

VERIFIED = "evoattn/verified"
"""The name of the result with the errors: the "largest" of all, and the "largest ratio" of one to that of one process."""

ON_ONE = " on one"
"""The end of the name of a result of one process."""

BLOCK = "block"
"""`Workload.layer` of a whole block."""


def _unit(record: Record, count: str) -> str:
    one, several = ("GPU", "GPUs") if record.machine.get("kind") == "gpu" else ("process", "processes")
    return f"{count} {one if count == 'one' else several}"


def about(record: Record) -> list[str]:
    """Machine, what is measured, and the errors, a line each."""
    one, several = _unit(record, "one"), _unit(record, str(record.settings["processes"]))
    lines = [
        f"{headline(record)}; {several}",
        "a PairformerBlock of Boltz-2's size, bfloat16 autocast around a float32 z that is split by rows",
    ]
    for problem in record.problems:
        on_all, on_one = problem.result(VERIFIED), problem.result(VERIFIED + ON_ONE)
        if on_all and on_one:
            lines.append(
                f"largest error of outputs and gradients against float64 at {problem.workload.length} residues: "
                f"{on_one.errors['largest']:.3f} of {one}, {on_all.errors['largest']:.3f} of {several}; "
                f"each at most {on_all.errors['largest ratio']:.2f} times that of {one}"
            )
    return lines


def _cells(result: Result, measured: str) -> list[str]:
    if measured not in result.times:
        return ["does not fit", "-", "-"]
    peak = f"{result.peak_bytes / 2**30:.1f}" if result.peak_bytes else "-"
    return [f"{result.times[measured].median_ms:.1f}", f"{result.host_us[measured] / 1e3:.1f}", peak]


def rows(record: Record) -> list[list[str]]:
    """The head, and a row for each job: times and memory of one process and of all, and how both scale."""
    count = record.settings["processes"]
    units = (_unit(record, "one"), _unit(record, str(count)))
    lines = [["residues", "pass", *(cell for x in units for cell in (f"{x}, ms", "host ms", "GiB")), "of linear", "memory"]]
    for problem in record.problems:
        for way, (measured, title) in WAYS.items():
            one, several = problem.result(f"evoattn/{way}{ON_ONE}"), problem.result(f"evoattn/{way}")
            if one is None or several is None:
                continue
            layer = "" if problem.workload.layer == BLOCK else f"{problem.workload.layer}, "
            linear = memory = "-"
            if measured in one.times:
                linear = f"{100 * one.times[measured].median_ms / (count * several.times[measured].median_ms):.0f}%"
            if one.peak_bytes and several.peak_bytes:
                memory = f"{count * several.peak_bytes / one.peak_bytes:.2f}"
            sides = [*_cells(one, measured), *_cells(several, measured)]
            lines.append([f"{problem.workload.length:,}", layer + title, *sides, linear, memory])
    return lines


def as_text(record: Record) -> str:
    """The table for a terminal."""
    table, one, count = rows(record), _unit(record, "one"), record.settings["processes"]
    if len(table) == 1:
        return "\n".join([*about(record), "", "no time was measured"])
    lines = [
        "ms: median, the host's part included; host ms: until a call returns, the least; GiB: peak of the largest process",
        f"of linear: time of {one} / (time x {count}); memory: peak x {count} / peak of {one}",
    ]
    return "\n".join([*about(record), "", aligned(table), "", *lines])
