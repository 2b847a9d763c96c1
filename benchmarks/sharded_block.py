"""A PairformerBlock of Boltz-2's size over several processes, beside the same block on one: error, time, host time, memory.

`run` starts the processes on this machine, and yields the results of the first as parts of a `Record`.

z is float32 under autocast to bfloat16 and split by rows. The first process runs the block alone, while the others wait. Then
all run it together. Inference is a forward without gradients. A training step is a forward with dropout, a backward for s, z
and all parameters, and one sum of the parameters' gradients over the processes.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import logging
import math
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from cuda_graphs import captured
from layer_ways import fill
from sharded_table import BLOCK, ON_ONE, VERIFIED, WAYS
from torch import Tensor, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch exports it without saying so
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.multiprocessing.spawn import ProcessContext, ProcessExitedException, ProcessRaisedException, start_processes

from evoattn import testing
from evoattn.bench import machine
from evoattn.bench.memory import release
from evoattn.bench.record import Problem, Result, Timing
from evoattn.nn import PairformerBlock
from evoattn.workloads import workload

C_S, C_Z = 384, 128
VERIFIED_AT = {"cuda": 256, "cpu": 24}
"""Residues at which outputs and gradients are compared with float64."""

ALLOWED, FLOOR = 1.5, 1e-4
"""Each output and gradient may have this multiple of the error of one process, plus a floor: sums have another order."""

WARM_UP = 2
"""Calls before the first that counts. The first compiles; the second finds the memory that the first gave back."""

LAYERS = ("tri_mul_out", "tri_mul_in", "tri_att_start", "tri_att_end", "pair_transition")

_HOST = "127.0.0.1"

Example = dict[str, Tensor]


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


def example(length: int, device: torch.device) -> Example:
    """The same numbers on all processes. The last residues are padding."""
    rng = torch.Generator(device).manual_seed(length)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng, dtype=torch.float32, device=device)

    mask = (torch.arange(length, device=device) < length - length // 20).float()[None]
    pairs = mask[:, :, None] * mask[:, None, :]
    s, ds, z, dz = (draw(1, length, *shape) for shape in ((C_S,), (C_S,), (length, C_Z), (length, C_Z)))
    return {"s": s, "z": z, "mask": mask, "pairs": pairs, "ds": ds, "dz": dz}


def split(inputs: Example, mesh: DeviceMesh) -> Example:
    """The rows of this process, as copies: the full tensors may then be freed."""
    rank, count = mesh.get_local_rank(), mesh.size()
    shards: Example = {}
    for name, x in inputs.items():
        size = -(-x.shape[1] // count)
        part = x[:, rank * size : (rank + 1) * size].clone()
        strides = x.contiguous().stride()
        shards[name] = DTensor.from_local(part, mesh, [Shard(1)], run_check=False, shape=x.shape, stride=strides)
    return shards


def infer(block: PairformerBlock, inputs: Example) -> list[Tensor]:
    """The outputs."""
    with torch.no_grad(), torch.autocast(inputs["z"].device.type, torch.bfloat16):
        return list(block(inputs["s"], inputs["z"], inputs["mask"], inputs["pairs"]))


def train(block: PairformerBlock, inputs: Example) -> list[Tensor]:
    """Outputs and gradients. Those of parameters are summed over the processes, if there are several."""
    s, z = (inputs[name].detach().requires_grad_() for name in ("s", "z"))
    with torch.autocast(z.device.type, torch.bfloat16):
        outputs = block(s, z, inputs["mask"], inputs["pairs"])
    ds, dz, *gradients = torch.autograd.grad(outputs, [s, z, *block.parameters()], [inputs["ds"], inputs["dz"]])
    if isinstance(z, DTensor):
        joined = torch.cat([x.flatten() for x in gradients])
        dist.all_reduce(joined)
        parts = joined.split([x.numel() for x in gradients])
        gradients = [part.view_as(x) for part, x in zip(parts, gradients, strict=True)]
    return [*outputs, ds, dz, *gradients]


def run_layer(layer: nn.Module, masked: bool, grad: bool, inputs: Example) -> object:
    """A layer of the pair block alone: its output, or its gradients."""
    z = inputs["z"].detach().requires_grad_(grad)
    with torch.set_grad_enabled(grad), torch.autocast(z.device.type, torch.bfloat16):
        output = layer(z, inputs["pairs"]) if masked else layer(z)
    return torch.autograd.grad(output, [z, *layer.parameters()], inputs["dz"]) if grad else output


def problem(length: int, layer: str, *results: Result) -> Problem:
    """A block of the size of Boltz-2's, or a layer of it, at a length, with what was measured."""
    named = {"name": f"{layer or 'block'}{length}", "where": "Boltz-2 PairformerBlock", "layer": layer or BLOCK}
    sizes = dataclasses.replace(workload(f"tri{length}"), **named, channels=C_Z)  # type: ignore[arg-type]
    return Problem(sizes, "bfloat16", None, [*results])


