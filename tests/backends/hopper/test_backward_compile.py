"""Every variant of the Hopper backward, compiled without a GPU: spills, and that no product waits for the one before it."""

import os
from typing import Any

import pytest
import torch

os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")
cutlass = pytest.importorskip("cutlass", reason="CuTe DSL is not installed: pip install '.[hopper]'")
pytest.importorskip("triton", reason="Triton brings the disassembler")

from evoattn.backends.hopper import tiles as planned  # noqa: E402
from evoattn.backends.hopper.kernels import (  # noqa: E402
    dkdv,
    dq,
    dq_sum,
    fused,
    key_bias,
    pair_bias,
    statistics,
)
from evoattn.backends.hopper.kernels.gate import GatePass  # noqa: E402
from evoattn.core.problem import Problem  # noqa: E402
from tests.helpers.machine_code import Made, count, make  # noqa: E402

DTYPES = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}
SKIPS = {"bfloat16": True, "float16": False}
"""Of which dtype the variants are compiled that leave rows out."""
BOTH = {"pair": True, "key_bias": True}
ALIGNED = 512
"""Bytes by which a formula of shared memory may be too large: it counts room to align what has a place already."""

DQ_SPILLED, DQ_ALONE_SPILLED, DKDV_SPILLED, WHOLE_SPILLED = 288, 64, 32, 64
"""Bytes that may be spilled: of dQ with and without a pair bias, of dK and dV, and of one kernel that finds all that it can."""

slow = pytest.mark.slow


def check(compiled: Made, spilled: int, formula: int | None = None) -> None:
    """No product waits for the one before, few registers are spilled, and the launch asks for what the plan counts with."""
    assert not compiled.serialised
    assert compiled.spilled <= spilled
    assert formula is None or compiled.shared <= formula <= compiled.shared + ALIGNED


def problem(channels: int, *sizes: int) -> Problem:
    """A call of these sizes b, n, h, q and k."""
    return Problem("cuda", (9, 0), torch.bfloat16, *sizes, channels, channels)


