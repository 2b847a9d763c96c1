"""The pages' part on the records of `client_blocks.py`: tables, and pictures against the number of residues."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import plots
from client_cases import CLIENTS, PASSES, Client
from record_tables import markdown

from evoattn.bench.record import Record
from evoattn.bench.table import headline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Part", "block", "digest", "parts", "pictures"]

Case = dict[str, Any]

_TITLES = {"inference": "inference", "training": "training step"}
_PANELS = (("median_ms", "ms", 1.0), ("peak_bytes", "peak memory, GiB", 2.0**30))
_BEFORE, _AFTER = ("#D55E00", "#E69F00", "#CC79A7", "#8C6BB1"), ("#0072B2", "#56B4E9", "#009E73", "#66A61E")


class Part(NamedTuple):
    """The cases of one dtype in one record."""

    source: Path
    record: dict[str, Any]
    dtype: str

    @property
    def cases(self) -> list[Case]:
        """In the order of the clients' ways."""
        order = [(name, way.switch, way.patched) for name, client in CLIENTS.items() for way in client.ways]
        cases = [case for case in self.record["cases"] if case["dtype"] == self.dtype]
        return sorted(
            cases, key=lambda case: (order.index((case["client"], case["switch"], case["patched"])), case["residues"])
        )

    def of(self, client: str, name: str) -> list[Case]:
        """The cases of a client and a pass."""
        return [case for case in self.cases if (case["client"], case["pass"]) == (client, name)]

    @property
    def clients(self) -> list[Client]:
        """Those that have cases."""
        return [client for name, client in CLIENTS.items() if any(case["client"] == name for case in self.cases)]


def parts(results: Path) -> list[Part]:
    """Every dtype of every record of clients' blocks."""
    parts_of_all = []
    for path in sorted((results / "clients").glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        parts_of_all += [Part(path, record, dtype) for dtype in dict.fromkeys(case["dtype"] for case in record["cases"])]
    return parts_of_all


def digest(part: Part) -> str:
    """Of the record, and of the code that draws it."""
    pieces = [part.source.read_bytes(), Path(__file__).read_bytes(), part.dtype.encode()]
    return hashlib.sha256(b"\0".join(pieces)).hexdigest()


def pictures(part: Part, folder: Path) -> dict[Path, Callable[[], Figure]]:
    """Files and what draws them: one for each pass that has times at two lengths."""
    pictures_by_path: dict[Path, Callable[[], Figure]] = {}
    for name in PASSES:
        if len({case["residues"] for case in part.cases if case["pass"] == name and "median_ms" in case}) > 1:
            path = folder / f"clients-{part.source.stem}-{part.dtype}-{name}.png"
            pictures_by_path[path] = lambda name=name: draw(part, name)  # type: ignore[misc]
    return pictures_by_path


def title(case: Case) -> str:
    """Title a way: the setting, whether it is the default, and whether the patch is on."""
    client = CLIENTS[case["client"]]
    words = case["switch"] + (
        ", default" if client.default[case["pass"]] == case["switch"] and len(_switches(client)) > 1 else ""
    )
    return f"evoattn, {words}" if case["patched"] else words


def _switches(client: Client) -> set[str]:
    return {way.switch for way in client.ways}


def draw(part: Part, name: str) -> Figure:
    """Time above and peak memory below, a column a client; a line ends before the first length that ran out of memory."""
    columns = part.clients
    about = f"Clients' blocks before and after the patch, {_TITLES[name]}, {part.dtype}"
    figure = plots.new_figure(1 + 3.6 * len(columns), 8.4, about, _headline(part))
    panels: Any = figure.subplots(2, len(columns), squeeze=False, sharex=True)
    for column, client in enumerate(columns):
        for row, (key, label, unit) in enumerate(_PANELS):
            axes = panels[row, column]
            _lines(axes, part.of(client.name, name), key, unit)
            axes.set_ylabel(label if column == 0 else "")
            if row == 0:
                blocks = part.record["settings"]["blocks"][client.name]
                axes.set_title(f"{client.title}, {blocks} block{'' if blocks == 1 else 's'}", fontsize=10.5, color=plots.INK)
            else:
                axes.set_xlabel("residues")
                axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), frameon=False, fontsize=8.5)
    return figure


def _lines(axes: Axes, cases: list[Case], key: str, unit: float) -> None:
    colours = {False: iter(_BEFORE), True: iter(_AFTER)}
    for way in dict.fromkeys((title(case), case["patched"]) for case in cases):
        points = [(case["residues"], case[key] / unit) for case in cases if title(case) == way[0] and key in case]
        style, width = ("-", 2.2) if way[1] else ("--", 1.6)
        xs, ys = [x for x, _ in points], [y for _, y in points]
        marker = "o" if way[1] else "D"
        axes.plot(xs, ys, style, color=next(colours[way[1]]), marker=marker, markersize=4.5, linewidth=width, label=way[0])
    plots.logarithmic(axes, {case["residues"] for case in cases})


