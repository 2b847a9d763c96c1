"""The benchmark and the tuner where they matter: on a GPU. `python -m pytest -m gpu tests/bench`"""

import gc
from pathlib import Path

import ceilings
import layer_times
import pytest
import torch

from evoattn import cli
from evoattn.bench import record as records
from evoattn.bench.clock import CudaClock
from evoattn.bench.memory import peak_bytes
from evoattn.core import tuned_tiles

pytestmark = pytest.mark.gpu


def test_the_clock_tells_the_device_and_the_host_apart() -> None:
    """A product that takes milliseconds returns to the host at once, and ten of them take ten times as long."""
    clock = CudaClock(torch.device("cuda"))
    x = torch.randn(8192, 8192, device="cuda")
    clock.calls(lambda _: x @ x, 2)
    single, ten = clock.calls(lambda _: x @ x, 1), clock.calls(lambda _: x @ x, 10)
    assert 7 < ten / single < 13
    host = clock.host_s(lambda _: x @ x, 5)
    assert host is not None and host < single / 5


def test_ceilings_of_a_gpu_are_plausible() -> None:
    device = torch.device("cuda")
    precision = torch.get_float32_matmul_precision()
    measured = ceilings.measure(device, CudaClock(device), ("bfloat16", "float32"))
    assert torch.get_float32_matmul_precision() == precision
    assert 1e13 < measured["product_flops_per_s"]["float32"] < measured["product_flops_per_s"]["bfloat16"] < 1e16
    assert 1e11 < measured["exp2_per_s"] < 1e14, measured["how"]
    assert 1e11 < measured["copy_bytes_per_s"] < 1e14


def test_garbage_of_before_is_not_taken_off_the_peak() -> None:
    device = torch.device("cuda")
    left: list[object] = [torch.empty(1 << 22, device=device)]
    left.append(left)
    del left

    def call() -> torch.Tensor:
        gc.collect()
        return torch.empty(1 << 18, device=device)

    assert peak_bytes(call, device) >= 4 << 18


def test_bench_command_on_a_gpu_measures_all_passes(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    arguments = ["bench", "--workloads", "tri128", "single256", "--dtypes", "bfloat16", "float16", "float32", "--rounds", "2"]
    peers = ["--peers", "flex", "dense", "sdpa"]
    assert cli.main([*arguments, *peers, "--json", str(path)]) == 0
    record = records.read(path)
    assert len(record.problems) == 6
    for problem in record.problems:
        fused = problem.result("evoattn")
        assert fused is not None and fused.status == "ok", fused
        assert set(fused.times) == set(fused.host_us) == {"forward", "backward", "both"}
        assert fused.peak_bytes
        dense = problem.result("dense")
        assert dense is not None and dense.status == "ok", dense


def test_layers_have_times_in_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_times, "WAYS", tuple(way for way in layer_times.WAYS if way.name in ("evoattn", "written")))
    path = tmp_path / "a.json"
    assert layer_times.main(["--workloads", "layer128", "--rounds", "2", "--json", str(path)]) == 0
    for result in records.read(path).problems[0].results:
        assert set(result.times) == {"forward", "both", "graph_forward", "graph_both"}, result.reason
        assert set(result.host_us) == {"forward", "both"} and result.peak_bytes


def test_tune_command_on_a_gpu_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EVOATTN_CACHE_DIR", str(tmp_path))
    tuned_tiles.forget()
    assert cli.main(["tune", "--workloads", "tri128", "--budget", "20"]) == 0
    assert "tri128, bfloat16" in capsys.readouterr().out
    tuned_tiles.forget()
