#!/usr/bin/env python3
"""Time the parts of a triangle layer, each alone, forward and backward, as models write it and in `evoattn.nn`.

    python benchmarks/layer_parts.py --workloads layer384 layer768 --json benchmarks/results/layers/h200-parts.json

A part is called on what the part before it made, laid out as in the layer. On a GPU it is replayed as a CUDA graph, so that
the host has no share in it. The backward is what forward + backward takes beyond the forward. `python benchmarks/figures.py`
draws the record. Outputs of the parts one after the other are compared with the layer's first: status 1 if they differ.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cuda_graphs
import torch
from layer_ways import WAYS, Layer, inputs_of
from layer_workloads import workload
from torch import Tensor

import evoattn
from evoattn import testing
from evoattn.bench import machine
from evoattn.bench.clock import Clock, clock_for
from evoattn.bench.contender import Runner
from evoattn.compile.cache import write
from evoattn.nn.project import layer_norm, linear, project

PARTS = ("norm", "projections", "attention", "gate and output")
SAME = {"bfloat16": 3e-2, "float32": 1e-4}
"""The largest relative error of the parts, one after the other, against the layer."""


@dataclasses.dataclass(frozen=True)
class Steps:
    """A triangle layer in four steps, each a function of what the step before it made.

    Args:
        norm: z -> x.
        projections: x -> q, k, v, gate, bias, each `[1, N, L, *]`.
        attention: (q, k, v, gate, bias) -> o and, if it has not applied the gate, the gate.
        output: (o, gate or nothing) -> update.
    """

    norm: Callable[..., Any]
    projections: Callable[..., Any]
    attention: Callable[..., Any]
    output: Callable[..., Any]


def as_written(layer: Layer) -> Steps:
    """A norm, five products, the attention, the gate, a product."""
    module: Any = layer.module
    mha = module.mha

    def attention(q: Tensor, k: Tensor, v: Tensor, g: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return _attend(layer, q, k, v, bias, None), g

    return Steps(
        module.layer_norm,
        lambda x: tuple(product(x) for product in (*mha.inputs, module.linear)),
        attention,
        lambda o, g: mha.linear_o(torch.sigmoid(g) * o),
    )


def as_ours(layer: Layer, dtype: torch.dtype) -> Steps:
    """The steps of `evoattn.nn`; in the layer the first two are one function, whose backward normalises again."""
    module: Any = layer.module
    mha = module.mha

    def attention(q: Tensor, k: Tensor, v: Tensor, g: Tensor, bias: Tensor) -> tuple[Tensor]:
        return (_attend(layer, q, k, v, bias, g),)

    return Steps(
        lambda z: layer_norm(z, module.layer_norm, dtype),
        lambda x: tuple(project(x, None, (*mha.inputs, module.linear))),
        attention,
        lambda o: linear(o, mha.linear_o),
    )


def _attend(layer: Layer, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, gate: Tensor | None) -> Tensor:
    h: int = layer.module.no_heads  # type: ignore[assignment]
    q, k, v = (x.unflatten(-1, (h, -1)) for x in (q, k, v))
    gate = None if gate is None else gate.unflatten(-1, (h, -1))
    pair_bias = bias.movedim(-1, -3).unsqueeze(-4)
    return evoattn.evoformer_attention(q, k, v, mask=layer.mask, pair_bias=pair_bias, gate=gate).flatten(-2)


class Part:
    """One step: its forward, and forward + backward with the gradients of its inputs and of the parameters that it reads."""

    def __init__(
        self, step: Callable[..., Any], inputs: tuple[Tensor, ...], parameters: list[Tensor], dtype: torch.dtype
    ) -> None:
        self.step, self.dtype = step, dtype
        self.inputs = tuple(x.detach().requires_grad_() for x in inputs)
        made = self.forward()
        self.leaves = [*self.inputs, *parameters]
        self.made = tuple(x.detach() for x in made)
        self.cotangents = _alike(made)

    def forward(self, number: int = 0) -> tuple[Tensor, ...]:
        """Run the step."""
        device = self.inputs[0].device.type
        with torch.autocast(device, self.dtype, enabled=self.dtype != torch.float32):
            made = self.step(*self.inputs)
        return made if isinstance(made, tuple) else (made,)

    def both(self, number: int = 0) -> tuple[Tensor | None, ...]:
        """The gradients too."""
        pairs = [(x, dx) for x, dx in zip(self.forward(), self.cotangents, strict=True) if x.requires_grad]
        outputs, cotangents = zip(*pairs, strict=True)
        return torch.autograd.grad(outputs, self.leaves, cotangents, allow_unused=True)


def _alike(outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Random tensors, laid out in one memory if what was made is: so lie the gradients that an attention gives a product."""
    if len({x.untyped_storage().data_ptr() for x in outputs}) == 1 and len(outputs) > 1:
        numbers = outputs[0].untyped_storage().nbytes() // outputs[0].itemsize
        storage = torch.randn_like(outputs[0].as_strided((numbers,), (1,), 0))
        return tuple(storage.as_strided(x.shape, x.stride(), x.storage_offset()) for x in outputs)
    return tuple(torch.randn_like(x) for x in outputs)


