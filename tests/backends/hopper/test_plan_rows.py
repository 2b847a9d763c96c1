"""Which rows and heads each launch of the Hopper backend gets, and which it leaves out."""

import dataclasses
import os
from typing import Any

import pytest
import torch
from torch import Tensor

os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")
pytest.importorskip("cutlass", reason="CuTe DSL is not installed: pip install '.[hopper]'")

from evoattn import testing
from evoattn.backends import Cotangents, Inputs, Outputs
from evoattn.backends.hopper import backward_launches, head_groups, tiles
from evoattn.backends.hopper.kernels import key_bias
from evoattn.core.problem import Needs, Problem
from tests.backends.hopper.planned_calls import launch_backward, launch_forward, random_outputs, skip_refused
from tests.helpers import seams


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_rows_without_a_pair_bias_are_done_whole(masked: bool, deterministic: bool, launched: list[Any]) -> None:
    """One kernel finds all gradients; what nobody wants has a place too."""
    case = testing.Case("whole", n=66, h=2, lq=100, lk=70, d=16, dtype=torch.bfloat16, mask_bias="finite" if masked else None)
    c = seams.canonical(case.make(seed=1))
    needs = (True, False, True, masked, False, False)
    outputs = random_outputs(c)
    (o, lse, _), do = outputs, torch.randn_like(outputs.o)
    dq, dv = torch.empty(c.q.shape, dtype=o.dtype), torch.empty(c.v.shape, dtype=o.dtype)
    options: dict[str, Any] = {"layout": case.layout, "deterministic": deterministic}
    tensors: dict[str, Any] = {"cotangents": Cotangents(do, torch.randn_like(lse)), "gradients": (dq, None, dv, None)}
    dmask_bias, dpair_bias = launch_backward(c, needs, outputs=outputs, **tensors, **options)
    assert [name for name, _ in launched] == ["KeyBias", "FusedGradients"]
    arguments = dict(launched)["FusedGradients"]
    assert arguments[2:7] == tuple(x.data_ptr() for x in (*c.qkv, o, do))
    assert arguments[8] == lse.data_ptr() and arguments[10] == dq.data_ptr() and arguments[12] == dv.data_ptr()
    assert arguments[11] not in (None, arguments[7], arguments[10], arguments[12]), "dk, which is not wanted, and the terms"
    assert dpair_bias is None and (dmask_bias is not None) == masked
    if dmask_bias is not None:
        assert dmask_bias.shape == c.mask_bias.shape  # type: ignore[union-attr]


