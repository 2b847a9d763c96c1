"""`evoattn warm`: compiles all kernels that a model family needs, before its first call, on all cores."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from evoattn.backends import COMPILERS, Needed
from evoattn.cli.terminal import RefusedError, count_progress, kept_folder, refusing_place, whole_number
from evoattn.cli.warm.calls import Call, Launched, calls_of, why_not
from evoattn.cli.warm.cards import ARCHITECTURES, cards_of, local_cards
from evoattn.cli.warm.families import COARSE, DTYPES, FAMILIES, LENGTHS
from evoattn.compile.cache import VARIABLE, try_to_write
from evoattn.compile.workers import Pool, Task, cores
from evoattn.core.devices import Card, planned_for

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_TRITON = "TRITON_CACHE_DIR"
"""The variable that names Triton's folder."""

_CHUNK = 24
"""Calls whose kernels a worker finds at a time: a call takes 10 ms."""

HELP = "compile what a model family needs, before its first call"

ABOUT = """\
Compiles the kernels that a model family needs and keeps them, so that no first call waits for a compiler. It runs on all
cores. It needs no GPU if --arch names the one that the kernels are for, as in a container build. Kernels that are there
already are not compiled again. Ctrl-C keeps those that are finished.
"""

EPILOG = f"""\
examples:
  evoattn warm                                       inference of every family, for this machine's GPU
  evoattn warm --model esmfold --arch sm_90a         without a GPU: for an H100, H200 or GH200
  evoattn warm --model boltz --training --dtypes bfloat16
  evoattn warm --model openfold3 --lengths 384 768

families: {", ".join(FAMILIES)}
architectures: {", ".join(ARCHITECTURES)} (sm_90a is sm_90)

exit status: 0 every kernel is kept; 1 a kernel failed; 2 bad options; 130 interrupted: the finished kernels are kept
"""


@dataclasses.dataclass(frozen=True)
class Request:
    """The kernels to compile: of these families, lengths, dtypes of q, k and v, and cards, by so many worker processes."""

    models: tuple[str, ...]
    lengths: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    training: bool
    cards: tuple[Card, ...]
    jobs: int


