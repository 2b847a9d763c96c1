"""Diffusion transformers of Boltz by evoattn: answers and gradients, what samples share, and steps recorded as a whole."""

import contextvars
import dataclasses
import functools
import importlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import evoattn
from evoattn.clients import diffusion, graphs
from evoattn.clients.arguments import ClientsOwn
from evoattn.clients.site import Count
from evoattn.clients.swap import Swap
from evoattn.core import guards, keeping
from evoattn.nn import diffusion_steps
from tests.clients.test_graphs_boltz import first, second
from tests.helpers.boltz import SMALL
from tests.helpers.recorders import Again, Traced

VERSIONS = {1: "transformers", 2: "transformersv2"}


def by_layers(fused: Any, a: Tensor, s: Tensor, bias: Any, mask: Any, to_keys: Any, transition_mask: Any) -> Tensor:
    """`diffusion_steps.run` by the layers of evoattn.nn, which a CPU computes."""
    for block, each in zip(fused.blocks, bias, strict=True):
        a = block(a, s, mask, pair_bias=each, to_keys=to_keys, transition_mask=transition_mask)
    return a


def prepared(blocks: Any, *_: Any) -> Any:
    """`diffusion_steps.prepared` without the check of the device."""
    if not keeping.keeps() or not guards.only_computes():
        return None
    kind = diffusion_steps.Prepared
    return keeping.made_once("diffusion transformer", (blocks,), lambda: kind(blocks), kind.holds)


@pytest.fixture
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diffusion_steps, "run", by_layers)
    monkeypatch.setattr(diffusion_steps, "prepared", prepared)
    monkeypatch.setattr(diffusion, "may_have_kernels", lambda _: keeping.keeps())


def transformer(version: int, dtype: torch.dtype = torch.float64) -> Any:
    module = pytest.importorskip(f"boltz.model.modules.{VERSIONS[version]}", exc_type=ImportError)
    torch.manual_seed(0)
    more = {} if version == 2 else {"dim_pairwise": 8}
    made = module.DiffusionTransformer(3, 4, dim=32, dim_single_cond=24, **more).to(dtype)
    return filled(made)


