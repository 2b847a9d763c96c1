"""Bad input raises before any work, and the message names the argument, what came and what was expected."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import evoattn

Q = torch.zeros(2, 3, 5, 4, 8)  # [B, N, L, H, D]
K = torch.zeros(2, 3, 6, 4, 8)

BAD = [
    ({"q": [1.0]}, TypeError, r"q must be a torch.Tensor, got list"),
    (
        {"q": torch.zeros(1, 2, 5, 2, 8).to_sparse()},
        TypeError,
        r"q must be a dense tensor with strides, got one of layout sparse_coo",
    ),
    ({"mask": [True]}, TypeError, r"mask must be a torch.Tensor, got list"),
    ({"q": Q.int()}, TypeError, r"q must be float16, bfloat16, float32 or float64, got int32"),
    ({"v": K.bool()}, TypeError, r"v must be float16, bfloat16, float32 or float64, got bool"),
    ({"q": Q.to(torch.complex64)}, TypeError, r"q must be .* got complex64"),
    ({"k": K.half()}, TypeError, r"k must have the dtype of q, float32, got float16"),
    ({"q": Q[0, 0]}, ValueError, r"q must have at least 4 axes, \[\*, N, Lq, H, D\] in layout 'bnlhd', got shape \[5, 4, 8\]"),
    (
        {"k": K[:1]},
        ValueError,
        r"k must be \[\*, N, Lk, H, D\] with the leading axes of q, \[2, 3, 5, 4, 8\], got shape \[1, 3, 6, 4, 8\]",
    ),
    ({"k": K[0]}, ValueError, r"k must be .* leading axes"),
    ({"k": K[..., :3, :]}, ValueError, r"k must be .* with the 4 heads of q, or 1, got shape \[2, 3, 6, 3, 8\]"),
    ({"k": K[..., :5]}, ValueError, r"k must have the 8 channels of q, .* got shape \[2, 3, 6, 4, 5\]"),
    ({"v": K[:, :, :5]}, ValueError, r"v must have the 6 keys of k, .* got shape \[2, 3, 5, 4, 8\]"),
    ({"v": K[..., :0]}, ValueError, r"v must have at least one channel"),
    ({"q": Q[..., :0], "k": K[..., :0]}, ValueError, r"q must have at least one channel"),
    ({"gate": [1.0]}, TypeError, r"gate must be a torch.Tensor, got list"),
    ({"gate": Q.half()}, TypeError, r"gate must have the dtype of q, float32, got float16"),
    ({"gate": Q.bool()}, TypeError, r"gate must have the dtype of q, float32, got bool"),
    (
        {"gate": Q[..., :7]},
        ValueError,
        r"gate must be \[\*, N, Lq, H, C\] = \[2, 3, 5, 4, 8\] in layout 'bnlhd', got shape \[2, 3, 5, 4, 7\]",
    ),
    ({"gate": Q[:1]}, ValueError, r"gate must be .* got shape \[1, 3, 5, 4, 8\]"),
    ({"gate": Q.transpose(2, 3)}, ValueError, r"gate must be .* got shape \[2, 3, 4, 5, 8\]"),
    ({"gate": Q.to("meta")}, ValueError, r"gate must be on the device of q, cpu, got meta"),
    ({"layout": "blhd"}, ValueError, r"layout must be one of 'bnlhd', 'bnhld', got 'blhd'"),
    ({"layout": ["bnlhd"]}, ValueError, r"layout must be one of"),
    ({"layout": "bnhld"}, ValueError, r"k must be \[\*, N, H, Lk, D\] with the 5 heads of q, or 1"),
    ({"backend": "cudnn"}, ValueError, r"backend must be 'auto' or one of .*'tiled', 'reference', got 'cudnn'"),
    ({"config": {"block_q": 3}}, TypeError, r"config must be an evoattn.Config or None, got dict"),
    ({"deterministic": 1}, TypeError, r"deterministic must be True, False or None, got 1"),
    ({"return_lse": "yes"}, TypeError, r"return_lse must be True or False, got 'yes'"),
    ({"scale": "small"}, TypeError, r"scale must be a number or None, got str"),
    ({"scale": torch.tensor(0.1)}, TypeError, r"scale must be a number or None, got Tensor"),
    ({"scale": float("nan")}, ValueError, r"scale must be finite, got nan"),
    (
        {"mask": torch.ones(2, 3, 6)},
        TypeError,
        r"mask must be bool \(True = attend\), got float32; an additive mask goes to mask_bias",
    ),
    ({"mask": torch.ones(2, 3, 6, dtype=torch.uint8)}, TypeError, r"mask must be bool .* got uint8"),
    (
        {"mask": torch.ones(2, 3, 5, dtype=torch.bool)},
        ValueError,
        r"mask must broadcast to \[\*, N, Lk\] = \[2, 3, 6\], got shape \[2, 3, 5\]",
    ),
    (
        {"mask_bias": torch.ones(2, 3, 6, dtype=torch.bool)},
        TypeError,
        r"mask_bias must be float16, bfloat16, float32 or float64, got bool; a bool mask goes to mask",
    ),
    (
        {"mask_bias": torch.ones(2, 3, 1, 5, 6)},
        ValueError,
        r"mask_bias must be .* got shape \[2, 3, 1, 5, 6\]; .* goes to pair_bias",
    ),
    ({"mask_bias": torch.ones(())}, ValueError, r"mask_bias must be \[\*, N, Lk\] or \[\*, N, 1, 1, Lk\], got a scalar"),
    ({"mask_bias": torch.ones(1, 2, 3, 1, 1, 6)}, ValueError, r"mask_bias must be .* got shape \[1, 2, 3, 1, 1, 6\]"),
    (
        {"pair_bias": torch.ones(2, 3, 6, dtype=torch.int64)},
        TypeError,
        r"pair_bias must be float16, bfloat16, float32 or float64, got int64",
    ),
    (
        {"pair_bias": torch.ones(2, 3, 6).to(torch.float8_e4m3fn)},
        TypeError,
        r"pair_bias must be float16, bfloat16, float32 or float64, got float8_e4m3fn",
    ),
    ({"pair_bias": torch.nested.nested_tensor([torch.ones(2, 3)])}, TypeError, r"pair_bias must be a dense tensor .* nested"),
    ({"scale": 10**400}, ValueError, r"scale must be finite"),
    (
        {"pair_bias": torch.ones(2, 1, 4, 6, 5)},
        ValueError,
        r"pair_bias must broadcast to \[\*, N, H, Lq, Lk\] = \[2, 3, 4, 5, 6\], got shape \[2, 1, 4, 6, 5\]",
    ),
    ({"pair_bias": torch.ones(1, 2, 3, 4, 5, 6)}, ValueError, r"pair_bias must broadcast"),
    ({"k": K.to("meta")}, ValueError, r"k must be on the device of q, cpu, got meta"),
    (
        {"mask": torch.ones(2, 3, 6, dtype=torch.bool, device="meta")},
        ValueError,
        r"mask must be on the device of q, cpu, got meta",
    ),
    ({"pair_bias": torch.ones(4, 5, 6, device="meta")}, ValueError, r"pair_bias must be on the device of q, cpu, got meta"),
]


class NoWork(TorchDispatchMode):
    """Nothing is computed, and no view is made."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        pytest.fail(f"{function} was called")


