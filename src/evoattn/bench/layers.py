"""Whole layers in the benchmark: their inputs, the ways to compute them, and the float64 truth.

Every way takes the same parameters, those of a layer of `evoattn.nn`, and computes in 16 bits under autocast while its tensors
are float32, as models train.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import evoattn
from evoattn.bench.layer_peers import Compute, cuequivariance, openfold3
from evoattn.nn import AttentionPairBias, MSARowAttentionWithPairBias, TriangleAttention
from evoattn.nn.msa import MSAAttention
from evoattn.nn.pair_bias import AdaLN
from evoattn.workloads import Workload

__all__ = ["WAYS", "Layer", "Way", "layer_of", "layer_truth"]

_PAIR_CHANNELS = 128
_CONDITION_CHANNELS = 384
_ALIGNED = 8
"""Elements of 16 bits in 16 bytes."""

_KEPT = 0.7
"""Share of the keys that the random mask keeps."""

_SCORES = {"cpu": 6 << 20, "cuda": 48 << 20}
"""Scores of the float64 truth that are in memory at a time."""

Module = TriangleAttention | MSAAttention | AttentionPairBias
"""The layers of `evoattn.nn` that are measured."""

Attend = Callable[[Tensor, Tensor, Tensor, Tensor, "Tensor | None"], Tensor]
"""(q, k, v `[1,n,l,h,d]`, mask `[1,n|1,k]`, pair_bias `[1,1,h,q,k]`) -> o `[1,n,q,h,d]`."""


@dataclasses.dataclass
class Layer:
    """A layer with what it is called with.

    Args:
        kind: `Workload.layer`.
        module: the layer of `evoattn.nn`, float32.
        inputs: float32 tensors by name, which carry gradients.
        mask: bool; no row is masked at every key.
        do: the cotangent, float32, of the output's shape.
    """

    kind: str
    module: Module
    inputs: dict[str, Tensor]
    mask: Tensor
    do: Tensor

    @property
    def leaves(self) -> list[Tensor]:
        """Inputs and parameters: everything that gets a gradient."""
        return [*self.inputs.values(), *self.module.parameters()]

    @property
    def nbytes(self) -> int:
        """Bytes of inputs, parameters, mask and output, each once."""
        return sum(x.nbytes for x in (*self.leaves, self.mask, self.do))


def _module(workload: Workload) -> Module:
    w, c = workload, workload.channels or workload.h * workload.d
    if w.layer == "triangle":
        return TriangleAttention(c, w.d, w.h, empty_rows="native")
    if w.layer == "msa_row":
        return MSARowAttentionWithPairBias(c, _PAIR_CHANNELS, w.d, w.h, empty_rows="native")
    if w.layer == "msa_column":
        return MSAAttention(c, w.d, w.h, empty_rows="native")  # what MSAColumnAttention calls
    if w.layer == "pair_bias":
        return AttentionPairBias(c, _PAIR_CHANNELS, w.d, w.h, _CONDITION_CHANNELS, empty_rows="native")
    if w.layer == "single":
        return AttentionPairBias(c, _PAIR_CHANNELS, w.d, w.h, empty_rows="native")
    raise ValueError(f"no layer {w.layer!r}; expected triangle, msa_row, msa_column, single or pair_bias")


def _shapes(workload: Workload) -> dict[str, tuple[int, ...]]:
    w, c = workload, workload.channels or workload.h * workload.d
    if w.layer == "triangle":
        return {"z": (1, w.n, w.lq, c)}
    if w.layer == "msa_row":
        return {"m": (1, w.n, w.lq, c), "z": (1, w.lq, w.lq, _PAIR_CHANNELS)}
    if w.layer == "msa_column":
        return {"m": (1, w.lq, w.n, c)}
    if w.layer == "single":
        return {"a": (1, w.n, w.lq, c), "z": (1, 1, w.lq, w.lq, _PAIR_CHANNELS)}
    return {"a": (1, w.n, w.lq, c), "z": (1, 1, w.lq, w.lq, _PAIR_CHANNELS), "s": (1, w.n, w.lq, _CONDITION_CHANNELS)}


def layer_of(workload: Workload, device: torch.device, seed: int = 0) -> Layer:
    """A layer with random parameters and inputs.

    Raises:
        ValueError: the workload has no layer.
    """
    rng = torch.Generator(device=device).manual_seed(seed)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=rng, dtype=torch.float32, device=device)

    module = _module(workload).to(device, torch.float32)
    with torch.no_grad():  # layers start with an output of 0 and an open gate, which would hide errors
        for name, x in module.named_parameters():
            spread = x.shape[-1] ** -0.5 if x.ndim == 2 else 0.1
            x.copy_(spread * normal(*x.shape) + (1.0 if x.ndim == 1 and "norm" in name and name.endswith("weight") else 0.0))
    inputs = {name: normal(*shape).requires_grad_() for name, shape in _shapes(workload).items()}
    first = next(iter(inputs.values()))
    mask = torch.rand(first.shape[:-1], generator=rng, dtype=torch.float32, device=device) < _KEPT
    if workload.layer == "msa_column":
        mask[:, 0] = True
    else:
        mask[..., 0] = True
    return Layer(workload.layer, module, inputs, mask, normal(*first.shape))


def _norm(x: Tensor, norm: nn.Module) -> Tensor:
    made: Tensor = norm(x)
    return made


def _adaptive(a: Tensor, s: Tensor, norm: AdaLN) -> Tensor:
    s = norm.layer_norm_s(s)
    made: Tensor = torch.sigmoid(norm.linear_g(s)) * norm.layer_norm_a(a) + norm.linear_s(s)
    return made


def _normed(module: Module, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor | None, nn.Linear | None]:
    """What the projections read, what the pair bias is made from, and by which product."""
    if isinstance(module, TriangleAttention):
        z = _norm(inputs["z"], module.layer_norm)
        return z, z, module.linear
    if isinstance(module, AttentionPairBias):
        norm = module.layer_norm_a
        if isinstance(norm, AdaLN):
            return _adaptive(inputs["a"], inputs["s"], norm), inputs["z"], module.linear_z
        return _norm(inputs["a"], norm), _norm(inputs["z"], module.layer_norm_z), module.linear_z  # type: ignore[arg-type]
    if isinstance(module, MSARowAttentionWithPairBias):
        m, z = _norm(inputs["m"], module.layer_norm_m), _norm(inputs["z"], module.layer_norm_z)  # type: ignore[arg-type]
        return m, z, module.linear_z
    return _norm(inputs["m"].transpose(-2, -3), module.layer_norm_m), None, None  # type: ignore[arg-type]


def _written(layer: Layer, attend: Attend, *, joined: bool = False) -> Tensor:
    """The layer as models write it: a product for each projection, or one for all that read the same tensor."""
    module, mha = layer.module, layer.module.mha
    x, source, to_bias = _normed(module, layer.inputs)
    products = [*mha.inputs, to_bias] if joined and source is x and to_bias is not None else list(mha.inputs)
    made = _one_product(x, products) if joined else [product(x) for product in products]
    q, k, v, g = made[:4]
    if len(made) > 4:
        bias = made[4]
    else:
        bias = None if source is None or to_bias is None else to_bias(source)
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


def _one_product(x: Tensor, products: list[nn.Linear]) -> list[Tensor]:
    """Views of one product. Rows of zeros let each start on 16 bytes, without which attention would copy all of them."""
    widths = [product.out_features for product in products]
    gaps = [-width % _ALIGNED for width in widths]
    weights = [F.pad(p.weight, (0, 0, 0, gap)) for p, gap in zip(products, gaps, strict=True)]
    biases = [
        F.pad(p.weight.new_zeros(p.out_features) if p.bias is None else p.bias, (0, gap))
        for p, gap in zip(products, gaps, strict=True)
    ]
    made = F.linear(x, torch.cat(weights), torch.cat(biases).to(x.dtype))
    parts = made.split([width + gap for width, gap in zip(widths, gaps, strict=True)], -1)
    return [part[..., :width] for part, width in zip(parts, widths, strict=True)]


def _ours(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, pair_bias: Tensor | None) -> Tensor:
    return evoattn.evoformer_attention(q, k, v, mask=mask, pair_bias=pair_bias)


def _off(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to the scores, `[*, 1, 1, K]`: -inf for a masked key."""
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, -torch.inf)[..., None, None, :]


