"""Diffusion transformers of Protenix, OpenDDE and OpenFold-3 by evoattn: answers, what calls share, and refusals."""

import functools
import importlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from cuda_graphs import captured
from torch import Tensor, nn

import evoattn
from evoattn.clients import af3_transformers, denoisers, diffusion, graphs
from evoattn.clients.arguments import ClientsOwn, UnknownArgument
from evoattn.clients.graphs import FIRST
from evoattn.clients.graphs.recorder import scout
from evoattn.clients.site import Count
from evoattn.clients.swap import Swap
from evoattn.core import keeping
from evoattn.nn import diffusion_steps
from tests.clients.standins import filled
from tests.clients.test_diffusion import by_layers, prepared
from tests.helpers.denoisers import STEPS, openfold3, protenix
from tests.helpers.denoisers import module as module_of
from tests.helpers.recorders import Again, seen
from tests.pair.products import error

PROTENIX = ("protenix", "opendde")
CLIENTS = (*PROTENIX, "openfold3")
HEADS, BLOCKS = 4, 3
QUERIES, KEYS = 8, 16
TRANSFORMERS = 3
"""Those of a denoiser: of the encoder, of tokens and of the decoder."""


@pytest.fixture(autouse=True)
def torchs_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAYERNORM_TYPE", "torch")  # Protenix compiles an extension otherwise


@pytest.fixture
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diffusion_steps, "run", by_layers)
    monkeypatch.setattr(diffusion_steps, "prepared", prepared)
    monkeypatch.setattr(diffusion_steps, "kept_condition", lambda *_: None)
    monkeypatch.setattr(diffusion, "may_have_kernels", lambda _: keeping.keeps())


