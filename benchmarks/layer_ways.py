"""Whole layers: their inputs, the float64 truth, and the ways to compute them.

Every way takes the same parameters, those of a layer of `evoattn.nn`. It computes in 16 bits under autocast while its
tensors are float32, as models train.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from layer_peers import Compute, cuequivariance, openfold3
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import evoattn
from evoattn.bench.attentions import SCORES, random_keys
from evoattn.bench.contender import Contender, Prepared
from evoattn.bench.peers import dense
from evoattn.nn import AttentionPairBias, MSARowAttentionWithPairBias, TriangleAttention
from evoattn.nn.msa import MSAAttention
from evoattn.nn.pair_bias import AdaLN
from evoattn.workloads import Workload

_DENSE_COPIES = 12
"""Bytes per score of a dense layer over those of its dtype: float32 softmax under autocast, scores, and their gradients."""

_PAIR_CHANNELS = 128
_CONDITION_CHANNELS = 384
_ALIGNED = 8
"""Elements of 16 bits in 16 bytes."""

Module = TriangleAttention | MSAAttention | AttentionPairBias
"""The layers of `evoattn.nn` that are measured."""

Attend = Callable[[Tensor, Tensor, Tensor, Tensor, "Tensor | None"], Tensor]
"""(q, k, v `[1,n,l,h,d]`, mask `[1,n|1,k]`, pair_bias `[1,1,h,q,k]`) -> o `[1,n,q,h,d]`."""


@dataclasses.dataclass
class Layer:
    """A layer and the arguments of its call.

    Args:
        kind: `Workload.layer`.
        module: the layer of `evoattn.nn`, float32.
        inputs: float32 tensors by name, which carry gradients.
        mask: bool; no row is masked at every key.
        do: the cotangent, float32, of the output's shape.
        dtype: what autocast computes in; float32 is without autocast.
    """

    kind: str
    module: Module
    inputs: dict[str, Tensor]
    mask: Tensor
    do: Tensor
    dtype: torch.dtype = torch.float32

    @property
    def leaves(self) -> list[Tensor]:
        """Inputs and parameters: everything that gets a gradient."""
        return [*self.inputs.values(), *self.module.parameters()]


def _layer_of(w: Workload, c: int) -> tuple[Module, dict[str, tuple[int, ...]]]:
    """A new layer, and the shapes of its inputs."""
    rows, pairs = (1, w.n, w.lq), {"z": (1, w.lq, w.lq, _PAIR_CHANNELS)}
    if w.layer == "triangle":
        return TriangleAttention(c, w.d, w.h, empty_rows="native"), {"z": (*rows, c)}
    if w.layer == "msa_row":
        return MSARowAttentionWithPairBias(c, _PAIR_CHANNELS, w.d, w.h, empty_rows="native"), {"m": (*rows, c), **pairs}
    if w.layer == "msa_column":  # what MSAColumnAttention calls
        return MSAAttention(c, w.d, w.h, empty_rows="native"), {"m": (1, w.lq, w.n, c)}
    if w.layer not in ("single", "pair_bias"):
        raise ValueError(f"no layer {w.layer!r}; expected triangle, msa_row, msa_column, single or pair_bias")
    condition = {"s": (*rows, _CONDITION_CHANNELS)} if w.layer == "pair_bias" else {}
    layer = AttentionPairBias(c, _PAIR_CHANNELS, w.d, w.h, *(shape[-1] for shape in condition.values()), empty_rows="native")
    return layer, {"a": (*rows, c), "z": (1, *pairs["z"]), **condition}


def fill(module: nn.Module, rng: torch.Generator) -> None:
    """Give a layer random parameters: a new one has an output of 0 and an open gate, which would hide errors."""
    with torch.no_grad():
        for name, x in module.named_parameters():
            noise = torch.randn(x.shape, generator=rng, dtype=torch.float32, device=x.device)
            gain = x.ndim == 1 and "norm" in name and name.endswith("weight")
            x.copy_((x.shape[-1] ** -0.5 if x.ndim == 2 else 0.1) * noise + gain)


def inputs_of(workload: Workload, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Layer:
    """A layer with random parameters and inputs.

    Raises:
        ValueError: the workload has no layer.
    """
    rng = torch.Generator(device=device).manual_seed(seed)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=rng, dtype=torch.float32, device=device)

    channels = workload.channels or workload.h * workload.d
    module, shapes = _layer_of(workload, channels)
    module.to(device, torch.float32)
    fill(module, rng)
    inputs = {name: normal(*shape).requires_grad_() for name, shape in shapes.items()}
    first = next(iter(inputs.values()))
    mask = random_keys(first.shape[:-1], rng)
    mask[(slice(None), 0) if workload.layer == "msa_column" else (..., 0)] = True
    return Layer(workload.layer, module, inputs, mask, normal(*first.shape), dtype)


def io_bytes(layer: Layer) -> int:
    """Bytes of inputs, parameters, mask and output, each once."""
    return sum(x.nbytes for x in (*layer.leaves, layer.mask, layer.do))


def _normed(module: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor | None, nn.Linear | None]:
    """Give the input of the projections, that of the pair bias, and the product that makes the bias."""
    if isinstance(module, TriangleAttention):
        z = module.layer_norm(inputs["z"])
        return z, z, module.linear
    if isinstance(module, AttentionPairBias):
        norm = module.layer_norm_a
        if isinstance(norm, AdaLN):
            s = norm.layer_norm_s(inputs["s"])
            a = torch.sigmoid(norm.linear_g(s)) * norm.layer_norm_a(inputs["a"]) + norm.linear_s(s)
            return a, inputs["z"], module.linear_z
        return norm(inputs["a"]), module.layer_norm_z(inputs["z"]), module.linear_z  # type: ignore[misc]
    if isinstance(module, MSARowAttentionWithPairBias):
        return module.layer_norm_m(inputs["m"]), module.layer_norm_z(inputs["z"]), module.linear_z  # type: ignore[misc]
    return module.layer_norm_m(inputs["m"].transpose(-2, -3)), None, None


def _written(layer: Layer, attend: Attend, *, joined: bool = False) -> Tensor:
    """The layer as models write it: a product for each projection, or one for all that read the same tensor."""
    module, mha = layer.module, layer.module.mha
    x, source, to_bias = _normed(module, layer.inputs)
    products = [*mha.inputs, to_bias] if joined and source is x and to_bias is not None else list(mha.inputs)
    q, k, v, g, *biases = one_product(x, products) if joined else [product(x) for product in products]
    bias = biases[0] if biases else None if source is None or to_bias is None else to_bias(source)
    if bias is not None:
        bias = bias.movedim(-1, -3)
        bias = bias if bias.ndim == 5 else bias.unsqueeze(-4)
    mask = layer.mask.transpose(-1, -2) if layer.kind == "msa_column" else layer.mask
    q, k, v = (y.view(*y.shape[:-1], module.no_heads, -1) for y in (q, k, v))
    o = attend(q, k, v, mask, bias).flatten(-2)
    out: Tensor = mha.linear_o(torch.sigmoid(g) * o)
    if isinstance(module, AttentionPairBias) and module.linear_ada_out is not None:
        out = torch.sigmoid(module.linear_ada_out(layer.inputs["s"])) * out
    return out.transpose(-2, -3) if layer.kind == "msa_column" else out


def one_product(x: Tensor, products: list[nn.Linear]) -> list[Tensor]:
    """Views of one product. Rows of zeros let each start on 16 bytes, without which attention would copy all of them."""
    widths = [product.out_features for product in products]
    gaps = [-width % _ALIGNED for width in widths]
    weights = [F.pad(p.weight, (0, 0, 0, gap)) for p, gap in zip(products, gaps, strict=True)]
    biases = [
        F.pad(p.weight.new_zeros(p.out_features) if p.bias is None else p.bias, (0, gap))
        for p, gap in zip(products, gaps, strict=True)
    ]
    product = F.linear(x, torch.cat(weights), torch.cat(biases).to(x.dtype))
    parts = product.split([width + gap for width, gap in zip(widths, gaps, strict=True)], -1)
    return [part[..., :width] for part, width in zip(parts, widths, strict=True)]


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, pair_bias: Tensor | None) -> Tensor:
    return evoattn.evoformer_attention(q, k, v, mask=mask, pair_bias=pair_bias)


def _off(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask as a bias of the scores, `[*, 1, 1, K]`: -inf for a masked key."""
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, -torch.inf)[..., None, None, :]