def errors(block: PairformerBlock, mesh: DeviceMesh, device: torch.device) -> Problem:
    """The largest relative error of outputs and gradients, of one process and of all, and the largest ratio of both."""
    block.eval()
    inputs = example(VERIFIED_AT[device.type], device)
    right = train(copy.deepcopy(block).double(), {name: x.double() for name, x in inputs.items()})

    def relative(values: list[Tensor]) -> list[float]:
        # the norm's bias before a pair bias has no gradient but for rounding
        pairs = [(x, y) for x, y in zip(values, right, strict=True) if y.abs().max() > 1e-2]
        return [testing.relative_error(x, y) for x, y in pairs]

    gathered = [x.full_tensor() if isinstance(x, DTensor) else x for x in train(block, split(inputs, mesh))]
    one, several = relative(train(block, inputs)), relative(gathered)
    ratios = [x / (y + FLOOR) if x < math.inf else x for x, y in zip(several, one, strict=True)]
    on_one = Result(VERIFIED + ON_ONE, errors={"largest": max(one)})
    on_all = Result(VERIFIED, errors={"largest": max(several), "largest ratio": max(ratios)})
    return problem(VERIFIED_AT[device.type], "", on_one, on_all)


def _time(
    call: Callable[[int], object], device: torch.device, rounds: int, meet: Callable[[], object], *, graph: bool = False
) -> tuple[float, float, float]:
    """Milliseconds of a call, microseconds of its host, and the peak memory in bytes with inputs and parameters.

    The time is the median of the rounds. The host's is the least: until a call into an empty queue returns, without a wait for
    the device. `meet` waits for the other processes. A `graph` is recorded first.
    """
    release(device)
    for number in range(WARM_UP):
        call(number)
    machine.synchronize(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    if graph:
        meet()
        machine.synchronize(device)
        call, _ = captured(call, warm_up=0, mode="thread_local")  # NCCL's thread may use the device meanwhile
    hosts, times = [], []
    for number in range(rounds):
        machine.synchronize(device)
        meet()
        start = time.perf_counter()
        call(number)
        hosts.append(time.perf_counter() - start)
        machine.synchronize(device)
        times.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0.0
    return 1e3 * sorted(times)[rounds // 2], 1e6 * min(hosts), peak


def _result(name: str, measured: str, numbers: Sequence[float], device: torch.device) -> Result:
    """The result of a pass from the largest numbers of all processes; without a time if it does not fit into memory."""
    values = torch.tensor(numbers, dtype=torch.float64, device=device)
    dist.all_reduce(values, dist.ReduceOp.MAX)
    ms, host_us, peak = (round(x, 3) for x in values.tolist())
    if not ms:
        return Result(name, "left out", "does not fit")
    return Result(name, peak_bytes=int(peak) or None, host_us={measured: host_us}, times={measured: Timing((ms,))})


def measure(plan: Plan, job: Job, block: PairformerBlock, mesh: DeviceMesh, device: torch.device) -> Problem:
    """Measure a job by one process, then by all. All processes call this."""
    grad, graph = job.way == "training", job.way == "graph"
    block.train(grad and not job.layer)
    call: Callable[[Example], object] = functools.partial(train if grad else infer, block)
    if job.layer:
        call = functools.partial(run_layer, getattr(block.pair_stack, job.layer), job.layer != "pair_transition", grad)
    release(device)
    inputs, numbers = example(job.length, device), (0.0, 0.0, 0.0)
    if dist.get_rank() == 0:  # the others wait
        with contextlib.suppress(torch.OutOfMemoryError):
            numbers = _time(lambda _: call(inputs), device, plan.rounds, lambda: None, graph=graph)
    name, measured = f"evoattn/{job.way}", WAYS[job.way][0]
    one = _result(name + ON_ONE, measured, numbers, device)
    inputs = split(inputs, mesh)
    numbers = _time(lambda _: call(inputs), device, plan.rounds, dist.barrier, graph=graph)
    return problem(job.length, job.layer, one, _result(name, measured, numbers, device))


class ProcessDiedError(RuntimeError):
    """A process of the benchmark ended before its work was done; the message is one line."""


def run(plan: Plan, commit: str | None = None) -> Generator[dict[str, Any] | Problem, None, None]:
    """Start the processes, and give the parts of a record: the machine's facts, the errors, and the results of each job.

    They end with the iterator. Close it to end them earlier.

    Args:
        plan: what is measured.
        commit: what to record as the commit if git cannot tell.

    Raises:
        ProcessDiedError: a process died. The others are ended.
    """
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)  # a line for each process that it ends
    store = TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)  # a free port, kept by this process
    receiver, sender = multiprocessing.get_context("spawn").Pipe(duplex=False)
    with _without_ctrl_c():
        context = start_processes(
            work, (plan, commit, store.port, sender), nprocs=plan.processes, join=False, start_method="spawn"
        )
    sender.close()
    try:
        yield from _received(context, receiver)
    except ProcessRaisedException as error:
        what = str(error).strip().splitlines()[-1]
        raise ProcessDiedError(f"process {error.error_index + 1} of {plan.processes} failed: {what}") from None
    except ProcessExitedException as error:
        how = f"by signal {error.signal_name}" if error.signal_name else f"with exit status {error.exit_code}"
        raise ProcessDiedError(f"process {error.error_index + 1} of {plan.processes} ended {how}") from None
    finally:
        for process in context.processes:
            process.kill()
        for process in context.processes:
            process.join()
        receiver.close()


