"""What goes wrong around a call leaves the process able to go on: no memory, and a fork."""

import contextlib
import functools
import itertools
import os
import platform
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import evoattn
from evoattn import testing
from evoattn.backends import reference
from tests.helpers.seams import forget

SMALL = testing.Case("small", n=2, h=2, lq=7, lk=9, d=8, mask="random", mask_bias="finite", pair_bias="b1hqk")
LARGE = testing.Case("large", n=3, h=2, lq=40, lk=50, d=16, mask_bias="finite", pair_bias="b1hqk", lse_gradient=True)
SEVERAL_BLOCKS = evoattn.Config(block_q=16, block_k=16)
ON_THE_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


class NoMemory(TorchDispatchMode):
    """torch has no memory for the result of one of its operations, from the first on counted."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.left = at

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "aten":
            self.left -= 1
            if self.left == 0:
                raise torch.OutOfMemoryError("no memory")
        if function.namespace == "evoattn":  # what it does itself is counted as well
            with self:
                return function.redispatch(ON_THE_CPU, *args, **kwargs or {})
        return function(*args, **kwargs or {})


@functools.cache
def right(case: testing.Case, backend: str) -> dict[str, torch.Tensor]:
    """The results of a case, held to the float64 oracle."""
    inputs = case.make(seed=1)
    results = testing.run(inputs, backend)
    testing.check(results, inputs)
    return results.values


def run(case: testing.Case, backend: str) -> None:
    """A call whose results are right."""
    for name, value in testing.run(case.make(seed=1), backend).values.items():
        torch.testing.assert_close(value, right(case, backend)[name])


@pytest.mark.parametrize("backend", ["tiled", "reference"])
def test_no_memory_at_any_operation(backend: str) -> None:
    """Of a forward and of a backward, by the operators."""
    inputs = LARGE.make(seed=1)
    right(SMALL, backend), right(LARGE, backend)
    config = SEVERAL_BLOCKS if backend == "tiled" else None
    failed = 0
    for at in itertools.count(1, 3 if backend == "reference" else 61):
        forget()
        try:
            with NoMemory(at):
                testing.run(inputs, backend, config=config)
        except torch.OutOfMemoryError:
            failed += 1
            run(SMALL, backend)
            if failed % 5 == 0:
                run(LARGE, backend)
        else:
            break
    assert failed > 15
    run(LARGE, backend)


ALLOCATORS = ("empty", "empty_strided", "matmul", "exp")
"""Functions of torch that make memory somewhere in the check, the plan or the run of a call that goes the short way."""


@pytest.mark.parametrize("name", ALLOCATORS)
def test_no_memory_on_the_short_way(name: str, plans: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a call is planned, while it runs, and when it is known: nothing that is half made is kept."""
    function = getattr(torch, name)
    inputs = LARGE.make(seed=1)
    failed = 0
    for known, at in itertools.product((False, True), range(1, 8)):
        forget()
        if known:
            testing.run(inputs, "reference")
        left = at

        def fail(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                raise torch.OutOfMemoryError("no memory")
            return function(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(torch, name, fail)
            with contextlib.suppress(torch.OutOfMemoryError):
                testing.run(inputs, "reference")
        if left > 0:  # it is not called so often
            continue
        failed += 1
        run(SMALL, "reference")
        run(LARGE, "reference")
    assert failed


@pytest.mark.parametrize("planned", ["plan_forward", "plan_backward"])
def test_no_memory_while_a_call_is_planned(planned: str, plans: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan itself has no memory: the next call plans again, and takes the plan and not the operator's other way."""

    def fail(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    inputs = LARGE.make(seed=1)
    with monkeypatch.context() as patch:
        patch.setattr(reference, planned, fail)
        for _ in range(2):
            with pytest.raises(torch.OutOfMemoryError):
                testing.run(inputs, "reference")
    run(SMALL, "reference")
    run(LARGE, "reference")


REAL = """
import resource, torch, evoattn
from evoattn import testing

def small():
    inputs = testing.Case("small", n=4, h=2, lq=40, lk=40, d=16, mask="random", pair_bias="b1hqk").make(seed=1)
    testing.check(testing.run(inputs, backend), inputs)

def used():
    return int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()

torch.set_num_threads(1)
for backend in ("tiled", "reference"):
    small()
    large = testing.Case("large", n=16, h=4, lq=256, lk=256, d=32, mask="random", pair_bias="b1hqk").make(seed=2)
    expected = testing.run(large, backend).values
    failed = 0
    for room in range(0, 400, 8):
        resource.setrlimit(resource.RLIMIT_AS, (used() + room * 2**20, -1))
        try:
            testing.run(large, backend)
        except RuntimeError as error:
            assert "memory" in str(error), error
            failed += 1
        else:
            break
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
        if failed % 4 == 1:
            small()
    assert failed > 2, failed
    for name, value in testing.run(large, backend).values.items():
        assert torch.equal(value, expected[name]), name
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc is told to give freed memory back")
def test_a_process_that_is_out_of_memory_goes_on() -> None:
    """The real thing: the system gives no more memory, a little later each time."""
    returned = {
        **os.environ,
        "MALLOC_MMAP_THRESHOLD_": "100000",
        "MALLOC_ARENA_MAX": "1",
    }  # freed memory goes back to the system
    done = subprocess.run([sys.executable, "-c", REAL], capture_output=True, text=True, check=False, timeout=120, env=returned)
    assert done.returncode == 0, done.stderr


def in_child(work: Callable[[], object]) -> None:
    """Do some work in a forked process, which has 20 s for it."""
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            work()
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
            os._exit(1)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert status == 0, f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else "the child raised"


# These tests have one thread. It is torch's own limit: OpenMP hangs in a child whose parent used several.
forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")


@forks
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("backend", ["tiled", "reference"])
def test_a_fork_after_the_first_call(backend: str, one_thread: None) -> None:
    """Known calls and new ones, both passes."""
    run(SMALL, backend)
    in_child(lambda: (run(SMALL, backend), run(LARGE, backend)))
    run(LARGE, backend)


@forks
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_after_a_call_on_the_short_way(plans: None, one_thread: None) -> None:
    run(SMALL, "reference")
    in_child(lambda: (run(SMALL, "reference"), run(LARGE, "reference")))


@forks
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_while_other_threads_call(one_thread: None) -> None:
    """No lock of ours is held in the child by a thread that is not there."""
    stop = threading.Event()

    def call() -> None:
        while not stop.is_set():
            forget()
            testing.run(SMALL.make(seed=1), "tiled")

    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(3):
            in_child(lambda: run(SMALL, "tiled"))
    finally:
        stop.set()
        for thread in threads:
            thread.join()


class Examples(torch.utils.data.Dataset):
    """Each example is a forward and a backward."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return testing.run(LARGE.make(seed=index), "tiled").values["dq"]


@forks
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_workers_of_a_data_loader() -> None:
    """torch gives them one thread each, so the parent may have several."""
    expected = [Examples()[i] for i in range(4)]
    loader = torch.utils.data.DataLoader(Examples(), batch_size=None, num_workers=2, multiprocessing_context="fork", timeout=30)
    for actual, right in zip(loader, expected, strict=True):
        torch.testing.assert_close(actual, right)


FIRST_CALL = """
import os, torch, evoattn

def fail(*_, **__):
    os.write(2, b"a forward has run a backward")
    os._exit(1)  # an exception would end its thread alone

q = torch.randn(1, 2, 5, 2, 8, requires_grad=True)
entries = torch.autograd.backward, torch.autograd.grad
torch.autograd.backward = torch.autograd.grad = fail
o = evoattn.evoformer_attention(q, q, q)
torch.autograd.backward, torch.autograd.grad = entries
o.sum().backward()
assert not torch.cuda.is_initialized()
"""


def test_a_forward_starts_nothing_that_does_not_survive_a_fork() -> None:
    """On a machine with a GPU the first backward of a process starts a thread for each GPU, even one on the CPU."""
    done = subprocess.run([sys.executable, "-c", FIRST_CALL], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
