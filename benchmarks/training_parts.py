#!/usr/bin/env python3
"""Where the time of a training step of a whole model goes, by part: forward, what checkpoints compute again, backward.

    PYTHONPATH=src python benchmarks/training_parts.py --tokens 384 640 --json parts.json

The step is that of `training_steps.py`. Times are those of the GPU's stream, between the begin and the end of a part; "again"
is a share of "backward". What belongs to no part is `other`: embeddings, losses, what is between. `gpu_ms` is the time in which
a kernel or a copy ran, in one more step under torch's profiler.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from prediction_ways import Case, Way, line, used
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from training_programs import attribute
from training_steps import Training, main, warmed_up

from evoattn.bench import machine

PASSES = ("forward", "backward", "again")


class Clock:
    """Times of the parts of a model in one step. Use it as a context manager.

    Attributes:
        in_backward: whether the backward runs: a layer that is called then is computed again.
    """

    def __init__(self, model: nn.Module, parts: Mapping[str, tuple[str, str]], device: torch.device) -> None:
        self._model, self._parts, self._device = model, parts, device
        self._begun: dict[tuple[str, str], Any] = {}
        self._spans: list[tuple[str, str, Any, Any]] = []
        self._first: dict[str, Any] = {}  # gradient of an output of a part
        self._last: dict[str, Any] = {}  # gradient of an input
        self._hooks: list[Any] = []
        self.in_backward = False

    def __enter__(self) -> Clock:
        for name, (path, layers) in self._parts.items():
            part = attribute(self._model, path)
            if part is not None:
                self._watch(part, name, "forward")
                for layer in attribute(part, layers) or () if layers else ():
                    self._watch(layer, name, "again")
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _watch(self, module: nn.Module, name: str, which: str) -> None:
        def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
            if (which == "again") != self.in_backward:
                return None
            self._begun[name, which] = self._now()
            return None if self.in_backward else tree_map(entering, (args, kwargs))

        def after(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if (start := self._begun.pop((name, which), None)) is not None:
                self._spans.append((name, which, start, self._now()))
                if not self.in_backward:
                    tree_map(leaving, output)

        def entering(x: Any) -> Any:
            """A view of an input, which has the gradient from this part alone."""
            if not _wants_gradient(x):
                return x
            view = x.view_as(x)
            view.register_hook(lambda _: self._last.update({name: self._now()}))
            return view

        def leaving(x: Any) -> Any:
            if _wants_gradient(x):
                x.register_hook(lambda _: self._first.setdefault(name, self._now()) and None)
            return x

        self._hooks.append(module.register_forward_pre_hook(before, with_kwargs=True))
        self._hooks.append(
            module.register_forward_hook(after, with_kwargs=True, always_call=True)
        )  # a checkpoint may stop early

    def _now(self) -> Any:
        """An event on the current stream, or the time of a CPU."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def ms(self) -> dict[str, dict[str, float]]:
        """Milliseconds by part and pass, once the device is through."""
        machine.synchronize(self._device)
        parts = {name: dict.fromkeys(PASSES, 0.0) for name in self._parts if any(name == x for x, *_ in self._spans)}
        for name, which, start, end in self._spans:
            parts[name][which] += span(start, end)
        for name in self._first.keys() & self._last.keys():
            parts[name]["backward"] = span(self._first[name], self._last[name])
        return parts


def _wants_gradient(x: Any) -> bool:
    return isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled()


def span(start: Any, end: Any) -> float:
    """Milliseconds between two of `Clock.now`."""
    if isinstance(start, float):
        return 1e3 * float(end - start)
    return float(start.elapsed_time(end))


def measure(training: Training, way: Way, features: Mapping[str, Any]) -> tuple[Case, dict[str, Tensor]]:
    """The parts of a step, which are compared by their losses."""
    optimizer = training.trained.optimizer(training.model)
    with used(way, training.trained.program, training.model):
        outputs = warmed_up(way, lambda: training.step(features, optimizer))
        runs = [_timed(training, features, optimizer) for _ in range(training.steps)]
        busy = _busy(training, features, optimizer)
    optimizer.zero_grad()
    case: Case = {"ms": _median(sum(stages.values()) for _, stages in runs)}
    case["stages"] = {name: _median(stages[name] for _, stages in runs) for name in runs[0][1]}
    case["parts"] = {name: {x: _median(parts[name][x] for parts, _ in runs) for x in PASSES} for name in runs[0][0]}
    inside = sum(x["forward"] + x["backward"] for x in case["parts"].values())
    case["other"] = round(case["stages"]["forward"] + case["stages"]["backward"] - inside, 2)
    return case | busy | {"loss": float(f"{outputs['loss']:.6g}")}, {"loss": outputs["loss"]}


def _median(values: Iterable[float]) -> float:
    return round(statistics.median(values), 2)


def _timed(training: Training, features: Mapping[str, Any], optimizer: Any) -> tuple[Any, dict[str, float]]:
    with Clock(training.model, training.trained.parts, training.device) as clock:
        _, stages = training.step(features, optimizer, clock)
        return clock.ms(), stages


def _busy(training: Training, features: Mapping[str, Any], optimizer: Any) -> Case:
    """The time in which a kernel or a copy ran, and how many kernels were launched."""
    if training.device.type != "cuda":
        return {}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        training.step(features, optimizer)
        torch.cuda.synchronize(training.device)
    names = ("Optimizer.", "ProfilerStep")  # spans of the host's, which the profiler shows there too
    events = [x for x in profile.events() if x.device_type.name == "CUDA" and not x.name.startswith(names)]
    launches = [x for x in events if not x.name.startswith(("Memcpy", "Memset"))]
    return {
        "gpu_ms": round(covered((x.time_range.start, x.time_range.end) for x in events) / 1e3, 1),
        "launches": len(launches),
    }


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """The length that spans cover together."""
    total, reached = 0.0, -math.inf
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def show(case: Case) -> str:
    """A line for the terminal."""
    parts = ", ".join(
        f"{name} {x['forward']:.0f} + {x['backward']:.0f} ({x['again']:.0f} again)" for name, x in case.get("parts", {}).items()
    )
    return line(case, f"{case['tokens']:5} tokens", f"{case.get('ms', 0):8.1f} ms, GPU {case.get('gpu_ms', 0):.0f} ({parts})")


if __name__ == "__main__":
    sys.exit(main(__doc__, measure, show))
