"""Functions that run in several processes at once, joined by gloo: for DTensors and for layers that are split."""

import pathlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessContext, start_processes

from tests.helpers.processes import METHOD, server

__all__ = ["results", "start"]


def start(work: Callable[..., object], folder: pathlib.Path, *arguments: object, processes: int = 4) -> ProcessContext:
    """Start processes that each call `work(*arguments)`, a function of a module, and end with a barrier.

    Args:
        work: what each of them calls.
        folder: an empty one, where they meet and keep what `work` returns.
        arguments: those of `work`.
        processes: their number.
    """
    server()
    to_join = (work, str(folder), processes, arguments)
    return start_processes(_join, to_join, nprocs=processes, join=False, start_method=METHOD)  # type: ignore[no-any-return]


def results(work: Callable[..., object], folder: pathlib.Path, *arguments: object, processes: int = 4) -> list[Any]:
    """Return what `work(*arguments)` returns in each of several processes, by rank."""
    started = start(work, folder, *arguments, processes=processes)
    while not started.join():
        pass
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(processes)]


def _join(rank: int, work: Callable[..., object], folder: str, processes: int, arguments: tuple[object, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=processes)
    torch.save(work(*arguments), f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
