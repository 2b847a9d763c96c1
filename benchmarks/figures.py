#!/usr/bin/env python3
"""Everything that pages show of the committed results, made from them alone: `python benchmarks/figures.py`.

Writes the pictures docs/figures/bench-*.png and predictions.png, and the parts of README.md, docs/benchmarks.md,
docs/clients/speed.md, docs/layer-time.md and docs/sharded.md between `<!-- figures: begin NAME -->` and
`<!-- figures: end NAME -->`. With --check it writes nothing, and ends with status 1 and a line for each file that is not what
the results make it. A picture carries a digest of the results and of the code that drew it, so that another release of
matplotlib is no drift.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import block_page
import ceilings
import client_page
import contenders
import layer_page
import plots
import prediction_page
import sharded_table
from record_tables import layer_table, markdown, own_line, passes_of, reasons, times_table

from evoattn.bench import table
from evoattn.bench.record import Problem, Record, read

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
BENCHMARKS = Path("docs/benchmarks.md")
README = Path("README.md")
CLIENTS = Path("docs/clients/speed.md")
LAYERS = Path("docs/layer-time.md")
SHARDED = Path("docs/sharded.md")
FIGURES = Path("docs/figures")
KEY = "evoattn-source"
_WIDTH = 100
_SHOWN = {
    "speedups": "How many times as fast evoattn is as the fastest peer, by workload, with the peer's name",
    "ceilings": "The share of the device's lowest ceiling that evoattn reaches, by workload",
    "length": "Time and peak memory against length",
}
PICTURED = "bfloat16"
"""The dtype that has pictures: models train in it."""

UNSHOWN = "float16"
"""The dtype whose records no page shows: its times are those of bfloat16."""


class Part(NamedTuple):
    """The problems of one dtype in one record."""

    source: Path
    record: Record
    dtype: str
    problems: list[Problem]

    @property
    def name(self) -> str:
        """For files and headings: "h200-bfloat16" of "h200-bfloat16.json" and of "h200.json" alike."""
        stem = self.source.stem
        return stem if self.dtype in stem else f"{stem}-{self.dtype}"


def parts(results: Path) -> list[Part]:
    """Every dtype of every record, GPUs first, the dtype that models train in first."""
    all_parts = []
    for path in sorted(results.glob("*.json"), key=lambda path: (path.name.startswith("cpu"), path.name)):
        record = read(path)
        for dtype in dict.fromkeys(problem.dtype for problem in record.problems):
            all_parts.append(Part(path, record, dtype, [p for p in record.problems if p.dtype == dtype]))
    return all_parts


def digest(part: Part) -> str:
    """Hash a part's results, the code that draws them, and the words that it takes from elsewhere."""
    names = dict.fromkeys(result.name for problem in part.problems for result in problem.results)
    words = [part.dtype, table.headline(part.record), *map(contenders.title, names)]
    pieces = [part.source.read_bytes(), Path(plots.__file__).read_bytes(), *(word.encode() for word in words)]
    return hashlib.sha256(b"\0".join(pieces)).hexdigest()


def pictures(part: Part) -> dict[Path, Callable[[], object]]:
    """Files and what draws them; with three lengths of triangle attention, their growth.

    Layers have no picture here: a rate of scores says little of them.
    """
    attentions = [problem for problem in part.problems if not problem.workload.layer]
    timed = [problem for problem in attentions if any(result.times for result in problem.results)]
    drawn: dict[str, Callable[[], object]] = {}
    if len(timed) > 1 and part.dtype == PICTURED:
        drawn = {"speedups": lambda: plots.speedups(part.record, timed), "ceilings": lambda: plots.ceilings(part.record, timed)}
        if len({problem.workload.length for problem in timed if problem.workload.family == "tri"}) > 2:
            drawn["length"] = lambda: plots.against_length(part.record, timed)
    return {FIGURES / f"bench-{part.name}-{what}.png": make for what, make in drawn.items()}


def _alt(path: Path) -> str:
    """Describe a picture for a reader who does not see it. The numbers are in the table below it."""
    return _SHOWN[path.stem.rpartition("-")[2]]


