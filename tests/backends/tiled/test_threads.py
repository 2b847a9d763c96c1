"""Work that threads share on a CPU: done once, right, in nobody else's way, and by a forked process too."""

import collections
import concurrent.futures
import dataclasses
import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from evoattn import testing
from evoattn.backends.tiled import dense, threads
from evoattn.backends.tiled import sizes as tiled
from evoattn.backends.tiled.sizes import tiled_plan
from evoattn.core.config import Config

pytestmark = pytest.mark.skipif(
    not torch.backends.mkl.is_available(), reason="torch multiplies without MKL here: no thread is limited"
)

CASE = testing.Case(
    "shared", n=5, h=3, lq=33, lk=40, d=16, mask="random", mask_bias="finite", pair_bias="b1hqk", lse_gradient=True
)


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch, two_threads: None) -> Iterator[list[int]]:
    """Problems of any size are shared; gives how many threads shared each pass, and some pass of each test is."""
    counts: list[int] = []
    share = threads.share

    def noted(pieces, worker, count):
        counts.append(count)
        return share(pieces, worker, count)

    monkeypatch.setattr(tiled, "LEAST_SHARED", 1)
    monkeypatch.setattr(dense, "fits", lambda problem: False)
    monkeypatch.setattr(threads, "share", noted)
    yield counts
    assert max(counts) > 1


@pytest.mark.parametrize("count", [1, 2, 5])
def test_every_piece_is_done_once(count: int) -> None:
    done: collections.Counter[int] = collections.Counter()
    workers = []

    def worker(taken: Iterator[int]) -> None:
        workers.append((threading.current_thread(), torch.is_grad_enabled(), torch.get_num_threads()))
        for piece in taken:
            done[piece] += 1
            time.sleep(0.001)

    with torch.no_grad(), threads.single_threaded(count):
        threads.share(range(40), worker, count)
    assert done == collections.Counter(range(40))
    assert len({thread for thread, _, _ in workers}) == len(workers) == count
    assert not any(gradients for _, gradients, _ in workers)
    if count > 1:
        assert {limit for _, _, limit in workers} == {1}


def test_workers_are_in_inference_mode_where_the_caller_is() -> None:
    modes = []
    with torch.inference_mode(), threads.single_threaded(2):
        threads.share(range(2), lambda taken: modes.append(torch.is_inference_mode_enabled()), 2)
    assert modes == [True, True]


@pytest.fixture
def no_flush() -> Iterator[None]:
    """Denormal numbers are kept again after the test."""
    if not torch.set_flush_denormal(False):
        pytest.skip("torch cannot flush denormal numbers here")
    yield
    torch.set_flush_denormal(False)


def test_workers_flush_denormals_if_the_caller_does(no_flush: None) -> None:
    """Also if the caller changes it after the workers have started."""
    barrier = threading.Barrier(3)
    modes: list[bool] = []

    def worker(taken: Iterator[int]) -> None:
        barrier.wait(10)
        modes.append(bool(torch.full((1,), 1e-39, dtype=torch.float32).mul(0.5) == 0))

    for flushes in (False, True, False, True):
        torch.set_flush_denormal(flushes)
        modes.clear()
        with threads.single_threaded(3):
            threads.share(range(3), worker, 3)
        assert modes == [flushes] * 3


def test_results_with_flushed_denormals_are_bit_equal(shared: list[int], no_flush: None) -> None:
    inputs = dataclasses.replace(CASE, n=40).make(seed=5)
    inputs.v.mul_(1e-38)
    kept = testing.run(inputs, "tiled").values  # the workers have started
    torch.set_flush_denormal(True)
    runs = [testing.run(inputs, "tiled").values["o"] for _ in range(8)]
    assert not torch.equal(runs[0], kept["o"])
    torch.set_flush_denormal(False)
    assert all(torch.equal(o, runs[0]) for o in runs)
    assert torch.equal(testing.run(inputs, "tiled").values["o"], kept["o"])


@pytest.mark.parametrize("error", [RuntimeError("no memory"), KeyboardInterrupt()], ids=["error", "ctrl_c"])
@pytest.mark.parametrize("where", ["here", "elsewhere"])
def test_what_a_worker_raises_comes_when_all_have_stopped(error: BaseException, where: str) -> None:
    """And no piece is begun after that."""
    caller, running, begun = threading.current_thread(), [], []
    both = threading.Barrier(2)

    def worker(taken: Iterator[int]) -> None:
        in_caller = threading.current_thread() is caller
        for piece in taken:
            begun.append(piece)
            if len(begun) <= 2:
                both.wait(10)
            if in_caller == (where == "here"):
                raise error
            running.append(piece)
            time.sleep(0.05)
            running.remove(piece)

    with pytest.raises(type(error)), threads.single_threaded(2):
        threads.share(range(1000), worker, 2)
    assert not running
    assert len(begun) < 20
    done = []
    with threads.single_threaded(2):
        threads.share(range(9), lambda taken: done.extend(taken), 2)
    assert sorted(done) == list(range(9))


