"""`evoattn demo`: the four attentions of an Evoformer block on an alignment, by evoattn and by dense PyTorch."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.resources
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

import evoattn
from evoattn.bench import machine
from evoattn.bench.record import Problem, Result
from evoattn.bench.table import aligned
from evoattn.cli import sweep
from evoattn.cli.alignment import Alignment, read_alignment
from evoattn.cli.evoformer import CHANNELS, TRIANGLE_HEADS, attentions, embed
from evoattn.cli.sweep import Size
from evoattn.cli.terminal import RefusedError, add_command, check_output, need_extra, pick, progress, try_to_write, whole_number

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_EXAMPLE = "ubiquitin.a3m"

_ABOUT = """\
Runs the four attentions of an Evoformer block on an alignment, forward and backward, once with evoattn and
once dense (all scores in memory, plain PyTorch), with random weights of a fixed seed:

  MSA row + pair bias     8 heads x 32   a sequence attends over its residues; gaps are masked keys
  MSA column              8 heads x 32   a residue attends over the sequences; gaps are masked keys
  triangle, start node    4 heads x 32   pair (i, j) attends over pairs (i, k), with a bias from pair (j, k)
  triangle, end node      4 heads x 32   the same on the transposed pair representation

It prints the time, the peak memory and the error against float64 of each, then measures triangle attention at
growing lengths, cut from or tiled out of the alignment, and draws time and memory against length as a PNG.
"""

_EPILOG = """\
examples:
  evoattn demo                                 the ubiquitin family, which comes with evoattn; under a minute on two cores
  evoattn demo family.a3m --output family.png  an alignment of yours, such as a search against a sequence database gives
  evoattn demo family.fasta.gz --quick         a few seconds
  evoattn demo --dtype bfloat16 --device cuda --max-length 2048

reading the table:
  forward, backward   milliseconds, the median of a few runs
  peak memory         tensors held at the most during forward and backward, beyond q, k, v and the biases
  error               |value - float64| / |float64| of the output, and of the worst gradient of q, k, v and pair bias

exit status: 0 evoattn's errors are within their budget; 1 they are not; 2 bad options, a bad file or a missing extra
"""


_LENGTHS = (64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
_SHORTEST = {"cpu": 128, "cuda": 64}
"""The shortest usual length. Below it, dense PyTorch is as fast on a CPU, and its scores take a few MB."""

QUICK = Size(sequences=32, columns=64, lengths=(32, 48, 64, 96), repeats=5, seconds=0.4, patience=10.0)
_USUAL = {"cpu": (128, 256, 384), "cuda": (512, 384, 1024)}
"""Sequences, columns and the longest length: on the CPU a crop of AlphaFold's initial training at the most, on the GPU one of
its fine-tuning."""


def _size(device: torch.device, quick: bool, max_length: int | None) -> Size:
    sequences, columns, longest = _USUAL[device.type]
    known = QUICK.lengths if quick else tuple(length for length in _LENGTHS if length >= _SHORTEST[device.type])
    usual = Size(sequences, columns, tuple(x for x in known if x <= longest), repeats=9, seconds=1.0, patience=35.0)
    size = QUICK if quick else usual
    if max_length is None:
        return size
    lengths = (*(length for length in known if length < max_length), max_length)
    return dataclasses.replace(size, lengths=lengths, columns=min(size.columns, max_length), patience=None)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `demo` to the command line."""
    parser = add_command(
        commands,
        "demo",
        run,
        "the attentions of an Evoformer block on a real alignment, next to dense PyTorch",
        _ABOUT,
        _EPILOG,
    )
    parser.add_argument(
        "alignment",
        nargs="?",
        type=Path,
        metavar="ALIGNMENT",
        help="A3M (lower case = insertions, dropped), aligned FASTA or Stockholm; '-' and '.' are gaps; gzip is welcome; "
        "default: 75 domains of the ubiquitin family",
    )
    parser.add_argument(
        "--output", type=Path, default=Path("evoattn-demo.png"), metavar="PNG", help="the picture (default: %(default)s)"
    )
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto, the default, is the GPU where there is one"
    )
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="default: float32 on the CPU, bfloat16 on a GPU")
    parser.add_argument(
        "--max-length",
        type=whole_number(16),
        metavar="L",
        help="the longest length measured, however long it takes, and the most columns used (at least 16; default: 384 on "
        "the CPU, 1024 on a GPU, or what half a minute allows)",
    )
    parser.add_argument("--quick", action="store_true", help="small sizes: a look in a few seconds, not a measurement")
    parser.add_argument("--seed", type=whole_number(0), default=0, metavar="S", help="of the random weights (default: 0)")