def _dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, pair_bias: Tensor | None) -> Tensor:
    q, k, v = (x.transpose(-2, -3) for x in (q, k, v))
    return dense(q, k, v, _off(mask, q.dtype), pair_bias).transpose(-2, -3)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, pair_bias: Tensor | None) -> Tensor:
    """torch's own attention; mask and pair bias are summed and expanded at each call."""
    q, k, v = (x.transpose(-2, -3) for x in (q, k, v))
    bias = _off(mask, q.dtype)
    bias = (bias if pair_bias is None else bias + pair_bias).expand(*q.shape[:-1], k.shape[-2])
    o: Tensor = F.scaled_dot_product_attention(q[0], k[0], v[0], attn_mask=bias[0])
    return o.unsqueeze(0).transpose(-2, -3)


def _in_parts(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, pair_bias: Tensor | None) -> Tensor:
    """`_dense` for some rows n at a time. The backward computes their scores again."""
    rows = max(1, SCORES[q.device.type] // (q.shape[2] * q.shape[3] * k.shape[2]))
    parts = zip(*(x.split(rows, 1) for x in (q, k, v, mask)), strict=True)
    return torch.cat([checkpoint(_dense, *part, pair_bias, use_reentrant=False) for part in parts], 1)


def _native(layer: Layer) -> Tensor:
    options = {"columns": True} if layer.kind == "msa_column" else {}
    output: Tensor = layer.module(**layer.inputs, mask=layer.mask, **options)
    return output


def _way(
    name: str,
    title: str,
    prepare: Callable[[Layer], Compute],
    *,
    compiles: bool = False,
    dense: bool = False,
    empty_rows: Literal["native", "mean"] = "native",
) -> Contender:
    """A way to compute a layer: `prepare` makes a function of a layer to its output. A `dense` one holds all scores."""

    def prepared(layer: Layer) -> Prepared:
        if empty_rows != "native":
            layer = dataclasses.replace(layer, module=copy.copy(layer.module))
            layer.module.empty_rows = empty_rows
        compute = prepare(layer)
        call = torch.compile(compute, dynamic=False) if compiles else compute

        def run() -> Tensor:
            if layer.dtype == torch.float32:
                return call(layer)
            with torch.autocast(layer.do.device.type, layer.dtype):
                return call(layer)

        grouped = (*layer.inputs, *["parameters" for _ in layer.module.parameters()])
        return Prepared(run, (), lambda x: x.to(layer.dtype), lambda x: x, tuple(layer.leaves), grouped)

    return Contender(name, title, prepared, _DENSE_COPIES if dense else 0, compiles)


def _with(attend: Attend, *, joined: bool = False) -> Callable[[Layer], Compute]:
    return lambda layer: functools.partial(_written, attend=attend, joined=joined)


WAYS: tuple[Contender, ...] = (
    _way("evoattn", "evoattn.nn", lambda layer: _native),
    _way("evoattn/mean", "evoattn.nn, empty rows as OpenFold", lambda layer: _native, empty_rows="mean"),
    _way("evoattn/compiled", "evoattn.nn, torch.compile", lambda layer: _native, compiles=True),
    _way("joined_compiled", "one product, torch.compile", _with(_attend, joined=True), compiles=True),
    _way("openfold3", "OpenFold-3's layer, its Triton kernels", openfold3),
    _way("cuequivariance", "cuEquivariance's layer", cuequivariance),
    _way("cuequivariance/compiled", "cuEquivariance's layer, torch.compile", cuequivariance, compiles=True),
    _way("written", "as models write it, evoattn inside", _with(_attend)),
    _way("written_sdpa", "as models write it, SDPA", _with(_sdpa), dense=True),
    _way("written_dense", "as models write it, dense torch", _with(_dense), dense=True),
)
"""In the order in which they run."""


def truth(layer: Layer) -> dict[str, Tensor]:
    """Output and gradients in float64: "o", "dNAME" of each input, and "dparameters" of all parameters as one vector."""
    module = copy.deepcopy(layer.module).double()
    inputs = {name: x.detach().double().requires_grad_() for name, x in layer.inputs.items()}
    double = Layer(layer.kind, module, inputs, layer.mask, layer.do.double())
    o = _written(double, _in_parts)
    gradients = torch.autograd.grad(o, double.leaves, double.do)
    by_input = {f"d{name}": x for name, x in zip(inputs, gradients, strict=False)}
    return {"o": o.detach(), **by_input, "dparameters": torch.cat([x.flatten() for x in gradients[len(inputs) :]])}
