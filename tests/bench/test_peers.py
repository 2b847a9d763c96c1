"""The adapters of libraries that need a GPU: with fakes that hold to each library's contract and compute in plain torch."""

import dataclasses
import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor

from evoattn.bench import attentions, contender
from evoattn.bench.contender import RefusesError, Runner
from evoattn.bench.peers import PEERS
from evoattn.bench.run import why_untimed
from evoattn.testing import CaseInputs
from evoattn.workloads import Workload, workload

from .conftest import CPU

TRIANGLE = workload("tri20")
COLUMN = dataclasses.replace(workload("msa_column3"), n=3, lq=20, lk=20)
UNMASKED = dataclasses.replace(TRIANGLE, key_mask=False)
SHARED_KEYS = dataclasses.replace(TRIANGLE, kv_heads=1)
ONE_QUERY = workload("msa_global4").shrunk()
POINT = workload("template_point16")
WIDE = dataclasses.replace(TRIANGLE, d=72)


def attend(q: Tensor, k: Tensor, v: Tensor, *biases: Tensor | None) -> Tensor:
    """Dense attention of `[b,n,h,l,d]`."""
    s = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    for bias in biases:
        s = s if bias is None else s + bias
    return torch.softmax(s, -1) @ v


class Fakes:
    """Each library's function, which fails where the call breaks its contract; `calls` counts."""

    def __init__(self) -> None:
        self.calls = 0

    def deepspeed(self, q: Tensor, k: Tensor, v: Tensor, biases: list[Tensor | None]) -> Tensor:
        self.calls += 1
        b, n, length, h, _ = q.shape
        assert k.shape == v.shape == q.shape and k.is_contiguous() and v.is_contiguous()
        key_bias, pair_bias = biases
        assert key_bias is None or key_bias.shape == (b, n, 1, 1, length)
        assert pair_bias is None or pair_bias.shape == (b, 1, h, length, length)
        assert all(bias is None or bias.dtype == q.dtype for bias in biases)
        return attend(*(x.transpose(2, 3) for x in (q, k, v)), key_bias, pair_bias).transpose(2, 3).contiguous()

    def openfold3(self, q: Tensor, k: Tensor, v: Tensor, key_bias: Tensor, pair_bias: Tensor, has_pair_bias: bool) -> Tensor:
        self.calls += 1
        b, n, length, h, _ = q.shape
        assert k.shape == v.shape == q.shape
        assert key_bias.shape == (b, n, 1, 1, length) and key_bias.isfinite().all()
        assert pair_bias.shape == (b, 1, h, length, length) and pair_bias.any() == has_pair_bias
        used = pair_bias if has_pair_bias else None
        return attend(*(x.transpose(2, 3) for x in (q, k, v)), key_bias, used).transpose(2, 3).contiguous()

    def supported(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, pair_bias: Tensor | None) -> tuple[bool, str]:
        if pair_bias is None:
            return False, "pair_bias is required"
        return (k.shape == q.shape, "k shape must match q")

    def turbopairformer(self, q: Tensor, k: Tensor, v: Tensor, res_mask: Tensor | None, pair_bias: Tensor) -> Tensor:
        self.calls += 1
        b, n, h, length, _ = q.shape
        assert all(x.is_contiguous() and x.shape == q.shape for x in (q, k, v))
        assert res_mask is None or (res_mask.shape == (b, n, 1, 1, length) and res_mask.dtype == torch.float32)
        assert pair_bias.shape == (b, 1, h, length, length)
        out = attend(q, k, v, res_mask, pair_bias).transpose(2, 3).contiguous()
        if out.requires_grad:
            out.register_hook(self.check_cotangent)
        return out

    def check_cotangent(self, do: Tensor) -> None:
        assert do.is_contiguous(), "the library would copy it at each call"


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Fakes:
    fakes = Fakes()
    modules = {
        "deepspeed.ops.deepspeed4science": {"DS4Sci_EvoformerAttention": fakes.deepspeed},
        "openfold3.core.kernels.triton.evoformer": {"TritonEvoformer": fakes.openfold3},
        "turbopairformer": {
            "is_triangle_attention_supported": fakes.supported,
            "turbo_attention": fakes.turbopairformer,
        },
    }
    for path, names in modules.items():
        parts = path.split(".")
        for end in range(1, len(parts)):
            package = types.ModuleType(".".join(parts[:end]))
            package.__path__ = []
            monkeypatch.setitem(sys.modules, package.__name__, package)
        module: Any = types.ModuleType(path)
        module.__dict__.update(names)
        monkeypatch.setitem(sys.modules, path, module)
    return fakes


def inputs_of(case: Workload, dtype: torch.dtype) -> CaseInputs:
    return attentions.inputs_of(case, dtype, CPU)


@pytest.mark.parametrize("case", [TRIANGLE, COLUMN, UNMASKED, SHARED_KEYS], ids=["triangle", "column", "unmasked", "shared"])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("deepspeed", torch.bfloat16), ("deepspeed", torch.float16), ("openfold3", torch.float32), ("openfold3", torch.float16)],
)
def test_every_argument_reaches_its_place(name: str, dtype: torch.dtype, case: Workload, fakes: Fakes) -> None:
    check(name, dtype, case)
    assert fakes.calls == 2


@pytest.mark.parametrize("case", [TRIANGLE, UNMASKED], ids=["triangle", "unmasked"])
def test_turbopairformer_gets_its_layouts(case: Workload, fakes: Fakes) -> None:
    check("turbopairformer", torch.float32, case)
    assert fakes.calls == 2


def check(name: str, dtype: torch.dtype, case: Workload) -> None:
    """Output and gradients of an adapter against float64."""
    inputs = inputs_of(case, dtype)
    runner, expected = Runner(PEERS[name], inputs), attentions.truth(inputs)
    errors = runner.errors(expected)
    assert set(errors) == set(expected)
    contender.check(errors, dtype)


@pytest.mark.parametrize(
    ("name", "case", "dtype", "reason"),
    [
        ("deepspeed", TRIANGLE, torch.float32, "takes float16 and bfloat16 alone"),
        ("deepspeed", ONE_QUERY, torch.bfloat16, "takes as many keys as queries; takes more than 16 queries"),
        ("deepspeed", workload("tri16"), torch.bfloat16, "takes more than 16 queries"),
        ("deepspeed", WIDE, torch.bfloat16, "takes at most 64 channels a head"),
        ("openfold3", POINT, torch.bfloat16, "takes as many keys as queries"),
        ("turbopairformer", COLUMN, torch.bfloat16, "pair_bias is required"),
        ("turbopairformer", SHARED_KEYS, torch.bfloat16, "k shape must match q"),
    ],
)
def test_a_refusal_says_why(name: str, case: Workload, dtype: torch.dtype, reason: str, fakes: Fakes) -> None:
    with pytest.raises(RefusesError) as refused:
        PEERS[name].prepare(inputs_of(case, dtype))
    assert str(refused.value) == reason
    assert fakes.calls == 0


def test_openfold3_without_triton_is_absent(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["openfold3.core.kernels.triton.evoformer"], "TritonEvoformer", None)
    with pytest.raises(ImportError) as absent:
        PEERS["openfold3"].prepare(inputs_of(TRIANGLE, torch.bfloat16))
    assert why_untimed(absent.value) == ("absent", "triton is not installed")


def test_deepspeed_compiles_before_turbopairformer_sets_an_architecture_that_it_cannot_parse() -> None:
    names = list(PEERS)
    assert names.index("deepspeed") < names.index("turbopairformer")