def filled(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for name, x in module.named_parameters():
            size = x.shape[-1] ** -0.5 if x.ndim > 1 else 0.3
            x.copy_(torch.randn_like(x) * size + (x.ndim == 1 and "norm" in name and name.endswith("weight")))
    return module.eval()


def windows(x: Tensor) -> Tensor:
    """Keys of 4 windows of 8 queries: 16 each, with zeros before the first and after the last."""
    rows = x.reshape(32, -1)
    rows = torch.cat([torch.zeros_like(rows[:4]), rows, torch.zeros_like(rows[:4])])
    return torch.stack([rows[8 * i : 8 * i + 16] for i in range(4)])


@pytest.mark.parametrize("case", ["tokens", "windows"])
@pytest.mark.parametrize("version", [1, 2])
def test_answers_and_gradients_are_those_of_the_client(version: int, case: str) -> None:
    """In float64, but for the attention, which Boltz computes in float32."""
    client = transformer(version)
    swap = Swap(client, is_called=True)
    assert swap.layer is not None and not swap.reason
    batch, queries, keys, to_keys = (2, 10, 10, None) if case == "tokens" else (4, 8, 16, windows)
    a = torch.randn(batch, queries, 32, dtype=torch.float64, requires_grad=True)
    s = torch.randn(batch, queries, 24, dtype=torch.float64)
    structures = 1 if case == "tokens" else batch
    pairs = torch.randn(structures, queries, keys, 8 if version == 1 else 12, dtype=torch.float64)
    mask = (torch.arange(queries) < queries - 2).double().expand(batch, -1)
    right = client(a, s, pairs, mask, to_keys=to_keys, multiplicity=batch // structures)
    blocks = swap.layer.blocks
    samples = (structures, batch // structures)
    if version == 1:
        bias = [block.attention_pair_bias.pair_bias(pairs).unsqueeze(1) for block in blocks]
    else:
        bias = [x.movedim(-1, 1).unsqueeze(1) for x in pairs.split(4, -1)]
    picked = None if to_keys is None else lambda x: windows(x).unsqueeze(1)
    attended = (mask if to_keys is None else windows(mask.unsqueeze(-1))[..., 0]).unflatten(0, samples)
    y = by_layers(swap.layer, a.unflatten(0, samples), s.unflatten(0, samples), bias, attended, picked, None).flatten(0, 1)
    do = torch.randn_like(right)
    assert (y - right).abs().max() < 1e-6
    leaves = [a, *(x for name, x in client.named_parameters() if not name.endswith("proj_z.0.bias"))]  # its gradient is 0
    for ours, theirs in zip(torch.autograd.grad(y, leaves, do), torch.autograd.grad(right, leaves, do), strict=True):
        assert (ours - theirs).norm() <= 1e-6 * theirs.norm()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_layer_that_trains_has_the_gradients_of_the_client(device: str) -> None:
    """Two structures of three samples. In float64 by the layer alone, but for the attention; on a GPU in float32, patched."""
    dtype = torch.float64 if device == "cpu" else torch.float32
    client = transformer(2, dtype).to(device).layers[0].train()
    a, s = (torch.randn(6, 10, c, dtype=dtype, device=device, requires_grad=True) for c in (32, 24))
    pairs = torch.randn(2, 10, 10, 12, dtype=dtype, device=device, requires_grad=True)
    mask = (torch.arange(10) < 8).to(dtype).expand(6, -1).to(device)
    do = torch.randn(6, 10, 32, dtype=dtype, device=device)

    def step(run: Any) -> list[Tensor]:
        y = run(a, s, pairs[..., 4:8], mask, None, 3)
        return [y, *torch.autograd.grad(y, (a, s, pairs, *client.parameters()), do)]

    right = step(client)
    if device == "cpu":
        ours, near = step(functools.partial(diffusion.TRAINED.call, Swap(client, is_called=True).layer)), 1e-6
    else:
        with evoattn.patch("boltz", wait=True) as patched:
            ours, near = step(client), 1e-4
        assert patched.calls_by_site["boltz.model.modules.transformersv2:DiffusionTransformerLayer.forward"] == 1
    for x, y in zip(ours, right, strict=True):
        assert (x - y).norm() <= near * y.norm()


def test_layers_of_atoms_and_of_boltz_1_are_left_to_the_client() -> None:
    layer = transformer(2).layers[0]
    with pytest.raises(ClientsOwn):
        diffusion.TRAINED.call(Swap(layer, is_called=True).layer, *(torch.ones(4, 8, c) for c in (32, 24)), to_keys=windows)
    assert diffusion.TRAINED.make(transformer(1).layers[0]) is None


CHANGES = {
    "a norm after a layer": lambda x: setattr(x.layers[1], "post_lnorm", nn.LayerNorm(32)),
    "another layer": lambda x: x.layers.append(nn.Identity()),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_another_transformer_is_left_to_the_client(change: Any) -> None:
    client = transformer(2)
    change(client)
    assert "other modules" in Swap(client, is_called=True).reason


def test_a_cpu_computes_the_clients_own() -> None:
    client = transformer(2, torch.float32)
    swap = Swap(client, is_called=True)
    x = torch.ones(1, 6, 32)
    with keeping.sampling(), torch.no_grad(), pytest.raises(ClientsOwn):
        diffusion.BOLTZ2.call(swap.layer, x, torch.ones(1, 6, 24), bias=torch.ones(1, 6, 6, 12), mask=torch.ones(1, 6))


def test_biases_are_arranged_for_kernels() -> None:
    bias = torch.randn(2, 5, 7, 4)
    arranged = diffusion.heads_first(bias)
    assert torch.equal(arranged, bias.movedim(-1, 1))
    assert arranged.stride(-1) == 1 and not any(x % 4 for x in arranged.stride()[:-1])
    assert diffusion.heads_first(arranged.movedim(1, -1)).data_ptr() == arranged.data_ptr()


@torch.no_grad()
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("precision", ["exact", "bf16"])
def test_biases_are_in_the_precision_of_a_sampling(
    precision: str, version: int, monkeypatch: pytest.MonkeyPatch, on_a_cpu: None
) -> None:
    """And cast once for all steps, whose rows of keys start on multiples of 16 bytes."""
    seen: list[Any] = []
    monkeypatch.setattr(diffusion_steps, "run", lambda _, a, s, bias, *__: seen.append(bias) or a)
    layer = Swap(transformer(version, torch.float32), is_called=True).layer
    a, s, mask = torch.randn(1, 6, 32), torch.randn(1, 6, 24), torch.ones(1, 6)
    pairs, cache = torch.randn(1, 6, 6, 8 if version == 1 else 12), dict[str, Any]()
    with keeping.sampling(precision):
        arranged = diffusion.conditioned(lambda _, *, diffusion_conditioning, **__: diffusion_conditioning, Count())
        shared = {"diffusion_conditioning": {"token_trans_bias": pairs}, "s_trunk": s, "feats": {"token_pad_mask": mask}}
        for _ in range(2):
            if version == 1:
                diffusion.BOLTZ1.call(layer, a, s, z=pairs, mask=mask, model_cache=cache)
            else:
                bias = arranged(nn.Linear(2, 2), **shared)["token_trans_bias"]
                assert bias.dtype == torch.float32 and bias.float() is bias  # as the client casts it
                diffusion.BOLTZ2.call(layer, a, s, bias=bias, mask=mask)
    first, second = ([x.squeeze(1) for x in each] for each in seen)
    assert {x.dtype for x in first} == {torch.bfloat16 if precision == "bf16" else torch.float32}
    assert all(x.data_ptr() == y.data_ptr() for x, y in zip(first, second, strict=True))
    assert all(x.stride(-1) == 1 and not x.stride(-2) * x.itemsize % 16 for x in first)
    if version == 2:
        assert all(torch.equal(x, y.movedim(-1, 1).to(x)) for x, y in zip(first, pairs.split(4, -1), strict=True))


@torch.no_grad()
def test_what_samples_and_steps_share_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Casts to float32 and arranged biases; and one condition for all samples, in the client's own loop alone."""
    seen: list[Any] = []

    def denoise(self: Any, *, diffusion_conditioning: Any, s_trunk: Tensor, feats: Any, times: Tensor) -> None:
        condition(self, times, s_trunk.expand(3, -1, -1), s_trunk.expand(3, -1, -1))
        seen.append(diffusion_conditioning)

    sizes: list[int] = []
    condition = diffusion.shared_condition(lambda _, *x: sizes.append({len(y) for y in x}.pop()), Count())
    forward, module = diffusion.conditioned(denoise, Count()), nn.Linear(2, 2)
    shared = {"token_trans_bias": torch.randn(1, 5, 5, 8).bfloat16(), "c": torch.randn(1, 4).half(), "to_keys": len}
    call = {"diffusion_conditioning": shared, "s_trunk": torch.randn(1, 5, 4), "feats": {"token_pad_mask": torch.ones(1, 5)}}
    times = torch.arange(3.0)
    forward(module, **call, times=times)
    assert seen.pop() is shared and sizes == [3]
    monkeypatch.setattr(diffusion, "may_have_kernels", lambda _: True)
    with keeping.sampling():
        for _ in range(2):
            forward(module, **call, times=times)
    first_call, second_call = seen
    assert first_call["c"] is second_call["c"] and first_call["c"].dtype == torch.float32 and first_call["to_keys"] is len
    bias = first_call["token_trans_bias"]
    assert bias is second_call["token_trans_bias"] and torch.equal(bias, shared["token_trans_bias"].float())
    assert bias.stride(2) == 1 and sizes == [3, 3, 3]
    graphs.loop(lambda _: forward(module, **call, times=times), Count())(nn.ModuleList())
    assert sizes[-1] == 1
    with keeping.sampling(), pytest.raises(TypeError):
        forward(module, shared)  # as the client says it


def keys(x: Tensor, matrix: Tensor, size: int) -> Tensor:
    """The rows of x that a matrix picks."""
    vars(keys)["asked"].append(size)
    return (matrix @ x.flatten(0, -2)).view(1, -1, x.shape[-1])


def shifted(x: Tensor, a: Any, b: Any) -> Tensor:
    """The rows of x that a picks, or those of b turned round."""
    return keys(x, a, 4) if isinstance(a, Tensor) else keys(x, b, 4).flip(1)


def test_keys_of_windows_are_found_once() -> None:
    """For the same tensors and numbers, however often the client makes the function anew."""
    vars(keys)["asked"] = asked = []

    def rows(matrix: Tensor, size: int) -> Tensor:
        pick = functools.partial(keys, matrix=matrix, size=size)

        def again(x: Tensor) -> Tensor:
            return pick(x)

        found: Any = diffusion._kept(again, again, (1, 1), 6)
        return found.rows

    matrix, other = torch.eye(6).flip(0)[:4], torch.eye(6)[:4]
    with keeping.sampling():
        assert rows(matrix, 4).tolist() == rows(matrix, 4).tolist() == [6, 5, 4, 3] and len(asked) == 1
        assert rows(other, 4).tolist() == [1, 2, 3, 4] and rows(matrix, 5).tolist() == [6, 5, 4, 3] and len(asked) == 3
        matrix.copy_(other)
        assert rows(matrix, 4).tolist() == [1, 2, 3, 4]
        rows_of = [
            diffusion._kept(functools.partial(shifted, a=x, b=y), functools.partial(shifted, a=x, b=y), (1, 1), 6).rows
            for x, y in ((matrix, 0), (0, matrix))
        ]
        assert not torch.equal(*rows_of), "which argument the tensor is"
        box = [matrix]
        assert diffusion._kept(lambda x: box[0] @ x, len, (1, 1), 6) is len  # what a list holds may change


@torch.no_grad()
@pytest.mark.parametrize("hooked", [False, True])
def test_the_condition_of_the_trunk_is_embedded_once(hooked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    encoders = pytest.importorskip("boltz.model.modules.encodersv2", exc_type=ImportError)
    condition = filled(encoders.SingleConditioning(16.0, token_s=4, dim_fourier=8))
    trunk, inputs, times = torch.randn(1, 5, 4), torch.randn(1, 5, 4), torch.rand(3)
    called: list[Any] = []
    embed = nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: called.append(self) or embed(self, x))
    if hooked:
        condition.single_embed.register_forward_hook(lambda *_: None)
    facts = contextvars.ContextVar[Any]("facts")
    facts.set(diffusion._Facts((trunk, inputs)))
    monkeypatch.setattr(diffusion, "_facts", facts)
    forward = diffusion.shared_condition(encoders.SingleConditioning.forward, Count())
    with keeping.sampling():
        for turn in range(3):
            s, fourier = forward(condition, times + turn, trunk.expand(3, -1, -1), inputs.expand(3, -1, -1))
            right, right_fourier = encoders.SingleConditioning.forward(condition, times[:1] + turn, trunk, inputs)
            assert torch.equal(s, right) and torch.equal(fourier, right_fourier)
        linears = [x for x in called if x is condition.single_embed]
        assert len(linears) == (6 if hooked else 4)  # three are the client's own


def module_of(version: int) -> Any:
    name = "boltz.model.modules.diffusion" + ("v2" if version == 2 else "")
    kind = pytest.importorskip(name, exc_type=ImportError).AtomDiffusion
    torch.manual_seed(0)
    if version == 2:
        return filled(kind(SMALL)), second
    more = {"token_z": 8, "atom_z": 8, "atom_feature_dim": 3 + 1 + 1 + 128 + 256}
    return filled(kind({**SMALL, **more}, use_inference_model_cache=True)), first


@pytest.mark.slow
@pytest.mark.parametrize("version", [1, 2])
def test_samples_are_those_of_the_client(version: int, monkeypatch: pytest.MonkeyPatch, on_a_cpu: None) -> None:
    """With one and two samples, and two lengths in turn. The transformers of every step are evoattn's."""
    monkeypatch.setattr(graphs, "Recorder", Again)
    module, sample = module_of(version)
    calls = ((1, 6, 8), (2, 6, 12), (1, 6, 8))
    expected = [sample(module, *call) for call in calls]
    with evoattn.patch("boltz", graphs=True) as patched:
        result = [sample(module, *call) for call in calls]
    for ours, theirs in zip(result, expected, strict=True):
        assert (ours - theirs).norm() < 1e-5 * theirs.norm()
    assert patched.calls_by_kind["diffusion transformer"] == 3 * 6 * 3
    assert str(patched).startswith("evoattn computes")


@pytest.mark.slow
def test_a_step_of_boltz2_is_one_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three steps run, and the second is recorded; the denoiser inside is recorded with it. Another sample records nothing."""
    monkeypatch.setattr(graphs, "Recorder", Traced)
    module, sample = module_of(2)
    own, calls = type(module).preconditioned_network_forward, []

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(self)
        return own(self, *args, **kwargs)

    monkeypatch.setattr(type(module), "preconditioned_network_forward", counted)
    there = "boltz.model.modules.diffusionv2"
    sampled = {f"{there}:AtomDiffusion.sample", f"{there}:DiffusionModule.forward"}
    clients = importlib.import_module("evoattn.clients.boltz").CLIENTS
    layers = tuple(site for site in clients["boltz"].layers if str(site) in sampled)  # others round differently if traced
    monkeypatch.setitem(clients, "boltz", dataclasses.replace(clients["boltz"], layers=layers))
    with evoattn.patch("boltz", graphs=False):
        expected = [sample(module, 1, 8, 8, seed) for seed in (3, 4)]
    module.clock = iter(())  # somebody times the sampler, by something that cannot be compared
    with evoattn.patch("boltz", graphs=True) as patched:
        calls.clear()
        first_sample = sample(module, 1, 8, 8, 3)
        steps = dict(patched.steps[f"{there}:DiffusionModule.forward"])
        assert steps[""] == 5 and len(calls) < 8
        samples = [first_sample, sample(module, 1, 8, 8, 4)]
    assert patched.steps[f"{there}:DiffusionModule.forward"][""] == 5 + 8
    assert all(map(torch.equal, samples, expected))
    with evoattn.patch("boltz", graphs=True):
        sample(module, 1, 6, 8, 3)
        module.sigma_data = 2 * module.sigma_data
        changed = sample(module, 1, 8, 8, 3)
    with evoattn.patch("boltz", graphs=False):
        assert torch.equal(changed, sample(module, 1, 8, 8, 3)) and not torch.equal(changed, expected[0])


def test_a_module_that_changes_in_a_loop_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replays do not look at it again."""
    linear = nn.Linear(3, 3).eval().requires_grad_(False)
    step = graphs.step(nn.Linear.forward, Count(), Traced())  # type: ignore[arg-type]
    monkeypatch.setattr(nn.Linear, "forward", step)

    def sample(_: Any) -> None:
        for turn in range(6):
            step(linear, torch.full((2, 3), float(turn)))
            if turn == 4:
                linear.weight.mul_(2)

    with torch.no_grad(), pytest.warns(UserWarning, match="Linear has changed while it was sampled"):
        graphs.loop(sample, Count())(nn.ModuleList([linear]))
