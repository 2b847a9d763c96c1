"""Small calls of the reference backend that the tests of eager calls share."""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import evoattn
from evoattn import testing
from tests.helpers import seams

FORWARD, BACKWARD = torch.ops.evoattn.forward.default, torch.ops.evoattn.backward.default


def attend(*tensors: Tensor | None, **options: Any) -> Tensor:
    q, k, v, mask_bias, pair_bias = tensors
    return evoattn.evoformer_attention(q, k, v, mask_bias=mask_bias, pair_bias=pair_bias, backend="reference", **options)  # type: ignore


def way(*tensors: Tensor | None) -> str | None:
    """The way of a call of `attend`, if one like it is known."""
    q, k, v, mask_bias, pair_bias = tensors
    assert q is not None and k is not None and v is not None
    return seams.way(q, k, v, mask_bias=mask_bias, pair_bias=pair_bias, backend="reference")


def leaves(dtype: torch.dtype = torch.float32, **changes: Any) -> list[Tensor]:
    settings = {"n": 2, "lq": 5, "lk": 6, "d": 4, "mask_bias": "finite", "pair_bias": "b1hqk", "dtype": dtype, **changes}
    inputs = testing.Case("eager", **settings).make(seed=3)
    return [x.requires_grad_() for x in (inputs.q, inputs.k, inputs.v, inputs.mask_bias, inputs.pair_bias) if x is not None]


def step(arguments: list[Tensor], **options: Any) -> list[Tensor]:
    output = attend(*arguments, **options)
    cotangent = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output.dtype)
    return [output.detach(), *torch.autograd.grad(output, arguments, cotangent)]


class Functions(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


def in_a_function_mode(tensors: list[Tensor]) -> None:
    with Functions():
        attend(*tensors)


def make(**changes: object) -> testing.CaseInputs:
    return testing.Case("api", **{"mask_bias": "finite", "pair_bias": "b1hqk", **changes}).make(seed=7)  # type: ignore[arg-type]
