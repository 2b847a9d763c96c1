"""The diffusion transformer's fused kernels on a GPU: accuracy, samples, windows, graphs, and calls that they leave alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cuda_graphs import captured
from torch import Tensor

from evoattn.nn import diffusion_steps, sampling
from tests.nn.transformers import transformer
from tests.pair.products import error

pytestmark = pytest.mark.gpu


def on_gpu(seed: int = 1, c_a: int = 96, c_s: int = 64, no_blocks: int = 3, threefold: bool = False) -> Any:
    return transformer(c_a, c_s, 16, 4, no_blocks, threefold=threefold, seed=seed).cuda()


def inputs(samples: int, length: int, c_a: int = 96, c_s: int = 64, shared: bool = True) -> list[Tensor]:
    """a, s, z, and a mask."""
    draw = torch.Generator().manual_seed(length)
    shapes = ((1, samples, length, c_a), (1, 1 if shared else samples, length, c_s), (1, 1, length, length, 16))
    tensors = [torch.randn(shape, generator=draw).cuda() for shape in shapes]
    return [*tensors, (torch.rand(1, 1, length, generator=draw) > 0.1).float().cuda()]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The fused runs."""
    seen: list[Any] = []
    own = diffusion_steps.run
    monkeypatch.setattr(diffusion_steps, "run", lambda *args: seen.append(args) or own(*args))
    return seen


def double(tensors: list[Tensor]) -> list[Tensor]:
    return [x.double() for x in tensors]


@pytest.mark.parametrize("threefold", [False, True])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(("samples", "length"), [(1, 152), (5, 33), (2, 397)], ids=str)
def test_no_further_from_float64_than_the_layers(
    samples: int, length: int, shared: bool, threefold: bool, runs: list[Any]
) -> None:
    layer, tensors = on_gpu(threefold=threefold), inputs(samples, length, shared=shared)
    plain = layer(*tensors)
    with sampling():
        fused = layer(*tensors, transition_mask=torch.ones(1, 1, length, device="cuda"))
    true = layer.double()(*double(tensors))
    assert len(runs) == 1 and error(fused, true) <= max(1.5 * error(plain, true), 1e-6)


@pytest.mark.parametrize("seed", range(24))
def test_random_layers(seed: int, runs: list[Any]) -> None:
    """Sizes that fill no tile."""
    rng = torch.Generator().manual_seed(seed)

    def pick(*values: int) -> int:
        return values[int(torch.randint(len(values), (), generator=rng))]

    c_a, c_s = pick(32, 48, 64, 96, 128), pick(24, 40, 64, 128)
    layer = on_gpu(seed, c_a, c_s, pick(1, 2, 4), bool(seed % 2))
    tensors = inputs(pick(1, 2, 3), pick(1, 7, 16, 31, 100, 129), c_a, c_s, bool(pick(0, 1)))
    plain = layer(*tensors)
    with sampling():
        fused = layer(*tensors)
    true = layer.double()(*double(tensors))
    assert len(runs) == 1 and error(fused, true) <= max(2 * error(plain, true), 2e-6)


@pytest.mark.parametrize("precision", ["exact", "tf32", "bf16"])
def test_windows(precision: str) -> None:
    layer, length = on_gpu(), 32

    def to_keys(x: Tensor) -> Tensor:
        rows = torch.nn.functional.pad(x.flatten(0, 2), (0, 0, 48, 48))
        return torch.stack([rows[length * i : length * i + 128] for i in range(6)])[:, None]

    a, s = torch.randn(6, 1, length, 96).cuda(), torch.randn(6, 1, length, 64).cuda()
    z, mask = torch.randn(6, 1, length, 128, 16).cuda(), torch.ones(6, 1, 128).cuda()
    mask[0, :, :48], mask[-1, :, -48:] = 0, 0
    with torch.autocast("cuda", torch.bfloat16, enabled=precision != "exact"):
        plain = layer(a, s, z, mask, to_keys=to_keys)
    with sampling(precision):
        fused = layer(a, s, z, mask, to_keys=to_keys)
    true = layer.double()(*double([a, s, z, mask]), to_keys=to_keys)
    assert error(fused, true) <= max(1.5 * error(plain, true), 1e-6)


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("keys", ["apart", "twice"])
def test_keys_with_a_norm_of_their_own(keys: str, samples: int, runs: list[Any]) -> None:
    """Of windows, with the rows of their keys given."""
    layer = transformer(128, 128, 16, 4, 3, threefold=False, keys=keys).cuda()
    draw = torch.Generator().manual_seed(6)
    shapes = ((6, samples, 32, 128), (6, 1, 32, 128), (6, 1, 32, 128, 16))
    a, s, z = (torch.randn(shape, generator=draw).cuda() for shape in shapes)
    picked = diffusion_steps.Keys(torch.randint(0, 6 * samples * 32 + 1, (6 * samples * 128,), generator=draw).cuda())
    plain = layer(a, s, z, to_keys=picked)
    with sampling():
        fused = layer(a, s, z, to_keys=picked)
    true = layer.double()(*double([a, s, z]), to_keys=picked)
    assert len(runs) == 1 and error(fused, true) <= max(1.5 * error(plain, true), 1e-6)