@pytest.mark.parametrize("of_b", [1, 2])
@pytest.mark.parametrize("heads_at_once", [1, 2])
def test_heads_in_turns(heads_at_once: int, of_b: int, launched: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each turn's launches take the addresses of its own heads, and what is laid out, cleared and allocated is for all."""
    monkeypatch.setattr(head_groups, "divisor", lambda *_: heads_at_once)
    case = testing.Case(
        "turns", lead=(2,), n=32, h=4, lq=640, lk=640, d=64, dtype=torch.bfloat16, mask="random", pair_bias="b1hqk"
    )
    c = seams.canonical(case.make(seed=1))
    c = c._replace(pair_bias=c.pair_bias[:of_b])  # type: ignore[index]
    skip_refused(c, (True, True, True, False, True, False))
    pair, (q, k, v) = c.pair_bias, (x.contiguous() for x in c.qkv)
    assert pair is not None
    starts = (
        [(0, h) for h in range(0, 4, heads_at_once)]
        if of_b == 1
        else [(b, h) for b in range(2) for h in range(0, 4, heads_at_once)]
    )

    def addresses(x: Tensor, heads: int) -> list[int]:
        return [(x[b:] if x.shape[0] > 1 else x).narrow(heads, h, heads_at_once).data_ptr() for b, h in starts]

    o, lse = torch.empty_like(q), torch.empty(q.shape[:-1])
    inputs, outputs = Inputs(q, k, v, c.mask, None, pair), Outputs(o, lse, lse)
    launch_forward(inputs, outputs, "bnhld")
    assert [name for name, _ in launched] == ["PairBias", "KeyBias", *["Forward"] * len(starts)]
    forwards = [args for name, args in launched if name == "Forward"]
    for place, x in ((2, q), (3, k), (4, v), (10, o), (11, lse)):
        assert [args[place] for args in forwards] == addresses(x, 2)
    assert [args[8] for args in forwards] == addresses(pair, 1), "the pair bias as it is given"
    assert len({args[9] for args in forwards}) == len(starts), "and laid out anew"
    assert len({args[5] for args in forwards}) == (1 if of_b == 1 else 2), "the rows' terms, of each b"
    assert len({args[6] for args in forwards}) == (1 if of_b == 1 else 2), "their ends"
    assert len({args[7] for args in forwards}) == (1 if of_b == 1 else 2), "their biases as they are"

    launched.clear()
    needs, do = (True, True, True, False, True, False), torch.randn_like(o)
    of_qkv = [torch.empty_like(x) for x in (q, k, v)]
    options: dict[str, Any] = {"cotangents": Cotangents(do), "outputs": outputs, "layout": "bnhld"}
    _, dpair = launch_backward(inputs, needs, gradients=(*of_qkv, None), **options)
    assert [name for name, _ in launched] == [
        "PairBias",
        "PairBiasTiles",
        "KeyBias",
        *["QueryGradients", "KeyGradients"] * len(starts),
    ]
    of_queries, of_keys = ([args for name, args in launched if name == f"{x}Gradients"] for x in ("Query", "Key"))
    for place, x in ((2, q), (3, k), (4, v), (5, o), (6, do), (9, lse), (12, of_qkv[0])):
        assert [args[place] for args in of_queries] == addresses(x, 2), place
    for place, x in ((2, q), (3, k), (4, v), (5, do), (9, of_qkv[1]), (10, of_qkv[2])):
        assert [args[place] for args in of_keys] == addresses(x, 2), place
    assert dpair is not None and [args[12] for args in of_keys] == addresses(dpair, 1), "rounded in its turn"
    assert [args[13] for args in of_queries] == [args[11] for args in of_keys], "sums of the same heads"
    assert len({args[6] for args in of_keys}) == len(starts), "tiles of its own"
    assert {args[8] for args in of_keys} == {args[11] for args in of_queries} and len({args[8] for args in of_keys}) == 1
    assert [args[13] for args in of_keys] == addresses(of_qkv[0], 2), "dq, of which the kernel of the keys clears rows"
    assert [args[14:16] for args in of_keys] == [args[14:16] for args in of_queries], "the rows that a mask leaves"
    assert len({args[14:16] for args in of_keys}) == (1 if of_b == 1 else 2), "of each b"
    assert next(args for name, args in launched if name == "KeyBias")[6:8] == of_keys[0][14:16]

    launched.clear()
    needs = (True, False, False, False, True, False)  # nothing streams then
    launch_backward(inputs, needs, **options)
    assert [name for name, _ in launched] == ["PairBias", "KeyBias", "QueryGradients"]


@pytest.mark.parametrize(
    ("changes", "needs", "skips"),
    [
        ({}, (True, True, True, False, True, False), True),
        ({"mask": None}, (True, True, True, False, True, False), False),
        ({"mask": None, "mask_bias": "finite"}, (True, True, True, True, True, False), False),
        ({"n": 4}, (True, True, True, False, True, False), False),  # few scores
        ({}, (True, False, False, False, True, False), False),  # no kernel of the keys
        ({}, (False, True, False, False, False, False), True),
    ],
    ids=str,
)
def test_who_leaves_rows_out(
    changes: dict[str, Any], needs: tuple[bool, ...], skips: bool, launched: list[Any], kernels: list[Any]
) -> None:
    """All kernels or none, where a mask may switch rows off and there is much to do; that of the keys clears dq then."""
    settings = {"n": 140, "h": 4, "lq": 260, "lk": 260, "d": 16, "mask": "padding", "pair_bias": "b1hqk", **changes}
    c = seams.canonical(testing.Case("left_out", dtype=torch.bfloat16, **settings).make(seed=1))  # type: ignore[arg-type]
    of_qkv = [torch.empty_like(x) if need else None for x, need in zip(c.qkv, needs, strict=False)]
    launch_backward(c, needs, gradients=(*of_qkv, None))
    assert kernels
    for kernel in kernels:
        if isinstance(kernel, (backward_launches.QueryGradients, backward_launches.KeyGradients)):
            assert kernel.skips == skips
        if isinstance(kernel, backward_launches.KeyGradients):
            assert kernel.clears == (skips and needs[0])
        if isinstance(kernel, key_bias.KeyBias):
            assert kernel.lists == skips
    launches = dict(launched)
    lists = launches["KeyBias"][-4:-2] if skips else ()  # before the number of keys, and of rows
    for name in ("QueryGradients", "KeyGradients"):
        assert name not in launches or set(lists) <= set(launches[name])
    if "KeyGradients" in launches and of_qkv[0] is not None:
        assert (of_qkv[0].data_ptr() in launches["KeyGradients"]) == skips


@pytest.mark.parametrize(
    ("sizes", "channels", "pair", "skips"),
    [
        ((1, 140, 4, 260, 260), 32, True, True),
        ((1, 140, 4, 64, 8192), 32, False, True),
        ((1, 140, 4, 64, 8193), 32, False, False),  # as many panels are not listed
        ((32, 140, 4, 64, 64), 32, True, True),
        ((33, 140, 4, 64, 64), 32, True, False),
        ((1, 65536, 4, 16, 16), 32, True, True),
        ((1, 65537, 4, 16, 16), 32, True, False),
        ((1, 140, 4, 260, 260), 48, True, True),
        ((1, 140, 4, 260, 260), 48, False, False),  # it would cost a stage
        ((1, 140, 4, 200, 200), 32, True, False),
    ],
    ids=str,
)
def test_where_rows_are_left_out(sizes: tuple[int, int, int, int, int], channels: int, pair: bool, skips: bool) -> None:
    needs, of_queries = Needs(True, True, True, False, pair), Needs(q=True, pair_bias=pair)
    problem = Problem("cuda", (9, 0), torch.bfloat16, *sizes, channels, channels, mask=True, needs=needs)
    problem = dataclasses.replace(problem, pair_bias=torch.bfloat16 if pair else None)
    assert tiles.skips_rows(problem) == skips
    assert not tiles.skips_rows(dataclasses.replace(problem, mask=False))
    assert not tiles.skips_rows(dataclasses.replace(problem, needs=of_queries))