def heading(part: Part, level: str) -> list[str]:
    """Of what, with which versions, and from which file."""
    file = part.source.name if part.source.parent.name == "results" else f"{part.source.parent.name}/{part.source.name}"
    return [f"{level} {part.record.machine['device']}, {part.dtype}", "", f"{table.headline(part.record)}. `{file}`."]


def section(part: Part) -> list[str]:
    """One part of docs/benchmarks.md."""
    lines = [*heading(part, "###"), own_line(part.problems)]
    shown = pictures(part)
    if shown and (words := ceilings.as_text(part.record)):
        lines.append(f"Ceilings of the device: {words}.")
    for path in shown:
        lines += ["", f"![{_alt(path)}](figures/{path.name})"]
    return [*lines, "", f"{_passes(part)}, ms:", "", times_table(part.problems), ""]


def _passes(part: Part) -> str:
    """The passes of the times in a table, in words."""
    return " / ".join({"both": "forward + backward"}.get(name, name) for name in passes_of(part.problems))


def kernels(all_parts: list[Part]) -> list[Part]:
    """The parts with attentions, which other pages do not show."""
    attentions = with_problems(all_parts, lambda problem: not problem.workload.layer)
    timed = with_problems(attentions, lambda problem: any(result.times for result in problem.results))
    return [part for part in timed if part.dtype != UNSHOWN]


def bench_blocks(all_parts: list[Part], results: Path) -> dict[str, str]:
    """The parts of docs/benchmarks.md, by name."""
    shown, peers = kernels(all_parts), parts(results / "peers")
    lines = [line for part in shown for line in section(part)]
    of_peers = [line for part in peers for line in [*heading(part, "###"), "", times_table(part.problems), ""]]
    why = reasons([problem for part in [*shown, *peers] for problem in part.problems])
    blocks = {"bench": lines, "bench-peers": of_peers, "bench-reasons": why}
    return {name: "\n".join(block).rstrip() or "None yet." for name, block in blocks.items()}


def readme_blocks(all_parts: list[Part]) -> dict[str, str]:
    """The parts of README.md on attentions, by name."""
    blocks = {}
    for name, of_cpu in (("gpu", False), ("cpu", True)):
        part = next((x for x in kernels(all_parts) if (x.record.machine.get("kind") == "cpu") == of_cpu), None)
        if part is None:
            continue
        about = f"{part.record.machine['device']}, {part.dtype}, every result checked against float64 first"
        shown = [f"![{_alt(path)}]({path.as_posix()})" for path in pictures(part) if path.stem.endswith("speedups")]
        table_ = [f"{_passes(part)} in ms:", "", times_table(part.problems)]
        blocks[name] = "\n".join([f"{about}:", "", *shown] if shown else [f"{about}, {table_[0]}", *table_[1:]])
    return blocks


def layer_records(all_parts: list[Part]) -> list[Part]:
    """The layers that GPUs were measured on."""
    gpus = [part for part in all_parts if part.record.machine.get("kind") != "cpu"]
    return with_problems(gpus, lambda problem: bool(problem.workload.layer))


def with_problems(all_parts: list[Part], wanted: Callable[[Problem], bool]) -> list[Part]:
    """The parts that have such problems, and no others in them."""
    parts = [part._replace(problems=[problem for problem in part.problems if wanted(problem)]) for part in all_parts]
    return [part for part in parts if part.problems]


def layer_blocks(all_parts: list[Part], results: Path) -> dict[str, str]:
    """The parts of docs/layer-time.md, by name."""
    lines = []
    for part in layer_records(all_parts):
        lines += [*heading(part, "###"), "", layer_table(part.problems), ""]
    return {
        "layer-parts": layer_page.block(layer_page.records(results)),
        "block-parts": block_page.block(block_page.records(results)),
        "layer-times": "\n".join(lines).rstrip() or "Not measured yet.",
    }


def sharded_block(results: Path) -> str:
    """The part of docs/sharded.md: a table for each record of several GPUs."""
    lines = []
    for path in sorted((results / "sharded").glob("*.json")):
        record = read(path)
        about = (f"- {line}" for line in sharded_table.about(record))
        lines += [f"`{path.name}`:", "", *about, "", markdown(sharded_table.rows(record)), ""]
    return "\n".join(lines).rstrip() or "Not measured yet."


