"""What goes wrong around the kernels on a GPU leaves the process able to go on: no memory, a fork, many threads at once.

python -m pytest -m gpu tests/dispatch/test_faults_gpu.py
"""

import concurrent.futures
import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import torch

import evoattn
from evoattn import testing
from tests.helpers import seams

STATUS = {status.name: status for status in evoattn.backends()}

pytestmark = pytest.mark.gpu


@pytest.fixture(params=["triton", "hopper"])
def backend(request: pytest.FixtureRequest) -> str:
    status = STATUS[request.param]
    if not status.available:
        pytest.skip(status.reason)
    return status.name


SMALL = testing.Case("small", n=8, h=2, lq=100, lk=90, d=32, dtype=torch.bfloat16, mask="random", pair_bias="b1hqk")
LARGE = testing.Case(
    "large", n=256, h=4, lq=768, lk=768, d=32, dtype=torch.bfloat16, mask="random", mask_bias="finite", pair_bias="b1hqk"
)
"""Its tensors have 50 MB each: torch asks the driver for each of them, so a limit in small steps fails each in turn."""

STEP = 16 << 20


@pytest.fixture
def limit() -> Iterator[None]:
    """A limit of this process' memory, which the test sets, is lifted at the end."""
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


def values(inputs: testing.CaseInputs, backend: str) -> dict[str, torch.Tensor]:
    return testing.run(inputs, backend, deterministic=True).values


def same(inputs: testing.CaseInputs, backend: str, expected: dict[str, torch.Tensor]) -> None:
    for name, value in values(inputs, backend).items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("planned", [True, False], ids=["known", "new"])
def test_out_of_memory_in_the_middle_of_a_call(backend: str, planned: bool, limit: None) -> None:
    """At each allocation of a forward and of a backward in turn. A smaller call then is right, and so is the same one later."""
    total = torch.cuda.get_device_properties().total_memory
    small, large = SMALL.make(seed=1, device="cuda"), LARGE.make(seed=2, device="cuda")
    testing.check(testing.run(small, backend, deterministic=True), small)
    of_small, of_large = values(small, backend), values(large, backend)
    failed = 0
    for step in range(200):
        if not planned:
            seams.forget()
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + step * STEP) / total)
        try:
            values(large, backend)
        except torch.OutOfMemoryError:
            failed += 1
        else:
            break
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        same(small, backend, of_small)
        if failed % 5 == 1:
            same(large, backend, of_large)
    else:
        pytest.fail("the call has never had enough memory")
    assert failed > 5
    same(large, backend, of_large)


def test_eight_threads_call_at_once(backend: str) -> None:
    """Each on a stream of its own, with different shapes, from the first call on: they plan, compile and launch at once."""
    inputs = [
        testing.Case(
            f"thread {i}",
            n=5 + i,
            h=1 + i % 4,
            lq=96 + 40 * i,
            lk=80 + 48 * i,
            d=(16, 32)[i % 2],
            dtype=(torch.bfloat16, torch.float16)[i // 2 % 2],
            mask=("random", None)[i % 2],
            pair_bias=("b1hqk", None, "11hqk")[i % 3],
        ).make(seed=i, device="cuda")
        for i in range(8)
    ]
    torch.cuda.synchronize()
    barrier = threading.Barrier(len(inputs))
    by_thread: list[list[dict[str, torch.Tensor]]] = []

    def several(first: int) -> list[dict[str, torch.Tensor]]:
        barrier.wait(30)
        results = []
        with torch.cuda.stream(torch.cuda.Stream()):
            for i in range(3 * len(inputs)):
                results.append(values(inputs[(first + i) % len(inputs)], backend))
            torch.cuda.current_stream().synchronize()
        return results

    seams.forget()
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-5)
    try:
        with concurrent.futures.ThreadPoolExecutor(len(inputs)) as pool:
            by_thread = list(pool.map(several, range(len(inputs)), timeout=300))
    finally:
        sys.setswitchinterval(before)
    for i, each in enumerate(inputs):
        expected = testing.run(each, backend, deterministic=True)
        testing.check(expected, each)
        for first, results in enumerate(by_thread):
            for later in results[(i - first) % len(inputs) :: len(inputs)]:
                for name, value in later.items():
                    assert torch.equal(value, expected.values[name]), (each.case.name, name)


FORK = """
import os, signal, sys, torch, evoattn
from evoattn import testing

def run(device):
    inputs = testing.Case("fork", n=2, h=2, lq=20, lk=20, d=16, pair_bias="b1hqk").make(seed=1, device=device)
    testing.check(testing.run(inputs), inputs)

def in_child(work):
    child = os.fork()
    if child == 0:
        signal.alarm(120)
        try:
            work()
        except BaseException as error:
            print(type(error).__name__, error, file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0

torch.set_num_threads(1)
q = torch.randn(1, 2, 5, 2, 8)
if sys.argv[1] == "before":
    evoattn.evoformer_attention(q, q, q)
    in_child(lambda: (run("cpu"), run("cuda")))
else:
    run("cuda")
    in_child(lambda: evoattn.evoformer_attention(q, q, q))
"""


@pytest.mark.parametrize("cuda", ["before", "after"])
def test_forked_process_computes_after_calls_of_its_parent(cuda: str) -> None:
    """After a forward on the CPU a child may use the GPU and run backwards. After a call on the GPU it may call on the CPU.

    That a child of a process with CUDA cannot use CUDA, nor run a backward, are torch's own limits.
    """
    # With several GPUs torch starts a thread for each at the first backward, and these race for a thread pool after a fork.
    one = {**os.environ, "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]}
    done = subprocess.run([sys.executable, "-c", FORK, cuda], capture_output=True, text=True, check=False, timeout=300, env=one)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def default_dtype() -> Iterator[None]:
    """The default dtype, which the test sets, is float32 again at the end."""
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("default_dtype")
@pytest.mark.parametrize("length", [64, 256, 384, 1100])
@pytest.mark.parametrize("default", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_a_default_dtype_changes_nothing(default: torch.dtype, length: int, backend: str) -> None:
    """Plans are made anew under each default dtype, and results are bit-equal, also with float32 as the default again."""
    case = testing.Case(
        "default dtype", n=16, h=4, lq=length, lk=length, d=32, dtype=torch.bfloat16, mask="random", pair_bias="b1hqk"
    )
    inputs = case.make(seed=0, device="cuda")
    expected = values(inputs, backend)
    for dtype in (default, torch.float32):
        torch.set_default_dtype(dtype)
        seams.forget()
        same(inputs, backend, expected)
