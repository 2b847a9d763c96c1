"""The benchmark of training steps, its inputs and its table, without a client and without a GPU."""

import contextlib
import dataclasses
import io
import json
import lzma
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import prediction_features
import prediction_page
import prediction_ways
import pytest
import torch
from prediction_features import cropped, packed, unpacked
from prediction_programs import PROGRAMS
from prediction_ways import failure
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training_parts import Clock, covered
from training_programs import TRAINED
from training_steps import Training, measure, show


@pytest.fixture(scope="module")
def features() -> dict[str, Tensor]:
    """A batch of Boltz-2: 152 tokens."""
    return unpacked("boltz2", 152, torch.device("cpu"))


@pytest.mark.parametrize("tokens", [24, 76, 152])
def test_a_crop_has_the_atoms_of_its_tokens_in_whole_windows(features: dict[str, Tensor], tokens: int) -> None:
    crop = cropped(features, tokens)
    owners = features["atom_to_token"][0].argmax(-1)
    real = int(((owners < tokens) & features["atom_pad_mask"][0].bool()).sum())
    atoms = crop["atom_pad_mask"].shape[1]
    assert crop["atom_pad_mask"][0, :real].all() and crop["atom_pad_mask"].sum() == real, "atoms of other tokens are masked"
    assert crop["atom_resolved_mask"].sum() == real and crop["atom_resolved_mask"].dtype == torch.bool
    assert atoms % 32 == 0 and 0 <= atoms - real < 32
    assert crop["atom_to_token"].shape == (1, atoms, tokens) and crop["token_to_rep_atom"].shape == (1, tokens, atoms)
    assert crop["contact_conditioning"].shape == (1, tokens, tokens, 5) and crop["coords"].shape == (1, 1, atoms, 3)


def test_a_crop_is_no_longer_than_its_features(features: dict[str, Tensor]) -> None:
    with pytest.raises(ValueError, match="a crop of 153 tokens: the features have 152"):
        cropped(features, 153)


def test_the_drawn_alignment_and_atoms_are_the_same_each_time(features: dict[str, Tensor]) -> None:
    first, second = (TRAINED["boltz2"].draw(cropped(features, 24), 5) for _ in range(2))
    for name in ("msa", "msa_mask", "msa_paired", "deletion_value", "has_deletion"):
        assert first[name].shape == (1, 5, 24) and torch.equal(first[name], second[name])
    assert first["msa"].min() >= 2 and first["msa"].max() <= 21 and first["msa"].dtype == features["msa"].dtype
    assert first["coords"].std() > 5 and torch.equal(first["coords"], second["coords"])
    assert first["template_restype"].shape == (1, 1, 24, 33)


def test_features_are_packed_without_a_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large = torch.zeros(1, 1024, 1024, dtype=torch.int64)
    large[0, range(1024), range(1024)] = torch.arange(1024)
    features = {
        "sparse": large,
        "same": torch.tensor([0.0, 1.0, 0.0]).expand(1, 40, 40, 3).contiguous(),
        "empty": torch.zeros(1, 4, 0, dtype=torch.int64),
        "dense": torch.rand(3, 5),
        "nan": torch.full((4,), torch.nan),
    }
    arrays = packed(features)
    kept = torch.load(io.BytesIO(lzma.decompress(arrays)))
    assert kept["sparse"].is_sparse and kept["same"].untyped_storage().nbytes() == 3 * 4 and not kept["dense"].is_sparse
    monkeypatch.setattr(prediction_features, "FEATURES", tmp_path)
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "7.pt.xz").write_bytes(arrays)
    batch = unpacked("toy", 7, torch.device("cpu"))
    assert batch.keys() == features.keys() and all(x.is_contiguous() for x in batch.values())
    torch.testing.assert_close(batch, features, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "out of memory"),
        (RuntimeError("CUDA error: out of memory\nCompile with ..."), "out of memory"),
        (RuntimeError("cuBLAS error: CUBLAS_STATUS_ALLOC_FAILED when calling"), "out of memory"),
        (ValueError("no such\nthing"), "ValueError: no such"),
        (AssertionError(), "AssertionError: "),
    ],
)
def test_each_kind_of_missing_memory_is_called_the_same(error: Exception, words: str) -> None:
    assert failure(error) == words


