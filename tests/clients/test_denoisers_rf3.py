"""RosettaFold-3's denoiser by evoattn: answers, gradients, what steps share, random numbers, and refusals."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import evoattn
from evoattn.clients import diffusion, graphs, rf3_denoiser
from evoattn.clients.af3_transformers import keys_around
from evoattn.clients.arguments import UnknownArgument
from evoattn.clients.graphs import FIRST
from evoattn.clients.rf3_denoiser import AtomPairs
from evoattn.clients.site import Count
from evoattn.clients.swap import Swap
from evoattn.core import keeping
from evoattn.nn import diffusion_steps
from tests.clients.standins import filled
from tests.clients.test_denoisers import Scouting
from tests.clients.test_diffusion import by_layers, prepared
from tests.helpers.denoisers import STEPS, draw, module, rf3, rf3_features
from tests.helpers.denoisers import rf3_denoiser as denoiser_of
from tests.pair.products import error

CPU = torch.device("cpu")
TRANSFORMERS = 3
"""Those of a denoiser: of the encoder, of tokens and of the decoder."""


@pytest.fixture
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diffusion_steps, "run", by_layers)
    monkeypatch.setattr(diffusion_steps, "prepared", prepared)
    monkeypatch.setattr(diffusion_steps, "kept_condition", lambda *_: None)
    monkeypatch.setattr(diffusion, "may_have_kernels", lambda _: keeping.keeps())


def transformer(parallel: bool = True, kq_norm: bool = True) -> Any:
    """A transformer with 32 channels of a, 24 of s and 8 of z, in float64."""
    kind = module("rf3.model.layers.af3_diffusion_transformer").DiffusionTransformer
    name = "no_residual_connection_between_attention_and_transition"
    made = filled(kind(32, 24, 8, 3, {"n_head": 4, name: parallel, "kq_norm": kq_norm})).eval()
    return in_float(made)


def in_float(made: Any) -> Any:
    """A module whose attention does not cast to bfloat16."""
    for x in made.modules():
        if hasattr(x, "force_bfloat16"):
            x.force_bfloat16 = False
    return made


def inputs(samples: int, count: int, shared: bool) -> list[Tensor]:
    torch.manual_seed(2)
    shapes = ((samples, count, 32), (1 if shared else samples, count, 24), (count, count, 8))
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


def in_windows(z: Tensor) -> Tensor:
    """The pairs of each query and its keys."""
    atoms = len(z)
    query = torch.arange(-(-atoms // 32) * 32).clamp(max=atoms - 1).view(-1, 32, 1)
    return z[query, keys_around(atoms, 32, 128, z.device).clamp(0, atoms - 1).unsqueeze(1)]


def call_of(a: Tensor, s: Tensor, z: Tensor, windows: bool) -> tuple[Any, ...]:
    return (a, s, AtomPairs(in_windows(z), lambda: z), True) if windows else (a, s, z, None)


@pytest.mark.parametrize(("parallel", "kq_norm"), [(True, True), (False, True), (True, False)])
@pytest.mark.parametrize(("windows", "count"), [(False, 10), (True, 200), (True, 64), (True, 7)])
@torch.no_grad()
def test_answers_are_those_of_the_client(windows: bool, count: int, parallel: bool, kq_norm: bool, on_a_cpu: None) -> None:
    """After one block, after two, and after all; of several samples, and of each alone."""
    original = transformer(parallel, kq_norm)
    while len(original.blocks):
        swap = Swap(original, is_called=True)
        assert swap.layer is not None and not swap.reason
        for shared in (True, False):
            a, s, z = inputs(3, count, shared)
            expected = original(a, s, z, True if windows else None)
            with keeping.sampling():
                call = rf3_denoiser.TRANSFORMER.call
                actual = call(swap.layer, *call_of(a, s, z, windows))
                alone = [call(swap.layer, *call_of(a[i : i + 1], s if shared else s[i : i + 1], z, windows)) for i in range(3)]
            assert (actual - expected).abs().max() < 1e-8 * expected.abs().max()
            assert (torch.cat(alone) - expected).abs().max() < 1e-8 * expected.abs().max()
        del original.blocks[-1]


@pytest.mark.parametrize(("windows", "count"), [(False, 10), (True, 40)])
def test_gradients_are_those_of_the_client(windows: bool, count: int, on_a_cpu: None) -> None:
    original = transformer()
    given = [x.requires_grad_() for x in inputs(2, count, True)]
    leaves = [
        *given,
        *(x for name, x in original.named_parameters() if not name.endswith(("key_layer_norm.bias", "ln_0.bias"))),
    ]
    expected = original(*given, True if windows else None)  # the two biases shift all scores of a query: their gradient is 0
    with keeping.sampling():
        actual = rf3_denoiser.TRANSFORMER.call(Swap(original, is_called=True).layer, *call_of(*given, windows))
    cotangent = torch.randn_like(expected)
    for ours, theirs in zip(*(torch.autograd.grad(y, leaves, cotangent) for y in (actual, expected)), strict=True):
        assert (ours - theirs).norm() <= 1e-8 * theirs.norm()


@contextlib.contextmanager
def shared(one_condition: bool) -> Any:
    token = rf3_denoiser._shared.set(rf3_denoiser._Shared(one_condition))
    try:
        with keeping.sampling(), torch.no_grad():
            yield
    finally:
        rf3_denoiser._shared.reset(token)


ENCODERS: dict[str, dict[str, Any]] = {
    "as the program": {},
    "distances": {"use_inv_dist_squared": False, "no_grad_on_chiral_center": True},
    "embedded atoms": {"use_atom_level_embedding": True, "atom_level_embedding_dim": 6, "use_chiral_features": False},
}


def arguments() -> tuple[dict[str, Any], Tensor, Tensor, Tensor, Tensor]:
    """Features of 30 residues, positions, both single representations and the pair representation, in float64."""
    f = {name: x.double() if x.is_floating_point() else x for name, x in rf3_features(30).items()}
    f["atom_level_embedding"] = draw(9, 8, len(f["ref_pos"]), 6).double()
    given = (draw(3, 2, len(f["ref_pos"]), 3), draw(7, 30, 20), draw(6, 30, 12), draw(8, 30, 30, 8))
    return f, *(x.double() for x in given)


@pytest.mark.parametrize("settings", ENCODERS.values(), ids=ENCODERS)
def test_the_encoder_of_atoms_is_that_of_the_client(
    settings: dict[str, Any], on_a_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = in_float(denoiser_of(CPU, **settings)).double().atom_attention_encoder
    f, x, _, s, z = arguments()
    monkeypatch.setattr(torch, "eye", functools.partial(torch.eye, dtype=torch.float64))
    with torch.no_grad():
        expected = encoder(dict(f), x, s, z)
    forward = rf3_denoiser.encoded(type(encoder).forward, Count())
    kind = type(encoder.atom_transformer.diffusion_transformer)
    with shared(True), pytest.MonkeyPatch.context() as patched:
        patched.setattr(kind, "forward", rf3_denoiser.transformer(kind.forward, Count()))
        for _ in range(2):
            *actual, pairs = forward(encoder, f, x, s, z)
            for ours, theirs in zip(actual, expected[:3], strict=True):
                assert (ours - theirs).abs().max() < 1e-8 * theirs.abs().max()
            assert (pairs.windows - in_windows(expected[3])).abs().max() < 1e-12 * expected[3].abs().max()
            assert torch.equal(pairs.whole(), expected[3])


def conditioning_in_float64() -> Any:
    conditioning = denoiser_of(CPU).double().diffusion_conditioning
    conditioning.relative_position_encoding.linear.register_forward_pre_hook(lambda _, x: x[0].double())
    return conditioning


@pytest.mark.parametrize("samples", [1, 3])
def test_the_conditioning_is_that_of_the_client(samples: int) -> None:
    """Bit for bit for one sample. What does not depend on the noise level is computed once."""
    conditioning = conditioning_in_float64()
    f, _, s_inputs, s, z = arguments()
    forward, made = rf3_denoiser.conditioned(type(conditioning).forward, Count()), []
    hook = conditioning.to_zii.register_forward_hook(lambda *_: made.append(1))
    results = []
    with shared(True):
        for level in (100.0, 3.0):
            t = torch.full((samples,), level, dtype=torch.float64)
            results.append((forward(conditioning, t, f, s_inputs, s, z), t))
    assert len(made) == 1
    hook.remove()
    for (single, pairs), t in results:
        expected, right = conditioning(t, f, s_inputs, s, z)
        assert torch.equal(pairs, right) and single.shape[0] == 1
        assert torch.equal(single, expected) if samples == 1 else (single - expected).abs().max() < 1e-12


def test_several_noise_levels_have_conditions_of_their_own() -> None:
    conditioning = conditioning_in_float64()
    f, _, s_inputs, s, z = arguments()
    t = torch.tensor([100.0, 3.0], dtype=torch.float64)
    with shared(False):
        single, _ = rf3_denoiser.conditioned(type(conditioning).forward, Count())(conditioning, t, f, s_inputs, s, z)
        assert (single - conditioning(t, f, s_inputs, s, z)[0]).abs().max() < 1e-12


def sampled(calls: Any, make: Callable[..., Callable[[], Any]], dtype: torch.dtype | None = None) -> list[dict[str, Any]]:
    results = []
    for call in calls:
        torch.manual_seed(4)
        with torch.no_grad(), torch.autocast("cpu", dtype, enabled=dtype is not None):
            results.append(make(*call)())
    return results


@pytest.mark.parametrize("at_once", [True, False])
def test_rotations_are_those_that_the_client_draws(at_once: bool) -> None:
    own = module("foundry.utils.rotation_augmentation")
    torch.manual_seed(1)
    expected = [(own.uniform_random_rotation((2,)), torch.normal(mean=0, std=1, size=(2, 1, 3))) for _ in range(3)]
    after = torch.rand(1)
    torch.manual_seed(1)
    turns = list(rf3_denoiser._turns(own, 3, 2, CPU, at_once))
    assert all(
        torch.equal(x, y) for ours, theirs in zip(turns, expected, strict=True) for x, y in zip(ours, theirs, strict=True)
    )
    assert torch.equal(torch.rand(1), after)


@pytest.mark.parametrize("samples", [1, 2])
def test_the_loop_is_that_of_the_client(samples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, with the client's own denoiser inside, and all that it returns. An exchanged augmentation is called."""
    ours: list[Any] = []
    turns = rf3_denoiser._turns
    monkeypatch.setattr(rf3_denoiser, "_turns", lambda *args: ours.append(args) or turns(*args))
    denoiser, make = rf3(CPU)
    in_float(denoiser)
    (expected,) = sampled([(samples, 9)], make)
    sampler = make(1, 3).func.__self__
    sampler.sample_diffusion_like_af3 = functools.partial(
        rf3_denoiser.sampled(type(sampler).sample_diffusion_like_af3, Count()), sampler
    )
    (result,) = sampled([(samples, 9)], make)
    assert len(ours) == 1
    assert list(result) == list(expected) and torch.equal(result["X_L"], expected["X_L"])
    for name in list(result)[1:]:
        assert len(result[name]) == STEPS
        assert all(torch.equal(x, y) for x, y in zip(result[name], expected[name], strict=True))
    inference = module("rf3.diffusion_samplers.inference_sampler")
    monkeypatch.setattr(inference, "centre_random_augmentation", lambda x, *_: x + 1)
    (moved,) = sampled([(samples, 9)], make)
    assert len(ours) == 1 and not torch.equal(moved["X_L"], expected["X_L"])


