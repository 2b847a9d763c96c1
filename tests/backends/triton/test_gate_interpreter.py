"""A gate in the Triton kernels on the CPU, in Triton's interpreter, against float64.

These tests need a process of their own, as `tests.backends.triton.test_backward_interpreter` says.
"""

import dataclasses

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
    from evoattn.backends import GATED_BACKWARD, GATED_FORWARD, Cotangents
    from evoattn.backends import triton as backend
    from evoattn.backends.triton import few_plan
    from evoattn.core.config import Config
    from evoattn.core.layouts import empty_outputs
    from evoattn.kit import strides
    from tests.helpers.gates import ALL, ONLY_GATE, Gated

    pytestmark = [
        pytest.mark.usefixtures("poisoned"),
        pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning"),
    ]

    FEW = Gated("few", b=2, lq=3, lk=4, h=4, c=12, pair_bias=None, dlse=True)
    TILES = Gated("tiles", lq=20, lk=18, d=16)
    CASES = (
        Gated("heads_inside", n=2),
        Gated("heads_outside", b=2, n=2, c=12, layout="bnhld", mask_bias=True, gate="sliced", dlse=True, deterministic=True),
        Gated("one_row", n=1, lk=20, d=16, mask=False, gate="transposed"),
        dataclasses.replace(
            TILES, name="float16", dtype=torch.float16, pair_bias=None, mask_bias=True, gate="expanded", dlse=True
        ),
        dataclasses.replace(TILES, name="bfloat16", dtype=torch.bfloat16, pair_bias=None, gate="large"),
        dataclasses.replace(TILES, name="odd", gate="odd", needs=(*ALL[:5], False), deterministic=True),
        dataclasses.replace(TILES, name="only_keys_and_gate", dlse=True, needs=(False, True, False, False, False, True)),
        dataclasses.replace(TILES, name="only_gate", dlse=True, needs=ONLY_GATE),
        dataclasses.replace(TILES, name="only_dlse", do=False, dlse=True),
        dataclasses.replace(TILES, name="only_gate_only_dlse", do=False, dlse=True, needs=ONLY_GATE),
        dataclasses.replace(TILES, name="swallowed", swallowed=True, dlse=True),
        dataclasses.replace(FEW, layout="bnhld", gate="sliced"),
        dataclasses.replace(FEW, name="few_one_query", lq=1, d=16, c=8),
        dataclasses.replace(FEW, name="few_float16", dtype=torch.float16, gate="transposed", needs=ONLY_GATE),
        dataclasses.replace(FEW, name="few_without_dgate", gate="expanded", needs=(*ALL[:5], False)),
        dataclasses.replace(FEW, name="few_only_dlse", do=False, gate="odd"),
    )

    SLOW = ("float16", "odd", "only_gate", "only_dlse", "few_one_query", "few_float16", "few_only_dlse")

    @pytest.mark.parametrize(
        "case",
        [pytest.param(x, marks=pytest.mark.slow if x.name in SLOW else []) for x in CASES],
        ids=lambda case: case.name,
    )
    def test_gated_output_and_gradients_agree_with_float64(case: Gated) -> None:
        """O and all gradients."""
        needs = case.needs if case.lq > 3 else (*case.needs[:3], False, False, case.needs[5])
        assert dataclasses.replace(case, needs=needs).wrong(backend) == []

    @pytest.mark.parametrize("case", [TILES, FEW], ids=lambda case: case.name)
    def test_long_offsets(case: Gated, monkeypatch: pytest.MonkeyPatch) -> None:
        """As if tensors were larger than 32 bits can address."""
        monkeypatch.setattr(few_plan, "extent", lambda tensor: 1 << 31)
        monkeypatch.setattr(strides, "extent", lambda tensor: 1 << 31)
        assert case.wrong(backend) == []

    def test_explain_says_where_the_gate_is_multiplied() -> None:
        q, k, v, gate = (torch.randn(1, 3, 20, 2, 8, requires_grad=True) for _ in range(4))
        told = evoattn.explain(q, k, v, gate=gate, backend="triton")
        assert told.gate == (GATED_FORWARD, GATED_BACKWARD)
        assert f"gate     {GATED_FORWARD}\ngate     {GATED_BACKWARD}" in str(told)
        with torch.no_grad():
            assert evoattn.explain(q, k, v, gate=gate, backend="triton").gate == (GATED_FORWARD,)
        assert evoattn.explain(q, k, v, backend="triton").gate == ()

    def test_plans_say_where_the_gate_is_multiplied() -> None:
        for case in (TILES, FEW):
            inputs = case.inputs("cpu", seed=1)
            outputs = empty_outputs(inputs, case.layout)
            common = {"scale": 1.0, "layout": case.layout, "config": Config()}
            options = {"needs": (True, False, False, False, False, False), "deterministic": False}
            for gate, forward, backward in ((inputs.gate, GATED_FORWARD, GATED_BACKWARD), (None, None, None)):
                gated = inputs._replace(gate=gate)
                assert backend.plan_forward(gated, **common).describe().gate == forward
                plan = backend.plan_backward(Cotangents(outputs.o), gated, outputs, **common, **options)
                assert plan.describe().gate == backward
