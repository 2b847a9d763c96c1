"""Every variant of the Hopper backward, compiled without a GPU: spills, and that no product waits for the one before it."""

import os
import pathlib

import pytest

os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")
cutlass = pytest.importorskip("cutlass", reason="CuTe DSL is not installed: pip install 'evoattn[hopper]'")
pytest.importorskip("triton", reason="Triton brings the disassembler")

from evoattn.backends.hopper.backward import statistics, variants  # noqa: E402
from evoattn.backends.hopper.backward.dkdv import kernel as dkdv  # noqa: E402
from evoattn.backends.hopper.backward.dq import bias_sum  # noqa: E402
from evoattn.backends.hopper.backward.dq import kernel as dq  # noqa: E402
from evoattn.backends.hopper.backward.fused import kernel as fused  # noqa: E402
from evoattn.backends.hopper.kernels import key_bias, pair_bias  # noqa: E402
from tests.helpers.machine_code import count, instructions  # noqa: E402

BOTH = {"pair": True, "row": True}


def check_waits(names: list[str], kernel: dkdv.KeyGradients) -> None:
    """Two slices of a stage are waited for, and the first of a row; then the products that run on in the next slice."""
    assert count(names, "WARPGROUP.DEPBAR") == 3 + {0: 0, 1: 1, 2: 3}[kernel.run_on]
    assert count(names, "WARPGROUP.DEPBAR.LE 1") == kernel.run_on


DTYPES = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}
SKIPS = {"bfloat16": True, "float16": False}
"""Of which dtype the variants are compiled that leave rows out."""
ONCE_A_ROW = 8
"""Loads and stores of numbers that a thread may keep in memory, once a panel or a row."""


def check_dq(channels: int, length: int, dtype: str, skips: bool, folder: pathlib.Path) -> None:
    chosen = variants.query_variant(channels, length, True)
    kernel = dq.QueryGradients(DTYPES[dtype], channels, **BOTH, bias_gradient=True, skips=skips, **chosen)
    names = instructions(kernel, folder)
    waits = count(names, "WARPGROUP.DEPBAR")
    once = chosen["slices"] + 3 - kernel.helped  # each slice, the first of a panel, and of a row before dq is left
    assert waits == once + len(kernel.exits), "and where a row goes on that may end"
    assert count(names, "WARPGROUP.DEPBAR.LE 1") == 1 + len(kernel.exits), "the scores of the next row run on"
    assert count(names, "LDL") < 64


def check_dkdv(channels: int, length: int, dtype: str, skips: bool, folder: pathlib.Path) -> None:
    chosen = variants.key_variant(channels, length, True, skips)
    kernel = dkdv.KeyGradients(DTYPES[dtype], channels, **BOTH, skips=skips, clears=skips, **chosen)
    names = instructions(kernel, folder)
    check_waits(names, kernel)
    once_a_panel = (channels, length, dtype) == (32, 512, "float16")
    assert count(names, "LDL", "STL") <= (ONCE_A_ROW if skips or channels == 48 or once_a_panel else 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("channels", "length"),
    [(c, 384) for c in (8, 16, 24, 32, 48, 64)]
    + [(32, length) for length in (128, 192, 256, 288, 397, 512, 576, 768, 1024, 2048)]
    + [(c, 768) for c in (24, 48, 64)],
)
def test_products_of_dq_are_not_serialised(channels, length, dtype, tmp_path):
    check_dq(channels, length, dtype, SKIPS[dtype], tmp_path)


@pytest.mark.parametrize(
    ("channels", "length", "change"),
    [(32, length, {}) for length in (128, 384, 512, 1024, 2048)]
    + [(channels, 1024, {}) for channels in (8, 16, 24)]
    + [(24, 2048, {}), (32, 2500, {}), (32, 2048, {"dtype": "float16"})]
    + [(32, 512, change) for change in ({"row": False}, {"dlse": True}, {"dtype": "float16"})],
    ids=str,
)
def test_products_of_dq_are_not_serialised_without_a_pair_bias(channels, length, change, tmp_path):
    chosen = (
        {"pair": False, "row": True, "bias_gradient": False} | variants.query_variant(channels, length, pair=False) | change
    )
    kernel = dq.QueryGradients(DTYPES[chosen.pop("dtype", "bfloat16")], channels, **chosen)
    names = instructions(kernel, tmp_path)
    assert count(names, "WARPGROUP.DEPBAR") == chosen["slices"] + 3
    assert count(names, "LDL") < 16, "two numbers that the loops do not change"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("channels", "length"),
    [(c, 384) for c in (8, 16, 24, 32, 48, 64)]
    + [(c, 768) for c in (24, 48, 64)]
    + [(32, length) for length in (512, 1024)]
    + [(48, 192), (64, 256)],
)
def test_products_of_dk_and_dv_are_not_serialised(channels, length, dtype, tmp_path):
    check_dkdv(channels, length, dtype, SKIPS[dtype], tmp_path)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("change", [{}, {"mask_gradient": True, "dlse": True}, {"row": False}], ids=str)
