"""What stands in a sampling loop of Boltz: alignment, noise levels and guidance that give what the client's give."""

import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor

from evoattn.clients import sampling
from evoattn.clients.site import Count


def test_a_cpu_keeps_the_clients_own_alignment() -> None:
    calls: list[tuple[Any, ...]] = []

    def client_alignment(true_coords: Tensor, pred_coords: Tensor, weights: Tensor, mask: Tensor) -> Tensor:
        calls.append((true_coords, pred_coords, weights, mask))
        return true_coords

    x = torch.randn(2, 5, 3, requires_grad=True)
    assert sampling.aligned(client_alignment, Count())(x, x, torch.ones(2, 5), torch.ones(2, 5)) is x
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("pairs", "forced", "guided"),
    [(0, None, False), (0, [False, False], False), (2, None, True), (0, [False, True], True)],
)
@pytest.mark.parametrize("contacts", [False, True])
def test_contacts_and_forced_templates_steer(pairs: int, forced: list[bool] | None, guided: bool, contacts: bool) -> None:
    feats = {"contact_pair_index": torch.zeros(1, 2, pairs, dtype=torch.long)}
    if forced is not None:
        feats["template_force"] = torch.tensor([forced])
    steering = {"contact_guidance_update": contacts, "fk_steering": False, "physical_guidance_update": False}
    assert sampling.steers(steering, feats) == (guided and contacts)
    assert sampling.steers({**steering, "fk_steering": True}, feats)
    assert sampling.steers({**steering, "physical_guidance_update": True}, feats)


@pytest.mark.parametrize("steering", [None, {}, {"contact_guidance_update": True}])
def test_what_is_not_known_is_left_to_the_client(steering: Any) -> None:
    assert sampling.steers(steering, {"contact_pair_index": torch.zeros(1, 2, 0)})
    assert sampling.steers({"contact_guidance_update": True, "fk_steering": False, "physical_guidance_update": False}, None)


PLAIN = {"fk_steering": False, "physical_guidance_update": False, "contact_guidance_update": True, "num_gd_steps": 20}
FEW = {
    "contact_pair_index": torch.zeros(1, 2, 0, dtype=torch.long),
    **{f"contact_{name}": torch.zeros(1, 0) for name in ("union_index", "negation_mask", "thresholds")},
}


@pytest.mark.skipif(importlib.util.find_spec("boltz") is None, reason="Boltz is not installed")
@pytest.mark.parametrize(("samples", "parallel"), [(1, None), (3, None), (3, 2), (4, 2), (5, 3)])
@pytest.mark.parametrize("aligns", [False, True])
def test_a_sampling_run_has_the_same_bits(samples: int, parallel: int | None, aligns: bool) -> None:
    """On a CPU, where the alignment is Boltz' own."""
    from boltz.model.modules.diffusionv2 import AtomDiffusion

    from tests.helpers.boltz import SMALL

    module = AtomDiffusion(SMALL, alignment_reverse_diff=aligns).eval()
    seen: list[int] = []

    def network(self: Any, r_noisy: Tensor, times: Tensor, multiplicity: int, **_: Any) -> Tensor:
        seen.append(multiplicity)
        return (r_noisy * 0.3 + times[:, None, None]).tanh()

    module.score_model.forward = network.__get__(module.score_model)
    mask = (torch.arange(20) < 17).float()[None]
    output = []
    for replaced in (AtomDiffusion.sample, sampling.sampled(AtomDiffusion.sample, Count())):
        torch.manual_seed(3)
        with torch.no_grad():
            output.append(replaced(module, mask, 7, samples, parallel, PLAIN, feats=FEW)["sample_atom_coords"])
    assert torch.equal(*output) and output[0].shape == (samples, 20, 3)
    half = len(seen) // 2
    assert seen[:half] == seen[half:]


@pytest.mark.skipif(importlib.util.find_spec("boltz") is None, reason="Boltz is not installed")
def test_an_exchanged_augmentation_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    from boltz.model.modules import diffusionv2

    from tests.helpers.boltz import SMALL

    module = diffusionv2.AtomDiffusion(SMALL).eval()
    module.score_model.forward = (lambda self, r_noisy, **_: r_noisy * 0.3).__get__(module.score_model)
    called: list[int] = []

    def still(count: int, **options: Any) -> tuple[Tensor, Tensor]:
        called.append(count)
        return torch.eye(3).expand(count, 3, 3), torch.zeros(count, 1, 3)

    monkeypatch.setattr(diffusionv2, "compute_random_augmentation", still)
    with torch.no_grad():
        sampling.sampled(diffusionv2.AtomDiffusion.sample, Count())(module, torch.ones(1, 20), 7, 2, None, PLAIN, feats=FEW)
    assert called == [2] * 7


def test_noise_levels_lie_on_the_cpu() -> None:
    levels = torch.rand(3, device="meta")
    with pytest.raises(NotImplementedError):  # a copy to the CPU was asked for, and a meta tensor has nothing to copy
        sampling.schedule(lambda self: levels, Count())(None)
    assert torch.equal(sampling.schedule(lambda self: torch.arange(3), Count())(None), torch.arange(3))
