"""The forward on the CPU, in Triton's interpreter, against the dense float64 oracle.

Triton reads TRITON_INTERPRET when a kernel is defined, so these tests need a process of their own: run from the ordinary suite,
this file starts itself once more with the variable set.
"""

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.helpers.interpreted import INTERPRETED, PARTS, run

if not INTERPRETED:

    @pytest.mark.parametrize("part", PARTS)
    def test_in_the_interpreter(part: str) -> None:
        """All tests below, in a process where Triton interprets."""
        run(__file__, part)

else:
    from tests.helpers import interpreter

    interpreter.patch()

    from evoattn import evoformer_attention, explain, testing
    from evoattn.backends.triton import forward_plan
    from evoattn.backends.triton.key_bias_plan import plan_key_bias
    from evoattn.core.config import Config
    from evoattn.kit import cards
    from evoattn.kit import overlap as overlap_module
    from evoattn.kit.overlap import overlap
    from evoattn.kit.strides import split

    pytestmark = [
        pytest.mark.usefixtures("poisoned"),
        pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning"),
    ]

    def forward(inputs: testing.CaseInputs, config: Config | None = None) -> tuple[Tensor, Tensor]:
        """O and the LSE."""
        names = ("mask", "mask_bias", "pair_bias", "gate")
        options: Any = {name: getattr(inputs, name) for name in names}
        case = inputs.case
        options |= {"scale": case.scale, "layout": case.layout, "backend": "triton", "config": config}
        return evoformer_attention(inputs.q, inputs.k, inputs.v, return_lse=True, **options)

    def check(inputs: testing.CaseInputs, config: Config | None = None) -> None:
        """Hold o and lse to the suite's budget."""
        o, lse = forward(inputs, config)
        testing.check(testing.Results({"o": o, "lse": lse}), inputs)

    LONG = ("few_without_bias", "gate_few_column", "few_column", "few_queries_few_values")
    """Names of what takes seconds each."""

    def slow_if(condition: bool, *values: object) -> Any:
        return pytest.param(*values, marks=[pytest.mark.slow] if condition else [])

    CASES = [slow_if(case.name in LONG or i % 3 != 0, case) for i, case in enumerate(testing.AWKWARD)]

    @pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
    def test_forward_of_awkward_case_agrees_with_float64(case: testing.Case) -> None:
        check(case.make(seed=1))

    LOW = [case for case in testing.AWKWARD if case.lq <= 50 and case.d <= 32 and not case.name.startswith("only_")]

    SOME = [slow_if(case.name in LONG or i % 9 != 0, case) for i, case in enumerate(LOW)]

    @pytest.mark.parametrize("case", SOME, ids=lambda case: case.name)
    def test_forward_in_low_precision_agrees_with_float64(case: testing.Case) -> None:
        """bfloat16 and, for every third case, float16: the kernels have no code of its own for it."""
        check(dataclasses.replace(case, dtype=torch.bfloat16).make(seed=2))
        if LOW.index(case) % 3 == 0:
            check(dataclasses.replace(case, dtype=torch.float16).make(seed=2))

    def test_products_of_float16_take_keys_and_values_of_all_sizes() -> None:
        inputs = testing.Case("sizes", n=2, lq=20, lk=70, d=16, pair_bias="b1hqk").make(seed=4)
        sizes = torch.logspace(-6, 6, inputs.v.shape[-1])
        o, _ = forward(dataclasses.replace(inputs, v=inputs.v * sizes))
        right, _ = forward(inputs)
        torch.testing.assert_close(o / sizes, right, rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize("size", [1e12, 1e38])
    def test_a_large_value_of_a_masked_key_takes_no_digits(size: float) -> None:
        inputs = testing.Case("padding", n=2, lq=20, lk=40, d=16, mask="padding").make(seed=5)
        right, _ = forward(inputs)
        assert inputs.mask is not None
        v = torch.where(inputs.mask.movedim(-1, 2).reshape(1, 2, 40, 1, 1), inputs.v, size)
        o, _ = forward(dataclasses.replace(inputs, v=v))
        assert (v == size).any()
        torch.testing.assert_close(o, right, rtol=1e-5, atol=1e-6)

    TILES = (Config(block_q=16, block_k=16), Config(block_q=32, block_k=16), Config(block_q=16, block_k=64))

    ALL_TILES = list(itertools.product(("random", "padding", "empty_rows", None), TILES))

    @pytest.mark.parametrize(("mask", "config"), [slow_if(i % 4 != 3, *x) for i, x in enumerate(ALL_TILES)], ids=str)
    def test_forward_of_several_tiles_agrees_with_float64(mask: str | None, config: Config) -> None:
        """Several query blocks, several key tiles, a ragged last tile with and without a mask."""
        case = testing.Case(
            "tiles", n=4, lq=41, lk=87, d=16, mask=mask, mask_bias="finite" if mask else None, pair_bias="b1hqk"
        )  # type: ignore[arg-type]
        check(case.make(seed=3), config)

    def test_holes_in_the_mask() -> None:
        """Key tiles that are off in the middle of a row: first, last, alternating and all."""
        inputs = testing.Case("holes", n=5, h=1, lq=17, lk=87, d=16, mask="random", pair_bias="b1hqk").make(seed=4)
        tiles = torch.tensor(
            [[0, 1, 1, 0, 1, 0], [1, 0, 1, 0, 1, 1], [0, 0, 0, 0, 0, 1], [0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 0]]
        )
        inputs.mask[0] &= tiles.bool().repeat_interleave(16, 1)[:, :87]  # type: ignore[index]
        check(inputs, Config(block_q=16, block_k=16))

    @pytest.mark.parametrize("length", [1, 16, 87, 128, 129, 600])
    def test_runs_of_live_tiles(length: int) -> None:
        generator = torch.Generator().manual_seed(length)
        mask = torch.rand(2, 3, length, generator=generator) < 0.04
        rows = plan_key_bias(mask, None, length, mask.device, 16, scale=0.0)  # which is not folded
        overlap(mask.device, (rows.launch, ()))
        bias, runs_of = rows.allocate()
        rows.launch(mask, bias, bias, runs_of)
        padded = torch.nn.functional.pad(mask, (0, bias.shape[-1] - length))
        assert torch.equal(bias, torch.where(padded, 0.0, -torch.inf))
        for b, n in [(b, n) for b in range(2) for n in range(3)]:
            count, *ends = runs_of[b, n].tolist()
            runs = list(zip(ends[: 2 * count : 2], ends[1 : 2 * count : 2], strict=True))
            live = padded[b, n].reshape(-1, 16).any(-1).tolist()
            assert [tile for first, last in runs for tile in range(first, last)] == [i for i, on in enumerate(live) if on]
            assert all(before[1] < after[0] for before, after in itertools.pairwise(runs))

    @pytest.mark.skipif(not forward_plan.HAS_TENSOR_MAPS, reason="this Triton has no tensor maps")
    def test_tensor_map(monkeypatch: pytest.MonkeyPatch) -> None:
        """The way in which Hopper loads the pair bias: batch and head broadcast, ragged ends, a copied odd length."""
        monkeypatch.setattr(cards, "capability", lambda device: (9, 0))
        for name in ("_wait", "_launch_dependents"):  # the interpreter knows neither, and ends a kernel before the next
            monkeypatch.setattr(overlap_module, name, lambda: None)
        for pair_bias, length in (("b1hqk", 32), ("11hqk", 45), ("b11qk", 72)):
            case = testing.Case("map", lead=(2,), n=4, lq=length, lk=length, mask="random", pair_bias=pair_bias)
            check(case.make(seed=5), Config(block_q=32, block_k=16))

    def test_explain_tells_the_copy_of_a_pair_bias() -> None:
        """An odd length and a permuted linear are laid out anew; a whole bias, and one that few rows share, are not."""
        told = {}
        for name, changes in {
            "whole": {"lq": 32, "lk": 32},
            "odd": {"lq": 33, "lk": 33},
            "permuted": {"lq": 32, "lk": 32, "strides": "permuted_pair"},
            "one_row": {"lq": 33, "lk": 33, "n": 1},
        }.items():
            inputs = testing.Case(name, **{"n": 8, "pair_bias": "b1hqk", **changes}).make()  # type: ignore[arg-type]
            explained = explain(inputs.q, inputs.k, inputs.v, pair_bias=inputs.pair_bias, backend="triton")
            told[name] = [what.split(":")[0] for what in explained.copies]
        assert told == {"whole": [], "odd": ["pair_bias"], "permuted": ["pair_bias"], "one_row": []}

    def test_explain_tells_the_tiles_of_the_backward() -> None:
        """Of the kernels that would run: none without a gradient, and the one in a fixed order where that is asked for."""
        inputs = testing.Case("told", n=4, lq=33, lk=40, pair_bias="b1hqk").make()
        q, k, v, pair_bias = inputs.q, inputs.k, inputs.v, inputs.pair_bias
        wanted = {(): [], (k,): ["dkdv"], (q, k, v, pair_bias): ["dq", "dkdv"], (pair_bias,): ["dq"]}
        for leaves, kernels in wanted.items():
            for x in (q, k, v, pair_bias):
                x.requires_grad_(any(x is leaf for leaf in leaves))
            options = {"backend": "triton", "deterministic": False, "config": Config(block_q=16)}
            told = explain(q, k, v, pair_bias=pair_bias, **options)  # type: ignore[arg-type]
            assert list(told.backward) == kernels
            assert all(tiles["block_q"] == 16 for tiles in told.backward.values())
            lines = [line for line in str(told).splitlines() if line.startswith("backward ")]
            assert [line.split(": ")[0] for line in lines] == [f"backward {kernel}" for kernel in kernels]
            assert all("block_q=16, block_k=" in line for line in lines)
        told = explain(q, k, v, pair_bias=pair_bias, backend="triton", deterministic=True)
        assert list(told.backward) == ["dpair_bias"]

    def test_nothing_outside_is_read_into_the_result() -> None:
        """q, k, v and the pair bias are views of larger tensors that hold NaN all around."""
        inputs = testing.Case("nan", n=2, lq=21, lk=37, d=12, pair_bias="b1hqk").make(seed=6)

        def surrounded(x: Tensor) -> Tensor:
            room = torch.full([size + 3 for size in x.shape], torch.nan)
            view = room[tuple(slice(1, 1 + size) for size in x.shape)]
            return view.copy_(x)

        views = {name: surrounded(getattr(inputs, name)) for name in ("q", "k", "v", "pair_bias")}
        check(dataclasses.replace(inputs, **views), Config(block_q=16, block_k=16))

    def test_bfloat16_is_right_in_the_interpreter() -> None:
        """Without the patch the error is 100%, with it about what rounding gives."""
        inputs = testing.Case("bf16", dtype=torch.bfloat16, pair_bias="b1hqk").make(seed=8)
        o, _ = forward(inputs)
        assert testing.relative_error(o, testing.oracle(inputs).values["o"]) < 3e-3

    def test_split_covers_every_row_once() -> None:
        for length in range(1, 300):
            pieces = list(split(length, 128))
            assert [row for first, rows, _ in pieces for row in range(first, first + rows)] == list(range(length))
            assert all(rows % block == 0 or rows == pieces[-1][1] for _, rows, block in pieces)
