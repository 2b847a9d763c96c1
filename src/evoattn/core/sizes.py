"""The sizes that tiles come in."""

from __future__ import annotations

MIN_TILE = 16
"""Queries or keys that a matrix product takes at least."""

SHORT = 128
"""Queries and keys up to which a backward has tiles, and shares of its rows, of its own."""


def power_of_two(size: int, least: int = MIN_TILE) -> int:
    """The smallest power of two that is neither below size nor below `least`."""
    return max(least, 1 << (max(size, 1) - 1).bit_length())
