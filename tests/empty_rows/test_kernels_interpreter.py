"""Kernels for rows without a key on the CPU, in Triton's interpreter, against the same call in plain torch.

Triton reads TRITON_INTERPRET when a kernel is defined, so these tests need a process of their own: run from the ordinary suite,
this file starts itself once more with the variable set.
"""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.interpreted import INTERPRETED, PARTS, run
from tests.helpers.operators import Operators

pytest.importorskip("triton")
if not INTERPRETED:

    @pytest.mark.parametrize("part", PARTS)
    def test_in_the_interpreter(part: str) -> None:
        """All tests below, in a process where Triton interprets."""
        run(__file__, part)

else:
    from tests.helpers import interpreter

    interpreter.patch()

    from evoattn import api, testing
    from evoattn.compat.cuequivariance import triangle_attention
    from evoattn.compat.deepspeed import DS4Sci_EvoformerAttention
    from evoattn.compat.openfold import attention
    from evoattn.empty_rows import in_place, means

    pytestmark = [pytest.mark.usefixtures("poisoned")]

    TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
    Call = Callable[[Tensor, Tensor, Tensor, list[Tensor | None]], Tensor]

    @pytest.fixture(autouse=True)
    def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """The number of leading axes of each call that the kernels took; they take tensors of the CPU here."""
        taken: list[int] = []
        attend = in_place.attend

        def counted(function: Call, q: Tensor, *args: object, **options: object) -> Tensor:
            taken.append(q.ndim - 3)
            return attend(function, q, *args, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(in_place, "attend", counted)
        monkeypatch.setattr(means, "has_kernels", lambda device: True)
        return taken

    def mask_of(kind: str, lead: tuple[int, ...], keys: int, rng: torch.Generator) -> Tensor:
        """A float32 mask bias [*, 1, 1, k]."""
        mask = torch.where(torch.rand(*lead, 1, 1, keys, generator=rng) > 0.3, 0.0, -1e9)
        rows = mask.view(-1, keys)
        rows[:, 0] = 0.0
        if kind == "all":
            mask.fill_(-1e9)
        if kind in ("some", "deeper", "infinite"):
            rows[[0, -1]] = -1e9
        if kind == "deeper":
            rows[0, 2:] *= 2
        if kind == "infinite":
            rows[-1] = -torch.inf
        return mask

    def make(
        kind: str = "some",
        lead: tuple[int, ...] = (2, 5),
        lq: int = 7,
        lk: int = 9,
        d: int = 8,
        c: int = 6,
        dtype: torch.dtype = torch.float32,
        pair: tuple[int, ...] | None = (2, 1),
    ) -> tuple[Tensor, Tensor, Tensor, list[Tensor | None]]:
        """q, k, v and biases; the pair bias requires a gradient as q, k and v do, and a mean of v is not near 0."""
        rng = torch.Generator().manual_seed(lq)

        def leaf(*sizes: int, add: float = 0.0) -> Tensor:
            return (torch.randn(*sizes, generator=rng) + add).to(dtype).requires_grad_()

        q, k, v = leaf(*lead, 2, lq, d), leaf(*lead, 2, lk, d), leaf(*lead, 2, lk, c, add=1.0)
        return q, k, v, [mask_of(kind, lead, lk, rng).to(dtype), None if pair is None else leaf(*pair, 2, lq, lk)]

    def step(call: Call, q: Tensor, k: Tensor, v: Tensor, biases: list[Tensor | None]) -> list[Tensor]:
        """The output and all gradients."""
        o = call(q, k, v, biases)
        leaves = [x for x in (q, k, v, *biases) if x is not None and x.requires_grad]
        return [
            o,
            *torch.autograd.grad(o, leaves, torch.randn(o.shape, generator=torch.Generator().manual_seed(3)).to(o.dtype)),
        ]

    def in_torch(call: Call, *arguments: object) -> list[Tensor]:
        """The same by torch."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(means, "has_kernels", lambda device: False)
            return step(call, *arguments)  # type: ignore[arg-type]

    def compare(calls: list[int], call: Call, *arguments: object) -> list[Tensor]:
        """Both agree, and the kernels ran."""
        expected = in_torch(call, *arguments)
        assert calls == []
        output = step(call, *arguments)  # type: ignore[arg-type]
        assert calls
        for actual, reference in zip(output, expected, strict=True):
            assert actual.dtype == reference.dtype and actual.shape == reference.shape
            assert testing.relative_error(actual, reference) < TOLERANCE[actual.dtype]
        return output

    @pytest.mark.parametrize(
        ("kind", "pair"),
        [
            ("deeper", (2, 1)),
            *(
                pytest.param(*x, marks=pytest.mark.slow)
                for x in [("none", (2, 1)), ("some", (1, 1)), ("all", (2, 1)), ("deeper", None), ("infinite", (1, 1))]
            ),
        ],
    )
    def test_kernels_agree_with_torch(calls: list[int], kind: str, pair: tuple[int, ...] | None) -> None:
        q, k, v, biases = make(kind, pair=pair)
        o, *_ = compare(calls, attention, q, k, v, biases)
        if kind in ("all", "infinite"):
            torch.testing.assert_close(o[1, 4], v[1, 4].mean(-2, keepdim=True).expand(2, 7, 6))
        if kind == "deeper":
            torch.testing.assert_close(o[0, 0], v[0, 0, :, :2].mean(-2, keepdim=True).expand(2, 7, 6))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("mask", [None, torch.float32], ids=str)
    @pytest.mark.slow
    def test_kernels_agree_with_torch_in_16_bits(calls: list[int], dtype: torch.dtype, mask: torch.dtype | None) -> None:
        q, k, v, (bias, pair) = make(dtype=torch.float32)
        q, k, v, pair = (x.detach().to(dtype).requires_grad_() for x in (q, k, v, pair))
        bias = bias.clamp(min=torch.finfo(dtype).min).to(mask or dtype)
        compare(calls, attention, q, k, v, [bias, pair])

    @pytest.mark.parametrize(("lq", "lk", "d", "c"), [(70, 66, 8, 6), (66, 3, 72, 20), (9, 40, 20, 140)])
    @pytest.mark.slow
    def test_kernels_agree_with_torch_over_several_tiles(calls: list[int], lq: int, lk: int, d: int, c: int) -> None:
        compare(calls, attention, *make("deeper", (1, 2), lq, lk, d, c, pair=(1, 1)))

    @pytest.mark.slow
    def test_more_rows_than_flags_are_read_at_a_time(calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(in_place, "_ROWS_AT_ONCE", 8)
        q, k, v, biases = make("none", (2, 11), 3, 4, pair=(1, 1))
        biases[0].view(-1, 4)[[0, 5, 7, 8, 21]] = -1e9
        compare(calls, attention, q, k, v, biases)

    @pytest.mark.parametrize(
        ("lead", "pair"),
        [((3,), ()), ((3,), (1,)), ((2, 2, 2), (2, 2, 1)), ((2, 2, 2), ()), ((3, 1), (3, 1))],
        ids=str,
    )
    @pytest.mark.slow
    def test_kernels_agree_with_torch_for_any_leading_axes(
        calls: list[int], lead: tuple[int, ...], pair: tuple[int, ...]
    ) -> None:
        compare(calls, attention, *make(lead=lead, pair=pair))

    @pytest.mark.slow
    def test_a_mask_that_rows_share(calls: list[int]) -> None:
        q, k, v, (_, pair) = make()
        compare(calls, attention, q, k, v, [torch.full((2, 1, 1, 1, 1), -1e9), pair])

    @pytest.mark.parametrize("frozen", [0, 1, 2, 3])
    @pytest.mark.slow
    def test_what_needs_no_gradient(calls: list[int], frozen: int) -> None:
        """It gets none, and the others get theirs."""
        q, k, v, (mask, pair) = make()
        (q, k, v, pair)[frozen].requires_grad_(False)
        compare(calls, attention, q, k, v, [mask, pair])
        for others in range(4):
            (q, k, v, pair)[others].requires_grad_(others == frozen)
        calls.clear()
        compare(calls, attention, q, k, v, [mask, pair])

    def test_no_gradient_at_all(calls: list[int]) -> None:
        q, k, v, biases = make()
        with torch.no_grad():
            o = attention(q, k, v, biases)
        assert calls == [2] and not o.requires_grad
        torch.testing.assert_close(o, in_torch(attention, q, k, v, biases)[0])

    @pytest.mark.slow
    def test_strides(calls: list[int]) -> None:
        """Tensors that lie in another order, with gaps, and a gradient of the output that is expanded."""
        q, k, v, (mask, pair) = make()
        q = q.detach().transpose(-1, -2).contiguous().transpose(-1, -2).requires_grad_()
        k = torch.cat((k, k), -1)[..., ::2].detach().requires_grad_()
        v = v.detach().permute(1, 0, 3, 2, 4).contiguous().permute(1, 0, 3, 2, 4).requires_grad_()
        compare(calls, attention, q, k, v, [mask.expand(2, 5, 1, 1, 9), pair])
        calls.clear()
        compare(calls, lambda *args: attention(*args).sum((-1, -2)), q, k, v, [mask, pair])

    def far_apart(x: Tensor, axis: int) -> Tensor:
        """A copy whose indices of an axis lie more than 2^30 elements apart. The memory between is never touched."""
        stride = [step + (i == axis) * 2**30 for i, step in enumerate(x.stride())]
        extent = x.numel() + (x.shape[axis] - 1) * 2**30
        with pytest.MonkeyPatch.context() as patch:  # NaN in 4 GiB would take seconds
            patch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
            return torch.empty(extent, dtype=x.dtype).as_strided(x.shape, stride).copy_(x)

    @pytest.mark.parametrize("axis", [0, 4, *(pytest.param(axis, marks=pytest.mark.slow) for axis in (1, 2, 3))])
    def test_far_apart(axis: int) -> None:
        """The kernels read and write the same numbers if three indices of an axis span 2^31 elements in every tensor."""
        b, n, h, length, c = (3 if i in (3, axis) else 2 for i in range(5))
        rng = torch.Generator().manual_seed(axis)
        shapes = [(b, n, h, length, c)] * 10 + [(b, 1, h, length, length)]
        near = [torch.randn(shape, generator=rng).half() for shape in shapes]
        mask = torch.full((b, n, 1, 1, length), -4e4).half()
        mask[..., -1] = -6e4

        def run(mask: Tensor, *tensors: Tensor) -> list[Tensor]:
            q, k, v, gate, do, o, *gradients = tensors
            alive, stats = in_place.find_rows(mask, means.MaskLimits(-3e4, 1.0))
            filled = in_place.fill_output(o, v, gate, mask, stats)
            in_place.add_gradients((q, k, v, gate), do, tuple(gradients), mask, stats, filled, 0.5)
            return [alive, stats, filled, o, *gradients]

        far = [far_apart(x, axis) for x in (mask, *near)]
        for value, right in zip(run(*far), run(mask, *near), strict=True):
            assert torch.equal(value, right)

    @pytest.mark.slow
    def test_one_tensor_for_all(calls: list[int]) -> None:
        x = torch.randn(2, 5, 2, 9, 8, requires_grad=True)
        compare(calls, lambda q, k, v, biases: attention(q, q, q, biases), x, x, x, make()[3][:1])

    def test_deepspeed(calls: list[int]) -> None:
        """Its own order of axes, which the output keeps."""
        q, k, v, biases = make()
        Q, K, V = (x.detach().transpose(-2, -3).contiguous().requires_grad_() for x in (q, k, v))
        o, *_ = compare(calls, DS4Sci_EvoformerAttention, Q, K, V, biases)
        assert o.is_contiguous()

    @pytest.mark.parametrize("layout", [pytest.param("bnhld", marks=pytest.mark.slow), "bnlhd"])
    def test_gated(calls: list[int], layout: str) -> None:
        """The means are gated too, and the gate has its gradient in their rows; its strides are its own."""
        q, k, v, (mask, pair) = make("some", c=8)
        gate = torch.randn(2, 5, 2, 7, 16, generator=torch.Generator().manual_seed(1))[..., ::2].detach().requires_grad_()
        if layout == "bnlhd":
            q, k, v, gate = (x.detach().transpose(-2, -3).requires_grad_() for x in (q, k, v, gate))

        def call(q: Tensor, k: Tensor, v: Tensor, biases: list[Tensor | None]) -> Tensor:
            attend = functools.partial(api.evoformer_attention, layout=layout)  # type: ignore[call-overload]
            return means.with_means(attend, q, k, v, *biases[:2], None, layout, biases[2])

        def keeping(*args: Any) -> Tensor:
            """With copies of what is saved, as when it is moved to another device and back."""
            with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x):
                return call(*args)

        output = compare(calls, call, q, k, v, [mask, pair, gate])
        assert output[-1].abs().amax(-1).min() > 0
        for a, b in zip(output, step(keeping, q, k, v, [mask, pair, gate]), strict=True):
            torch.testing.assert_close(a, b)

    def test_cuequivariance(calls: list[int]) -> None:
        """Masked keys of an empty row pass a gradient on to v alone."""
        q, k, v, (mask, pair) = make("some")
        allowed = mask.detach() == 0
        output = compare(calls, lambda q, k, v, biases: triangle_attention(q, k, v, biases[1], allowed), q, k, v, [None, pair])
        assert output[1][0, 0].abs().max() == 0 and output[3][0, 0].abs().min() > 0

    @pytest.mark.slow
    def test_a_graph_that_is_kept_and_a_second_derivative(calls: list[int]) -> None:
        q, k, v, biases = make()
        o = attention(q, k, v, biases)
        first = torch.autograd.grad(o.square().sum(), [q, v], retain_graph=True)
        again = torch.autograd.grad(o.square().sum(), [q, v], create_graph=True)
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
        with pytest.raises(RuntimeError, match="no second derivative"):
            again[0].sum().backward()

    @pytest.mark.slow
    def test_kernels_agree_with_torch_under_checkpoint(calls: list[int]) -> None:
        q, k, v, biases = make()

        def recomputed(*args: object) -> Tensor:
            return torch.utils.checkpoint.checkpoint(attention, *args, use_reentrant=False)  # type: ignore[no-any-return]

        compare(calls, recomputed, q, k, v, biases)

    @pytest.mark.slow
    def test_the_attention_runs_its_plan_directly(operators: Operators) -> None:
        """What stands before it leaves tensors as plain as they were."""
        step(attention, *make())
        assert operators.called() == []

    @pytest.mark.parametrize(
        "change",
        [
            lambda q, k, v, mask, pair: (q, k[:, :, :1], v[:, :, :1], [mask, pair]),
            lambda q, k, v, mask, pair: (q, k, v, [mask.requires_grad_(), pair]),
            lambda q, k, v, mask, pair: (q, k, v, [mask, pair[..., :1]]),
            lambda q, k, v, mask, pair: (q, k, v, [mask, pair.expand(2, 5, 2, 7, 9)]),
            lambda q, k, v, mask, pair: (q, k, v, [mask.double(), pair]),
        ],
        ids=["shared_heads", "gradient_of_the_mask", "pair_of_queries", "pair_of_rows", "float64_mask"],
    )
    @pytest.mark.slow
    def test_what_goes_to_torch(calls: list[int], change: Callable[..., tuple[object, ...]]) -> None:
        q, k, v, (mask, pair) = make()
        step(attention, *change(q, k, v, mask, pair))  # type: ignore[arg-type]
        assert calls == []
        step(attention, *make())
        assert calls == [2]
