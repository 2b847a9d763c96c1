"""The GPUs that stand for an architecture on a machine without a GPU.

Plans look at the number of multiprocessors and at caches, so an architecture has several cards. Most kernels are the same for
all of them. Numbers are those that CUDA tells of these cards, or NVIDIA's data sheets.
"""

from __future__ import annotations

import dataclasses

import torch

from evoattn.cli.terminal import RefusedError
from evoattn.core.devices import Card, card, installed

_CLUSTER = 8
"""Blocks of the largest cluster."""

_MIB = 2**20
_AMPERE, _SMALL, _LARGE = 166_912, 101_376, 232_448
"""Bytes of shared memory that one block may use: of 8.0; of 8.6, 8.9 and 12.0; of 9.0 and 10.0."""

_FEWER_CLUSTERS = (132, 66, 39, 32, 24, 19, 16, 14)
"""Resident clusters of a card whose parts are of unequal size: a cluster stays within one part."""

ARCHITECTURES: dict[str, tuple[Card, ...]] = {
    "sm_80": (
        Card("NVIDIA A100-SXM4-80GB", (8, 0), 108, _AMPERE, 40 * _MIB),
        Card("NVIDIA A30", (8, 0), 56, _AMPERE, 24 * _MIB),
    ),
    "sm_86": (
        Card("NVIDIA RTX A6000", (8, 6), 84, _SMALL, 6 * _MIB),
        Card("NVIDIA A10", (8, 6), 72, _SMALL, 6 * _MIB),
    ),
    "sm_89": (
        Card("NVIDIA L40S", (8, 9), 142, _SMALL, 96 * _MIB),
        Card("NVIDIA L4", (8, 9), 58, _SMALL, 48 * _MIB),
    ),
    "sm_90": (
        Card("NVIDIA H200", (9, 0), 132, _LARGE, 60 * _MIB),
        Card("NVIDIA H100 80GB HBM3", (9, 0), 132, _LARGE, 50 * _MIB, clusters=_FEWER_CLUSTERS),
        Card("NVIDIA H100 PCIe", (9, 0), 114, _LARGE, 50 * _MIB),
    ),
    "sm_100": (Card("NVIDIA B200", (10, 0), 148, _LARGE, 126 * _MIB),),
    "sm_120": (
        Card("NVIDIA RTX PRO 6000 Blackwell Server Edition", (12, 0), 188, _SMALL, 128 * _MIB),
        Card("NVIDIA GeForce RTX 5090", (12, 0), 170, _SMALL, 96 * _MIB),
    ),
}
"""Cards by architecture."""


def cards_of(arch: str) -> tuple[Card, ...]:
    """The cards of an architecture, by its name with or without the letter that NVIDIA's compilers add, as in sm_90a.

    Raises:
        RefusedError: it is not known; the message lists those that are.
    """
    cards = ARCHITECTURES.get(arch.removesuffix("a"))
    if cards is None:
        raise RefusedError(f"--arch: unknown architecture {arch!r}; expected one of {', '.join(ARCHITECTURES)}, or sm_90a")
    return cards


def local_cards() -> tuple[Card, ...]:
    """The NVIDIA GPUs of this machine, each kind once. It starts CUDA.

    Raises:
        RefusedError: there is none.
    """
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    cards = dict.fromkeys(_complete(known, device) for device in devices if (known := card(device)) is not None)
    if not cards:
        raise RefusedError("there is no NVIDIA GPU here: name the one that kernels are for, such as --arch sm_90a")
    return tuple(cards)


def _complete(known: Card, device: torch.device) -> Card:
    """The card with all facts that its plans ask for: workers see no GPU and cannot ask it."""
    if installed("triton"):
        from evoattn.kit import cards

        shared, cache = cards.shared_memory_limit(device), cards.cache_bytes(device)
        known = dataclasses.replace(known, shared_memory=shared, cache_bytes=cache)
    if known.capability == (9, 0) and installed("nvidia_cutlass_dsl"):
        from evoattn.backends.hopper.clusters import resident_clusters
        from evoattn.backends.hopper.tiles import SHARED

        clusters = tuple(resident_clusters(size, SHARED, device) for size in range(1, _CLUSTER + 1))
        known = dataclasses.replace(known, clusters=clusters)
    return known
