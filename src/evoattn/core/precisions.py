"""Names of the precisions of a sampling (`core.keeping.sampling`). Nothing here imports torch."""

from __future__ import annotations

PRECISIONS = ("exact", "tf32", "bf16")


def check_precision(precision: str) -> None:
    """Raise ValueError unless this is the name of a precision."""
    if precision not in PRECISIONS:
        first, *others = map(repr, PRECISIONS)
        raise ValueError(f"precision must be {', '.join([first, *others[:-1]])} or {others[-1]}, got {precision!r}")