@pytest.mark.parametrize("call", [evoattn.evoformer_attention, evoattn.explain])
@pytest.mark.parametrize(("changes", "error", "message"), BAD, ids=[message[:60] for _, _, message in BAD])
def test_bad_input_raises_before_any_work(changes: dict, error: type[Exception], message: str, call) -> None:
    arguments = {"q": Q, "k": K, "v": K, **changes}
    with NoWork(), pytest.raises(error, match=message):
        call(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)


def test_a_mask_that_requires_grad_cannot_be() -> None:
    """torch lets no bool tensor require a gradient; the float tensor that does is sent to mask_bias."""
    with pytest.raises(RuntimeError):
        torch.ones(2, 3, 6, dtype=torch.bool).requires_grad_()
    with pytest.raises(TypeError, match="an additive mask goes to mask_bias"):
        evoattn.evoformer_attention(Q, K, K, mask=torch.ones(2, 3, 6, requires_grad=True))


@pytest.mark.parametrize(
    ("backend", "config", "message"),
    [
        ("tiled", evoattn.Config(num_warps=4), r"backend='tiled' cannot run this problem .*\n  tiled: num_warps=4 in config"),
        ("tiled", evoattn.Config(num_stages=2, num_warps=2), r"num_warps=2(.|\n)*num_stages=2"),
        ("reference", evoattn.Config(block_q=16), r"reference: block_q=16 in config: the dense reference has no tiles"),
    ],
)
def test_a_config_that_a_backend_cannot_run(backend: str, config: evoattn.Config, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        evoattn.evoformer_attention(Q, K, K, backend=backend, config=config)
    assert evoattn.explain(Q, K, K, backend=backend, config=config).backend is None


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"block_q": 0}, ValueError, "Config.block_q must be positive, got 0"),
        ({"block_k": -16}, ValueError, "Config.block_k must be positive, got -16"),
        ({"block_k": 16.0}, TypeError, "Config.block_k must be a whole number or None, got 16.0"),
        ({"block_k": True}, TypeError, "Config.block_k must be a whole number or None, got True"),
        ({"num_warps": 3}, ValueError, "Config.num_warps must be 1, 2, 4, 8 or 16, got 3"),
        ({"num_stages": 9}, ValueError, "Config.num_stages must be at most 8, got 9"),
        ({"score_bytes": 10}, ValueError, "Config.score_bytes must be at least 1024, got 10"),
    ],
)
def test_a_config_validates_itself(fields: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        evoattn.Config(**fields)


def test_nothing_is_mutated_when_it_fails_or_when_it_works() -> None:
    tensors: dict[str, Tensor] = {
        "mask": torch.rand(2, 3, 6) > 0.2,
        "mask_bias": torch.randn(2, 3, 1, 1, 6),
        "pair_bias": torch.randn(2, 1, 4, 5, 6),
    }
    q, k = torch.randn_like(Q).requires_grad_(), torch.randn_like(K)
    before = [x.clone() for x in (q, k, *tensors.values())]
    versions = [x._version for x in (q, k, *tensors.values())]
    evoattn.evoformer_attention(q, k, k, **tensors).sum().backward()  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="config"):
        evoattn.evoformer_attention(q, k, k, **tensors, backend="tiled", config=evoattn.Config(num_warps=1))  # type: ignore[arg-type]
    for x, copy, version in zip((q, k, *tensors.values()), before, versions, strict=True):
        assert torch.equal(x, copy) and x._version == version
