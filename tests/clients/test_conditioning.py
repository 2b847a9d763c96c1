"""Pair biases of all layers of a denoiser by one product."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

from evoattn.clients import conditioning
from evoattn.clients.site import Count

C, HEADS, LAYERS = 8, 4, 3


def projections(heads: int = HEADS) -> nn.ModuleList:
    return nn.ModuleList(
        nn.Sequential(nn.LayerNorm(C), nn.Linear(C, heads, bias=False)) for _ in range(LAYERS)
    ).double()  # fmt: skip


class Conditioning(nn.Module):
    """As Boltz-2 and BoltzGen have it, without features of atoms."""

    def __init__(self) -> None:
        super().__init__()
        self.pairwise_conditioner = nn.Bilinear(C, C, C, dtype=torch.float64)
        self.atom_encoder = lambda feats, s_trunk, z: (s_trunk, feats, z[:, :2].sin(), len)
        self.atom_enc_proj_z, self.atom_dec_proj_z, self.token_trans_proj_z = (projections() for _ in range(3))

    def forward(self, s_trunk: Any, z_trunk: Tensor, relative_position_encoding: Tensor, feats: Any) -> Any:
        z = self.pairwise_conditioner(z_trunk, relative_position_encoding)
        q, c, p, to_keys = self.atom_encoder(feats=feats, s_trunk=s_trunk, z=z)
        lists = ((self.atom_enc_proj_z, p), (self.atom_dec_proj_z, p), (self.token_trans_proj_z, z))
        return q, c, to_keys, *(torch.cat([layer(x) for layer in layers], -1) for layers, x in lists)


def filled(module: nn.Module) -> Any:
    torch.manual_seed(0)
    with torch.no_grad():
        for x in module.parameters():
            x.copy_(torch.randn_like(x))
    return module


def client(*_: Any, **__: Any) -> Any:
    raise AssertionError("the client's own code computes")


joined = conditioning.joined(client, Count())
"""What computes by itself alone."""

either = conditioning.joined(Conditioning.forward, Count())
PAIRS = torch.randn(2, 1, 5, 5, C, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def gradients(forward: Callable[..., Any], module: Any) -> tuple[list[Tensor], list[Tensor]]:
    """The biases, and the gradients of the pairs and of all parameters."""
    z, relative = PAIRS.clone().requires_grad_().unbind()
    q, c, to_keys, *biases = forward(module, "s", z, relative, feats="features")
    assert (q, c, to_keys) == ("s", "features", len)
    cotangents = [torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(2)) for x in biases]
    return biases, list(torch.autograd.grad(biases, [z, *module.parameters()], cotangents))


def test_joined_biases_are_those_of_the_layers() -> None:
    module = filled(Conditioning())
    (right, right_gradients), (biases, found) = (gradients(x, module) for x in (Conditioning.forward, joined))
    assert [x.shape[-1] for x in biases] == [LAYERS * HEADS] * 3
    torch.testing.assert_close(biases, right)
    torch.testing.assert_close(found, right_gradients)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_joined_biases_round_as_the_layers_do(dtype: torch.dtype) -> None:
    """In float32 and under autocast in bfloat16. Judged against float64."""
    module = filled(Conditioning())
    right = Conditioning.forward(module, "s", *PAIRS, feats="features")[-1]
    module.float()
    errors = []
    for forward in (Conditioning.forward, joined):
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            bias = forward(module, "s", *PAIRS.float(), feats="features")[-1]
        assert bias.dtype == dtype
        errors.append((bias.detach().double() - right).norm() / right.norm())
    assert errors[1] <= 1.3 * errors[0]


def test_pairs_are_kept_once() -> None:
    """For the backward."""
    module, kept = filled(Conditioning()), []
    for forward in (Conditioning.forward, joined):
        sizes: dict[int, int] = {}

        def pack(x: Tensor, sizes: dict[int, int] = sizes) -> Tensor:
            sizes[x.untyped_storage().data_ptr()] = x.numel() * (x.shape[-1] == C and x.ndim > 1 and x.shape[:-1].numel() >= 25)
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            results = forward(module, "s", PAIRS[0].clone().requires_grad_(), PAIRS[1], feats="features")
        kept.append(sum(sizes.values()))
        del results
    assert kept[1] <= kept[0] - (LAYERS - 1) * PAIRS[0].numel()


class Adapted(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


def hooked(module: Any) -> None:
    module.token_trans_proj_z[1].register_forward_hook(lambda _, __, y: y + 1)


def hooked_inside(module: Any) -> None:
    module.atom_dec_proj_z[1][1].register_forward_hook(lambda _, __, y: y + 1)


def adapted(module: Any) -> None:
    module.atom_enc_proj_z[0][1].__class__ = Adapted


def parametrized(module: Any) -> None:
    parametrize.register_parametrization(module.token_trans_proj_z[0][1], "weight", nn.Tanh())


def pruned(module: Any) -> None:
    prune.l1_unstructured(module.token_trans_proj_z[2][1], "weight", 0.5)


def with_dropout(module: Any) -> None:
    module.token_trans_proj_z[0].append(nn.Hardtanh())


def with_a_bias(module: Any) -> None:
    module.token_trans_proj_z[0][1].bias = nn.Parameter(torch.ones(HEADS, dtype=torch.float64))


def without_affine(module: Any) -> None:
    module.token_trans_proj_z[0][0] = nn.LayerNorm(C, elementwise_affine=False)


def another_eps(module: Any) -> None:
    module.token_trans_proj_z[1][0].eps = 0.5


def own_forward(module: Any) -> None:
    module.token_trans_proj_z[0].forward = lambda x: x[..., :HEADS]


def own_call(module: Any) -> None:
    module.token_trans_proj_z[0]._call_impl = lambda x: x[..., :HEADS]


def without_layers(module: Any) -> None:
    module.token_trans_proj_z = nn.ModuleList([nn.Identity()])


CHANGES = (hooked, hooked_inside, adapted, parametrized, pruned, with_dropout, with_a_bias, without_affine, another_eps)


@pytest.mark.parametrize("change", [*CHANGES, own_forward, own_call, without_layers])
def test_changed_layers_are_called(change: Callable[[Any], None]) -> None:
    module = filled(Conditioning())
    before = Conditioning.forward(module, "s", *PAIRS, feats="features")[3:]
    change(module)
    right, found = (forward(module, "s", *PAIRS, feats="features")[3:] for forward in (Conditioning.forward, either))
    assert all(map(torch.equal, right, found))
    assert not all(x.shape == y.shape and torch.equal(x, y) for x, y in zip(before, right, strict=True))


def test_boltz_joins_its_biases() -> None:
    """The whole conditioning, with features of atoms."""
    name = "boltz.model.modules.diffusion_conditioning"
    kind = pytest.importorskip(name, exc_type=ImportError).DiffusionConditioning
    sizes = {"token_s": 6, "token_z": C, "atom_s": 8, "atom_z": 4, "atom_feature_dim": 388, "token_transformer_depth": LAYERS}
    module, pairs = filled(kind(**sizes)), PAIRS.float()
    feats = {
        "ref_pos": torch.randn(1, 32, 3),
        "ref_charge": torch.randn(1, 32),
        "ref_element": torch.randn(1, 32, 128),
        "ref_atom_name_chars": torch.randn(1, 32, 4, 64),
        "atom_pad_mask": torch.ones(1, 32),
        "ref_space_uid": torch.zeros(1, 32, dtype=torch.long),
        "atom_to_token": torch.eye(5).repeat_interleave(7, 0)[None, :32],
    }
    s = torch.randn(1, 5, 6)
    right, found = (x(module, s, *pairs, feats)[3:] for x in (kind.forward, joined))
    torch.testing.assert_close(found, right)
    module.to("meta")
    shapes = [x.shape for x in joined(module, s.to("meta"), *pairs.to("meta"), {k: x.to("meta") for k, x in feats.items()})[3:]]
    assert shapes == [x.shape for x in right]
