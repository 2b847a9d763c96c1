"""Random problems: calls of any size, dtype, layout, stride, mask and bias, each drawn from one seed."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from evoattn.core.problem import GRADIENTS
from evoattn.testing.cases import Case, CaseInputs
from evoattn.testing.drawing import Drawing

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

_T = TypeVar("_T")

_TILES = (16, 32, 64, 128)
_CHANNELS = {1: 3, 3: 3, 8: 14, 16: 16, 24: 12, 32: 20, 40: 4, 48: 10, 64: 14, 80: 3, 128: 4, 256: 1}
_ROWS = {1: 14, 2: 18, 3: 16, 4: 8, 5: 10, 7: 8, 8: 8, 16: 6, 17: 6, 33: 4, 48: 2}
_HEADS = {1: 24, 2: 28, 3: 14, 4: 20, 5: 4, 8: 8, 16: 2}
_LEADS: dict[tuple[int, ...], int] = {
    (1,): 40,
    (2,): 18,
    (): 14,
    (3,): 6,
    (2, 3): 8,
    (1, 2): 4,
    (1, 1): 2,
    (2, 1, 3): 4,
    (3, 2, 2): 4,
}
_SCORES = {1.0: 70, 20.0: 10, 60.0: 8, 400.0: 6, 3000.0: 6}
"""The standard deviation of scores; the largest of many are three to four times that, so 1e4 is reached."""

_ALL = GRADIENTS[:5]
"""The gradients of the first draw. `_gate` adds that of the gate."""


class _PortableDrawing(Drawing):
    """Draws by operations that IEEE 754 fixes, so that every processor and torch version gives the same bits.

    `torch.randn` takes logarithms and cosines, whose last bits depend on the machine.
    """

    def double(self, *sizes: int) -> Tensor:
        return bell(self.rng, *sizes)

    def single(self, *sizes: int) -> Tensor:
        return self.double(*sizes).float()


def bell(rng: torch.Generator, *sizes: int) -> Tensor:
    """Random float64 numbers of mean 0 and variance 1, never beyond 3.5, on the CPU. IEEE 754 fixes their bits."""
    first, second, third, fourth = torch.rand((4, *sizes), generator=rng, dtype=torch.float64)
    return ((first + second) + (third + fourth) - 2) * 3**0.5  # type: ignore[no-any-return]


@dataclasses.dataclass(frozen=True)
class RandomProblem:
    """A call in words with the seed of its numbers. Its `repr` is a line of Python that makes it again.

    Args:
        seed: of the numbers.
        case: the call.
        deterministic: whether results have to be bit-equal from run to run.
    """

    seed: int
    case: Case
    deterministic: bool = False

    @property
    def scores(self) -> int:
        """The number of scores."""
        case = self.case
        return math.prod(case.lead) * case.n * case.h * case.lq * case.lk

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of q, k and v."""
        return self.case.dtype

    def command(self, backend: str, device: str) -> str:
        """A command that judges the problem again."""
        what = f"judge({self!r}, {backend!r}, {device!r})"
        return f'python -c "import torch; from evoattn.testing import Case; from tests.fuzz import *; print({what})"'

    def make(self, device: torch.device | str = "cpu") -> CaseInputs:
        """The inputs. They are drawn on the CPU, with the same bits on every processor and in every version of torch."""
        tensors: dict[str, Any] = _PortableDrawing(self.case, self.seed, device).tensors()
        return CaseInputs(case=self.case, **tensors)


def random_problem(
    seed: int, *, dtypes: Sequence[torch.dtype] = DTYPES, largest: int = 1 << 20, longest: int = 400
) -> RandomProblem:
    """A random call. The same arguments give the same problem, on every device and in every version of Python and torch.

    Sizes lie mostly at the edges of tiles (1, tile - 1, tile, tile + 1), or are few queries and keys. Half of the problems have
    Lq != Lk, some D != C. Leading axes, layouts, strides, masks, biases, gates, scales, sizes of scores, cotangents and wanted
    gradients are drawn too; `Case` says in which words.

    Args:
        seed: of the description and of the numbers.
        dtypes: of q, k and v, to draw from.
        largest: the most scores, over all batches, rows and heads. The dense oracle holds several float64 numbers for each.
        longest: the most queries and keys.

    Returns:
        A `RandomProblem`, for `judge`.

    Raises:
        ValueError: there is nothing to draw from.

    Example:
        >>> from tests.fuzz import random_problem
        >>> random_problem(7) == random_problem(7)
        True
    """
    if not dtypes or largest < 1 or longest < 1:
        raise ValueError(f"expected dtypes, and largest and longest from 1 up; got {dtypes!r}, {largest!r} and {longest!r}")
    draw = Draw(random.Random(seed))
    words: dict[str, Any] = {"dtype": draw.one(dtypes), **_sizes(draw, largest, longest)}
    for part in (_masks, _pair_bias, _memory, _factors, _gradients):
        words |= part(draw, words)
    deterministic = draw.chance(0.35)
    words |= _gate(draw, words)  # late, so that no other draw depends on whether there is one
    words |= _any_scale(draw, words)
    return RandomProblem(seed, Case(f"random_{seed}", **words), deterministic=deterministic)


