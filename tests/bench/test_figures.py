"""What the pages show of the results is what the committed results make, and drift is seen."""

import dataclasses
import json
import shutil
from pathlib import Path
from types import ModuleType

import pytest
from layer_workloads import workload

from evoattn.bench import record as records
from tests.helpers.scripts import load

from .conftest import a_record

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def figures() -> ModuleType:
    """benchmarks/figures.py, which is a script."""
    return load("benchmarks/figures.py")


def test_the_pages_have_not_drifted_from_the_committed_results(figures: ModuleType) -> None:
    assert figures.drift(ROOT, ROOT / "benchmarks" / "results") == []


@pytest.fixture
def copy(figures: ModuleType, tmp_path: Path) -> Path:
    """A small checkout: a README, one GPU's and one CPU's results, all drawn."""
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    (tmp_path / "docs" / "figures").mkdir(parents=True)
    (tmp_path / "docs" / "clients").mkdir()
    marks = "a\n<!-- figures: begin clients -->\nold\n<!-- figures: end clients -->\n"
    marks += marks.replace("clients", "predictions") + marks.replace("clients", "training")
    (tmp_path / "docs" / "clients" / "speed.md").write_text(marks)
    names = ("layer-parts", "block-parts", "layer-times")
    marks = "".join(f"<!-- figures: begin {x} -->\nold\n<!-- figures: end {x} -->\n" for x in names)
    (tmp_path / "docs" / "layer-time.md").write_text(marks)
    (tmp_path / "docs" / "sharded.md").write_text("<!-- figures: begin sharded -->\nold\n<!-- figures: end sharded -->\n")
    text = "a\n<!-- figures: begin gpu -->\nold\n<!-- figures: end gpu -->\nb\n"
    (tmp_path / "README.md").write_text(text + "".join(text.replace("gpu", x) for x in ("cpu", "training", "predictions")))
    names = ("bench", "bench-peers", "bench-reasons")
    (tmp_path / "docs" / "benchmarks.md").write_text("".join(text.replace("gpu", x) for x in names))
    gpu, cpu = a_record(evoattn=[1.0], dense=[2.0]), a_record(evoattn=[10.0], dense=[20.0])
    gpu.problems = [
        type(p)(p.workload.at(length), "bfloat16", p.bytes, p.results) for p in gpu.problems for length in (16, 32, 64)
    ]
    cpu.machine["kind"] = "cpu"
    records.write(gpu, results / "card.json")
    records.write(cpu, results / "cpu-x.json")
    figures.draw(tmp_path, results)
    return tmp_path


def drift(figures: ModuleType, copy: Path) -> str:
    return "\n".join(figures.drift(copy, copy / "benchmarks" / "results"))


def test_drawing_makes_every_page(figures: ModuleType, copy: Path) -> None:
    assert drift(figures, copy) == ""
    page = (copy / "docs" / "benchmarks.md").read_text()
    assert "| tri32 | **1.000** / - | 2.000 / - | 1.0 |" in page
    picture = "figures/bench-card-bfloat16-ceilings.png"
    assert f"![The share of the device's lowest ceiling that evoattn reaches, by workload]({picture})" in page
    readme = (copy / "README.md").read_text()
    assert readme.startswith("a\n<!-- figures: begin gpu -->\na machine, bfloat16, every result checked against float64 first")
    assert "| tri16 | **10.000** / - | 20.000 / - | 1.0 |\n<!-- figures: end cpu -->\nb\n" in readme and "old" not in readme
    assert "ceilings.png" not in readme, "the README shows speed-ups, the page the rest too"
    assert sorted(path.name for path in (copy / "docs" / "figures").iterdir()) == [
        "bench-card-bfloat16-ceilings.png",
        "bench-card-bfloat16-length.png",
        "bench-card-bfloat16-speedups.png",
    ]


def test_a_changed_result_is_drift(figures: ModuleType, copy: Path) -> None:
    path = copy / "benchmarks" / "results" / "card.json"
    path.write_text(path.read_text().replace(" 2.0\n", " 1.5\n"))
    drifts = drift(figures, copy)
    for name in ("docs/benchmarks.md is not", "bench-card-bfloat16-ceilings.png was not drawn"):
        assert name in drifts


def test_an_edited_page_or_another_picture_is_drift(figures: ModuleType, copy: Path) -> None:
    page = copy / "docs" / "benchmarks.md"
    page.write_text(page.read_text().replace("1.000", "0.900"))
    assert drift(figures, copy).startswith("docs/benchmarks.md is not what the results make it")
    figures.draw(copy, copy / "benchmarks" / "results")
    folder = copy / "docs" / "figures"
    shutil.copy(folder / "bench-card-bfloat16-length.png", folder / "bench-old-bfloat16-length.png")
    assert "bench-old-bfloat16-length.png has no results any more" in drift(figures, copy)
    (folder / "bench-card-bfloat16-length.png").write_bytes(b"another picture")
    assert "bench-card-bfloat16-length.png was not drawn from these results" in drift(figures, copy)
    figures.draw(copy, copy / "benchmarks" / "results")
    assert drift(figures, copy) == ""


def a_layer() -> records.Problem:
    """A layer's times, as a GPU has them."""
    times = {"forward": [1.0], "both": [3.0], "graph_forward": [0.5], "graph_both": [2.0]}
    fused = records.Result("evoattn", peak_bytes=1 << 30, times={name: records.Timing(tuple(ms)) for name, ms in times.items()})
    dense = records.Result("written", times={"forward": records.Timing((2.0,))})
    return records.Problem(workload("layer768"), "bfloat16", 1000, [fused, dense])