@pytest.mark.slow
def test_samples_are_those_of_the_client(on_a_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one and two samples, and two lengths in turn. A recording is kept for the next sampling of its length."""
    denoiser, make = rf3(CPU)
    in_float(denoiser)
    calls = ((1, 6), (2, 9), (1, 6))
    expected = sampled(calls, make)
    monkeypatch.setattr(graphs, "Recorder", Scouting)
    monkeypatch.setattr(diffusion_steps, "prepared", lambda blocks, *_: diffusion_steps.Prepared(blocks))
    layers = module("rf3.model.layers.pairformer_layers")  # torch's looks at the values on a CPU
    monkeypatch.setattr(layers, "one_hot", lambda x, size: (x.unsqueeze(-1) == torch.arange(size)).long())
    seen: list[Any] = []
    with evoattn.patch("rf3", graphs=True) as patched:
        result = sampled(calls, make)
        assert patched.calls_by_kind["diffusion transformer"] == TRANSFORMERS * len(calls) * STEPS
        hook = denoiser.diffusion_conditioning.register_forward_hook(lambda *x: seen.append(x[-1][1]))
        result += sampled(calls[1:2], make)  # nothing is shared
        hook.remove()
    assert len(seen) == STEPS and seen[0] is not seen[1]
    (reasons,) = (x for site, x in patched.steps.items() if site.endswith("DiffusionModule.forward"))
    assert reasons == {"": 3 * STEPS - 2 * 3, FIRST: 2 * 3, "a module inside has hooks": STEPS}
    for ours, theirs in zip(result, (*expected, expected[1]), strict=True):
        assert (ours["X_L"] - theirs["X_L"]).norm() < 1e-5 * theirs["X_L"].norm()


@pytest.mark.slow
def test_what_is_refused_is_computed_as_the_client_would(on_a_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the pair representation of all atoms."""
    denoiser, make = rf3(CPU)
    in_float(denoiser)
    (expected,) = sampled([(2, 9)], make)

    def refused(*_: Any) -> Any:
        raise UnknownArgument("the test")

    monkeypatch.setattr(diffusion, "prepared", refused)
    with evoattn.patch("rf3", graphs=False) as patched:
        (result,) = sampled([(2, 9)], lambda *call: lambda: graphs.loop(lambda _: make(*call)(), Count())(denoiser))
    assert patched.passed_on["the test"] >= TRANSFORMERS * STEPS
    assert (result["X_L"] - expected["X_L"]).norm() < 1e-5 * expected["X_L"].norm()


@pytest.mark.slow
def test_the_condition_of_atoms_is_one_for_all_steps(on_a_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that it gives is asked for once for each transformer of atoms."""
    denoiser, make = rf3(CPU)
    in_float(denoiser)
    made: list[Any] = []
    monkeypatch.setattr(diffusion_steps, "kept_condition", lambda *x: made.append(x))
    with evoattn.patch("rf3", graphs=True):
        sampled([(2, 9)], make)
    assert len(made) == 2


@pytest.mark.slow
def test_under_autocast_no_further_from_float32_than_the_client(on_a_cpu: None) -> None:
    """In each step, whose noise is the same but for what came before it."""
    denoiser, make = rf3(CPU)
    in_float(denoiser)
    calls = [(2, 30)]
    ((true,), (plain,)) = (sampled(calls, make, dtype) for dtype in (None, torch.bfloat16))
    with evoattn.patch("rf3", graphs=True):
        (result,) = sampled(calls, make, torch.bfloat16)
    name = "X_denoised_L_traj"
    assert [x.dtype for x in result[name]] == [x.dtype for x in plain[name]]
    errors = [torch.tensor([error(x, y) for x, y in zip(each[name], true[name], strict=True)]) for each in (result, plain)]
    assert errors[0].mean() < 1.1 * errors[1].mean()


@pytest.mark.parametrize(
    ("asked", "autocast", "precision"),
    [
        ("exact", torch.bfloat16, "bf16"),
        ("exact", torch.float16, "tf32"),
        ("exact", None, "exact"),
        ("tf32", torch.bfloat16, "tf32"),
    ],
)
def test_the_precision_is_the_programs_own_unless_one_is_named(
    asked: str, autocast: Any, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    loop = graphs.loop(lambda _: seen.append(keeping.precision()), Count(precision=asked), rf3_denoiser._precision)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda _: autocast is not None)
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda _: autocast)
    loop(None)
    assert seen == [precision]


def test_another_transformer_is_left_to_the_client() -> None:
    original = transformer()
    original.blocks[1].attention_pair_bias.to_g[1] = torch.nn.Tanh()
    assert "other modules" in Swap(original, is_called=True).reason
    original = transformer()
    original.blocks[1].no_residual_connection_between_attention_and_transition = False
    assert "other modules" in Swap(original, is_called=True).reason


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use; the interpreter has the kernels")
@pytest.mark.parametrize("samples", [1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_a_step_on_a_gpu_is_no_further_from_float32_than_the_client(dtype: torch.dtype, samples: int) -> None:
    """The denoiser in the loop, recorded. Two samplings, of which the second records nothing."""
    device = torch.device("cuda")
    denoiser, make = rf3(device)

    def run(kind: torch.dtype) -> dict[str, Any]:
        for x in denoiser.modules():
            vars(x).update({"force_bfloat16": kind == torch.bfloat16} if hasattr(x, "force_bfloat16") else {})
        with device:
            sampling = make(samples, 40)
        torch.manual_seed(4)
        with torch.autocast("cuda", kind, enabled=kind != torch.float32):
            return sampling()  # type: ignore[no-any-return]

    true, plain = run(torch.float32), run(dtype)
    with evoattn.patch("rf3", graphs=True) as patched:
        results = [run(dtype) for _ in range(2)]
    (reasons,) = (x for site, x in patched.steps.items() if site.endswith("DiffusionModule.forward"))
    assert reasons == {"": 2 * STEPS - 3, FIRST: 3}
    name = "X_denoised_L_traj"
    for result in results:
        errors = [torch.tensor([error(x, y) for x, y in zip(y[name], true[name], strict=True)]) for y in (result, plain)]
        assert errors[0].mean() <= max(1.5 * errors[1].mean(), 1e-5)