class Trunk(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4)])


class Toy(nn.Module):
    """A model with the parts that a step touches."""

    def __init__(self) -> None:
        super().__init__()
        self.pairformer_module, self.scale = Trunk(), 1.0

    def configure_optimizers(self) -> tuple[list[torch.optim.Optimizer], list[Any]]:
        return [torch.optim.AdamW(self.parameters(), lr=0.0)], []


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Training:
    """A training whose patched way is off by a tenth, and whose cuEquivariance finds no memory."""
    model = Toy()

    def kernels(model: Any, on: bool) -> None:
        model.scale = float("nan") if on else 1.0

    def loss_of(model: Any, features: Mapping[str, Any], copies: int) -> Tensor:
        if model.scale != model.scale:
            raise torch.OutOfMemoryError("CUDA out of memory")
        loss: Tensor = model.scale * model.pairformer_module.layers[0](features["x"]).square().sum()
        return loss

    @contextlib.contextmanager
    def patched(name: str, **_: bool) -> Iterator[None]:
        assert name == "boltz"
        model.scale = 1.1
        yield
        model.scale = 1.0

    monkeypatch.setattr(prediction_ways, "left_out", lambda program, chosen: {})
    monkeypatch.setattr("evoattn.patch", patched)
    program = dataclasses.replace(PROGRAMS["boltz2"], kernels=kernels)
    trained = dataclasses.replace(TRAINED["boltz2"], program=program, loss=loss_of)
    return Training(trained, model, torch.device("cpu"), 2, 64)


def test_ways_of_training_are_measured_and_compared(toy: Training) -> None:
    features = {"x": torch.rand(3, 4), "has_deletion": torch.zeros(1, 5, 24)}
    before = [x.clone() for x in toy.model.parameters()]
    installed, kernels, patched = measure(toy, features, ["as installed", "cuEquivariance", "evoattn.patch"])
    assert installed["tokens"] == 24 and installed["rows"] == 5 and installed["blocks"] == 64
    assert installed["ms"] > 0 and set(installed["stages"]) == {"forward", "backward", "optimizer"}
    assert installed["from_installed"] == {"loss": 0.0, "first block": 0.0, "gradient norm": 0.0}
    assert kernels["failed"] == "out of memory" and "cuEquivariance  out of memory" in show(kernels)
    assert all(x == pytest.approx(0.1, rel=0.05) for x in patched["from_installed"].values())
    assert "24 tokens, evoattn.patch" in show(patched)
    assert f"from installed: loss {patched['from_installed']['loss']:.1e}" in show(patched)
    assert all(torch.equal(x, y) for x, y in zip(before, toy.model.parameters(), strict=True)), "the rate is 0"
    assert all(x.grad is None for x in toy.model.parameters()), "gradients do not stay"


def a_case(**changes: Any) -> dict[str, Any]:
    stages = {"forward": 300.0, "backward": 590.0, "optimizer": 10.0}
    case = {"program": "Boltz-2", "tokens": 384, "rows": 1024, "blocks": 64, "way": "as installed", "ms": 900.0}
    return case | {"peak_gib": 20.0, "stages": stages, "from_installed": {"loss": 0.0}} | changes


def test_the_page_shows_training_beside_predictions(tmp_path: Path) -> None:
    assert prediction_page.blocks(tmp_path) == {"predictions": "Not measured yet.", "training": "Not measured yet."}
    failed = a_case(tokens=640, failed="out of memory")
    del failed["ms"], failed["stages"], failed["from_installed"], failed["peak_gib"]
    cases = [failed, a_case(tokens=640, way="evoattn.patch"), a_case(way="evoattn.patch", ms=300.0), a_case()]
    machine = {"device": "a card", "torch": "2.11", "date": "2026-11-27", "commit": "abc"}
    (tmp_path / "training").mkdir()
    (tmp_path / "training" / "card.json").write_text(json.dumps({"machine": machine, "cases": cases}))
    text = prediction_page.blocks(tmp_path)["training"]
    assert text.startswith("Boltz-2, 64 blocks, 1,024 sequences:\n")
    head = "| card | tokens | way | ms | times as fast | peak GiB | forward | backward | optimizer | loss differs by | record |"
    assert head in text
    assert "| a | 384 | evoattn.patch | 300 | 3.00 | 20.0 | 300 | 590 | 10 | 0.0e+00 | card |" in text
    assert "| a | 640 | as installed | out of memory | - | - | - | - | - | - | card |" in text
    assert "| a | 640 | evoattn.patch | 900 | - | 20.0 |" in text, "there is nothing to compare with"