def wrapped(text: str) -> str:
    """The text with its prose at 100 characters a line; a table's rows, headings and pictures stay as they are."""
    lines = []
    for line in text.split("\n"):
        prose = len(line) > _WIDTH and not line.startswith(("|", "#", "!"))
        indent = "  " if line.startswith("- ") else ""
        options = {"subsequent_indent": indent, "break_long_words": False, "break_on_hyphens": False}
        lines += textwrap.wrap(line, _WIDTH, **options) if prose else [line]  # type: ignore[arg-type]
    return "\n".join(lines)


def with_blocks(text: str, blocks: dict[str, str]) -> str:
    """A page with its marked parts replaced.

    Raises:
        ValueError: a part is not marked in the page.
    """
    for name, block in blocks.items():
        marked = re.compile(rf"(<!-- figures: begin {name} -->\n).*?(<!-- figures: end {name} -->)", re.DOTALL)
        if not marked.search(text):
            raise ValueError(f"no part {name!r} is marked; expected <!-- figures: begin {name} --> and its end")
        lines = f"{wrapped(block)}\n" if block else ""
        text = marked.sub(lambda match, lines=lines: f"{match[1]}{lines}{match[2]}", text)  # type: ignore[misc]
    return text


def texts(root: Path, results: Path) -> dict[Path, str]:
    """Every page, as the results make it."""
    all_parts = parts(results)
    predictions = prediction_page.summary(prediction_page.records(results))
    marked = {
        README: {**readme_blocks(all_parts), "predictions": predictions, "training": client_page.summary(results)},
        BENCHMARKS: bench_blocks(all_parts, results),
        CLIENTS: {"clients": client_page.block(results), **prediction_page.blocks(results)},
        LAYERS: layer_blocks(all_parts, results),
        SHARDED: {"sharded": sharded_block(results)},
    }
    return {path: with_blocks((root / path).read_text(encoding="utf-8"), new) for path, new in marked.items()}


def drawings(results: Path) -> dict[Path, tuple[str, Callable[[], object]]]:
    """Every picture: its digest, and what draws it."""
    benchmarks = {path: (digest(part), make) for part in parts(results) for path, make in pictures(part).items()}
    return {**benchmarks, **prediction_page.pictures(prediction_page.records(results), FIGURES)}


def present(root: Path) -> list[Path]:
    """The pictures that are there."""
    kinds = ("bench-*", prediction_page.PICTURE.removesuffix(".png"))
    return sorted(FIGURES / path.name for kind in kinds for path in (root / FIGURES).glob(f"{kind}.png"))


def drift(root: Path, results: Path) -> list[str]:
    """One line for each file that is not what the results make it."""
    lines = []
    for path, text in texts(root, results).items():
        if not (root / path).exists() or (root / path).read_text(encoding="utf-8") != text:
            lines.append(f"{path} is not what the results make it")
    expected = drawings(results)
    for path, (sum_, _) in expected.items():
        if not (root / path).exists() or sum_.encode() not in (root / path).read_bytes():
            lines.append(f"{path} was not drawn from these results by this code")
    lines += [f"{path} has no results any more" for path in present(root) if path not in expected]
    return [f"{line}: run python3 dev.py figures" for line in lines]


def draw(root: Path, results: Path) -> list[Path]:
    """Write every page and picture."""
    expected = drawings(results)
    for path in present(root):
        if path not in expected:
            (root / path).unlink()
    with plots.style():
        for path, (sum_, make) in expected.items():
            plots.save(make(), root / path, {KEY: sum_, "Software": ""})  # type: ignore[arg-type]
    pages = texts(root, results)
    for path, text in pages.items():
        (root / path).write_text(text, encoding="utf-8")
    return [*pages, *expected]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 if anything has drifted")
    if parser.parse_args().check:
        lines = drift(ROOT, RESULTS)
        print("\n".join(lines) or "nothing has drifted")
        return 1 if lines else 0
    print("\n".join(str(path) for path in draw(ROOT, RESULTS)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
