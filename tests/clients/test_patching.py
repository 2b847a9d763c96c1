"""Patches of clients: of a toy client in all its states, and what ESMFold's blocks do at the edges."""

import functools
import importlib
import pathlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import evoattn
import evoattn.nn
from clients.blocks import Problem
from evoattn.clients import boltz, patching, releases
from evoattn.clients import calls as shared
from evoattn.clients import layers as client_layers
from evoattn.clients.calls import additive, is_float32_on_gpu, kernel, residues
from evoattn.clients.layers import layer, sites
from evoattn.clients.releases import digest, digests_in_file, sources
from evoattn.clients.site import Client, Count, Site, repeated
from evoattn.nn.known import LAYERS

TOY = {
    "layers.py": """
import torch


def _attention(query, key, value, biases):
    scores = query @ key.transpose(-1, -2)
    for bias in biases:
        scores = scores + bias
    return torch.softmax(scores, -1) @ value


def dispatch(q, k, v, biases, fast=False):
    return kernel(q, k, v, biases) if fast else _attention(q, k, v, biases)


def kernel(q, k, v, biases):
    raise ImportError("no kernel on this machine")
""",
    "model.py": """
from toy_client.layers import _attention as attend
from toy_client.layers import dispatch


class Block:
    def forward(self, x):
        return attend(x, x, x, [])
""",
    "triangle.py": """
import evoattn.nn
from torch import nn


class Triangle(evoattn.nn.TriangleAttention):
    def __init__(self):
        super().__init__(8, 4, 2)
        self.c_hidden = 4
        for x in self.parameters():
            nn.init.normal_(x)

    def forward(self, x, mask=None, use_lma=False, window=None):
        return 0 * x
""",
}


def times(original: Any, count: Count) -> Any:
    """A replacement that leaves long inputs to the original."""

    def forward(self: Any, x: Tensor) -> Tensor:
        if x.shape[-2] > 8:
            count.count_passed_on("more than 8 keys")
            return original(self, x)
        count.count_replaced()
        return original(self, x)

    return forward


SITES = (
    Site("toy_client.layers", "_attention", additive),
    Site("toy_client.layers", "kernel", additive),
    Site("toy_client.model", "Block.forward", times),
    Site("toy_client.layers", "dispatch"),
)


