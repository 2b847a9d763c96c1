"""`patch(graphs=True)` of a client, and which of its steps, blocks and loops are recorded."""

import dataclasses
import importlib
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import evoattn
from evoattn.clients import graphs, patching
from evoattn.clients.graphs import FIRST
from evoattn.clients.graphs.recorder import modes
from evoattn.clients.kinds import ELSEWHERE, TRANSFORMER
from evoattn.clients.registry import sources
from evoattn.clients.releases import digest
from evoattn.clients.site import Client, Count, Site
from evoattn.core import keeping
from tests.clients.recording import Block, Denoiser, Trunk, draw
from tests.helpers.recorders import Traced

DENOISER = """
from torch import nn


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, z):
        return self.activate(self.linear(x)) + z

    def activate(self, x):
        return x
"""
SITE = Site("stepping_client", "Denoiser.forward", graphs.step)
LAYER = Site("stepping_client", "Denoiser.activate", lambda original, count: lambda self, x: 2 * x)


@pytest.fixture
def stepping(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The denoiser of an installed client that `patch` knows."""
    (tmp_path / "stepping_client.py").write_text(DENOISER)
    (tmp_path / "stepping-1.0.dist-info").mkdir()
    (tmp_path / "stepping-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: stepping\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    known = {
        "stepping": Client("stepping", "stepping", (), layers=(LAYER,), steps=(SITE,)),
        "still": Client("still", "stepping", ()),
    }
    monkeypatch.setattr(patching, "NAMES", tuple(known))
    monkeypatch.setattr(patching, "client", known.__getitem__)
    module = importlib.import_module("stepping_client")
    digests = {str(SITE): digest(module.Denoiser.forward), str(LAYER): digest(module.Denoiser.activate)}
    monkeypatch.setitem(sources(), "stepping", {"1.0": digests})
    monkeypatch.setitem(sources(), "still", {"1.0": {}})
    yield module.Denoiser().eval()
    sys.modules.pop("stepping_client", None)
    patching.active.clear()


def test_patch_records_unless_it_is_asked_not_to(stepping: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    traced, original = Traced(), type(stepping).forward
    monkeypatch.setattr(graphs, "Recorder", lambda: traced)
    z = draw(1)
    with evoattn.patch("stepping", layers=False, graphs=False) as patched, torch.no_grad():
        assert not patched.sites and type(stepping).forward is original
        assert evoattn.patch("stepping", layers=False) is patched and patched.sites == (str(SITE),)
        for seed in range(8):
            assert torch.equal(stepping(draw(seed), z), original(stepping, draw(seed), z))
        assert patched.steps == {str(SITE): {"": 5, FIRST: 3}} and patched.calls == 0
        steps = type(stepping).forward._evoattn_steps
        assert steps._known
    assert type(stepping).forward is original and not steps._known, "undone"
    for line in (f"5  replayed as a CUDA graph: {SITE}", f"3  not replayed, {FIRST}: {SITE}"):
        assert line in str(patched)
    with patched, torch.no_grad():
        for seed in range(8):
            stepping(draw(seed), z)
    assert patched.steps == {str(SITE): {"": 10, FIRST: 6}} and traced.recorded == 2


def test_what_is_replaced_later_is_recorded_anew(stepping: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "Recorder", Traced)
    x, z = draw(1), draw(2)
    with evoattn.patch("stepping", layers=False, graphs=True) as patched, torch.no_grad():
        for _ in range(5):
            once = stepping(x, z)
        evoattn.patch("stepping", layers=True)
        for _ in range(5):
            torch.testing.assert_close(stepping(x, z) - z, 2 * (once - z))
        assert patched.steps[str(SITE)][""] == 4


def test_patch_without_a_gpu(stepping: Any) -> None:
    with evoattn.patch("stepping", layers=False, graphs=True) as patched, torch.no_grad():
        stepping(draw(1), draw(2))
    assert patched.steps == {str(SITE): {"": 0, ELSEWHERE: 1}}


def test_what_has_no_steps_and_what_has_moved(stepping: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="graphs must be False for 'still': CUDA graphs are recorded of 'stepping'"):
        evoattn.patch("still", layers=False, graphs=True)
    with evoattn.patch("still", layers=False) as still:
        assert not still.sites
    with evoattn.patch(layers=False, graphs=True) as every:
        assert every.sites == (str(SITE),)
    monkeypatch.setitem(sources(), "stepping", {"1.0": {str(SITE): "another"}})
    original = type(stepping).forward
    with pytest.raises(evoattn.clients.UnknownRelease, match="stepping_client:Denoiser"):
        evoattn.patch("stepping", layers=False, graphs=True)
    assert type(stepping).forward is original and not patching.active


def test_the_loop_of_a_patch_is_a_sampling_in_its_precision(stepping: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    sites = (Site("stepping_client", "Denoiser.activate", graphs.loop, counted=False),)
    transformer = dataclasses.replace(LAYER, name="Denoiser.forward", kind=TRANSFORMER)
    known = {
        "stepping": Client("stepping", "stepping", (), layers=(transformer,), steps=sites),
        "still": Client("still", "stepping", (), steps=sites),
    }
    monkeypatch.setattr(patching, "client", known.__getitem__)
    monkeypatch.setattr(type(stepping), "activate", lambda self, x: seen.append(keeping.precision()))
    monkeypatch.setattr(patching, "check_function", lambda _, site: site.find())
    for precision in (None, "tf32", "bf16"):
        with evoattn.patch("stepping", graphs=True, precision=precision) as patched:
            stepping.activate(None)
            assert patched.precision == seen[-1] == (precision or "exact")
            assert ("in no call" in str(patched)) == (patched.precision != "exact")
            assert evoattn.patch("stepping", graphs=True) is patched
            with pytest.raises(ValueError, match=f"precision must be '{seen[-1]}' for 'stepping', which is patched with it"):
                evoattn.patch("stepping", graphs=True, precision="exact" if precision else "bf16")
        assert keeping.precision() == "exact" and not patching.active
    with pytest.raises(ValueError, match="precision must be 'exact', 'tf32' or 'bf16', got 'fp8'"):
        evoattn.patch("stepping", graphs=True, precision="fp8")
    with pytest.raises(ValueError, match="precision must be 'exact' unless layers and graphs are True, got 'bf16'"):
        evoattn.patch("stepping", graphs=False, precision="bf16")
    with pytest.raises(ValueError, match="precision must be 'exact' for 'still', got 'bf16': .* of 'stepping'"):
        evoattn.patch("still", graphs=True, precision="bf16")
    assert not patching.active


def test_recordings_are_of_one_precision() -> None:
    with keeping.sampling("bf16"):
        low = modes("cpu")
    with keeping.sampling():
        assert modes("cpu") != low


def test_a_patch_of_all_names_the_clients_that_a_precision_does_not_reach(
    stepping: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = {
        "stepping": Client("stepping", "stepping", (), layers=(dataclasses.replace(LAYER, kind=TRANSFORMER),), steps=(SITE,)),
        "still": Client("still", "stepping", ()),
    }
    monkeypatch.setattr(patching, "client", known.__getitem__)
    with evoattn.patch(graphs=True, precision="bf16") as patched:
        assert set(patched.versions) == set(known) and patched.precision == "bf16"
    assert "evoattn leaves still in its own precision" in (err := capsys.readouterr().err) and "leaves stepping" not in err


def test_what_is_computed_does_not_depend_on_a_clock() -> None:
    """Blocks whose recording is not faster go on as the ones before them."""
    from evoattn.clients import site

    trunk, seen, original = Trunk(), list[bool](), Block.original

    def watching(self: Block, x: Tensor, mask: Tensor) -> Tensor:
        seen.append(site.is_repeated())
        return original(self, x, mask)

    trunk.steps._original = watching
    trunk.recorder.takes = [0, 1.0, 0, 0.95]
    with torch.no_grad():
        for block in trunk.blocks:
            block(draw(1), trunk.mask)
    assert trunk.count.passed_on["a replay of its recording is not faster"] == 5
    assert len(seen) > 8 and all(seen[3:])


def test_blocks_are_ours_at_any_length_if_they_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short pair representation is left to the client because of the host, which a recording does not ask."""
    from evoattn.clients import layers, site

    seen: list[bool] = []
    monkeypatch.setattr(layers, "residues", lambda _: 6)
    monkeypatch.setattr(layers, "_current", lambda module, arguments: (seen.append(site.is_repeated()), ""))
    count = Count()
    forward = graphs.step(layers.layer(Block.original, count, least=100), Count(), Traced(), shared=True)
    kind = type("Block", (Block,), {"forward": forward})
    with torch.no_grad():
        for block in [kind() for _ in range(3)]:
            block(draw(1), torch.ones(3, 1))
        layers.layer(Block.original, count, least=100)(kind(), draw(1), torch.ones(3, 1))
    assert seen == [True] * len(seen) and len(seen) >= 3
    assert count.passed_on.total() == 1


@pytest.mark.parametrize(
    ("least", "trained", "inference", "training"), [(5, None, 0, 0), (7, None, 1, 1), (0, 7, 0, 1), (7, 0, 1, 0)]
)
def test_short_inputs_are_left_to_the_client(
    least: int, trained: int | None, inference: int, training: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from evoattn.clients import layers

    monkeypatch.setattr(layers, "residues", lambda _: 6)
    monkeypatch.setattr(layers, "_current", lambda module, arguments: (None, ""))
    for grad, left in ((False, inference), (True, training)):
        count = Count()
        with torch.set_grad_enabled(grad):
            layers.layer(Block.original, count, least, trained)(Block(), draw(1), torch.ones(3, 1))
        assert count.passed_on.total() == left


def test_large_blocks_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "residues", lambda *_: 7)
    count, recorder = Count(), Traced()
    forward = graphs.step(Block.original, count, recorder, shared=True, most=6)
    block = type("Block", (Block,), {"forward": forward})()
    with torch.no_grad():
        for _ in range(5):
            block(draw(1), torch.ones(3, 1))
    assert count.passed_on == {"more than 6 residues, which keep a GPU busy": 5} and not recorder.recorded


class Writer(Block):
    """A block that writes into its input, as blocks of trunks do in inference, unless it is told not to."""

    def original(self, x: Tensor, mask: Tensor, inplace_safe: bool = False) -> Tensor:
        update = mask * self.product(x)
        return x.add_(update) if inplace_safe else x + update

    forward = original


@pytest.mark.parametrize(
    ("instead", "training", "reasons"),
    [
        ({"inplace_safe": False}, False, {FIRST: 3}),
        (None, False, {FIRST: 1, "it changes its arguments": 7}),
        ({"inplace_safe": False}, True, {FIRST: 3}),
    ],
)
def test_what_is_recorded_does_not_write_into_its_input(
    instead: dict[str, bool] | None, training: bool, reasons: dict[str, int]
) -> None:
    count = Count()
    kind = type("Writer", (Writer,), {"forward": graphs.step(Writer.original, count, Traced(), shared=True, instead=instead)})
    blocks = [kind().train(training) for _ in range(8)]
    writes, mask = instead is None, torch.ones(3, 1)
    with torch.no_grad():
        for block in blocks:
            x = draw(1)
            expected = block.original(x, mask)
            assert torch.equal(block(x, mask, inplace_safe=True), expected)
            assert torch.equal(x, expected if writes else draw(1))
    assert count.passed_on == reasons and count.replaced == 8 - sum(reasons.values())


def test_an_argument_that_is_not_passed_is_not_replaced() -> None:
    seen: list[dict[str, Any]] = []

    def original(self: nn.Module, x: Tensor, **named: Any) -> Tensor:
        seen.append(named)
        return x + 1

    kind = type("Block", (Block,), {"forward": graphs.step(original, Count(), Traced(), instead={"inplace_safe": False})})
    with torch.no_grad():
        kind()(draw(1), chunk_size=4)
        kind()(draw(1), chunk_size=4, inplace_safe=True)
    assert seen == [{"chunk_size": 4}, {"chunk_size": 4, "inplace_safe": False}]


def test_a_limit_for_pairs_without_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Protenix, OpenDDE and OpenFold have no batch axis."""
    asked: list[int] = []
    monkeypatch.setattr(graphs, "residues", lambda _, axes: asked.append(axes))
    forward = graphs.step(Block.original, Count(), Traced(), shared=True, most=6)
    with torch.no_grad():
        type("Block", (Block,), {"forward": forward})()(draw(1), torch.ones(3, 1))
    assert asked == [3]


def test_only_the_transformer_of_tokens_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """RosettaFold-3's transformers of atoms are of the same class, and have a pair representation of all atoms."""
    from evoattn.clients import rf3

    monkeypatch.setattr(graphs, "Recorder", Traced)
    count, original = Count(), Denoiser.original
    forward = rf3.tokens(lambda self, a, s, z, beta: original(self, a, s), count)
    kind = type("Denoiser", (Denoiser,), {"forward": forward})
    module, z = kind(), draw(1)
    assert kind.forward._evoattn_steps is forward._evoattn_steps
    with torch.no_grad():
        for beta in (None, True):
            for seed in range(6):
                assert torch.equal(module(draw(seed), z, z, beta), original(module, draw(seed), z))
    assert count.replaced == 3
    assert count.passed_on == {FIRST: 3, "a transformer of atoms, whose pairs take too much memory": 6}


def test_blocks_that_are_offloaded_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from evoattn.clients import openfold

    monkeypatch.setattr(graphs, "Recorder", Traced)
    count, seen = Count(), list[Any]()

    def original(self: nn.Module, m: Any, z: Any, **options: Any) -> Any:
        seen.append(options["inplace_safe"])
        return None if z is None else m + z

    module = type("Block", (Block,), {"forward": openfold.CLIENTS["openfold"].steps[0].replace(original, count)})()
    with torch.no_grad():
        for _ in range(5):
            assert module(None, None, inplace_safe=True, _offload_inference=True, _offloadable_inputs=[draw(1)]) is None
    assert seen == [True] * 5 and count.passed_on == {"MSA and pairs take turns on the GPU": 5}
    with torch.no_grad():
        z = draw(2)
        for _ in range(5):
            module(draw(1), z, inplace_safe=True)
    assert not any(seen[5:]) and count.replaced == 2