@pytest.mark.parametrize("channels", [8, 16, 24, 32])
def test_products_of_whole_rows_are_not_serialised(channels, change, dtype, tmp_path):
    tiles = variants.fused_tiles(channels, (1, 66, 2, 512, 512), 132)
    kernel = fused.FusedGradients(DTYPES[dtype], channels, **({"row": True} | change), tiles=tiles)
    names = instructions(kernel, tmp_path)
    assert count(names, "WARPGROUP.DEPBAR") == 4, "both halves of a tile, what runs on in the second, and dq"
    assert count(names, "WARPGROUP.DEPBAR.LE 1") == 1
    assert count(names, "LDL", "STL") <= (16 if channels == 24 and "dlse" in change else 0), "once a tile, where all is wanted"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("length", "pair"), [(192, True), (384, True), (1024, True), (1024, False)])
@pytest.mark.parametrize("channels", [8, 16, 24, 32, 48, 64])
def test_the_gradient_of_a_mask_bias_has_registers(channels, length, pair, dtype, tmp_path):
    skips = SKIPS[dtype]
    chosen = variants.key_variant(channels, length, pair, skips)
    options = {"pair": pair, "row": True, "mask_gradient": True, "skips": skips, "clears": skips}
    kernel = dkdv.KeyGradients(DTYPES[dtype], channels, **options, **chosen)
    names = instructions(kernel, tmp_path)
    check_waits(names, kernel)
    assert count(names, "LDL", "STL") <= ONCE_A_ROW
    assert count(names, "STG") == 1 + 2 * skips, "a quad's two keys, once a row, and what is left out"


