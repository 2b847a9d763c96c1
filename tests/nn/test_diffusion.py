"""The diffusion transformer against dense torch, how it is called, and what a sampling keeps."""

from __future__ import annotations

import dataclasses
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evoattn.core import keeping, numerics
from evoattn.nn import AttentionPairBias, ConditionedTransition, DiffusionTransformer, diffusion_steps, sampling
from tests.helpers.dense_layers import diffusion_transformer
from tests.nn.dense import Dense, leaves_of
from tests.nn.layer_cases import step, truth, worst

CASE = Dense(
    "diffusion transformer",
    lambda: DiffusionTransformer(12, 9, 10, 6, 4, 2),
    ((2, 3, 7, 12), (2, 1, 7, 9), (2, 1, 7, 7, 10)),
    (2, 3, 7),
    diffusion_transformer,
)


def _normed_heads() -> DiffusionTransformer:
    """Parallel blocks, with norms of q and k, as in RosettaFold-3. A bias of the norm of k would have a gradient of 0."""
    made: Any = DiffusionTransformer(12, 9, 10, 6, 4, 2, parallel=True)
    for block in made.blocks:
        mha = block.attention_pair_bias.mha
        mha.layer_norm_q, mha.layer_norm_k = nn.LayerNorm(24), nn.LayerNorm(24, bias=False)
    return made  # type: ignore[no-any-return]


PARALLEL = dataclasses.replace(CASE, name="parallel diffusion transformer", make=_normed_heads)


@pytest.mark.parametrize("case", [CASE, PARALLEL], ids=lambda case: case.name)
@pytest.mark.parametrize("empty", [False, True])
def test_float64_agrees_with_dense_torch(empty: bool, case: Dense) -> None:
    layer = case.layer()
    inputs, mask = case.arguments(empty=empty)
    actual = step(layer, leaves_of(layer), inputs, mask)
    assert worst(actual, truth(case, layer, inputs, mask, swallowed=False)) < (1e-6 if empty else 1e-12)


def arguments(dtype: torch.dtype = torch.float64) -> tuple[DiffusionTransformer, list[Tensor], Tensor]:
    layer: Any = CASE.layer(dtype)
    inputs, mask = CASE.arguments(dtype, empty=False)
    return layer, [x.detach() for x in inputs], mask


@torch.no_grad()
def test_pair_biases_may_be_given() -> None:
    layer, (a, s, z), mask = arguments()
    bias = layer.pair_bias(z)
    assert bias.shape == (2, 2, 1, 4, 7, 7)
    assert torch.equal(layer(a, s, mask=mask, pair_bias=bias), layer(a, s, z, mask))


@torch.no_grad()
def test_a_sampling_changes_no_answer_where_there_are_no_kernels() -> None:
    layer, inputs, mask = arguments(torch.float32)
    expected = layer(*inputs, mask)
    with sampling():
        assert torch.equal(layer(*inputs, mask), expected)


@torch.no_grad()
def test_windows_of_queries_pick_their_keys() -> None:
    """Each window attends to keys that `to_keys` picks of the normalised a: here to all of two windows, turned round."""
    layer, (a, s, _), _ = arguments()
    a, s = a[0, :2].unsqueeze(1), s[0].expand(2, -1, -1).unsqueeze(1)  # two windows
    z = torch.randn(2, 1, 7, 14, 10, dtype=torch.float64)

    def both(x: Tensor) -> Tensor:
        return x.flatten(0, 2).flip(0).expand(2, 1, 14, -1)

    result = layer(a, s, z, to_keys=both)
    # the same as one window of all queries, with the keys in their own order, and each pair bias in its place
    whole = torch.cat([z.flip(-2)[0], z.flip(-2)[1]], -3).unsqueeze(0)
    single = layer(a.flatten(0, 2)[None, None], s.flatten(0, 2)[None, None], whole)
    assert torch.allclose(result.flatten(0, 2), single[0, 0], atol=1e-12)


def test_conditions_and_arguments_are_checked() -> None:
    layer, (a, s, z), mask = arguments()
    with pytest.raises(ValueError, match="s must broadcast to"):
        layer(a, s[..., :3, :], z)
    with pytest.raises(ValueError, match="give z or pair_bias, got neither"):
        layer(a, s)
    with pytest.raises(ValueError, match="pair_bias must broadcast to"):
        layer(a, s, pair_bias=layer.pair_bias(z)[:1])
    with pytest.raises(ValueError, match="transition_mask"):
        layer(a, s, z, transition_mask=mask[..., :3])
    with pytest.raises(ValueError, match="c_s=9"):
        layer.blocks[0].attention_pair_bias(a, z)
    with pytest.raises(TypeError, match="a must be a torch.Tensor"):
        ConditionedTransition(4, 4)(None, s)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="to_keys must be None"):
        AttentionPairBias(12, 10, 6, 4)(a, z, to_keys=lambda x: x)


def test_the_transition_masks_its_update() -> None:
    layer, (a, s, z), _ = arguments()
    mask = torch.zeros(2, 3, 7)
    off = layer(a, s, z, transition_mask=mask)
    for block in layer.blocks:
        block.conditioned_transition.linear_out.weight.data.zero_()
    assert torch.equal(off, layer(a, s, z))


def test_a_new_transition_barely_changes_its_input() -> None:
    """Its gate starts nearly closed, as AlphaFold's."""
    assert torch.equal(ConditionedTransition(8, 6).linear_g.bias, torch.full((8,), -2.0))


