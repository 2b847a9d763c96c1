"""Denoisers and trunks of clients that are installed, at tiny depth: a run of replays has the bits of a run without them."""

import functools
import importlib
import math
import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree

import evoattn
from evoattn.clients import graphs
from evoattn.clients.graphs import FIRST, call_kinds
from evoattn.clients.graphs.recorder import Recorder
from evoattn.clients.graphs.steps import AGAIN
from evoattn.clients.graphs.trees import NotCaptured
from tests.helpers.denoisers import STEPS, draw, filled, module, openfold3, openfold3_config, protenix, small
from tests.helpers.recorders import Again, Traced

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


@pytest.fixture(autouse=True, params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A GPU; or a CPU with a stand-in for CUDA graphs, and a `one_hot` that looks for no largest index, as on a GPU."""
    if request.param == "cuda":
        monkeypatch.setattr(call_kinds, "GAIN", math.inf)  # other tests keep the GPU busy
        return torch.device("cuda")
    layers = "layers" in request.fixturenames and request.getfixturevalue("layers")
    monkeypatch.setattr(graphs, "Recorder", Again if layers else Traced)
    monkeypatch.setattr(
        nn.functional, "one_hot", lambda x, num_classes: (x[..., None] == torch.arange(num_classes, device=x.device)).long()
    )
    return torch.device("cpu")


def agree(
    client: str,
    site: str,
    calls: list[Any],
    prepare: Callable[..., Callable[[], Any]],
    device: torch.device,
    *,
    layers: bool,
    eager: list[Any] | None = None,
    shared: str = "",
) -> None:
    """Runs with graphs have the bits of runs without, and all calls but the first of each kind are replayed.

    On a GPU the clients add atoms in no fixed order, unless graphs are on. So they are on there, and nothing is recorded.

    Args:
        client, site: what is patched, and whose calls are counted.
        calls: arguments of `prepare`.
        prepare: makes inputs on the default device, and returns what runs them.
        device: where it runs.
        layers: whether layers are patched.
        eager: the calls without graphs, if they are others.
        shared: the kind of calls whose number differs on a GPU: what steps share is computed once in a sampling, and once more
            where one is recorded.
    """
    numpy = importlib.import_module("numpy")

    def every(calls: list[Any]) -> list[Tensor]:
        outputs = []
        for call in calls:
            with device, torch.no_grad():
                run = prepare(*call)
            torch.manual_seed(3)
            numpy.random.seed(3)
            random.seed(3)
            with torch.no_grad():
                outputs.append((run(), torch.rand(2, device=device)))
        return [x for x in _pytree.tree_leaves(outputs) if isinstance(x, Tensor)]

    nothing = mock.patch.object(Recorder, "record", side_effect=NotCaptured("the test compares with this"))
    with nothing, evoattn.patch(client, layers=layers, graphs=device.type == "cuda") as patched:
        expected, attended = every(eager or calls), patched.calls_by_kind
    with evoattn.patch(client, layers=layers, graphs=True) as patched:
        actual = every(calls)
        differ = {kind for kind, count in patched.calls_by_kind.items() if count != attended[kind]}
        assert differ <= ({shared} if device.type == "cuda" else set())
        counts = patched.steps[site]
    assert all(map(torch.equal, actual, expected)) and all(x.isfinite().all() for x in actual)
    assert counts[""] >= counts[FIRST] and set(counts) == {"", FIRST}, counts


def recycled(run: Callable[..., Any], *state: Tensor) -> Any:
    """Three rounds, each of which reads what the last one returned."""
    outputs: tuple[Tensor, ...] = state
    for _ in range(3):
        outputs = run(*outputs[:2])
    return outputs


LENGTHS = [(2, 9), (2, 14), (2, 9), (1, 14)]
"""Samples and residues of four predictions."""


@pytest.mark.parametrize("layers", [False, True])
@pytest.mark.parametrize("client", ["protenix", "opendde"])
def test_protenix(client: str, layers: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAYERNORM_TYPE", "torch")
    _, sample = protenix(client, device)
    agree(client, f"{client}.model.modules.diffusion:DiffusionModule.forward", LENGTHS, sample, device, layers=layers)
    stack = filled(device, module(f"{client}.model.modules.pairformer").PairformerStack, n_blocks=6, n_heads=2, c_z=8, c_s=12)

    def trunk(residues: int, inplace: bool) -> Any:
        s, z, mask = draw(1, residues, 12), draw(2, residues, residues, 8), torch.ones(residues, residues)
        return functools.partial(recycled, lambda s, z: stack(s, z, mask, inplace_safe=inplace), s, z)

    method = "forward" if client == "protenix" else "forward_source"
    agree(
        client, f"{client}.model.modules.pairformer:PairformerBlock.{method}", [(9, True), (14, True)], trunk, device,
        layers=layers, eager=[(9, False), (14, False)],
    )  # fmt: skip


@pytest.mark.parametrize("layers", [False, True])
def test_openfold3(layers: bool, device: torch.device) -> None:
    _, sample = openfold3(device)
    agree(
        "openfold3",
        "openfold3.core.model.structure.diffusion_module:DiffusionModule.forward",
        LENGTHS,
        sample,
        device,
        layers=layers,
        shared="transition",
    )
    shape = small(openfold3_config().pairformer)
    shape.no_blocks = 6
    stack = filled(device, module("openfold3.core.model.latent.pairformer").PairFormerStack, **shape)

    def trunk(residues: int, inplace: bool) -> Any:
        s, z, mask = draw(1, 1, residues, 12), draw(2, 1, residues, residues, 8), torch.ones(1, residues, residues)
        masks = {"single_mask": mask[:, 0], "pair_mask": mask}
        return functools.partial(recycled, lambda s, z: stack(s=s, z=z, **masks, inplace_safe=inplace), s, z)

    agree(
        "openfold3", "openfold3.core.model.latent.pairformer:PairFormerBlock.forward", [(9, True), (14, True)], trunk, device,
        layers=layers, eager=[(9, False), (14, False)],
    )  # fmt: skip


@pytest.mark.parametrize("client", ["openfold3", "protenix"])
def test_blocks_in_their_checkpoints_are_trained(client: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """These checkpoints are not reentrant."""
    monkeypatch.setenv("LAYERNORM_TYPE", "torch")
    if client == "openfold3":
        shape = small(openfold3_config().pairformer)
        shape.update({"no_blocks": 5, "blocks_per_ckpt": 1, "use_reentrant": False})
        stack = filled(device, module("openfold3.core.model.latent.pairformer").PairFormerStack, **shape).train()
        site = "openfold3.core.model.latent.pairformer:PairFormerBlock.forward"
    else:
        options = {"n_blocks": 5, "n_heads": 2, "c_z": 8, "c_s": 12, "blocks_per_ckpt": 1}
        stack = filled(device, module("protenix.model.modules.pairformer").PairformerStack, **options).train()
        site = "protenix.model.modules.pairformer:PairformerBlock.forward"
    batch = (1,) if client == "openfold3" else ()
    with device:
        given, mask = [draw(1, *batch, 9, 12), draw(2, *batch, 9, 9, 8)], torch.ones(*batch, 9, 9)

    def train() -> list[Tensor]:
        torch.manual_seed(3)
        found = []
        for _ in range(3):
            s, z = inputs = [x.clone().requires_grad_() for x in given]
            run = functools.partial(stack, s=s, z=z, pair_mask=mask)
            outputs = run(single_mask=mask[..., 0]) if client == "openfold3" else run()
            sum(x.square().mean() for x in outputs).backward()
            found += [x.detach() for x in outputs] + [x.grad for x in (*inputs, *stack.parameters()) if x.grad is not None]
            stack.zero_grad()
        return [*found, torch.rand(3, device=device)]

    with evoattn.patch(client, layers=False, graphs=False):
        expected = train()
    with evoattn.patch(client, layers=False, graphs=True) as patched:
        trained = train()
    assert patched.steps[site] == {"": 3 * 5 - 3, FIRST: 3, AGAIN: 3}
    for a, b in zip(trained, expected, strict=True):
        assert torch.equal(a, b) if device.type == "cpu" else (a - b).norm() <= 1e-3 * b.norm()


@pytest.mark.parametrize("layers", [False, True])
def test_boltzgen(layers: bool, device: torch.device) -> None:
    diffusion, encoders = module("boltzgen.model.modules.diffusion"), module("boltzgen.model.modules.encoders")
    widths = {"token_s": 8, "atom_s": 16, "dim_fourier": 8}
    depths = {"atom_encoder_depth": 1, "atom_decoder_depth": 1, "token_transformer_depth": 2, "token_transformer_heads": 4}
    sampler = filled(device, diffusion.AtomDiffusion, {**widths, **depths, "use_qk_norm": True})

    def sample(samples: int, residues: int) -> Any:
        atoms, windows = 64, 2
        indexing = encoders.get_indexing_matrix(windows, 32, 128, torch.get_default_device())
        token = torch.arange(atoms) % residues
        features = {
            "ref_pos": draw(1, 1, atoms, 3),
            "atom_pad_mask": torch.ones(1, atoms),
            "token_pad_mask": torch.ones(1, residues),
            "atom_to_token": (token[:, None] == torch.arange(residues))[None].float(),
            "record": [object()],
        }
        conditioning = {
            "q": draw(2, 1, atoms, 16),
            "c": draw(3, 1, atoms, 16),
            "to_keys": functools.partial(encoders.single_to_keys, indexing_matrix=indexing, W=32, H=128),
            "atom_enc_bias": draw(4, 1, windows, 32, 128, 4),
            "atom_dec_bias": draw(5, 1, windows, 32, 128, 4),
            "token_trans_bias": draw(6, 1, residues, residues, 8),
        }
        return functools.partial(
            sampler.sample, atom_mask=features["atom_pad_mask"], num_sampling_steps=STEPS, multiplicity=samples,
            s_trunk=draw(7, 1, residues, 8), s_inputs=draw(8, 1, residues, 8), feats=features,
            diffusion_conditioning=conditioning,
        )  # fmt: skip

    agree("boltzgen", "boltzgen.model.modules.diffusion:DiffusionModule.forward", LENGTHS, sample, device, layers=layers)
    stack = filled(device, module("boltzgen.model.layers.pairformer").PairformerModule, 16, 8, 6, 2, 0.25, 4, 2)

    def trunk(residues: int) -> Any:
        s, z, mask = draw(1, 1, residues, 16), draw(2, 1, residues, residues, 8), torch.ones(1, residues, residues)
        return functools.partial(recycled, lambda s, z: stack(s, z, mask[:, 0], mask), s, z)

    agree("boltzgen", "boltzgen.model.layers.pairformer:PairformerLayer.forward", [(9,), (14,)], trunk, device, layers=layers)


@pytest.mark.parametrize("layers", [False, True])
def test_openfold_graphs_equal_calls_without_recordings(layers: bool, device: torch.device) -> None:
    evoformer = module("openfold.model.evoformer")
    widths = {"c_m": 12, "c_z": 8, "c_hidden_msa_att": 4, "c_hidden_opm": 4, "c_hidden_mul": 8, "c_hidden_pair_att": 4}
    more = {
        "no_heads_msa": 2, "no_heads_pair": 2, "no_blocks": 6, "transition_n": 2, "msa_dropout": 0.1, "pair_dropout": 0.1,
        "opm_first": False, "fuse_projection_weights": False, "blocks_per_ckpt": None, "inf": 1e9, "eps": 1e-8,
        "clear_cache_between_blocks": False, "tune_chunk_size": False,
    }  # fmt: skip
    stack = filled(device, evoformer.EvoformerStack, c_s=6, no_column_attention=False, **widths, **more)
    extra = filled(device, evoformer.ExtraMSAStack, ckpt=False, **widths, **more)

    def trunk(residues: int, inplace: bool) -> Any:
        m, z, mask = draw(1, 3, residues, 12), draw(2, residues, residues, 8), torch.ones(residues, residues)

        def both(m: Tensor, z: Tensor) -> Any:
            z = extra(m.clone(), z, mask[:3], mask, 4, inplace_safe=inplace)
            return stack(m, z, mask[:3], mask, 4, inplace_safe=inplace)

        return functools.partial(recycled, both, m, z)

    calls, eager = [(9, True), (14, True)], [(9, False), (14, False)]
    for block in ("EvoformerBlock", "ExtraMSABlock"):
        agree("openfold", f"openfold.model.evoformer:{block}.forward", calls, trunk, device, layers=layers, eager=eager)
