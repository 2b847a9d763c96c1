"""The named layers, from the norm to the output product, around the attentions of `evoattn.workloads`."""

from __future__ import annotations

import dataclasses

from evoattn import workloads
from evoattn.workloads import Workload

__all__ = ["LAYERS", "workload"]


def _layer(of: Workload, name: str, layer: str, channels: int, where: str, length_axes: tuple[str, ...]) -> Workload:
    return dataclasses.replace(of, name=name, layer=layer, channels=channels, where=where, length_axes=length_axes)


_DIFFUSION = _layer(
    Workload("", 1, 48, 16, 768, 768, 48, True, True, ""),
    "layer_diffusion768", "pair_bias", 768, "diffusion transformer's attention, the whole layer", ("lq", "lk"),
)  # fmt: skip

LAYERS: tuple[Workload, ...] = (
    *(
        _layer(
            workloads.workload(f"tri{length}"),
            f"layer{length}", "triangle", 128, "triangle attention, the whole layer", ("n", "lq", "lk"),
        )
        for length in (384, 256, 768, 1536)
    ),
    _layer(
        Workload("", 1, 512, 8, 384, 384, 32, True, True, ""),
        "layer_msa_row384", "msa_row", 256, "MSA row attention with pair bias, the whole layer", ("lq", "lk"),
    ),
    _layer(
        Workload("", 1, 384, 8, 512, 512, 32, True, False, ""),
        "layer_msa_column384", "msa_column", 256, "MSA column attention, the whole layer", ("n",),
    ),
    _DIFFUSION,
    _DIFFUSION.with_rows(5),
    _layer(
        Workload("", 1, 1, 16, 768, 768, 24, True, True, ""),
        "layer_single768", "single", 384, "attention with pair bias of the single track, the whole layer", ("lq", "lk"),
    ),
)  # fmt: skip
"""Whole layers, norm to output."""


def workload(name: str) -> Workload:
    """The layer of a name, also at another length, or with fewer rows: "layer500", "layer_diffusion768n5".

    Raises:
        ValueError: there is none; the message lists the names.
    """
    return workloads.workload(name, LAYERS)
