#!/usr/bin/env python3
"""Time the first calls of a process, with and without workers that compile.

    PYTHONPATH=src python benchmarks/first_calls.py --json benchmarks/results/first-calls/NAME.json

Each process calls triangle attention forward and backward, with 32 channels and then with 48, which are other kernels. Its
folders of kept kernels are empty. One more process finds all of them kept. At the end many processes start at once, with eight
numbers of channels in one empty folder. Python's own compiled modules are kept from the first process on, which is not
measured: an installed package has them too.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SCHEMA = 3
CHANNELS = (32, 48)
CROWD_CHANNELS = (8, 16, 24, 32, 40, 48, 56, 64)
_LEAST_S = 0.01
"""Shorter waits are noise."""


class Caches:
    """The folders of compiled code: kernels in one for each process, Python's modules in one for all."""

    def __init__(self, folder: Path, modules: Path) -> None:
        self.environment = {"EVOATTN_CACHE_DIR": str(folder / "evoattn"), "TRITON_CACHE_DIR": str(folder / "triton")}
        self.environment["PYTHONPYCACHEPREFIX"] = str(modules)

    def start(self, workers: int, spec: dict[str, Any]) -> subprocess.Popen[str]:
        """A process that makes the calls of `spec`, with so many workers at most."""
        environment = {**os.environ, **self.environment, "EVOATTN_COMPILERS": str(workers)}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        command = [sys.executable, str(Path(__file__).resolve()), "--calls", json.dumps(spec)]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def measurements(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The measurements of a process.

    Raises:
        RuntimeError: it failed.
    """
    said, _ = process.communicate()
    if process.returncode:
        raise RuntimeError(f"a process of first calls ended with status {process.returncode}; see above")
    record: dict[str, Any] = json.loads(said.splitlines()[-1])
    return record


def measured(options: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """All cases, one after the other."""
    numbers = itertools.count()
    modules = folder / "modules"

    def empty() -> Caches:
        return Caches(folder / str(next(numbers)), modules)

    spec = {"length": options.length, "device": options.device, "channels": CHANNELS}
    measurements(empty().start(max(options.workers), spec))
    for _ in range(options.rounds):
        for workers in options.workers:
            caches = empty()
            yield {"case": "empty folders", "workers": workers, **measurements(caches.start(workers, spec))}
        yield {"case": "kept kernels", **measurements(caches.start(max(options.workers), {**spec, "apart": True}))}
    for workers in options.workers if options.crowd else ():
        yield {"case": f"{options.crowd} processes at once", "workers": workers, **crowd(empty(), workers, spec, options.crowd)}


def crowd(caches: Caches, workers: int, spec: dict[str, Any], size: int) -> dict[str, Any]:
    """Processes that start at once: when each was done, from the start of the first."""
    begun = time.monotonic()
    channels = [CROWD_CHANNELS[i % len(CROWD_CHANNELS)] for i in range(size)]
    started = [caches.start(workers, {**spec, "channels": [c]}) for c in channels]
    try:
        results = [measurements(process) for process in started]
    finally:
        for process in started:
            process.kill()  # if another one failed; one that has ended stays as it is
    return {"done_s": sorted(round(one["ended"] - begun, 2) for one in results)}


class Watch:
    """Log what a process compiles and waits for, in seconds since it began."""

    def __init__(self, begun: float) -> None:
        self.begun = begun
        self.lists: dict[str, list[tuple[str, float, float]]] = {"compiled": [], "awaited": []}

    @contextlib.contextmanager
    def timed(self, name: str, kind: str) -> Iterator[None]:
        """Note what the block does, with its start and its length."""
        start = time.monotonic()
        yield
        seconds = time.monotonic() - start
        if seconds >= _LEAST_S:
            self.lists[kind].append((name, round(start - self.begun, 2), round(seconds, 2)))

    def begin(self) -> None:
        """Look on from now on. The compiler is not imported before a call imports it."""
        cache: Any = importlib.import_module("evoattn.compile.cache")
        locked = cache.locked

        @contextlib.contextmanager
        def watched(path: Path, **options: bool) -> Iterator[bool]:
            self._watch_compiler()
            lock = locked(path, **options)
            with self.timed(path.name.rpartition("-")[0], "awaited"):
                held = lock.__enter__()
            with contextlib.ExitStack() as stack:
                stack.push(lock.__exit__)
                yield held

        cache.locked = watched

    def _watch_compiler(self) -> None:
        launch: Any = sys.modules["evoattn.backends.hopper.launch"]
        build = launch.build
        if not hasattr(build, "watched"):

            def watched(kernel: Any) -> Any:
                with self.timed(kernel.name, "compiled"):
                    return build(kernel)

            watched.watched = True  # type: ignore[attr-defined]
            launch.build = watched


def calls(spec: dict[str, Any]) -> dict[str, Any]:
    """The calls of this process, which has imported nothing yet."""
    begun = time.monotonic()
    import torch

    record: dict[str, Any] = {"import_torch_s": round(time.monotonic() - begun, 3)}
    device, length = spec["device"], spec["length"]

    def lasts(of: dict[str, Any], name: str, call: Callable[[], Any]) -> Any:
        start = time.monotonic()
        result = call()
        if device == "cuda":
            torch.cuda.synchronize()
        of[name] = round(time.monotonic() - start, 3)
        return result

    one = lasts(record, "start_device_s", lambda: torch.ones(1, device=device, requires_grad=True))
    from evoattn import evoformer_attention

    watch = Watch(begun)
    if device == "cuda":
        watch.begin()
    if spec.get("apart"):
        lasts(record, "first_backward_of_torch_s", lambda: one.sum().backward())
        if device == "cuda":
            lasts(record, "import_cute_dsl_s", lambda: importlib.import_module("evoattn.backends.hopper.launch"))
    record["calls"] = []
    for channels in spec["channels"]:
        of: dict[str, Any] = {"dtype": torch.bfloat16, "device": device, "requires_grad": True}
        q, k, v = (torch.randn(1, length, length, 4, channels, **of) for _ in range(3))
        mask = torch.rand(1, length, length, device=device) < 0.7
        pair_bias = torch.randn(1, 1, 4, length, length, **of)
        do = torch.randn_like(q)
        forward = functools.partial(evoformer_attention, q, k, v, mask=mask, pair_bias=pair_bias)
        times: dict[str, Any] = {"channels": channels}
        o = lasts(times, "forward_s", forward)
        lasts(times, "backward_s", functools.partial(torch.autograd.grad, o, (q, k, v, pair_bias), do))
        record["calls"].append(times)
    return {**record, **watch.lists, "ended": time.monotonic()}


def show(case: dict[str, Any]) -> str:
    """A case in a line."""
    words = [f"{case['case']:26}", f"{case['workers']} workers" if "workers" in case else " " * 9]
    words += [f"{c['channels']} channels {c['forward_s']:6.2f} + {c['backward_s']:6.2f} s" for c in case.get("calls", ())]
    words += [f"last done after {case['done_s'][-1]:.2f} s"] if "done_s" in case else []
    return "  ".join(words)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", nargs="+", type=int, default=[0, 4], metavar="N", help="so many workers at most, in turns")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="how often each case is measured")
    parser.add_argument("--crowd", type=int, default=16, metavar="N", help="so many processes at once at the end; 0 for none")
    parser.add_argument("--length", type=int, default=384, metavar="N", help="residues")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--commit", help="what to record if git cannot tell")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the record")
    parser.add_argument("--calls", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.calls:
        print(json.dumps(calls(json.loads(options.calls))), flush=True)
        os._exit(0)  # a thread of torch's autograd may still be at work, and bring down a process that ends in order

    import torch

    from evoattn.bench import machine
    from evoattn.compile.cache import write
    from evoattn.compile.workers import cores

    facts = {**machine.facts(torch.device(options.device), options.commit), "cores": cores()}
    record: dict[str, Any] = {"schema": SCHEMA, "machine": facts, "length": options.length, "cases": []}
    with tempfile.TemporaryDirectory(prefix="evoattn-first-calls-") as folder:
        for case in measured(options, Path(folder)):
            case.pop("ended", None)
            record["cases"].append(case)
            print(show(case), flush=True)
            if options.json:
                write(options.json, f"{json.dumps(record, indent=1)}\n".encode())


if __name__ == "__main__":
    main()
