"""Starts the processes of a sharded block on this machine, and collects what the first of them finds."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
from collections.abc import Generator, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch exports it without saying so
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.spawn import ProcessContext, ProcessExitedException, ProcessRaisedException, start_processes

from evoattn.bench import machine, sharded
from evoattn.testing.workers import without_ctrl_c

__all__ = ["ProcessDiedError", "run", "work"]

_HOST = "127.0.0.1"

Found = tuple[str, dict[str, Any]]
"""The key of a record and what belongs there."""


class ProcessDiedError(RuntimeError):
    """A process of the benchmark ended before its work was done; the message is one line."""


def run(plan: sharded.Plan, commit: str | None = None) -> Generator[Found, None, None]:
    """Start the processes and give what they find: "machine", "errors", and "times" for each job.

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
    with without_ctrl_c():
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


def _received(context: ProcessContext, receiver: Connection) -> Iterator[Found]:
    """Give what arrives until all processes have ended."""
    ended = False
    while not ended:
        wait([receiver, *context.sentinels])
        with contextlib.suppress(EOFError):
            while receiver.poll():
                yield receiver.recv()
        ended = context.join(timeout=0.1)


def work(rank: int, plan: sharded.Plan, commit: str | None, port: int, sender: Connection) -> None:
    """The life of a process. The first one sends what is found."""
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

    def send(key: str, found: dict[str, Any]) -> None:
        if rank == 0:
            sender.send((key, found))

    send("machine", machine.facts(device, commit))
    block = sharded.block_of(device)
    send("errors", sharded.errors(block, mesh, device))
    for found in sharded.measure(plan, block, mesh, device):
        send("times", found)
    dist.destroy_process_group()