def fused_shared(channels: int, tiles: int) -> int:
    """Bytes of shared memory of `FusedGradients`."""
    across, width = planned.pad_channels(channels), -(-channels // 16) * 16
    queries = tiles * 64 * (2 * across * 2 + width * 4 + 16)
    keys = 3 * (3 * 64 * across * 2 + 2 * 64 * 64 * 2)
    return queries + keys + 3 * 4 * 8 * 4 + (5 * tiles + 15) * 8


def query_kernel(channels: int, length: int, dtype: str = "bfloat16", pair: bool = True, **change: Any) -> Made:
    """dQ, as it is planned for a length."""
    chosen = planned.query_variant(channels, length, pair)
    options = {"pair": pair, "key_bias": True, "bias_gradient": pair} | chosen._asdict() | change
    return make(dq.QueryGradients(DTYPES[dtype], channels, **options))


def key_kernel(channels: int, length: int, dtype: str, skips: bool, pair: bool = True, **change: bool) -> Made:
    """dK and dV, as they are planned for a length."""
    chosen = planned.key_variant(channels, length, pair, skips)
    options = {"pair": pair, "key_bias": True, "skips": skips, "clears": skips} | chosen._asdict() | change
    return make(dkdv.KeyGradients(DTYPES[dtype], channels, **options))


def check_dq(channels: int, length: int, dtype: str, skips: bool) -> None:
    formula = planned.query_shared_bytes(channels, True, planned.query_variant(channels, length, True))
    check(query_kernel(channels, length, dtype, skips=skips), DQ_SPILLED, formula)


def check_dkdv(channels: int, length: int, dtype: str, skips: bool, pair: bool = True, **change: bool) -> None:
    formula = planned.key_shared_bytes(channels, skips, planned.key_variant(channels, length, pair, skips))
    check(key_kernel(channels, length, dtype, skips, pair, **change), DKDV_SPILLED, formula)


QUICK = ((32, 384, "bfloat16"),)
"""Channels, length and dtype of the kernels that `make test` compiles."""


def variants(*sizes: tuple[int, int]) -> list[Any]:
    """Channels, length and dtype of tests, of which few are quick."""
    every = [(*size, dtype) for size in sizes for dtype in DTYPES]
    return [pytest.param(*each, marks=[] if each in QUICK else slow, id="-".join(map(str, each))) for each in every]


@pytest.mark.parametrize(("channels", "length", "dtype"), variants(
    *((c, 384) for c in (8, 16, 24, 32, 48, 64)),
    *((32, length) for length in (128, 192, 256, 288, 397, 512, 576, 768, 1024, 2048)),
    *((c, 768) for c in (24, 48, 64)),
))  # fmt: skip
def test_dq_kernels_compile_within_their_budget_of_spills(channels, length, dtype):
    check_dq(channels, length, dtype, SKIPS[dtype])


@slow
@pytest.mark.parametrize(
    ("channels", "length", "change"),
    [(32, length, {}) for length in (128, 384, 512, 1024, 2048)]
    + [(channels, 1024, {}) for channels in (8, 16, 24)]
    + [(24, 2048, {}), (32, 2500, {}), (32, 2048, {"dtype": "float16"})]
    + [(32, 512, change) for change in ({"key_bias": False}, {"dlse": True}, {"dtype": "float16"})],
    ids=str,
)
def test_dq_without_a_pair_bias(channels, length, change):
    check(query_kernel(channels, length, pair=False, **change), DQ_ALONE_SPILLED)


@pytest.mark.parametrize(("channels", "length", "dtype"), variants(
    *((c, 384) for c in (8, 16, 24, 32, 48, 64)),
    *((c, 768) for c in (24, 48, 64)),
    *((32, length) for length in (512, 1024)),
    (48, 192),
    (64, 256),
))  # fmt: skip
def test_dk_and_dv_kernels_compile_within_their_budget_of_spills(channels, length, dtype):
    check_dkdv(channels, length, dtype, SKIPS[dtype])


WHOLE = [
    pytest.param(c, change, dtype, marks=[] if (c, dtype, change) == (32, "bfloat16", {}) else slow, id=f"{c}-{dtype}-{change}")
    for c in (8, 16, 24, 32)
    for change in ({}, {"mask_gradient": True, "dlse": True}, {"key_bias": False})
    for dtype in DTYPES
]


@pytest.mark.parametrize(("channels", "change", "dtype"), WHOLE)
def test_all_gradients_in_one_kernel(channels, change, dtype):
    tiles = planned.fused_tiles(problem(channels, 1, 66, 2, 512, 512), 132)
    compiled = make(fused.FusedGradients(DTYPES[dtype], channels, **({"key_bias": True} | change), tiles=tiles))
    check(compiled, WHOLE_SPILLED if channels == 24 and "dlse" in change else 0, fused_shared(channels, tiles))


@slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("length", "pair"), [(192, True), (384, True), (1024, True), (1024, False)])
@pytest.mark.parametrize("channels", [8, 16, 24, 32, 48, 64])
def test_the_gradient_of_a_mask_bias_has_registers(channels, length, pair, dtype):
    check_dkdv(channels, length, dtype, SKIPS[dtype], pair, mask_gradient=True)


@slow
@pytest.mark.parametrize(("channels", "length"), [(8, 384), (32, 384), (32, 1024), (48, 384), (64, 256), (64, 768)])
def test_variants_with_a_float32_pair_bias(channels, length):
    """They hold it in float32 whatever it was: only how it is loaded differs."""
    check(query_kernel(channels, length, bias=cutlass.Float32), DQ_SPILLED)
    chosen = planned.key_variant(channels, length, True, float32_pair=True)
    compiled = make(dkdv.KeyGradients(cutlass.BFloat16, channels, **BOTH, bias=cutlass.Float32, **chosen._asdict()))
    check(compiled, DKDV_SPILLED, planned.key_shared_bytes(channels, False, chosen))


@slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels", [8, 24, 32, 48, 64])
def test_variants_of_the_other_dtype(channels, dtype):
    """That leave rows out, or do not."""
    check_dq(channels, 384, dtype, not SKIPS[dtype])
    check_dkdv(channels, 384, dtype, not SKIPS[dtype])


@slow
@pytest.mark.parametrize(("channels", "length"), [(8, 384), (32, 384), (64, 256), (64, 384), (64, 640)])
def test_the_kernel_of_the_keys_has_registers_to_round(channels, length):
    check_dkdv(channels, length, "bfloat16", True, rounds=True)


GATED = {"dlse": True, "gate": True}


@pytest.mark.parametrize("channels", [32, *(pytest.param(c, marks=slow) for c in (8, 16, 24, 48, 64))])
def test_the_pass_of_a_gate(channels):
    for dtype in DTYPES.values():
        assert make(GatePass(dtype, channels, dlse=True, passes=True, gradient=True)).spilled == 0
    for passes, gradient in ((True, False), (False, True)):
        assert make(GatePass(dtype, channels, dlse=False, passes=passes, gradient=gradient)).spilled == 0


@slow
@pytest.mark.parametrize(("channels", "length", "pair"), [(32, 384, True), (64, 384, True), (48, 768, True), (32, 512, False)])
def test_dq_of_a_gated_call(channels, length, pair):
    """It needs less: no o."""
    formula = planned.query_shared_bytes(channels, True, planned.query_variant(channels, length, True)) if pair else None
    check(query_kernel(channels, length, pair=pair, **GATED), DQ_ALONE_SPILLED, formula)


@slow
def test_other_kernels_of_a_gated_call():
    assert make(statistics.Statistics(cutlass.BFloat16, 32, **GATED)).spilled == 0
    for channels in (8, 32):
        tiles = planned.fused_tiles(problem(channels, 1, 66, 2, 512, 512), 132)
        compiled = make(
            fused.FusedGradients(cutlass.BFloat16, channels, key_bias=True, tiles=tiles, mask_gradient=True, **GATED)
        )
        check(compiled, WHOLE_SPILLED, fused_shared(channels, tiles))


KEYS_384 = dkdv.KeyGradients(cutlass.BFloat16, 32, **BOTH, **planned.key_variant(32, 384, True)._asdict())


@slow
def test_products_overlapped():
    """While a warpgroup computes, as many products run as the plan says: a wait leaves one running."""
    unsplit = fused.FusedGradients(cutlass.BFloat16, 32, key_bias=True, tiles=8)
    assert KEYS_384.overlapped > 0
    for kernel, waits in ((KEYS_384, KEYS_384.overlapped), (unsplit, 1)):
        assert count(make(kernel).instructions, "WARPGROUP.DEPBAR.LE 1") == waits


def test_no_warp_is_left_to_round_where_three_streams_and_the_bias_come_in():
    with pytest.raises(ValueError, match=r"rounds=True needs streams \+ streamed < 4, got 3 \+ 1"):
        dkdv.KeyGradients(cutlass.BFloat16, 32, **BOTH, rounds=True, **planned.key_variant(32, 640, pair=True)._asdict())


@slow
@pytest.mark.parametrize(
    "change",
    [
        {"pair": False, "bias_gradient": False},
        {"key_bias": False},
        {"partial": True},
        {"dlse": True},
        {"vector": False},
        {"timed": False},
    ],
)
def test_other_variants_of_dq_compile(change):
    kernel = dq.QueryGradients(cutlass.BFloat16, 32, **(BOTH | {"bias_gradient": True} | change))
    check(make(kernel), DQ_SPILLED)


@slow
@pytest.mark.parametrize(
    "change",
    [
        {"pair": False},
        {"key_bias": False},
        {"key_bias": False, **planned.key_variant(32, 640, True)._asdict()},
        {"timed": False},
    ],
    ids=str,
)
def test_other_variants_of_dk_and_dv_compile(change):
    check(make(dkdv.KeyGradients(cutlass.BFloat16, 32, **(BOTH | change))), DKDV_SPILLED)