@pytest.mark.parametrize(("channels", "length"), [(8, 384), (32, 384), (32, 1024), (48, 384), (64, 256), (64, 768)])
def test_variants_with_a_float32_pair_bias(channels, length, tmp_path):
    """They hold it in float32 whatever it was: only how it is loaded differs."""
    chosen = variants.query_variant(channels, length, True)
    kernel = dq.QueryGradients(cutlass.BFloat16, channels, **BOTH, bias=cutlass.Float32, bias_gradient=True, **chosen)
    names = instructions(kernel, tmp_path)
    assert count(names, "WARPGROUP.DEPBAR") == chosen["slices"] + 3 - kernel.helped
    assert count(names, "LDL") < 64
    chosen = variants.key_variant(channels, length, True, exact=True)
    kernel = dkdv.KeyGradients(cutlass.BFloat16, channels, **BOTH, bias=cutlass.Float32, **chosen)
    names = instructions(kernel, tmp_path)
    check_waits(names, kernel)
    assert count(names, "LDL", "STL") <= (ONCE_A_ROW if channels == 48 else 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels", [8, 24, 32, 48, 64])
def test_variants_of_the_other_dtype(channels, dtype, tmp_path):
    """That leave rows out, or do not."""
    check_dq(channels, 384, dtype, not SKIPS[dtype], tmp_path)
    check_dkdv(channels, 384, dtype, not SKIPS[dtype], tmp_path)


@pytest.mark.parametrize(("channels", "length"), [(8, 384), (32, 384), (64, 256), (64, 384), (64, 640)])
def test_the_kernel_of_the_keys_has_registers_to_round(channels, length, tmp_path):
    chosen = variants.key_variant(channels, length, True, skips=True)
    kernel = dkdv.KeyGradients(cutlass.BFloat16, channels, **BOTH, rounds=True, skips=True, clears=True, **chosen)
    names = instructions(kernel, tmp_path)
    check_waits(names, kernel)
    assert count(names, "LDL", "STL") <= ONCE_A_ROW


def test_no_warp_is_left_to_round_where_three_streams_and_the_bias_come_in():
    with pytest.raises(ValueError, match="none is left to round"):
        dkdv.KeyGradients(cutlass.BFloat16, 32, **BOTH, rounds=True, **variants.key_variant(32, 640, pair=True))


@pytest.mark.parametrize(
    "change",
    [
        {"pair": False, "bias_gradient": False},
        {"row": False},
        {"partial": True},
        {"dlse": True},
        {"vector": False},
        {"timed": False},
    ],
)
def test_other_variants_of_dq_compile(change, tmp_path):
    kernel = dq.QueryGradients(cutlass.BFloat16, 32, **(BOTH | {"bias_gradient": True} | change))
    assert kernel.helped == kernel.pair
    assert count(instructions(kernel, tmp_path), "WARPGROUP.DEPBAR") == 4 + 3 - kernel.helped


@pytest.mark.parametrize(
    "change",
    [{"pair": False}, {"row": False}, {"row": False, **variants.key_variant(32, 640, True)}, {"timed": False}],
    ids=str,
)
def test_other_variants_of_dk_and_dv_compile(change, tmp_path):
    kernel = dkdv.KeyGradients(cutlass.BFloat16, 32, **(BOTH | change))
    check_waits(instructions(kernel, tmp_path), kernel)


def test_the_small_kernels_compile(tmp_path):
    for variant in (
        statistics.Statistics(cutlass.BFloat16, 24, dlse=True),
        bias_sum.PanelSum(cutlass.Float16, vector=False),
        bias_sum.PanelSum(cutlass.BFloat16, cluster=2),
        bias_sum.PanelSum(cutlass.BFloat16, timed=False),
        key_bias.Rows(cutlass.BFloat16, mask=True, bias=None, clears=True, lists=True),
        pair_bias.Tiles(cutlass.BFloat16, wide=True),
        pair_bias.Tiles(cutlass.Float16, wide=False),
    ):
        assert count(instructions(variant, tmp_path), "LDL") == 0


@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize("pair", [True, False])
@pytest.mark.parametrize("channels", [8, 16, 24, 32, 48, 64])
def test_every_length_has_room(channels, pair, skips):
    longest = {48: 3072, 64: 2048 if pair else 3072}.get(channels, 4096 if pair else 8192)
    for length in (*range(1, longest, 61), longest):
        query, key = variants.query_variant(channels, length, pair), variants.key_variant(channels, length, pair, skips)
        assert query is not None
        whole = query["cluster"] * query["groups"] * query["slices"] * 32
        assert whole - whole // query["cluster"] < length <= whole, "each block of a cluster has keys"
        assert query["slices"] % query["stage"] == 0 and query["stages"] > 1
        assert variants.query_shared(channels, pair, **query) <= variants.SHARED
        assert key["ring"] or not pair or key["blocks"] * 64 >= length
        assert variants.key_shared(channels, skips, **key) <= variants.SHARED


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
    assert variants.fused_tiles(channels, sizes, 132) == tiles
    if tiles:
        assert variants.fused_shared(channels, tiles) <= variants.SHARED


@pytest.mark.parametrize(
    ("channels", "length", "streams", "wide", "stages"),
    [
        (32, 512, False, False, 2),
        (32, 576, True, True, 4),
        (48, 192, False, False, 2),
        (48, 256, True, False, 2),
        (64, 256, False, False, 3),
        (64, 320, True, True, 3),
    ],
)
def test_what_stays_and_what_streams(channels, length, streams, wide, stages):
    chosen = variants.key_variant(channels, length, pair=True)
    assert (chosen["ring"] > 0, chosen["wide"], chosen["stages"]) == (streams, wide, stages)


@pytest.mark.parametrize(
    ("channels", "length", "pair", "helped"),
    [
        (32, 256, True, True),
        (32, 512, True, True),
        (24, 384, True, True),
        (64, 384, True, True),
        (16, 384, True, False),  # rows of few channels or keys are over before one warp has summed the one before
        (32, 128, True, False),
        (32, 576, True, False),  # a cluster
        (64, 256, False, False),
    ],
)
def test_where_a_warp_sums_dq(channels, length, pair, helped):
    chosen = variants.query_variant(channels, length, pair)
    kernel = dq.QueryGradients(cutlass.BFloat16, channels, pair=pair, row=True, bias_gradient=pair, **chosen)
    assert kernel.helped == helped
    assert kernel.key_producers + 1 + helped <= 4, "a warpgroup of producers has four warps"


@pytest.mark.parametrize(
    ("channels", "length", "apart"),
    [(32, 384, True), (32, 512, False), (32, 1024, True), (48, 384, False)],
)
def test_dk_and_dv_leave_from_tiles_of_their_own_where_there_is_room(channels, length, apart):
    for skips in (True, False):
        chosen = variants.key_variant(channels, length, True, skips)
        assert chosen["apart"] == apart
        if not apart:
            assert variants.key_shared(channels, True, **(chosen | {"apart": True})) > variants.SHARED


def test_more_keys_are_refused():
    assert variants.query_variant(32, 4097, pair=True) is None
    assert variants.query_variant(64, 2049, pair=True) is None
    assert variants.query_variant(32, 8193, pair=False) is None
    assert variants.query_variant(64, 3073, pair=False) is None


@pytest.mark.parametrize(
    ("channels", "length", "slices"),
    [(32, 384, 2), (8, 384, 2), (32, 1024, 2), (32, 512, 1), (64, 256, 2), (64, 384, 2), (48, 768, 0)],
)
def test_products_of_dk_and_dv_run_on_where_registers_and_stages_allow(channels, length, slices):
    chosen = variants.key_variant(channels, length, pair=True)
    assert dkdv.KeyGradients(cutlass.BFloat16, channels, **BOTH, **chosen).run_on == slices


def test_terms_of_the_next_row_are_not_waited_for(tmp_path):
    """They are loaded a row ahead; taken apart there, they would be waited for at once."""
    names = instructions(dkdv.KeyGradients(cutlass.BFloat16, 32, **BOTH, **variants.key_variant(32, 384, True)), tmp_path)
    last = max(i for i, name in enumerate(names) if name.startswith("LDG"))
    until_branch = names[last : next(i for i in range(last, len(names)) if names[i].startswith("BRA"))]
    assert not count(until_branch, "PRMT", "SHF", "LOP3")