@contextlib.contextmanager
def _without_ctrl_c() -> Iterator[None]:
    """Keep Ctrl-C from a process that is started meanwhile, even before it runs its first line. This one sees it after."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _received(context: ProcessContext, receiver: Connection) -> Iterator[Any]:
    """Yield what arrives until all processes have ended."""
    ended = False
    while not ended:
        wait([receiver, *context.sentinels])
        with contextlib.suppress(EOFError):
            while receiver.poll():
                yield receiver.recv()
        ended = context.join(timeout=0.1)


def work(rank: int, plan: Plan, commit: str | None, port: int, sender: Connection) -> None:
    """The life of a process. The first one sends the parts of the record."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C, or the parent is gone: end without a traceback
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(plan.processes)}  # processes share the cores
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // plan.processes))
    on_gpu = plan.device == "cuda"
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=TCPStore(_HOST, port),
        rank=rank,
        world_size=plan.processes,
        device_id=device if on_gpu else None,
    )
    mesh = init_device_mesh(device.type, (plan.processes,))

    def send(part: dict[str, Any] | Problem) -> None:
        if rank == 0:
            sender.send(part)

    send(machine.facts(device, commit))
    block = PairformerBlock(C_S, C_Z).to(device)
    fill(block, torch.Generator(device).manual_seed(0))  # the same parameters on all processes
    send(errors(block, mesh, device))
    for job in plan.jobs:
        send(measure(plan, job, block, mesh, device))
    dist.destroy_process_group()
