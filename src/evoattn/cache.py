"""Where what was found or compiled on this machine is kept for later processes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

__all__ = ["VARIABLE", "folder"]

VARIABLE = "EVOATTN_CACHE_DIR"
"""Names the folder; empty, nothing is kept."""


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
