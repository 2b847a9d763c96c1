"""The calls of the Hopper tests on a GPU of compute capability 9.0."""

import pytest
import torch
from torch import Tensor

import evoattn
from evoattn import testing

_STATUS = next(status for status in evoattn.backends() if status.name == "hopper")

ON_HOPPER = [pytest.mark.gpu, pytest.mark.skipif(not _STATUS.available, reason=_STATUS.reason or "available")]

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}

FLOAT32 = {"pair_bias_dtype": torch.float32}
"""A pair bias that streams in float32 through the forward, beside 16-bit q, k and v."""

WAYS = {
    "short": (None, {"lq": 100, "lk": 100}),
    "kept": (None, {"lq": 384, "lk": 384}),
    "streamed": ("heads_in_turns", {"lq": 640, "lk": 640}),
    "no_pair_bias": ("one_kernel", {"lq": 384, "lk": 384, "pair_bias": None}),
}
"""Where a call's pair bias is: a fixture for it, and what the call looks like."""


def example(**changes: object) -> testing.CaseInputs:
    """Random inputs: 8 rows, 4 heads, 192 queries and keys of 32 channels, a mask and a pair bias, but for the changes."""
    settings: dict = {"n": 8, "h": 4, "lq": 192, "lk": 192, "d": 32, "dtype": torch.bfloat16, "mask": "random"}
    return testing.Case("gpu", **{**settings, "pair_bias": "b1hqk", **changes}).make(seed=6, device="cuda")


def forward(inputs: testing.CaseInputs, **changes: object) -> testing.Results:
    """o and lse by the Hopper backend; skips what it refuses."""
    case = inputs.case
    call = {
        "mask": inputs.mask,
        "mask_bias": inputs.mask_bias,
        "pair_bias": inputs.pair_bias,
        "gate": inputs.gate,
        "scale": case.scale,
    }
    call = {**call, "layout": case.layout, "backend": "hopper", **changes}
    if refused := evoattn.explain(inputs.q, inputs.k, inputs.v, **call).refused:  # type: ignore[arg-type]
        pytest.skip("; ".join(refused["hopper"]))
    with torch.no_grad():
        o, lse = evoattn.evoformer_attention(inputs.q, inputs.k, inputs.v, return_lse=True, **call)  # type: ignore[call-overload]
    return testing.Results({"o": o, "lse": lse})


def mask_of(kind: str, like: Tensor) -> Tensor:
    """A mask [b,n,k] that leaves few keys, rows or batches."""
    mask, (batches, n, keys) = torch.ones_like(like), like.shape
    if kind in ("ends", "apart"):
        ends = torch.randint(0, keys + 1, (batches, n, 1), generator=torch.Generator().manual_seed(7))
        mask &= torch.arange(keys, device=mask.device) < ends.to(mask.device)
        if kind == "apart":  # in memory
            mask = torch.stack((mask, ~mask), -1)[..., 0]
    elif kind == "padding":
        mask[:, n // 2 :] = False
        mask[..., keys // 2 :] = False
    elif kind == "shared":
        mask = (torch.arange(keys, device=mask.device) < keys // 3).expand(batches, 1, keys)
    elif kind == "batch":
        mask[0] = False
    elif kind == "one_key":
        mask[:] = False
        mask[-1, n // 2, keys // 2] = True
    else:
        assert kind == "nothing"
        mask[:] = False
    return mask
