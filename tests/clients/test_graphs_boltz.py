"""Boltz's denoiser and trunk, recorded."""

import functools
import importlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import evoattn
from evoattn.clients import graphs
from evoattn.clients.graphs import FIRST
from tests.clients.recording import draw
from tests.helpers.boltz import SMALL
from tests.helpers.recorders import Again, Traced


def coordinates(module: Any, feats: dict[str, Any], **options: Any) -> Tensor:
    """Coordinates that a diffusion module samples with the same random numbers each time."""
    torch.manual_seed(1)
    with torch.no_grad():
        sample = module.sample(atom_mask=feats["atom_pad_mask"], feats=feats, **options)
    return sample["sample_atom_coords"]  # type: ignore[no-any-return]


def second(module: Any, samples: int, steps: int, length: int = 8, seed: int = 0) -> Tensor:
    """Coordinates that Boltz-2's diffusion samples, of random features."""
    from boltz.model.modules.encodersv2 import get_indexing_matrix, single_to_keys

    windows, tokens = 2, length
    atoms = 32 * windows
    indexing = get_indexing_matrix(windows, 32, 128, torch.device("cpu"))
    to_keys = functools.partial(single_to_keys, indexing_matrix=indexing, W=32, H=128)
    feats = {
        "ref_pos": draw(10 * seed + 1, 1, atoms, 3),
        "atom_pad_mask": torch.ones(1, atoms),
        "token_pad_mask": torch.ones(1, tokens),
        "atom_to_token": nn.functional.one_hot(torch.arange(atoms) % tokens, tokens)[None],
        "record": [object()],
    }
    conditioning = {
        "q": draw(10 * seed + 2, 1, atoms, 16),
        "c": draw(10 * seed + 3, 1, atoms, 16),
        "to_keys": to_keys,
        "atom_enc_bias": draw(10 * seed + 4, 1, windows, 32, 128, 4),
        "atom_dec_bias": draw(10 * seed + 5, 1, windows, 32, 128, 4),
        "token_trans_bias": draw(10 * seed + 6, 1, tokens, tokens, 4),
    }
    return coordinates(
        module,
        feats,
        num_sampling_steps=steps,
        multiplicity=samples,
        max_parallel_samples=None,
        steering_args=dict.fromkeys(("fk_steering", "physical_guidance_update", "contact_guidance_update"), False),
        s_trunk=draw(10 * seed + 7, 1, tokens, 8),
        s_inputs=draw(10 * seed + 8, 1, tokens, 8),
        diffusion_conditioning=conditioning,
    )


def first(module: Any, samples: int, steps: int, length: int = 8) -> Tensor:
    """The same of Boltz-1, whose first step fills a cache."""
    atoms, tokens = 64, length
    feats = {
        "ref_pos": draw(1, 1, atoms, 3),
        "ref_charge": draw(2, 1, atoms),
        "ref_element": draw(3, 1, atoms, 128),
        "ref_atom_name_chars": draw(4, 1, atoms, 4, 64),
        "token_index": torch.arange(tokens)[None],
        "ref_space_uid": torch.arange(atoms)[None] // 8,
        "atom_pad_mask": torch.ones(1, atoms),
        "token_pad_mask": torch.ones(1, tokens),
        "atom_to_token": nn.functional.one_hot(torch.arange(atoms) % tokens, tokens)[None].float(),
    }
    return coordinates(
        module,
        feats,
        num_sampling_steps=steps,
        multiplicity=samples,
        max_parallel_samples=samples,
        steering_args=None,
        s_trunk=draw(7, 1, tokens, 8),
        s_inputs=draw(8, 1, tokens, 79),
        z_trunk=draw(9, 1, tokens, tokens, 8),
        relative_position_encoding=draw(10, 1, tokens, tokens, 8),
    )


