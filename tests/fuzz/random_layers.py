"""Random layers of `evoattn.nn`, with random changes of their modules, inputs and outputs, drawn from one seed."""

from __future__ import annotations

import dataclasses
import math
import random
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from evoattn.core.problem import dtype_name
from evoattn.testing.drawing import with_strides
from tests.fuzz.layer_kinds import KINDS, LAYERS, OPERATORS
from tests.fuzz.random_problems import DTYPES, Draw, bell
from tests.helpers import surroundings
from tests.helpers.changes import HOOKS, IN_PLACE, INSTEAD, change

_LARGE_PRODUCTS = ("linear_a_p.weight", "linear_b_p.weight", "p_in_weight")
"""Weights whose size decides that of the product of a triangle multiplication, which a norm follows."""

_LEADS: dict[tuple[int, ...], int] = {(1,): 50, (): 15, (2,): 20, (2, 3): 10, (1, 2): 5}
_LENGTHS = {1: 5, 2: 5, 3: 5, 7: 5, 15: 10, 16: 10, 17: 15, 24: 10, 31: 5, 33: 10, 40: 10, 65: 4, 128: 4, 200: 2}
_SEQUENCES = {1: 10, 2: 20, 3: 20, 5: 20, 16: 15, 17: 15}
_CHANNELS = {4: 5, 7: 10, 12: 10, 16: 20, 32: 25, 48: 10, 64: 15, 128: 5}
_HEAD_CHANNELS = {4: 5, 7: 5, 8: 20, 16: 25, 24: 10, 32: 30, 64: 5}
_HEADS = {1: 20, 2: 30, 3: 10, 4: 30, 8: 10}


