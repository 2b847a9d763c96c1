"""Measure the blocks of one client in this process: `client_blocks.py` starts it, and reads the lines of JSON that it writes.

A line {"begins": [residues, dtype, switch, patched]} comes before each way, and a line {"case": {...}} for each of its passes.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import itertools
import json
import math
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from client_cases import CLIENTS, PASSES, Client, Way
from torch import Tensor, nn

import evoattn
from clients.compare import Watch
from evoattn.bench.machine import synchronize
from evoattn.bench.memory import peak_bytes, release
from evoattn.dispatch import lookup

Values = dict[str, Tensor]
"""The compared tensors, by their names in `_COMPARED`."""

_COMPARED = ("s", "z", "dz")
"""The outputs, and after a training step the gradient of the pair features."""

SECONDS, LEAST, MOST = 0.3, 3, 20
"""Seconds for which a pass is repeated, and its least and most calls."""

WORSE, ROUNDING = 3.0, {"float32": 1e-6, "bfloat16": 1e-3}
"""A way is wrong if its error exceeds `WORSE` times that of the original plus `ROUNDING`."""

FLIPS = 1e-3
"""The least bound of a gradient in float32. A ReLU that flips in one of the two leaves an error of about 4e-4."""

BOUND = {"float32": 1e-4, "bfloat16": 0.1}
"""The bound of an error if the original could not run."""


@dataclasses.dataclass
class Inputs:
    """Inputs of a length: what the blocks read, and the cotangents of their outputs; all are bfloat16 numbers."""

    s: Tensor
    z: Tensor
    ds: Tensor
    dz: Tensor

    @classmethod
    def drawn(cls, client: Client, residues: int, device: torch.device) -> Inputs:
        """Random numbers with the length as the seed."""
        rng = torch.Generator(device).manual_seed(residues)
        single, pair = client.shapes(residues)
        return cls(*(torch.randn(x, generator=rng, device=device).bfloat16() for x in (single, pair, single, pair)))


class Blocks:
    """A client's blocks in one dtype, ready to be called.

    Args:
        client: whose they are.
        module: in float64; it stays as it is.
        inputs: of one length.
        dtype: float64, float32 or bfloat16.
    """

    def __init__(self, client: Client, module: nn.Module, inputs: Inputs, dtype: torch.dtype) -> None:
        device = inputs.z.device
        mixed = client.autocast and dtype == torch.bfloat16
        self._client = client
        self._module = copy.deepcopy(module).to(device=device, dtype=torch.float32 if mixed else dtype)
        self._mask = client.mask(inputs.z.shape[-2], torch.float32 if mixed else dtype, device)
        self._leaves = [x.to(dtype).clone().requires_grad_() for x in (inputs.s, inputs.z)]
        self._cotangents = [inputs.ds, inputs.dz]
        self._context: Callable[[], Any] = contextlib.nullcontext
        if mixed:
            self._context = lambda: torch.autocast(device.type, torch.bfloat16)

    def inference(self, way: Way) -> Values:
        """The outputs, without gradients."""
        self._module.eval()
        with torch.no_grad(), self._context():
            s, z = self._client.run(self._module, *self._leaves, self._mask, False, **way.options)
        return {"s": s, "z": z}

    def training(self, way: Way) -> Values:
        """The outputs, and a backward to all parameters and inputs."""
        self._module.train()
        with self._context():
            outputs = self._client.run(self._module, *self._leaves, self._mask, True, **way.options)
        self._cotangents = [c.to(x.dtype) for c, x in zip(self._cotangents, outputs, strict=True)]  # copied the first time
        wanted = [*self._leaves, *self._module.parameters()]
        gradients = torch.autograd.grad(outputs, wanted, self._cotangents, allow_unused=True)
        return {"s": outputs[0].detach(), "z": outputs[1].detach(), "dz": gradients[1]}


def reference(client: Client, module: nn.Module, inputs: Inputs) -> tuple[Values, str]:
    """Compute the original in float64, and in float32 what needs too much memory there.

    Returns:
        The values on the CPU in float32, and in words how each was computed, or that it was not.
    """
    plain = Way("torch", client.frugal)
    known: Values = {}
    how: dict[str, str] = {}
    for dtype in (torch.float64, torch.float32):
        for name, keys in (("training", _COMPARED), ("inference", _COMPARED[:2])):
            if known.keys() >= set(keys):
                continue
            with contextlib.suppress(torch.OutOfMemoryError), Watch(dtype):
                values = getattr(Blocks(client, module, inputs, dtype), name)(plain)
                new = {key: x.float().cpu() for key, x in values.items() if key not in known}
                known |= new
                how |= dict.fromkeys(new, str(dtype).removeprefix("torch."))
            release(inputs.z.device)
    return known, ", ".join(f"{key} {how.get(key, 'out of memory')}" for key in _COMPARED)


def errors(values: Values, expected: Values) -> dict[str, float]:
    """Relative errors in the L2 norm, for what there is a truth; infinite where something is not finite."""
    errors_by_key = {}
    for key in expected.keys() & values.keys():
        truth = expected[key].to(values[key].device)
        error = float((values[key].float() - truth).norm() / truth.norm())
        errors_by_key[key] = float(f"{error:.3g}") if math.isfinite(error) else math.inf
    return dict(sorted(errors_by_key.items()))


def timed(call: Callable[[], object], device: torch.device) -> list[float]:
    """Milliseconds of calls that are queued one after the other, by events on a GPU. The first calls are not counted."""
    start = time.perf_counter()
    call()
    synchronize(device)
    count = max(LEAST, min(MOST, int(SECONDS / (time.perf_counter() - start))))
    if device.type != "cuda":
        found = []
        for _ in range(count):
            start = time.perf_counter()
            call()
            found.append(1e3 * (time.perf_counter() - start))
        return found
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    call()
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    marks[-1].synchronize()
    return [float(a.elapsed_time(b)) for a, b in itertools.pairwise(marks)]


class Worker:
    """Measures the ways of a client, and writes lines.

    Args:
        client: whose blocks.
        device: where.
        ways: how they are called.
        skip: what has been measured or has failed: (residues, dtype, switch, patched).
        write: takes a line.
    """

    def __init__(
        self, client: Client, device: torch.device, ways: list[Way], skip: set[Any], write: Callable[[object], None]
    ) -> None:
        self._client, self._device, self._ways, self._skip, self._write = client, device, ways, skip, write
        self._module = client.build().to(device)
        self._chosen: set[str] = set()
        lookup.listeners.append(self._chosen.add)

    def length(self, residues: int, dtypes: list[str]) -> None:
        """Measure one length in all dtypes."""
        left = [
            (dtype, way)
            for dtype in dtypes
            for way in self._ways
            if (residues, dtype, way.switch, way.patched) not in self._skip
        ]
        if not left:
            return
        inputs = Inputs.drawn(self._client, residues, self._device)
        expected, what = reference(self._client, self._module, inputs)
        for dtype in dtypes:
            bounds: dict[str, dict[str, float]] = {name: {} for name in PASSES}
            self._chosen.clear()  # a plan that is kept tells its backend once
            blocks = Blocks(self._client, self._module, inputs, getattr(torch, dtype))
            for way in [way for name, way in left if name == dtype]:
                self._write({"begins": [residues, dtype, way.switch, way.patched]})
                for name in PASSES:
                    case = self._case(blocks, name, way, dtype, expected, bounds[name])
                    case |= {"client": self._client.name, "residues": residues, "dtype": dtype, "pass": name}
                    case |= {"switch": way.switch, "patched": way.patched, "reference": what}
                    self._write({"case": case})
                    release(self._device)
            del blocks
            release(self._device)

    def warm(self, residues: int, dtypes: list[str]) -> None:
        """Run each patched way once, so that its kernels are compiled and kept. What fails here fails later again."""
        inputs = Inputs.drawn(self._client, residues, self._device)
        for dtype in dtypes:
            blocks = Blocks(self._client, self._module, inputs, getattr(torch, dtype))
            for way in [way for way in self._ways if way.patched]:
                for name in PASSES:
                    with contextlib.suppress(Exception), evoattn.patch(self._client.name, graphs=False, wait=True):
                        getattr(blocks, name)(way)
                    release(self._device)

    def _case(
        self, blocks: Blocks, name: str, way: Way, dtype: str, expected: Values, bounds: dict[str, float]
    ) -> dict[str, Any]:
        """One pass of one way: right first, then memory and time."""
        case: dict[str, Any] = {"status": "ok"}
        call = getattr(blocks, name)
        try:
            with self._patched(way, case):
                found = errors(call(way), expected)
                case["errors"] = {key: "inf" if x == math.inf else x for key, x in found.items()}
                if way.patched and (wrong := _wrong(found, bounds, dtype)):
                    return case | {"status": "wrong", "reason": wrong}
                if not way.patched and not bounds:
                    bounds |= found
                case["peak_bytes"] = peak_bytes(lambda: call(way), self._device)
                samples = timed(lambda: call(way), self._device)
            case["median_ms"] = float(f"{statistics.median(samples):.5g}")
            case["samples_ms"] = [float(f"{x:.5g}") for x in samples]
        except torch.OutOfMemoryError as error:
            case = {"status": "out of memory", "reason": _first_line(error), "errors": case.get("errors", {})}
        except Exception as error:  # a client's kernels raise whatever they like, and the others still have their turn
            case = {"status": "failed", "reason": f"{type(error).__name__}: {_first_line(error)}"}
            if self._device.type == "cuda":
                torch.cuda.synchronize()  # raises if the device is lost: this process ends, and the next goes on
        return case

    @contextlib.contextmanager
    def _patched(self, way: Way, case: dict[str, Any]) -> Iterator[None]:
        """With the patch on, if the way has it: which backends ran, and that no softmax was the client's own."""
        if not way.patched:
            yield
            return
        with evoattn.patch(self._client.name, graphs=False, wait=True) as patched:
            yield
        case["calls"], case["backends"] = patched.calls, sorted(self._chosen)
        passed_on = [reason for reason in patched.passed_on if "the client's own" not in reason]  # its own is faster
        if passed_on or not (patched.calls or patched.passed_on):
            raise RuntimeError(f"{patched.calls} calls were ours; passed on: {patched.passed_on}")


