"""Why a contender has no time: in a word for records, and in a line for tables."""

from __future__ import annotations

import torch

__all__ = ["RefusesError", "one_line", "out_of_memory", "status"]


class RefusesError(Exception):
    """A library does not take this problem, by its own contract."""


def out_of_memory(error: BaseException) -> bool:
    """On a CPU torch raises a plain RuntimeError, with one text on Linux and another elsewhere."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    texts = ("can't allocate memory", "not enough memory")
    return isinstance(error, RuntimeError) and any(text in str(error) for text in texts)


def status(error: Exception) -> str:
    """A record's word for a contender that raised: absent, refused or failed."""
    if isinstance(error, ImportError):
        return "absent"
    return "refused" if isinstance(error, RefusesError) else "failed"


def one_line(error: BaseException) -> str:
    """The first line of a message, short enough for a table."""
    if isinstance(error, ModuleNotFoundError):
        return f"{(error.name or 'it').split('.')[0]} is not installed"
    if out_of_memory(error):
        return "out of memory"
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    text = f"{type(error).__name__}: {line}" if line and not isinstance(error, RefusesError) else line or repr(error)
    return text if len(text) <= 200 else text[:197] + "..."
