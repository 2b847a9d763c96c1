"""A PairformerBlock of Boltz-2's size over several processes, beside the same block on one: error, time, host time, memory.

z is float32 under autocast to bfloat16 and split by rows. The first process runs the block alone, while the others wait. Then
all run it together. Inference is a forward without gradients. A training step is a forward with dropout, a backward for s, z
and all parameters, and one sum of the parameters' gradients over the processes.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from evoattn import testing
from evoattn.bench.layers import fill
from evoattn.bench.machine import synchronize
from evoattn.bench.memory import release
from evoattn.bench.timing import captured
from evoattn.nn import PairformerBlock

__all__ = ["ALLOWED", "Job", "Plan", "errors", "measure"]

C_S, C_Z = 384, 128
VERIFIED = {"cuda": 256, "cpu": 24}
"""Residues at which outputs and gradients are compared with float64."""

ALLOWED, FLOOR = 1.5, 1e-4
"""So many times the error of one process plus a floor may each output and gradient be off: sums have another order."""

WARM_UP = 2
"""Calls before the first that counts. The first compiles; the second finds the memory that the first gave back."""

LAYERS = ("tri_mul_out", "tri_mul_in", "tri_att_start", "tri_att_end", "pair_transition")

Example = dict[str, Tensor]
Numbers = dict[str, float]


class Job(NamedTuple):
    """One measurement.

    Args:
        length: residues.
        layer: a layer of the pair block, or "" for the whole block.
        way: "inference", "graph" (inference replayed as a CUDA graph) or "training".
    """

    length: int
    layer: str
    way: str


class Plan(NamedTuple):
    """The measurements of a run.

    Args:
        processes: how many share the block.
        device: "cuda", a GPU for each process, or "cpu".
        lengths: residues.
        rounds: of timing.
        parts: whether each layer of the pair block is measured alone too.
    """

    processes: int
    device: str
    lengths: tuple[int, ...]
    rounds: int
    parts: bool = False

    @property
    def jobs(self) -> list[Job]:
        """The measurements in their order."""
        layers = ("", *(LAYERS if self.parts else ()))
        ways = ("inference", "graph", "training") if self.device == "cuda" else ("inference", "training")
        return [Job(length, layer, way) for length in self.lengths for layer in layers for way in ways]


def block_of(device: torch.device) -> PairformerBlock:
    """The same parameters on all processes."""
    block = PairformerBlock(C_S, C_Z).to(device)
    fill(block, torch.Generator(device).manual_seed(0))
    return block


def example(length: int, device: torch.device) -> Example:
    """The same numbers on all processes. The last residues are padding."""
    rng = torch.Generator(device).manual_seed(length)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng, dtype=torch.float32, device=device)

    mask = (torch.arange(length, device=device) < length - length // 20).float()[None]
    pairs = mask[:, :, None] * mask[:, None, :]
    s, ds, z, dz = (draw(1, length, *shape) for shape in ((C_S,), (C_S,), (length, C_Z), (length, C_Z)))
    return {"s": s, "z": z, "mask": mask, "pairs": pairs, "ds": ds, "dz": dz}


def split(given: Example, mesh: DeviceMesh) -> Example:
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
    """The outputs."""
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


def run_layer(layer: nn.Module, masked: bool, grad: bool, given: Example) -> object:
    """A layer of the pair block alone: its output, or its gradients."""
    z = given["z"].detach().requires_grad_(grad)
    with torch.set_grad_enabled(grad), torch.autocast(z.device.type, torch.bfloat16):
        made = layer(z, given["pairs"]) if masked else layer(z)
    return torch.autograd.grad(made, [z, *layer.parameters()], given["dz"]) if grad else made


def errors(block: PairformerBlock, mesh: DeviceMesh, device: torch.device) -> Numbers:
    """The largest relative error of outputs and gradients, of one process and of all, and the largest ratio of both."""
    block.eval()
    given = example(VERIFIED[device.type], device)
    right = train(copy.deepcopy(block).double(), {name: x.double() for name, x in given.items()})

    def of_each(found: list[Tensor]) -> list[float]:
        # the norm's bias before a pair bias has no gradient but for rounding
        pairs = [(x, y) for x, y in zip(found, right, strict=True) if y.abs().max() > 1e-2]
        return [testing.relative_error(x, y) for x, y in pairs]

    together = [x.full_tensor() if isinstance(x, DTensor) else x for x in train(block, split(given, mesh))]
    one, several = of_each(train(block, given)), of_each(together)
    ratio = max(x / (y + FLOOR) for x, y in zip(several, one, strict=True))
    return {"residues": VERIFIED[device.type], "one": max(one), "all": max(several), "largest ratio": ratio}


def _time(
    call: Callable[[int], object], device: torch.device, rounds: int, meet: Callable[[], object], *, graph: bool = False
) -> Numbers:
    """Milliseconds of a call, those of its host, and the peak memory in GiB with inputs and parameters.

    The time is the median of the rounds. The host's is the least: until a call into an empty queue returns, without a wait for
    the device.

    Args:
        call: what is measured.
        device: where it runs.
        rounds: calls that count.
        meet: waits for the other processes.
        graph: whether the call is recorded as a CUDA graph first.
    """
    release(device)
    for number in range(WARM_UP):
        call(number)
    synchronize(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    if graph:
        meet()
        synchronize(device)
        call, _kept = captured(call, warm_up=0, mode="thread_local")  # NCCL's thread may use the device meanwhile
    times, hosts = [], []
    for number in range(rounds):
        synchronize(device)
        meet()
        start = time.perf_counter()
        call(number)
        hosts.append(time.perf_counter() - start)
        synchronize(device)
        times.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0
    return {"ms": 1e3 * sorted(times)[rounds // 2], "host_ms": 1e3 * min(hosts), "gib": peak}


def _of(call: Callable[[Example], object], given: Example) -> Callable[[int], object]:
    return lambda number: call(given)


def _largest(found: Numbers, device: torch.device) -> Numbers:
    """The largest of all processes."""
    numbers = torch.tensor(list(found.values()), dtype=torch.float64, device=device)
    dist.all_reduce(numbers, dist.ReduceOp.MAX)
    return {name: round(x, 3) for name, x in zip(found, numbers.tolist(), strict=True)}


def _alone(call: Callable[[int], object], device: torch.device, rounds: int, *, graph: bool) -> Numbers | None:
    """Measure on the first process while the others wait; None if its memory does not suffice."""
    found = {"ms": 0.0, "host_ms": 0.0, "gib": 0.0}
    if dist.get_rank() == 0:
        with contextlib.suppress(torch.OutOfMemoryError):
            found = _time(call, device, rounds, lambda: None, graph=graph)
    found = _largest(found, device)
    return found if found["ms"] else None


def measure(plan: Plan, block: PairformerBlock, mesh: DeviceMesh, device: torch.device) -> Iterator[dict[str, Any]]:
    """Give the numbers of each job of a plan, by one process and by all. All processes call this."""
    for length, layer, way in plan.jobs:
        call: Callable[[Example], object]
        if layer:
            block.eval()
            module = getattr(block.pair_stack, layer)
            call = functools.partial(run_layer, module, layer != "pair_transition", way == "training")
        else:
            block.train(way == "training")
            call = functools.partial(train if way == "training" else infer, block)
        release(device)
        given = example(length, device)
        graph = way == "graph"
        one = _alone(_of(call, given), device, plan.rounds, graph=graph)
        given = split(given, mesh)
        together = _largest(_time(_of(call, given), device, plan.rounds, dist.barrier, graph=graph), device)
        found: dict[str, Any] = {"length": length, "way": way, "one": one, "all": together}
        if layer:
            found["layer"] = layer
        yield found