class Draw:
    """Choices made from `Random.random` alone, whose sequence Python keeps from version to version."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    def one(self, options: Sequence[_T]) -> _T:
        return options[int(self.rng.random() * len(options))]

    def weighted(self, options: dict[_T, int]) -> _T:
        place = self.rng.random() * sum(options.values())
        for option, weight in options.items():
            place -= weight
            if place < 0:
                return option
        return option

    def between(self, least: int, most: int) -> int:
        return least + int(self.rng.random() * (most - least + 1))


def _sizes(draw: Draw, largest: int, longest: int) -> dict[str, Any]:
    lead, n, h = draw.weighted(_LEADS), draw.weighted(_ROWS), draw.weighted(_HEADS)
    kind = draw.weighted({"edge": 48, "few": 30, "odd": 16, "long": 6})
    few = kind == "few"
    lq = min(_length(draw, kind, 16), longest)
    lk = lq if not few and draw.chance(0.5) else min(_length(draw, kind, 64), longest)
    sizes = {"n": n, "h": h, "lq": lq, "lk": lk}
    while math.prod(lead) * math.prod(sizes.values()) > largest:
        weights = {"lead": math.prod(lead), "n": sizes["n"], "h": sizes["h"], "lq": sizes["lq"] / 8, "lk": sizes["lk"] / 8}
        widest = max(weights, key=lambda name: weights[name])
        if widest == "lead":
            lead = (1,) * len(lead)
        else:
            sizes[widest] = (sizes[widest] + 1) // 2
    d = draw.weighted(_CHANNELS)
    c = None if draw.chance(0.78) else draw.weighted(_CHANNELS)
    kv_heads = 1 if sizes["h"] > 1 and draw.chance(0.08) else None
    return {"lead": lead, **sizes, "d": d, "c": c, "kv_heads": kv_heads}


def _length(draw: Draw, kind: str, few: int) -> int:
    if kind == "few":
        return draw.between(1, few)
    if kind == "odd":
        return draw.between(1, 200)
    tile = draw.one(_TILES if kind == "edge" else (256, 384))
    return draw.one((1, tile - 1, tile, tile + 1)) if kind == "edge" else draw.one((tile - 1, tile, tile + 1))


def _masks(draw: Draw, words: dict[str, Any]) -> dict[str, Any]:
    """A mask, a mask bias, the axes along which they vary, and the dtype of both biases."""
    dtype = words["dtype"]
    drawn: dict[str, Any] = {}
    if draw.chance(0.45):
        drawn["mask"] = draw.weighted({"random": 5, "padding": 3, "empty_rows": 2, "empty_batches": 2})
        drawn["mask_axes"] = _broadcast(draw, "b" * bool(words["lead"]) + "nk", 0.12)
    drawn["bias_dtype"] = None if draw.chance(0.75) else draw.one(DTYPES)
    if draw.chance(0.45):
        kinds = {"finite": 6, "minus_1e9": 4, "minus_1e9_rows": 3, "minus_1e10_first": 2, "minus_inf": 3, "minus_inf_rows": 2}
        if (drawn["bias_dtype"] or dtype) != torch.float64:  # whose lowest number no other dtype holds
            kinds |= {"lowest": 1, "lowest_rows": 1}
        drawn["mask_bias"] = draw.weighted(kinds)
        lead = "b" * bool(words["lead"])
        axes = draw.weighted({f"{lead}n11k": 6, f"{lead}nk": 3})
        if axes.endswith("nk"):
            drawn["mask_bias_axes"] = _broadcast(draw, axes, 0.12)
        else:  # all axes stay, so it cannot be read as `[*, n, k]`
            drawn["mask_bias_axes"] = draw.weighted({axes: 7, f"{lead}111k": 1, f"{lead}n111": 1})
    return drawn


def _broadcast(draw: Draw, axes: str, share: float) -> str:
    """A 1 in the place of any axis, each with a small chance, and now and then without the leading axes."""
    axes = "".join("1" if draw.chance(share) else axis for axis in axes)
    return axes[draw.between(1, len(axes) - 1) :] if len(axes) > 1 and draw.chance(share / 2) else axes


def _pair_bias(draw: Draw, words: dict[str, Any]) -> dict[str, Any]:
    if not draw.chance(0.68):
        return {}
    lead = "xyz"[: len(words["lead"])]
    kind = draw.weighted({"shared": 60, "lead": 16, "any": 24})
    if kind == "shared":  # by all rows, as in every model
        axes = f"{lead}1hqk"
    elif kind == "lead":  # any of the leading axes, rows among them
        axes = "".join(axis if draw.chance(0.5) else "1" for axis in f"{lead}n") + "hqk"
    else:
        axes = "".join(axis if draw.chance(0.6) else "1" for axis in f"{lead}nhqk")
    if draw.chance(0.12):  # the last axes alone
        axes = axes[draw.between(0, len(axes) - 2) :]
    drawn: dict[str, Any] = {"pair_bias": axes}
    drawn["pair_bias_dtype"] = None if draw.chance(0.85) else draw.one(DTYPES)
    if draw.chance(0.35):
        kinds = {"minus_1e9": 3, "minus_1e9_rows": 4, "minus_1e10_first": 3, "minus_inf": 3, "minus_inf_rows": 3}
        bias_dtype = drawn["pair_bias_dtype"] or words["bias_dtype"] or words["dtype"]
        if bias_dtype != torch.float64 and not str(words.get("mask_bias")).startswith("lowest"):  # their sum is no float32
            kinds |= {"lowest": 1, "lowest_rows": 1}
        drawn["pair_fill"] = draw.weighted(kinds)
    return drawn


def _memory(draw: Draw, words: dict[str, Any]) -> dict[str, Any]:
    """The layout, and the strides of every tensor."""
    drawn: dict[str, Any] = {"layout": draw.weighted({"bnlhd": 6, "bnhld": 4})}
    kind = draw.weighted({"contiguous": 50, "offset": 10, "one": 20, "each": 20})
    strides = ("contiguous", "transposed", "sliced")
    if kind == "one":
        drawn["strides"] = draw.one(strides[1:])
    elif kind == "each":
        drawn["strides"] = (draw.one(strides), draw.one(strides), draw.one(strides))
    else:
        drawn["strides"] = kind
    if kind != "offset":
        drawn["bias_strides"] = draw.weighted(
            {"contiguous": 55, "permuted": 15, "transposed": 10, "sliced": 10, "expanded": 10}
        )
    return drawn


def _factors(draw: Draw, words: dict[str, Any]) -> dict[str, Any]:
    """The scale, and the factor on q that gives scores of the size wanted."""
    scale = draw.weighted({None: 70, 0.37: 10, -0.5: 10, 1.0: 6, -0.02: 4})
    size = draw.weighted(_SCORES)
    if size == 1.0:
        return {"scale": scale}
    own = words["d"] ** 0.5 * abs(words["d"] ** -0.5 if scale is None else scale)
    return {"scale": scale, "spread": float(f"{min(size / own, 1e4):.3g}")}


def _any_scale(draw: Draw, words: dict[str, Any]) -> dict[str, Any]:
    """In an eighth of all problems a scale of any size and sign, with scores of the same size as before.

    dQ is proportional to the scale. That of float16 is kept below its largest number.
    """
    if not draw.chance(1 / 8):
        return {}
    d, c, scale = words["d"], words["c"] or words["d"], words["scale"]
    most = min(1e4, 4000 * c**-0.5) if words["dtype"] == torch.float16 else 1e4
    size = 1e-5 * (most / 1e-5) ** draw.rng.random()
    ratio = abs(d**-0.5 if scale is None else scale) / size
    spread = min(words.get("spread", 1.0) * ratio, 1e4)
    return {"scale": float(f"{size if draw.chance(0.5) else -size:.3g}"), "spread": float(f"{spread:.3g}")}


def _gradients(draw: Draw, words: dict[str, Any]) -> dict[str, Any]:
    kind = draw.weighted({"all": 45, "qkv": 15, "some": 37, "none": 3})
    random_names = tuple(name for name in _ALL if draw.chance(0.5))
    return {
        "gradients": {"all": _ALL, "qkv": _ALL[:3], "some": random_names, "none": ()}[kind],
        "lse_gradient": draw.chance(0.35),
        "cotangent": draw.weighted({"random": 65, "expanded": 10, "expanded_channels": 8, "expanded_rows": 8, "transposed": 9}),
    }


def _gate(draw: Draw, words: dict[str, Any]) -> dict[str, Any]:
    """A gate in a third of all problems, and whether it is among the wanted gradients."""
    gradients = words["gradients"]
    if not draw.chance(1 / 3):
        return {"gradients": GRADIENTS if gradients == _ALL else gradients}
    strides = {"contiguous": 50, "transposed": 20, "sliced": 15, "expanded_rows": 8, "expanded_channels": 7}
    drawn: dict[str, Any] = {"gate": draw.weighted({"random": 7, "large": 3}), "gate_strides": draw.weighted(strides)}
    if gradients and draw.chance(0.7):
        drawn["gradients"] = (*gradients, "gate")
    return drawn