@dataclasses.dataclass(frozen=True)
class RandomLayer:
    """A layer in words, with the seed of its numbers.

    Args:
        seed: of the numbers.
        dtypes, largest: as `random_layer` took them.
        kind: which of `KINDS`.
        lead: batch axes.
        sizes: by letter.
        options, called: of the class and of the call.
        dtype: of the inputs.
        parameter_dtype: of the parameters.
        autocast: its dtype, or None.
        default_dtype: torch's, while the layer is made and runs.
        mask: keys kept at random, the first half, all but every third row or column, none, or no mask.
        mask_ones: axes of the mask, from the last, that have size 1.
        mask_dtype: of the mask.
        strides: of the inputs in memory: contiguous, the axes before the last swapped, every second element of a wider tensor,
            or one element after the start of its memory.
        scale: factor on the inputs.
        needs: inputs with a gradient.
        frozen: parameters without one.
        path, change: a sub-module, and how it is changed, or "".
        training: whether the layer is in training mode, without dropout.
        mode: whether the call has gradients, is within torch.no_grad, or in inference mode.
        checkpoint: "reentrant", "plain", or none.
        in_place: how the output is changed in place, or "".
        cotangent: of the output: random, one number expanded, or with swapped axes in memory.
        backward_under_autocast: whether the backward runs under autocast too.
        around: what is on around the call: one of `surroundings`, or "".
        mask_expanded: whether axes of size 1 of the mask are expanded, with stride 0.
        gain: factor on `_LARGE_PRODUCTS`.
        overwrites: whether the result is written over the first input.
        mask_factor: whether the mask has any numbers in place of ones, and a gradient.
    """

    seed: int
    dtypes: tuple[torch.dtype, ...]
    largest: int
    kind: str
    lead: tuple[int, ...]
    sizes: dict[str, int]
    options: dict[str, Any]
    called: dict[str, Any]
    dtype: torch.dtype
    parameter_dtype: torch.dtype
    autocast: torch.dtype | None
    default_dtype: torch.dtype
    mask: str | None
    mask_ones: tuple[int, ...]
    mask_dtype: torch.dtype
    strides: str
    scale: float
    needs: tuple[str, ...]
    frozen: tuple[str, ...]
    path: str
    change: str
    training: bool
    mode: str
    checkpoint: str
    in_place: str
    cotangent: str
    backward_under_autocast: bool
    around: str = ""
    mask_expanded: bool = False
    gain: float = 1.0
    overwrites: bool = False
    mask_factor: bool = False

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of products: the narrower of those that autocast makes of inputs and parameters. float64 stays."""
        dtypes = (self.dtype, self.parameter_dtype)
        x, parameter = (d if self.autocast is None or d == torch.float64 else self.autocast for d in dtypes)
        return parameter if parameter.itemsize < x.itemsize else x

    @property
    def out_dtype(self) -> torch.dtype:
        """The dtype of the output."""
        residual = self.options.get("residual", False)
        return torch.promote_types(self.dtype, self.compute_dtype) if residual else self.compute_dtype

    def command(self, backend: str, device: str) -> str:
        """A command that judges the layer again."""
        dtypes = "" if self.dtypes == DTYPES else " --dtypes " + " ".join(dtype_name(x) for x in self.dtypes)
        drawn = f"--seed {self.seed} --cases 1 --largest {self.largest}{dtypes}"
        what = "operators" if self.kind in OPERATORS else "layers"
        return f"python3 dev.py fuzz --{what} {drawn} --backends {backend} --device {device}"

    def shape(self, axes: str) -> tuple[int, ...]:
        """The shape that letters stand for."""
        return tuple(n for axis in axes for n in (self.lead if axis == "*" else (self.sizes.get(axis, 1),)))

    def layer(self, device: torch.device | str = "cpu") -> nn.Module:
        """The layer. Equal calls give equal parameters."""
        kind, rng = KINDS[self.kind], torch.Generator().manual_seed(self.seed)
        module = kind.layer(*(self.sizes[letter] for letter in kind.sizes), **self.options)
        for name, x in module.named_parameters():
            noise = bell(rng, *x.shape)
            x.data = 0.3 * noise + name.endswith("weight") if x.ndim == 1 else noise / x.shape[-1] ** 0.5
            x.data *= self.gain if name in _LARGE_PRODUCTS else 1
            x.requires_grad_(name not in self.frozen)
        module.to(self.parameter_dtype).train(self.training)
        if self.change:
            with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the old weight norm is deprecated
                torch.manual_seed(self.seed)
                change(module, self.path, self.change)
        return module.to(device)

    def inputs(self, device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """The tensors that the layer takes, by name; those in `needs` are leaves with a gradient."""
        rng = torch.Generator().manual_seed(self.seed + 1)
        tensors = {}
        for name, axes in KINDS[self.kind].inputs.items():
            x = (self.scale * bell(rng, *self.shape(axes))).to(self.dtype).to(device)
            kind = "transposed" if self.strides == "swapped" else self.strides
            tensors[name] = with_strides(x, kind).requires_grad_(name in self.needs)
        return tensors

    def masks(self, device: torch.device | str = "cpu") -> Tensor | None:
        """The mask, or None."""
        if self.mask is None:
            return None
        whole = self.shape(KINDS[self.kind].mask)
        shape = tuple(1 if axis - len(whole) in self.mask_ones else size for axis, size in enumerate(whole))
        kept = bell(torch.Generator().manual_seed(self.seed + 2), *shape) > -0.5
        if self.mask == "padding":
            kept[...] = torch.arange(shape[-1]) < (shape[-1] + 1) // 2
        elif self.mask == "rows":
            kept[(..., slice(None, None, 3), slice(None)) if len(shape) > 1 else ...] = False
        elif self.mask == "columns":
            kept[..., ::3] = False
        elif self.mask == "nothing":
            kept[...] = False
        mask = kept.to(self.mask_dtype).to(device)
        if self.mask_factor:
            mask *= bell(torch.Generator().manual_seed(self.seed + 4), *shape).to(mask)
        mask = mask.expand(whole) if self.mask_expanded else mask
        return mask.requires_grad_(self.mask_factor)

    def cotangents(self, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """The cotangent of the output, and the factor `[*, 1]` that "mul_" multiplies the output by in place."""
        rng = torch.Generator().manual_seed(self.seed + 3)
        shape = self.shape(KINDS[self.kind].output or next(iter(KINDS[self.kind].inputs.values())))
        factor = (bell(rng, *shape[:-1], 1) > -0.5).float().to(device)
        if self.cotangent == "expanded":
            return bell(rng, 1).to(self.out_dtype).to(device).expand(shape), factor
        do = bell(rng, *shape).to(self.out_dtype).to(device)
        return with_strides(do, "transposed" if self.cotangent == "swapped" else "", (-1, -2)), factor


def random_layer(
    seed: int,
    *,
    dtypes: Sequence[torch.dtype] = DTYPES,
    largest: int = 1 << 15,
    kinds: Sequence[str] = tuple(LAYERS),
) -> RandomLayer:
    """A random layer. The same arguments always give the same layer.

    Args:
        seed: of the description and of the numbers.
        dtypes: of inputs and parameters, to draw from.
        largest: the most scores, over all batches, rows and heads.
        kinds: of `KINDS`, to draw from.
    """
    draw = Draw(random.Random(seed))
    name = draw.one(kinds)
    kind = KINDS[name]
    lead, sizes = _sizes(draw, largest)
    options, called = ({key: draw.one(values) for key, values in drawn.items()} for drawn in (kind.options, kind.called))
    dtype = draw.one(dtypes)
    parameter_dtype = dtype if draw.chance(0.6) else draw.one(dtypes)
    autocast = draw.weighted({None: 55, torch.bfloat16: 30, torch.float16: 15})
    with torch.device("meta"):
        module = kind.layer(*(sizes[letter] for letter in kind.sizes), **options)
    norms = sum(type(x) is nn.LayerNorm for x in module.modules())  # without them scores get too large for low precision
    frozen = draw.weighted({0.0: 60, 0.4: 30, 1.0: 10})
    path, how = _change(draw, module) if draw.chance(0.4) and norms else ("", "")
    if path:  # torch itself refuses some mixtures, and a module that is called may round to 16 bits of another kind
        if parameter_dtype != dtype:
            parameter_dtype = dtype if "norm" in path or not autocast else torch.float32
        autocast = None if parameter_dtype.itemsize == 2 and parameter_dtype != autocast else autocast
    needs = tuple(x for x in kind.inputs if draw.chance(0.75))
    in_place = "" if how == "backward hook" else draw.weighted({"": 70, "mul_": 15, "relu_": 15})  # it returns a view
    checkpoints = {"": 70, "plain": 20}
    if not in_place and needs == tuple(kind.inputs):  # it needs an input with a gradient, and returns what nobody may change
        checkpoints["reentrant"] = 10
    layer = RandomLayer(
        seed=seed,
        dtypes=tuple(dtypes),
        largest=largest,
        kind=name,
        lead=lead,
        sizes=sizes,
        options=options,
        called=called,
        dtype=dtype,
        parameter_dtype=parameter_dtype,
        autocast=autocast,
        default_dtype=draw.weighted({torch.float32: 75, torch.float64: 15, torch.bfloat16: 10}),
        mask=draw.weighted({None: 20, "random": 40, "padding": 10, "rows": 12, "columns": 12, "nothing": 6}),
        mask_ones=tuple(axis for axis in range(-4, 0) if draw.chance(0.12)),
        mask_dtype=draw.one((torch.float32, torch.bool, dtype)),
        strides=draw.weighted({"contiguous": 55, "swapped": 20, "sliced": 15, "offset": 10}),
        scale=draw.weighted({1.0: 75, 1e-3: 10, 3.0: 10} | ({300.0: 5} if norms >= len(kind.inputs) else {})),
        needs=needs,
        frozen=tuple(x for x, _ in module.named_parameters() if draw.chance(frozen)),
        path=path,
        change=how,
        training=not options.get("dropout") and draw.chance(0.5) and how != "spectral norm",
        mode=draw.weighted({"grad": 90, "no_grad": 6, "inference": 4}),
        checkpoint=draw.weighted(checkpoints),
        in_place=in_place,
        cotangent=draw.weighted({"random": 70, "expanded": 15, "swapped": 15}),
        backward_under_autocast=draw.chance(0.2),
    )
    return dataclasses.replace(layer, **_later(draw, layer))


def _later(draw: Draw, layer: RandomLayer) -> dict[str, Any]:
    """Draw the words that came last, so that no other draw depends on them."""
    changes = {"": 84, "add_": 8, "part": 8} if layer.change != "backward hook" and layer.checkpoint != "reentrant" else {"": 1}
    in_place = layer.in_place or draw.weighted(changes)
    around = draw.weighted(_surroundings(layer, in_place))
    calls_modules = layer.change or around in (*surroundings.INSTEAD, *surroundings.COUNTERS, *surroundings.COMPILERS)
    narrow = calls_modules and layer.parameter_dtype == torch.float16 and not layer.autocast  # a norm of float16 takes float16
    kind, residual = KINDS[layer.kind], layer.options.get("residual", False)
    may_overwrite = kind.overwrites and layer.mode != "grad" and layer.out_dtype == layer.dtype and not layer.checkpoint
    may_overwrite = may_overwrite and (residual or kind.overwrites == "out") and around != surroundings.DTENSORS
    is_factor = kind.mask_is_factor and layer.mask is not None and layer.mask_dtype.is_floating_point and layer.mode == "grad"
    # A norm takes away a factor of a whole row, and 16 bits leave no digit of its gradient, which is almost 0.
    is_factor = is_factor and not layer.mask_ones and layer.sizes["l"] > 2 and layer.compute_dtype.itemsize > 2
    is_large = "multiplication" in layer.kind and draw.chance(0.25) and not narrow
    return {
        "in_place": in_place,
        "around": around,
        "mask_expanded": draw.chance(0.15),
        "gain": 300.0 if is_large else 1.0,
        "overwrites": draw.chance(0.7) and bool(may_overwrite),
        "mask_factor": draw.chance(0.2) and is_factor and layer.checkpoint != "reentrant",
    }


def _surroundings(layer: RandomLayer, in_place: str) -> dict[str, int]:
    """Surroundings that fit a layer, with weights. Sub-modules that are called take no mixtures of dtypes."""
    around = {"": 700, **dict.fromkeys(surroundings.MODES, 30)}
    if layer.checkpoint == "plain":  # which runs the forward again without the mode, and so in another way
        del around["function mode"]
    mixed = layer.dtype != layer.parameter_dtype or (layer.dtype.itemsize == 2 and layer.autocast not in (None, layer.dtype))
    if layer.kind in LAYERS and not mixed:
        around |= dict.fromkeys(surroundings.INSTEAD, 30)
        if layer.mode != "inference":  # whose tensors it does not take
            around |= dict.fromkeys(surroundings.COUNTERS, 30)
    if layer.change or layer.checkpoint:
        return around
    if layer.kind in OPERATORS or not mixed:
        around |= dict.fromkeys(surroundings.COMPILERS, 20)
    if KINDS[layer.kind].takes_dtensors and not in_place:
        around[surroundings.DTENSORS] = 150
    return around


def _sizes(draw: Draw, largest: int) -> tuple[tuple[int, ...], dict[str, int]]:
    lead = draw.weighted(_LEADS)
    sizes = {letter: draw.weighted(_LENGTHS) for letter in "lk"} | {"n": draw.weighted(_SEQUENCES)}
    sizes |= {letter: draw.weighted(_CHANNELS) for letter in "cps"}
    sizes |= {"d": draw.weighted(_HEAD_CHANNELS), "h": draw.weighted(_HEADS)}
    while math.prod(lead) * max(sizes["l"], sizes["n"]) * sizes["h"] * sizes["l"] * max(sizes["l"], sizes["k"]) > largest:
        longest = max("lkn", key=lambda letter: sizes[letter])
        if sizes[longest] == 1:
            break
        sizes[longest] = (sizes[longest] + 1) // 2
    return lead, sizes


def _change(draw: Draw, module: nn.Module) -> tuple[str, str]:
    """A linear module or a norm of the layer, and its change."""
    kinds = {path: type(x) for path, x in module.named_modules() if type(x) in (nn.Linear, nn.LayerNorm)}
    path = draw.one(tuple(kinds))
    return path, draw.one((*IN_PLACE, *INSTEAD) if kinds[path] is nn.Linear else (*HOOKS, "wrapper"))
