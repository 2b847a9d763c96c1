"""What the pages show of whole predictions, and what the benchmark of them does without a GPU."""

import dataclasses
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import prediction_page
import pytest
import torch
from prediction_features import FEATURES, unpacked
from prediction_programs import LETTERS, PROGRAMS, UBIQUITIN, Denoiser, Program, _nested, tf32
from prediction_runtimes import Runtime, padded
from prediction_steps import Step
from prediction_ways import WAYS, begun, difference, keep, left_out
from predictions import Clock, Run, measure, show
from torch import Tensor, nn

from evoattn.clients import patching


def a_case(**changes: Any) -> dict[str, Any]:
    case = {"program": "Boltz-2", "residues": 152, "steps": 200, "way": "as installed", "seconds": 9.0, "peak_gib": 2.25}
    case |= {"stages": {"trunk": 2.0, "denoiser": 6.5}, "from_installed": {"distogram": 0.0}}
    return case | changes


@pytest.fixture
def records(tmp_path: Path) -> dict[Path, dict[str, Any]]:
    cases = [
        a_case(),
        a_case(way="evoattn run", seconds=3.0, from_installed={"distogram": 1.5e-3}),
        a_case(residues=988, seconds=60.0),
        a_case(residues=304, way="evoattn run", failed="OutOfMemoryError: tried 9 GiB"),
    ]
    del cases[-1]["seconds"], cases[-1]["stages"]
    machine = {"device": "a card", "torch": "2.11", "date": "2026-11-27", "commit": "abc"}
    (tmp_path / "predictions").mkdir()
    record = {"schema": 1, "machine": machine, "programs": {"boltz": "2.2.1"}, "cases": cases}
    (tmp_path / "predictions" / "card.json").write_text(json.dumps(record))
    return prediction_page.records(tmp_path)


def test_readme_compares_what_one_types_with_what_is_installed(records: dict[Path, dict[str, Any]]) -> None:
    text = prediction_page.summary(records)
    assert "| Boltz-2 2.2.1, a | 152 | 9.0 / 2.2 | - | 3.0 / 2.2 |" in text
    assert "988" not in text and "304" not in text, "there is nothing to compare with"
    assert prediction_page.summary({}) == ""


def test_readme_has_the_newest_case_of_a_card(records: dict[Path, dict[str, Any]]) -> None:
    [old] = records.values()
    cases = [a_case(way="evoattn run", seconds=1.5), a_case(way="evoattn run bf16", seconds=1.0)]
    new = {**old, "machine": {**old["machine"], "date": "2026-11-28"}, "cases": cases}
    other = {
        **new,
        "machine": {**new["machine"], "device": "NVIDIA X9 80GB"},
        "cases": [a_case(way="evoattn run", seconds=0.1)],
    }
    text = prediction_page.summary({Path("new"): new, **records, Path("other"): other})
    assert "| 9.0 / 2.2 | - | 1.50 / 2.2 |" in text and "X9" not in text
    text = prediction_page.block({Path("new.json"): new, **records})
    assert "| evoattn run | 1.50 |" in text and "| evoattn run | 3.00 |" not in text and "| as installed | 9.00 |" in text


def test_predictions_of_other_steps_are_not_compared(records: dict[Path, dict[str, Any]]) -> None:
    [record] = records.values()
    record["cases"].append(a_case(steps=20, seconds=0.1, way="evoattn run"))
    assert "| 9.0 / 2.2 | - | 3.0 / 2.2 |" in prediction_page.summary(records)
    text = prediction_page.block(records)
    assert "| evoattn run | 3.00 |" in text and "| evoattn run, 20 steps | 0.10 |" in text and text.count("Boltz-2:") == 1
    record["cases"] = [a_case(program="ESMFold", steps=None)]
    assert prediction_page.block(records).startswith("ESMFold:\n")


def test_a_way_without_graphs_is_left_out_if_one_with_graphs_is_as_new(records: dict[Path, dict[str, Any]]) -> None:
    [(path, record)] = records.items()
    record["cases"].append(a_case(way="evoattn.patch", seconds=7.0))
    assert "evoattn.patch" not in prediction_page.block(records)
    record["cases"].append(a_case(way="evoattn.patch", seconds=7.0, residues=684))
    text = prediction_page.block(records)
    assert text.count("evoattn.patch") == 1 and "| a | 684 | evoattn.patch | 7.00 |" in text, "no other way is there"
    machine = {**record["machine"], "date": "2026-11-28"}
    later = {**record, "machine": machine, "cases": [a_case(way="evoattn.patch", seconds=0.5)]}
    assert "| 152 | evoattn.patch | 0.50 |" in prediction_page.block({path: record, Path("later.json"): later})


