"""OpenFold-3: pairformer, triangle attention, templates, MSA and Evoformer blocks, diffusion and atom transformers."""

from __future__ import annotations

import functools
from typing import Any

from openfold3.core.model.latent.evoformer import EvoformerBlock
from openfold3.core.model.latent.msa_module import MSAModuleBlock
from openfold3.core.model.latent.pairformer import PairFormerStack
from openfold3.core.model.latent.template_module import TemplatePairStack
from openfold3.core.model.layers.diffusion_transformer import DiffusionTransformer
from openfold3.core.model.layers.msa import MSAColumnGlobalAttention
from openfold3.core.model.layers.triangular_attention import TriangleAttention
from torch import Tensor

from clients.blocks import Block, Call, Options, Problem, pairs

__all__ = ["BLOCKS"]

SINGLE, PAIR, MSA, CONDITION = 64, 32, 24, 48
HEADS, SAMPLES, TEMPLATES, SEQUENCES = 4, 3, 2, 5
QUERIES, KEYS = 32, 128

CHUNKED: tuple[Options, ...] = ({}, {"chunk_size": 8})
KERNELS: tuple[Options, ...] = (
    {"use_cueq_triangle_kernels": True},
    {"use_deepspeed_evo_attention": True},
    {"use_lma": True},
)
TRITON: Options = {"use_triton_triangle_kernels": True}
"""Only for triangle attention: the triangle multiplication of a whole block then wants AMD's Triton kernel."""

_OF_ALL: dict[str, Any] = {"transition_type": "swiglu", "fuse_projection_weights": False, "inf": 1e9}
_OF_PAIRS: dict[str, Any] = {**_OF_ALL, "transition_n": 2, "pair_dropout": 0.0, "c_hidden_mul": PAIR, "c_hidden_pair_att": 16}
_OF_MSA: dict[str, Any] = {
    **_OF_PAIRS,
    "c_m": MSA,
    "c_z": PAIR,
    "c_hidden_msa_att": 8,
    "c_hidden_opm": 8,
    "no_heads_msa": HEADS,
}


def _pairformer(problem: Problem) -> Call:
    module = PairFormerStack(
        c_s=SINGLE,
        c_z=PAIR,
        c_hidden_pair_bias=16,
        no_heads_pair_bias=HEADS,
        no_heads_pair=HEADS,
        no_blocks=2,
        blocks_per_ckpt=None,
        **_OF_PAIRS,
    )
    problem.fill(module)
    mask, n = problem.mask(), problem.residues
    return Call(
        module,
        lambda s, z, **options: module(s, z, mask, pairs(mask), **options),
        {"s": problem.normal(2, n, SINGLE), "z": problem.normal(2, n, n, PAIR)},
        {"s": mask, "z": pairs(mask)},
        ("s", "z"),
    )


def _triangle(starting: bool, problem: Problem) -> Call:
    module = problem.fill(TriangleAttention(PAIR, 16, HEADS, starting=starting))
    mask, n = pairs(problem.mask()), problem.residues
    return Call(
        module,
        lambda z, **options: (module(z, mask, **options),),
        {"z": problem.normal(2, n, n, PAIR)},
        {"z": mask},
        ("z",),
    )


def _templates(problem: Problem) -> Call:
    module = TemplatePairStack(
        c_t=PAIR,
        c_hidden_tri_att=8,
        c_hidden_tri_mul=PAIR,
        no_blocks=1,
        no_heads=HEADS,
        pair_transition_n=2,
        dropout_rate=0.0,
        tri_mul_first=True,
        blocks_per_ckpt=None,
        ckpt_per_template=False,
        **_OF_ALL,
    )
    problem.fill(module)
    n = problem.residues
    mask = pairs(problem.mask())[:, None].expand(-1, TEMPLATES, -1, -1)
    return Call(
        module,
        lambda t, **options: (module(t, mask, **{"chunk_size": None, **options}),),
        {"t": problem.normal(2, TEMPLATES, n, n, PAIR)},
        {"t": mask},
        ("t",),
    )


