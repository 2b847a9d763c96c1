"""Where what was found or compiled on this machine is kept for later processes."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from pathlib import Path

__all__ = ["VARIABLE", "folder", "takes_files", "write"]

VARIABLE = "EVOATTN_CACHE_DIR"
"""Names the folder; empty, nothing is kept."""

_UNFINISHED = ".part"
_OLD = 3600.0
"""Seconds after which an unfinished file has lost its writer: writing takes milliseconds."""


def folder() -> Path | None:
    """The user's cache folder of this package; None where nothing is to be kept, or no home is known. Nothing is created."""
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
    _sweep(path.parent)


def takes_files(folder: Path) -> bool:
    """Whether files can be written there: it is tried, since permissions say little to root. The folder is made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _sweep(folder: Path) -> None:
    """Remove the unfinished files of processes that were killed."""
    for left in folder.glob(f".*{_UNFINISHED}"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > _OLD:
                left.unlink()
