"""A gate in the kernels of a GPU, against float64.

python -m pytest -m gpu tests/backends/test_gate_gpu.py
"""

import dataclasses
from typing import Any

import pytest
import torch

import evoattn
from evoattn.backends import hopper, triton
from tests.helpers.gates import ALL, ONLY_GATE, Gated

STATUS = {status.name: status for status in evoattn.backends()}
BACKENDS = [
    pytest.param(
        backend, marks=pytest.mark.skipif(not STATUS[name].available, reason=STATUS[name].reason or "available"), id=name
    )
    for name, backend in (("triton", triton), ("hopper", hopper))
]
ON_HOPPER = pytest.mark.skipif(not STATUS["hopper"].available, reason=STATUS["hopper"].reason or "available")

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned")]

BASE = Gated("base", n=5, h=2, lq=130, lk=100, d=32, c=32, dtype=torch.bfloat16, pair_bias=torch.bfloat16)


def like(name: str, base: Gated = BASE, **changes: Any) -> Gated:
    """Another call."""
    return dataclasses.replace(base, name=name, **changes)


CALLS = (
    BASE,
    *(like(f"{channels}_channels", d=channels, c=channels, dlse=True) for channels in (8, 16, 24, 48, 64)),
    like("float16", dtype=torch.float16, pair_bias=torch.float16, layout="bnhld"),
    like("float32_pair_bias", pair_bias=torch.float32, gate="sliced"),
    *(like(f"gate_{gate}", gate=gate) for gate in ("sliced", "odd", "transposed", "expanded", "large")),
    like("heads_outside", b=2, layout="bnhld", gate="sliced", mask_bias=True, dlse=True),
    like("no_mask", mask=False),
    like("no_bias", mask=False, pair_bias=None, n=66, lq=192, lk=192),
    like("mask_without_pair_bias", pair_bias=None, n=66, lq=192, lk=192, mask_bias=True, dlse=True),
    like("few_rows_without_pair_bias", pair_bias=None),
    like("kept", n=12, lq=384, lk=384),
    like("streamed", n=3, lq=640, lk=640, d=64, c=64),
    like("many_keys", n=3, lq=700, lk=1100),
    like("in_order", deterministic=True, gate="sliced"),
    like("large_scores", q_size=12.0, n=9, lq=200, lk=200),
    like("large_scores_float16", q_size=6.0, dtype=torch.float16, pair_bias=torch.float16, d=64, c=64),
    like("swallowed", swallowed=True, pair_bias=torch.float32, dlse=True),
    like("one_row_of_queries", lq=1, lk=300),
    like("only_q", needs=(True, *(False,) * 5)),
    like("only_keys", needs=(False, True, True, False, False, True), dlse=True),
    like("only_pair_bias", needs=(False, False, False, False, True, False)),
    like("only_gate", needs=ONLY_GATE, dlse=True),
    like("without_dgate", needs=(*ALL[:5], False), gate="expanded"),
    like("only_dlse", do=False, dlse=True),
    like("only_gate_only_dlse", do=False, dlse=True, needs=ONLY_GATE),
)
TRITONS = (
    like("float32", dtype=torch.float32, pair_bias=torch.float32, gate="odd"),
    like("unequal_channels", d=24, c=40, gate="sliced", dlse=True),
    like("200_channels", d=200, c=200),
    like("few", pair_bias=None, lq=3, lk=4, n=50, needs=(True, True, True, False, False, True), gate="sliced"),
    like("few_only_gate", pair_bias=None, lq=1, lk=8, n=50, needs=ONLY_GATE, gate="transposed"),
    like("one_row", n=1, lq=200, lk=190),
)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CALLS, ids=lambda case: case.name)
def test_gated_output_and_gradients_agree_with_float64(case: Gated, backend: Any) -> None:
    """O and all gradients that are wanted."""
    assert case.wrong(backend, "cuda") == []


@pytest.mark.parametrize("backend", BACKENDS[:1])
@pytest.mark.parametrize("case", TRITONS, ids=lambda case: case.name)
def test_gate_where_only_triton_goes(case: Gated, backend: Any) -> None:
    assert case.wrong(backend, "cuda") == []


@ON_HOPPER
@pytest.mark.parametrize("case", [BASE, like("only_keys", needs=(False, True, True, False, False, True))], ids=lambda x: x.name)
def test_gate_where_rows_are_left_out(case: Gated, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a mask switches off, as where a call has many scores."""
    from evoattn.backends.hopper import tiles

    monkeypatch.setattr(tiles, "LEAST_SCORES_TO_SKIP", 0)
    assert case.wrong(hopper, "cuda") == []


@ON_HOPPER
def test_gate_with_heads_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """One head at a time, as where one keeps all processors busy."""
    from evoattn.backends.hopper import head_groups

    monkeypatch.setattr(head_groups, "divisor", lambda *_: 1)
    case = like("turns", n=3, h=4, lq=640, lk=640, d=64, c=64, gate="sliced")
    assert case.wrong(hopper, "cuda") == []


@pytest.mark.parametrize("name", ["triton", "hopper"])
def test_a_gated_call_is_the_same_in_a_graph(name: str) -> None:
    """Captured with its backward, and bit-equal to the eager call where sums are in a fixed order."""
    if not STATUS[name].available:
        pytest.skip(STATUS[name].reason or "")
    x = BASE.inputs("cuda", seed=3)
    user = [None if y is None else y.transpose(2, 3).contiguous().requires_grad_() for y in (*x.qkv, x.gate)]
    q, k, v, gate = user
    do = torch.randn_like(q)  # type: ignore[arg-type]
    pair = x.pair_bias[:, None]  # type: ignore[index]

    def step() -> list[torch.Tensor]:
        options: dict[str, Any] = {"backend": name, "deterministic": True}
        o = evoattn.evoformer_attention(q, k, v, mask=x.mask, pair_bias=pair, gate=gate, **options)  # type: ignore[arg-type]
        return [o, *torch.autograd.grad(o, (q, k, v, gate), do)]  # type: ignore[arg-type]

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        expected = step()
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    for a, b in zip(captured, expected, strict=True):
        assert torch.equal(a, b)
