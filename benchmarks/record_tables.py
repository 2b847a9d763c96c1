"""The tables that pages show of a record: times and memory of every contender, and the reasons for what has none."""

from __future__ import annotations

from contenders import is_bound, title

from evoattn.bench import table
from evoattn.bench.record import Problem

__all__ = ["layer_table", "markdown", "own_line", "passes_of", "reasons", "times_table"]

_LAYER_WAYS = ("evoattn", "evoattn/compiled", "openfold3", "cuequivariance/compiled", "written", "written_dense")
"""The columns of the table of layers. The record has all."""

_PEAKS = {"evoattn": "evoattn.nn", "openfold3": "OpenFold-3", "written_dense": "dense torch"}
"""Those whose memory the table of layers has."""


def passes_of(problems: list[Problem]) -> tuple[str, ...]:
    measured = {name for problem in problems for result in problem.results for name in result.times}
    return ("forward", "backward") if "backward" in measured else ("forward", "both")


def markdown(rows: list[list[str]]) -> str:
    """A Markdown table of rows of cells, the head first."""
    safe = [[cell.replace("|", "\\|").replace("<", "&lt;") for cell in row] for row in rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in [safe[0], ["---"] * len(safe[0]), *safe[1:]])


def _cell(problem: Problem, name: str, passes: tuple[str, ...]) -> str:
    """Times of the passes, or a dash; the fastest of all that solve the problem in bold."""
    result = problem.result(name)
    if result is None or not result.times:
        return "-"
    words = []
    for wanted in passes:
        time = result.times.get(wanted)
        text = "-" if time is None else f"{time.median_ms:.3f}"
        fair = [r.times[wanted].median_ms for r in problem.results if wanted in r.times and not is_bound(r.name)]
        fastest = time is not None and len(fair) > 1 and time.median_ms == min(fair)
        words.append(f"**{text}**" if fastest else text)
    return " / ".join(words)


def _timed(problems: list[Problem]) -> list[str]:
    """The contenders that have any time."""
    return list(dict.fromkeys(r.name for problem in problems for r in problem.results if r.times))


def times_table(problems: list[Problem]) -> str:
    """A row a workload, a column a contender that has any time. The last columns are evoattn's host time and memory."""
    passes, names = passes_of(problems), _timed(problems)
    rows = [["workload", *map(title, names), "evoattn, host µs", "evoattn, MiB"]]
    for problem in problems:
        own = problem.result("evoattn")
        host = " / ".join(f"{own.host_us[x]:.0f}" for x in ("forward", "backward") if x in own.host_us) if own else ""
        memory = f"{own.peak_bytes / 2**20:,.1f}" if own and own.peak_bytes else "-"
        rows.append([problem.workload.name, *(_cell(problem, name, passes) for name in names), host or "-", memory])
    shown = [i for i in range(len(rows[0])) if any(row[i] != "-" for row in rows[1:])]
    return markdown([[row[i] for i in shown] for row in rows])


def own_line(problems: list[Problem]) -> str:
    """The backends that ran, and the largest error."""
    results = [result for problem in problems if (result := problem.result("evoattn"))]
    backends = " and ".join(sorted({x for result in results for x in (result.backend, result.backward_backend) if x}))
    errors = [error for result in results if (error := table.worst_error(result)) is not None]
    words = f" Its largest error is {max(errors):.1e}." if errors else ""
    return f"evoattn runs on {backends}.{words}" if backends else ""


def reasons(problems: list[Problem]) -> list[str]:
    """One line for each reason why there is no time. A peer that was not installed needs none."""
    found: dict[tuple[str, str, str], list[Problem]] = {}
    for problem in problems:
        for result in problem.results:
            if result.status not in ("ok", "absent"):
                found.setdefault((result.name, result.status, result.reason), []).append(problem)
    dtypes = {problem.dtype for problem in problems}
    lines = []
    for (name, status, reason), where in found.items():
        of = {problem.dtype for problem in where}
        every = {problem.workload.name for problem in problems if problem.dtype in of and problem.result(name)}
        names = list(dict.fromkeys(problem.workload.name for problem in where))
        words = ("all" if every == {*names} else ", ".join(names)) + ("" if of == dtypes else f" in {', '.join(sorted(of))}")
        lines.append(f"- {title(name)}, {words}: {status}: `{reason.replace('`', '')}`")
    return lines


def layer_table(problems: list[Problem]) -> str:
    """Times of layers in CUDA graphs, of evoattn.nn also eager, and the peak memory of forward + backward."""
    timed = _timed(problems)
    names, peaks = ([x for x in of if x in timed] for of in (_LAYER_WAYS, _PEAKS))
    titles = {name: "evoattn.nn" if name == "evoattn" else title(name) for name in timed}
    rows = [["layer", *(titles[x] for x in names), "evoattn.nn, eager", f"GiB, {' / '.join(_PEAKS[x] for x in peaks)}"]]
    for problem in problems:
        cells = [_cell(problem, name, ("graph_forward", "graph_both")) for name in names]
        held = [problem.result(name) for name in peaks]
        memory = " / ".join(f"{r.peak_bytes / 2**30:.2f}" if r is not None and r.peak_bytes else "-" for r in held)
        rows.append([f"`{problem.workload.name}`", *cells, _cell(problem, "evoattn", ("forward", "both")), memory])
    return markdown(rows)
