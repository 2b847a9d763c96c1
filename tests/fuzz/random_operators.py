"""The operators of `evoattn.pair` as modules whose parameters are the call's weights, and the same in dense torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evoattn import pair
from tests.helpers.dense_layers import MaskedSoftmax, rectified


class Call(nn.Module):
    """Calls of an operator.

    Args:
        operator: takes a tensor, a mask, weights by name and options.
        shapes: of the weights. Those that are not named are None in the call.
        options: of the call.
    """

    def __init__(self, operator: Callable[..., Tensor], shapes: dict[str, tuple[int, ...]], **options: Any) -> None:
        super().__init__()
        self.operator, self.options = operator, options
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape, dtype=torch.float32)))

    def forward(self, *, mask: Tensor | None, out: Tensor | None = None, **tensors: Tensor) -> Tensor:
        (x,) = tensors.values()
        return self.operator(x, mask, **dict(self.named_parameters()), **self.options, out=out)

    def product(self, x: Tensor, name: str) -> Tensor:
        """A product with the weight of a name, and its bias."""
        parameters = dict(self.named_parameters())
        return F.linear(x, parameters[f"{name}_weight"], parameters.get(f"{name}_bias"))

    def norm(self, x: Tensor, name: str) -> Tensor:
        """A norm with the weight and bias of a name, in the dtype of x."""
        affine = (dict(self.named_parameters()).get(f"{name}_{part}") for part in ("weight", "bias"))
        weight, bias = (None if y is None else y.to(x.dtype) for y in affine)
        return F.layer_norm(x, x.shape[-1:], weight, bias, self.options["eps"])


def _shapes(
    products: dict[str, tuple[int, int]], norms: dict[str, int], *, bias: bool, norm: str
) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {f"{name}_weight": shape for name, shape in products.items()}
    shapes |= {f"{name}_bias": shape[:1] for name, shape in products.items() if bias}
    return shapes | {f"{name}_{part}": (size,) for name, size in norms.items() for part in norm.split()}


def triangle_multiplication(c: int, d: int, *, bias: bool, norm: str, **options: Any) -> Call:
    """Calls with c channels and d hidden ones, with or without biases; `norm` names the parameters of the norms."""
    products = {"p_in": (2 * d, c), "g_in": (2 * d, c), "p_out": (c, d), "g_out": (c, c)}
    return Call(pair.triangle_multiplication, _shapes(products, {"norm_in": c, "norm_out": d}, bias=bias, norm=norm), **options)


def transition(c: int, d: int, *, bias: bool, norm: str, **options: Any) -> Call:
    """Calls with c channels and 2 d hidden ones."""
    products = {"a": (2 * d, c), "out": (c, 2 * d)} | ({"b": (2 * d, c)} if options["activation"] == "swiglu" else {})
    return Call(pair.transition, _shapes(products, {"norm": c}, bias=bias, norm=norm), **options)


def dense_multiplication(call: Call, z: Tensor, *, mask: Tensor | None, weights: MaskedSoftmax) -> Tensor:
    y = call.norm(z, "norm_in")
    ab = call.product(y, "p_in") * call.product(y, "g_in").sigmoid()
    ab = ab if mask is None else ab * mask[..., None].to(ab.dtype)
    a, b = (ab.float() if ab.dtype == torch.float16 else ab).chunk(2, -1)  # sums leave the range of float16
    t = torch.einsum("...ikd,...jkd->...ijd" if call.options["direction"] == "outgoing" else "...kid,...kjd->...ijd", a, b)
    update = call.product(call.norm(t, "norm_out").to(y.dtype), "p_out") * call.product(y, "g_out").sigmoid()
    return z + update if call.options["residual"] else update


def dense_transition(call: Call, x: Tensor, *, mask: Tensor | None, weights: MaskedSoftmax) -> Tensor:
    y = call.norm(x, "norm")
    a = call.product(y, "a")
    is_gated = call.options["activation"] == "swiglu"
    update = call.product(a * a.sigmoid() * call.product(y, "b") if is_gated else rectified(a, weights), "out")
    update = update if mask is None else update * mask[..., None].to(update.dtype)
    return x + update if call.options["residual"] else update