def test_tf32_is_that_of_torch() -> None:
    layer, tensors = on_gpu(), inputs(1, 152)
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        plain = layer(*tensors)
        with sampling():
            fused = layer(*tensors)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
    true = layer.double()(*double(tensors))
    assert 1e-5 < error(fused, true) <= 1.5 * error(plain, true)


def test_a_named_tf32_needs_no_setting_of_torch() -> None:
    """It has the bits that torch's setting gives, attention included. An exact sampling beside it stays exact."""
    layer, (a, s, z, mask) = on_gpu(), inputs(1, 152)
    call = {"mask": mask, "pair_bias": layer.pair_bias(z)}
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        with sampling():
            expected = layer(a, s, **call)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
    results = []
    for precision in ("tf32", "exact"):
        with sampling(precision):
            results.append(layer(a, s, **call))
    true = layer.double()(*double([a, s]), mask=mask.double(), pair_bias=call["pair_bias"].double())
    assert torch.equal(results[0], expected) and error(expected, true) > 1e-5
    assert error(results[1], true) < 3e-6


@pytest.mark.parametrize("seed", range(12))
def test_random_layers_in_bf16(seed: int, runs: list[Any]) -> None:
    """No further from float64 than the layers under autocast to bfloat16, in float32 with TF32's digits, and the same again."""
    rng = torch.Generator().manual_seed(seed)

    def pick(*values: int) -> int:
        return values[int(torch.randint(len(values), (), generator=rng))]

    c_a, c_s = pick(32, 64, 96, 128), pick(24, 64, 128)
    layer = on_gpu(seed, c_a, c_s, pick(1, 3), bool(seed % 2))
    a, s, z, mask = inputs(pick(1, 3), pick(7, 31, 100, 129), c_a, c_s, bool(pick(0, 1)))
    bias = layer.pair_bias(z)
    with torch.autocast("cuda", torch.bfloat16):
        low = layer(a, s, mask=mask, pair_bias=bias)
    results = []
    for precision in ("tf32", "bf16", "bf16"):
        with sampling(precision):
            results.append(layer(a, s, mask=mask, pair_bias=bias))
    true = layer.double()(*double([a, s]), mask=mask.double(), pair_bias=bias.double())
    budget = error(low, true)
    assert len(runs) == 3 and torch.equal(*results[1:]) and results[1].dtype == torch.float32
    assert error(results[0], true) < budget / 2 and error(results[1], true) < budget


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_a_graph_in_a_precision_has_the_same_bits(precision: str) -> None:
    """It reads the pair bias that was made once, and a write to it makes another one."""
    layer, (a, s, z, mask) = on_gpu(), inputs(2, 61)
    bias = layer.pair_bias(z)
    with sampling(precision):
        before = layer(a, s, mask=mask, pair_bias=bias)
        replay, result = captured(lambda _: layer(a, s, mask=mask, pair_bias=bias))
        replay(0)
        assert torch.equal(result, before)
        bias.mul_(2)
        assert not torch.equal(layer(a, s, mask=mask, pair_bias=bias), before)


def test_samples_are_those_of_one_at_a_time() -> None:
    layer, (a, s, z, mask) = on_gpu(), inputs(5, 100)
    with sampling():
        together = layer(a, s, z, mask)
        for i in range(5):
            assert error(together[:, i : i + 1], layer(a[:, i : i + 1], s, z, mask).double()) < 3e-6


def test_a_graph_has_the_same_bits_and_reads_new_inputs() -> None:
    layer, (a, s, z, mask) = on_gpu(), inputs(2, 64)
    bias = layer.pair_bias(z)
    with sampling():
        layer(a, s, mask=mask, pair_bias=bias)
        replay, result = captured(lambda _: layer(a, s, mask=mask, pair_bias=bias))
        a.copy_(torch.randn_like(a))
        replay(0)
        assert torch.equal(result, layer(a, s, mask=mask, pair_bias=bias))


def test_weights_that_change_are_split_anew(runs: list[Any]) -> None:
    layer, tensors = on_gpu(), inputs(1, 64)
    with sampling():
        before = layer(*tensors)
        for block in layer.blocks:
            block.attention_pair_bias.mha.linear_o.weight.mul_(2)
        after = layer(*tensors)
    assert not torch.equal(before, after) and error(after, layer.double()(*double(tensors))) < 1e-5
    assert len(runs) == 2


def test_what_the_kernels_leave_to_the_layers(runs: list[Any]) -> None:
    """A hook, autocast, a gradient, float64, a call outside of a sampling, and one under torch.compile."""
    layer, tensors = on_gpu(), inputs(1, 48)
    layer(*tensors)
    with sampling():
        seen: list[int] = []
        hook = layer.blocks[0].conditioned_transition.linear_g.register_forward_hook(lambda *_: seen.append(1))
        layer(*tensors)
        hook.remove()
        with torch.autocast("cuda", torch.bfloat16):
            layer(*tensors)
        (g,) = torch.autograd.grad(layer(tensors[0].requires_grad_(), *tensors[1:]).sum(), tensors[0])
        assert g.isfinite().all() and seen == [1]
        layer.double()(*double([x.detach() for x in tensors]))
        assert not runs
        layer.float()(tensors[0].detach(), *tensors[1:])
    assert len(runs) == 1
