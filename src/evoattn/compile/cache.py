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
from collections.abc import Callable
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
        with contextlib.suppress(OSError):
            os.unlink(unfinished)
        raise
    for left in path.parent.glob(f".*{_UNFINISHED}"):  # of processes that were killed
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > OLD:
                left.unlink()


def takes_files(folder: Path) -> bool:
    """Return whether files can be written there: it is tried, since permissions say little to root. The folder is made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def keep_code(path: Path, code: bytes) -> None:
    """Write compiled code with its digest behind it; raises what `write` raises.

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
    """Load the compiled code of a file if that is whole. Otherwise make it, write the file, and load it.

    Args:
        path: the file; None: nothing is kept.
        load: turns code into what is returned. An error of it counts as damage of a file.
        make: compiles.
    """
    if path is not None and os.path.exists(path):  # Path.exists raises if a folder may not be entered
        try:
            return load(_checked(path))
        except Exception as error:  # of many kinds: damaged, of another version, a folder, or not readable
            why = error if isinstance(error, OSError | ValueError) else type(error).__name__
            warnings.warn(f"{path} does not load ({why}): compiled anew", stacklevel=2)
    compiled = make()
    if path is not None:
        try:
            keep_code(path, compiled)
        except OSError as error:  # this process has the code all the same
            cannot_keep(str(path.parent), error.strerror or str(error))
    return load(compiled)


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
