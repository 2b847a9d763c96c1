"""The user's table of tiles: who wins, what it is good for, and that a bad file costs a warning and nothing else."""

import dataclasses
import json
import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import evoattn
from evoattn.backends import AUTO_ORDER
from evoattn.backends.tiled.sizes import tiled_plan
from evoattn.backends.triton.tiles.backward import backward_tiles
from evoattn.backends.triton.tiles.few import few_tiles
from evoattn.backends.triton.tiles.forward import forward_tiles
from evoattn.core import tuned_tiles
from evoattn.core.config import Config
from evoattn.core.problem import Needs, Problem
from tests.helpers import seams

ON_CPU = Problem("cpu", None, torch.float32, b=1, n=64, h=4, lq=64, lk=64, d=32, c=32, mask=True, pair_bias=torch.float32)
ON_GPU = dataclasses.replace(ON_CPU, device="cuda", capability=(9, 0), dtype=torch.bfloat16, lq=384, lk=384, n=384)
SHARED = 232448


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_table_of_the_user: None) -> Iterator[Path]:
    """An empty folder for tables, and a GPU by name."""
    monkeypatch.setenv("EVOATTN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(tuned_tiles, "_device", lambda on_cpu: "cpu Some Processor" if on_cpu else "NVIDIA Some GPU")
    tuned_tiles.forget()
    yield tmp_path / "cache"
    tuned_tiles.forget()


def save(problem: Problem, backend: str, direction: str, **config: int) -> Path:
    return tuned_tiles.save({tuned_tiles.key(backend, direction, problem): {"config": config}}, problem.device == "cpu")


def test_without_a_file_the_built_in_tables_choose(folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tuned_tiles.tuned("tiled", "both", ON_CPU) is None
        assert tuned_tiles.preferred("tiled", "both", ON_CPU, Config()) == Config()
    assert not folder.exists(), "looking writes nothing"


def test_a_find_is_used_where_the_user_sets_nothing() -> None:
    before = tiled_plan(ON_CPU, Config())
    save(ON_CPU, "tiled", "both", score_bytes=1 << 20)
    assert tiled_plan(ON_CPU, Config()).score_bytes == 1 << 20 != before.score_bytes
    assert tiled_plan(ON_CPU, Config(score_bytes=1 << 21)).score_bytes == 1 << 21, "what the user sets stands"
    with tuned_tiles.ignored():
        assert tiled_plan(ON_CPU, Config()) == before
    assert tiled_plan(ON_CPU, Config()).score_bytes == 1 << 20


def test_the_triton_tables_look_too() -> None:
    before = backward_tiles(ON_GPU, Config(), SHARED)
    save(ON_GPU, "triton", "forward", block_q=64, block_k=64, num_warps=8, num_stages=2)
    save(ON_GPU, "triton", "backward", block_q=32, block_k=64, num_warps=4, num_stages=2)
    forward = forward_tiles(ON_GPU, Config(), SHARED)
    assert dataclasses.astuple(forward) == (64, 64, 8, 2, 1, 0)
    assert forward_tiles(ON_GPU, Config(block_q=32), SHARED).num_warps != 8, "a config of the user's replaces all of it"
    backward = backward_tiles(ON_GPU, Config(), SHARED)
    assert {(tiles.block_q, tiles.block_k) for tiles in (backward.dq, backward.dkdv, backward.pair)} == {(32, 64)}
    with tuned_tiles.ignored():
        assert backward_tiles(ON_GPU, Config(), SHARED) == before
    other = dataclasses.replace(ON_GPU, d=64, c=64)
    assert dataclasses.astuple(forward_tiles(other, Config(), SHARED)) != (64, 64, 8, 2, 1, 0)


def test_few_queries_and_keys_ask_no_table() -> None:
    """A find for 16 queries and 16 keys is kept under the same key as one query's."""
    point = dataclasses.replace(ON_GPU, lq=1, lk=16, pair_bias=None)
    before = few_tiles("forward", point, Config())
    save(dataclasses.replace(point, lq=16), "triton", "forward", block_q=16)
    assert tuned_tiles.tuned("triton", "forward", point) is not None
    assert few_tiles("forward", point, Config()) == before is not None
    assert few_tiles("forward", point, Config(block_q=16)) is None
    assert tuned_tiles.is_tuned("triton", "forward", dataclasses.replace(point, lq=16), Config())
    assert not tuned_tiles.is_tuned("triton", "forward", dataclasses.replace(point, lq=16), Config(block_q=16))


def test_the_forward_finds_what_was_saved_for_the_described_call() -> None:
    """The Triton forward plans from a Problem without device, and with any key bias as a mask."""
    save(ON_GPU, "triton", "forward", block_q=16)
    planned = dataclasses.replace(ON_GPU, device="", mask=False, mask_bias=torch.float32)
    assert tuned_tiles.tuned("triton", "forward", planned) == Config(block_q=16)


SAME = {
    "length": {"lq": 400, "lk": 400},
    "rows": {"n": 500},
    "a gate": {"gate": True},
    "gradients of q": {"needs": Needs(True, True, True)},
}
OTHER = {
    "length": {"lq": 513, "lk": 513},
    "channels": {"d": 16},
    "value channels": {"c": 16},
    "dtype": {"dtype": torch.float16},
    "no pair bias": {"pair_bias": None},
    "no mask": {"mask": False},
    "one row": {"n": 1},
    "ragged": {"lk": 397},
}


def key(direction: str, **change: Any) -> str:
    return tuned_tiles.key("triton", direction, dataclasses.replace(ON_GPU, **change))


@pytest.mark.parametrize("change", SAME.values(), ids=SAME)
def test_problems_that_share_a_find(change: dict[str, object]) -> None:
    assert key("forward") == key("forward", **change)


@pytest.mark.parametrize("change", OTHER.values(), ids=OTHER)
def test_problems_that_do_not(change: dict[str, object]) -> None:
    assert key("forward") != key("forward", **change)


def test_a_backward_is_told_apart_by_its_sums() -> None:
    sums = [(pair, fixed) for pair in (False, True) for fixed in (False, True)]
    assert len({key("backward", needs=Needs(*(True,) * 4, pair_bias=pair), deterministic=fixed) for pair, fixed in sums}) == 4


DAMAGED = {
    "empty": "",
    "no json": "{",
    "no object": "[]",
    "another format": '{"format": 99, "machine": {}, "entries": {}}',
    "no entries": '{"format": 1, "machine": {}}',
    "an entry without a config": '{"format": 1, "machine": {}, "entries": {"a": {}}}',
    "a config of nothing": '{"format": 1, "machine": {}, "entries": {"a": {"config": {}}}}',
    "a config that is none": '{"format": 1, "machine": {}, "entries": {"a": {"config": {"block_q": "many"}}}}',
    "a field nobody knows": '{"format": 1, "machine": {}, "entries": {"a": {"config": {"colour": 1}}}}',
    "no text": b"\xff\xfe\x00\x01",
    "too deep": "[" * 100_000,
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_ignored_with_one_warning(content: str | bytes, folder: Path) -> None:
    before = tiled_plan(ON_CPU, Config())
    path = save(ON_CPU, "tiled", "both", score_bytes=1 << 20)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    tuned_tiles.forget()
    with pytest.warns(UserWarning, match=r"tuned-cpu-some-processor\.json is damaged .*: ignored") as seen:
        plans = [tiled_plan(ON_CPU, Config()) for _ in range(3)]
    assert len(seen) == 1
    assert plans == [before] * 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save(ON_CPU, "tiled", "both", score_bytes=1 << 20)  # replaces it
        assert tiled_plan(ON_CPU, Config()).score_bytes == 1 << 20


def ignored_with_one_warning(match: str) -> None:
    """The built-in table chooses, three times."""
    tuned_tiles.forget()
    with tuned_tiles.ignored():
        before = tiled_plan(ON_CPU, Config())
    with pytest.warns(UserWarning, match=match) as seen:
        assert [tiled_plan(ON_CPU, Config()) for _ in range(3)] == [before] * 3
    assert len(seen) == 1


@pytest.mark.parametrize("share", [i / 8 for i in range(1, 8)])
def test_a_truncated_file_is_ignored_with_one_warning(share: float) -> None:
    path = save(ON_CPU, "tiled", "both", score_bytes=1 << 20)
    os.truncate(path, int(path.stat().st_size * share))
    ignored_with_one_warning("is damaged")
    save(ON_CPU, "tiled", "both", score_bytes=1 << 20)
    assert tiled_plan(ON_CPU, Config()).score_bytes == 1 << 20


def test_a_file_that_cannot_be_read_is_ignored_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    save(ON_CPU, "tiled", "both", score_bytes=1 << 20)

    def refuse(*_: object, **__: object) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", refuse)
    ignored_with_one_warning("is damaged .PermissionError")


def test_a_folder_in_the_place_of_a_file_is_ignored_with_one_warning() -> None:
    path = save(ON_CPU, "tiled", "both", score_bytes=1 << 20)
    path.unlink()
    path.mkdir()
    ignored_with_one_warning("is damaged .IsADirectoryError")


def test_saving_makes_a_deleted_folder_again(folder: Path) -> None:
    save(ON_CPU, "tiled", "both", score_bytes=1 << 20)
    shutil.rmtree(folder)
    assert tuned_tiles.clear(on_cpu=True) is None
    save(ON_CPU, "tiled", "both", score_bytes=1 << 21)
    assert tiled_plan(ON_CPU, Config()).score_bytes == 1 << 21


@pytest.mark.parametrize("field", ["device", "driver", "triton", "evoattn"])
def test_a_foreign_file_is_ignored_with_one_warning(field: str) -> None:
    path = save(ON_GPU, "triton", "forward", block_q=16)
    data = json.loads(path.read_text())
    data["machine"][field] = "another"
    path.write_text(json.dumps(data))
    tuned_tiles.forget()
    with pytest.warns(UserWarning, match=f"was made with {field} another, this is .*: ignored") as seen:
        tiles = [tuned_tiles.tuned("triton", "forward", ON_GPU) for _ in range(3)]
    assert len(seen) == 1
    assert tiles == [None] * 3


def test_saving_adds_and_is_whole_or_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(ON_CPU, "tiled", "both", score_bytes=1 << 20)
    longer = dataclasses.replace(ON_CPU, lq=512, lk=512)
    save(longer, "tiled", "both", score_bytes=1 << 21)
    assert tuned_tiles.tuned("tiled", "both", ON_CPU) == Config(score_bytes=1 << 20)
    assert tuned_tiles.tuned("tiled", "both", longer) == Config(score_bytes=1 << 21)
    before = path.read_text()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        save(ON_CPU, "tiled", "both", score_bytes=1 << 22)
    assert path.read_text() == before
    assert [file.name for file in folder.iterdir()] == [path.name]


def test_clear_removes_the_table_of_the_user(folder: Path) -> None:
    path = save(ON_CPU, "tiled", "both", score_bytes=1 << 20)
    assert tuned_tiles.clear(on_cpu=True) == path
    assert tuned_tiles.tuned("tiled", "both", ON_CPU) is None
    assert tuned_tiles.clear(on_cpu=True) is None


def test_an_empty_variable_means_no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    save(ON_CPU, "tiled", "both", score_bytes=1 << 20)
    monkeypatch.setenv("EVOATTN_CACHE_DIR", "")
    assert tuned_tiles.tuned("tiled", "both", ON_CPU) is None
    assert tuned_tiles.path(on_cpu=True) is None
    with pytest.raises(ValueError, match="EVOATTN_CACHE_DIR is empty"):
        save(ON_CPU, "tiled", "both", score_bytes=1 << 20)


def test_without_a_gpu_there_is_no_table_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    save(ON_GPU, "triton", "forward", block_q=16)
    monkeypatch.setattr(tuned_tiles, "_device", lambda on_cpu: None)
    tuned_tiles.forget()
    assert tuned_tiles.tuned("triton", "forward", ON_GPU) is None


def test_each_of_two_kinds_of_gpu_has_its_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever was the current one when a table was first looked for."""
    save(ON_GPU, "triton", "forward", block_q=16)
    assert tuned_tiles.tuned("triton", "forward", ON_GPU) == Config(block_q=16)
    monkeypatch.setattr(tuned_tiles, "_device", lambda on_cpu: "NVIDIA Another GPU")
    assert tuned_tiles.tuned("triton", "forward", ON_GPU) is None
    save(ON_GPU, "triton", "forward", block_q=32)
    assert tuned_tiles.tuned("triton", "forward", ON_GPU) == Config(block_q=32)


def test_the_current_gpu_is_asked_for_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    names = iter(("one", "other"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: next(names))
    assert [tuned_tiles._device(on_cpu=False) for _ in range(2)] == ["one", "other"]


def test_a_home_that_cannot_be_entered_or_is_not_known_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs as a user it does not know."""
    q = torch.randn(1, 2, 3, 1, 4)

    def refuse(*_: object, **__: object) -> bool:
        raise PermissionError(13, "Permission denied")

    def unknown() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for attribute, value in (("exists", refuse), ("home", staticmethod(unknown))):
        with monkeypatch.context() as patch:
            patch.delenv("EVOATTN_CACHE_DIR")
            patch.delenv("XDG_CACHE_HOME", raising=False)
            patch.setattr(Path, attribute, value)
            seams.forget()
            assert evoattn.evoformer_attention(q, q, q, backend="tiled").isfinite().all()
            assert tuned_tiles.clear(on_cpu=True) is None


def test_the_folder_follows_the_system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("EVOATTN_CACHE_DIR")
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tuned_tiles.path(on_cpu=True) == tmp_path / "evoattn" / "tuned-cpu-some-processor.json"


def test_explain_says_that_a_find_is_used() -> None:
    q = torch.randn(1, 64, 64, 4, 32)
    mask, pair_bias = torch.ones(1, 64, 64, dtype=torch.bool), torch.randn(1, 1, 4, 64, 64)
    plain = evoattn.explain(q, q, q, mask=mask, pair_bias=pair_bias)
    assert plain.tuned == () and "tuned" not in str(plain)
    expected = evoattn.evoformer_attention(q, q, q, mask=mask, pair_bias=pair_bias)
    save(plain.problem, "tiled", "both", score_bytes=1 << 18)
    tuned = evoattn.explain(q, q, q, mask=mask, pair_bias=pair_bias)
    assert tuned.tuned == ("both",)
    assert tuned.config is not None and tuned.config.score_bytes == 1 << 18
    assert "tuned    both: found by evoattn tune on this machine" in str(tuned)
    explicit = evoattn.explain(q, q, q, mask=mask, pair_bias=pair_bias, config=Config(score_bytes=1 << 19))
    assert explicit.tuned == () and explicit.config is not None and explicit.config.score_bytes == 1 << 19
    torch.testing.assert_close(evoattn.evoformer_attention(q, q, q, mask=mask, pair_bias=pair_bias), expected)


@pytest.mark.parametrize("backend", [name for name in AUTO_ORDER if name != "hopper"])  # its tiles are fixed
def test_every_backend_of_auto_asks_for_finds(backend: str) -> None:
    """`evoattn tune` saves for whatever `auto` takes: a backend that never looks would make that a lie."""
    sources = "".join(path.read_text() for path in Path(evoattn.__file__).parent.glob(f"backends/{backend}/**/*.py"))
    assert f'tuned_tiles.preferred("{backend}", ' in sources
