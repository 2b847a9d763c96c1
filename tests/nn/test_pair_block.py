"""The pair block and the block with the single track: their layers one after the other, and how they are used."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from evoattn.nn import PairBlock, PairformerBlock

pytestmark = pytest.mark.usefixtures("poisoned")


def filled(module: nn.Module) -> Any:
    torch.manual_seed(1)
    for x in module.parameters():
        nn.init.normal_(x, std=0.4)
    return module.double()


def block(**options: Any) -> Any:
    return filled(PairBlock(8, 6, 4, 2, 2, **options))


def pairformer(**options: Any) -> Any:
    return filled(PairformerBlock(12, 8, 4, 3, 6, 4, 2, 2, **options))


def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """s, z, and masks of residues and of pairs."""
    rng = torch.Generator().manual_seed(2)
    s, z = (torch.randn(shape, generator=rng, dtype=torch.float64).requires_grad_() for shape in ((2, 7, 12), (2, 7, 7, 8)))
    mask = (torch.arange(7) < torch.tensor([[7], [5]])).double()
    return s, z, mask, mask[:, :, None] * mask[:, None, :]


def by_hand(layers: PairBlock, z: Tensor, mask: Tensor | None) -> Tensor:
    """z + update, five times, by layers without a residual of their own."""
    for layer in layers.children():
        layer = copy.copy(layer)
        layer.residual = False
        z = z + (layer(z) if layer is layers.pair_transition or layer.__class__.__name__ == "Transition" else layer(z, mask))
    return z


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("options", [{}, {"activation": "relu", "bias": True}], ids=str)
def test_pair_block_agrees_with_its_layers_in_turn(options: dict[str, Any], masked: bool) -> None:
    module, (_, z, _, mask) = block(**options).eval(), inputs()
    pair_mask = mask if masked else None
    actual, right = module(z, pair_mask), by_hand(module, z, pair_mask)
    torch.testing.assert_close(actual, right, rtol=1e-10, atol=1e-10)
    leaves, do = [z, *module.parameters()], torch.randn(z.shape, dtype=z.dtype)
    for a, b in zip(*(torch.autograd.grad(x, leaves, do) for x in (actual, right)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_pairformer_block_agrees_with_its_layers_in_turn() -> None:
    module, (s, z, mask, pairs) = pairformer().eval(), inputs()
    new_s, new_z = module(s, z, mask, pairs)
    right_z = by_hand(module.pair_stack, z, pairs)
    right_s = module.single_transition(module.attn_pair_bias(s, right_z, mask=mask))
    torch.testing.assert_close(new_z, right_z, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(new_s, right_s, rtol=1e-10, atol=1e-10)
    assert not torch.equal(module.attn_pair_bias(s, right_z, mask=mask), module.attn_pair_bias(s, right_z))


def test_names_are_openfold3s() -> None:
    names = {name.rsplit(".", 1)[0] for name, _ in PairformerBlock().named_parameters()}
    assert {"pair_stack.tri_mul_out.linear_a_p", "pair_stack.tri_att_end.mha.linear_q", "attn_pair_bias.linear_z"} <= names
    assert {"pair_stack.pair_transition.swiglu.linear_a", "single_transition.linear_out"} <= names


def test_in_place_block_overwrites_z() -> None:
    module, (s, z, mask, pairs) = pairformer().eval(), inputs()
    z = z.detach()
    with torch.no_grad():
        right = module(s, z, mask, pairs)
        actual = module(s, z, mask, pairs, in_place=True)
    assert actual[1] is z and torch.equal(z, right[1]) and torch.equal(actual[0], right[0])
    with pytest.raises(ValueError, match="in_place=True overwrites z"):
        module(s, z, mask, pairs, in_place=True)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(reentrant: bool) -> None:
    """With dropout, whose masks are the same in the second forward."""
    module, (s, z, mask, pairs) = pairformer(dropout=0.5).train(), inputs()
    leaves = [s, z, *module.parameters()]

    def gradients(outputs: Any) -> tuple[Tensor, ...]:
        return torch.autograd.grad([x.square().sum() for x in outputs], leaves)

    torch.manual_seed(3)
    expected = gradients(module(s, z, mask, pairs))
    if reentrant:  # it cannot be asked by torch.autograd.grad
        torch.manual_seed(3)
        outputs: Any = checkpoint(module, s, z, mask, pairs, use_reentrant=True)
        sum(x.square().sum() for x in outputs).backward()
        actual = tuple(x.grad for x in leaves)
    else:
        torch.manual_seed(3)
        actual = gradients(checkpoint(module, s, z, mask, pairs, use_reentrant=False))
    for a, b in zip(expected, actual, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_dropout_only_in_training() -> None:
    module, (_, z, _, _) = block(dropout=0.5), inputs()
    assert torch.equal(module.eval()(z), module(z)) and not torch.equal(module.train()(z), module(z))


class Half(nn.Module):
    """Stands in for a layer: takes (z, mask), returns z + update."""

    def forward(self, z: Tensor, mask: Tensor | None = None) -> Tensor:
        return 1.5 * z


def test_a_layer_may_be_exchanged_and_hooked() -> None:
    module, (_, z, _, mask) = block().eval(), inputs()
    seen = list[str]()
    for name, layer in module.named_children():
        layer.register_forward_hook(lambda *_, name=name: seen.append(name))
    module.tri_att_start = Half()
    actual = module(z, mask)
    assert seen == ["tri_mul_out", "tri_mul_in", "tri_att_end", "pair_transition"]
    half = module.tri_mul_in(module.tri_mul_out(z, mask), mask) * 1.5
    torch.testing.assert_close(actual, module.pair_transition(module.tri_att_end(half, mask)))


def test_copies_of_blocks_give_the_same() -> None:
    module, (s, z, mask, pairs) = pairformer().eval(), inputs()
    expected = module(s, z, mask, pairs)
    for b in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert all(torch.equal(x, y) for x, y in zip(b(s, z, mask, pairs), expected, strict=True))


def test_errors_name_the_argument() -> None:
    module, (s, z, mask, pairs) = pairformer(), inputs()
    with pytest.raises(ValueError, match=r"z must .*got shape \[2, 6, 7, 8\]"):
        module(s, z[:, :6], mask, pairs)
    with pytest.raises(ValueError, match="dropout must be"):
        PairBlock(dropout=1.0)


def test_in_place_is_refused_before_any_work() -> None:
    module, (_, z, _, mask) = block().eval(), inputs()
    z = z.detach()
    before = z.clone()
    module.tri_att_end = Half()
    with torch.no_grad(), pytest.raises(ValueError, match="but tri_att_end is a Half with residual=None"):
        module(z, mask, in_place=True)
    module = block().eval()
    module.pair_transition.residual = False
    with torch.no_grad(), pytest.raises(ValueError, match="but pair_transition is a Transition with residual=False"):
        module(z, mask, in_place=True)
    assert torch.equal(z, before)