@dataclasses.dataclass
class Counts:
    """The kernels of one backend, counted: compiled now, there already, failed; seconds of all compilers, and what is kept."""

    compiled: int = 0
    there: int = 0
    failed: int = 0
    seconds: float = 0.0
    bytes: int = 0
    folders: set[Path] = dataclasses.field(default_factory=set)

    def add(self, kernel: Needed, size: int) -> None:
        """Count a kernel that is kept, and its bytes."""
        self.bytes += size
        if kernel.path is not None:
            self.folders.add(kernel.path.parent)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `warm`."""
    parser.add_argument(
        "--model", nargs="+", choices=tuple(FAMILIES), default=tuple(FAMILIES), metavar="NAME", help="families (default: all)"
    )
    parser.add_argument(
        "--lengths",
        nargs="+",
        type=whole_number(1),
        metavar="L",
        help="residues or tokens (default: what stands for 1 to 2,048)",
    )
    parser.add_argument("--dtypes", nargs="+", choices=tuple(_DTYPES), help="default: bfloat16 float32")
    parser.add_argument("--training", action="store_true", help="also the backward")
    parser.add_argument("--arch", metavar="ARCH", help="the GPU's architecture, such as sm_90a (default: this machine's GPUs)")
    parser.add_argument("--jobs", type=whole_number(1), metavar="J", help="worker processes (default: one for each core)")


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    request = Request(
        models=tuple(dict.fromkeys(arguments.model)),
        lengths=tuple(dict.fromkeys(arguments.lengths or LENGTHS)),
        dtypes=tuple(_DTYPES[name] for name in dict.fromkeys(arguments.dtypes or ())) or DTYPES,
        training=arguments.training,
        cards=local_cards() if arguments.arch is None else cards_of(arguments.arch),
        jobs=arguments.jobs or cores(),
    )
    check_folders(request.cards)
    return warm(request)


def check_folders(cards: tuple[Card, ...]) -> None:
    """Refuse folders that cannot be written, before minutes of compiling: evoattn's own and Triton's.

    Raises:
        RefusedError: no folder is known, or one cannot be written. It names the variable that sets another.
    """
    own = kept_folder()
    folders: dict[str, Path] = {}
    for card in cards:
        with planned_for(card):
            if card.capability == (9, 0) and why_not("hopper") is None:
                folders[VARIABLE] = own
            if why_not("triton") is None:
                folders[_TRITON] = triton_folder()
    for variable, place in folders.items():
        with refusing_place(place, variable):
            try_to_write(place)


def triton_folder() -> Path:
    from triton import knobs

    return Path(knobs.cache.dir)


def warm(request: Request) -> int:
    """Compile the kernels of a request, print a table of them, and return the exit status."""
    tell_missing(request.cards[0])
    counts: dict[str, Counts] = {}
    unknown: list[str] = []
    begun = time.monotonic()
    try:
        with Pool(request.jobs) as pool:
            _compile_missing(_find_all(request, pool, unknown), pool, counts)
    finally:  # also after Ctrl-C: the finished kernels are kept
        print(f"{'backend':<8} {'compiled':>8} {'there':>6} {'failed':>7} {'CPU s':>7} {'MB':>7}  folder")
        for name, x in sorted(counts.items()):
            folders = ", ".join(map(str, sorted(x.folders))) or "-"
            print(f"{name:<8} {x.compiled:>8} {x.there:>6} {x.failed:>7} {x.seconds:>7.1f} {x.bytes / 1e6:>7.1f}  {folders}")
        print(f"{_sum(counts, 'compiled')} kernels compiled in {time.monotonic() - begun:.1f} s")
    return 1 if unknown or _sum(counts, "failed") else 0


def tell_missing(card: Card) -> None:
    """Name each backend that a card could use and that is not installed. Refuse if none is."""
    with planned_for(card):
        missing = {name: why_not(name) for name in COMPILERS}
    if card.capability != (9, 0):
        missing.pop("hopper")
    if all(missing.values()):
        raise RefusedError("; ".join(str(why) for why in missing.values()))
    for name, why in missing.items():
        if why is not None:
            print(f"evoattn warm: without {name}: {why}", file=sys.stderr)


def _find_all(request: Request, pool: Pool, unknown: list[str]) -> list[Launched]:
    """All kernels, each once, those of backwards first. Calls whose kernels cannot be found are told and added to `unknown`."""
    tasks = [Task("evoattn.cli.warm.calls:find_all", chunk) for chunk in chunks(request)]
    kernels: dict[tuple[str, str], Launched] = {}
    with count_progress(len(tasks)) as count:
        for done, report in enumerate(pool.run(tasks), 1):
            if report.error is not None:
                calls = report.task.arguments[0]
                unknown.append(f"{calls[0]} to {calls[-1]}")
                print(f"FAILED  the kernels of calls from {unknown[-1]} are unknown: {report.error}", flush=True)
                continue
            kernels.update({(one.backend, one.kernel.key): one for one in report.result})
            count(done, f"{len(kernels)} kernels found")
    return sorted(kernels.values(), key=lambda one: (one.backend, not one.call.training))


def chunks(request: Request) -> Iterator[tuple[list[Call], Card]]:
    """Yield calls of a card in chunks: all for the first card of an architecture, and for its others those that may differ."""
    seen: set[tuple[int, int]] = set()
    for card in request.cards:
        lengths = COARSE if card.capability in seen and request.lengths == LENGTHS else request.lengths
        seen.add(card.capability)
        attentions = (attention for name in request.models for attention in FAMILIES[name])
        waiting = iter(dict.fromkeys(calls_of(attentions, lengths, request.dtypes, request.training)))
        while chunk := list(itertools.islice(waiting, _CHUNK)):
            yield chunk, card


def _compile_missing(kernels: list[Launched], pool: Pool, counts: dict[str, Counts]) -> None:
    """Compile the kernels that are not kept, and count all of them."""
    missing: dict[int, Launched] = {}  # by the identities of their tasks, which have dictionaries
    for one in kernels:
        backend = counts.setdefault(one.backend, Counts())
        if one.kernel.bytes:
            backend.there += 1
            backend.add(one.kernel, one.kernel.bytes)
        else:
            missing[id(one.kernel.task)] = one
    with count_progress(len(missing)) as count:
        for done, report in enumerate(pool.run(one.kernel.task for one in missing.values()), 1):
            one = missing[id(report.task)]
            backend = counts[one.backend]
            backend.seconds += report.seconds
            if report.result:
                backend.compiled += 1
                backend.add(one.kernel, report.result)
            else:
                backend.failed += 1
                why = report.error or "it is not where a call would look for it"
                print(f"FAILED  {one.backend} {one.kernel.name} ({one.call}): {why}", flush=True)
            totals = f"{_sum(counts, 'compiled')} compiled, {_sum(counts, 'failed')} failed"
            count(done, f"{totals}; {one.kernel.name}")


def _sum(counts: dict[str, Counts], name: str) -> int:
    return sum(getattr(backend, name) for backend in counts.values())