@pytest.mark.slow
@pytest.mark.parametrize("version", [1, 2])
def test_samples_of_boltz_have_the_same_bits_with_graphs(version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("boltz.model.modules.diffusionv2", reason="Boltz is not installed", exc_type=ImportError)
    monkeypatch.setattr(graphs, "Recorder", Traced)
    name = "boltz.model.modules.diffusion" + ("v2" if version == 2 else "")
    kind = importlib.import_module(name).AtomDiffusion
    torch.manual_seed(0)
    if version == 2:
        module, sample = kind(SMALL), second
    else:
        more = {"token_z": 8, "atom_z": 8, "atom_feature_dim": 3 + 1 + 1 + 128 + 256}
        module, sample = kind({**SMALL, **more}, use_inference_model_cache=True), first
    module.eval()
    with torch.no_grad():
        for x in module.parameters():
            x.normal_(0, 0.3)
    calls = ((1, 6, 8), (2, 6, 12), (1, 6, 8))
    with evoattn.patch("boltz", layers=False, graphs=False):
        expected = [sample(module, *call) for call in calls]
    with evoattn.patch("boltz", layers=False, graphs=True) as patched:
        result = [sample(module, *call) for call in calls]
    assert all(map(torch.equal, result, expected))
    steps = patched.steps[f"{name}:DiffusionModule.forward"]
    eager = 3 if version == 2 else 4  # the first step of Boltz-1 fills its cache
    assert steps[""] == 2 * (6 - eager) + 6 - (version == 1), "the recording of the first sample is kept for the third"
    assert patched.calls == 3 * 6 * 3


@pytest.mark.slow
@pytest.mark.parametrize("layers", [False, True])
def test_boltz_trunk(layers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trunk's blocks share a recording, with the random numbers that Boltz' blocks draw."""
    pytest.importorskip("boltz.model.layers.pairformer", reason="Boltz is not installed", exc_type=ImportError)
    monkeypatch.setattr(graphs, "Recorder", Again if layers else Traced)
    trunk = importlib.import_module("boltz.model.layers.pairformer").PairformerModule(16, 8, 6, 2, 0.25, 4, 2, v2=True).eval()
    with torch.no_grad():
        for x in trunk.parameters():
            x.normal_(0, 0.3)
    s, z, mask = draw(1, 1, 9, 16), draw(2, 1, 9, 9, 8), torch.ones(1, 9)

    def fold() -> tuple[Tensor, ...]:
        torch.manual_seed(5)
        state = s, z
        with torch.no_grad():
            for _ in range(3):
                state = trunk(*state, mask, pair_mask)
        return *state, torch.rand(3)

    pair_mask = mask[:, :, None] * mask[:, None]
    with evoattn.patch("boltz", layers=layers, graphs=False):
        expected = fold()
    with evoattn.patch("boltz", layers=layers, graphs=True) as patched:
        folded = fold()
    assert all(map(torch.equal, folded, expected))
    assert patched.steps["boltz.model.layers.pairformer:PairformerLayer.forward"] == {"": 15, FIRST: 3}


@pytest.mark.slow
@pytest.mark.parametrize("saves", [True, False])
def test_boltz_trunk_is_trained(saves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps with dropout have the gradients of the original blocks, with Boltz' checkpoints and without."""
    kind = pytest.importorskip("boltz.model.layers.pairformer", reason="Boltz is not installed", exc_type=ImportError)
    monkeypatch.setattr(graphs, "Recorder", Traced)
    trunk = kind.PairformerModule(16, 8, 6, 2, 0.25, 4, 2, v2=True, activation_checkpointing=saves).train()
    with torch.no_grad():
        for x in trunk.parameters():
            x.normal_(0, 0.3)
    state = {name: x.clone() for name, x in trunk.state_dict().items()}
    s, z, mask = draw(1, 1, 9, 16), draw(2, 1, 9, 9, 8), torch.ones(1, 9)

    def train() -> list[Tensor]:
        trunk.load_state_dict(state)
        found = []
        torch.manual_seed(5)
        for _ in range(3):
            inputs = [x.clone().requires_grad_() for x in (s, z)]
            single, pair = trunk(*inputs, mask, mask[:, :, None] * mask[:, None])
            (single.square().sum() + pair.square().sum()).backward()
            found += [single.detach(), pair.detach(), *(x.grad for x in (*inputs, *trunk.parameters())), torch.rand(3)]
            with torch.no_grad():
                for x in trunk.parameters():
                    x -= 1e-3 * x.grad  # type: ignore[operator]
            trunk.zero_grad()
        return found  # type: ignore[return-value]

    with evoattn.patch("boltz", layers=False, graphs=False):
        expected = train()
    with evoattn.patch("boltz", layers=False, graphs=True) as patched:
        trained = train()
    assert all(map(torch.equal, trained, expected))
    steps = patched.steps["boltz.model.layers.pairformer:PairformerLayer.forward"]
    assert steps == ({"": 36 - 6, FIRST: 6} if saves else {"": 0, "a gradient may be wanted": 18})


@pytest.mark.slow
def test_layers_of_boltz_denoiser_are_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of tokens, for two structures of two samples: gradients are those of the originals. In inference no layer is."""
    module = pytest.importorskip("boltz.model.modules.transformersv2", reason="Boltz is not installed", exc_type=ImportError)
    monkeypatch.setattr(graphs, "Recorder", Traced)
    tokens = module.DiffusionTransformer(5, 4, dim=16, dim_single_cond=8, activation_checkpointing=True).train()
    with torch.no_grad():
        for x in tokens.parameters():
            x.normal_(0, 0.3)
    a, s, bias, mask = draw(1, 4, 6, 16), draw(2, 4, 6, 8), draw(3, 2, 6, 6, 20), torch.ones(4, 6)

    def train() -> list[Any]:
        found: list[Any] = []
        for _ in range(3):
            inputs = [x.clone().requires_grad_() for x in (a, s, bias)]
            y = tokens(*inputs, mask, multiplicity=2)
            y.square().sum().backward()
            found += [y.detach(), *(x.grad for x in (*inputs, *tokens.parameters()))]
            tokens.zero_grad()
        return found

    with evoattn.patch("boltz", layers=False, graphs=False):
        expected = train()
    with evoattn.patch("boltz", layers=False, graphs=True) as patched:
        trained = train()
        tokens.eval()(a, s, bias, mask, multiplicity=2)
    steps = patched.steps["boltz.model.modules.transformersv2:DiffusionTransformerLayer.forward"]
    assert steps == {"": 30 - 6, FIRST: 6}
    assert all(map(torch.equal, trained, expected))
