"""The best rigid motion of points onto others, beside singular vectors and beside the kernel in Triton's interpreter."""

import pytest
import torch
from torch import Tensor

from evoattn.nn.alignment import align, rotation
from tests.helpers.interpreted import INTERPRETED, run


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
    turn = rotation(covariance)
    assert is_rotation(turn)
    torch.testing.assert_close(turn, by_svd(covariance), rtol=0, atol=1e-9)


def test_rotation_of_points_on_a_line_or_in_one_place_is_a_best_one() -> None:
    line = torch.outer(torch.tensor([1.0, 2.0, -1.0]), torch.tensor([0.5, 1.0, 1.0])).double()
    turn = rotation(torch.stack([line, torch.zeros(3, 3, dtype=torch.float64)]))
    assert is_rotation(turn)
    best = torch.linalg.svdvals(line).sum()
    torch.testing.assert_close((turn[0] * line).sum(), best, rtol=1e-12, atol=0)
    torch.testing.assert_close(turn[1], torch.eye(3, dtype=torch.float64))


@pytest.mark.parametrize("lead", [(), (3,), (2, 2)])
def test_aligned_points_lie_where_they_were_turned_from(lead: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(1)
    y = torch.randn(*lead, 40, 3, generator=generator, dtype=torch.float64)
    weights = torch.rand(*lead, 40, generator=generator, dtype=torch.float64)
    weights[..., :5] = 0  # they do not pull
    turn = rotation(torch.randn(*lead, 3, 3, generator=generator, dtype=torch.float64))
    x = y @ turn.mT + torch.tensor([3.0, -2.0, 7.0], dtype=torch.float64)
    x[..., 0, :] += 100
    aligned = align(x, y, weights)
    torch.testing.assert_close(aligned[..., 1:, :], y[..., 1:, :], rtol=0, atol=1e-11)
    assert not torch.allclose(aligned[..., 0, :], y[..., 0, :])


def test_alignment_has_no_gradient() -> None:
    x = torch.randn(2, 5, 3, requires_grad=True)
    assert not align(x, x * 2, torch.ones(2, 5)).requires_grad


def test_in_the_interpreter() -> None:
    """The tests below, in a process where Triton interprets."""
    pytest.importorskip("triton")
    if not INTERPRETED:
        run(__file__, "not slow")


@pytest.mark.skipif(not INTERPRETED, reason="needs the interpreter")
@pytest.mark.parametrize(("lead", "count"), [((), 5), ((3,), 40), ((2, 2), 1500)])
def test_the_kernel_does_the_same(lead: tuple[int, ...], count: int) -> None:
    from evoattn.nn.alignment import kernels

    generator = torch.Generator().manual_seed(2)
    x, y = (torch.randn(*lead, count, 3, generator=generator) for _ in range(2))
    weights = torch.rand(*lead, count, generator=generator)
    weights[..., 1] = 0
    shifted = x + torch.tensor([30.0, -200.0, 7.0])
    expected = align(shifted.double(), y.double(), weights.double())
    torch.testing.assert_close(kernels.align(shifted, y, weights).double(), expected, rtol=0, atol=2e-5)
    expanded = weights[..., :1].expand(weights.shape)
    torch.testing.assert_close(
        kernels.align(x, y, expanded).double(), align(x.double(), y.double(), expanded.double()), rtol=0, atol=2e-6
    )


@pytest.mark.skipif(not INTERPRETED, reason="needs the interpreter")
def test_the_kernel_turns_no_points_that_do_not_differ() -> None:
    from evoattn.nn.alignment import kernels

    x = torch.ones(1, 4, 3)
    torch.testing.assert_close(kernels.align(x, x + 2, torch.ones(1, 4)), x + 2)