def test_the_page_shows_programs_apart(tmp_path: Path) -> None:
    cases = [
        a_case(ms=90.0),
        a_case(program="OpenFold-3", blocks=48),
        a_case(program="OpenFold-3", blocks=48, way="evoattn.patch"),
    ]
    record = {"machine": {"device": "a card", "torch": "2.11", "date": "2026-11-29", "commit": "abc"}, "cases": cases}
    first, second = prediction_page.training_block({tmp_path / "a.json": record}).split(
        "OpenFold-3, 48 blocks, 1,024 sequences:"
    )
    assert "Boltz-2, 64 blocks, 1,024 sequences:" in first and "| 384 | as installed | 90 | 1.00 |" in first
    assert "| 384 | evoattn.patch | 900 | 1.00 |" in second, "it is compared with its own program"


class Checkpointed(Trunk):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        y: Tensor = checkpoint(self.layers[0], x, use_reentrant=False)
        return scale * y


def test_parts_of_a_step_have_their_times() -> None:
    """A part that is called by name, without gradients too. Its layer is computed again by the checkpoint alone."""
    model = Toy()
    model.pairformer_module, model.msa_module = Checkpointed(), Trunk()
    before = [x.grad for x in model.parameters()]
    with Clock(model, TRAINED["boltz2"].parts, torch.device("cpu")) as clock:
        x = torch.rand(3, 4, requires_grad=True)
        with torch.no_grad():
            model.pairformer_module(x)
        y = model.pairformer_module(x=x.exp(), scale=2.0)
        clock.in_backward = True
        y.square().sum().backward()
        clock.in_backward = False
        times = clock.ms()
    assert times.keys() == {"trunk"}, "the other module was not called"
    assert all(ms > 0 for ms in times["trunk"].values()), times
    assert times["trunk"]["again"] < times["trunk"]["backward"]
    assert before == [None] * 4 and not model.pairformer_module._forward_hooks


def test_spans_that_overlap_count_once() -> None:
    assert covered([(5, 6), (0, 2), (1, 3), (1, 2)]) == 4 and covered([]) == 0


def test_the_page_has_the_newest_steps_of_a_card(tmp_path: Path) -> None:
    """Of one day, steps alone are newer than steps whose parts were measured."""
    machine = {"device": "a card", "torch": "2.11", "date": "2026-11-29", "commit": "abc"}
    parts = {"trunk": {"forward": 1.0, "backward": 2.0, "again": 0.5}}
    by_part = [a_case(ms=950.0, parts=parts), a_case(tokens=640, ms=3000.0, parts=parts), a_case(way="evoattn.patch", ms=700.0)]
    alone = [a_case(), a_case(way="evoattn run", ms=450.0), a_case(tokens=640, way="evoattn run", ms=1000.0)]
    old = [a_case(ms=2000.0), a_case(way="cuEquivariance", ms=600.0)]
    text = prediction_page.training_block(
        {
            tmp_path / "parts.json": {"machine": machine, "cases": by_part},
            tmp_path / "alone.json": {"machine": machine, "cases": alone},
            tmp_path / "old.json": {"machine": {**machine, "date": "2026-11-28"}, "cases": old},
        }
    )
    assert [line.split(" | ")[1:5] for line in text.splitlines()[4:]] == [
        ["384", "as installed", "900", "1.00"],
        ["384", "cuEquivariance", "600", "1.50"],
        ["384", "evoattn run", "450", "2.00"],
        ["640", "as installed", "3000", "1.00"],
        ["640", "evoattn run", "1000", "3.00"],
    ]
    assert "evoattn.patch" not in text, "evoattn run is as new"
