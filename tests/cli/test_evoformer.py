"""The demo's attentions: those of an Evoformer block on an alignment."""

import dataclasses

import torch

from evoattn.cli import evoformer
from evoattn.cli.evoformer import attentions, embed

from .conftest import NAMES


def test_the_attentions_are_those_of_an_evoformer() -> None:
    """Shapes, masks from gaps, the transposed pair at the ending node, the permuted pair bias; the same numbers each time."""
    rows = ("MKVLA", "M-VL-", "MKX--")
    cpu = torch.device("cpu")
    embedding = embed(rows, 3, cpu)
    row, column, start, end = attentions(embedding, torch.float32)
    gaps = torch.tensor([[letter != "-" for letter in line] for line in rows])
    assert [inputs.case.name for inputs in (row, column, start, end)] == list(NAMES)
    assert row.q.shape == (1, 3, 5, 8, 32)
    assert row.pair_bias is not None and row.pair_bias.shape == (1, 1, 8, 5, 5) and row.pair_bias.stride(2) == 1
    assert row.mask is not None and torch.equal(row.mask[0], gaps)
    assert column.q.shape == (1, 5, 3, 8, 32) and column.pair_bias is None
    assert column.mask is not None and torch.equal(column.mask[0], gaps.T)
    assert start.q.shape == end.q.shape == (1, 5, 5, 4, 32)
    assert start.mask is not None and bool(start.mask.all())
    again = attentions(embed(rows, 3, cpu), torch.float32)
    assert all(torch.equal(a.q, b.q) and torch.equal(a.do, b.do) for a, b in zip(again, (row, column, start, end), strict=True))
    for other in (embed(rows, 4, cpu), dataclasses.replace(embedding, seed=4)):
        assert not torch.equal(attentions(other, torch.float32)[0].q, row.q)


def test_the_pair_representation_knows_how_far_apart_residues_are() -> None:
    z = embed(("AAAA",), 0, torch.device("cpu")).z
    assert torch.equal(z[0, 1], z[2, 3])
    assert not torch.allclose(z[0, 1], z[0, 2])
    assert not torch.allclose(z[0, 1], z[1, 0])


def test_the_ending_node_runs_on_the_transposed_pair() -> None:
    """With the weights of the starting node, the ending node's q is that of the transposed pair representation."""
    embedding = embed(("MKVLA",), 0, torch.device("cpu"))
    start = evoformer.triangle("same", embedding, embedding.z, torch.float32, 7)
    end = evoformer.triangle("same", embedding, embedding.z.transpose(0, 1), torch.float32, 7)
    torch.testing.assert_close(end.q, start.q.transpose(1, 2))
    ending = attentions(embedding, torch.float32)[3]
    expected = evoformer.triangle("end", embedding, embedding.z.transpose(0, 1), torch.float32, embedding.seed + 4)
    assert torch.equal(ending.q, expected.q)
    assert end.pair_bias is not None and start.pair_bias is not None
    torch.testing.assert_close(end.pair_bias, start.pair_bias.transpose(-1, -2))