def test_layers_and_their_parts_have_tables(figures: ModuleType, copy: Path) -> None:
    results = copy / "benchmarks" / "results"
    page = copy / "docs" / "layer-time.md"
    assert page.read_text().count("Not measured yet.") == 3
    records.write(dataclasses.replace(a_record(), problems=[a_layer()]), results / "a-layers.json")
    times = {"norm": [0.1, 0.2], "projections": [0.3, 0.4], "attention": [1.0, 2.0], "gate and output": [0.1, 0.1]}
    ways = {"written": {**times, "whole": [1.75, 3.0]}, "evoattn": {**times, "whole": [1.5, 2.5]}}
    parts = {
        "machine": {"device": "a card"},
        "graphs": True,
        "layers": [{"workload": "layer768", "dtype": "bfloat16", "ways": ways}],
    }
    (results / "layers").mkdir()
    (results / "layers" / "card.json").write_text(json.dumps(parts))
    assert "docs/layer-time.md is not" in drift(figures, copy)
    figures.draw(copy, results)
    assert drift(figures, copy) == ""
    text = page.read_text()
    assert "| `layer768` | as models write it | 0.100 / 0.200 | 0.300 / 0.400 | 1.000 / 2.000 |" in text
    assert "| 0.250 / 0.300 | 1.750 / 3.000 |" in text, "what the whole takes beyond its parts"
    head = "| layer | evoattn.nn | as models write it, evoattn inside | evoattn.nn, eager | GiB, evoattn.nn |"
    assert head in text
    assert "| `layer768` | 0.500 / 2.000 | - / - | **1.000** / 3.000 | 1.00 |" in text
    page = (copy / "docs" / "benchmarks.md").read_text()
    assert "| tri32 |" in page and "layer768" not in page, "layers have a page of their own"


def test_each_card_has_a_table_of_its_layers(figures: ModuleType, copy: Path) -> None:
    for device in ("card A", "card B"):
        record = dataclasses.replace(a_record(), problems=[a_layer()])
        record.machine["device"] = device
        records.write(record, copy / "benchmarks" / "results" / f"{device[-1].lower()}-layers.json")
    figures.draw(copy, copy / "benchmarks" / "results")
    text = (copy / "docs" / "layer-time.md").read_text()
    assert text.index("### card A, bfloat16") < text.index("### card B, bfloat16")
    assert text.count("| `layer768` | 0.500 / 2.000 |") == 2


def test_peers_and_missing_times_have_parts_of_the_page(figures: ModuleType, copy: Path) -> None:
    """A reason names its dtype if another dtype has none. A peer that was not installed is left out."""
    results = copy / "benchmarks" / "results"
    page = copy / "docs" / "benchmarks.md"
    assert page.read_text().count("None yet.") == 2
    record = a_record(evoattn=[1.0])
    refused = records.Result("trifast", status="refused", reason="takes `bfloat16`")
    record.problems[0].results += [refused, records.Result("flex", status="absent", reason="not installed")]
    (results / "peers").mkdir()
    records.write(record, results / "peers" / "card.json")
    figures.draw(copy, results)
    assert "| tri16 | 1.000 / - | 1.0 |" in page.read_text()
    assert "- TriFast, all in float32: refused: `takes bfloat16`" in page.read_text()
    assert "not installed" not in page.read_text()


def test_records_of_several_gpus_have_a_table(figures: ModuleType, copy: Path) -> None:
    page, results = copy / "docs" / "sharded.md", copy / "benchmarks" / "results"
    assert "Not measured yet." in page.read_text()
    (results / "sharded").mkdir()
    shutil.copy(ROOT / "benchmarks" / "results" / "sharded" / "h100-x2.json", results / "sharded" / "card-x2.json")
    assert "docs/sharded.md is not" in drift(figures, copy)
    figures.draw(copy, results)
    assert drift(figures, copy) == ""
    assert "`card-x2.json`:\n\n- NVIDIA H100" in page.read_text()
    assert "| 512 | inference | 4.5 | 4.3 | 0.9 | 9.2 | 9.1 | 0.5 | 25% | 1.22 |" in page.read_text()


def test_prose_is_wrapped_and_a_table_is_not(figures: ModuleType) -> None:
    row = f"| {'cell ' * 30}|"
    first, second = " ".join(["word"] * 19), " ".join(["word"] * 11)
    assert figures.wrapped(f"- {first} {second}\n{row}") == f"- {first}\n  {second}\n{row}"


def test_a_page_without_its_marks(figures: ModuleType) -> None:
    with pytest.raises(ValueError, match="no part 'gpu' is marked"):
        figures.with_blocks("nothing", {"gpu": "x"})


def test_speed_ups_are_against_the_fastest_peer_that_solves_the_problem(figures: ModuleType) -> None:
    """The record's own times give each label; a kernel that leaves the bias out is no peer."""
    part = next(part for part in figures.parts(ROOT / "benchmarks" / "results") if part.name == "h200-bfloat16")
    (axes,) = figures.plots.speedups(part.record, part.problems).axes
    names = [label.get_text() for label in axes.get_yticklabels()]
    texts = [text.get_text() for text in axes.texts]
    longest = [float(text.partition("x")[0]) for text in texts[::2]]
    assert longest == sorted(longest, reverse=True), "the largest speed-up of the forward comes first"
    for turn, name in enumerate(("forward", "backward")):
        problem = next(problem for problem in part.problems if problem.workload.name == "tri397")
        times = {r.name: r.times[name].median_ms for r in problem.results if name in r.times}
        peers = {peer: time for peer, time in times.items() if peer not in ("evoattn", "evoattn/triton", "flash_unbiased")}
        fastest = min(peers, key=lambda peer: peers[peer])
        number, _, title = texts[2 * names.index("tri397") + turn].partition("  ")
        assert number == f"{peers[fastest] / times['evoattn']:.2f}x"
        assert title.lower().startswith(fastest[:4])
