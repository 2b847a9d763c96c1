"""OpenDDE: pairformer, templates, diffusion and atom transformers. Called as Protenix' are.

Its MSA block writes into what its gradients need, so it cannot be differentiated: two of its layers are here, by themselves.
"""

from __future__ import annotations

import functools

from opendde.model.modules import pairformer as trunk
from opendde.model.modules import primitives, transformer
from opendde.model.triangular import layers
from torch import Tensor, nn

from clients.blocks import Block, Call, Problem, pairs
from clients.protenix_calls import CHUNKED, HEADS, atoms, attention, diffusion, pairformer, templates

__all__ = ["BLOCKS"]

KERNELS = (
    {"triangle_attention": "cuequivariance"},
    {"triangle_multiplicative": "cuequivariance", "triangle_attention": "cuequivariance"},
)


def _kernel(problem: Problem) -> Call:
    """The call that OpenDDE makes on GPUs alone, by itself, next to the one of its torch path."""
    n, channels = problem.residues, 32
    mask = problem.mask()[1]
    of_mask = 1e9 * (pairs(mask) - 1)[:, None, None]

    def run(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, kernel: bool = False) -> tuple[Tensor]:
        scale = channels**-0.5
        if kernel:
            return (layers.cuequivariance_triangular_attn(q, k, v, bias, (of_mask == 0).bool(), scale)[0],)
        return (layers._attention(q * scale, k, v, [of_mask, bias]),)

    leaves = {name: problem.normal(n, HEADS, n, channels) for name in "qkv"} | {"bias": problem.normal(1, HEADS, n, n)}
    return Call(nn.Module(), run, leaves, dict.fromkeys("qkv", mask), ("q",))


def _averaging(problem: Problem) -> Call:
    module, n = problem.fill(trunk.MSAPairWeightedAveraging(24, 16, 32, HEADS)), problem.residues
    leaves = {"m": problem.normal(5, n, 24), "z": problem.normal(n, n, 32)}
    return Call(module, lambda m, z: (module(m, z),), leaves, {}, ("m",))


def _outer_product(problem: Problem) -> Call:
    module, n = problem.fill(layers.OuterProductMean(24, 32, 16)), problem.residues
    of_msa = problem.mask()[1].expand(5, -1)
    return Call(module, lambda m: (module(m, of_msa),), {"m": problem.normal(5, n, 24)}, {}, ("z",))


BLOCKS = (
    Block("pairformer", functools.partial(pairformer, trunk.PairformerStack), CHUNKED, KERNELS),
    Block("triangle kernel, by itself", _kernel, switches=({"kernel": True},)),
    Block("template pairformer", functools.partial(templates, trunk.PairformerStack), CHUNKED, KERNELS),
    Block("pair-weighted averaging, by itself", _averaging),
    Block("outer product mean, by itself", _outer_product),
    Block("diffusion transformer", functools.partial(diffusion, transformer.DiffusionTransformer)),
    Block("atom transformer", functools.partial(atoms, transformer.AtomTransformer), ({}, {"chunk_size": 2})),
    Block("attention", functools.partial(attention, primitives.Attention, True)),
    Block("attention without SDPA", functools.partial(attention, primitives.Attention, False)),
)
