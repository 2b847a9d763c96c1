"""Every variant of the Hopper backward, compiled without a GPU: spills, and that no product waits for the one before it."""

import os
import pathlib
import sys

import pytest

os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")
cutlass = pytest.importorskip("cutlass", reason="CuTe DSL is not installed: pip install 'evoattn[hopper]'")
pytest.importorskip("triton", reason="Triton brings the disassembler")
sys.path.insert(0, str(pathlib.Path(__file__).parent))

from machine_code import count, instructions  # noqa: E402

from evoattn.backends.hopper import bwd_bias, bwd_dkdv, bwd_dq, bwd_plan, bwd_preprocess  # noqa: E402

LENGTHS = {32: (64, 192, 256, 288, 384, 397, 448, 512), 64: (64, 256, 384)}
BOTH = {"pair": True, "row": True}
DTYPES = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("channels", "length"), [(8, 384), (16, 384), (24, 384), (32, 256), (32, 384), (32, 397), (32, 512), (64, 384)]
)
def test_products_of_dq_are_not_serialised(channels, length, dtype, tmp_path):
    chosen = bwd_plan.query_variant(channels, length)
    names = instructions(bwd_dq.QueryGradients(DTYPES[dtype], channels, **BOTH, bias_gradient=True, **chosen), tmp_path)
    waits = count(names, "WARPGROUP.DEPBAR")
    assert waits == chosen["slices"] + 1, "each slice of keys, and the first of a panel, is waited for once"
    assert count(names, "LDL") < 64


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("channels", "length"), [(8, 384), (16, 384), (24, 384), (32, 384), (32, 512), (64, 384)])
def test_products_of_dk_and_dv_are_not_serialised(channels, length, dtype, tmp_path):
    chosen = bwd_plan.key_variant(channels, length, pair=True)
    names = instructions(bwd_dkdv.KeyGradients(DTYPES[dtype], channels, **BOTH, **chosen), tmp_path)
    assert count(names, "WARPGROUP.DEPBAR") == 3, "two slices of a stage, and the first of a row, are waited for once each"
    assert count(names, "LDL") == 0


@pytest.mark.parametrize(
    "change", [{"pair": False, "bias_gradient": False}, {"row": False}, {"partial": True}, {"dlse": True}, {"vector": False}]
)
def test_other_variants_of_dq_compile(change, tmp_path):
    names = instructions(bwd_dq.QueryGradients(cutlass.BFloat16, 32, **(BOTH | {"bias_gradient": True} | change)), tmp_path)
    assert count(names, "WARPGROUP.DEPBAR") == 5


@pytest.mark.parametrize("change", [{"pair": False}, {"row": False}])
def test_other_variants_of_dk_and_dv_compile(change, tmp_path):
    names = instructions(bwd_dkdv.KeyGradients(cutlass.BFloat16, 32, **(BOTH | change)), tmp_path)
    assert count(names, "WARPGROUP.DEPBAR") == 3


def test_the_small_kernels_compile(tmp_path):
    for variant in (
        bwd_preprocess.Statistics(cutlass.BFloat16, 24, dlse=True),
        bwd_bias.PanelSum(cutlass.Float16, vector=False),
    ):
        assert count(instructions(variant, tmp_path), "LDL") == 0


@pytest.mark.parametrize("channels", LENGTHS)
def test_every_length_has_room(channels):
    for length in LENGTHS[channels]:
        query, key = bwd_plan.query_variant(channels, length), bwd_plan.key_variant(channels, length, pair=True)
        assert query is not None and key is not None
        assert query["groups"] * query["slices"] * 32 >= length and query["slices"] % query["stage"] == 0
        assert bwd_plan.query_shared(channels, **query) <= bwd_plan.SHARED
        assert bwd_plan.key_shared(channels, **key) <= bwd_plan.SHARED


def test_longer_is_refused():
    assert bwd_plan.query_variant(32, 513) is None
    assert bwd_plan.key_variant(32, 1024, pair=True) is None
    assert bwd_plan.key_variant(32, 4096, pair=False) is not None
