"""The loss of Boltz-2 and BoltzGen with the memory of one copy."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from evoattn.clients import losses
from evoattn.clients.site import Count


def of_the_client(
    predicted: Tensor, true: Tensor, is_nucleotide: Tensor, coords_mask: Any, far: float, near: float, multiplicity: int
) -> Tensor:
    """A smooth lDDT, as Boltz-2 computes it. It has second derivatives."""
    is_nucleotide, coords_mask = (x.repeat_interleave(multiplicity, 0) for x in (is_nucleotide, coords_mask))
    distances = torch.cdist(true, true)
    cutoffs = is_nucleotide[:, :, None] * far + (1 - is_nucleotide[:, :, None]) * near
    mask = (distances < cutoffs) * (1 - torch.eye(true.shape[1])) * coords_mask[:, :, None] * coords_mask[:, None]
    between = predicted[:, :, None] - predicted[:, None] + 1e-6
    difference = (distances - between.square().sum(-1).sqrt()).abs()
    near_ones = sum(torch.sigmoid(x - difference) for x in (0.5, 1.0, 2.0, 4.0)) / 4
    return 1 - ((near_ones * mask).sum((1, 2)) / mask.sum((1, 2))).mean()


def loss_of(source: Any) -> Callable[..., Tensor]:
    if not isinstance(source, str):
        return source  # type: ignore[no-any-return]
    return pytest.importorskip(source, exc_type=ImportError).smooth_lddt_loss  # type: ignore[no-any-return]


def labelled(structures: int = 2, copies: int = 3, atoms: int = 11) -> tuple[Tensor, tuple[Any, ...]]:
    torch.manual_seed(0)
    predicted, true = 12 * torch.randn(2, structures * copies, atoms, 3, dtype=torch.float64)
    is_nucleotide, mask = (torch.rand(2, structures, atoms, dtype=torch.float64) > 0.3).double()
    return predicted.requires_grad_(), (true, is_nucleotide, mask, 30.0, 15.0, copies)


@pytest.mark.parametrize("source", [of_the_client, "boltz.model.loss.diffusionv2"])
def test_a_loss_by_copies_is_that_of_all(source: Any) -> None:
    original = loss_of(source)
    sizes: list[int] = []

    def counted(predicted: Tensor, *rest: Any) -> Tensor:
        sizes.append(len(predicted))
        return original(predicted, *rest)

    predicted, rest = labelled()
    right = original(predicted, *rest)
    found = losses.by_copy(counted, Count())(predicted, *rest)
    torch.testing.assert_close(found, right)
    torch.testing.assert_close(torch.autograd.grad(3 * found, predicted), torch.autograd.grad(3 * right, predicted))
    assert sizes == [1] * 6


def test_other_losses_are_left_to_the_client() -> None:
    sizes: list[int] = []

    def counted(predicted: Tensor, *_: Any) -> Tensor:
        sizes.append(len(predicted))
        return predicted.sum()

    loss = losses.by_copy(counted, Count())
    predicted, rest = labelled()
    with torch.no_grad():
        loss(predicted, *rest)
    loss(predicted.detach(), *rest)
    loss(predicted, rest[0].requires_grad_(), *rest[1:])
    rest[0].requires_grad_(False)
    loss(predicted, *rest[:2])
    loss(predicted, *rest[:5], 2)
    torch.func.grad(functools.partial(loss, multiplicity=3))(predicted.detach(), *rest[:5])
    assert sizes == [6] * 6
    loss(predicted[:1], rest[0][:1], rest[1][:1], rest[2][:1], 30.0, 15.0, 1)
    assert sizes.pop() == 1


def test_a_second_derivative_of_the_loss_is_an_error() -> None:
    predicted, rest = labelled()
    loss = losses.by_copy(of_the_client, Count())(predicted, *rest)
    (gradient,) = torch.autograd.grad(loss + predicted.pow(3).sum(), predicted, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(gradient.square().sum(), predicted)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_around_a_loss_computes_it_twice(reentrant: bool) -> None:
    copies: list[int] = []

    def counted(predicted: Tensor, *rest: Any) -> Tensor:
        copies.append(len(predicted))
        return of_the_client(predicted, *rest)

    predicted, rest = labelled()
    loss = losses.by_copy(counted, Count())
    checkpoint(lambda x: loss(x.sin(), *rest), predicted, use_reentrant=reentrant).backward()
    found = predicted.grad
    (right,) = torch.autograd.grad(of_the_client(predicted.sin(), *rest), predicted)
    torch.testing.assert_close(found, right)
    assert copies == ([6] if reentrant else [1] * 6) + [1] * 6
