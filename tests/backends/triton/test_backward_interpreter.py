"""The backward on the CPU, in Triton's interpreter, against float64 autograd of the dense reference.

Triton reads TRITON_INTERPRET when a kernel is defined, so these tests need a process of their own: run from the ordinary suite,
this file starts itself once more with the variable set.
"""

import dataclasses
import itertools
from typing import Any

import pytest
import torch

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

    import evoattn
    from evoattn import testing
    from evoattn.backends.triton import backward_call, backward_launches, backward_plan, few_plan, pair_in_order
    from evoattn.backends.triton.tiles.backward import BackwardTiles
    from evoattn.backends.triton.tiles.limits import Tiles
    from evoattn.core.config import Config
    from tests.helpers import seams

    pytestmark = [
        pytest.mark.usefixtures("poisoned"),
        pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning"),
    ]

    SMALL = Tiles(block_q=16, block_k=16, num_warps=4, num_stages=2)
    PAIRED = dataclasses.replace(SMALL, rows=2)
    LARGE = dataclasses.replace(SMALL, block_q=64, block_k=64)
    ALL_TILES = {
        "small": BackwardTiles(dq=SMALL, dkdv=SMALL, pair=SMALL),
        "two_rows_together": BackwardTiles(dq=PAIRED, dkdv=SMALL, pair=SMALL),
        "three_rows_together": BackwardTiles(dq=dataclasses.replace(SMALL, rows=3), dkdv=SMALL, pair=SMALL),
        # Sizes that differ: what one kernel leaves past the end must be what another reads there.
        "unequal": BackwardTiles(
            dq=dataclasses.replace(PAIRED, block_k=32),
            dkdv=dataclasses.replace(SMALL, block_q=64, num_warps=1),
            pair=dataclasses.replace(SMALL, block_q=32, block_k=64),
        ),
        # So large that what is left over has tiles of its own.
        "left_over": BackwardTiles(dq=dataclasses.replace(LARGE, rows=2), dkdv=LARGE, pair=LARGE),
    }

    def use(monkeypatch: pytest.MonkeyPatch, tiles: BackwardTiles) -> None:
        monkeypatch.setattr(backward_plan, "backward_tiles", lambda *_: tiles)
        seams.forget()

    def check(inputs: testing.CaseInputs, *, deterministic: bool = False, config: Config | None = None) -> None:
        testing.check(testing.run(inputs, "triton", deterministic=deterministic, config=config), inputs)

    # The longest take half a minute here; the GPU suite has them all.
    AWKWARD = [case for case in testing.AWKWARD if case.lq * case.lk <= 101 * 101]

    LONG = (
        *("few_backward", "few_column", "few_queries_few_values", "few_without_bias"),
        *("pair_bias_minus_1e9_where_keys_are_left", "two_batch_axes"),
    )
    """Names of what takes seconds each."""

    def slow_if(condition: bool, *values: object) -> Any:
        return pytest.param(*values, marks=[pytest.mark.slow] if condition else [])

    def is_slow(i: int, case: testing.Case) -> bool:
        return case.name in LONG or i % (12 if case.gate else 8) != 0

    SOME = [slow_if(is_slow(i, case), case) for i, case in enumerate(AWKWARD)]

    @pytest.mark.parametrize("case", SOME, ids=lambda case: case.name)
    def test_gradients_of_awkward_case_agree_with_float64(case: testing.Case) -> None:
        """Every second one of the quick and of all with sums in a fixed order; broadcast biases have both below."""
        check(case.make(seed=1), deterministic=AWKWARD.index(case) // 8 % 2 == 1)

    @pytest.mark.parametrize(
        "name", [slow_if(name in LONG, name) for name in ("few_of_all", "few_column", "few_backward", "few_one_query")]
    )
    def test_few_with_long_offsets(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Both passes with offsets of 64 bits, in float32 and bfloat16."""
        monkeypatch.setattr(few_plan, "extent", lambda tensor: 1 << 31)
        case = next(case for case in testing.AWKWARD if case.name == name)
        for dtype in (torch.float32, torch.bfloat16):
            seams.forget()
            check(dataclasses.replace(case, dtype=dtype).make(seed=5))

    @pytest.mark.parametrize(("axis", "step"), [(-2, 1 << 30), (-2, 1 << 31), (-1, (1 << 30) + 16)], ids=str)
    @pytest.mark.parametrize("which", ["q", "k", "v", "do"])
    def test_few_far_apart(which: str, axis: int, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """Two and three queries or keys, or three channels, whose offsets pass 32 bits; memory between is never touched."""
        d = 16 if axis == -2 else 3
        case = testing.Case("far", n=1, h=1, lq=3, lk=2, d=d, dtype=torch.float16, layout="bnhld", gradients=("q", "k", "v"))
        inputs = case.make(seed=6)
        near = getattr(inputs, which)
        stride = [1, 1, 1, 1, 1]
        stride[axis] = step
        with monkeypatch.context() as patch:  # NaN in 8 GiB would take seconds
            patch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
            far = torch.empty((near.shape[axis] - 1) * step + 16, dtype=torch.float16).as_strided(near.shape, stride)
        far.copy_(near)
        leaves = [x.requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
        spread = [far.requires_grad_() if name == which else x for name, x in zip("qkv", leaves, strict=True)]
        errors = []
        for (q, k, v), do in ((leaves, inputs.do), (spread, far if which == "do" else inputs.do)):
            o = evoattn.evoformer_attention(q, k, v, layout="bnhld", backend="triton")
            errors.append((o, *torch.autograd.grad(o, (q, k, v), do)))
        assert all(torch.equal(x, y) for x, y in zip(*errors, strict=True))

    @pytest.mark.parametrize("lk", [3, 4])
    def test_few_with_an_infinite_query(lk: int) -> None:
        """Keys that are not there, which only three keys have, make no NaN of it."""
        q, k, v = torch.randn(1, 1, 1, 1, 8), -torch.rand(1, 1, lk, 1, 8) - 0.1, torch.randn(1, 1, lk, 1, 8)
        q[..., 0] = torch.inf
        o, lse = evoattn.evoformer_attention(q, k, v, backend="triton", return_lse=True)
        assert o.eq(0).all() and lse.isneginf().all()

    @pytest.mark.parametrize("heads_at_once", [slow_if(True, 1), 2])
    def test_heads_in_turns(heads_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """As many heads as the cache has room for; each of two b and four heads has its programs."""
        use(monkeypatch, ALL_TILES["two_rows_together"])
        monkeypatch.setattr(backward_launches, "_heads_at_once", lambda *_: heads_at_once)
        case = testing.Case("turns", lead=(2,), n=2, h=4, lq=17, lk=18, d=8, mask="random", pair_bias="b1hqk")
        check(case.make(seed=4))

    LOW = [case for case in AWKWARD if case.lq <= 50 and case.d <= 32 and not case.name.startswith("only_")]

    @pytest.mark.parametrize("dtype", [torch.bfloat16, slow_if(True, torch.float16)], ids=["bfloat16", "float16"])
    @pytest.mark.parametrize(
        "case", [slow_if(case.name in LONG or i % 2 == 1, case) for i, case in enumerate(LOW[::7])], ids=lambda case: case.name
    )
    def test_gradients_in_low_precision_agree_with_float64(case: testing.Case, dtype: torch.dtype) -> None:
        check(dataclasses.replace(case, dtype=dtype).make(seed=2))

    @pytest.mark.parametrize("deterministic", [False, slow_if(True, True)], ids=["default", "deterministic"])
    @pytest.mark.parametrize(
        "tiles",
        [
            pytest.param(tiles, id=name, marks=[pytest.mark.slow] if name in ("small", "two_rows_together") else [])
            for name, tiles in ALL_TILES.items()
        ],
    )
    @pytest.mark.parametrize("mask", ["random", slow_if(True, None)])
    def test_many_tiles(monkeypatch: pytest.MonkeyPatch, mask: str | None, tiles: BackwardTiles, deterministic: bool) -> None:
        """Several tiles of queries and of keys, ragged ends, an odd number of rows that share tiles of bias."""
        use(monkeypatch, tiles)
        bias = "finite" if mask else None
        case = testing.Case("tiles", n=5, h=1, lq=41, lk=71, d=12, mask=mask, mask_bias=bias, pair_bias="b1hqk")  # type: ignore[arg-type]
        check(case.make(seed=3), deterministic=deterministic)

    SHAPES = ("111qk", "b11qk", "11hqk", "b1h1k", "b1hq1", "b1h11", "11111")
    QUICK_SHAPES = {
        "default": ("b1h1k",),
        "deterministic": ("11hqk",),
        "added_up_by_torch": ("11111",),
    }

    @pytest.mark.parametrize(
        ("pair_bias", "way"),
        [slow_if(shape not in quick, shape, way) for way, quick in QUICK_SHAPES.items() for shape in SHAPES],
    )
    def test_gradients_of_broadcast_pair_bias_agree_with_float64(
        monkeypatch: pytest.MonkeyPatch, pair_bias: str, way: str
    ) -> None:
        """Every shape that the pair bias can have, with several tiles along each axis that it broadcasts."""
        use(monkeypatch, ALL_TILES["two_rows_together"])
        if way == "added_up_by_torch":
            monkeypatch.setattr(pair_in_order, "MOST_TILES_IN_SERIES", 0)
        case = testing.Case("shape", lead=(2,), n=3, lq=20, lk=19, mask="random", pair_bias=pair_bias, lse_gradient=True)
        check(case.make(seed=4), deterministic=way != "default")

    @pytest.mark.parametrize("pair_bias", [slow_if(True, None), "b1hqk"])
    @pytest.mark.parametrize("sizes", [{"lq": 20, "lk": 20}, {"lq": 2, "lk": 5}], ids=["tiles", "few"])
    def test_hooks_may_give_back_other_strides(sizes: dict[str, int], pair_bias: str | None) -> None:
        """Equal values, laid out anew."""

        def other_strides(x: torch.Tensor) -> torch.Tensor:
            return x.movedim(0, -1).contiguous().movedim(-1, 0) if x.ndim else x

        case = testing.Case("hooks", lead=(2,), n=3, pair_bias=pair_bias, gradients=("q", "k", "v"), **sizes)  # type: ignore[arg-type]
        inputs = case.make(seed=2)
        with torch.autograd.graph.saved_tensors_hooks(other_strides, lambda x: x):
            results = testing.run(inputs, "triton")
        testing.check(results, inputs)

    DISTANT = list(itertools.product(("b1hqk", "b1hq1"), (1, 3), (False, True)))
    QUICK_DISTANT = (("b1hqk", 1, False), ("b1hq1", 3, True))

    @pytest.mark.parametrize(
        ("pair_bias", "n", "deterministic"), [slow_if(each not in QUICK_DISTANT, *each) for each in DISTANT]
    )
    def test_queries_that_a_pair_bias_masks(pair_bias: str, n: int, deterministic: bool) -> None:
        """Every third query has -1e9 for all keys, or more for some: as exact as the others, whose results stay the same."""
        case = testing.Case("distant", lead=(2,), n=n, lq=20, lk=18, mask="random", pair_bias=pair_bias, lse_gradient=True)
        inputs = case.make(seed=5)
        assert inputs.pair_bias is not None
        inputs.pair_bias[..., ::3, :] -= 1e9
        testing.check(testing.run(inputs, "triton", deterministic=deterministic), inputs)

    @pytest.mark.parametrize("spans", [True, slow_if(True, False)], ids=["spans", "all_rows"])
    @pytest.mark.parametrize("pair_bias", ["b1hqk", *(slow_if(True, shape) for shape in ("b1h1k", "b1hq1", "11111"))])
    def test_rows_in_turns(monkeypatch: pytest.MonkeyPatch, pair_bias: str, spans: bool) -> None:
        """Two shares of seven rows, at most three rows of each in a turn; queries and keys left over in tiles of their own."""
        use(monkeypatch, ALL_TILES["left_over"])
        monkeypatch.setattr(pair_in_order, "shares", lambda *_: 2)
        monkeypatch.setattr(pair_in_order, "rows_of_a_turn", lambda share, *_: min(share, 3))
        monkeypatch.setattr(pair_in_order, "ROWS_WORTH_SPANS", 1 if spans else 8)
        sizes = {"lead": (2,), "n": 7, "h": 1, "lq": 70, "lk": 71, "d": 12}
        case = testing.Case("turns", **sizes, mask="padding", pair_bias=pair_bias, lse_gradient=True)  # type: ignore[arg-type]
        check(case.make(seed=4), deterministic=True)

    def test_nothing_is_read_past_a_pair_bias_of_whole_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
        """Lengths that divide by 64 under tiles of 128, in the middle of memory that is NaN all around."""
        wide_tiles = dataclasses.replace(SMALL, block_q=128, block_k=32)
        use(monkeypatch, BackwardTiles(dq=SMALL, dkdv=wide_tiles, pair=SMALL))
        inputs = testing.Case("even", n=4, h=1, lq=64, lk=64, mask="random", pair_bias="b1hqk").make(seed=4)
        assert inputs.pair_bias is not None
        surrounded = torch.full((1, 1, 3, 64, 64), torch.nan)
        surrounded[:, :, 1] = inputs.pair_bias[:, :, 0]
        check(dataclasses.replace(inputs, pair_bias=surrounded[:, :, 1:2]))

    @pytest.mark.parametrize("pair_bias", ["b1hqk", *(slow_if(True, shape) for shape in ("b1h1k", "b1hq1", "11111"))])
    @pytest.mark.parametrize("n", [slow_if(True, 1), 4])
    def test_rows_that_attend_to_nothing_may_hold_anything(monkeypatch: pytest.MonkeyPatch, n: int, pair_bias: str) -> None:
        """NaN in them, and past the last key: the kernel of the queries goes through a tile of theirs all the same."""
        use(monkeypatch, ALL_TILES["two_rows_together"])
        case = testing.Case("dead", lead=(2,), n=n, h=1, lq=32, lk=32, mask="random", pair_bias=pair_bias, layout="bnhld")
        inputs = case.make(seed=4)
        assert inputs.mask is not None
        inputs.mask[:, n // 2 :] = False
        expected = testing.run(inputs, "triton").values
        room = torch.full((5, 2, n + 1, *inputs.q.shape[2:]), torch.nan)
        q, k, v, do = room[:4, :, :n]
        for copy, source in ((q, inputs.q), (k, inputs.k), (v, inputs.v), (do, inputs.do)):
            copy[:, : n // 2] = source[:, : n // 2]
        values = testing.run(dataclasses.replace(inputs, q=q, k=k, v=v, do=do), "triton").values
        for name, value in expected.items():
            assert torch.equal(values[name], value), name

    @pytest.mark.parametrize(
        ("shape", "deterministic"),
        [slow_if((shape, turn) != ((2, 1), True), shape, turn) for shape in ((1, 1), (1, 3), (2, 1)) for turn in (False, True)],
    )
    def test_gradients_of_broadcast_mask_bias_agree_with_float64(shape: tuple[int, int], deterministic: bool) -> None:
        inputs = testing.Case("rows", lead=(2,), n=3, mask="random", mask_bias="finite", pair_bias="b1hqk").make(seed=5)
        assert inputs.mask_bias is not None
        kept = inputs.mask_bias[: shape[0], : shape[1]]
        check(dataclasses.replace(inputs, mask_bias=kept), deterministic=deterministic)

    @pytest.mark.parametrize("deterministic", [slow_if(True, False), True], ids=["default", "deterministic"])
    def test_one_row(deterministic: bool) -> None:
        """Nothing to sum over: the pair-bias gradient is stored straight away, and where keys are off it is 0."""
        for mask in (None, "padding"):
            case = testing.Case("one", n=1, lq=33, lk=70, d=24, mask=mask, pair_bias="b1hqk")  # type: ignore[arg-type]
            check(case.make(seed=6), deterministic=deterministic)

    NEEDS = ((0, 1, 1, 0, 0), (0, 0, 0, 1, 0), (0, 1, 0, 0, 1), (0, 0, 0, 0, 1), (1, 0, 0, 1, 0))

    @pytest.mark.parametrize(
        ("needs", "deterministic"),
        [slow_if(turn != (needs == NEEDS[2]), needs, turn) for needs in NEEDS for turn in (False, True)],
        ids=str,
    )
    def test_some_gradients(needs: tuple[int, ...], deterministic: bool) -> None:
        """Only what is asked for is computed, whichever kernels that leaves out."""
        names = ("q", "k", "v", "mask_bias", "pair_bias")
        case = testing.Case(
            "some",
            n=4,
            mask_bias="finite",
            pair_bias="b1hqk",
            gradients=tuple(name for name, need in zip(names, needs, strict=True) if need),
        )
        check(case.make(seed=7), deterministic=deterministic)

    @pytest.mark.parametrize("dtype", [torch.float32, slow_if(True, torch.bfloat16)], ids=["float32", "bfloat16"])
    def test_nothing_outside_is_read_into_the_result(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
        """q, k, v, both biases and the cotangent are views of larger tensors that hold NaN all around."""
        use(monkeypatch, ALL_TILES["unequal"])
        inputs = testing.Case("nan", n=3, h=1, lq=21, lk=37, d=12, dtype=dtype, mask_bias="finite", pair_bias="b1hqk").make(8)

        def surrounded(x: torch.Tensor) -> torch.Tensor:
            room = torch.full([size + 3 for size in x.shape], torch.nan, dtype=x.dtype)
            return room[tuple(slice(1, 1 + size) for size in x.shape)].copy_(x)

        views = {name: surrounded(getattr(inputs, name)) for name in ("q", "k", "v", "mask_bias", "pair_bias", "do")}
        for deterministic in (False, True):
            check(dataclasses.replace(inputs, **views), deterministic=deterministic)

    def test_two_runs_are_equal() -> None:
        case = testing.Case("twice", lead=(2,), n=2, h=1, lq=20, lk=20, mask="random", mask_bias="finite", pair_bias="11hqk")
        inputs = case.make(seed=9)
        first, second = (testing.run(inputs, "triton", deterministic=True).values for _ in range(2))
        assert all(torch.equal(first[name], second[name]) for name in first)

    def test_dead_tiles_are_not_visited(monkeypatch: pytest.MonkeyPatch) -> None:
        """Keys and queries that a mask switches off may hold anything: their tiles are never read."""
        use(monkeypatch, ALL_TILES["small"])
        inputs = testing.Case("dead", n=3, lq=32, lk=64, d=16, pair_bias="b1hqk").make(seed=10)
        mask = torch.arange(64).expand(1, 3, 64) < 32
        poisoned = {name: getattr(inputs, name).clone() for name in ("k", "v")}
        clean = dataclasses.replace(inputs, mask=mask)
        expected = testing.run(clean, "triton").values
        for x in poisoned.values():
            x[:, :, 32:] = torch.nan
        got = testing.run(dataclasses.replace(clean, **poisoned), "triton").values
        assert all(torch.equal(got[name], expected[name]) for name in expected)

    def test_long_strides(monkeypatch: pytest.MonkeyPatch) -> None:
        """64-bit offsets inside tiles give what 32-bit ones give."""
        monkeypatch.setattr(backward_call, "is_long", lambda *_: True)
        check(testing.Case("wide", lq=33, lk=40, mask="random", mask_bias="finite", pair_bias="b1hqk").make(seed=11))
