"""Compiled kernels on disk: read again, never believed when they are not whole, and never a reason for a call to fail."""

import errno
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator

import pytest

os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")
cutlass = pytest.importorskip("cutlass", reason="CuTe DSL is not installed: pip install '.[hopper]'")

from evoattn.backends.hopper import ahead, launch  # noqa: E402
from evoattn.backends.hopper.kernels.statistics import Statistics  # noqa: E402
from evoattn.compile import cache  # noqa: E402
from tests.helpers.kept_kernels import kept, new_process  # noqa: E402


def kernel(channels: int = 32) -> launch.KernelVariant:
    """One that compiles in 0.3 s."""
    return Statistics(cutlass.BFloat16, channels, dlse=False)


def compile_all(*channels: int) -> None:
    """Kernels that can be called, one after another."""
    assert all(callable(ahead.load_kernel(kernel(c))) for c in channels)


@pytest.fixture
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
    """A cache folder that does not exist yet, and no kernel in memory."""
    monkeypatch.setenv("EVOATTN_CACHE_DIR", str(tmp_path / "cache"))
    new_process()
    yield tmp_path / "cache"
    new_process()


def read_again(monkeypatch: pytest.MonkeyPatch, channels: int = 32) -> None:
    """A later process finds the kernel on disk, and says nothing."""
    new_process()
    with monkeypatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("error")
        patch.setattr(launch, "build", lambda kernel: pytest.fail("compiled again"))
        assert callable(ahead.load_kernel(kernel(channels)))