def parts_of(layer: Layer, steps: Steps, dtype: torch.dtype) -> dict[str, Part]:
    """Each part on what the one before made."""
    module: Any = layer.module
    mha = module.mha
    reads = (module.layer_norm, torch.nn.ModuleList([*mha.inputs, module.linear]), None, mha.linear_o)
    found: dict[str, Part] = {}
    inputs: tuple[Tensor, ...] = (layer.inputs["z"],)
    calls = (steps.norm, steps.projections, steps.attention, steps.output)
    for name, step, of in zip(PARTS, calls, reads, strict=True):
        found[name] = Part(step, inputs, [] if of is None else list(of.parameters()), dtype)
        inputs = found[name].made
    return found


def milliseconds(call: Callable[[int], object], clock: Clock, device: torch.device, rounds: int) -> float:
    """The median of rounds; on a GPU of a CUDA graph's replays."""
    kept: object = None
    if device.type == "cuda":
        call, kept = cuda_graphs.captured(call)
    found = statistics.median(cuda_graphs.milliseconds(call, clock, rounds))
    del kept
    return found


def measure(name: str, dtype_name: str, device: torch.device, rounds: int) -> dict[str, Any]:
    """One layer: forward and backward of each part and of the whole, in ms, by way.

    Raises:
        ValueError: the workload is no triangle layer, or the parts do not make what the layer makes.
    """
    w, dtype, clock = workload(name), getattr(torch, dtype_name), clock_for(device)
    if w.layer != "triangle":
        raise ValueError(f"{name} is no triangle layer; expected one such as layer384")
    layer = inputs_of(w, dtype, device)
    record: dict[str, Any] = {"workload": name, "dtype": dtype_name, "ways": {}}
    for way, steps in (("written", as_written(layer)), ("evoattn", as_ours(layer, dtype))):
        runner = Runner(next(one for one in WAYS if one.name == way), layer)
        parts = parts_of(layer, steps, dtype)
        error = testing.relative_error(parts[PARTS[-1]].made[0], runner.forward().detach().double())
        if not error <= SAME[dtype_name]:
            raise ValueError(f"{name}, {way}: the parts differ from the layer by {error:.1e}")
        calls = {part: (one.forward, one.both) for part, one in parts.items()} | {"whole": (runner.forward, runner.both)}
        times = {}
        for part, of in calls.items():
            forward, all_of_it = (milliseconds(call, clock, device, rounds) for call in of)
            times[part] = [round(forward, 5), round(all_of_it - forward, 5)]
        record["ways"][way] = times
    return record


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", default=["layer384", "layer768"], help="triangle layers")
    parser.add_argument("--dtype", choices=tuple(SAME), default="bfloat16")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="where the record goes")
    parser.add_argument("--commit", help="what to record as the commit where git cannot tell")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    record: dict[str, Any] = {"machine": machine.facts(device, options.commit), "graphs": device.type == "cuda", "layers": []}
    for name in options.workloads:
        try:
            found = measure(name, options.dtype, device, options.rounds)
        except ValueError as error:
            print(f"layer_parts: {error}", file=sys.stderr)
            return 1
        record["layers"].append(found)
        for way, times in found["ways"].items():
            print(name, way, "  ".join(f"{part} {forward:.3f} + {backward:.3f}" for part, (forward, backward) in times.items()))
        if options.json is not None:
            write(options.json, f"{json.dumps(record, indent=1)}\n".encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
