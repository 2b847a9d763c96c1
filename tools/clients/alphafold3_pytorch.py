"""lucidrains' alphafold3-pytorch: pairformer, MSA module, templates, diffusion and atom transformers. Its masks are bool."""

from __future__ import annotations

from typing import Any

from alphafold3_pytorch import alphafold3
from torch import Tensor

from clients.blocks import Block, Call, Problem, pairs

__all__ = ["BLOCKS"]

SINGLE, PAIR, MSA, CONDITION, ATOM_PAIR, FEATURES = 64, 32, 24, 48, 16, 20
HEADS, SEQUENCES, TEMPLATES = 4, 5, 3
WINDOW = 27

_OF_PAIRS: dict[str, Any] = {
    "pairwise_block_kwargs": {
        "tri_attn_dim_head": 16,
        "tri_attn_heads": 2,
        "dropout_row_prob": 0.0,
        "dropout_col_prob": 0.0,
    }
}


def _pairformer(problem: Problem) -> Call:
    module = alphafold3.PairformerStack(
        dim_single=SINGLE,
        dim_pairwise=PAIR,
        depth=2,
        pair_bias_attn_dim_head=16,
        pair_bias_attn_heads=HEADS,
        dropout_row_prob=0.0,
        **_OF_PAIRS,
    )
    problem.fill(module)
    mask, n = problem.mask(), problem.residues
    return Call(
        module,
        lambda s, z: module(single_repr=s, pairwise_repr=z, mask=mask.bool()),
        {"s": problem.normal(2, n, SINGLE), "z": problem.normal(2, n, n, PAIR)},
        {"s": mask, "z": pairs(mask)},
        ("s", "z"),
    )


def _msa(problem: Problem) -> Call:
    module = alphafold3.MSAModule(
        dim_single=SINGLE,
        dim_pairwise=PAIR,
        depth=2,
        dim_msa=MSA,
        dim_msa_input=MSA,
        dim_additional_msa_feats=2,
        outer_product_mean_dim_hidden=8,
        msa_pwa_dropout_row_prob=0.0,
        msa_pwa_heads=HEADS,
        msa_pwa_dim_head=8,
        **_OF_PAIRS,
    )
    problem.fill(module)
    mask, n = problem.mask(), problem.residues
    more = problem.normal(2, SEQUENCES, n, 2).detach()
    of_sequences = mask.new_ones(2, SEQUENCES).bool()

    def run(s: Tensor, z: Tensor, m: Tensor) -> tuple[Tensor]:
        given = {"msa": m, "msa_mask": of_sequences, "additional_msa_feats": more}
        return (module(single_repr=s, pairwise_repr=z, mask=mask.bool(), **given),)

    leaves = {
        "s": problem.normal(2, n, SINGLE),
        "z": problem.normal(2, n, n, PAIR),
        "m": problem.normal(2, SEQUENCES, n, MSA),
    }
    return Call(module, run, leaves, {"s": mask, "z": pairs(mask), "m": mask[:, None].expand(-1, SEQUENCES, -1)}, ("z",))


def _templates(problem: Problem) -> Call:
    module = alphafold3.TemplateEmbedder(
        dim_template_feats=FEATURES, dim=MSA, dim_pairwise=PAIR, pairformer_stack_depth=1, **_OF_PAIRS
    )
    problem.fill(module)
    mask, n = problem.mask(), problem.residues
    of_templates = mask.new_ones(2, TEMPLATES).bool()
    return Call(
        module,
        lambda z, t: (module(templates=t, template_mask=of_templates, pairwise_repr=z, mask=mask.bool()),),
        {"z": problem.normal(2, n, n, PAIR), "t": problem.normal(2, TEMPLATES, n, n, FEATURES)},
        {"z": pairs(mask), "t": pairs(mask)[:, None].expand(-1, TEMPLATES, -1, -1)},
        ("z",),
    )


def _transformer(problem: Problem, pair: int, **more: Any) -> Any:
    made = alphafold3.DiffusionTransformer(
        depth=2,
        heads=HEADS,
        dim=SINGLE,
        dim_single_cond=CONDITION,
        dim_pairwise=pair,
        attn_pair_bias_kwargs={"dim_head": 16},
        **more,
    )
    return problem.fill(made)


def _diffusion(problem: Problem) -> Call:
    module = _transformer(problem, PAIR)
    mask, n = problem.mask(), problem.residues
    return Call(
        module,
        lambda s, c, z: (module(s, single_repr=c, pairwise_repr=z, mask=mask.bool()),),
        {"s": problem.normal(2, n, SINGLE), "c": problem.normal(2, n, CONDITION), "z": problem.normal(2, n, n, PAIR)},
        {"s": mask, "c": mask, "z": pairs(mask)},
        ("s",),
    )


def _atoms(problem: Problem) -> Call:
    """Windows of 27 atoms, which attend themselves and the one before, with a mask per pair."""
    module = _transformer(problem, ATOM_PAIR, attn_window_size=WINDOW)
    mask = problem.atoms(WINDOW)
    n = mask.shape[1]
    of_pairs = problem.normal(2, n // WINDOW, WINDOW, 2 * WINDOW).detach() > -1
    return Call(
        module,
        lambda s, c, p: (module(s, single_repr=c, pairwise_repr=p, mask=mask.bool(), windowed_mask=of_pairs),),
        {
            "s": problem.normal(2, n, SINGLE),
            "c": problem.normal(2, n, CONDITION),
            "p": problem.normal(2, n // WINDOW, WINDOW, 2 * WINDOW, ATOM_PAIR),
        },
        {"s": mask, "c": mask},
        ("s",),
    )


BLOCKS = (
    Block("pairformer", _pairformer),
    Block("MSA module", _msa),
    Block("template embedder", _templates),
    Block("diffusion transformer", _diffusion),
    Block("atom transformer", _atoms),
)
