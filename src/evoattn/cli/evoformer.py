"""Make the four attentions of an Evoformer block from an alignment, with random weights of a fixed seed.

    m[s,i] = W_msa onehot(s,i) + W_query onehot(0,i)                     MSA representation    [N, L, 256]
    z[i,j] = W_left onehot(0,i) + W_right onehot(0,j) + W_relpos[j - i]  pair representation   [L, L, 128]

Each attention takes q, k, v as linear projections of the normalised m or z, and its pair bias as a linear projection of z.
Source: Jumper et al. 2021, supplementary algorithms 3 - 5 (embedding), 7, 8 (MSA row and column), 13, 14 (triangle).
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

from evoattn.cli.alignment import RESIDUES
from evoattn.testing import Case, Inputs

MSA_HEADS, TRIANGLE_HEADS, CHANNELS = 8, 4, 32
_MSA_WIDTH, _PAIR_WIDTH = 256, 128
_FURTHEST = 32
"""Relative positions beyond this many residues look the same."""


@dataclasses.dataclass(frozen=True)
class Embedding:
    """The representations of one alignment, in float32.

    Args:
        m: `[N, L, 256]`, MSA representation, normalised.
        z: `[L, L, 128]`, pair representation, normalised.
        residue: bool `[N, L]`, False where a sequence has a gap.
        known: bool `[L]`, False where the query's residue is X.
        seed: where weights and cotangents come from.
    """

    m: Tensor
    z: Tensor
    residue: Tensor
    known: Tensor
    seed: int


def embed(rows: tuple[str, ...], seed: int, device: torch.device) -> Embedding:
    """Embed sequences in letters of `RESIDUES`, the query first; the same seed gives the same numbers."""
    index = {letter: number for number, letter in enumerate(RESIDUES)}
    letters = [[index[letter] for letter in sequence] for sequence in rows]
    tokens = torch.tensor(letters, dtype=torch.int64, device=device)  # [N,L]
    query = tokens[0]
    rng = torch.Generator().manual_seed(seed)

    def table(entries: int, width: int) -> Tensor:
        return torch.randn(entries, width, generator=rng, dtype=torch.float32).to(device)

    def normalise(x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:])

    msa_table, query_table = table(len(RESIDUES), _MSA_WIDTH), table(len(RESIDUES), _MSA_WIDTH)
    left, right = table(len(RESIDUES), _PAIR_WIDTH), table(len(RESIDUES), _PAIR_WIDTH)
    relative = table(2 * _FURTHEST + 1, _PAIR_WIDTH)
    place = torch.arange(len(query), device=device)
    apart = (place - place[:, None]).clamp(-_FURTHEST, _FURTHEST) + _FURTHEST  # [i,j]
    return Embedding(
        m=normalise(msa_table[tokens] + query_table[query]),
        z=normalise(left[query][:, None] + right[query] + relative[apart]),
        residue=tokens != index["-"],
        known=query != index["X"],
        seed=seed,
    )


def attentions(embedding: Embedding, dtype: torch.dtype) -> list[Inputs]:
    """The four attentions in the order in which an Evoformer block runs them."""
    m, z = embedding.m, embedding.z
    return [
        _inputs("MSA row + pair bias", m, z, embedding.residue, MSA_HEADS, dtype, embedding.seed + 1),
        _inputs("MSA column", m.transpose(0, 1), None, embedding.residue.T, MSA_HEADS, dtype, embedding.seed + 2),
        triangle_start(embedding, dtype),
        triangle("triangle, end node", embedding, z.transpose(0, 1), dtype, embedding.seed + 4),
    ]


def triangle_start(embedding: Embedding, dtype: torch.dtype) -> Inputs:
    """Triangle attention around the starting node: row n is residue i, and j attends over k."""
    return triangle("triangle, start node", embedding, embedding.z, dtype, embedding.seed + 3)


def triangle(name: str, embedding: Embedding, z: Tensor, dtype: torch.dtype, seed: int) -> Inputs:
    mask = embedding.known.expand(z.shape[:2])
    return _inputs(name, z, z, mask, TRIANGLE_HEADS, dtype, seed)


def _inputs(name: str, x: Tensor, z: Tensor | None, mask: Tensor, heads: int, dtype: torch.dtype, seed: int) -> Inputs:
    """q, k, v `[1,n,l,h,d]` from x `[n,l,width]` of any strides; pair bias `[1,1,h,q,k]`, a permuted linear of z."""
    rng = torch.Generator().manual_seed(seed)
    n, length = x.shape[:2]

    def linear(source: Tensor, outputs: int) -> Tensor:
        weight = torch.randn(outputs, source.shape[-1], generator=rng, dtype=torch.float32) * source.shape[-1] ** -0.5
        return F.linear(source, weight.to(source.device)).to(dtype)

    q, k, v = (linear(x, heads * CHANNELS).view(1, n, length, heads, CHANNELS) for _ in range(3))
    pair_bias = None if z is None else linear(z, heads).permute(2, 0, 1)[None, None]
    noise = torch.Generator(x.device).manual_seed(seed)
    do = torch.randn(q.shape, generator=noise, dtype=torch.float32, device=x.device).to(dtype)
    gradients = ("q", "k", "v", "pair_bias")
    case = Case(name=name, n=n, h=heads, lq=length, lk=length, d=CHANNELS, dtype=dtype, gradients=gradients)
    return Inputs(case, q, k, v, mask[None], None, pair_bias, do, None)
