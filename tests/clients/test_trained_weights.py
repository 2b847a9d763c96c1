"""eFold's trained network with its four attentions computed by evoattn: the same base pairs of two RNAs of known structure.

Install it without its tools for training: `pip install --no-deps efold==0.1.2 einops`. Its wheel has code and weights.
"""

import copy
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evoattn import Config, evoformer_attention

pytest.importorskip("einops", reason="eFold is not installed: pip install --no-deps efold==0.1.2 einops")
FOUND = importlib.util.find_spec("efold")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(FOUND is None, reason="eFold is not installed: pip install --no-deps efold==0.1.2 einops"),
]

RNAS = {
    "tRNA-Phe of yeast": (
        "GCGGAUUUAGCUCAGUUGGGAGAGCGCCAGACUGAAGAUCUGGAGGUCCUGUGUUCGAUCCACAGAAUUCGCACCA",
        {(n, 73 - n) for n in range(1, 8)},  # the acceptor's stem, by residue from 1
    ),
    "5S rRNA of E. coli": (
        "UGCCUGGCGGCCGUAGCGCGGUGGUCCCACCUGACCCCAUGCCGAACUCAGAAGUGAAAC"
        "GCCGUAGCGCCGAUGGUAGUGUGGGGUCUCCCCAUGCGAGAGUAGGGAACUGCCAGGCAU",
        {(n, 120 - n) for n in range(1, 11)},  # helix I
    ),
}

BOUNDS = {torch.float64: 1e-13, torch.float32: 5e-6, torch.bfloat16: 4e-2}
"""The most that a logit may be off, as a share of the largest. Without evoattn 2e-6 are in float32, and 2e-2 in bfloat16."""

BACKENDS = {"auto": None, "tiled": Config(block_q=32, block_k=16)}
"""On a CPU the first one holds all scores, but in 16 bits. The second one takes 3 or 4 blocks of queries and 5 or 8 of keys."""


class Network(nn.Module):
    """Stands for the base class of eFold's networks, which needs lightning and others for the training."""

    device = torch.device("cpu")

    def __init__(self, **options: Any) -> None:
        super().__init__()

    def save_hyperparameters(self, **options: Any) -> None:
        """Nothing is saved."""


@pytest.fixture(scope="module")
def efold() -> Iterator[ModuleType]:
    """The module of the network. The packages around it are not imported: they need tools for the training."""
    assert FOUND is not None and FOUND.origin is not None
    folder = Path(FOUND.origin).parent
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", list(sys.path))  # eFold appends to it
        for name in ("efold", "efold.core", "efold.models"):
            package = ModuleType(name)
            package.__path__ = [str(folder.joinpath(*name.split(".")[1:]))]
            patch.setitem(sys.modules, name, package)
        for name, names in {
            "efold.core.model": {"Model": Network},
            "efold.core.batch": {"Batch": dict},
            "scipy.optimize": {"linear_sum_assignment": None},
        }.items():
            patch.setitem(sys.modules, name, module := ModuleType(name))
            vars(module).update(names)
        yield importlib.import_module("efold.models.efold")
    for name in [name for name in sys.modules if name.startswith("efold.")]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def trained(efold: ModuleType) -> nn.Module:
    """The network with the weights of the wheel."""
    model = efold.eFold(ntoken=5, d_model=64, c_z=32, d_cnn=64, num_blocks=4, no_recycles=0)
    weights = torch.load(Path(efold.__file__).parents[1] / "resources" / "efold_weights.pt", map_location="cpu")
    keys = model.load_state_dict(weights, strict=False)
    assert not keys.missing_keys
    return model.eval()


@pytest.fixture(scope="module")
def originals(trained: nn.Module) -> dict[str, dict[torch.dtype, Tensor]]:
    """The logits of each RNA in each dtype without evoattn."""
    return {name: {dtype: logits(trained, sequence, dtype) for dtype in BOUNDS} for name, (sequence, _) in RNAS.items()}


def attend(self: Any, inputs: list[Tensor], bias: Tensor) -> tuple[Tensor, None]:
    """`RelPositionMultiHeadAttention.forward`, with its relative positions and its pair bias as one pair bias."""
    query, key, value, position = inputs
    q, k, v = self.call_qkv(query, key, value)
    position = torch.einsum("mi,hio->mho", position, self.pos_kernel)
    relative = self.relative_shift(torch.einsum("bnho,mho->bhnm", q + self.pos_bias_v, position))
    scale = 1 / float(torch.tensor(self.head_size).sqrt())  # eFold rounds the root to float32
    pair_bias = scale * relative + bias.permute(0, 3, 1, 2)
    q, k, v = (x[:, None] for x in (q + self.pos_bias_u, k, v))
    o = evoformer_attention(
        q, k, v, pair_bias=pair_bias[:, None], scale=scale, backend=self.backend, config=BACKENDS[self.backend]
    )
    self.calls.append(o.shape)
    return torch.einsum("bnhi,hio->bno", o[:, 0], self.projection_kernel) + self.projection_bias, None


def logits(model: nn.Module, sequence: str, dtype: torch.dtype) -> Tensor:
    """The logits of all pairs of bases, by the network in this dtype."""
    model = copy.deepcopy(model).to(dtype)
    encoded: Callable[[Tensor], Tensor] = model.seq2map
    model.seq2map = lambda tokens: encoded(tokens).to(dtype)
    with torch.no_grad():
        return model({"sequence": torch.tensor([["XACGU".index(base) for base in sequence]])})["structure"]


def pairs(logits: Tensor, sequence: str) -> set[tuple[int, int]]:
    """The base pairs that eFold reads from the logits, by residue from 1."""
    decide = importlib.import_module("efold.core.postprocess").postprocess_new_nc
    bases = torch.tensor([[[base == other for other in "ACGU"] for base in sequence]]).long()
    found = decide(logits.float(), bases, 0.01, 0.1, 100, 1.6, True, 1.5)[0].round().triu().nonzero() + 1
    return {(int(first), int(second)) for first, second in found}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("name", RNAS)
def test_no_base_pair_moves(
    name: str,
    dtype: torch.dtype,
    backend: str,
    efold: ModuleType,
    trained: nn.Module,
    originals: dict[str, dict[torch.dtype, Tensor]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sequence, helix = RNAS[name]
    exact = originals[name][torch.float64]
    calls: list[torch.Size] = []
    for field, value in {"forward": attend, "backend": backend, "calls": calls}.items():
        monkeypatch.setattr(efold.RelPositionMultiHeadAttention, field, value, raising=False)
    ours = logits(trained, sequence, dtype)
    assert len(calls) == 4
    assert (ours - exact).abs().max() <= BOUNDS[dtype] * exact.abs().max()
    assert pairs(ours, sequence) == pairs(originals[name][dtype], sequence) == pairs(exact, sequence)
    assert helix <= pairs(ours, sequence), "the weights are not the trained ones"