def in_a_new_thread() -> int:
    """The number of threads that torch has in a thread that begins now."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(torch.get_num_threads).result()


def test_nobody_s_number_of_threads_changes(two_threads: None) -> None:
    with pytest.raises(ZeroDivisionError), threads.single_threaded(2):
        threads.share(range(4), lambda taken: [1 // piece for piece in taken], 2)
    assert torch.get_num_threads() == 2
    assert in_a_new_thread() == 2
    x = torch.randn(64, 300, 300)
    busy, start = time.process_time(), time.thread_time()
    for _ in range(5):
        torch.bmm(x, x)
    if (os.cpu_count() or 1) > 1:
        assert time.process_time() - busy > 1.3 * (time.thread_time() - start)  # MKL's other thread works too


def test_one_thread_where_the_libraries_cannot_limit_one(monkeypatch: pytest.MonkeyPatch, two_threads: None) -> None:
    assert threads.available() == 2
    monkeypatch.setattr(threads, "libraries", lambda: (None, None))
    threads.can_be_limited.cache_clear()
    assert threads.available() == 1
    monkeypatch.undo()
    threads.can_be_limited.cache_clear()


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    "dtype",
    [torch.float32, *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in (torch.bfloat16, torch.float64))],
    ids=str,
)
@pytest.mark.parametrize("case", testing.AWKWARD, ids=lambda case: case.name)
def test_awkward_case_on_two_threads_agrees_with_float64(
    case: testing.Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, two_threads: None
) -> None:
    monkeypatch.setattr(tiled, "LEAST_SHARED", 1)
    inputs = dataclasses.replace(case, dtype=dtype).make(seed=1)
    testing.check(testing.run(inputs, "tiled"), inputs)


@pytest.mark.parametrize("pattern", ["b1hqk", "b11qk", "b1h1k", "11hqk", "bnhqk", "hqk"])
@pytest.mark.parametrize("config", [Config(), Config(block_q=16, block_k=16), Config(score_bytes=4096)], ids=str)
def test_two_runs_are_bit_equal(shared: list[int], pattern: str, config: Config) -> None:
    """Whichever thread was when where: sums of bias gradients are added up in order."""
    inputs = dataclasses.replace(CASE, n=13, h=4, lead=(2,), pair_bias=pattern).make(seed=2)
    first, *others = (testing.run(inputs, "tiled", config=config) for _ in range(3))
    testing.check(first, inputs)
    for other in others:
        for name, value in other.values.items():
            assert torch.equal(value, first.values[name]), name


def test_shared_work_in_inference_mode_gives_the_same_bits(shared: list[int]) -> None:
    inputs = CASE.make(seed=3)
    expected = testing.run(inputs, "tiled").values["o"]
    from evoattn import evoformer_attention

    with torch.inference_mode():
        o = evoformer_attention(
            inputs.q, inputs.k, inputs.v, mask=inputs.mask, mask_bias=inputs.mask_bias, pair_bias=inputs.pair_bias
        )
    assert torch.equal(o, expected)


def test_eight_callers_at_once(shared: list[int]) -> None:
    inputs = [dataclasses.replace(CASE, n=3 + i, lk=30 + i).make(seed=i) for i in range(8)]
    expected = [testing.run(each, "tiled").values for each in inputs]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for _ in range(3):
            for actual, right in zip(pool.map(lambda each: testing.run(each, "tiled").values, inputs), expected, strict=True):
                for name, value in actual.items():
                    torch.testing.assert_close(value, right[name])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_after_shared_work(shared: list[int]) -> None:
    """The child has none of its parent's threads, and starts its own."""
    inputs = CASE.make(seed=4)
    expected = testing.run(inputs, "tiled").values
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        right = False
        try:
            with threads.single_threaded(2):  # OpenMP's threads are the parent's
                torch.get_num_threads = lambda: 2
                values = testing.run(inputs, "tiled").values
                right = all(torch.equal(value, expected[name]) for name, value in values.items()) and max(shared) > 1
        finally:
            os._exit(0 if right else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_small_problems_are_not_shared() -> None:
    problem = testing.Case("small", n=48, h=4, lq=48, lk=48, d=32)
    inputs = problem.make()
    from evoattn.backends import Inputs
    from evoattn.core.problem import describe

    described = describe(Inputs(*(x.transpose(2, 3) for x in (inputs.q, inputs.k, inputs.v))))
    assert tiled_plan(described, Config(), 2).threads == 1
    assert tiled_plan(dataclasses.replace(described, n=2000), Config(), 2).threads == 2