def run(arguments: argparse.Namespace) -> int:
    """Run the command; everything that can be refused is, before any work."""
    need_extra("matplotlib")
    _find_plots()
    output = check_output(arguments.output, "--output", ".png")
    device = pick(arguments.device)
    dtype = DTYPES[arguments.dtype or ("bfloat16" if device.type == "cuda" else "float32")]
    with default_alignment(arguments.alignment) as path:
        alignment = read_alignment(path)
    size = _size(device, arguments.quick, arguments.max_length)
    busy = _busy() if device.type == "cpu" else None
    rows = tuple(letters[: size.columns] for letters in alignment.rows[: size.sequences])
    rows = tuple(letters for letters in rows if letters.strip("-"))

    with progress(2 * (4 + len(size.lengths)) + 4) as step:
        measured = sweep.four_attentions(attentions(embed(rows, arguments.seed, device), dtype), size, step)
        growth = sweep.growth(alignment.rows[0], size, arguments.seed, device, dtype, step)
    unwritten = try_to_write("--output", output, lambda: draw(growth, device, output))
    lines = _about(alignment, rows, device, busy)
    print_report(lines, measured, growth)
    if unwritten:
        raise unwritten
    print(f"\npicture    {os.fspath(output)}")
    return 1 if any(beyond for _, _, beyond in measured) else 0


def _find_plots() -> None:
    """Let `plots` be imported from the checkout. Refuse if evoattn is installed without one."""
    folder = Path(__file__).parents[3] / "benchmarks"
    if not (folder / "plots.py").is_file():
        raise RefusedError("needs a checkout of evoattn, whose benchmarks/plots.py draws the picture")
    sys.path.insert(0, str(folder))


def draw(growth: list[Problem], device: torch.device, output: Path) -> None:
    """Draw and write the PNG, with the plots of the checkout's benchmarks."""
    import plots

    sizes = f"{TRIANGLE_HEADS} heads x {CHANNELS} channels, {growth[0].dtype}"
    notes = [f"{name} was not run {why}" for name, why in sweep.stops(growth).items()]
    title = f"Triangle attention, forward + backward: {sizes}"
    about = f"{machine.name(device)}; evoattn {evoattn.__version__}, PyTorch {torch.__version__}"
    with plots.style():
        figure = plots.growth(growth, title, about, "\n".join(notes), "dense")
    plots.save(figure, output, dpi=160)


def _busy() -> str | None:
    """A warning, if other processes had more than half of the cores in the minute before."""
    cores, load = os.cpu_count() or 1, 0.0
    with contextlib.suppress(AttributeError, OSError):  # Windows; a system that does not tell
        load = os.getloadavg()[0]
    if load <= 0.5 * cores:
        return None
    return f"load {load:.1f} on {cores} cores before this began: read the times with care (OMP_WAIT_POLICY=passive may help)"


@contextlib.contextmanager
def default_alignment(path: Path | None) -> Iterator[Path]:
    """The file given, else the one that ships in the installed package, else the one of the source tree."""
    if path is not None:
        yield path
        return
    packaged = importlib.resources.files("evoattn.cli").joinpath(_EXAMPLE)
    if packaged.is_file():
        with importlib.resources.as_file(packaged) as path:
            yield path
        return
    in_source_tree = Path(__file__).parents[3] / "examples" / _EXAMPLE
    if not in_source_tree.is_file():
        raise RefusedError(
            f"the alignment that comes with evoattn, {_EXAMPLE}, is not installed; expected ALIGNMENT to be given"
        )
    yield in_source_tree