def prepared() -> tuple[Any, diffusion_steps.Prepared]:
    layer = CASE.layer(torch.float32).requires_grad_(False)
    return layer, diffusion_steps.Prepared(layer.blocks)  # type: ignore[arg-type]


CHANGES = {
    "a hook": lambda block: block.conditioned_transition.linear_g.register_forward_hook(lambda *_: None),
    "a weight written to": lambda block: block.attention_pair_bias.mha.linear_o.weight.mul_(2),
    "an adapter": lambda block: setattr(block.attention_pair_bias.mha, "linear_q", nn.Sequential(nn.Linear(12, 24))),
    "a weight exchanged": lambda block: setattr(
        block.conditioned_transition.linear_out, "weight", nn.Parameter(torch.ones(12, 24))
    ),
    "a forward of its own": lambda block: setattr(block.attention_pair_bias, "forward", lambda *_: None),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_was_prepared_notices_changes(change: Any) -> None:
    layer, found = prepared()
    assert found.is_plain and found.holds()
    change(layer.blocks[1])
    assert not found.holds()


def test_what_was_prepared_is_plain_again_without_a_hook() -> None:
    layer, _ = prepared()
    hook = CHANGES["a hook"](layer.blocks[0])
    hooked = diffusion_steps.Prepared(layer.blocks)
    assert hooked.holds() and not hooked.is_plain
    hook.remove()
    assert not hooked.holds() and diffusion_steps.Prepared(layer.blocks).is_plain


def test_what_was_prepared_notices_another_block_and_another_setting() -> None:
    layer, found = prepared()
    layer.blocks[0].attention_pair_bias.inf = layer.blocks[1].attention_pair_bias.inf = 1e6
    assert not found.holds()
    layer, found = prepared()
    layer.blocks[0] = prepared()[0].blocks[0]
    assert not found.holds()


def test_blocks_that_must_be_called_are_not_plain() -> None:
    layer, _ = prepared()
    CHANGES["a hook"](layer.blocks[0])
    assert not diffusion_steps.Prepared(layer.blocks).is_plain
    layer, _ = prepared()
    assert not diffusion_steps.Prepared(layer.double().blocks).is_plain
    layer, _ = prepared()
    layer.blocks[0].attention_pair_bias.inf = 1e6
    assert not diffusion_steps.Prepared(layer.blocks).is_plain
    layer, _ = prepared()
    layer.blocks[1].conditioned_transition.layer_norm.layer_norm_s.eps = 1e-3
    assert not diffusion_steps.Prepared(layer.blocks).is_plain


def test_a_sampling_keeps_what_was_made_of_tensors() -> None:
    x, made = torch.ones(3), []

    def make() -> int:
        made.append(1)
        return len(made)

    assert [keeping.made_once("n", (x,), make) for _ in range(2)] == [1, 2]  # nothing is kept outside
    with sampling():
        assert [keeping.made_once("n", (x,), make) for _ in range(2)] == [3, 3]
        with sampling():
            assert keeping.made_once("n", (x,), make) == 3
        with keeping.nothing_kept():
            assert keeping.made_once("n", (x,), make) == 4
        assert keeping.made_once("n", (x,), make) == 3
        assert keeping.made_once("other", (x,), make) == 5
        x.mul_(2)
        assert keeping.made_once("n", (x,), make) == 6
        assert keeping.made_once("n", (x.clone(),), make) == 7
        assert keeping.made_once("n", (x,), make, lambda _: False) == 8
    assert not keeping.keeps()


def test_a_sampling_has_a_precision() -> None:
    """Samplings inside share it, and what is not one has none."""
    assert keeping.precision() == "exact"
    with sampling("bf16"):
        with sampling("tf32"):
            assert keeping.precision() == "bf16" and diffusion_steps.attention_dtype() == torch.bfloat16
        with keeping.nothing_kept():
            assert keeping.precision() == "exact"
    with pytest.raises(ValueError, match="precision must be 'exact', 'tf32' or 'bf16', got 'fp8'"):
        sampling("fp8")


def test_kernels_take_the_products_of_a_precision_in_one_thread() -> None:
    seen: list[str] = []
    outside = numerics.float32_products()
    with numerics.products_in("tf32"):
        thread = threading.Thread(target=lambda: seen.append(numerics.float32_products()))
        thread.start()
        thread.join()
        assert numerics.float32_products() == "tf32" and seen == [outside]
        with numerics.products_in(None):
            assert numerics.float32_products() == outside


@pytest.mark.parametrize("precision", ["exact", "tf32", "bf16"])
def test_pair_biases_of_a_sampling(precision: str) -> None:
    """In bfloat16 they are copied once, with aligned rows, and the copy goes with the pair bias."""
    _, found = prepared()
    bias = torch.randn(2, 1, 4, 7, 7)
    with sampling(precision):
        first, second = (found.bias(bias, diffusion_steps.in_precision) for _ in range(2))
        assert first is second and (first is bias) == (precision != "bf16")
        if precision != "bf16":
            return
        assert first.dtype == torch.bfloat16 and torch.equal(first, bias.bfloat16())
        assert first.stride(-1) == 1 and not any(stride % 8 for stride in first.stride()[:-1])
        bias.mul_(2)
        assert torch.equal(found.bias(bias, diffusion_steps.in_precision), bias.bfloat16())
    there, kept = weakref.ref(bias), len(found._biases)
    del first, second, bias
    assert kept == 1 and there() is None and not len(found._biases)
