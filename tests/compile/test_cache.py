"""Files that later processes read are written whole or not at all, whatever happens to the writer or to the folder."""

import errno
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import pytest

from evoattn.compile import cache
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
