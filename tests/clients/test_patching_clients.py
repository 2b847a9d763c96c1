"""What patches know of the real clients, and what they leave to them."""

import importlib
import pathlib
import types
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import evoattn
import evoattn.nn
from clients.blocks import Problem
from evoattn.clients import boltz, patching, releases
from evoattn.clients import calls as shared
from evoattn.clients import layers as client_layers
from evoattn.clients.calls import additive, is_float32_on_gpu, kernel, residues
from evoattn.clients.registry import sources
from evoattn.clients.releases import digest, digests_in_file
from evoattn.clients.site import Count, Site, repeated


@pytest.mark.parametrize("name", patching.NAMES)
def test_every_site_of_a_client_is_known(name: str) -> None:
    of = patching.client(name)
    assert of.name == name
    for version, digests in sources()[name].items():
        assert set(digests) == {str(site) for site in (*of.sites, *of.layers, *of.steps, *of.command)}, version
    assert len({str(site) for site in of.sites}) == len(of.sites)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_kernel_switch_changes_no_gradient(dtype: torch.dtype) -> None:
    """Of a query without a key too: cuEquivariance's definition has none there, the clients' own paths have."""
    rng = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(3, 2, 5, 4, generator=rng, dtype=dtype).requires_grad_() for _ in range(3))
    bias = torch.randn(1, 2, 5, 5, generator=rng, dtype=dtype).requires_grad_()
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [0, 0, 0, 0, 0]], dtype=torch.bool)[:, None, None]
    cotangent = torch.randn(3, 2, 5, 4, generator=rng, dtype=dtype)
    of_torch = additive(_never, Count())(q / 2, k, v, [1e9 * (mask.to(dtype) - 1), bias])
    expected = torch.autograd.grad(of_torch, (q, k, v, bias), cotangent)
    for options in ({"bias": bias}, {"tri_bias": bias}):
        actual = kernel(_never, Count())(q, k, v, mask=mask, scale=0.5, **options)
        assert actual.shape == (1, 3, 2, 5, 4), "five axes, as cuEquivariance's"
        torch.testing.assert_close(actual[0], of_torch)
        torch.testing.assert_close(torch.autograd.grad(actual[0], (q, k, v, bias), cotangent), expected)


def _never(*_: Any, **__: Any) -> Any:
    raise AssertionError("the original runs")


@pytest.fixture(scope="module")
def trunk() -> Any:
    """A block of ESMFold's trunk with random weights. What it computes is tested in tests/tools/test_client_blocks.py."""
    pytest.importorskip("transformers")
    blocks = importlib.import_module("clients.esmfold").BLOCKS
    return blocks[0].call(Problem(16, torch.float32)).module


def test_esmfolds_options_go_to_the_original(trunk: Any) -> None:
    module = trunk.tri_att_start.mha
    q_x = torch.randn(3, 7, 16)
    with evoattn.patch("esmfold") as patched, pytest.raises(ValueError, match="use_flash is incompatible"):
        module(q_x, q_x, [torch.zeros(7)], use_flash=True)
    assert patched.passed_on == {"use_flash, or options by position": 1} and patched.calls == 0


def test_a_sequence_without_a_residue_is_not_nan(trunk: Any) -> None:
    attention = trunk.seq_attention
    with evoattn.patch("esmfold"):
        y, maps = attention(torch.randn(2, 7, 32), mask=torch.zeros(2, 7), bias=torch.randn(2, 7, 7, 4))
    assert y.isfinite().all() and maps is None


