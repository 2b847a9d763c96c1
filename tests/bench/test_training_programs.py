"""Crops and labels of the programs that are trained, without a client; and a step of a narrow model where it is installed."""

from __future__ import annotations

from typing import Any

import design_steps
import pytest
import torch
from prediction_features import moved, unpacked
from prediction_programs import merged, published
from training_parts import Clock
from training_programs import TRAINED, attribute
from training_steps import Training, measure

CPU = torch.device("cpu")
OWNERS = {"openfold3": "atom_to_token_index", "protenix": "atom_to_token_idx"}


@pytest.mark.parametrize("program", OWNERS)
def test_a_crop_has_the_atoms_of_its_tokens(program: str) -> None:
    features, axis = unpacked(program, 152, CPU), 1 if program == "openfold3" else 0
    crop, owners = TRAINED[program].crop(features, 24), features[OWNERS[program]].flatten()
    assert torch.equal(crop[OWNERS[program]].flatten(), owners[owners < 24])
    assert crop["token_bonds"].shape[axis:] == (24, 24) and crop["ref_element"].shape[axis] == int((owners < 24).sum())
    assert crop["template_distogram"].shape[axis:] == (4, 24, 24, 39), "axes of other lengths stay"
    if program == "protenix":
        assert crop["constraint_feature"]["contact"].shape == (24, 24, 2)
    with pytest.raises(ValueError, match="a crop of 153 tokens: the features have 152"):
        TRAINED[program].crop(features, 153)


@pytest.mark.parametrize("program", OWNERS)
def test_labels_and_the_alignment_are_drawn_the_same_each_time(program: str) -> None:
    first, second = (TRAINED[program].crops(24, 5) for _ in range(2))
    truth, again = first["ground_truth"], second["ground_truth"]
    atoms, mask = truth.values()
    assert atoms.std() > 5 and atoms.shape == first["ref_pos"].shape and mask.all() and mask.shape == atoms.shape[:-1]
    assert all(torch.equal(x, again[name]) for name, x in truth.items())
    assert first["has_deletion"].shape[-2:] == (5, 24) and torch.equal(first["msa"], second["msa"])
    letters = first["msa"].argmax(-1) if program == "openfold3" else first["msa"]
    assert letters.shape[-2:] == (5, 24) and len(letters.unique()) == 20 and letters.max() == 19
    assert first["msa"].dtype == unpacked(program, 152, CPU)["msa"].dtype


@pytest.mark.parametrize("program", OWNERS)
def test_training_changes_published_arguments(program: str) -> None:
    before, changes = published(program), published(program, "training")
    arguments = merged(before, changes)
    assert values_at(arguments, changes) == changes and arguments.keys() >= before.keys()
    assert published(program) == before != arguments
    assert published(program, "narrow").keys() <= names(arguments), "a name that is nowhere would change nothing"


def values_at(arguments: Any, changes: dict[str, Any]) -> dict[str, Any]:
    """What arguments have at the places of changes."""
    return {name: values_at(arguments[name], x) if isinstance(x, dict) else arguments[name] for name, x in changes.items()}


def names(arguments: dict[str, Any]) -> set[str]:
    """The names of settings at any depth."""
    return arguments.keys() | {y for x in arguments.values() if isinstance(x, dict) for y in names(x)}


def test_an_attribute_may_be_missing() -> None:
    assert attribute(torch.nn.Linear(2, 2), "weight.shape") == (2, 2)
    assert attribute(torch.nn.Linear(2, 2), "weight.none.shape") is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "needs"), [("boltz2", "pytorch_lightning"), ("openfold3", "ml_collections"), ("protenix", "rdkit")]
)
def test_a_step_of_a_narrow_model_is_the_same_when_patched(program: str, needs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = TRAINED[program]
    for package in (trained.program.client, needs):
        pytest.importorskip(package, reason=f"{package} is not installed")
    training = Training(trained, trained.narrow(CPU), CPU, 1, trained.blocks)
    before = [x.clone() for x in training.model.parameters()]
    monkeypatch.setattr("evoattn.clients.calls.few_on_cpu", lambda *_, **__: 0)  # no call is left to the client for its size
    installed, patched = measure(training, moved(trained.crops(16, 8), CPU), ["as installed", "evoattn run"])
    assert "failed" not in installed and "failed" not in patched, (installed, patched)
    assert (installed["program"], installed["tokens"], installed["rows"]) == (trained.program.title, 16, 8)
    assert all(0 < x < 0.05 for x in patched["from_installed"].values()), patched["from_installed"]
    assert all(torch.equal(x, y) for x, y in zip(before, training.model.parameters(), strict=True)), "the rate is 0"
    designed = list(measure(training, moved(trained.crops(16, 8), CPU), ["as installed", "evoattn run"], design_steps.measure))
    assert all("gradient of the sequence" in x["program"] and "failed" not in x for x in designed), designed
    assert designed[0]["stages"].keys() == {"forward", "backward"} and designed[1]["from_installed"]["sequence"] < 0.05
    assert not any(x.requires_grad or x.grad is not None for x in training.model.parameters())
    training = Training(trained, trained.narrow(CPU), CPU, 1, trained.blocks)
    with Clock(training.model, trained.parts, CPU) as clock:
        training.step(moved(trained.crops(16, 8), CPU), trained.optimizer(training.model), clock)
    assert trained.parts.keys() - clock.ms().keys() <= {"templates"}, "narrow Boltz-2 has none"
