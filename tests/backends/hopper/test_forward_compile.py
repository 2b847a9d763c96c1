"""Every variant of the Hopper forward, compiled without a GPU: shared memory, spills, products."""

import itertools
import os
from collections.abc import Iterable
from typing import Any

import pytest

os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")
cutlass = pytest.importorskip("cutlass", reason="CuTe DSL is not installed: pip install '.[hopper]'")
pytest.importorskip("triton", reason="Triton brings the disassembler")

from evoattn.backends.hopper import tiles as planned  # noqa: E402 (where the compiler is)
from evoattn.backends.hopper.kernels import forward, gate, key_bias, pair_bias  # noqa: E402
from tests.helpers.machine_code import count, make  # noqa: E402

DTYPES = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}
BOTH = {"pair": True, "key_bias": True, "exact": False, "resident": True}
WIDE = {"pair": True, "key_bias": True, "exact": True, "resident": False, "float32_pair": True}
VARIANTS = {
    "d8": (8, BOTH),
    "d16": (16, BOTH | {"exact": True}),
    "d24": (24, BOTH),
    "d32": (32, BOTH),
    "d32_pair": (32, BOTH | {"key_bias": False}),
    "d32_row": (32, BOTH | {"pair": False, "exact": True}),
    "d32_none": (32, BOTH | {"pair": False, "key_bias": False, "exact": True}),
    "d32_long": (32, BOTH | {"resident": False}),
    "d32_row_long": (32, BOTH | {"pair": False, "exact": True, "resident": False}),
    "d48_long": (48, BOTH | {"resident": False}),
    "d48_row": (48, BOTH | {"pair": False, "exact": True}),
    "d64_long": (64, BOTH | {"exact": True, "resident": False}),
    "d64_own_scale": (64, BOTH | {"resident": False}),
    "d64_row": (64, BOTH | {"pair": False, "exact": True}),
    "d64_row_long": (64, BOTH | {"pair": False, "exact": True, "resident": False}),
    "d8_wide": (8, WIDE),
    "d16_wide": (16, WIDE),
    "d32_wide": (32, WIDE),
    "d32_wide_pair": (32, WIDE | {"key_bias": False}),
    "d48_wide": (48, WIDE),
    "d64_wide": (64, WIDE),
    "d64_none": (64, BOTH | {"pair": False, "key_bias": False, "exact": True}),
}
ALIGNED = 512
"""Bytes by which the formula of shared memory may be too large: it counts room for barriers and for what is small."""

SPILLS = {"d48_row": 8, "d48_long": 2, "d64_long": 1, "d64_own_scale": 1, "d48_wide": 1, "d64_wide": 1}
"""Instructions that touch local memory, where a variant is known to have some."""


def main_loop(names: list[str]) -> list[str]:
    """The steps of a row, from the first product to the store of o. Loads of the panel come before, the exact path behind."""
    products = [i for i, name in enumerate(names) if name.startswith("HGMMA")]
    stores = [i for i, name in enumerate(names) if name.startswith("UTMASTG")]
    assert products[-1] < stores[-1]
    return names[products[0] : stores[-1] + 1]


def shared_bytes(kernel: forward.Forward) -> int:
    """Shared memory of a block; what the compiler does not check."""
    tiles = 2 * planned.CONSUMERS * planned.MMA_M * planned.pad_channels(kernel.channels)
    tiles += planned.STREAMS * kernel.stages * planned.KEYS * (kernel.key_width + planned.pad_channels(kernel.channels))
    terms = kernel.terms * planned.SLICE * planned.SLICE + planned.STREAMS * kernel.stages * planned.KEYS * key_bias.TERMS
    pair = kernel.pair_tiles * planned.MMA_M * planned.KEYS * (2 if kernel.float32_pair else 1)
    return 2 * (tiles + terms + pair) + 2048


def variant(name: str, dtype: str) -> forward.Forward:
    channels, options = VARIANTS[name]
    return forward.Forward(DTYPES[dtype], channels, **options)


QUICK = ("d32",)
"""What `make test` compiles; `make test-all` compiles all variants."""


def some(*quick: tuple[Any, ...], of: Iterable[tuple[Any, ...]]) -> list[Any]:
    """All of these arguments, slow but for the quick ones."""
    return [pytest.param(*each, marks=[] if each in quick else pytest.mark.slow) for each in of]


NAMES = [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in VARIANTS]


@pytest.mark.parametrize("name", NAMES)
def test_forward_compiles_within_shared_memory_and_spills(name: str) -> None:
    kernel = variant(name, "bfloat16")
    compiled = make(kernel)
    assert compiled.shared <= shared_bytes(kernel) <= min(compiled.shared + ALIGNED, planned.SHARED)
    assert not compiled.serialised
    assert count(main_loop(compiled.instructions), "LDL", "STL") <= SPILLS.get(name, 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["d32", "d32_wide", "d48_long", "d64_long"])
def test_float16_compiles(name: str) -> None:
    compiled = make(variant(name, "float16"))
    assert not compiled.serialised
    assert count(main_loop(compiled.instructions), "LDL", "STL") <= SPILLS.get(name, 0)


@pytest.mark.parametrize(
    ("channels", "dtype"), some((24, "bfloat16"), (64, "float16"), of=itertools.product((8, 24, 64), DTYPES))
)
def test_the_product_with_the_gate_moves_16_bytes_at_a_time(channels: int, dtype: str) -> None:
    compiled = make(gate.GateProduct(DTYPES[dtype], channels))
    moves = [text for text in compiled.instructions if text.startswith(("LDG", "STG"))]
    assert len(moves) == 3 and all(".128" in text for text in moves)
    assert compiled.shared == 0
    assert count(compiled.instructions, "LDL", "STL") == 0


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"unrounded": True}, {"bounded": True}], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("bias", [None, "Float32", "BFloat16"])
def test_key_bias_kernel_compiles_without_spills(dtype: str, mask: bool, bias: str | None, more: dict[str, bool]) -> None:
    kernel = key_bias.KeyBias(DTYPES[dtype], mask=mask, bias=bias and getattr(cutlass, bias), **more)
    assert make(kernel).spilled == 0


@pytest.mark.parametrize(
    ("width", "bounded", "dtype"),
    some((1, False, "bfloat16"), (8, True, "float16"), of=itertools.product((1, 8), (False, True), DTYPES)),
)
def test_pair_bias_kernel_compiles_without_spills(width: int, bounded: bool, dtype: str) -> None:
    assert make(pair_bias.PairBias(DTYPES[dtype], width, q_dtype=DTYPES[dtype], bounded=bounded)).spilled == 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 4])
def test_wide_pairs_compile(width: int, dtype: str) -> None:
    assert make(pair_bias.PairBias(cutlass.Float32, width, q_dtype=DTYPES[dtype])).spilled == 0


def test_names_tell_variants_apart() -> None:
    assert len({variant(name, dtype).name for name in VARIANTS for dtype in DTYPES}) == len(VARIANTS) * len(DTYPES)
