"""Structures that are written beside the next prediction: when, which, and that none is lost."""

import importlib.util
import pathlib
import subprocess
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from evoattn.clients import parent, running, writing
from evoattn.clients.site import Count


class Writer:
    """Boltz' writer, as far as it matters here."""

    def __init__(self, embeddings: bool = False) -> None:
        self.write_embeddings, self.written = embeddings, list[Any]()

    def write_on_batch_end(self, trainer: Any, module: Any, prediction: Any, indices: Any, batch: Any, *number: int) -> None:
        if prediction.get("fails"):
            raise OSError("the disk is full")
        self.written.append((number, prediction, batch))

    def on_predict_epoch_end(self, trainer: Any, module: Any) -> None:
        self.written.append("end")


write = writing.later(Writer.write_on_batch_end, Count())
at_end = writing.write_first(Writer.on_predict_epoch_end, Count())
sample = writing.then_write(lambda x: x, Count())


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Predictions are on a GPU."""
    monkeypatch.setattr(writing, "_is_on_gpu", lambda x: isinstance(x, torch.Tensor))
    monkeypatch.setattr(writing, "_write_at_exit", lambda: None)
    yield
    writing._waiting.clear()


def trainer(last: bool = False, predicting: bool = True) -> Any:
    progress = types.SimpleNamespace(is_last_batch=last)
    return types.SimpleNamespace(predicting=predicting, predict_loop=types.SimpleNamespace(batch_progress=progress))


def prediction(**more: Any) -> dict[str, Any]:
    scores = torch.tensor([0.3, 0.7])
    return {"exception": False, "coords": torch.ones(2, 4, 3), "z": torch.ones(9), "confidence_score": scores} | more


def test_a_structure_is_written_after_the_next_sampling() -> None:
    writer = Writer()
    write(writer, trainer(), None, prediction(pair_chains_iptm={0: {0: torch.ones(1)}}), [0], {"record": ["a"], "x": 1}, 0, 0)
    assert writer.written == []
    assert sample(5) == 5
    ((number, written, batch),) = writer.written
    assert number == (0, 0) and batch == {"record": ["a"]}
    assert "z" not in written and written["pair_chains_iptm"][0][0].device.type == "cpu"
    sample(5)
    assert len(writer.written) == 1


def test_representations_are_kept_if_they_are_written() -> None:
    writer = Writer(embeddings=True)
    write(writer, trainer(), None, prediction(), [0], {"record": ["a"]}, 0, 0)
    sample(5)
    assert "z" in writer.written[0][1]


def test_no_structure_is_left_when_the_next_one_comes_or_all_are_done() -> None:
    """The second prediction runs out of memory before its sampling."""
    writer = Writer()
    write(writer, trainer(), None, prediction(), [0], {"record": ["a"]}, 0, 0)
    write(writer, trainer(), None, {"exception": True}, [1], {"record": ["b"]}, 1, 0)
    assert [x[0][0] for x in writer.written] == [0, 1]
    write(writer, trainer(), None, prediction(), [2], {"record": ["c"]}, 2, 0)
    at_end(writer, None, None)
    assert writer.written[-2][0] == (2, 0) and writer.written[-1] == "end"


@pytest.mark.parametrize(
    ("of", "found"),
    [
        (trainer(last=True), prediction()),
        (trainer(predicting=False), prediction()),
        (None, prediction()),
        (trainer(), prediction(coords=None)),
        (trainer(), prediction(confidence_score=torch.tensor([0.5, 0.5]))),
    ],
    ids=["last", "no prediction", "no trainer", "not on a GPU", "equal scores"],
)
def test_others_are_written_at_once(of: Any, found: dict[str, Any]) -> None:
    writer = Writer()
    write(writer, of, None, found, [0], {"record": ["a"]}, 0, 0)
    assert len(writer.written) == 1 and writer.written[0][1] is found


def test_errors_of_the_writer_are_raised() -> None:
    writer = Writer()
    write(writer, trainer(), None, prediction(fails=True), [0], {"record": ["a"]}, 0, 0)
    with pytest.raises(OSError, match="the disk is full"):
        sample(5)
    sample(5)
    assert writer.written == []


def test_a_program_that_fails_writes_what_waits() -> None:
    code = """
from evoattn.clients import writing
writing._waiting.append(lambda: print("written"))
writing._write_at_exit()
raise KeyboardInterrupt
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode != 0 and done.stdout == "written\n"


def test_the_report_counts_them(tmp_path: pathlib.Path) -> None:
    tally = running.Tally(tmp_path)
    tally.add("patched", "boltz", "2.2.1")
    tally.add("call", "boltz", "", "pair block")
    for _ in range(2):
        tally.add("written later")
    assert "; 2 structures written beside the next prediction" in parent.summary(tmp_path, ("boltz",))


@pytest.mark.skipif(
    any(importlib.util.find_spec(x) is None for x in ("boltz", "modelcif", "pytorch_lightning", "rdkit")),
    reason="boltz predict is not installed",
)
def test_the_command_is_patched_by_run_alone() -> None:
    from evoattn.clients.patching import client, patch
    from evoattn.clients.releases import check_function

    of = client("boltz")
    for site in of.command:
        check_function(of, site)
    assert "boltz.data.write.writer" in parent.modules(("boltz",))
    with patch("boltz", graphs=True) as patched:
        assert not any("write" in site for site in patched.sites)
