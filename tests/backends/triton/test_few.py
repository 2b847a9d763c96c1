"""Which problems go to the kernels of few queries and keys, and what their plans launch; no kernel runs or is compiled here."""

import dataclasses
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from evoattn.backends import Cotangents, Description, Inputs, Outputs
from evoattn.backends import triton as backend
from evoattn.backends.triton import few_plan
from evoattn.backends.triton.tiles.few import FewTiles, few_tiles
from evoattn.core.config import Config
from evoattn.core.problem import Needs, Problem
from evoattn.kit.launch import FlatKernel, Launch
from evoattn.kit.strides import Strided, grain, strided, units

POINT = Problem("cuda", (9, 0), torch.bfloat16, b=1, n=16384, h=4, lq=1, lk=4, d=16, c=16, mask=True)
ALL = Needs(*(True,) * 5)


@pytest.mark.parametrize(("changes", "forward", "backward"), [
    ({}, FewTiles(32, 4, 1), FewTiles(16, 4, 1)),
    ({"lk": 1}, FewTiles(32, 4, 1), FewTiles(16, 4, 1)),
    ({"lk": 5}, FewTiles(16, 8, 1), FewTiles(8, 8, 1)),
    ({"lk": 16, "c": 24}, FewTiles(4, 16, 1), FewTiles(4, 16, 1)),
    ({"lk": 256, "d": 32, "c": 32}, FewTiles(1, 256, 2), FewTiles(1, 256, 2)),
    ({"lk": 256, "d": 33}, None, None),
    ({"lk": 257}, None, None),
    ({"dtype": torch.float32}, FewTiles(16, 4, 1), FewTiles(8, 4, 1)),
    ({"lq": 8, "lk": 8}, FewTiles(8, 8, 1), FewTiles(8, 8, 1)),
    ({"lq": 8, "lk": 9}, None, FewTiles(8, 16, 1)),
    ({"lq": 9, "lk": 16}, None, None),
    ({"lq": 2, "lk": 64}, None, FewTiles(1, 64, 1)),
    ({"lq": 16, "lk": 2}, FewTiles(16, 4, 1), FewTiles(16, 4, 1)),
    ({"lq": 17, "lk": 2}, None, None),
    ({"lk": 32}, FewTiles(4, 32, 1), FewTiles(4, 32, 1)),
    ({"lq": 2, "lk": 32, "d": 128}, None, None),
    ({"pair_bias": torch.bfloat16}, None, None),
    ({"mask_bias": torch.float32}, FewTiles(32, 4, 1), FewTiles(16, 4, 1)),
    ({"mask_bias": torch.float32, "needs": ALL}, FewTiles(32, 4, 1), None),
], ids=str)  # fmt: skip
def test_few_tiles_are_for_few_queries_or_keys(
    changes: dict[str, Any], forward: FewTiles | None, backward: FewTiles | None
) -> None:
    problem = dataclasses.replace(POINT, **changes)
    assert few_tiles("forward", problem, Config()) == forward
    assert few_tiles("backward", problem, Config()) == backward
    assert few_tiles("forward", problem, Config(block_k=16)) is None
    assert few_tiles("forward", problem, Config(score_bytes=1 << 20)) == forward, "no tiles of a GPU's"


def test_explain_shows_tiles_of_few_queries() -> None:
    q, k = (torch.empty(1, POINT.n, length, 4, 16, dtype=POINT.dtype, device="meta").transpose(2, 3) for length in (1, 4))
    lse = torch.empty(1, POINT.n, 4, 1, device="meta")
    inputs, options = Inputs(q, k, k), {"scale": 0.25, "layout": "bnlhd", "config": Config()}
    forward = backend.plan_forward(inputs, **options).describe()
    assert forward == Description(Config(num_warps=1))
    assert backend.unsupported(POINT, forward.config) == []
    needs = {"needs": (True, True, True, False, False, False), "deterministic": False}
    backward = backend.plan_backward(Cotangents(q), inputs, Outputs(q, lse, lse), **needs, **options).describe()
    assert backward == Description(kernels={"few": {"rows": 16, "block_k": 4, "num_warps": 1}})


@pytest.mark.parametrize("long", [False, True], ids=["short", "long"])
def test_a_launch_a_pass_and_few_variants(monkeypatch: pytest.MonkeyPatch, long: bool) -> None:
    """Offsets are 64 bits wide where any of them leaves 32; nothing else but room and divisibility is a constant."""
    launches: list[Launch] = []
    plan = FlatKernel.plan

    def planned(kernel: FlatKernel, programs: int, *numbers: float, **constants: Any) -> Launch:
        launches.append(plan(kernel, programs, *numbers, **constants))
        return launches[-1]

    monkeypatch.setattr(FlatKernel, "plan", planned)
    for lk in (1, 2, 3, 4):
        n = 1 << 26 if long else 100 + lk
        q = torch.empty(1, n, 1, 4, 16, device="meta").transpose(2, 3)
        k = torch.empty(1, n, lk, 4, 16, device="meta").transpose(2, 3)
        lse = torch.empty(1, n, 4, 1, device="meta")
        mask = torch.empty(1, n, lk, dtype=torch.bool, device="meta")
        options: dict[str, Any] = {"scale": 0.25, "layout": "bnlhd", "config": Config()}
        inputs, needs = Inputs(q, k, k, mask), (True, True, True, False, False, False)
        backend.plan_forward(inputs, **options)
        values = Cotangents(q), inputs, Outputs(q, lse, lse)
        backend.plan_backward(*values, needs=needs, deterministic=True, **options)
    assert len(launches) == 8
    assert [each.programs for each in launches[:2]] == [-(-4 * n // 16), -(-4 * n // 8)] if long else [26, 51]
    assert {each.constants["LONG"] for each in launches} == {long}
    assert len({repr(each.constants) for each in launches}) == 4, "two kernels, with four keys and with fewer"


@pytest.mark.parametrize(("step", "common"), [((1 << 31) - 16, 16), (1 << 31, 1)])
def test_rows_far_apart_are_no_units(step: int, common: int) -> None:
    """Kernels multiply units by the grain in 32 bits."""
    far = Strided((1, 1, 1, 2, 16), (0, 0, 0, step, 1), torch.bfloat16)
    near = Strided((1, 1, 1, 2, 16), (1 << 33, 1 << 33, 1 << 33, 16, 1), torch.bfloat16)
    assert grain(near) == 16
    assert grain(near, far) == common
    assert units(far, 5, common)[3] == step // common


def test_the_extent_of_a_tensor() -> None:
    assert few_plan.extent(strided(torch.empty(3, 4, 5))) == 59
    assert few_plan.extent(strided(torch.empty(3, 1, 5).expand(3, 4, 5))) == 14
