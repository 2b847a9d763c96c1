"""Fixtures and settings that several test files share."""

import gc
import os
import pathlib
import zlib
from collections.abc import Iterator

import hypothesis
import pytest
import torch

from evoattn.backends import reference
from evoattn.bench import machine
from tests.helpers import seams
from tests.helpers.operators import Operators
from tests.helpers.planner import Planner

MUCH = 1 << 30
"""More than this many bytes of a GPU are given back after a test: processes share it."""

hypothesis.settings.register_profile("ci", derandomize=True, deadline=None, database=None)
if os.environ.get("CI"):
    hypothesis.settings.load_profile("ci")


def pytest_configure() -> None:
    """Give each of several test processes its share of the cores.

    Processes that start from here on have passive threads: OpenMP's spin while they wait, and take the cores from the others.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers > 1:
        os.environ.setdefault("EVOATTN_COMPILERS", "0")  # there are many processes already
    if workers > 1 and "OMP_NUM_THREADS" not in os.environ:
        threads = max(1, (os.cpu_count() or 1) // workers)
        os.environ["OMP_NUM_THREADS"] = str(threads)  # of processes that tests start
        torch.set_num_threads(threads)


class _WithoutGPU(pytest.Module):
    """A file whose tests need a GPU. It is not imported, since its thousands of tests would take seconds to collect."""

    def collect(self) -> Iterator[pytest.Item]:
        pytest.skip("no GPU that torch can use; the other files of the folder have tests of a CPU", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: pathlib.Path, parent: pytest.Collector) -> pytest.Module | None:
    """Skip files of a GPU where torch can use none."""
    if not module_path.name.endswith("_gpu.py") or torch.cuda.is_available():
        return None
    return _WithoutGPU.from_parent(parent, path=module_path)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the slow tests that are not in the share that EVOATTN_TEST_SHARE names, such as "1/4"."""
    if share := os.environ.get("EVOATTN_TEST_SHARE"):
        number, shares = map(int, share.split("/"))
        others = [x for x in items if x.get_closest_marker("slow") and zlib.crc32(x.nodeid.encode()) % shares != number]
        config.hook.pytest_deselected(items=others)
        left_out = set(others)
        items[:] = [x for x in items if x not in left_out]


@pytest.fixture(autouse=True, scope="module")
def little_to_look_through() -> None:
    """Keep all collected tests, and what earlier files imported and compiled, out of every later collection of garbage."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_table_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the developer's own `evoattn tune` found changes no test; EVOATTN_TEST_CACHE_DIR may keep compiled kernels."""
    monkeypatch.setenv("EVOATTN_CACHE_DIR", os.environ.get("EVOATTN_TEST_CACHE_DIR", ""))


@pytest.fixture
def poisoned() -> Iterator[None]:
    """torch.empty gives NaN, so an element that a backend forgets to write is seen."""
    before = (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled())
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@pytest.fixture
def tf32() -> Iterator[None]:
    """float32 products of torch on a GPU are TF32. pytest's monkeypatch would delete the attribute afterwards."""
    matmul = torch.backends.cuda.matmul
    before, matmul.allow_tf32 = matmul.allow_tf32, True
    yield
    matmul.allow_tf32 = before


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    """A test that changes what calls are planned from leaves no plan behind, and none keeps memory that others need."""
    yield
    seams.forget()
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > MUCH:
        torch.cuda.empty_cache()


@pytest.fixture
def operators() -> Iterator[Operators]:
    """Record the operators that a test's calls go through."""
    recorded = Operators()
    yield recorded
    recorded.stop()


@pytest.fixture
def planner(monkeypatch: pytest.MonkeyPatch) -> Planner:
    """Count what the reference backend plans and runs."""
    planner = Planner()
    monkeypatch.setattr(reference, "plan_forward", planner.plan_forward)
    monkeypatch.setattr(reference, "plan_backward", planner.plan_backward)
    seams.forget()
    return planner


@pytest.fixture
def one_thread() -> Iterator[None]:
    """torch computes with one thread, as in a worker of a DataLoader."""
    with machine.threads(1):
        yield


@pytest.fixture
def two_threads() -> Iterator[None]:
    """torch computes with two threads, as on a machine with two cores."""
    with machine.threads(2):
        yield


@pytest.fixture
def most_of_the_memory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests that fill a GPU run one at a time, where several processes share it."""
    import fcntl

    with (tmp_path_factory.getbasetemp().parent / "most_of_the_memory").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
        torch.cuda.empty_cache()
