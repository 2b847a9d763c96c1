#!/usr/bin/env python3
"""A PairformerBlock of Boltz-2's size over several GPUs, beside the same block on one of them: time, memory, host, error.

    torchrun --nproc-per-node 2 benchmarks/sharded_block.py --json sharded.json

z is float32 under autocast to bfloat16 and split by rows. The first process runs the block alone, while the others wait. Then
all run it together. Inference is a forward without gradients. A training step is a forward with dropout, a backward for s, z
and all parameters, and one sum of the parameters' gradients over the processes. Errors of outputs and gradients against
float64 come first: status 1 if the processes together lose more than one GPU does. On machines without a
GPU it runs with gloo, which is a test of this script and no measurement.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from evoattn import testing
from evoattn.bench import machine
from evoattn.bench.record import write_text
from evoattn.nn import PairformerBlock

C_S, C_Z = 384, 128
VERIFIED = 256
"""Residues at which outputs and gradients are compared."""

ALLOWED, FLOOR = 1.5, 1e-4
"""So many times the error of one GPU plus a floor may each output and gradient be off: sums have another order."""

Example = dict[str, Tensor]
LAYERS = ("tri_mul_out", "tri_mul_in", "tri_att_start", "tri_att_end", "pair_transition")


def block_of(device: torch.device) -> PairformerBlock:
    """The same parameters on all processes."""
    torch.manual_seed(0)
    block = PairformerBlock(C_S, C_Z).to(device)
    for x in block.parameters():
        if x.ndim == 2:
            nn.init.normal_(x, std=x.shape[1] ** -0.5)
    return block


def example(length: int, device: torch.device) -> Example:
    """The same numbers on all processes. The last residues are padding."""
    rng = torch.Generator(device).manual_seed(length)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng, device=device)

    mask = (torch.arange(length, device=device) < length - length // 20).float()[None]
    pairs = mask[:, :, None] * mask[:, None, :]
    s, ds, z, dz = (draw(1, length, *shape) for shape in ((C_S,), (C_S,), (length, C_Z), (length, C_Z)))
    return {"s": s, "z": z, "mask": mask, "pairs": pairs, "ds": ds, "dz": dz}


def split(given: Example, mesh: Any) -> Example:
    """The rows of this process. The whole may then be freed."""
    made: Example = {}
    for name, x in given.items():
        parts = x.split(-(-x.shape[1] // mesh.size()), 1)
        rank = mesh.get_local_rank()
        part = parts[rank] if rank < len(parts) else x[:, :0]
        made[name] = DTensor.from_local(
            part.clone(), mesh, [Shard(1)], run_check=False, shape=x.shape, stride=x.contiguous().stride()
        )
    return made


def infer(block: PairformerBlock, given: Example) -> list[Tensor]:
    with torch.no_grad(), torch.autocast(given["z"].device.type, torch.bfloat16):
        return list(block(given["s"], given["z"], given["mask"], given["pairs"]))


def train(block: PairformerBlock, given: Example) -> list[Tensor]:
    """Outputs and gradients. Those of parameters are summed over the processes, if there are several."""
    s, z = (given[name].detach().requires_grad_() for name in ("s", "z"))
    with torch.autocast(z.device.type, torch.bfloat16):
        made = block(s, z, given["mask"], given["pairs"])
    parameters = list(block.parameters())
    ds, dz, *found = torch.autograd.grad(made, [s, z, *parameters], [given["ds"], given["dz"]])
    if isinstance(z, DTensor):
        joined = torch.cat([x.flatten() for x in found])
        dist.all_reduce(joined)
        found = [part.view_as(x) for part, x in zip(joined.split([x.numel() for x in found]), found, strict=True)]
    return [*made, ds, dz, *found]


def gathered(made: list[Tensor]) -> list[Tensor]:
    return [x.full_tensor() if isinstance(x, DTensor) else x for x in made]


def errors(block: PairformerBlock, mesh: Any, device: torch.device) -> dict[str, float]:
    """The largest relative error of outputs and gradients, of one process and of all, and the largest ratio of both."""
    block.eval()
    given = example(VERIFIED if device.type == "cuda" else 24, device)
    right = train(copy.deepcopy(block).double(), {name: x.double() for name, x in given.items()})

    def of_each(found: list[Tensor]) -> list[float]:
        # the norm's bias before a pair bias has no gradient but for rounding
        pairs = [(x, y) for x, y in zip(found, right, strict=True) if y.abs().max() > 1e-2]
        return [testing.relative_error(x, y) for x, y in pairs]

    one, several = of_each(train(block, given)), of_each(gathered(train(block, split(given, mesh))))
    ratio = max(x / (y + FLOOR) for x, y in zip(several, one, strict=True))
    return {"one": max(one), "all": max(several), "largest ratio": ratio}


@contextlib.contextmanager
def clean(device: torch.device) -> Iterator[None]:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    yield


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(call: Callable[[], object], device: torch.device, rounds: int, meet: Callable[[], object]) -> dict[str, float]:
    """Milliseconds of a call and of the host in it, and its peak memory in GiB with its inputs.

    meet: waits for the other processes.
    """
    with clean(device):
        call()
    synchronize(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    times, hosts = [], []
    for _ in range(rounds):
        synchronize(device)
        meet()
        start = time.perf_counter()
        call()
        hosts.append(time.perf_counter() - start)
        synchronize(device)
        times.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0
    return {"ms": round(1e3 * sorted(times)[rounds // 2], 3), "host_ms": round(1e3 * min(hosts), 3), "gib": round(peak, 3)}


def largest(found: dict[str, float], device: torch.device) -> dict[str, float]:
    """The largest of all processes."""
    numbers = torch.tensor(list(found.values()), dtype=torch.float64, device=device)
    dist.all_reduce(numbers, dist.ReduceOp.MAX)
    return {name: round(x, 3) for name, x in zip(found, numbers.tolist(), strict=True)}


def alone(call: Callable[[], object], device: torch.device, rounds: int) -> dict[str, float] | None:
    """What the first process measures while the others wait; None if its memory does not suffice."""
    found = {"ms": 0.0, "host_ms": 0.0, "gib": 0.0}
    if dist.get_rank() == 0:
        with contextlib.suppress(torch.OutOfMemoryError):
            found = measure(call, device, rounds, lambda: None)
    found = largest(found, device)
    return found if found["ms"] else None


def compare(block: PairformerBlock, length: int, mesh: Any, device: torch.device, rounds: int) -> Iterator[dict[str, Any]]:
    """Inference and training of one length, by one process and by all."""
    for way, call in (("inference", infer), ("training", train)):
        block.train(way == "training")
        with clean(device):
            given = example(length, device)
        one = alone(functools.partial(call, block, given), device, rounds)
        with clean(device):
            given = split(given, mesh)
        together = measure(functools.partial(call, block, given), device, rounds, dist.barrier)
        found: dict[str, Any] = {"length": length, "way": way, "one": one, "all": largest(together, device)}
        if one is not None:
            found["of_linear"] = round(one["ms"] / found["all"]["ms"] / mesh.size(), 3)
            found["memory"] = round(found["all"]["gib"] * mesh.size() / one["gib"], 3) if one["gib"] else None
        yield found


def parts(block: PairformerBlock, length: int, mesh: Any, device: torch.device, rounds: int) -> Iterator[dict[str, Any]]:
    """Each layer of the pair block alone, forward and forward with backward."""
    block.eval()
    whole = example(length, device)
    for name in LAYERS:
        layer = getattr(block.pair_stack, name)

        def run(given: Example, grad: bool, layer: Any = layer) -> Any:
            z = given["z"].detach().requires_grad_(grad)
            with torch.set_grad_enabled(grad), torch.autocast(device.type, torch.bfloat16):
                made = layer(z) if layer is block.pair_stack.pair_transition else layer(z, given["pairs"])
            return torch.autograd.grad(made, [z, *layer.parameters()], given["dz"]) if grad else made

        for grad in (False, True):
            one = alone(functools.partial(run, whole, grad), device, rounds)
            together = measure(functools.partial(run, split(whole, mesh), grad), device, rounds, dist.barrier)
            yield {"layer": name, "length": length, "backward": grad, "one": one, "all": largest(together, device)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", nargs="+", type=int, default=[512, 1024, 2048, 3072], help="residues")
    parser.add_argument("--parts", nargs="*", type=int, default=[], help="residues at which each layer is measured alone too")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="where the record goes")
    parser.add_argument("--commit", help="what to record as the commit where git cannot tell")
    options = parser.parse_args()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    first, block = dist.get_rank() == 0, block_of(device)
    record: dict[str, Any] = {"machine": machine.facts(device, options.commit), "processes": mesh.size()}

    def note(key: str, found: dict[str, Any]) -> None:
        record.setdefault(key, []).append(found)
        if first:
            print(key, json.dumps(found), flush=True)
            if options.json is not None:
                write_text(json.dumps(record, indent=1) + "\n", options.json)

    note("errors", errors(block, mesh, device))
    for length in options.lengths:
        for found in compare(block, length, mesh, device, options.rounds):
            note("times", found)
    for length in options.parts:
        for found in parts(block, length, mesh, device, options.rounds):
            note("parts", found)
    dist.destroy_process_group()
    return int(not record["errors"][0]["largest ratio"] <= ALLOWED)


if __name__ == "__main__":
    sys.exit(main())
