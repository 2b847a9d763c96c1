"""The launches of the diffusion transformer in Triton's interpreter, beside its layers."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers.interpreted import INTERPRETED, run

pytest.importorskip("triton")
if not INTERPRETED:

    def test_in_the_interpreter() -> None:
        """All quick tests below, in a process where Triton interprets."""
        run(__file__, "not slow")

    @pytest.mark.slow
    def test_slowly_in_the_interpreter() -> None:
        """All other tests below."""
        run(__file__, "slow")

else:
    from tests.helpers import interpreter

    interpreter.patch()

    from evoattn.nn import condition_steps, diffusion_steps, sampling
    from evoattn.pair.products import call
    from evoattn.testing import relative_error
    from tests.nn.transformers import transformer

    pytestmark = pytest.mark.usefixtures("poisoned")

    SIZES = (16, 12, 8, 2, 2)  # channels of a, s and z, heads, blocks

    def compare(
        layer: Any, a: Tensor, s: Tensor, z: Tensor, mask: Tensor, to_keys: Any, rows: Tensor | None, bias: Any = None
    ) -> None:
        bias = layer.pair_bias(z) if bias is None else bias
        plain = layer(a, s, mask=mask, pair_bias=bias, to_keys=to_keys, transition_mask=rows)
        fused = diffusion_steps.run(diffusion_steps.Prepared(layer.blocks), a, s, bias, mask, to_keys, rows)
        double = [x.double() for x in (a, s, mask, bias)]
        true = layer.double()(*double[:2], mask=double[2], pair_bias=double[3], to_keys=to_keys, transition_mask=rows)
        assert relative_error(fused, true) <= max(1.5 * relative_error(plain, true), 5e-7)

    def errors(precision: str) -> dict[str, float]:
        """The errors of a precision, and of the layers in float32 and under autocast to bfloat16."""
        rng = torch.Generator().manual_seed(5)
        shapes = ((1, 2, 20, 32), (1, 1, 20, 24), (1, 1, 20, 20, 8))
        a, s, z = (torch.randn(shape, generator=rng) for shape in shapes)
        layer = transformer(32, 24, 8, 2, 1, threefold=True)
        bias, mask = layer.pair_bias(z), (torch.arange(20) < 17).float().view(1, 1, 20)
        results = {"float32": layer(a, s, mask=mask, pair_bias=bias)}
        with torch.autocast("cpu", torch.bfloat16):
            results["autocast"] = layer(a, s, mask=mask, pair_bias=bias)
        fused = diffusion_steps.Prepared(layer.blocks)
        with sampling(precision):
            low = fused.bias(bias, diffusion_steps.in_precision)
            assert fused.bias(bias, diffusion_steps.in_precision) is low, "made once"
            results[precision] = diffusion_steps.run(fused, a, s, low, mask, None, None)
        double = [x.double() for x in (a, s, mask, bias)]
        true = layer.double()(*double[:2], mask=double[2], pair_bias=double[3])
        assert all(x.dtype == torch.float32 for x in results.values())
        return {name: relative_error(x, true) for name, x in results.items()}

    def test_errors_follow_from_the_digits_of_a_precision() -> None:
        """Autocast has factors and results of 8 binary digits. TF32 has three more. "bf16" has 8 only in some places."""
        exact, tf32, bf16 = (errors(precision) for precision in ("exact", "tf32", "bf16"))
        low = exact["autocast"]
        assert exact["exact"] <= max(1.5 * exact["float32"], 5e-7)
        assert low / 32 < tf32["tf32"] < low / 4
        assert low / 4 < bf16["bf16"] < low

    def test_rows_without_a_key_are_those_of_float32() -> None:
        """A mask of -1e6 leaves float32 some digits of a score. So there are no empty rows in it, nor in a lower precision."""
        layer = transformer(*SIZES, threefold=False)
        for block in layer.blocks:
            block.attention_pair_bias.inf = 1e6
        rng = torch.Generator().manual_seed(6)
        a, s, z = (torch.randn(shape, generator=rng) for shape in ((1, 1, 9, 16), (1, 1, 9, 12), (1, 1, 9, 9, 8)))
        fused, bias, mask = diffusion_steps.Prepared(layer.blocks), 4 * layer.pair_bias(z), torch.zeros(1, 1, 9)
        results = []
        for precision in ("exact", "bf16"):
            with sampling(precision):
                results.append(diffusion_steps.run(fused, a, s, bias, mask, None, None))
        assert relative_error(results[1], results[0].double()) < 0.01

    def test_two_samples_share_a_condition() -> None:
        rng = torch.Generator().manual_seed(2)
        a, s, z = (torch.randn(shape, generator=rng) for shape in ((1, 2, 9, 16), (1, 1, 9, 12), (1, 1, 9, 9, 8)))
        mask = (torch.arange(9) < 7).float().view(1, 1, 9)
        compare(transformer(*SIZES, threefold=False), a, s, z, mask, None, mask)

    @pytest.mark.parametrize("biased", [False, True])
    def test_transition_of_a_condition(biased: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        """No further from float64 than the modules, in one launch less for each. Its weights are split once."""
        monkeypatch.setattr(condition_steps, "takes", lambda *_: True)
        norm = nn.LayerNorm(24, bias=biased)
        first, second, last = nn.Linear(24, 40, bias=False), nn.Linear(24, 40, bias=False), nn.Linear(40, 24, bias=False)
        x = torch.randn(2, 9, 24)
        with torch.no_grad():
            norm.weight.copy_(torch.rand(24) + 0.5)
            assert condition_steps.add_transition(x, norm, first, second, last) is None, "outside of a sampling"
            y = norm(x)
            plain = x + last(F.silu(first(y)) * second(y))
            with sampling():
                results = [condition_steps.add_transition(x, norm, first, second, last) for _ in range(2)]
                first.register_forward_hook(lambda *_: None)
                assert condition_steps.add_transition(x, norm, first, second, last) is None
            norm, first, second, last = (each.double() for each in (norm, first, second, last))
            y = norm(x.double())
            true = x + last(F.silu(first(y)) * second(y))
        assert torch.equal(*results) and relative_error(results[0], true) <= max(1.5 * relative_error(plain, true), 5e-7)

    def test_tensors_of_any_strides() -> None:
        """The same for all positions, or in turned memory."""
        rng = torch.Generator().manual_seed(4)
        a, z = torch.randn(1, 1, 16, 9, generator=rng).mT, torch.randn(1, 1, 9, 9, 8, generator=rng)
        s, one = torch.randn(1, 1, 12, 1, generator=rng).mT, torch.ones(1, 1, 1)
        compare(transformer(*SIZES, threefold=False), a, s, z, torch.ones(1, 1, 18)[..., ::2], None, 0.5 * one)

    @pytest.mark.slow
    def test_blocks_are_taken_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
        """Conditions of one block at a time."""
        monkeypatch.setattr(diffusion_steps, "_CONDITIONS", 1)
        test_two_samples_share_a_condition()

    @pytest.mark.slow
    @pytest.mark.parametrize("threefold", [False, True])
    def test_windows_pick_their_keys(threefold: bool) -> None:
        rng = torch.Generator().manual_seed(3)
        a, s, z = (torch.randn(shape, generator=rng) for shape in ((3, 1, 8, 16), (3, 1, 8, 12), (3, 1, 8, 16, 8)))
        mask = torch.ones(3, 1, 16)
        mask[0, :, :4], mask[-1, :, -4:] = 0, 0

        def to_keys(x: Tensor) -> Tensor:
            rows = torch.nn.functional.pad(x.flatten(0, 2), (0, 0, 4, 4))
            return torch.stack([rows[8 * i : 8 * i + 16] for i in range(3)])[:, None]

        compare(transformer(*SIZES, threefold=threefold), a, s, z, mask, to_keys, None)

    @pytest.mark.parametrize("keys", ["", *(pytest.param(keys, marks=pytest.mark.slow) for keys in ("apart", "twice"))])
    def test_several_calls_may_share_all_that_the_condition_gives(keys: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Bit for bit, for other samples too, within a bound on memory."""
        rng, layer = torch.Generator().manual_seed(8), transformer(*SIZES, threefold=False, keys=keys)
        fused, s = diffusion_steps.Prepared(layer.blocks), torch.randn(2, 1, 8, 12, generator=rng)
        bias = layer.pair_bias(torch.randn(2, 1, 8, 16, 8, generator=rng))
        with sampling():
            kept = None
            for samples in (1, 1, 2):
                a = torch.randn(2, samples, 8, 16, generator=rng)
                kept = diffusion_steps.kept_condition(fused, a, s) if kept is None or samples == 2 else kept
                assert kept is not None and kept.samples == samples
                to_keys = diffusion_steps.Keys(torch.randint(0, 1 + 2 * samples * 8, (2 * samples * 16,), generator=rng))
                expected = diffusion_steps.run(fused, a, s, bias, None, to_keys, None)
                assert torch.equal(diffusion_steps.run(fused, a, kept, bias, None, to_keys, None), expected)
            monkeypatch.setattr(diffusion_steps, "_CONDITIONS", 6 * 16 * 16 * 2 - 1)  # numbers of two blocks, but one
            assert diffusion_steps.kept_condition(fused, a, s) is None

    @pytest.mark.parametrize("windows", [False, True])
    def test_rosettafold_3_has_parallel_blocks_and_norms_of_heads(windows: bool) -> None:
        rng, layer = torch.Generator().manual_seed(7), transformer(*SIZES, threefold=False, rf3=True)
        count, keys = (3, 16) if windows else (1, 8)
        shapes = ((count, 2, 8, 16), (count, 1, 8, 12), (count, 1, 8, keys, 8))
        a, s, z = (torch.randn(shape, generator=rng) for shape in shapes)
        picked = torch.randint(0, 1 + count * 2 * 8, (count * 2 * keys,), generator=rng)
        bias, to_keys = torch.stack([x.attention_pair_bias.pair_bias(z) for x in layer.blocks]), diffusion_steps.Keys(picked)
        compare(layer, a, s, z, torch.ones(count, 1, keys), to_keys if windows else None, None, bias)

    @pytest.mark.parametrize("keys", ["twice", pytest.param("apart", marks=pytest.mark.slow)])
    def test_keys_with_a_norm_of_their_own(keys: str) -> None:
        """Of windows that two samples share, with the rows of their keys given."""
        rng = torch.Generator().manual_seed(5)
        a, s, z = (torch.randn(shape, generator=rng) for shape in ((3, 2, 8, 16), (3, 1, 8, 12), (3, 1, 8, 16, 8)))
        picked = torch.randint(0, 1 + 3 * 2 * 8, (3 * 2 * 16,), generator=rng)
        compare(
            transformer(*SIZES, threefold=False, keys=keys), a, s, z, torch.ones(3, 1, 16), diffusion_steps.Keys(picked), None
        )

    def test_gradients_by_the_products_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
        """A block in training, with all its products and their gradients by the kernels, but those of the attention."""
        rng = torch.Generator().manual_seed(6)
        layer: Any = transformer(32, 24, 8, 2, 1, threefold=True).requires_grad_()
        inputs = [torch.randn(shape, generator=rng) for shape in ((1, 2, 20, 32), (1, 2, 20, 24), (1, 1, 2, 20, 20))]
        do = torch.randn(1, 2, 20, 32, generator=rng)

        def step(dtype: torch.dtype) -> list[Tensor]:
            block, (a, s, bias) = layer.blocks[0].to(dtype), (x.to(dtype).requires_grad_() for x in inputs)
            y = block(a, s, pair_bias=bias)
            leaves = [x for name, x in block.named_parameters() if "layer_norm_z" not in name and "linear_z" not in name]
            return [y.detach(), *torch.autograd.grad(y, (a, s, bias, *leaves), do.to(dtype))]

        plain, multiplied = step(torch.float32), list[Tensor]()
        monkeypatch.setattr(call, "_is_trained", lambda x, *_: x.dtype == torch.float32)
        across = call._across
        monkeypatch.setattr(call, "_across", lambda *args: multiplied.append(args[0]) or across(*args))
        ours = step(torch.float32)
        assert len(multiplied) == 8, "as many as the block has products"
        for x, y, z in zip(ours, plain, step(torch.float64), strict=True):
            assert relative_error(x, z) <= max(1.5 * relative_error(y, z), 1e-6)