@pytest.fixture
def toy(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """An installed client, toy 1.0, that `patch` knows."""
    (tmp_path / "toy_client").mkdir()
    for name, text in (("__init__.py", ""), *TOY.items()):
        (tmp_path / "toy_client" / name).write_text(text)
    (tmp_path / "toy-1.0.dist-info").mkdir()
    (tmp_path / "toy-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    whole = sites("toy_client.triangle:Triangle")
    known = Client("toy", "toy", SITES, values=(("toy_client.layers", "has_kernel", True),), layers=whole)
    monkeypatch.setattr(patching, "NAMES", ("toy",))
    monkeypatch.setattr(patching, "client", {"toy": known}.__getitem__)
    model = importlib.import_module("toy_client.model")
    layers: Any = sys.modules["toy_client.layers"]
    found = {str(site): digest(_at(site)) for site in (*SITES, *whole)}
    openfolds = "openfold.model.triangular_attention.TriangleAttention"
    monkeypatch.setitem(LAYERS, "toy_client.triangle.Triangle", LAYERS[openfolds])
    monkeypatch.setitem(sources(), "toy", {"0.9": {}, "1.0": found})
    model.layers = layers
    yield model
    for name in ("toy_client", "toy_client.layers", "toy_client.model", "toy_client.triangle"):
        sys.modules.pop(name, None)
    patching._active.clear()


def _at(site: Site) -> Any:
    return site.find()[2]


def x(length: int = 5) -> Tensor:
    return torch.randn(1, 2, length, 8, generator=torch.Generator().manual_seed(length))


def test_every_name_is_replaced_counted_and_put_back(toy: Any) -> None:
    before = {str(site): _at(site) for site in SITES}
    expected = toy.layers._attention(x(), x(), x(), [])
    with evoattn.patch("toy", layers=False) as patched:
        assert patched.sites == tuple(str(site) for site in SITES[:3])
        assert toy.attend is toy.layers._attention is not before["toy_client.layers:_attention"], "imported by name"
        assert toy.layers.dispatch is before["toy_client.layers:dispatch"], "only checked"
        assert toy.layers.has_kernel
        torch.testing.assert_close(toy.layers.dispatch(x(), x(), x(), []), expected)
        torch.testing.assert_close(toy.layers.dispatch(x(), x(), x(), [], fast=True), expected)
        torch.testing.assert_close(toy.Block().forward(x()), expected)
        toy.Block().forward(x(9))
    assert patched.calls_by_site == {
        "toy_client.layers:_attention": 3,
        "toy_client.layers:kernel": 1,
        "toy_client.model:Block.forward": 1,
    }
    assert (patched.calls, patched.passed_on) == (5, {"more than 8 keys": 1})
    assert {str(site): _at(site) for site in SITES} == before
    assert toy.attend is toy.layers._attention and not hasattr(toy.layers, "has_kernel")
    for text in ("toy 1.0: 5 calls", "1  by the original: more than 8 keys", "3  toy_client.layers:_attention"):
        assert text in str(patched)
    toy.layers._attention(x(), x(), x(), [])
    assert patched.calls == 5, "the original again"


def test_twice_is_once(toy: Any) -> None:
    original = toy.layers._attention
    with evoattn.patch("toy") as outer:
        with evoattn.patch("toy") as inner:
            assert inner is outer
        assert toy.layers._attention is not original, "the outer one holds on"
    assert toy.layers._attention is original
    held = evoattn.patch("toy")
    with evoattn.patch("toy"):
        toy.layers._attention(x(), x(), x(), [])
    assert held.calls == 1 and toy.layers._attention is not original
    held.undo()
    assert toy.layers._attention is original
    with evoattn.patch("toy") as other:
        held.undo()
        assert evoattn.patch("toy") is other, "one that is undone already takes no other with it"


def test_a_patch_may_be_entered_again(triangle: Any) -> None:
    """It replaces the same functions, layers too, and its counts go on."""
    layers: Any = sys.modules["toy_client.layers"]
    original, patched = layers._attention, evoattn.patch("toy")
    for calls in (2, 4):
        with patched:
            layers._attention(x(), x(), x(), [])
            assert triangle(Z).any()
            assert layers.has_kernel and evoattn.patch("toy") is patched
            with patched:
                assert layers._attention is not original
            assert layers._attention is not original
        patched.undo()
        assert patched.calls == calls and len(set(patched.sites)) == len(patched.sites) == 4
        assert layers._attention is original and not triangle(Z).any()
    with evoattn.patch("toy"), pytest.raises(RuntimeError, match="another patch of toy is active"):
        patched.__enter__()


def test_a_module_that_is_reloaded(triangle: Any) -> None:
    """The report says that its functions are the client's own again, and another call of `patch` replaces them."""
    layers: Any
    triangles: Any
    layers, triangles = sys.modules["toy_client.layers"], sys.modules["toy_client.triangle"]
    with evoattn.patch("toy") as patched:
        importlib.reload(layers)
        importlib.reload(triangles)
        again = triangles.Triangle()
        assert triangle(Z).any() and not again(Z).any()
        for site in ("toy_client.layers:_attention", "toy_client.triangle:Triangle.forward"):
            assert f"not by evoattn any more: {site} was reloaded" in str(patched)
        assert evoattn.patch("toy") is patched
        assert again(Z).any() and "any more" not in str(patched)
        before = patched.calls
        layers._attention(x(), x(), x(), [])
        assert patched.calls == before + 1 and layers.has_kernel
    assert not again(Z).any() and not triangle(Z).any() and not hasattr(layers, "has_kernel")
    assert "any more" not in str(patched)


def test_what_others_put_over_ours_stays_when_patched_again(toy: Any) -> None:
    patched = evoattn.patch("toy")
    mine = toy.layers._attention
    toy.layers._attention = over = functools.wraps(mine)(lambda *given: mine(*given))
    toy.layers.kernel = theirs = lambda *_: None
    assert evoattn.patch("toy") is patched
    assert toy.layers._attention is over and toy.layers.kernel is theirs
    assert str(patched).count("any more") == 1 and "any more: toy_client.layers:kernel" in str(patched)
    with pytest.warns(UserWarning, match="not put back"):
        patched.undo()


@pytest.mark.parametrize("change", ["text", "gone", "no source"])
def test_code_that_has_moved_is_refused_and_nothing_is_replaced(toy: Any, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = toy.layers._attention
    if change == "text":
        monkeypatch.setitem(sources()["toy"]["1.0"], "toy_client.layers:dispatch", "another")
    elif change == "gone":
        monkeypatch.delattr(toy.layers, "dispatch")
    else:
        monkeypatch.setattr(toy.layers, "dispatch", len)
    with pytest.raises(evoattn.clients.UnknownRelease, match=r"toy 1\.0 .* toy_client\.layers:dispatch; known are 0\.9, 1\.0"):
        evoattn.patch("toy")
    assert toy.layers._attention is original and not patching._active
    assert evoattn.patch().sites == ()


def test_all_that_are_installed(toy: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with evoattn.patch() as patched:
        assert patched.versions == {"toy": "1.0"}
        assert evoattn.patch("toy") is patched
    assert capsys.readouterr().err == "evoattn computes the attention of toy 1.0\n"


def test_what_others_replaced_since_stays(toy: Any) -> None:
    patched = evoattn.patch("toy")
    toy.layers._attention = theirs = lambda *_: None
    with pytest.warns(UserWarning, match="not put back, because others have replaced them since: _attention"):
        patched.undo()
    assert toy.layers._attention is theirs


def test_names_and_clients_that_are_not_there(toy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="name must be one of 'toy', or None for all that are installed; got 'bolz'"):
        evoattn.patch("bolz")
    missing = Client("toy", "toy-that-is-not-there", SITES)
    monkeypatch.setattr(patching, "client", {"toy": missing}.__getitem__)
    with pytest.raises(ImportError, match="toy is not installed: no distribution toy-that-is-not-there"):
        evoattn.patch("toy")


def test_a_compiled_call_is_ours_too(toy: Any) -> None:
    expected = toy.layers.dispatch(x(), x(), x(), [])
    torch.compiler.reset()
    with evoattn.patch("toy"):
        compiled = torch.compile(toy.layers.dispatch, fullgraph=True, backend="aot_eager")
        for _ in range(2):
            torch.testing.assert_close(compiled(x(), x(), x(), [], fast=True), expected)


@pytest.fixture
def triangle(toy: Any) -> Any:
    """A layer of toy, which returns zeros."""
    torch.manual_seed(0)
    return importlib.import_module("toy_client.triangle").Triangle()


Z = torch.randn(1, 5, 5, 8)


def ours(triangle: Any) -> Tensor:
    """What our layer makes of Z with the same parameters."""
    layer = evoattn.nn.TriangleAttention(8, 4, 2)
    layer.load_state_dict(triangle.state_dict())
    return layer(Z)  # type: ignore[no-any-return]


def test_whole_layers(triangle: Any) -> None:
    expected, site = ours(triangle), "toy_client.triangle:Triangle.forward"
    with evoattn.patch("toy") as patched:
        assert patched.sites[-1] == site
        assert torch.equal(triangle(Z, use_lma=True), expected)
        assert patched.calls_by_site[site] == 1 and not patched.passed_on
        with torch.no_grad():
            triangle.mha.linear_o.bias.add_(1)
        assert torch.equal(triangle(Z), ours(triangle)), "parameters are shared"
    assert not triangle(Z).any(), "the client's own"


def test_layers_may_be_asked_for_later(triangle: Any) -> None:
    with evoattn.patch("toy", layers=False) as patched:
        assert not triangle(Z).any()
        assert evoattn.patch("toy") is patched is evoattn.patch("toy")
        assert patched.sites.count("toy_client.triangle:Triangle.forward") == 1
        assert torch.equal(triangle(Z), ours(triangle))
    patched.undo()
    assert not triangle(Z).any()


class OnGpu(Tensor):
    """A tensor of the CPU that says it is on a GPU."""

    is_cuda = True  # type: ignore[assignment]


def test_few_residues_on_a_gpu_are_left_to_the_client(triangle: Any) -> None:
    count = Count()
    forward = layer(type(triangle).forward, count, least=6)
    assert not forward(triangle, Z.as_subclass(OnGpu)).any() and not forward(triangle, x=Z.as_subclass(OnGpu)).any()
    reason = "fewer than 6 residues, where the client's own layers take less of the host"
    assert (count.replaced, dict(count.passed_on)) == (0, {reason: 2})
    assert forward(triangle, Z).any(), "on a CPU"
    forward = layer(type(triangle).forward, count, least=5)
    assert forward(triangle, Z.as_subclass(OnGpu)).any()
    assert count.replaced == 2


def test_layers_of_other_kinds_stay_the_clients(triangle: Any) -> None:
    with evoattn.patch("toy") as patched:
        assert triangle(Z).any()
        assert not triangle(Z, window=3).any()
        torch.compiler.reset()
        assert not torch.compile(triangle, backend="eager")(Z).any()
        triangle.mha.q_norm = torch.nn.LayerNorm(4)
        assert not triangle(Z).any(), "a norm that came later"
        del triangle.mha.q_norm
        assert triangle(Z).any()
        hook = triangle.mha.register_forward_hook(lambda *_: None)
        assert not triangle(Z).any(), "a hook that ours would not run"
        hook.remove()
        assert triangle(Z).any()
    reasons = list(patched.passed_on)
    assert len(reasons) == 3 and "argument 'window'" in reasons[0] and "other parameters" in reasons[1]
    assert patched.calls == 3 and reasons[2] == "mha has hooks, and evoattn.nn does not call it"


def test_adapters_in_layers_compute(triangle: Any) -> None:
    with evoattn.patch("toy") as patched:
        before = triangle(Z)
        linear = triangle.mha.linear_q
        triangle.mha.linear_q = torch.nn.Sequential(torch.nn.Linear(8, 8), linear)
        assert not torch.equal(triangle(Z), before)
        triangle.mha.linear_q = linear
        assert torch.equal(triangle(Z), before)
    assert patched.calls == 3 and not patched.passed_on


def test_settings_of_layers_that_are_changed_later(triangle: Any) -> None:
    with evoattn.patch("toy") as patched:
        before = triangle(Z)
        triangle.starting = False
        ending = evoattn.nn.TriangleAttention(8, 4, 2, starting=False)
        ending.load_state_dict(triangle.state_dict())
        assert torch.equal(triangle(Z), ending(Z))
        triangle.starting = True
        assert torch.equal(triangle(Z), before)
    assert patched.calls == 3


def test_subclasses_of_layers(triangle: Any) -> None:
    """A forward that calls the known one gets ours. A layer that overrides a helper of the known forward stays the client's."""
    kind = type(triangle)

    class Halved(kind):  # type: ignore[misc, valid-type]
        def forward(self, *given: Any) -> Tensor:
            return 0.5 * super().forward(*given)  # type: ignore[no-any-return]

    class Helped(kind):  # type: ignore[misc, valid-type]
        def _update(self, *_: Any) -> Tensor:
            raise AssertionError

    halved, helped = Halved(), Helped()
    with evoattn.patch("toy") as patched:
        assert torch.equal(halved(Z), 0.5 * ours(halved))
        assert not helped(Z).any()
        forward = triangle.forward
        triangle.forward = lambda x: 2 * forward(x)
        assert torch.equal(triangle(Z), 2 * ours(triangle))
    assert patched.calls == 2 and patched.passed_on == {"a Helped overrides _update": 1}


def test_arguments_of_layers_by_position(triangle: Any) -> None:
    mask = torch.ones(1, 5, 5)
    with evoattn.patch("toy") as patched:
        assert torch.equal(triangle(Z, mask, True), triangle(Z, mask))
        assert not triangle(Z, mask, True, 3).any()
    assert patched.calls == 2 and sum(patched.passed_on.values()) == 1


def test_a_layer_that_has_moved_is_refused_and_nothing_is_replaced(toy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    original = toy.layers._attention
    monkeypatch.setitem(sources()["toy"]["1.0"], "toy_client.triangle:Triangle.forward", "another")
    with pytest.raises(evoattn.clients.UnknownRelease, match="has another toy_client.triangle:Triangle.forward"):
        evoattn.patch("toy")
    assert toy.layers._attention is original and not patching._active


@pytest.mark.parametrize("name", patching.NAMES)
def test_every_site_of_a_client_is_known(name: str) -> None:
    of = patching.client(name)
    assert of.name == name
    for version, digests in sources()[name].items():
        assert set(digests) == {str(site) for site in (*of.sites, *of.layers, *of.steps)}, version
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
    for given in ({"bias": bias}, {"tri_bias": bias}):
        found = kernel(_never, Count())(q, k, v, mask=mask, scale=0.5, **given)
        assert found.shape == (1, 3, 2, 5, 4), "five axes, as cuEquivariance's"
        torch.testing.assert_close(found[0], of_torch)
        torch.testing.assert_close(torch.autograd.grad(found[0], (q, k, v, bias), cotangent), expected)


def _never(*_: Any, **__: Any) -> Any:
    raise AssertionError("the original runs")


# ---- ESMFold


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
    found = {name: digests_in_file(site) for name, site in sites.items()}
    assert [len(x) for x in found.values()] == [1, 2, 1, 0, 0, 1]
    assert not digests_in_file(Site("in_files.no_such_part", "one")) and not digests_in_file(Site("no_such_package", "one"))
    (tmp_path / "in_files" / "__init__.py").write_text("")
    for name, site in sites.items():
        function = site.find()[2]
        if callable(function):
            assert digest(getattr(function, "__wrapped__", function) if name == "one" else function) in found[name], name


def test_esmfolds_files_are_known() -> None:
    pytest.importorskip("transformers")
    releases.check_files(patching.client("esmfold"))


def test_what_is_known_of_arguments_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu, whole = torch.ones(1, 5, 5, 3), torch.ones(2, dtype=torch.long)
    with FakeTensorMode():
        z, s, oblong = (torch.empty(shape, device="cuda") for shape in ((1, 5, 5, 3), (1, 5, 5), (1, 4, 5, 3)))
        assert residues([None, 3, s, z]) == 5 and residues([on_cpu, oblong]) is None
        assert is_float32_on_gpu([whole, None, z]) and is_float32_on_gpu([z.double()])
        assert not is_float32_on_gpu([z.bfloat16(), z]) and not is_float32_on_gpu([on_cpu, z]) and not is_float32_on_gpu([])
        monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: kind == "cuda")
        assert not is_float32_on_gpu([z]) and is_float32_on_gpu([z.double()])
        monkeypatch.setattr(torch, "get_autocast_dtype", lambda kind: torch.float32)
        assert is_float32_on_gpu([z])


@pytest.mark.parametrize("whole", [False, True])
def test_boltz_keeps_attentions_for_which_the_host_sets_the_pace(whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those that are replayed as a CUDA graph, or that have many scores; fewer are many if a gradient may be wanted."""
    monkeypatch.setattr(shared, "is_float32_on_gpu", lambda given: True)
    monkeypatch.setattr(boltz, "_projected", lambda *given: (1, 2, 3))
    monkeypatch.setattr(boltz, "_attend", lambda *given: "ours")
    monkeypatch.setattr(shared, "_FEW_IN_INFERENCE", 2 * 4 * 5 * 5 + 1)
    monkeypatch.setattr(shared, "_FEW_IN_TRAINING", 2 * 4 * 4 * 4 + 1)
    theirs, count = types.SimpleNamespace(proj_z=lambda z: z, num_heads=4), Count()

    def layer_of(original: Any, count: Count) -> Any:
        return lambda *given: "ours"

    wrap = boltz._unless_host_bound(layer_of if whole else boltz._boltz2_attention, counted=not whole)
    forward = wrap(lambda *given: "theirs", count)

    def found(length: int) -> Any:
        s, z = torch.zeros(2, length, 3), torch.zeros(1, length, length, 4)
        return forward(theirs, s, z, torch.ones(2, length), s)

    assert [found(4), found(5)] == ["theirs", "ours"], "gradients may be wanted"
    monkeypatch.setattr(shared, "_SHORT", 4)
    assert found(4) == "ours"
    with torch.no_grad():
        assert found(5) == "theirs"
        assert found(6) == "ours"
        with repeated():
            assert found(5) == "ours"
        monkeypatch.setattr(shared, "is_float32_on_gpu", lambda given: False)
        assert found(5) == "ours"
    assert sum(count.passed_on.values()) == (0 if whole else 2), "what is inside counts"


def test_float32_attention_with_pair_bias_of_few_residues_is_left_to_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer if a gradient may be wanted; none that is replayed as a CUDA graph, and no other layer."""
    monkeypatch.setattr(client_layers, "is_float32_on_gpu", lambda given: given[0] is not None)
    monkeypatch.setattr(client_layers, "residues", lambda given, axes: given[0])
    layers = evoattn.nn.AttentionPairBias(8, 4, 4, 2), torch.nn.Identity()
    single, triangle = (types.SimpleNamespace(layer=x, is_block=False) for x in layers)

    def left(counterpart: Any, length: int) -> bool:
        return bool(client_layers._slower_in_float32(counterpart, (length,)))

    assert [left(single, x) for x in (287, 288)] == [True, False] and not left(triangle, 5)
    with torch.no_grad():
        assert [left(single, x) for x in (1023, 1024)] == [True, False] and not left(triangle, 5)
        with repeated():
            assert not left(single, 5)


def test_few_scores_on_a_gpu_are_left_to_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those that are replayed as a CUDA graph."""
    monkeypatch.setattr(shared, "attention", lambda *given: "ours")
    monkeypatch.setattr(shared, "_FEW_SCORES", 3 * 2 * 7 * 5 + 1)
    monkeypatch.setattr(shared, "_SHORT", 9)
    count = Count()
    forward = additive(lambda *given: "theirs", count)

    def found(length: int, *, rows: int = 3, on_gpu: bool = True) -> Any:
        q = types.SimpleNamespace(is_cuda=on_gpu, shape=torch.Size((rows, 2, length, 4)))
        return forward(q, torch.zeros(rows, 2, 5, 4), None, [])

    assert [found(7), found(8), found(7, on_gpu=False)] == ["theirs", "ours", "ours"]
    assert found(9, rows=1) == "ours", "a chunk of a long attention"
    with repeated():
        assert found(7) == "ours"