def _wrong(errors_by_key: dict[str, float], bounds: dict[str, float], dtype: str) -> str:
    """Name what is beyond its bound; empty if all is right."""
    for key, error in errors_by_key.items():
        bound = WORSE * bounds[key] + ROUNDING[dtype] if key in bounds else BOUND[dtype]
        if key == "dz":
            bound = max(bound, FLIPS)
        if not error <= bound:
            return f"{key} is off by {error:.1e}; the bound is {bound:.1e}"
    return ""


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0][:300]


def main() -> None:
    spec = json.loads(sys.argv[1])
    warnings.simplefilter("ignore")  # the clients' own
    device = torch.device(spec["device"])
    client = CLIENTS[spec["client"]]
    ways = [way for way in client.ways if way.group == spec["group"]]
    with Path(spec["lines"]).open("a", encoding="utf-8") as file:

        def write(line: object) -> None:
            file.write(json.dumps(line) + "\n")
            file.flush()

        worker = Worker(client, device, ways, {tuple(x) for x in spec["skip"]}, write)
        gc.freeze()  # each measurement collects garbage: .7 s with all that is imported
        for residues in spec["lengths"]:
            (worker.warm if spec["warm"] else worker.length)(residues, spec["dtypes"])
    sys.stdout.flush()
    os._exit(0)  # some clients leave threads behind that never end


if __name__ == "__main__":
    main()