def _dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, pair_bias: Tensor | None) -> Tensor:
    q, k, v = (x.transpose(-2, -3) for x in (q, k, v))
    s = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)  # [1,n,h,q,k]
    s = s + _off(mask, s.dtype)
    s = s if pair_bias is None else s + pair_bias
    return (torch.softmax(s, -1).to(v.dtype) @ v).transpose(-2, -3)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, pair_bias: Tensor | None) -> Tensor:
    """torch's own attention; mask and pair bias are summed and expanded at each call."""
    q, k, v = (x.transpose(-2, -3) for x in (q, k, v))
    bias = _off(mask, q.dtype)
    bias = (bias if pair_bias is None else bias + pair_bias).expand(*q.shape[:-1], k.shape[-2])
    o: Tensor = F.scaled_dot_product_attention(q[0], k[0], v[0], attn_mask=bias[0])
    return o.unsqueeze(0).transpose(-2, -3)


def _in_parts(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, pair_bias: Tensor | None) -> Tensor:
    """`_dense`, some rows n at a time, whose scores the backward computes again."""
    n, scores = q.shape[1], q.shape[2] * q.shape[3] * k.shape[2]
    rows = max(1, _SCORES[q.device.type] // scores)
    parts = []
    for start in range(0, n, rows):
        part = slice(start, start + rows)
        parts.append(checkpoint(_dense, q[:, part], k[:, part], v[:, part], mask[:, part], pair_bias, use_reentrant=False))
    return torch.cat(parts, 1)


def _native(layer: Layer) -> Tensor:
    options = {"columns": True} if layer.kind == "msa_column" else {}
    made: Tensor = layer.module(**layer.inputs, mask=layer.mask, **options)
    return made


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to compute a layer.

    Args:
        name: in records.
        title: in tables.
        prepare: the layer -> what computes the output of a layer of its kind. It raises ImportError where a library is absent,
            RefusesError where it has no such layer.
        compiles: whether torch.compile compiles it.
        dense: whether it holds all scores.
        empty_rows: of the layer of `evoattn.nn`.
    """

    name: str
    title: str
    prepare: Callable[[Layer], Compute]
    compiles: bool = False
    dense: bool = False
    empty_rows: Literal["native", "mean"] = "native"

    def of(self, layer: Layer, dtype: torch.dtype) -> Callable[[], Tensor]:
        """The output under autocast to a dtype; float32 computes in that."""
        if self.empty_rows != "native":
            layer = dataclasses.replace(layer, module=copy.copy(layer.module))
            layer.module.empty_rows = self.empty_rows
        compute = self.prepare(layer)
        call = torch.compile(compute, dynamic=False) if self.compiles else compute
        device = layer.do.device.type

        def run() -> Tensor:
            cast = contextlib.nullcontext() if dtype == torch.float32 else torch.autocast(device, dtype)
            with cast:
                made: Tensor = call(layer)
            return made

        return run


def _with(attend: Attend, *, joined: bool = False) -> Callable[[Layer], Compute]:
    return lambda layer: functools.partial(_written, attend=attend, joined=joined)


WAYS: tuple[Way, ...] = (
    Way("evoattn", "evoattn.nn", lambda layer: _native),
    Way("evoattn/mean", "evoattn.nn, empty rows as OpenFold", lambda layer: _native, empty_rows="mean"),
    Way("evoattn/compiled", "evoattn.nn, torch.compile", lambda layer: _native, compiles=True),
    Way("joined_compiled", "one product, torch.compile", _with(_ours, joined=True), compiles=True),
    Way("openfold3", "OpenFold-3's layer, its Triton kernels", openfold3),
    Way("cuequivariance", "cuEquivariance's layer", cuequivariance),
    Way("cuequivariance/compiled", "cuEquivariance's layer, torch.compile", cuequivariance, compiles=True),
    Way("written", "as models write it, evoattn inside", _with(_ours)),
    Way("written_sdpa", "as models write it, SDPA", _with(_sdpa), dense=True),
    Way("written_dense", "as models write it, dense torch", _with(_dense), dense=True),
)
"""In the order in which they run."""


def layer_truth(layer: Layer) -> dict[str, Tensor]:
    """Output and gradients in float64: "o", "dNAME" of each input, and "dparameters.NAME" of each parameter."""
    exact = copy.deepcopy(layer.module).double()
    inputs = {name: x.detach().double().requires_grad_() for name, x in layer.inputs.items()}
    same = Layer(layer.kind, exact, inputs, layer.mask, layer.do.double())
    o = _written(same, _in_parts)
    return named(same, o.detach(), torch.autograd.grad(o, same.leaves, same.do))


def named(layer: Layer, o: Tensor, gradients: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """Output and gradients by name."""
    names = [f"d{name}" for name in layer.inputs]
    names += [f"dparameters.{name}" for name, _ in layer.module.named_parameters()]
    return {"o": o, **dict(zip(names, gradients, strict=True))}
