"""The attentions of each model family, as its patch calls them (`evoattn.clients`), at the width of the published models."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

DTYPES = (torch.bfloat16, torch.float32)
"""The dtypes of q in which families run unless they are told otherwise."""


@dataclasses.dataclass(frozen=True)
class Attention:
    """One attention of a model. Sizes that are None are the number of residues or tokens.

    Args:
        name: what reports call it.
        h, d: heads, and channels of each.
        n: rows.
        q, k: queries and keys.
        mask: whether a mask bias is added, `[n,1,1,k]`.
        pair: whether a pair bias `[1,h,q,k]` is added, which lies in memory as a projection `[q,k,h]` leaves it.
        scaled: whether q is scaled already.
        windows: whether the pair bias varies along a leading axis of so many entries, as in windows of atoms.
        shared: whether all heads share their keys, as in global attention.
        turned: whether the pair bias lies in memory as one of keys and queries, as around OpenFold-3's ending node. No kernel
            depends on how a mask lies, nor on whether k and v are parts of one projection.
        float32_biases: whether both biases are in float32, whatever q is.
    """

    name: str
    h: int
    d: int
    n: int | None = None
    q: int | None = None
    k: int | None = None
    mask: bool = True
    pair: bool = True
    scaled: bool = True
    windows: int | None = None
    shared: bool = False
    turned: bool = False
    float32_biases: bool = False


def _triangles(
    name: str = "triangle", d: int = 32, *, switch: bool = True, float32_biases: bool = False, turned: bool = False
) -> Iterator[Attention]:
    """Triangle attention.

    switch: whether the client has switches for kernels, which take q as it is.
    float32_biases: whether it hands them a float32 pair bias.
    turned: whether a pair bias lies transposed around the ending node.
    """
    for plain in (Attention(name, 4, d), Attention(f"{name}, ending node", 4, d, turned=True))[: 1 + turned]:
        yield plain
        if switch:
            unscaled = dataclasses.replace(plain, name=f"{plain.name} with a kernel switch", scaled=False)
            yield unscaled
            if float32_biases:
                yield dataclasses.replace(unscaled, float32_biases=True)


def _tokens(*, mask: bool = True, scaled: bool = True) -> Iterator[Attention]:
    """Single track, diffusion transformer and atom windows of AlphaFold 3, for one sample and for five."""
    yield Attention("single", 16, 24, n=1, mask=mask, scaled=scaled)
    for n in (1, 5):
        yield Attention(f"diffusion, {n} samples", 16, 48, n=n, mask=mask, scaled=scaled)
        yield Attention(f"atoms, {n} samples", 4, 32, n=n, q=32, k=128, windows=64, scaled=scaled)


_EVOFORMER = (
    *_triangles(),
    Attention("MSA rows", 8, 32, n=512),
    Attention("MSA columns", 8, 32, q=512, k=512, pair=False),
    Attention("extra MSA rows", 8, 8, n=1024),
    Attention("extra MSA columns", 8, 8, q=1, k=1024, pair=False, shared=True, scaled=False),
    *_triangles("template", 16),
    Attention("template points", 4, 16, n=4096, q=1, k=4, pair=False),
)

FAMILIES: dict[str, tuple[Attention, ...]] = {
    "esmfold": (*_triangles(switch=False), Attention("sequence", 32, 32, n=1)),
    "openfold": _EVOFORMER,
    "openfold3": (*_triangles(turned=True), *_triangles("template", 16, turned=True), *_tokens()),
    "boltz": (*_triangles(), *_tokens(scaled=False)),
    "boltzgen": (*_triangles(), *_tokens(scaled=False)),
    "protenix": (*_triangles(float32_biases=True), *_tokens(mask=False)),
    "opendde": (*_triangles(float32_biases=True), *_tokens(mask=False)),
}
"""By the name that `evoattn.patch` takes."""

_LONGEST, _BLOCK = 2048, 64
_REMAINDERS = (0, 1, 8, 14, 16, 24, 30, 32, 33, 48, 52, 55)

LENGTHS = (*(start + more for start in range(0, _LONGEST, _BLOCK) for more in _REMAINDERS if start + more), _LONGEST)
"""Residues or tokens that stand for all up to 2,048. A kernel depends on the number of blocks and on the remainder."""

COARSE = tuple(start + more for start in range(0, _LONGEST, _BLOCK) for more in (0, 33) if start + more)
"""The same for the further cards of an architecture, whose kernels differ only by how large a problem is."""
