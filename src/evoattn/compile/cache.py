"""The folder in which this machine's compiled code and tuned tiles are kept for later processes."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

VARIABLE = "EVOATTN_CACHE_DIR"
"""Names the folder; empty, nothing is kept."""

_UNFINISHED = ".part"
OLD = 3600.0
"""Seconds after which an unfinished file has lost its writer: writing takes milliseconds."""

_DIGEST = hashlib.sha256().digest_size
"""Bytes at the end of a file of compiled code."""


def folder() -> Path | None:
    """Return the user's cache folder of this package; None if nothing is to be kept, or no home is known. Create nothing."""
    named = os.environ.get(VARIABLE)
    if named is not None:
        return Path(named) if named else None
    try:
        if sys.platform == "win32":
            return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "evoattn"
        if sys.platform == "darwin":
            return Path.home() / "Library" / "Caches" / "evoattn"
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "evoattn"
    except RuntimeError:  # a user whom the system does not know, as in a container
        return None


def write(path: Path, data: bytes) -> None:
    """Write a file whole or not at all; other processes may write the same one at the same time.

    The folder is made if it is missing. Unfinished files that a killed process left there are removed after an hour.

    Raises:
        OSError: the folder cannot be made or written, or the disk is full. An older file stays as it is.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, unfinished = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=_UNFINISHED)
    try:
        with open(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(handle)  # otherwise a power failure may leave the name without the contents
        os.chmod(unfinished, 0o644)  # mkstemp lets nobody else read it, but a folder may be shared
        os.replace(unfinished, path)
    except BaseException:
        _remove(Path(unfinished))
        raise
    for left in path.parent.glob(f".*{_UNFINISHED}"):  # of processes that were killed
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > OLD:
                left.unlink()


def try_to_write(folder: Path) -> None:
    """Make a folder if it is missing, and a file in it that is removed. Permissions alone say little to root.

    Raises:
        OSError: it cannot be made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


def takes_files(folder: Path) -> bool:
    """Return whether files can be written there. The folder is made."""
    try:
        try_to_write(folder)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[bool]:
    """Hold the lock of a file that is being made, and yield whether it is held. It is released if the process dies.

    The lock is a hidden file beside it. Where there are no locks, as in a folder that cannot be written, every process makes
    the file. Without `wait`, a lock that another process holds is not waited for.
    """
    held, lock = True, path.with_name(f".{path.name}.lock")
    with contextlib.ExitStack() as stack:
        try:
            import fcntl  # not on Windows

            path.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(open(lock, "wb"))
            fcntl.lockf(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            stack.callback(_remove, lock)
        except BlockingIOError:
            held = False
        except (ImportError, OSError):
            pass
        yield held


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def keep_code(path: Path, code: bytes) -> None:
    """Write compiled code, followed by its digest; raises what `write` raises.

    A loader takes an object file with a hole of zeros, as a machine that lost power may leave it, and the kernel then fails.
    """
    write(path, code + hashlib.sha256(code).digest())


def code_bytes(path: Path | None) -> int:
    """Return the size of a file of compiled code; 0 if it is not there, or not whole."""
    try:
        return 0 if path is None else len(_checked(path)) + _DIGEST
    except (OSError, ValueError):
        return 0


def code(path: Path | None, load: Callable[[bytes], Any], make: Callable[[], bytes]) -> Any:
    """Load the compiled code of a file if that is whole. Otherwise make it, write the file unless `path` is None, and load it.

    One process makes it at a time. The others wait, and load what it has written. An error of `load` counts as damage of a
    file.
    """
    if path is None:
        return load(make())
    if os.path.exists(path):  # Path.exists raises if a folder may not be entered
        try:
            return load(_checked(path))
        except Exception as error:  # of many kinds: damaged, of another version, a folder, or not readable
            why = error if isinstance(error, OSError | ValueError) else type(error).__name__
            warnings.warn(f"{path} does not load ({why}): compiled anew", stacklevel=2)
            return load(_make(path, make))
    with locked(path):
        return load(_checked(path) if code_bytes(path) else _make(path, make))


def _make(path: Path, make: Callable[[], bytes]) -> bytes:
    """Make compiled code and write its file, if that is possible."""
    compiled = make()
    try:
        keep_code(path, compiled)
    except OSError as error:  # this process has the code all the same
        cannot_keep(str(path.parent), error.strerror or str(error))
    return compiled


def _checked(path: Path) -> bytes:
    """The code of a file, if its digest is right."""
    data = path.read_bytes()
    contents, digest = data[:-_DIGEST], data[-_DIGEST:]
    if hashlib.sha256(contents).digest() != digest:
        raise ValueError(f"its {len(data)} bytes are not what was written")
    return contents


@functools.cache
def cannot_keep(folder: str, why: str) -> None:
    """Say once that compiled code is not kept."""
    warnings.warn(
        f"{folder} cannot be written ({why}): each process compiles its kernels. {VARIABLE} names another folder; "
        "empty, nothing is kept and nothing is said.",
        stacklevel=2,
    )