def _msa(make: Any, problem: Problem, **more: Any) -> Call:
    """A block of the MSA module, or of AlphaFold 2's Evoformer."""
    module = problem.fill(make(**{**_OF_MSA, **more}, no_heads_pair=HEADS, msa_dropout=0.0, eps=1e-10))
    module.outer_product_mean.eps = 1.0  # pairs of padding are divided by it: 1e-3 makes them outweigh all else 100 times
    mask, n = problem.mask(), problem.residues
    of_msa = mask[:, None].expand(-1, SEQUENCES, -1)
    return Call(
        module,
        lambda m, z, **options: module(m, z, of_msa, pairs(mask), **options),
        {"m": problem.normal(2, SEQUENCES, n, MSA), "z": problem.normal(2, n, n, PAIR)},
        {"m": of_msa, "z": pairs(mask)},
        ("m", "z"),
    )


def _columns(problem: Problem) -> Call:
    """Column attention with one key and value for all heads, as for extra sequences."""
    module = problem.fill(MSAColumnGlobalAttention(MSA, 8, HEADS))
    mask = problem.mask()[:, None].expand(-1, SEQUENCES, -1)
    return Call(
        module,
        lambda m, **options: (module(m, mask, **options),),
        {"m": problem.normal(2, SEQUENCES, problem.residues, MSA)},
        {"m": mask},
        ("m",),
    )


def _rows(problem: Problem) -> Call:
    """Row attention, whose scores may be made in chunks too."""
    call = _msa(EvoformerBlock, problem, opm_first=False, no_column_attention=False)
    module: Any = call.module.msa_att_row
    of_msa = call.masks["m"]

    def run(m: Tensor, z: Tensor, **options: Any) -> tuple[Tensor]:
        return (module(m, z, of_msa, _checkpoint_chunks=False, **options),)

    return Call(module, run, call.leaves, call.masks, ("m",))


def _transformer(problem: Problem, **more: Any) -> Any:
    made = DiffusionTransformer(
        c_a=SINGLE,
        c_s=CONDITION,
        c_z=PAIR,
        c_hidden=16,
        no_heads=HEADS,
        no_blocks=2,
        n_transition=2,
        inf=1e9,
        **more,
    )
    return problem.fill(made)


def _diffusion(problem: Problem) -> Call:
    """Three samples of a structure, which share the pair features."""
    module = _transformer(problem, n_query=None, n_key=None)
    mask, n = problem.mask()[:, None], problem.residues
    of_samples = mask.expand(-1, SAMPLES, -1)
    return Call(
        module,
        lambda a, s, z, **options: (module(a, s, z, mask, **options),),
        {
            "a": problem.normal(2, SAMPLES, n, SINGLE),
            "s": problem.normal(2, SAMPLES, n, CONDITION),
            "z": problem.normal(2, 1, n, n, PAIR),
        },
        {"a": of_samples, "s": of_samples, "z": pairs(mask)},
        ("a",),
    )


def _atoms(problem: Problem) -> Call:
    """Windows of 32 queries and 128 keys, with a mask per pair."""
    module = _transformer(problem, n_query=QUERIES, n_key=KEYS)
    mask = problem.atoms(QUERIES)[:, None].expand(-1, SAMPLES, -1)
    length = mask.shape[-1]
    return Call(
        module,
        lambda a, s, p, **options: (module(a, s, p, mask, use_high_precision_attention=True, **options),),
        {
            "a": problem.normal(2, SAMPLES, length, SINGLE),
            "s": problem.normal(2, SAMPLES, length, CONDITION),
            "p": problem.normal(2, 1, length // QUERIES, QUERIES, KEYS, PAIR),
        },
        {"a": mask, "s": mask},
        ("a",),
    )


_EVOFORMER = functools.partial(_msa, EvoformerBlock, opm_first=False, no_column_attention=False, fuse_projection_weights=True)

BLOCKS = (
    Block("pairformer", _pairformer, CHUNKED, KERNELS),
    Block("triangle attention, start", functools.partial(_triangle, True), CHUNKED, (*KERNELS, TRITON)),
    Block("triangle attention, end", functools.partial(_triangle, False), CHUNKED, (*KERNELS, TRITON)),
    Block("templates", _templates, CHUNKED, KERNELS),
    Block("MSA block", functools.partial(_msa, MSAModuleBlock, opm_first=True), CHUNKED, KERNELS),
    Block("Evoformer block", _EVOFORMER, CHUNKED, KERNELS),
    Block("MSA rows", _rows, (*CHUNKED, {"_chunk_logits": 2})),
    Block("MSA columns, global", _columns, CHUNKED),
    Block("diffusion transformer", _diffusion, ({}, {"use_high_precision_attention": True})),
    Block("atom transformer", _atoms),
)