def _about(alignment: Alignment, rows: tuple[str, ...], device: torch.device, busy: str | None) -> list[str]:
    used = f"{len(rows)} sequences x {len(rows[0])} columns"
    if (len(rows), len(rows[0])) != (len(alignment.rows), alignment.length):
        used += f" (of {len(alignment.rows)} x {alignment.length})"
    if alignment.left_out:
        used += f"; {alignment.left_out} without a residue left out"
    return [
        f"alignment  {alignment.name}: {used}; query {alignment.query}",
        f"device     {machine.name(device)}; PyTorch {torch.__version__}; evoattn {evoattn.__version__}",
        *([f"busy       {busy}"] if busy else []),
    ]


def print_report(about: list[str], attentions: list[tuple[Problem, int, list[str]]], growth: list[Problem]) -> None:
    backends = sorted({problem.results[0].backends(", backward ") for problem, _, _ in attentions})
    print("\n".join([*about, f"backend    {'; '.join(backends)}"]))
    print(f"\nThe four attentions of an Evoformer block, {attentions[0][0].dtype}\n")
    print(_cost_table([problem for problem, _, _ in attentions]))
    parts = [f"{problem.workload.name}: the first {rows} of {problem.workload.n} rows" for problem, rows, _ in attentions]
    all_rows = all(rows == problem.workload.n for problem, rows, _ in attentions)
    print("\nErrors: |value - float64| / |float64| over " + ("all rows." if all_rows else "; ".join(parts) + "."))
    for failure in (failure for _, _, beyond in attentions for failure in beyond):
        print(f"BEYOND ITS BUDGET  {failure}")
    print("\nTriangle attention of L x L pairs, forward + backward, against length L\n")
    print(_growth_table(growth))
    for name, why in sweep.stops(growth).items():
        print(f"{name} was not run {why}")


def _cell(number: float | None) -> str:
    return "-" if number is None else f"{number:.1f}"


def _numbers(result: Result | None, *names: str) -> list[float | None]:
    """Milliseconds of passes, then the peak memory in MiB. None if it was not measured."""
    if result is None:
        return [None] * (len(names) + 1)
    times = [result.times[name].median_ms if name in result.times else None for name in names]
    return [*times, None if result.peak_bytes is None else result.peak_bytes / 2**20]


def _cost_table(problems: list[Problem]) -> str:
    rows = [["attention", "by     ", "forward ms", "backward ms", "peak MiB", "output error", "gradient error", ""]]
    for problem in problems:
        for result in problem.results:
            cells = map(_cell, _numbers(result, "forward", "backward"))
            errors = [result.errors["o"], max(error for name, error in result.errors.items() if name.startswith("d"))]
            rows.append([problem.workload.name, f"{result.name:7}", *cells, *(f"{x:.1e}" for x in errors), result.reason])
    return aligned(rows, rule=True)


def _growth_table(growth: list[Problem]) -> str:
    names = ("evoattn", "dense")
    rows = [["length", "evoattn ms", "dense ms", "speed-up", "evoattn peak MiB", "dense peak MiB", "memory of dense", ""]]
    for problem in growth:
        (own, own_peak), (dense, dense_peak) = (_numbers(problem.result(name), "both") for name in names)
        faster = f"{dense / own:.1f} x" if own and dense else ""
        share = f"{100 * own_peak / dense_peak:.0f} %" if own_peak and dense_peak else ""
        peaks = (_cell(own_peak), _cell(dense_peak), share)
        rows.append([str(problem.workload.length), _cell(own), _cell(dense), faster, *peaks, ""])
    return aligned(rows, rule=True)
