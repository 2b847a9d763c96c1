"""The tables that pages show of a record: times and memory of every contender, and the reasons for what has none."""

from __future__ import annotations

from ceilings import roofs
from contenders import is_bound, title

from evoattn.bench import table
from evoattn.bench.record import Problem, Record

__all__ = ["layer_table", "markdown", "own_table", "passes_of", "reasons", "short_layer_table", "times_table"]

LAYER_WAYS = ("evoattn", "evoattn/compiled", "openfold3", "written", "written_dense")


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


def times_table(problems: list[Problem], wanted: tuple[str, ...] = ()) -> str:
    """A row a workload, a column a contender that has any time: all of them, or the first four of those that are wanted."""
    passes, names = passes_of(problems), _timed(problems)
    if wanted:
        names = [name for name in wanted if name in names][:4]
    rows = [["workload", *map(title, names)]]
    rows += [[problem.workload.name, *(_cell(problem, name, passes) for name in names)] for problem in problems]
    return markdown(rows)


def own_table(record: Record, problems: list[Problem]) -> str:
    """The other numbers of evoattn: rates, shares of the ceilings, host time, memory, error."""
    rows = [
        ["workload", "backend", "10⁹ scores/s", "share of exp2", "share of copy", "host µs", "first call s", "MiB", "error"]
    ]
    for problem in problems:
        result = problem.result("evoattn")
        if result is None:
            continue
        bounds = roofs(record, problem, "forward")
        rates = [table.rate(problem, result, name) for name in passes_of(problems)]
        shares = [rates[0] and name in bounds and rates[0] / bounds[name] for name in ("exp2", "memory")]
        error = table.worst_error(result)
        rows.append(
            [
                problem.workload.name,
                result.backends(" / ") or "-",
                " / ".join("-" if rate is None else f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}" for rate in rates),
                *(f"{100 * share:.0f}%" if share else "-" for share in shares),
                " / ".join(f"{result.host_us[name]:.0f}" for name in ("forward", "backward") if name in result.host_us) or "-",
                "-" if result.first_call_s is None else f"{result.first_call_s:.2f}",
                "-" if result.peak_bytes is None else f"{result.peak_bytes / 2**20:,.1f}",
                "-" if error is None else f"{error:.1e}",
            ]
        )
    shown = [0, *(column for column in range(1, len(rows[0])) if any(row[column] != "-" for row in rows[1:]))]
    return markdown([[row[column] for column in shown] for row in rows])


def reasons(problems: list[Problem]) -> list[str]:
    """One line for each reason why there is no time."""
    every = len(problems)
    return [
        f"- {title(name)}, {'all' if len(where) == every else ', '.join(where)}: {status}: `{reason.replace('`', '')}`"
        for (name, status, reason), where in table.reasons(problems).items()
    ]


def layer_table(problems: list[Problem]) -> str:
    """Times of layers, eager and in CUDA graphs, and the peak memory of forward + backward."""
    names = _timed(problems)
    titles = ["evoattn.nn" if name == "evoattn" else title(name) for name in names]
    rows = [["layer", "", *titles]]
    for problem in problems:
        for words, passes in (("eager", ("forward", "both")), ("in a graph", ("graph_forward", "graph_both"))):
            rows.append([f"`{problem.workload.name}`", words, *(_cell(problem, name, passes) for name in names)])
        peaks = [problem.result(name) for name in names]
        cells = [f"{r.peak_bytes / 2**30:.2f}" if r is not None and r.peak_bytes else "-" for r in peaks]
        rows.append([f"`{problem.workload.name}`", "peak GiB", *cells])
    return markdown(rows)


def short_layer_table(problems: list[Problem]) -> str:
    """The README's form: a row for each layer and way to compute it."""
    rows = [["layer", "computed by", "eager", "in a CUDA graph", "peak GiB"]]
    for problem in problems:
        for name in (name for name in LAYER_WAYS if problem.result(name)):
            way = "evoattn.nn" if name == "evoattn" else title(name)
            peak = problem.result(name).peak_bytes  # type: ignore[union-attr]
            cells = [_cell(problem, name, passes) for passes in (("forward", "both"), ("graph_forward", "graph_both"))]
            rows.append([f"`{problem.workload.name}`", way, *cells, f"{peak / 2**30:.2f}" if peak else "-"])
    return markdown(rows)
