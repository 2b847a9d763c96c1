"""Every tile that the fitting rules can reach keeps the rule of `tiles.limits`; a sample is compiled.

`python -m tests.backends.triton.test_reachable [sm_90 ...]` compiles all of them and prints what is wrong.
"""

import dataclasses
import itertools
import sys
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from evoattn.backends import Cotangents, Inputs, Outputs
from evoattn.backends import triton as backend
from evoattn.backends.triton.tiles import backward as heuristics_backward
from evoattn.backends.triton.tiles import forward as heuristics
from evoattn.backends.triton.tiles import limits as validity
from evoattn.backends.triton.tiles.backward import backward_tiles
from evoattn.backends.triton.tiles.forward import forward_tiles
from evoattn.backends.triton.tiles.limits import Tiles
from evoattn.core import tuned_tiles
from evoattn.core.config import Config
from evoattn.core.problem import Needs, Problem
from evoattn.workloads import WORKLOADS
from tests.helpers.ahead_of_time import SHARED_LIMITS, ptxas, target
from tests.helpers.descriptors import wrong_descriptors
from tests.helpers.reachable import CARDS, Launched, launches, reachable

KERNELS = ("forward_kernel", "dq_kernel", "dkdv_kernel", "pair_gradient_kernel")
FEW_QUERIES = Problem("cuda", (9, 0), torch.float32, 1, 3, 4, 2, 47, 40, 32, needs=Needs(True, True, True))
"""Wrong on an H200 until 8 warps on 16 queries and 64 keys became 4."""

LIMIT = CARDS["sm_90"][1]


@pytest.mark.parametrize("card", [pytest.param(card, marks=[pytest.mark.slow] if card != "sm_90" else []) for card in CARDS])
def test_every_reachable_tile_keeps_the_rule(card: str) -> None:
    pairs = reachable(*CARDS[card])
    tiles = {launched for _, new in pairs for launched in new}
    assert {tile.kernel for tile in tiles} == set(validity.KERNELS)
    assert len(tiles) > 300
    assert [(problem, tile) for problem, new in pairs for tile in new if not tile.keeps_rule(problem.capability)] == []


TABLES = (
    ((8, 0), torch.bfloat16, (heuristics.HALF, heuristics_backward.HALF)),
    ((8, 0), torch.float32, (heuristics.FLOAT, heuristics_backward.FLOAT)),
    ((9, 0), torch.bfloat16, (heuristics_backward.HOPPER,)),
    ((9, 0), torch.float32, (heuristics_backward.FLOAT_HOPPER,)),
    ((10, 0), torch.bfloat16, (heuristics.HALF_BLACKWELL,)),
    ((10, 0), torch.float32, (heuristics.FLOAT_BLACKWELL,)),
)
"""By capability and dtype. Hopper's forward has no table: `test_the_rule_changes_no_workload` goes through it."""


def lines(tables: tuple[Any, ...]) -> list[tuple[str, Tiles | Tiles]]:
    """Each tile of some tables, with its kernel."""
    named: list[tuple[str, Tiles | Tiles]] = []
    for line in itertools.chain(*tables):
        if isinstance(line, tuple):
            named.append(("forward", line[1]))
            continue
        for field in dataclasses.fields(line):
            tile = getattr(line, field.name)
            if isinstance(tile, Tiles):
                named.append((field.name.split("_")[0], tile))
    return named