def test_a_file_gives_the_digests_of_its_functions(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With decorators, comments at the end, under conditions, in classes, in packages."""
    (tmp_path / "in_files").mkdir()
    (tmp_path / "in_files" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (tmp_path / "in_files" / "part.py").write_text(
        "import functools\n"
        "try:\n    import no_such_module\nexcept ImportError:\n    @functools.cache\n    def one(x):\n        return x\n"
        "        # at the end\n\n\n"
        "class Two:\n    if True:\n        def three(self):\n            return 3\n    else:\n        def three(self): ...\n\n"
        "    @staticmethod\n    def four(x):\n        '''A text.\n        '''\n\n\nname = 5\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    sites = {name: Site("in_files.part", name) for name in ("one", "Two.three", "Two.four", "name", "Two.none", "Two")}
    digests = {name: digests_in_file(site) for name, site in sites.items()}
    assert [len(x) for x in digests.values()] == [1, 2, 1, 0, 0, 1]
    assert not digests_in_file(Site("in_files.no_such_part", "one")) and not digests_in_file(Site("no_such_package", "one"))
    (tmp_path / "in_files" / "__init__.py").write_text("")
    for name, site in sites.items():
        function = site.find()[2]
        if callable(function):
            assert digest(getattr(function, "__wrapped__", function) if name == "one" else function) in digests[name], name


def test_esmfolds_files_are_known() -> None:
    pytest.importorskip("transformers")
    releases.check_files(patching.client("esmfold"))


def test_what_is_known_of_arguments_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu, integers = torch.ones(1, 5, 5, 3), torch.ones(2, dtype=torch.long)
    with FakeTensorMode():
        z, s, oblong = (torch.empty(shape, device="cuda") for shape in ((1, 5, 5, 3), (1, 5, 5), (1, 4, 5, 3)))
        assert residues([None, 3, s, z]) == 5 and residues([on_cpu, oblong]) is None
        assert is_float32_on_gpu([integers, None, z]) and is_float32_on_gpu([z.double()])
        assert not is_float32_on_gpu([z.bfloat16(), z]) and not is_float32_on_gpu([on_cpu, z]) and not is_float32_on_gpu([])
        monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: kind == "cuda")
        assert not is_float32_on_gpu([z]) and is_float32_on_gpu([z.double()])
        monkeypatch.setattr(torch, "get_autocast_dtype", lambda kind: torch.float32)
        assert is_float32_on_gpu([z])


@pytest.mark.parametrize("single", [False, True])
def test_boltz_keeps_attentions_for_which_the_host_sets_the_pace(single: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those that are replayed as a CUDA graph, or that have many scores; fewer are many if a gradient may be wanted."""
    monkeypatch.setattr(shared, "is_float32_on_gpu", lambda args: True)
    monkeypatch.setattr(boltz, "projected", lambda *args: (1, 2, 3))
    monkeypatch.setattr(boltz, "attend", lambda *args: "ours")
    monkeypatch.setattr(shared, "_FEW_IN_INFERENCE", 2 * 4 * 5 * 5 + 1)
    monkeypatch.setattr(shared, "_FEW_IN_TRAINING", 2 * 4 * 4 * 4 + 1)
    client, count = types.SimpleNamespace(proj_z=lambda z: z, num_heads=4), Count()

    def layer_of(original: Any, count: Count) -> Any:
        return lambda *args: "ours"

    wrap = boltz.unless_faster_as_installed(layer_of if single else boltz.boltz2_attention, counted=not single)
    forward = wrap(lambda *args: "theirs", count)

    def outcome(length: int) -> Any:
        s, z = torch.zeros(2, length, 3), torch.zeros(1, length, length, 4)
        return forward(client, s, z, torch.ones(2, length), s)

    assert [outcome(4), outcome(5)] == ["theirs", "ours"], "gradients may be wanted"
    monkeypatch.setattr(shared, "_SHORT", 4)
    assert outcome(4) == "ours"
    with torch.no_grad():
        assert outcome(5) == "theirs"
        assert outcome(6) == "ours"
        with repeated():
            assert outcome(5) == "ours"
        monkeypatch.setattr(shared, "is_float32_on_gpu", lambda args: False)
        assert outcome(5) == "ours"
    assert sum(count.passed_on.values()) == (0 if single else 2), "what is inside counts"


def test_evoattn_computes_attentions_of_boltz_that_norm_long_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, where torch's norm of these takes longer than the host."""
    monkeypatch.setattr(boltz, "faster_as_installed", lambda *_: "few")
    monkeypatch.setattr(boltz, "LONG", 5)
    forward = boltz.unless_faster_as_installed(lambda *_: lambda *args, **named: "ours")(lambda *args: "theirs", Count())
    projection = torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Linear(8, 4))

    def outcome(length: int, projects: bool = True, on_gpu: bool = True) -> str:
        client = types.SimpleNamespace(num_heads=4, proj_z=projection if projects else torch.nn.Identity())
        s = types.SimpleNamespace(is_cuda=on_gpu, shape=(1, length, 3))
        return str(forward(client, s, torch.zeros(1, length, length, 8), None, s))

    assert [outcome(5), outcome(6), outcome(6, projects=False), outcome(6, on_gpu=False)] == ["theirs", "ours"] + 2 * ["theirs"]


