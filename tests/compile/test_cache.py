"""Files that later processes read are written whole or not at all, whatever happens to the writer or to the folder."""

import contextlib
import errno
import fcntl
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest

from evoattn.compile import cache
from tests.helpers.locks import locked_by_another
from tests.helpers.processes import forked


def names(folder: pathlib.Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def test_a_file_is_written_into_a_new_folder_and_others_may_read_it(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "a" / "b" / "file"
    cache.write(path, b"one")
    cache.write(path, b"two")
    assert path.read_bytes() == b"two"
    assert path.stat().st_mode & 0o777 == 0o644
    assert names(path.parent) == ["file"]


@pytest.mark.parametrize("step", ["fsync", "chmod", "replace"])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()], ids=repr)
def test_a_write_that_fails_leaves_the_older_file(
    step: str, error: BaseException, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    cache.write(path, b"older")

    def fail(*_: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(cache.os, step, fail)
        with pytest.raises(type(error)):
            cache.write(path, b"newer")
    assert path.read_bytes() == b"older"
    assert names(tmp_path) == ["file"]


def test_a_folder_that_is_deleted_during_a_write_is_an_error_of_the_system(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "folder" / "file"
    with monkeypatch.context() as patch:
        patch.setattr(cache.os, "fsync", lambda handle: shutil.rmtree(path.parent))
        with pytest.raises(FileNotFoundError):
            cache.write(path, b"one")
    cache.write(path, b"two")
    assert path.read_bytes() == b"two"


def write_often(path: pathlib.Path) -> None:
    sys.stdin.readline()
    for i in range(30):
        cache.write(path, bytes([i]) * 100_000)


def die_while_writing(path: pathlib.Path) -> None:
    os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    cache.write(path, b"half")


def test_a_killed_writer_leaves_nothing_that_is_read_or_that_stays(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "file"
    cache.write(path, b"older")
    assert forked(lambda: die_while_writing(path)).wait(60) == -signal.SIGKILL
    assert path.read_bytes() == b"older"
    (left,) = set(names(tmp_path)) - {"file"}
    cache.write(path, b"newer")
    assert names(tmp_path) == sorted((left, "file")), "its writer may still be at work"
    long_ago = time.time() - 2 * cache.OLD
    os.utime(tmp_path / left, (long_ago, long_ago))
    cache.write(path, b"newest")
    assert names(tmp_path) == ["file"]


def test_two_processes_that_write_at_once_leave_a_whole_file(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "file"
    writers = [forked(lambda: write_often(path), stdin=subprocess.PIPE) for _ in range(2)]
    for writer in writers:
        writer.stdin.write("go\n")  # type: ignore[union-attr]
        writer.stdin.flush()  # type: ignore[union-attr]
    while any(writer.poll() is None for writer in writers):
        if path.exists():
            content = path.read_bytes()
            assert len(content) == 100_000 and len(set(content)) == 1
        else:
            time.sleep(0.01)
    assert [writer.wait(60) for writer in writers] == [0, 0]
    assert names(tmp_path) == ["file"]


@pytest.mark.parametrize("kept", [True, False])
def test_code_that_another_process_makes_is_waited_for(kept: bool, tmp_path: pathlib.Path) -> None:
    """It is made here if the other one dies before it has written it."""
    path, loaded = tmp_path / "a" / "code.o", []
    with locked_by_another(path) as other:
        waits = threading.Thread(target=lambda: loaded.append(cache.code(path, bytes, lambda: b"made here")))
        waits.start()
        waits.join(0.2)
        assert waits.is_alive()
        if kept:
            cache.keep_code(path, b"made there")
        other.kill()
        waits.join(60)
    assert loaded == [b"made there" if kept else b"made here"]
    assert names(path.parent) == ["code.o"], "nobody holds the lock any more"


def test_who_need_not_wait_is_told_that_a_lock_is_held(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "code.o"
    with locked_by_another(path), cache.locked(path, wait=False) as held:
        assert not held
    with cache.locked(path, wait=False) as held:
        assert held


@pytest.mark.parametrize("step", ["lock", "folder"])
def test_without_locks_code_is_made(step: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a network drive without them, or in a folder that cannot be written."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    if step == "lock":
        monkeypatch.setattr(fcntl, "lockf", refuse)
    else:
        (tmp_path / "a").write_text("")
    cache.cannot_keep.cache_clear()
    with contextlib.nullcontext() if step == "lock" else pytest.warns(UserWarning, match="cannot be written"):
        assert cache.code(tmp_path / "a" / "code.o", bytes, lambda: b"made") == b"made"
    cache.cannot_keep.cache_clear()
