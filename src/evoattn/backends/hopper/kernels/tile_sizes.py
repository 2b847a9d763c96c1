"""Sizes of tiles, in one place. Importing this imports no CuTe DSL."""

from __future__ import annotations

__all__ = ["KEYS", "MOST_PANELS", "QUERIES", "ROWS", "SLICE"]

ROWS = 64
"""Rows of a product of a warpgroup, which the instruction fixes."""

QUERIES = ROWS
"""Queries of a tile."""

KEYS = ROWS
"""Keys of a tile, and of a panel that a block of the kernel of the keys owns."""

MOST_PANELS = 128
"""Panels of keys of rows that are listed: their numbers lie in the shared memory of one block."""

SLICE = 32
"""Scores of a row that a warpgroup holds at a time."""