@pytest.mark.parametrize(
    "kernel",
    [
        statistics.Statistics(cutlass.BFloat16, 24, dlse=True),
        dq_sum.PanelSum(cutlass.Float16, vector=False),
        dq_sum.PanelSum(cutlass.BFloat16, cluster=2),
        dq_sum.PanelSum(cutlass.BFloat16, timed=False),
        key_bias.KeyBias(cutlass.BFloat16, mask=True, bias=None, clears=True, lists=True),
        pair_bias.PairBiasTiles(cutlass.BFloat16, float32=True),
        pair_bias.PairBiasTiles(cutlass.Float16, float32=False),
    ],
    ids=lambda kernel: kernel.name,
)
def test_the_small_kernels_compile(kernel):
    check(make(kernel), 0)


@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize("pair", [True, False])
@pytest.mark.parametrize("channels", [8, 16, 24, 32, 48, 64])
def test_every_length_has_room(channels, pair, skips):
    longest = {48: 3072, 64: 2048 if pair else 3072}.get(channels, 4096 if pair else 8192)
    for length in (*range(1, longest, 61), longest):
        query, key = planned.query_variant(channels, length, pair), planned.key_variant(channels, length, pair, skips)
        assert query is not None
        assert query.keys - query.keys // query.cluster < length <= query.keys, "each block of a cluster has keys"
        assert query.slices % query.stage_slices == 0 and query.stages > 1
        assert key.ring or not pair or key.blocks * 64 >= length


@pytest.mark.parametrize(
    ("channels", "sizes", "tiles"),
    [
        (32, (1, 384, 8, 512, 512), 8),
        (24, (1, 66, 2, 65, 65), 8),
        (16, (2, 33, 2, 1024, 8192), 16),
        (8, (1, 66, 2, 1024, 65), 16),
        (32, (1, 66, 2, 513, 512), None),  # more queries than shared memory holds
        (48, (1, 66, 2, 65, 65), None),
        (32, (1, 66, 2, 64, 512), None),  # one tile of queries, or keys
        (32, (1, 66, 2, 512, 64), None),
        (32, (1, 67, 2, 512, 512), None),  # two rows more than processors
        (32, (1, 57, 4, 512, 512), 8),  # 228 of 264
        (32, (1, 56, 4, 512, 512), None),
    ],
)
def test_what_one_kernel_takes_whole(channels, sizes, tiles):
    assert planned.fused_tiles(problem(channels, *sizes), 132) == tiles
    if tiles:
        assert fused_shared(channels, tiles) <= planned.SHARED


@pytest.mark.parametrize("pair", [True, False])
@pytest.mark.parametrize("channels", [8, 16, 24, 32, 48, 64])
def test_a_warpgroup_of_producers_has_four_warps(channels, pair):
    """One brings in each stream of keys, one the queries, and one may sum dQ."""
    sums_dq = set()
    for length in (64, 128, 256, 384, 512, 576, 1024, 2048):
        chosen = planned.query_variant(channels, length, pair)
        kernel = dq.QueryGradients(cutlass.BFloat16, channels, pair=pair, key_bias=True, bias_gradient=pair, **chosen._asdict())
        assert kernel.key_producers + 1 + kernel.warp_sums_dq <= 4
        sums_dq.add(kernel.warp_sums_dq)
    assert sums_dq == ({True, False} if pair and channels > 16 else {False})


def test_more_keys_are_refused():
    assert planned.query_variant(32, 4097, pair=True) is None
    assert planned.query_variant(64, 2049, pair=True) is None
    assert planned.query_variant(32, 8193, pair=False) is None
    assert planned.query_variant(64, 3073, pair=False) is None


def test_terms_of_the_next_row_are_not_waited_for():
    """They are loaded a row ahead; taken apart there, they would be waited for at once."""
    names = make(KEYS_384).instructions
    last = max(i for i, name in enumerate(names) if name.startswith("LDG"))
    until_branch = names[last : next(i for i in range(last, len(names)) if names[i].startswith("BRA"))]
    assert not count(until_branch, "PRMT", "SHF", "LOP3")
