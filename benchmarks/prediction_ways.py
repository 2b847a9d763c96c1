"""The ways that whole models are run, and what their benchmarks have in common: options, record, memory and failures."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import importlib.util
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import case_records
import torch
from prediction_programs import PROGRAMS, Program
from torch import Tensor, nn

import evoattn
from evoattn.bench import machine
from evoattn.bench.memory import release
from evoattn.clients.patching import NAMES, client
from evoattn.core.devices import installed_version
from evoattn.core.precisions import PRECISIONS

__all__ = ["INSTALLED", "WAYS", "Case", "Way", "begun", "each_way", "keep", "left_out", "line", "options", "peak", "used"]

SCHEMA = 1
INSTALLED = "as installed"
OUT_OF_MEMORY = "out of memory"

Case = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to run a program.

    Args:
        patch: the arguments of `evoattn.patch`, None for none.
        kernels: whether cuEquivariance is used.
        runtime: whether `Program.runtime` runs the model instead.
    """

    patch: Mapping[str, Any] | None
    kernels: bool = False
    runtime: bool = False

    @property
    def named(self) -> str | None:
        """The precision of denoisers that evoattn was asked for. None: it was not asked."""
        return None if self.patch is None else self.patch.get("precision", "exact")


WAYS = {
    INSTALLED: Way(None),
    "cuEquivariance": Way(None, kernels=True),
    "evoattn.patch": Way({"graphs": False}),
    "evoattn run": Way({}),
    **{f"evoattn run {x}": Way({"precision": x}) for x in PRECISIONS if x != "exact"},
    "bionemo-ir": Way(None, runtime=True),
}
_CUEQUIVARIANCE = "cuequivariance_torch"


def left_out(program: Program, chosen: Iterable[str]) -> dict[str, str]:
    """The chosen ways in which a program cannot run here, each with the reason."""
    return {name: why for name in chosen if (why := _why_not(program, WAYS[name]))}


def _why_not(program: Program, way: Way) -> str:
    if way.kernels and program.kernels is None:
        return "it does not call cuEquivariance"
    if way.runtime and program.runtime is None:
        return "its model is not run there"
    if way.kernels and importlib.util.find_spec(_CUEQUIVARIANCE) is None:
        return f"{_CUEQUIVARIANCE} is not installed"
    if way.runtime and program.runtime is not None and importlib.util.find_spec(program.runtime.package) is None:
        return f"{program.runtime.distribution} is not installed"
    if way.named in (None, "exact") or (program.client in NAMES and client(program.client).has_transformers):
        return ""
    return "evoattn does not compute its diffusion transformers"


@contextlib.contextmanager
def used(way: Way, program: Program, model: nn.Module) -> Iterator[None]:
    """Run the program this way while the context is entered."""
    if program.kernels is not None:
        program.kernels(model, way.kernels)
    with evoattn.patch(program.client, wait=True, **way.patch) if way.patch is not None else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def peak(device: torch.device, case: Case) -> Iterator[None]:
    """Note in a case the most GiB that tensors take in the context, and that torch has taken for them and for the memory of
    graphs. A CPU has no such count.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    yield
    if device.type == "cuda":
        case["peak_gib"] = round(torch.cuda.max_memory_allocated(device) / 2**30, 2)
        case["reserved_gib"] = round(torch.cuda.max_memory_reserved(device) / 2**30, 2)


def failure(error: Exception) -> str:
    """The words for a way that failed, the same for every kind of missing GPU memory."""
    lines = str(error).splitlines() or [""]
    if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error) or "ALLOC_FAILED" in str(error):
        return OUT_OF_MEMORY
    return f"{type(error).__name__}: {lines[0][:200]}"


def difference(values: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> dict[str, float | None]:
    """The relative difference of each output, by the L2 norm. None: it is no number."""
    differences = {name: ((x - other[name]).norm() / other[name].norm()).item() for name, x in values.items()}
    return {name: float(f"{x:.2e}") if math.isfinite(x) else None for name, x in differences.items()}


def each_way(
    program: Program,
    chosen: Iterable[str],
    facts: Case,
    device: torch.device,
    run: Callable[[Way], tuple[Case, dict[str, Tensor]]],
    true: Mapping[str, Tensor] | None = None,
) -> Iterator[Case]:
    """A case for each way, in turn. One that fails says why, and the next one is run.

    Args:
        program: whose ways they are.
        chosen: names of ways.
        facts: what all cases have in common.
        device: whose memory is given back before each way.
        run: runs the program in a way, and returns what to note and what to compare with the program as installed.
        true: the results in float32, to be compared with too.
    """
    installed: dict[str, Tensor] | None = None
    chosen = set(chosen)
    chosen -= left_out(program, chosen).keys()
    for name, way in WAYS.items():
        if name not in chosen:
            continue
        case = facts | {"way": name}
        release(device)
        try:
            numbers, values = run(way)
        except Exception as error:  # memory, most of all: the next way may need less
            case["failed"] = failure(error)
        else:
            installed = values if name == INSTALLED else installed
            case |= numbers
            for key, other in (("from_installed", installed), ("from_float32", true)):
                if other is not None:
                    case[key] = difference(values, other)
        yield case


def options(about: str | None, ways: Iterable[str]) -> argparse.ArgumentParser:
    """A command line with the options of every benchmark of whole models. ways: those that can be chosen."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", choices=list(ways))
    parser.add_argument("--device", type=torch.device, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--commit", help="what to record if git cannot tell")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the record, or add to it")
    return parser


def begun(path: Path | None, device: torch.device, commit: str | None) -> dict[str, Any]:
    """The record in a file, if there is one; else a fresh one.

    Raises:
        ValueError: the file holds the record of another machine or commit.
    """
    facts = {key: value for key, value in machine.facts(device, commit).items() if value is not None}
    distributions = [y.distribution for x in PROGRAMS.values() for y in (x, x.runtime) if y is not None]
    versions = {name: numbers for name in distributions if (numbers := installed_version(name))}
    return case_records.begun(path, {"schema": SCHEMA, "machine": facts, "programs": versions, "cases": []})


def keep(
    cases: Iterable[Case], record: dict[str, Any], names: tuple[str, ...], path: Path | None, show: Callable[[Case], str]
) -> bool:
    """Print cases as they come and add them to the record.

    Returns:
        Whether one failed. One that ran out of memory did not: where that happens is a result.
    """
    failed = False
    for case in cases:
        failed |= case.get("failed", OUT_OF_MEMORY) != OUT_OF_MEMORY
        print(show(case), flush=True)
        case_records.add(case, record, names, path)
    return failed


def line(case: Case, what: str, taken: str) -> str:
    """A case for the terminal.

    Args:
        case: with its program, its way, and what is known of its memory and differences.
        what: the length.
        taken: the time.
    """
    words = f"{case['program']:10} {what}, {case['way']:15}"
    if "failed" in case:
        return f"{words} {case['failed']}"
    peak = [f"{case['peak_gib']:5.1f} GiB"] if "peak_gib" in case else []
    words_of = {"from_float32": "float32", "from_installed": "installed"}
    away = [f"from {words_of[key]}: {_differs(case[key])}" for key in words_of if key in case][:1]
    return "; ".join([f"{words} {taken}", *peak, *away])


def _differs(differences: Mapping[str, float | None]) -> str:
    return ", ".join(f"{name} {'nan' if x is None else f'{x:.1e}'}" for name, x in differences.items())