def test_the_page_shows_stages_and_failures(records: dict[Path, dict[str, Any]]) -> None:
    text = prediction_page.block(records)
    assert "| card | residues | way | s | peak GiB | trunk | denoiser | distogram differs by | record |" in text
    assert "| a | 152 | evoattn run | 3.00 | 2.2 | 2.00 | 6.50 | 1.5e-03 | card |" in text
    assert "| a | 304 | evoattn run | OutOfMemoryError: tried 9 GiB | - | - | - | - | card |" in text
    assert text.index("| 304 |") < text.index("| 988 |")
    assert prediction_page.block({}) == "Not measured yet."


class Part(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part, self.kernels = Part(), False


def program(fails: tuple[str, ...] = ()) -> Program:
    """A program of one stage, whose answer depends on its precision and on its switch."""

    def predict(model: Any, inputs: Tensor, steps: int, recycles: int, samples: int) -> dict[str, Tensor]:
        if "kernels" in fails and model.kernels:
            raise RuntimeError("no kernel\nand more")
        if "memory" in fails and not model.kernels:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.")
        x = torch.nn.functional.linear(inputs, inputs) if torch.is_autocast_enabled("cpu") else inputs @ inputs.mT
        return {"distogram": model.part(x) + model.kernels}

    def switch(model: Any, on: bool) -> None:
        model.kernels = on

    def build(device: torch.device) -> nn.Module:
        return Model()

    def inputs(residues: int, device: torch.device) -> Tensor:
        return torch.rand(residues, residues, generator=torch.Generator().manual_seed(0))

    return Program("Toy", "toy", "pip", (4,), True, build, inputs, predict, {"part": ("part", "forward")}, switch)


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, bool]]]:
    """What `evoattn.patch` is asked for; it does nothing."""
    asked: list[dict[str, bool]] = []

    def patch(name: str, **options: bool) -> patching.Patch:
        assert name == "toy"
        asked.append(options)
        return patching.Patch()

    monkeypatch.setattr("evoattn.patch", patch)
    return asked