def test_pace_of_a_step_of_boltz_1_is_told_by_its_cached_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its second step has no pair representation."""
    sizes: list[tuple[int, ...]] = []
    monkeypatch.setattr(boltz, "faster_as_installed", lambda x, *numbers: sizes.append(numbers) or "few")
    client, s = types.SimpleNamespace(num_heads=4), torch.zeros(2, 5, 3)
    forward = boltz.unless_faster_as_installed(lambda original, count: original)(lambda *args, **named: "original", Count())
    for z, cache in ((torch.zeros(1, 5, 7, 8), {}), (None, {"z": torch.zeros(1, 4, 5, 7)})):
        assert forward(client, s, z, mask=torch.ones(2, 7), model_cache=cache) == "original"
    assert sizes == [(5, 7, 2 * 4 * 5 * 7)] * 2


def test_float32_attention_with_pair_bias_of_few_residues_is_left_to_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer if a gradient may be wanted; none that is replayed as a CUDA graph, and no other layer."""
    monkeypatch.setattr(client_layers, "is_float32_on_gpu", lambda args: args[0] is not None)
    monkeypatch.setattr(client_layers, "residues", lambda args, axes: args[0])
    layers = evoattn.nn.AttentionPairBias(8, 4, 4, 2), torch.nn.Identity()
    single, triangle = (types.SimpleNamespace(layer=x, is_block=False) for x in layers)

    def left(swap: Any, length: int) -> bool:
        return bool(client_layers.slower_in_float32(swap, (length,)))

    assert [left(single, x) for x in (287, 288)] == [True, False] and not left(triangle, 5)
    with torch.no_grad():
        assert [left(single, x) for x in (512, 513)] == [True, False] and not left(triangle, 5)
        layers[0].layer_norm_z = None
        assert [left(single, x) for x in (1023, 1024)] == [True, False], "it does not norm the pairs"
        with repeated():
            assert not left(single, 5)


def test_few_scores_on_a_gpu_are_left_to_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those that are replayed as a CUDA graph."""
    monkeypatch.setattr(shared, "attention", lambda *args: "ours")
    monkeypatch.setattr(shared, "_FEW_SCORES", 3 * 2 * 7 * 5 + 1)
    monkeypatch.setattr(shared, "_SHORT", 9)
    count = Count()
    forward = additive(lambda *args: "theirs", count)

    def outcome(length: int, *, rows: int = 3, on_gpu: bool = True) -> Any:
        q = types.SimpleNamespace(is_cpu=not on_gpu, is_cuda=on_gpu, shape=torch.Size((rows, 2, length, 4)))
        return forward(q, torch.zeros(rows, 2, 5, 4), None, [])

    assert [outcome(7), outcome(8), outcome(7, on_gpu=False)] == ["theirs", "ours", "ours"]
    assert outcome(9, rows=1) == "ours", "a chunk of a long attention"
    with repeated():
        assert outcome(7) == "ours"
