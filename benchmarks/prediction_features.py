"""Inputs of whole models, kept small in `features/`.

- `boltz2`: batches that `boltz predict` 2.2.1 made of ubiquitin on a CPU, without an MSA. Up to 988 residues they are one chain
  of repeats. 2,500 residues are 33 chains, the last one with 68 residues.
- `openfold3`: what the dataset of `run_openfold predict` 0.5.0 made of 2, 4, 9 and 13 chains, without an MSA or templates.
- `protenix`: what its data loader 2.0.0 made of the same chains, without an MSA or templates.

`arguments.json` holds the arguments of the published model. `training.json` has what its training changes of them, with the
settings of its loss. `narrow.json` has sizes of a narrow model: in Boltz-2 by place, else of a name at any depth.

To add features, write `packed(batch)` of a client's own batch.
"""

from __future__ import annotations

import io
import lzma
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["FEATURES", "Features", "check_crop", "cropped", "moved", "narrowed", "packed", "unpacked"]

Features = Mapping[str, Any]

FEATURES = Path(__file__).with_name("features")
_SPARSE = 1_000_000
"""A tensor with more elements, fewer than one in 32 of them not 0, is kept as its other elements."""


WINDOW = 32
"""Boltz-2's features have the atoms of whole windows."""


def packed(features: Mapping[str, Tensor]) -> bytes:
    """Features as the bytes of a file. A tensor that repeats along an axis is kept once, a sparse one as its elements."""
    file = io.BytesIO()
    torch.save({name: _small(x) for name, x in features.items()}, file)
    return lzma.compress(file.getvalue(), preset=9 | lzma.PRESET_EXTREME)


def unpacked(program: str, residues: int, device: torch.device) -> dict[str, Any]:
    """The features of a program's folder on a device."""
    data = lzma.decompress((FEATURES / program / f"{residues}.pt.xz").read_bytes())
    return moved(torch.load(io.BytesIO(data)), device)


def _small(x: Tensor) -> Tensor:
    once = x
    for axis in range(x.ndim):
        if once.shape[axis] > 1 and torch.equal(once, once.narrow(axis, 0, 1).expand_as(once)):
            once = once.narrow(axis, 0, 1)
    if once.numel() > _SPARSE and 32 * int(once.count_nonzero()) < once.numel():
        return x.to_sparse()
    return once.clone().expand(x.shape)


def moved(features: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Features, dense ones, on a device."""
    return {name: moved(x, device) if isinstance(x, dict) else _dense(x.to(device)) for name, x in features.items()}


def _dense(x: Tensor) -> Tensor:
    return x.to_dense() if x.is_sparse else x.contiguous()


def narrowed(features: Features, first: int, kept: Mapping[int, int]) -> dict[str, Any]:
    """Features whose axes of some lengths, from axis `first` on, are cut."""
    numbers: dict[str, Any] = {}
    for name, x in features.items():
        if isinstance(x, Mapping):
            numbers[name] = narrowed(x, first, kept)
            continue
        for axis in range(first, x.ndim):
            x = x.narrow(axis, 0, kept.get(x.shape[axis], x.shape[axis]))
        numbers[name] = x.contiguous()
    return numbers


def check_crop(tokens: int, every: int) -> None:
    """Raise ValueError if there are not so many tokens."""
    if tokens > every:
        raise ValueError(f"a crop of {tokens} tokens: the features have {every}")


def cropped(features: Features, tokens: int) -> dict[str, Any]:
    """The first tokens of a batch of Boltz-2, with their atoms in whole windows.

    Raises:
        ValueError: there are not so many tokens.
    """
    atoms, every = features["atom_to_token"].shape[1:]
    check_crop(tokens, every)
    real = int(features["atom_to_token"][..., :tokens].sum())
    numbers = narrowed(features, 1, {every: tokens, atoms: -(-real // WINDOW) * WINDOW})
    there = numbers["atom_to_token"].sum(-1)  # 0: an atom of a token that is cut off
    return numbers | {name: numbers[name] * there.to(numbers[name].dtype) for name in ("atom_pad_mask", "atom_resolved_mask")}
