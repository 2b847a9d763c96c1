"""Writes a record: the kernels, the launches and the words of all calls, as sorted text files in a folder."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import importlib
import inspect
import multiprocessing
import os
import pathlib
import re
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch

import evoattn
from evoattn.cli.warm.cards import ARCHITECTURES
from evoattn.core.devices import planned_for
from evoattn.dispatch.lookup import RefusalError
from proofs import hopper_code
from proofs.calls import Attention, Layer, attentions, layer_calls
from proofs.recording import Recorder, on_card
from proofs.store import Store

__all__ = ["write"]

_PUBLIC = (
    *("evoattn", "evoattn.nn", "evoattn.pair", "evoattn.testing", "evoattn.workloads"),
    *("evoattn.compat.deepspeed", "evoattn.compat.cuequivariance", "evoattn.compat.openfold"),
)
_CHUNK = 12


@dataclasses.dataclass(frozen=True)
class Task:
    """Calls that one process records on the cards of an architecture.

    Args:
        arch: of the cards.
        cards: how many of them.
        dtypes: of the awkward cases.
        problems, layers: how many random ones there are.
        only: a pattern that is found in the names of all calls.
        start, stop: which of all these calls.
    """

    arch: str
    cards: int
    dtypes: tuple[torch.dtype, ...]
    problems: int
    layers: int
    only: str = ""
    start: int = 0
    stop: int = 0

    def calls(self) -> list[Attention | Layer]:
        return _calls(self.problems, self.dtypes, self.layers, self.only)[self.start : self.stop]

    def parts(self) -> Iterator[Task]:
        """The same in parts."""
        number = len(_calls(self.problems, self.dtypes, self.layers, self.only))
        for start in range(0, number, _CHUNK):
            yield dataclasses.replace(self, start=start, stop=min(start + _CHUNK, number))


@functools.cache
def _calls(problems: int, dtypes: tuple[torch.dtype, ...], layers: int, only: str) -> list[Attention | Layer]:
    calls: list[Attention | Layer] = [*attentions(problems, dtypes), *layer_calls(layers)]
    return [call for call in calls if re.search(only, call.name)]


QUICK = (Task("sm_90", 1, (torch.bfloat16,), 200, 24),)
WHOLE = (
    Task("sm_90", 3, (torch.float32, torch.bfloat16, torch.float16), 1000, 150),
    Task("sm_80", 2, (torch.float32, torch.bfloat16), 1000, 60),
    *(Task(arch, 2, (torch.float32, torch.bfloat16), 100, 24) for arch in ("sm_86", "sm_89", "sm_100", "sm_120")),
)


@dataclasses.dataclass
class Found:
    """The lines that a process has recorded.

    Args:
        lines: of each file, of each call.
        kernels: architecture, backend, key and name of each.
        hopper: Hopper's kernels by name, which are not traced yet.
    """

    lines: dict[str, dict[str, list[str]]]
    kernels: set[tuple[str, str, str, str]]
    hopper: dict[str, Any]


@functools.cache
def _recorder() -> Recorder:
    """The one of this process: what Triton keeps in memory tells it of launches."""
    return Recorder()


def _prepare() -> None:
    os.environ["EVOATTN_CACHE_DIR"] = ""  # tiles that were tuned on this machine are no part of a record
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")


def record(task: Task) -> Found:
    """Record calls, in a process of their own."""
    _prepare()
    recorder, store = _recorder(), Store()
    recorder.triton, recorder.hopper = {}, {}
    lines: dict[str, dict[str, list[str]]] = {}
    for call in task.calls():
        inputs = call.inputs() if isinstance(call, Attention) else None
        for card in ARCHITECTURES[task.arch][: task.cards]:
            name = re.sub(r"\W+", "-", card.name)
            launches = lines.setdefault(f"launches-{name}.txt", {})
            if isinstance(call, Layer):
                launches[call.name] = _lines(functools.partial(call.run, recorder.start), card, recorder)
            elif inputs is not None:
                for backend in ("hopper", "triton"):
                    run = functools.partial(call.run, inputs, backend, recorder.start)
                    launches[f"{call.name} by {backend}"] = _lines(run, card, recorder)
                with planned_for(card):
                    words = str(evoattn.explain(**call.arguments(inputs, "auto")))
                lines.setdefault(f"explain-{name}.txt", {})[call.name] = words.splitlines()
    kernels = set()
    for source in recorder.triton.values():
        store.keep(source)
        kernels.add((task.arch, "triton", source.key, source.name))
    return Found(lines, kernels, dict(recorder.hopper))


def _lines(run: Any, card: Any, recorder: Recorder) -> list[str]:
    """List what a call launches, or why it launches nothing."""
    try:
        with on_card(card, recorder):
            run()
    except RefusalError as refused:
        return [f"refused {refused}".replace("\n", " ")]
    except Exception as error:
        return [*recorder.lines, f"error {type(error).__name__}: {error}".replace("\n", " ")]
    return recorder.lines


def trace(kernel: Any) -> tuple[str, str, str]:
    """The name and the keys of a Hopper kernel."""
    _prepare()
    source = hopper_code.traced(kernel)
    Store().keep(source)
    return kernel.name, source.key, source.host


def write(folder: pathlib.Path, *, quick: bool, only: str, processes: int) -> None:
    """Write the record of this checkout.

    Args:
        folder: for the files, which are replaced.
        quick: record one card and fewer calls.
        only: a pattern that is found in the names of all calls.
        processes: how many work at once.
    """
    began = time.monotonic()
    tasks = [dataclasses.replace(task, only=only) for task in (QUICK if quick else WHOLE)]
    parts = [part for task in tasks for part in task.parts()]
    files: dict[str, dict[str, list[str]]] = {}
    kernels: set[tuple[str, str, str, str]] = set()
    hopper: dict[str, Any] = {}
    with _pool(processes) as pool:
        for i, found in enumerate(pool.map(record, parts), 1):
            for name, calls in found.lines.items():
                files.setdefault(name, {}).update(calls)
            kernels |= found.kernels
            hopper |= found.hopper
            _tell(f"{i} of {len(parts)} parts, {len(kernels)} Triton kernels, {time.monotonic() - began:.0f} s")
        keys, hosts = {}, []
        for name, key, host in pool.map(trace, [hopper[name] for name in sorted(hopper)], chunksize=4):
            keys[name] = key
            kernels.add(("sm_90", "hopper", key, name))
            hosts.append(f"hopper {host}  # {name}")
            _tell(f"{len(keys)} of {len(hopper)} Hopper kernels, {time.monotonic() - began:.0f} s")
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("code.txt", "hosts.txt", "schemas.txt", "public.txt", "launches-*.txt", "explain-*.txt"):
        for old in folder.glob(name):
            old.unlink()
    for name, calls in files.items():
        text = [f"== {call}\n" + "".join(f"{_keyed(line, keys)}\n" for line in lines) for call, lines in sorted(calls.items())]
        (folder / name).write_text("".join(text))
    manifest = {f"{arch} {backend} {{{key}}}  # {name}" for arch, backend, key, name in kernels}
    for name, lines in (("code", manifest), ("hosts", hosts), ("schemas", _schemas()), ("public", _public())):
        (folder / f"{name}.txt").write_text("".join(f"{line}\n" for line in sorted(lines)))
    _tell(f"{folder}: {len(kernels)} kernels in {time.monotonic() - began:.0f} s\n")


def _pool(processes: int) -> concurrent.futures.ProcessPoolExecutor:
    return concurrent.futures.ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"))


def _tell(text: str) -> None:
    print(f"\r{text}", end="", file=sys.stderr, flush=True)


def _keyed(line: str, keys: dict[str, str]) -> str:
    """A launch with a kernel's key in the place of its name."""
    return re.sub(r"^hopper \{([^}]*)\}", lambda found: f"hopper {{{keys[found[1]]}}}", line)


def _schemas() -> list[str]:
    """The operators of torch that the package defines."""
    for name in ("evoattn.nn", "evoattn.pair", "evoattn.dispatch.operators"):
        importlib.import_module(name)
    return [str(schema) for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("evoattn::")]


def _public() -> list[str]:
    """The names of public modules, with their signatures."""
    lines = []
    for module in _PUBLIC:
        named = importlib.import_module(module)
        for name in named.__all__:
            told = ""
            with contextlib.suppress(TypeError, ValueError):
                told = str(inspect.signature(getattr(named, name)))
            lines.append(re.sub(r" at 0x[0-9a-f]+", "", f"{module}.{name}{told}"))
    return lines