def test_every_line_of_the_tables_keeps_the_rule() -> None:
    """At full size no tile gives up a warp."""
    kept = [
        validity.keeps_rule(kernel, tile, dtype, capability)
        for capability, dtype, tables in TABLES
        for kernel, tile in lines(tables)
    ]
    assert len(kept) > 50 and all(kept)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_rule_changes_no_workload(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    problems = [
        Problem(
            "cuda", (9, 0), dtype, w.b, w.n, w.h, w.lq, w.lk, w.d, w.d, mask=w.key_mask, deterministic=fixed,
            pair_bias=dtype if w.pair_bias else None, needs=Needs(True, True, True, pair_bias=w.pair_bias),
        )
        for w in WORKLOADS
        for fixed in (False, True)
    ]  # fmt: skip
    before = [launches(problem, LIMIT) for problem in problems]
    monkeypatch.setattr(validity, "fit", lambda *_: {})
    assert [launches(problem, LIMIT) for problem in problems] == before


def test_few_queries_take_fewer_warps() -> None:
    tile = backward_tiles(FEW_QUERIES, Config(), LIMIT).dkdv
    assert (tile.block_q, tile.block_k, tile.num_warps) == (16, 64, 4)
    assert validity.most_warps("dkdv", 16, 64, torch.float32, (9, 0)) == 4
    assert validity.most_warps("dkdv", 64, 16, torch.float32, (9, 0)) == 16
    assert validity.most_warps("dq", 64, 32, torch.bfloat16, (9, 0)) == 8
    assert validity.most_warps("dq", 64, 16, torch.bfloat16, None) == 4


GIVEN = [
    {name: value for name, value in zip(("block_q", "block_k", "num_warps"), values, strict=True) if value is not None}
    for values in itertools.product((None, 16, 32, 64, 128, 256), (None, 16, 32, 64, 128), (None, 1, 4, 8, 16))
]


@pytest.mark.parametrize("lq", [1, 40, 200])
@pytest.mark.parametrize("lk", [10, 47, 200])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_what_a_user_gives_stays_or_is_refused(dtype: torch.dtype, lk: int, lq: int) -> None:
    problem = dataclasses.replace(FEW_QUERIES, dtype=dtype, lq=lq, lk=lk, pair_bias=dtype, deterministic=True)
    refused = 0
    for args in GIVEN:
        config = Config(**args)
        reasons = [reason for reason in backend.unsupported(problem, config) if "num_warps" in reason]
        refused += bool(reasons)
        backward = backward_tiles(problem, config, LIMIT)
        tiles: dict[str, Any] = {"forward": forward_tiles(problem, config, LIMIT)}
        tiles |= {kernel: getattr(backward, kernel) for kernel in ("dq", "dkdv", "pair")}
        assert all(validity.keeps_rule(kernel, tile, dtype, (9, 0)) for kernel, tile in tiles.items()), args
        kept = all(getattr(tile, name) == value for tile in tiles.values() for name, value in args.items())
        assert kept != bool(reasons), (args, tiles)
        assert all(launched.keeps_rule((9, 0)) for launched in launches(problem, LIMIT, config)), args
    assert refused


def test_what_is_refused_says_what_fits() -> None:
    config = Config(block_q=16, block_k=64, num_warps=8)
    (reason,) = (reason for reason in backend.unsupported(FEW_QUERIES, config) if "num_warps" in reason)
    assert reason == "config.num_warps must be at most 4 with config.block_q=16 and config.block_k=64 in dK and dV, got 8"
    forward_alone = dataclasses.replace(FEW_QUERIES, needs=Needs())
    assert not [reason for reason in backend.unsupported(forward_alone, config) if "num_warps" in reason]


def test_a_find_for_another_length_is_fitted(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(block_q=64, block_k=16, num_warps=8, num_stages=2)
    monkeypatch.setattr(tuned_tiles, "tuned", lambda *_: config)
    backward = backward_tiles(FEW_QUERIES, Config(), LIMIT)
    assert [tile.num_warps for tile in (backward.dq, backward.dkdv, backward.pair)] == [4, 8, 4]
    assert forward_tiles(FEW_QUERIES, Config(), LIMIT).num_warps == 4


def compiled(problem: Problem, arch: str, config: Config | None = None) -> list[Any]:
    """The kernels with tiles that a training step of the problem launches."""
    p = problem

    def empty(length: int, channels: int) -> torch.Tensor:
        return torch.empty(p.b, p.n, length, p.h, channels, dtype=p.dtype).transpose(2, 3)

    q, k, v, o, do = empty(p.lq, p.d), empty(p.lk, p.d), empty(p.lk, p.c), empty(p.lq, p.c), empty(p.lq, p.c)
    pair = None if p.pair_bias is None else torch.empty(1, p.h, p.lq, p.lk, dtype=p.pair_bias)
    lse = torch.empty(p.b, p.n, p.h, p.lq)
    options: dict[str, Any] = {"scale": p.d**-0.5, "layout": "bnlhd", "config": config or Config()}
    with target(arch) as kernels:
        values = Cotangents(do), Inputs(q, k, v, pair_bias=pair), Outputs(o, lse, lse)
        backend.plan_forward(values[1], **options).run(*values[1:])
        plan = backend.plan_backward(*values, **options, needs=p.needs, deterministic=p.deterministic)
        plan.run(*values, (*(torch.empty_like(x) for x in (q, k, v)), None))
    return [kernel for kernel in kernels if kernel.metadata.name in KERNELS]


def shrunk(tile: Launched) -> bool:
    """Whether a tile is smaller than any line of the tables of its kernel."""
    return (tile.block_q, tile.block_k, tile.num_warps) not in {
        (line.block_q, line.block_k, line.num_warps)
        for _, _, tables in TABLES
        for kernel, line in lines(tables)
        if kernel == tile.kernel
    }


SAMPLE = 12


def sample(card: str) -> list[Problem]:
    """Small problems whose tiles are not at full size, spread over all of them."""
    problems = [p for p, new in reachable(*CARDS[card]) if p.n * p.h <= 16 and any(map(shrunk, new))]
    return problems[:: max(1, len(problems) // SAMPLE)]


def faults(problem: Problem, arch: str) -> list[str]:
    """What is wrong with the kernels of a problem."""
    messages = []
    for kernel in compiled(problem, arch):
        name = f"{kernel.metadata.name} with {kernel.metadata.num_warps} warps"
        if kernel.metadata.shared > SHARED_LIMITS[arch]:
            messages.append(f"{name}: {kernel.metadata.shared} bytes of shared memory")
        messages += [f"{name}: {wrong}" for wrong in wrong_descriptors(kernel)]
    return messages


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_a_sample_of_reachable_tiles_compiles_without_faults(part: int) -> None:
    problems = sample("sm_90")[part::4]
    assert problems
    assert {str(problem): wrong for problem in problems if (wrong := faults(problem, "sm_90"))} == {}


@pytest.mark.parametrize("problem", [
    FEW_QUERIES,
    dataclasses.replace(FEW_QUERIES, n=17, lq=16, c=8),
    dataclasses.replace(FEW_QUERIES, n=2, h=2, lq=5, lk=33, d=64, c=32),
], ids=str)  # fmt: skip
def test_what_crashed_is_right(problem: Problem) -> None:
    assert faults(problem, "sm_90") == []


@pytest.mark.skipif(not ptxas()[1].startswith("12.8"), reason="this ptxas makes right code of shared rows")
def test_the_comparison_finds_the_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validity, "fit", lambda *_: {})
    (first, *_) = faults(FEW_QUERIES, "sm_90")
    assert first.startswith("dkdv_kernel with 8 warps: dkdv.py:")


if __name__ == "__main__":
    for arch in sys.argv[1:] or CARDS:
        for problem, _ in reachable(*CARDS[arch]):
            for fault in faults(problem, arch):
                print(arch, problem, fault, flush=True)