def test_a_kept_kernel_is_read_again(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    function = ahead.load_kernel(kernel())
    assert ahead.load_kernel(kernel()) is function
    (file,) = kept(folder)
    assert file.name.startswith(kernel().name)
    assert file.stat().st_mode & 0o777 == 0o644, "whoever shares the folder may read it"
    read_again(monkeypatch)


def cut(share: float) -> Callable[[pathlib.Path], None]:
    return lambda file: os.truncate(file, int(file.stat().st_size * share))


def zero(file: pathlib.Path) -> None:
    """A hole, as a machine that loses power may leave it. The loader alone takes such a file, and the kernel then fails."""
    data = file.read_bytes()
    third = len(data) // 3
    file.write_bytes(data[:third] + bytes(third) + data[2 * third :])


def turn_a_bit(file: pathlib.Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def of_another_version(file: pathlib.Path) -> None:
    """A whole file that does not have the kernel."""
    ahead.load_kernel(kernel(64))
    (other,) = set(kept(file.parent.parent)) - {file}
    os.replace(other, file)


def make_a_folder(file: pathlib.Path) -> None:
    file.unlink()
    file.mkdir()


DAMAGE = {
    "empty": cut(0),
    "cut in half": cut(0.5),
    "its last bytes are missing": cut(0.999),
    "a hole of zeros": zero,
    "a bit": turn_a_bit,
    "no object file": lambda file: file.write_text("kernel"),
    "another version's": of_another_version,
}


QUICK = ("cut in half", "a bit", "another version's")


@pytest.mark.parametrize(
    "damage",
    [pytest.param(x, id=name, marks=[] if name in QUICK else pytest.mark.slow) for name, x in DAMAGE.items()],
)
def test_a_damaged_kernel_is_ignored_with_one_warning_and_made_anew(
    damage: Callable[[pathlib.Path], None], folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead.load_kernel(kernel())
    (file,) = kept(folder)
    size = file.stat().st_size
    damage(file)
    new_process()
    with pytest.warns(UserWarning, match=r"Statistics-.*\.o does not load \(.*\): compiled anew") as seen:
        compile_all(32, 32)
    assert len(seen) == 1
    assert [path.stat().st_size for path in kept(folder)] == [size]
    read_again(monkeypatch)


def test_a_kernel_that_cannot_be_read_is_made_anew(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead.load_kernel(kernel())
    new_process()

    def refuse(path: pathlib.Path) -> bytes:
        raise PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(pathlib.Path, "read_bytes", refuse)
        with pytest.warns(UserWarning, match="does not load .*Permission denied") as seen:
            compile_all(32)
    assert len(seen) == 1
    read_again(monkeypatch)


def test_a_folder_in_the_place_of_a_kernel_does_not_stop_a_call(folder: pathlib.Path) -> None:
    ahead.load_kernel(kernel())
    make_a_folder(kept(folder)[0])
    new_process()
    with pytest.warns(UserWarning, match="does not load|cannot be written"):
        compile_all(32)


def test_a_read_only_folder_costs_one_warning(folder: pathlib.Path) -> None:
    """A file where the folder should be: that stops root too."""
    folder.write_text("")
    with pytest.warns(UserWarning, match="hopper cannot be written .*EVOATTN_CACHE_DIR names another folder") as seen:
        compile_all(32, 64)
    assert len(seen) == 1


def test_a_full_disk_costs_one_warning(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(cache.os, "fsync", full)
        with pytest.warns(UserWarning, match=r"cannot be written \(No space left") as seen:
            compile_all(32, 64)
    assert len(seen) == 1
    assert kept(folder) == []
    new_process()
    ahead.load_kernel(kernel())
    read_again(monkeypatch)


def test_a_folder_that_is_deleted_while_it_is_used_is_made_again(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two kernels, and during a write."""
    ahead.load_kernel(kernel())
    shutil.rmtree(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ahead.load_kernel(kernel(64))
        assert len(kept(folder)) == 1
    with monkeypatch.context() as patch:
        patch.setattr(cache.os, "fsync", lambda handle: shutil.rmtree(folder))
        with pytest.warns(UserWarning, match="cannot be written"):
            compile_all(16)
    ahead.load_kernel(kernel(8))
    assert len(kept(folder)) == 1
    read_again(monkeypatch, channels=8)


def test_a_kernel_that_is_not_kept_needs_no_file(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise FileNotFoundError("No usable temporary directory")

    monkeypatch.setenv("EVOATTN_CACHE_DIR", "")
    monkeypatch.setattr(cache.tempfile, "mkstemp", refuse)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first, second = ahead.load_kernel(kernel()), ahead.load_kernel(kernel(64))
    assert callable(first) and callable(second) and first is not second
    assert not folder.exists()


def test_machines_of_another_kind_share_no_kernels(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An object file holds code of the host's too: a home folder may be an x86 machine's and a GH200's."""
    source = ahead.digest_source()
    monkeypatch.setattr(ahead.platform, "machine", lambda: "another")
    ahead.digest_source.cache_clear()
    assert ahead.digest_source() != source
    monkeypatch.undo()
    ahead.digest_source.cache_clear()


@pytest.mark.parametrize(
    ("file", "matters"),
    [
        ("lib/primitives.py", True),
        ("kernels/forward_mma.py", True),
        ("kernels/dq_consumer.py", True),
        ("launch.py", True),
        ("tiles.py", True),
        ("forward_plan.py", False),
        ("ahead.py", False),
        ("memory.py", False),
        ("__init__.py", False),
    ],
)
def test_kernels_are_stale_when_their_text_changes(
    file: str, matters: bool, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In whatever folder; a plan only says what is launched."""
    copy = tmp_path / "hopper"
    shutil.copytree(ahead.HOPPER, copy)
    monkeypatch.setattr(ahead, "HOPPER", copy)
    before = ahead.digest_source.__wrapped__()
    with (copy / file).open("a") as text:
        text.write("# changed\n")
    assert (ahead.digest_source.__wrapped__() != before) is matters


def test_ctrl_c_while_a_kernel_is_compiled(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At several moments: an exception inside the compiler would abort the process. The next call has the kernel."""
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    channels = (8, 16, 24, 32, 48, 64)
    interrupted = 0
    try:
        for i, c in enumerate(channels):
            signal.setitimer(signal.ITIMER_REAL, 0.01 + 0.03 * i)
            try:
                ahead.load_kernel(kernel(c))
            except KeyboardInterrupt:
                interrupted += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert interrupted
    assert all(callable(ahead.load_kernel(kernel(c))) for c in channels)
    assert [file.suffix for file in kept(folder)] == [".o"] * len(channels)
    for c in channels:
        read_again(monkeypatch, c)


COMPILE = """
import os, signal, sys, threading
import cutlass
from evoattn.compile import cache
from evoattn.backends.hopper import ahead
from evoattn.backends.hopper import launch
from evoattn.backends.hopper.kernels.statistics import Statistics

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def build(kernel):
    built.append(kernel)
    if sys.argv[1] == "build":
        threading.Timer(0.1, die).start()
    return compile(kernel)

if sys.argv[1] == "write":
    cache.os.fsync = die
print("ready", flush=True)
sys.stdin.readline()
compile, built = launch.build, []
launch.build = build
assert callable(ahead.load_kernel(Statistics(cutlass.BFloat16, 32, dlse=False)))
print(len(built))
"""


def start(step: str) -> subprocess.Popen:
    """Another process, ready to compile."""
    command = [sys.executable, "-W", "error::UserWarning:evoattn", "-c", COMPILE, step]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n", process.communicate()[1]
    return process


@pytest.mark.parametrize("step", [pytest.param("build", marks=pytest.mark.slow), "write"])
def test_a_killed_process_leaves_nothing_that_a_later_one_believes(
    step: str, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = start(step)
    process.communicate("go\n", timeout=60)
    assert process.returncode == -signal.SIGKILL
    left = kept(folder)
    assert {file.suffix for file in left} == ({".lock", ".part"} if step == "write" else {".lock"})
    for file in left:
        os.utime(file, (time.time() - 2 * cache.OLD,) * 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ahead.load_kernel(kernel())
    (file,) = kept(folder)
    assert file.suffix == ".o", "what the killed process left is removed"
    read_again(monkeypatch)


@pytest.mark.slow
def test_two_processes_compile_the_same_kernel_at_once(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processes = [start(""), start("")]
    for process in processes:
        process.stdin.write("go\n")  # type: ignore[union-attr]
        process.stdin.flush()  # type: ignore[union-attr]
    for process in processes:
        printed, error = process.communicate(timeout=60)
        assert process.returncode == 0, error
        assert printed in ("0\n", "1\n")
    (file,) = kept(folder)
    assert file.suffix == ".o"
    read_again(monkeypatch)
