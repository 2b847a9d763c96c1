"""Work on the CPU that several threads share: each takes a piece, does all of it alone, and takes the next.

A torch operation on the CPU is done by several threads that meet at its end, and the slowest of them decides. Where other
processes want the cores too, a pass of hundreds of operations waits hundreds of times. Threads that do whole pieces meet once,
at the end of the pass.

Each of these threads does its operations alone. OpenMP's number of threads counts for the thread that sets it, and so does
MKL's own. `torch.set_num_threads` would not do: every thread of the process that starts later would begin with what it set.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import ctypes
import functools
import os
import pathlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch

Piece = TypeVar("Piece")

_pools: dict[int, concurrent.futures.ThreadPoolExecutor] = {}
_lock = threading.Lock()
_least_normal = sys.float_info.min


def available() -> int:
    """Return how many threads may share work: as many as torch has in this thread, or 1 if they cannot be limited."""
    threads = torch.get_num_threads()
    return threads if threads > 1 and can_be_limited() else 1


@contextlib.contextmanager
def single_threaded(threads: int) -> Iterator[None]:
    """Run this thread's operations alone in this block, if `threads` share work; restore its threads afterwards.

    OpenMP's threads spin for milliseconds after a parallel region, and so take the cores. No operation just before shared work
    may start one.
    """
    if threads <= 1:
        yield
        return
    before = torch.get_num_threads()
    mkl_before = _limit_to(1, 1)
    try:
        yield
    finally:
        _limit_to(before, mkl_before)


def share(pieces: Sequence[Piece], worker: Callable[[Iterator[Piece]], None], threads: int) -> None:
    """Have every piece done once, by so many threads, of which this is one, and wait for all of them.

    Args:
        pieces: what there is to do. They are begun in this order.
        worker: does the pieces that it is given, one after another. It is called once in each thread, without gradients.
        threads: with more than 1, call this inside `single_threaded`.

    Raises:
        What a worker raised, when all have stopped. No piece is begun after that.
    """
    left = collections.deque(pieces)
    inference, flushes = torch.is_inference_mode_enabled(), _flushes_denormals()
    others = [_pool(threads - 1).submit(_work, worker, left, inference, flushes) for _ in range(threads - 1)]
    try:
        _work(worker, left, inference, flushes)
        for other in others:
            other.result()
    finally:  # after an error, or Ctrl-C, too: they write to memory that is the caller's
        left.clear()
        concurrent.futures.wait(others)


def _work(worker: Callable[[Iterator[Piece]], None], left: collections.deque[Piece], inference: bool, flushes: bool) -> None:
    """Do pieces in the caller's inference mode, and with its `torch.set_flush_denormal`.

    The latter belongs to a thread. A thread of a pool has the one of whoever called when it started.
    """
    if _flushes_denormals() != flushes:
        torch.set_flush_denormal(flushes)
    try:
        with torch.inference_mode(inference), torch.no_grad():
            worker(_pieces(left))
    except BaseException:
        left.clear()  # the others begin nothing more
        raise


def _flushes_denormals() -> bool:
    """Return whether this thread flushes denormal numbers to 0. torch does not tell, so half the least normal number does."""
    return _least_normal * 0.5 == 0.0


def _pieces(left: collections.deque[Piece]) -> Iterator[Piece]:
    """Yield pieces that no other thread gets, until there are none."""
    with contextlib.suppress(IndexError):
        while True:
            yield left.popleft()


def _pool(threads: int) -> concurrent.futures.ThreadPoolExecutor:
    """Threads that wait for work, each limited to itself."""
    with _lock:
        if threads not in _pools:
            _pools[threads] = concurrent.futures.ThreadPoolExecutor(threads, "evoattn", initializer=_limit)
        return _pools[threads]


def _forget() -> None:
    """A forked process has no threads but the one that forked, and perhaps a lock that another one holds."""
    global _lock
    _lock = threading.Lock()
    _pools.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def _limit() -> bool:
    """Have this thread do its operations alone from now on; whether torch agrees that it does."""
    torch.get_num_threads()  # otherwise torch would set the number at the first operation
    if None in libraries():
        return False
    _limit_to(1, 1)
    return torch.get_num_threads() == 1


def _limit_to(openmp: int, mkl: int) -> int:
    """Set this thread's numbers of threads; MKL's that was before, of which 0 means that it has none of its own."""
    set_openmp, set_mkl = libraries()
    if set_openmp is None or set_mkl is None:
        raise RuntimeError("the libraries that torch uses here cannot limit a thread")
    set_openmp(openmp)
    return set_mkl(mkl)


@functools.cache
def can_be_limited() -> bool:
    """Tried once, in a thread that ends."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(_limit).result()


@functools.cache
def libraries() -> tuple[Callable[[int], int] | None, Callable[[int], int] | None]:
    """omp_set_num_threads and MKL_Set_Num_Threads_Local of the libraries that torch uses."""
    if not torch.backends.mkl.is_available():
        return None, None
    inside = next(pathlib.Path(torch.__file__).parent.glob("lib/libtorch_cpu.*"), None)
    return _function("omp_set_num_threads", None), _function("MKL_Set_Num_Threads_Local", inside) or _function(
        "MKL_Set_Num_Threads_Local", None
    )


def _function(name: str, library: pathlib.Path | None) -> Callable[[int], int] | None:
    """A function of a library, or of what the process has loaded for all; None if it is not there."""
    try:
        found: Callable[[int], int] = getattr(ctypes.CDLL(None if library is None else str(library)), name)
    except (AttributeError, OSError, TypeError):
        return None
    return found