def test_each_way_is_measured_and_compared(patched: list[dict[str, bool]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    toy = program()
    run = Run(toy, toy.build(torch.device("cpu")), torch.device("cpu"), 3)
    cases = list(measure(run, 4, list(WAYS), exact=True))
    assert [case["way"] for case in cases] == ["as installed", "cuEquivariance", "evoattn.patch", "evoattn run"]
    assert [case["precision"] for case in cases] == [None, None, "exact", "exact"] and cases[0]["samples"] is None
    assert patched == [{"wait": True, "graphs": False}, {"wait": True}]
    assert all(case["stages"]["part"] <= case["seconds"] for case in cases)
    assert [case["from_installed"]["distogram"] > 0 for case in cases] == [False, True, False, False]
    assert 0 < cases[0]["from_float32"]["distogram"] < 0.1
    assert "forward" not in vars(run.model.part), "the clock is gone"
    assert "4 residues, cuEquivariance" in show(cases[1]) and "GiB" not in show(cases[1])


def test_a_way_that_fails_is_recorded_and_the_next_is_measured(
    patched: list[dict[str, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    toy = program(fails=("kernels",))
    run = Run(toy, toy.build(torch.device("cpu")), torch.device("cpu"), 3)
    cases = list(measure(run, 4, ["as installed", "cuEquivariance", "evoattn run"], exact=False))
    assert [case.get("failed") for case in cases] == [None, "RuntimeError: no kernel", None]
    assert show(cases[1]).endswith("RuntimeError: no kernel")


def test_a_way_without_memory_is_recorded_and_is_no_failure(
    patched: list[dict[str, bool]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    record: dict[str, Any] = {"cases": []}
    names, path = ("program", "residues", "steps", "recycles", "way"), tmp_path / "record.json"

    def kept(*fails: str) -> bool:
        toy = program(fails)
        run = Run(toy, toy.build(torch.device("cpu")), torch.device("cpu"), 3, recycles=0)
        return keep(measure(run, 4, ["as installed", "cuEquivariance"], exact=False), record, names, path, show)

    assert not kept("memory")
    first, second = json.loads(path.read_text())["cases"]
    assert first["failed"] == "out of memory" and "seconds" not in first
    assert second["way"] == "cuEquivariance" and second["seconds"] >= 0 and second["recycles"] == 0
    assert "as installed    out of memory" in capsys.readouterr().out
    assert kept("kernels") and len(record["cases"]) == 2, "any other failure is one"


def test_few_recycles_have_a_row_of_their_own(records: dict[Path, dict[str, Any]]) -> None:
    [record] = records.values()
    record["cases"].append(a_case(recycles=0, seconds=0.1, way="evoattn run"))
    assert "| 9.0 / 2.2 | - | 3.0 / 2.2 |" in prediction_page.summary(records)
    assert "| a | 152 | evoattn run, 0 recycles | 0.10 |" in prediction_page.block(records)


def test_the_clock_follows_what_a_patch_replaces(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    with Clock(model, {"part": ("part", "forward")}, torch.device("cpu")) as clock:
        monkeypatch.setattr(Part, "forward", lambda self, x: 3 * x)
        assert model.part(torch.ones(1)) == 3
    assert clock.seconds["part"] > 0


def test_a_record_of_another_commit_is_not_added_to(tmp_path: Path) -> None:
    path, device = tmp_path / "record.json", torch.device("cpu")
    path.write_text(json.dumps(begun(None, device, "one")))
    assert begun(path, device, "one")["cases"] == []
    with pytest.raises(ValueError, match="another machine or commit"):
        begun(path, device, "two")


def test_difference_is_relative() -> None:
    assert difference({"x": torch.tensor([3.0, 4.5])}, {"x": torch.tensor([3.0, 4.0])}) == {"x": 0.1}
    assert difference({"x": torch.tensor([3.0, torch.nan])}, {"x": torch.tensor([3.0, 4.0])}) == {"x": None}


def test_ways_that_a_program_does_not_have_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    boltz, esmfold = PROGRAMS["boltz2"], PROGRAMS["esmfold"]
    assert left_out(boltz, WAYS) == {
        "cuEquivariance": "cuequivariance_torch is not installed",
        "bionemo-ir": "bionemo-ir is not installed",
    }
    assert left_out(esmfold, WAYS) == {
        "cuEquivariance": "it does not call cuEquivariance",
        "bionemo-ir": "its model is not run there",
        **dict.fromkeys(("evoattn run tf32", "evoattn run bf16"), "evoattn does not compute its diffusion transformers"),
    }


def of_boltz(monkeypatch: pytest.MonkeyPatch) -> Program:
    """A program of a denoiser that another one runs too."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())

    class Copy(Model):
        def __init__(self, weights: dict[str, Tensor]) -> None:
            super().__init__()
            self.weights = weights

    def predict(model: Any, inputs: Tensor, steps: int, recycles: int, samples: int) -> dict[str, Tensor]:
        assert isinstance(model, Copy) and steps in (3, 8) and not torch.is_autocast_enabled("cpu")
        return {"coordinates": model.part(inputs).expand(samples, -1, -1)}

    runtime = Runtime(
        "runtime", "pip", "bf16", lambda model, _: Copy(model.state_dict()), lambda x: x + 1, predict, lambda _: toy.stages
    )
    toy = program()
    denoise = {"denoiser": ("part", "forward")}
    toy = dataclasses.replace(toy, client="boltz", stages=denoise, runtime=runtime)

    def own(model: Any, inputs: Tensor, steps: int, recycles: int, samples: int) -> dict[str, Tensor]:
        return {"coordinates": model.part(inputs).expand(samples, -1, -1)}

    return dataclasses.replace(toy, predict=own)


def test_samples_precision_and_another_runtime_are_recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr("evoattn.patch", lambda _, **options: asked.append(options) or patching.Patch())
    toy = of_boltz(monkeypatch)
    run = Run(toy, toy.build(torch.device("cpu")), torch.device("cpu"), 3, samples=2)
    cases = list(measure(run, 4, ["evoattn run bf16", "as installed", "bionemo-ir"], exact=False))
    facts = [(case["way"], case["precision"], case["samples"], case["steps"]) for case in cases]
    assert facts == [("as installed", None, 2, 3), ("evoattn run bf16", "bf16", 2, 3), ("bionemo-ir", "bf16", 2, 3)], cases
    assert asked == [{"wait": True, "precision": "bf16"}]
    assert cases[1]["from_installed"]["coordinates"] == 0 < cases[2]["from_installed"]["coordinates"]
    assert "4 residues, 2 samples, bionemo-ir" in show(cases[2])


def test_features_are_padded_to_a_multiple() -> None:
    features = unpacked("boltz2", 684, torch.device("cpu"))
    longer = padded(features)
    assert longer["token_pad_mask"].shape == (1, 688) and longer["token_pad_mask"].sum() == 684
    assert longer["atom_to_token"].shape == (*features["atom_to_token"].shape[:2], 688)
    assert longer["contact_conditioning"].shape == (1, 688, 688, 5)
    for name, x in features.items():
        assert torch.equal(longer[name][tuple(map(slice, x.shape))], x) and longer[name].dtype == x.dtype, name
    even = unpacked("boltz2", 152, torch.device("cpu"))
    assert all(torch.equal(x, even[name]) for name, x in padded(even).items())


def test_a_step_is_compared_with_float64(patched: list[dict[str, bool]]) -> None:
    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def step(self, x: Tensor, *, by: Any) -> Tensor:
            return self.linear(x.float()) + by.keywords["z"].float()

    model = nn.Module()
    model.part = Part()

    def predict(model: Any, inputs: Any, steps: int, recycles: int, samples: int) -> dict[str, Tensor]:
        x = inputs["x"]
        for _ in range(steps):
            x = model.part.step(x, by=functools.partial(print, z=inputs["x"]))
        return {"coordinates": x}

    inputs = {"x": torch.randn(1, 5, 3), "there": torch.tensor([[1, 1, 1, 1, 0]])}
    toy = dataclasses.replace(
        program(), predict=predict, denoiser=Denoiser("part", "step", "there"), kernels=None, autocast=False
    )
    step = Step(Run(toy, model, torch.device("cpu"), 3), inputs)
    assert step._true.dtype == torch.float64 and "step" not in vars(model.part)
    distances = [step.distance(way) for way in (WAYS["as installed"], WAYS["evoattn run"])]
    assert 0 < distances[0] < 1e-6 and distances[0] == distances[1]
    with torch.no_grad():
        model.part.linear.bias += torch.tensor([0.0, 0.3, 0.4])
    assert abs(step.distance(WAYS["as installed"]) - 0.5) < 1e-3, "in the unit of the coordinates"


def test_samples_have_a_row_of_their_own(records: dict[Path, dict[str, Any]]) -> None:
    [record] = records.values()
    record["cases"].append(a_case(samples=5, seconds=0.1, way="evoattn run"))
    assert "| 9.0 / 2.2 | - | 3.0 / 2.2 |" in prediction_page.summary(records)
    assert "| a | 152 | evoattn run, 5 samples | 0.10 |" in prediction_page.block(records)


def test_nothing_is_called_installed_but_what_is(patched: list[dict[str, bool]]) -> None:
    toy = program()
    [case] = measure(Run(toy, toy.build(torch.device("cpu")), torch.device("cpu"), 3), 4, ["evoattn run"], exact=False)
    assert "from_installed" not in case and case["steps"] is None
    assert "from" not in show(case)


def test_every_length_has_features() -> None:
    for name in ("boltz2", "openfold3", "protenix"):
        for residues in PROGRAMS[name].lengths:
            assert (FEATURES / name / f"{residues}.pt.xz").is_file()
    assert (FEATURES / "boltz2" / "2500.pt.xz").is_file()


def test_protenix_reads_chains_of_ubiquitin() -> None:
    features = PROGRAMS["protenix"].inputs(152, torch.device("cpu"))
    assert "".join(LETTERS[i] for i in features["restype"].argmax(-1)) == 2 * UBIQUITIN
    assert features["asym_id"].unique().tolist() == [0, 1]
    assert {x.device.type for x in features["constraint_feature"].values()} == {"cpu"}, "features in features are moved too"


def test_openfold3_reads_chains_of_ubiquitin() -> None:
    features = PROGRAMS["openfold3"].inputs(152, torch.device("cpu"))
    assert features["asym_id"].tolist() == [[1] * 76 + [2] * 76] and features["entity_id"].unique().tolist() == [1]
    assert features["template_distogram"].shape == (1, 4, 152, 152, 39) and features["template_distogram"].is_contiguous()
    kinds = features["restype"][0].argmax(-1)
    assert torch.equal(kinds[:76], kinds[76:]) and len(kinds.unique()) == len(set(UBIQUITIN))


def test_settings_are_read_as_protenix_reads_them() -> None:
    settings = _nested({"model": {"c_z": 8}, "sample_diffusion": {"N_step": 200}})
    settings.sample_diffusion.update(N_step=3)
    assert settings.model.c_z == settings["model"]["c_z"] == 8
    assert settings.sample_diffusion.to_dict().get("guidance") is None and settings.get("esm", {}) == {}
    assert settings.sample_diffusion["N_step"] == 3 and not hasattr(settings, "c_z")


@pytest.mark.parametrize("before", [False, True])
def test_a_program_leaves_the_precision_of_products_as_it_was(before: bool) -> None:
    matmul = torch.backends.cuda.matmul
    original, matmul.allow_tf32 = matmul.allow_tf32, before
    try:
        for on in (True, False):
            with tf32(on):
                assert matmul.allow_tf32 == on
                matmul.allow_tf32 = not before  # so does a model when it is built
            assert matmul.allow_tf32 == before
    finally:
        matmul.allow_tf32 = original
