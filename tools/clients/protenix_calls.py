"""Calls of the blocks that Protenix and OpenDDE share. They have no batch axis, and their last residues are padding.

The single track has no mask, so residues read the padded rows of the pair features. In float64 the scores of these rows keep
seven digits after -1e9 was added. That leaves 4e-9 in the outputs, and 6e-14 if 1e4 takes the place of 1e9.
"""

from __future__ import annotations

from typing import Any

from clients.blocks import Call, Options, Problem, pairs

__all__ = ["CHUNKED", "HEADS", "atoms", "attention", "diffusion", "msa", "pairformer", "templates"]

SINGLE, PAIR, MSA, CONDITION = 64, 128, 24, 48
HEADS, SAMPLES, SEQUENCES = 4, 3, 5
QUERIES, KEYS = 32, 128

CHUNKED: tuple[Options, ...] = ({}, {"chunk_size": 8})


def pairformer(make: Any, problem: Problem, **more: Any) -> Call:
    """Two blocks. The pair features have 128 channels, since the triangles have 4 heads of 32 whatever is asked for."""
    module = problem.fill(make(n_blocks=2, n_heads=HEADS, c_z=PAIR, c_s=SINGLE, **more))
    mask, n = problem.mask()[1], problem.residues
    return Call(
        module,
        lambda s, z, **options: module(s, z, pairs(mask), **options),
        {"s": problem.normal(n, SINGLE), "z": problem.normal(n, n, PAIR)},
        {"s": mask, "z": pairs(mask)},
        ("s", "z"),
    )


def templates(make: Any, problem: Problem, **more: Any) -> Call:
    """A block without the single track."""
    module = problem.fill(make(n_blocks=1, c_s=0, c_z=64, num_intermediate_factor=2, **more))
    mask, n = pairs(problem.mask()[1]), problem.residues
    return Call(
        module,
        lambda z, **options: (module(None, z, mask, **options)[1],),
        {"z": problem.normal(n, n, 64)},
        {"z": mask},
        ("z",),
    )


def msa(make: Any, problem: Problem, **more: Any) -> Call:
    """Five sequences, which are averaged by the pair features."""
    module = problem.fill(make(c_m=MSA, c_z=PAIR, c_hidden=16, **more))
    mask, n = problem.mask()[1], problem.residues
    of_msa = mask.expand(SEQUENCES, -1)
    return Call(
        module,
        lambda m, z, **options: module(m, z, pairs(mask), **options),
        {"m": problem.normal(SEQUENCES, n, MSA), "z": problem.normal(n, n, PAIR)},
        {"m": of_msa, "z": pairs(mask)},
        ("m", "z"),
    )


def diffusion(make: Any, problem: Problem) -> Call:
    """Three samples, which share the pair features. There is no mask."""
    module, n = problem.fill(make(c_a=SINGLE, c_s=CONDITION, c_z=32, n_blocks=2, n_heads=HEADS)), problem.residues
    return Call(
        module,
        lambda a, s, z: (module(a, s, z),),
        {"a": problem.normal(SAMPLES, n, SINGLE), "s": problem.normal(SAMPLES, n, CONDITION), "z": problem.normal(1, n, n, 32)},
        {},
        ("a",),
    )


def atoms(make: Any, problem: Problem) -> Call:
    """Windows of 32 queries and 128 keys. The last window is filled up, and that is masked inside."""
    module = make(c_atom=SINGLE, c_atompair=16, n_blocks=2, n_heads=HEADS, n_queries=QUERIES, n_keys=KEYS)
    problem.fill(module)
    n = 3 * problem.residues
    return Call(
        module,
        lambda q, c, p, **options: (module(q, c, p, **options),),
        {
            "q": problem.normal(SAMPLES, n, SINGLE),
            "c": problem.normal(SAMPLES, n, SINGLE),
            "p": problem.normal(SAMPLES, -(-n // QUERIES), QUERIES, KEYS, 16),
        },
        {},
        ("q",),
    )


def attention(make: Any, sdpa: bool, problem: Problem, **more: Any) -> Call:
    """The module that the single track, samples and atoms use, in windows with a bias of its own."""
    module = problem.fill(make(SINGLE, SINGLE, SINGLE, 16, HEADS, use_efficient_implementation=sdpa, **more))
    n = 3 * problem.residues
    return Call(
        module,
        lambda x, bias: (module(x, x, attn_bias=bias, n_queries=QUERIES, n_keys=KEYS),),
        {"x": problem.normal(2, n, SINGLE), "bias": problem.normal(2, HEADS, n, n)},
        {},
        ("x",),
    )
