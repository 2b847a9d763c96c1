"""Protenix: pairformer, templates, MSA block, diffusion and atom transformers. Nothing there has a batch axis."""

from __future__ import annotations

import functools

from protenix.model.modules import pairformer as trunk
from protenix.model.modules import primitives, transformer

from clients.blocks import Block, Options
from clients.protenix_calls import CHUNKED, atoms, attention, diffusion, msa, pairformer, templates

__all__ = ["BLOCKS"]

KERNELS = tuple({"triangle_attention": name} for name in ("cuequivariance", "deepspeed", "triattention"))
MULTIPLICATION = {"triangle_multiplicative": "cuequivariance", "triangle_attention": "cuequivariance"}


def _like(residues: int, switch: Options) -> Options:
    """At 16 residues or fewer two of the names leave q unscaled, in the original as well, which takes its torch path there."""
    name = switch.get("triangle_attention")
    return {"triangle_attention": name} if residues <= 16 and name in ("cuequivariance", "deepspeed") else {}


_FOLDS = functools.partial(pairformer, trunk.PairformerStack, dropout=0.0)
_TEMPLATES = functools.partial(templates, trunk.PairformerStack, dropout=0.0)
# A checkpoint computes again without the mode that watches calls, and layers then go another way.
trunk.get_checkpoint_fn = lambda: lambda module, *arguments: module(*arguments)
_MSA = functools.partial(msa, trunk.MSABlock, msa_dropout=0.0, pair_dropout=0.0, msa_chunk_size=4, msa_max_size=8)

BLOCKS = (
    Block("pairformer", _FOLDS, CHUNKED, (*KERNELS, MULTIPLICATION), _like),
    Block("template pairformer", _TEMPLATES, CHUNKED, KERNELS, _like),
    Block("MSA block", _MSA, CHUNKED, KERNELS, _like),
    Block("diffusion transformer", functools.partial(diffusion, transformer.DiffusionTransformer)),
    Block("atom transformer", functools.partial(atoms, transformer.AtomTransformer), ({}, {"chunk_size": 2})),
    Block("attention", functools.partial(attention, primitives.Attention, True)),
    Block("attention without SDPA", functools.partial(attention, primitives.Attention, False)),
)
