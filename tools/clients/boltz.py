"""Boltz-1 and Boltz-2: pairformers, MSA layers, diffusion and atom transformers."""

from __future__ import annotations

import functools
from typing import Any

from boltz.model.layers.pairformer import PairformerModule, PairformerNoSeqModule
from boltz.model.modules import transformers, transformersv2, trunk, trunkv2
from boltz.model.modules.encodersv2 import get_indexing_matrix, single_to_keys
from torch import Tensor

from clients.blocks import Block, Call, Problem, pairs
from clients.boltz_calls import (
    CHUNKED,
    HEADS,
    KERNELS,
    PAIR,
    SAMPLES,
    SINGLE,
    atoms,
    diffusion,
    msa,
    pairformer,
    template,
)

__all__ = ["BLOCKS"]


def _first_diffusion(cached: bool, problem: Problem) -> Call:
    """Boltz-1's, which projects the pair features inside, and may keep them for the steps of a diffusion."""
    make = transformers.DiffusionTransformer
    module = problem.fill(make(depth=2, heads=HEADS, dim=SINGLE, dim_single_cond=SINGLE, dim_pairwise=PAIR))
    mask, n = problem.mask(), problem.residues
    of_samples = mask.repeat_interleave(SAMPLES, 0)
    single = (2 * SAMPLES, n, SINGLE)

    def run(a: Tensor, c: Tensor, z: Tensor) -> tuple[Tensor]:
        cache: dict[str, Any] | None = {} if cached else None
        for _ in range(2):
            a = module(a, c, z, mask=of_samples, multiplicity=SAMPLES, model_cache=cache)
        return (a,)

    leaves = {"a": problem.normal(*single), "c": problem.normal(*single), "z": problem.normal(2, n, n, PAIR)}
    return Call(module, run, leaves, {"a": of_samples, "c": of_samples, "z": pairs(mask)}, ("a",))


_FOUR: dict[str, Any] = {"pairwise_head_width": 16, "pairwise_num_heads": 4}
_WINDOWS = (get_indexing_matrix, single_to_keys)


def _first_atoms(problem: Problem) -> Call:
    return atoms(transformers.AtomTransformer, 16, _WINDOWS, problem, dim_pairwise=16)


BLOCKS = (
    Block("Boltz-2 pairformer", functools.partial(pairformer, PairformerModule, v2=True, **_FOUR), CHUNKED, KERNELS),
    Block("Boltz-2 template pairformer", functools.partial(template, PairformerNoSeqModule), CHUNKED, KERNELS),
    Block("Boltz-2 MSA layer", functools.partial(msa, trunkv2.MSALayer), CHUNKED, KERNELS),
    Block("Boltz-2 diffusion transformer", functools.partial(diffusion, transformersv2.DiffusionTransformer)),
    Block("Boltz-2 atom transformer", functools.partial(atoms, transformersv2.AtomTransformer, 2 * HEADS, _WINDOWS)),
    Block("Boltz-1 pairformer", functools.partial(pairformer, trunk.PairformerModule, **_FOUR), CHUNKED, KERNELS),
    Block("Boltz-1 MSA layer", functools.partial(msa, trunk.MSALayer), CHUNKED, KERNELS),
    Block("Boltz-1 diffusion transformer", functools.partial(_first_diffusion, False)),
    Block("Boltz-1 diffusion, z kept", functools.partial(_first_diffusion, True)),
    Block("Boltz-1 atom transformer", _first_atoms),
)
