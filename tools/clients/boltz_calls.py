"""Calls of the blocks that Boltz and BoltzGen share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from clients.blocks import Call, Options, Problem, pairs

__all__ = ["CHUNKED", "HEADS", "KERNELS", "PAIR", "SAMPLES", "SINGLE"]
__all__ += ["atoms", "diffusion", "msa", "pairformer", "template"]

SINGLE, PAIR, MSA = 64, 32, 24
HEADS, SAMPLES, SEQUENCES = 4, 3, 5
QUERIES, KEYS = 32, 128

KERNELS = ({"use_kernels": True},)
CHUNKED: tuple[Options, ...] = ({}, {"chunk_size_tri_attn": 8})
MSA_OPTIONS = {"msa_s": MSA, "token_z": PAIR, "msa_dropout": 0.0, "z_dropout": 0.0, "pairwise_head_width": 16}


def pairformer(make: Callable[..., Any], problem: Problem, **options: Any) -> Call:
    """Two layers, called one by one: the module chooses the chunks itself."""
    module = problem.fill(make(SINGLE, PAIR, num_blocks=2, num_heads=HEADS, dropout=0.0, **options))
    mask, n = problem.mask(), problem.residues

    def run(s: Tensor, z: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        for layer in module.layers:
            s, z = layer(s, z, mask, pairs(mask), **options)
        return s, z

    leaves = {"s": problem.normal(2, n, SINGLE), "z": problem.normal(2, n, n, PAIR)}
    return Call(module, run, leaves, {"s": mask, "z": pairs(mask)}, ("s", "z"))


def template(make: Callable[..., Any], problem: Problem) -> Call:
    """A pairformer without the single track."""
    module = problem.fill(make(PAIR, num_blocks=1, dropout=0.0, pairwise_head_width=8, pairwise_num_heads=4))
    mask, n = pairs(problem.mask()), problem.residues

    def run(z: Tensor, **options: Any) -> tuple[Tensor]:
        for layer in module.layers:
            z = layer(z, mask, **options)
        return (z,)

    return Call(module, run, {"z": problem.normal(2, n, n, PAIR)}, {"z": mask}, ("z",))


def msa(make: Callable[..., Any], problem: Problem, **options: Any) -> Call:
    """An MSA layer of five sequences."""
    module = problem.fill(make(**MSA_OPTIONS, pairwise_num_heads=2, **options))
    mask, n = problem.mask(), problem.residues
    of_msa = mask[:, None].expand(-1, SEQUENCES, -1)
    return Call(
        module,
        lambda z, m, **options: module(z, m, pairs(mask), of_msa, **options),
        {"z": problem.normal(2, n, n, PAIR), "m": problem.normal(2, SEQUENCES, n, MSA)},
        {"z": pairs(mask), "m": of_msa},
        ("z", "m"),
    )


def diffusion(make: Callable[..., Any], problem: Problem, **options: Any) -> Call:
    """Three samples a structure, which share a pair bias."""
    depth = 2
    module = problem.fill(make(depth=depth, heads=HEADS, dim=SINGLE, dim_single_cond=SINGLE, **options))
    mask, n = problem.mask(), problem.residues
    of_samples = mask.repeat_interleave(SAMPLES, 0)
    single = (2 * SAMPLES, n, SINGLE)
    return Call(
        module,
        lambda a, c, bias: (module(a, c, bias=bias, mask=of_samples, multiplicity=SAMPLES),),
        {"a": problem.normal(*single), "c": problem.normal(*single), "bias": problem.normal(2, n, n, depth * HEADS)},
        {"a": of_samples, "c": of_samples, "bias": pairs(mask)},
        ("a",),
    )


def atoms(make: Callable[..., Any], bias: int, keys: tuple[Any, Any], problem: Problem, **options: Any) -> Call:
    """Windows of 32 queries and 128 keys. Each has an atom: where there is none, Boltz rounds scores to a sixteenth.

    Args:
        make: makes the block.
        bias: channels of the bias of a window.
        keys: the client's functions of the windows, `get_indexing_matrix` and `single_to_keys`.
        problem: the random problem.
        options: more arguments of `make`.
    """
    module = problem.fill(make(QUERIES, KEYS, depth=2, heads=HEADS, dim=SINGLE, dim_single_cond=SINGLE, **options))
    mask = problem.atoms(QUERIES)
    length = mask.shape[1]
    windows = length // QUERIES
    indexing, to_keys = keys
    matrix = indexing(windows, QUERIES, KEYS, "cpu").to(problem.dtype)
    of_keys = functools.partial(to_keys, indexing_matrix=matrix, W=QUERIES, H=KEYS)
    single = (2, length, SINGLE)
    return Call(
        module,
        lambda q, c, p: (module(q, c, p, of_keys, mask),),
        {"q": problem.normal(*single), "c": problem.normal(*single), "p": problem.normal(2, windows, QUERIES, KEYS, bias)},
        {"q": mask, "c": mask},
        ("q",),
    )
