"""What stands in a sampling loop of Boltz: alignment, noise levels and guidance that give what the client's give."""

from typing import Any

import pytest
import torch
from torch import Tensor

from evoattn.clients import sampling
from evoattn.clients.site import Count


def by_svd(covariance: Tensor) -> Tensor:
    """The best rotation, from singular vectors."""
    u, _, vh = torch.linalg.svd(covariance)
    signs = torch.ones(*covariance.shape[:-2], 3, dtype=covariance.dtype)
    signs[..., -1] = torch.det(u @ vh).sign()
    return u @ torch.diag_embed(signs) @ vh


def is_rotation(turn: Tensor) -> bool:
    unit = torch.eye(3, dtype=turn.dtype)
    return torch.allclose(turn @ turn.mT, unit.expand_as(turn), atol=1e-12) and bool((torch.det(turn) > 0.999).all())


@pytest.mark.parametrize("kind", ["ordinary", "mirrored", "flat", "small", "large", "close"])
def test_rotation_is_the_one_of_the_singular_vectors(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    covariance = torch.randn(50, 3, 3, generator=generator, dtype=torch.float64)
    if kind == "mirrored":
        covariance = covariance * -torch.det(covariance).sign()[:, None, None]
    if kind == "flat":  # all points in a plane
        covariance[:, :, 2] = 0
    if kind == "close":  # two singular values that differ by 1e-6
        u, s, vh = torch.linalg.svd(covariance)
        s[:, 2] = s[:, 1] * (1 - 1e-6)
        covariance = u @ torch.diag_embed(s) @ vh
        covariance = covariance * torch.det(covariance).sign()[:, None, None]
    covariance = covariance * {"small": 1e-30, "large": 1e30}.get(kind, 1.0)
    found = sampling.rotation(covariance)
    assert is_rotation(found)
    torch.testing.assert_close(found, by_svd(covariance), rtol=0, atol=1e-9)


def test_rotation_of_points_on_a_line_or_in_one_place_is_a_best_one() -> None:
    line = torch.outer(torch.tensor([1.0, 2.0, -1.0]), torch.tensor([0.5, 1.0, 1.0])).double()
    found = sampling.rotation(torch.stack([line, torch.zeros(3, 3, dtype=torch.float64)]))
    assert is_rotation(found)
    best = torch.linalg.svdvals(line).sum()
    torch.testing.assert_close((found[0] * line).sum(), best, rtol=1e-12, atol=0)
    torch.testing.assert_close(found[1], torch.eye(3, dtype=torch.float64))


@pytest.mark.parametrize("lead", [(), (3,), (2, 2)])
def test_aligned_points_lie_where_they_were_turned_from(lead: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(1)
    y = torch.randn(*lead, 40, 3, generator=generator, dtype=torch.float64)
    weights = torch.rand(*lead, 40, generator=generator, dtype=torch.float64)
    weights[..., :5] = 0  # they do not pull
    turn = sampling.rotation(torch.randn(*lead, 3, 3, generator=generator, dtype=torch.float64))
    x = y @ turn.mT + torch.tensor([3.0, -2.0, 7.0], dtype=torch.float64)
    x[..., 0, :] += 100
    found = sampling._align(x, y, weights)
    torch.testing.assert_close(found[..., 1:, :], y[..., 1:, :], rtol=0, atol=1e-11)
    assert not torch.allclose(found[..., 0, :], y[..., 0, :])


def test_alignment_takes_no_gradient_and_a_cpu_keeps_the_clients_own() -> None:
    calls: list[tuple[Any, ...]] = []

    def theirs(true_coords: Tensor, pred_coords: Tensor, weights: Tensor, mask: Tensor) -> Tensor:
        calls.append((true_coords, pred_coords, weights, mask))
        return true_coords

    x = torch.randn(2, 5, 3, requires_grad=True)
    assert sampling.aligned(theirs, Count())(x, x, torch.ones(2, 5), torch.ones(2, 5)) is x
    assert len(calls) == 1
    assert not sampling._align(x, x * 2, torch.ones(2, 5)).requires_grad


def sample(self: object, mask: Tensor, steering_args: Any = None, **named: Any) -> Any:
    return steering_args


@pytest.mark.parametrize(
    ("pairs", "forced", "guided"),
    [(0, None, False), (0, [False, False], False), (2, None, True), (0, [False, True], True)],
)
def test_guidance_stays_where_something_guides(pairs: int, forced: list[bool] | None, guided: bool) -> None:
    feats = {"contact_pair_index": torch.zeros(1, 2, pairs, dtype=torch.long)}
    if forced is not None:
        feats["template_force"] = torch.tensor([forced])
    steering = {"contact_guidance_update": True, "fk_steering": False}
    made = sampling.unguided(sample, Count())(None, torch.ones(1), steering_args=steering, feats=feats)
    assert made == {"contact_guidance_update": guided, "fk_steering": False}
    assert steering["contact_guidance_update"]  # the caller's own is as it was


@pytest.mark.parametrize("steering", [None, {}, {"contact_guidance_update": False}, {"contact_guidance_update": True}])
def test_guidance_of_other_features_is_left_alone(steering: Any) -> None:
    assert sampling.unguided(sample, Count())(None, torch.ones(1), steering_args=steering, feats=None) == steering


def test_noise_levels_lie_on_the_cpu() -> None:
    levels = torch.rand(3, device="meta")
    with pytest.raises(NotImplementedError):  # a copy to the CPU was asked for, and a meta tensor has nothing to copy
        sampling.schedule(lambda self: levels, Count())(None)
    assert torch.equal(sampling.schedule(lambda self: torch.arange(3), Count())(None), torch.arange(3))
