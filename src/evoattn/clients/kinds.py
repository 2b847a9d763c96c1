"""Kinds of calls, and sentences about how many there were. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

ELSEWHERE = "not on a GPU"
"""The reason for steps that were not replayed on a machine without a GPU."""

TRANSFORMER = "diffusion transformer"
"""The kind of calls that have the precision of a patch."""

KINDS = ("attention call", "triangle multiplication", "transition", "MSA layer", "pair block", TRANSFORMER)
"""Kinds of calls that are counted. A layer with an attention is an attention call; an outer product mean and a
pair-weighted averaging are MSA layers; a block has several layers."""


def in_words(calls_by_kind: Mapping[str, int]) -> str:
    """Tell how many calls of each kind there were, as "2 attention calls and 1 pair block"; "" if there were none."""
    parts = [f"{calls:,} {kind}{'s' if calls != 1 else ''}" for kind in KINDS if (calls := calls_by_kind.get(kind, 0))]
    return joined(parts)


def precision_in_words(precision: str, calls_by_kind: Mapping[str, int]) -> str:
    """Tell which calls had a precision that a patch was asked for."""
    calls = {TRANSFORMER: calls_by_kind.get(TRANSFORMER, 0)}
    if not calls[TRANSFORMER]:
        return f"{precision} in no call, because it is that of diffusion transformers sampled in float32 on a GPU"
    return f"{precision} in {in_words(calls)}, and the client's own precision in all other calls"


def joined(parts: Sequence[str]) -> str:
    """Join words as in a sentence."""
    *first, last = parts or [""]
    return f"{', '.join(first)} and {last}" if first else last