def transformer(client: str, windows: bool = False) -> Any:
    """A transformer with 32 channels of a, 24 of s and 8 of z, in float64."""
    if client in PROTENIX:
        kind = module_of(f"{client}.model.modules.transformer").DiffusionTransformer
        return filled(kind(32, 24, 8, BLOCKS, HEADS, cross_attention_mode=windows)).eval()
    kind = module_of("openfold3.core.model.layers.diffusion_transformer").DiffusionTransformer
    sizes = (QUERIES, KEYS) if windows else (None, None)
    return filled(kind(32, 24, 8, 32 // HEADS, HEADS, BLOCKS, 2, *sizes, inf=1e9)).eval()


def inputs(client: str, samples: int, shared: bool) -> list[Tensor]:
    """a, s and z of 10 tokens. Protenix has no axis of structures."""
    shapes = [(samples, 10, 32), (1 if shared else samples, 10, 24), (1, 10, 10, 8)]
    torch.manual_seed(2)
    lead = () if client in PROTENIX else (1,)
    return [torch.randn(*lead, *shape, dtype=torch.float64) for shape in shapes]


def exact(original: Any, *args: Tensor, **named: Any) -> Tensor:
    """What the client computes, in float64 throughout: Protenix and OpenDDE attend in float32."""
    call, package = functools.partial(original, *args, **named), type(original).__module__.partition(".")[0]
    if package not in PROTENIX:
        return call()
    attend = functools.partial(torch.nn.functional.scaled_dot_product_attention, scale=1.0)
    primitives = importlib.import_module(f"{package}.model.modules.primitives")
    with mock.patch.object(primitives, "_attention", lambda q, k, v, attn_bias=None, **_: attend(q, k, v, attn_bias)):
        return call()


def known(client: str) -> Any:
    return af3_transformers.PROTENIX if client in PROTENIX else af3_transformers.OPENFOLD3


def rows_of(client: str) -> dict[str, Tensor]:
    """A mask of the tokens, where the client has one."""
    return {} if client in PROTENIX else {"mask": (torch.arange(10) < 8).double().view(1, 1, 10)}


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("client", CLIENTS)
@torch.no_grad()
def test_answers_are_those_of_the_client(client: str, samples: int, shared: bool, on_a_cpu: None) -> None:
    """After one block, after two, and after all."""
    original, (a, s, z), mask = transformer(client), inputs(client, samples, shared), rows_of(client)
    while len(original.blocks):
        swap = Swap(original, is_called=True)
        assert swap.layer is not None and not swap.reason
        expected = exact(original, a=a, s=s, z=z, **mask)
        with keeping.sampling():
            actual = known(client).call(swap.layer, a=a, s=s, z=z, **mask)
        assert (actual - expected).abs().max() < 1e-8 * expected.abs().max()
        del original.blocks[-1]


def atoms(client: str, samples: int, shared: bool, count: int) -> dict[str, Any]:
    """The arguments of a call of windows. OpenFold-3's last three atoms are padding, and its structures are two."""
    torch.manual_seed(2)
    lead = (1, samples) if client in PROTENIX else (2, samples)
    a, s = torch.randn(*lead, count, 32).double(), torch.randn(lead[0], 1 if shared else samples, count, 24).double()
    z = torch.randn(lead[0], 1, -(-count // QUERIES), QUERIES, KEYS, 8).double()
    if client in PROTENIX:
        return {"a": a[0], "s": s[0], "z": z[0], "n_queries": QUERIES, "n_keys": KEYS}
    mask = (torch.arange(count) < torch.tensor([[count - 3], [count]])).double().unsqueeze(1)
    return {"a": a, "s": s, "z": z, "mask": mask}


@pytest.mark.parametrize("count", [32, 29, 11])
@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("client", CLIENTS)
@torch.no_grad()
def test_windows_of_atoms_are_those_of_the_client(client: str, samples: int, count: int, on_a_cpu: None) -> None:
    """After one block, after two, and after all. The first and the last windows have keys that are no atoms."""
    original = transformer(client, windows=True)
    while len(original.blocks):
        layer = Swap(original, is_called=True).layer
        for shared in (True, False):
            call = atoms(client, samples, shared, count)
            expected, there = exact(original, **call), call.get("mask", torch.ones(1, count)).unsqueeze(-1)
            with keeping.sampling():
                for n in (samples, 1):  # other samples, in the same windows
                    call["a"], call["s"] = (x if x.shape[-3] == 1 else x[..., :n, :, :] for x in (call["a"], call["s"]))
                    actual = known(client).call(layer, **call)
                    difference = (actual - expected[..., :n, :, :]).abs()
                    assert difference.shape == call["a"].shape
                    assert (difference * there).max() < 1e-8
                    assert difference.max() < 1e-4  # padding, of which -1e9 leaves seven digits
        del original.blocks[-1]


@torch.no_grad()
def test_opendde_may_add_a_bias(on_a_cpu: None) -> None:
    """To the pair biases of tokens, once in a sampling."""
    original, (a, s, z) = transformer("opendde"), inputs("opendde", 2, True)
    extra = torch.randn(10, 10, dtype=torch.float64)
    layer = Swap(original, is_called=True).layer
    with keeping.sampling():
        for bias in (None, extra, extra, 2 * extra):
            expected = exact(original, a=a, s=s, z=z[0], extra_attn_bias=bias)
            actual = known("opendde").call(layer, a=a, s=s, z=z[0], extra_attn_bias=bias)
            assert (actual - expected).abs().max() < 1e-8


@pytest.mark.parametrize("masked", [True, False])
@torch.no_grad()
def test_openfold3_may_mask_its_transitions(masked: bool, on_a_cpu: None) -> None:
    original, (a, s, z) = transformer("openfold3"), inputs("openfold3", 2, True)
    mask = rows_of("openfold3")["mask"]
    expected = original(a=a, s=s, z=z, mask=mask, _mask_trans=masked)
    with keeping.sampling():
        actual = af3_transformers.OPENFOLD3.call(Swap(original, is_called=True).layer, a, s, z, mask=mask, _mask_trans=masked)
    assert (actual - expected).abs().max() < 1e-8


@pytest.mark.parametrize("client", CLIENTS)
@torch.no_grad()
def test_pair_biases_are_made_once_for_one_z(client: str, on_a_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """And anew if z is another tensor, z is written to, or a weight changes. Their rows start on multiples of 16 bytes."""
    original, (a, s, z) = transformer(client), inputs(client, 2, True)
    made: list[Tensor] = []
    own = diffusion.heads_first
    monkeypatch.setattr(diffusion, "heads_first", lambda x: made.append(own(x)) or made[-1])
    layer, mask = Swap(original, is_called=True).layer, rows_of(client)
    changes: list[Callable[[], Any]] = [
        lambda: None,
        lambda: z.mul_(2),
        lambda: (
            original.blocks[1]
            .attention_pair_bias.get_submodule("linear_nobias_z" if client in PROTENIX else "linear_z")
            .weight.mul_(2)
        ),
    ]
    with keeping.sampling():
        for change in changes:
            change()
            for _ in range(2):
                result = known(client).call(layer, a=a, s=s, z=z, **mask)
            assert len(made) == BLOCKS
            assert (result - exact(original, a=a, s=s, z=z, **mask)).abs().max() < 1e-8
            made.clear()
        kept = weakref.ref(z)
        z = z.clone()
        known(client).call(layer, a=a, s=s, z=z, **mask)
        changes.clear()
        assert kept() is None  # what was made of the last z alone is kept
    assert len(made) == BLOCKS and not any(x * y.itemsize % 16 for y in made for x in y.stride()[:-1])


@torch.no_grad()
def test_what_was_made_of_the_last_tensors_is_kept() -> None:
    owner, made = nn.Identity(), []

    def kept(x: Tensor, *settings: int) -> Any:
        result = af3_transformers.latest("x", owner, [x], nn.Identity, *settings)
        made.append(weakref.ref(result))
        return result

    inputs = [torch.ones(1) for _ in range(3)]
    with keeping.sampling():
        for x in inputs:
            kept(x)
            assert kept(x) is made[-1]()
        assert [x() is not None for x in made[::2]] == [False, False, True]
        assert kept(x, 1) is not made[-2]()
        x.add_(1)
        kept(x, 1)
        assert made[-2]() is None
    assert not any(x() for x in made)


CHANGES = {
    "another layer": lambda x: x.blocks.append(nn.Identity()),
    "an adapter": lambda x: setattr(
        x.blocks[0].attention_pair_bias,
        "linear_ada_out" if hasattr(x.blocks[0].attention_pair_bias, "linear_ada_out") else "linear_a_last",
        nn.Sequential(nn.Linear(24, 32), nn.Linear(32, 32)),
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("client", CLIENTS)
def test_another_transformer_is_not_computed_by_the_kernels(client: str, change: Any) -> None:
    original = transformer(client)
    change(original)
    swap = Swap(original, is_called=True)
    assert "other modules" in swap.reason or not diffusion_steps.Prepared(swap.layer.blocks).is_plain


@pytest.mark.parametrize("client", CLIENTS)
@torch.no_grad()
def test_atoms_that_are_left_to_the_client(client: str, on_a_cpu: None) -> None:
    layer, call = Swap(transformer(client, windows=True), is_called=True).layer, atoms(client, 2, True, 29)
    refused = [call | {"z": torch.cat([call["z"]] * 2, -5 if client == "openfold3" else 0)}]
    refused += [call | {"mask": None}] if client == "openfold3" else [call | {"n_queries": None}]
    for arguments, reason in zip(
        refused, ("own pair representation", "each sample has others|none of one of atoms"), strict=True
    ):
        with keeping.sampling(), pytest.raises(UnknownArgument, match=reason):
            known(client).call(layer, **arguments)


@pytest.mark.parametrize(("client", "name"), [("protenix", "drop_path"), ("opendde", "residual_path")])
def test_a_dropped_path_is_left_to_the_client(client: str, name: str) -> None:
    original = transformer(client)
    setattr(original.blocks[1], name, nn.Dropout(0.1))
    assert "other modules" in Swap(original, is_called=True).reason


@pytest.mark.parametrize("client", CLIENTS)
def test_a_cpu_computes_the_clients_own(client: str) -> None:
    layer = Swap(transformer(client).float(), is_called=True).layer
    tensors = [x.float() for x in inputs(client, 2, True)]
    with keeping.sampling(), torch.no_grad(), pytest.raises(ClientsOwn):
        known(client).call(layer, *tensors)


@pytest.mark.parametrize("client", CLIENTS)
@torch.no_grad()
def test_refusals_have_reasons(client: str, on_a_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, (a, s, z) = Swap(transformer(client), is_called=True).layer, inputs(client, 2, True)
    with keeping.sampling():
        with pytest.raises(UnknownArgument, match="pair representation of a diffusion transformer that is not in float32"):
            known(client).call(layer, a, s, z.float())
        with monkeypatch.context() as small:
            small.setattr(af3_transformers, "_most_bytes", lambda _: BLOCKS * HEADS * 100 * 8 - 1)
            with pytest.raises(UnknownArgument, match="more than a quarter of the GPU's memory"):
                known(client).call(layer, a, s, z)
        with pytest.raises(UnknownArgument, match="does not know the argument 'scale'"):
            known(client).call(layer, a, s, z, scale=2.0)
        if client in PROTENIX:
            with pytest.raises(UnknownArgument, match="a pair representation that is normalised already"):
                known(client).call(layer, a, s, z, enable_efficient_fusion=True)
            with pytest.raises(UnknownArgument, match="windows of a transformer of tokens"):
                known(client).call(layer, a, s, z, n_queries=8, n_keys=16)


class Scouting(Again):
    """A recorder that first looks for what a CUDA graph cannot repeat."""

    def record(self, run: Any, device: torch.device, *, draws: bool = False, once: bool = False, **options: bool) -> Any:
        scout(functools.partial(seen, run), device, draws)
        return super().record(run, device, draws=draws, once=once, **options)


def sampler_of(client: str) -> tuple[Any, Callable[..., Callable[[], Any]]]:
    """A denoiser, and what makes a sampling in the client's loop."""
    if client == "openfold3":
        sampler, sample = openfold3(torch.device("cpu"))
        return sampler.diffusion_module, sample
    denoiser, sample = protenix(client, torch.device("cpu"))

    def looped(*call: int, **options: Any) -> Callable[[], Any]:
        run = sample(*call)
        run.keywords.update(options)
        # `Protenix.sample_diffusion` is such a loop, in a class that holds the whole model
        return lambda: graphs.loop(lambda _: run(), Count())(nn.ModuleList([denoiser]))

    return denoiser, looped


def sampled(client: str, calls: Any, make: Callable[..., Callable[[], Any]], **options: Any) -> list[Tensor]:
    results = []
    for call in calls:
        torch.manual_seed(4)
        importlib.import_module("numpy").random.seed(3)
        with torch.no_grad():
            results.append(make(*call, **options)())
    return results


@pytest.mark.slow
@pytest.mark.parametrize("client", CLIENTS)
def test_samples_are_those_of_the_client(client: str, on_a_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one and two samples, and two lengths in turn. Steps share the pair representation, samples the condition."""
    denoiser, make = sampler_of(client)
    calls = ((1, 6), (2, 9), (1, 6))
    # What steps share is computed with the transformer of the encoder: twice to record, and for the kept recording's beginning.
    first = 5 if client in PROTENIX else 0
    expected = sampled(client, calls, make)
    monkeypatch.setattr(graphs, "Recorder", Scouting)
    monkeypatch.setattr(diffusion_steps, "prepared", lambda blocks, *_: diffusion_steps.Prepared(blocks))
    seen: list[Tensor] = []
    with evoattn.patch(client, graphs=True) as patched:
        result = sampled(client, calls, make)
        assert patched.calls_by_kind["diffusion transformer"] == TRANSFORMERS * len(calls) * STEPS + first
        hook = denoiser.diffusion_conditioning.register_forward_hook(lambda *x: seen.append(x[-1][1]))
        result += sampled(client, calls[1:2], make)  # nothing is shared
        hook.remove()
    assert len(seen) == STEPS
    (reasons,) = (x for site, x in patched.steps.items() if site.endswith("DiffusionModule.forward"))
    recorded = 3 if client == "openfold3" else 2  # whose windows depend on values, so that no recording is kept
    assert reasons == {"": 3 * STEPS - 3 * recorded, FIRST: 3 * recorded, "a module inside has hooks": STEPS}
    for ours, theirs in zip(result, (*expected, expected[1]), strict=True):
        assert (ours - theirs).norm() < 1e-5 * theirs.norm()


@pytest.mark.slow
@pytest.mark.parametrize("client", CLIENTS)
def test_the_condition_of_atoms_is_one_for_all_steps(client: str, on_a_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that it gives is asked for once for each transformer of atoms."""
    _, make = sampler_of(client)
    made: list[Any] = []
    monkeypatch.setattr(diffusion_steps, "kept_condition", lambda *x: made.append(x))
    with evoattn.patch(client, graphs=False):
        sampled(client, [(2, 9)], lambda *x, **y: lambda: graphs.loop(lambda _: make(*x, **y)(), Count())(nn.Identity()))
    assert len(made) == 2


@pytest.mark.slow
@pytest.mark.parametrize("client", PROTENIX)
def test_protenix_without_a_cache_of_pairs(client: str, on_a_cpu: None) -> None:
    """The pair representation is computed once in a sampling, not in each step."""
    denoiser, make = sampler_of(client)
    trunk = torch.randn(9, 9, 8)
    options: Any = {"pair_z": None, "z_trunk": trunk, "enable_efficient_fusion": False}
    expected = sampled(client, [(2, 9)], make, **options)
    made: list[Any] = []
    own = denoiser.diffusion_conditioning.prepare_cache
    denoiser.diffusion_conditioning.prepare_cache = lambda *x: made.append(x) or own(*x)
    with evoattn.patch(client, graphs=False):
        result = sampled(client, [(2, 9)], make, **options)
    assert (result[0] - expected[0]).norm() < 1e-5 * expected[0].norm() and len(made) == 2  # one of `make`


@pytest.mark.slow
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("client", PROTENIX)
def test_protenix_computes_what_is_refused_as_it_would(
    client: str, fused: bool, on_a_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, for one sample, with its own norm of all pairs before the blocks or without it."""
    _, make = sampler_of(client)

    def refused(*_: Any) -> Any:
        raise UnknownArgument("the test")

    monkeypatch.setattr(diffusion, "prepared", refused)
    options = {"enable_efficient_fusion": fused}
    with monkeypatch.context() as patches, evoattn.patch(client, graphs=False):
        patches.setattr(denoisers, "may_share", lambda _: False)
        expected = sampled(client, [(1, 9)], make, **options)
    with evoattn.patch(client, graphs=False) as patched:
        result = sampled(client, [(1, 9)], make, **options)
    assert torch.equal(result[0], expected[0]) and patched.passed_on["the test"] == TRANSFORMERS * STEPS + 1


def on_gpu(client: str, windows: bool) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """A transformer, and the arguments of a call, in float32 on a GPU and in float64."""
    if windows:
        call = atoms(client, 3, True, 61)
    else:
        call = dict(zip(("a", "s", "z"), inputs(client, 3, True), strict=True)) | rows_of(client)
    exactly = {name: x.cuda() if isinstance(x, Tensor) else x for name, x in call.items()}
    original = transformer(client, windows).cuda().requires_grad_(False)
    return original, {name: x.float() if isinstance(x, Tensor) else x for name, x in exactly.items()}, exactly


@pytest.fixture
def products() -> Iterator[Any]:
    """The settings of products on a GPU, which are as before afterwards."""
    settings = torch.backends.cuda.matmul
    before = settings.allow_tf32
    yield settings
    settings.allow_tf32 = before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use; the tests above call the layers")
@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize("windows", [False, True])
@pytest.mark.parametrize("client", CLIENTS)
@torch.no_grad()
def test_no_further_from_float64_than_the_client_on_a_gpu(
    client: str, windows: bool, tf32: bool, monkeypatch: pytest.MonkeyPatch, products: Any
) -> None:
    """Also under OpenFold-3's autocast to float32, and in a CUDA graph, which has the same bits."""
    original, call, exactly = on_gpu(client, windows)
    true = exact(original, **exactly)
    original.float()
    there = exactly.get("mask", torch.ones(1, true.shape[-2], device="cuda")).expand(true.shape[:-1]) > 0
    runs: list[Any] = []
    own = diffusion_steps.run
    monkeypatch.setattr(diffusion_steps, "run", lambda *args: runs.append(args) or own(*args))
    products.allow_tf32 = tf32
    plain = original(**call)
    computed = functools.partial(known(client).call, Swap(original, is_called=True).layer, **call)
    with keeping.sampling():
        fused = computed()
        with torch.autocast("cuda", torch.float32):
            assert torch.equal(computed(), fused)
        with torch.autocast("cuda", torch.bfloat16), pytest.raises(UnknownArgument, match="not sampled in float32"):
            computed()
        replay, result = captured(lambda _: computed())
        replay(0)
        assert torch.equal(result, fused)
    assert len(runs) >= 3
    bound = 5e-3 if tf32 else 2e-6
    assert error(fused[there], true[there]) <= max(1.5 * error(plain[there], true[there]), bound)
