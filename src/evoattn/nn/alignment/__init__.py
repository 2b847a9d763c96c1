"""The best rigid motion of points onto others, without a decomposition that the host waits for."""

from __future__ import annotations

import torch
from torch import Tensor

from evoattn.core import guards
from evoattn.core.devices import installed

__all__ = ["align", "rotation"]

SQUARINGS = 32
"""Enough for two eigenvalues that differ by 1e-8 of the larger one: (1 - 1e-8)^(2^32) is 2e-19."""

BETWEEN = 4
"""Squarings between two divisions by the trace: the 16th power of a matrix of trace 1 and size 4 is at least 4^-16."""


@torch.no_grad()
def align(x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
    """Points x, turned and moved onto y so that the weighted sum of squared distances is least. It has no gradient.

    Args:
        x, y: points `[*, N, 3]`, any float dtype.
        weights: `[*, N]`.

    Returns:
        `[*, N, 3]` in x's dtype. The host does not wait for it. On a GPU one launch computes points in float32, with sums in
        float64.
    """
    tensors = [x, y, weights]
    if (
        x.is_cuda
        and installed("triton")
        and all(each.dtype == torch.float32 for each in tensors)
        and x.numel()
        and guards.only_computes()
        and guards.ordinary(tensors)
    ):
        from evoattn.nn.alignment import kernels

        return kernels.align(x, y, weights)
    weights = weights.unsqueeze(-1)
    total = weights.sum(-2, keepdim=True)
    x_centre, y_centre = ((each * weights).sum(-2, keepdim=True) / total for each in (x, y))
    x = x - x_centre
    covariance = torch.einsum("...ni,...nj->...ij", weights * (y - y_centre), x)
    turn = rotation(covariance).to(x.dtype)
    return torch.einsum("...ij,...nj->...ni", turn, x) + y_centre


def rotation(covariance: Tensor) -> Tensor:
    """The rotation R that maximises tr(R^T C) of a covariance C, without a decomposition that the host waits for.

    R is quadratic in a unit quaternion q, so that the trace is q^T A q, with a symmetric A that is linear in C. The best q is
    the eigenvector of A's largest eigenvalue. Powers of A, shifted so that no eigenvalue is below 0, converge to q q^T.

    Args:
        covariance: `[*, 3, 3]`, any real dtype.

    Returns:
        `[*, 3, 3]`, float64. Of several rotations that are equally good, as for points on a line, it is one.

    Source: B. K. P. Horn, Closed-form solution of absolute orientation using unit quaternions, JOSA A 4, 1987.
    """
    (c00, c01, c02), (c10, c11, c12), (c20, c21, c22) = (row.unbind(-1) for row in covariance.double().unbind(-2))
    upper = (
        *(c00 + c11 + c22, c21 - c12, c02 - c20, c10 - c01),
        *(c00 - c11 - c22, c01 + c10, c02 + c20),
        *(c11 - c00 - c22, c12 + c21, c22 - c00 - c11),
    )
    a = torch.stack([upper[i] for i in (0, 1, 2, 3, 1, 4, 5, 6, 2, 5, 7, 8, 3, 6, 8, 9)], -1).unflatten(-1, (4, 4))
    size = torch.linalg.vector_norm(a, dim=(-2, -1), keepdim=True)
    unit = torch.eye(4, dtype=torch.float64, device=a.device)
    tiny = torch.finfo(torch.float64).tiny  # a covariance of 0 gets the unit
    a = a + size * unit + tiny * unit[0] * unit
    for turn in range(SQUARINGS):
        if turn % BETWEEN == 0:
            a = a / a.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
        a = a @ a
    longest = a.diagonal(dim1=-2, dim2=-1).argmax(-1)[..., None, None]
    q = a.take_along_dim(longest, dim=-2).squeeze(-2)
    q = q / torch.linalg.vector_norm(q, dim=-1, keepdim=True)
    w, i, j, k = q.unbind(-1)
    rows = (
        *(w * w + i * i - j * j - k * k, 2 * (i * j - w * k), 2 * (i * k + w * j)),
        *(2 * (i * j + w * k), w * w - i * i + j * j - k * k, 2 * (j * k - w * i)),
        *(2 * (i * k - w * j), 2 * (j * k + w * i), w * w - i * i - j * j + k * k),
    )
    return torch.stack(rows, -1).view(*covariance.shape)