def _headline(part: Part) -> str:
    return headline(Record(part.record["machine"], {}))


def block(records: Iterable[Part], figures: str) -> str:
    """The marked part of the page: for each dtype of each record a summary, pictures, and a table a client and pass.

    Args:
        records: what to show.
        figures: the way from the page to the folder of the pictures.
    """
    lines: list[str] = []
    for part in records:
        versions = ", ".join(f"{client.title} {part.record['clients'].get(client.name, '?')}" for client in part.clients)
        lines += [f"## {part.record['machine']['device']}, {part.dtype}", ""]
        lines += [
            f"{_headline(part)}. {versions} (ESMFold's version is that of transformers). `{part.source.name}`.",
            "",
        ]
        lines += ["The default settings, at the longest length that both can do, ms / GiB:", "", summary(part), ""]
        for path in pictures(part, Path(figures)):
            what = f"Time and peak memory of clients' blocks against residues, {path.stem.rpartition('-')[2]}"
            lines += [f"![{what}]({path.as_posix()})", ""]
        for client in part.clients:
            for name in PASSES:
                if part.of(client.name, name):
                    lines += [f"{client.title}, {_TITLES[name]}, ms / GiB:", "", _table(part.of(client.name, name)), ""]
        lines += ["Relative errors in the L2 norm, the largest of all lengths:", "", _errors(part), ""]
        lines += [*_notes(part), ""]
    return "\n".join(lines).rstrip() or "Not measured yet."


def summary(part: Part) -> str:
    """The client as it is installed beside the same settings with the patch, at the longest length that both can do."""
    rows = [["client", "pass", "residues", "as installed", "with the patch", "times as fast", "of the memory"]]
    for client in part.clients:
        for name in PASSES:
            pairs = [_pair(part.of(client.name, name), client.default[name], n) for n in _lengths(part)]
            both = [(old, new) for old, new in pairs if old and new]
            if both:
                old, new = both[-1]
                speed, share = old["median_ms"] / new["median_ms"], new["peak_bytes"] / old["peak_bytes"]
                row = [client.title, _TITLES[name], str(old["residues"]), _cell(old), _cell(new)]
                rows.append([*row, f"{speed:.2f}", f"{100 * share:.0f}%"])
    return markdown(rows)


def _lengths(part: Part) -> list[int]:
    return sorted({case["residues"] for case in part.cases})


def _pair(cases: list[Case], switch: str, residues: int) -> tuple[Case | None, Case | None]:
    """The cases of a setting without and with the patch, if they have times."""
    found = {x["patched"]: x for x in cases if x["switch"] == switch and x["residues"] == residues and "median_ms" in x}
    return found.get(False), found.get(True)


def _cell(case: Case) -> str:
    """Time and memory, or why there are none."""
    if "median_ms" not in case:
        return str(case["status"])
    return f"{case['median_ms']:,.1f} / {case['peak_bytes'] / 2**30:.2f}"


def _table(cases: list[Case]) -> str:
    """A row a length, a column a way."""
    ways = list(dict.fromkeys(map(title, cases)))
    rows = [["residues", *ways]]
    for residues in sorted({case["residues"] for case in cases}):
        of = {title(case): _cell(case) for case in cases if case["residues"] == residues}
        rows.append([str(residues), *(of.get(way, "-") for way in ways)])
    return markdown(rows)


def _errors(part: Part) -> str:
    """A row a client and way: the largest error of each value, over lengths and passes."""
    rows = [["client", "", "s", "z", "gradient of z"]]
    for client in part.clients:
        for way in client.ways:
            cases = [
                c for c in part.cases if (c["client"], c["switch"], c["patched"]) == (client.name, way.switch, way.patched)
            ]
            worst = [[float(c["errors"][key]) for c in cases if key in c.get("errors", {})] for key in ("s", "z", "dz")]
            if any(worst):
                words = ("evoattn, " if way.patched else "") + way.switch
                rows.append([client.title, words, *(f"{max(x):.1e}" if x else "-" for x in worst)])
    return markdown(rows)


def _notes(part: Part) -> list[str]:
    """A line for each backend that ran, each reason why there is no time, and what was not measured."""
    lines = []
    for client in part.clients:
        backends = sorted({x for case in part.cases if case["client"] == client.name for x in case.get("backends", ())})
        lines += [f"- Backends of evoattn in {client.title}: {', '.join(backends)}."] if backends else []
    why: dict[str, list[str]] = {}
    for case in part.cases:
        if case["status"] in ("failed", "wrong"):
            where = f"{CLIENTS[case['client']].title}, {title(case)}, {_TITLES[case['pass']]}, {case['residues']}"
            why.setdefault(f"{case['status']}: `{case['reason'].replace('`', '')}`", []).append(where)
    lines += [f"- {'; '.join(where)}: {reason}" for reason, where in why.items()]
    return lines + [f"- Not all was measured: {line}." for line in part.record["ended"]]
