"""Boltz' sampling loop on a GPU without waits: while the GPU computes a step, the host queues the next one.

As it is, each step reads its noise levels from the GPU, copies indices to it, waits for a singular value decomposition, and
asks ten times for templates that guide it, which most predictions do not have. The GPU stands still meanwhile.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from evoattn.clients import graphs
from evoattn.clients.site import Count, PassedOn, replacement

_SQUARINGS = 32
"""Enough for two eigenvalues that differ by 1e-8 of the larger one: (1 - 1e-8)^(2^32) is 2e-19."""

_BETWEEN = 4
"""Squarings between two divisions by the trace: the 16th power of a matrix of trace 1 and size 4 is at least 4^-16."""


def schedule(original: Callable[..., Tensor], count: Count) -> Callable[..., Tensor]:
    """A `sample_schedule` whose noise levels lie on the CPU, where the loop reads them one by one."""

    def sample_schedule(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        return original(self, *args, **kwargs).cpu()

    return sample_schedule


def sampled(original: Callable[..., Any], count: Count) -> Callable[..., Any]:
    """Boltz-2's `AtomDiffusion.sample`. If steps are recorded, all of a step but its random numbers is one recording."""
    advanced = graphs.whole(_advanced, "score_model", "sample")
    run = replacement(functools.partial(_sampled, advanced))(original, count)
    run._evoattn_steps = advanced._evoattn_steps  # type: ignore[attr-defined]
    return run


def _sampled(
    advanced: Callable[..., Tensor],
    self: Any,
    atom_mask: Tensor,
    num_sampling_steps: int | None = None,
    multiplicity: int = 1,
    max_parallel_samples: int | None = None,
    steering_args: dict[str, Any] | None = None,
    **conditions: Any,
) -> Any:
    """Boltz-2's sampling loop without synchronisation of host and GPU. It draws the same random numbers.

    The original computes with potentials, contact guidance or forced templates, in training, and if gradients are recorded.
    """
    if self.training or torch.is_grad_enabled() or steers(steering_args, conditions.get("feats")):
        return PassedOn()
    steps, chunks = num_sampling_steps or self.num_sampling_steps, multiplicity % (max_parallel_samples or multiplicity) + 1
    atom_mask = atom_mask.repeat_interleave(multiplicity, 0)
    levels = self.sample_schedule(steps)
    gammas = torch.where(levels > self.gamma_min, self.gamma_0, 0.0)
    x = levels[0].item() * _drawn((*atom_mask.shape, 3), self.device)
    augmentation = _client("modules.diffusionv2").compute_random_augmentation
    for numbers in _numbers(self, levels.tolist(), gammas.tolist(), x):
        turn, move = augmentation(x.shape[0], device=x.device, dtype=x.dtype)
        x = advanced(self, x, turn, move, _drawn(x.shape, x.device), numbers, atom_mask, chunks, conditions)
    return {"sample_atom_coords": x, "diff_token_repr": None}


def _numbers(self: Any, levels: list[float], gammas: list[float], like: Tensor) -> Tensor:
    """For each step the noise level, the size of the noise that is added to reach it, and the factor of the update."""
    rows = []
    for before, after, gamma in zip(levels[:-1], levels[1:], gammas[1:], strict=True):
        level = before * (1 + gamma)
        added = math.sqrt(self.noise_scale**2 * (level**2 - before**2))
        rows.append((level, added, self.step_scale * (after - level)))
    return torch.tensor(rows, dtype=like.dtype).to(like.device)


def _advanced(
    self: Any,
    x: Tensor,
    turn: Tensor,
    move: Tensor,
    noise: Tensor,
    numbers: Tensor,
    atom_mask: Tensor,
    chunks: int,
    conditions: dict[str, Any],
) -> Tensor:
    """The coordinates after a step: centred, turned, moved, with more noise, denoised and aligned."""
    level, added, factor = numbers.unbind()
    x = torch.einsum("bmd,bds->bms", x - x.mean(dim=-2, keepdim=True), turn) + move + added * noise
    parts = []
    for part in x.chunk(chunks):
        shared = {"multiplicity": len(part), **conditions}
        parts.append(self.preconditioned_network_forward(part, level.repeat(len(part)), network_condition_kwargs=shared))
    denoised = torch.cat(parts)
    if self.alignment_reverse_diff:
        with torch.autocast(x.device.type, enabled=False):
            align = _client("loss.diffusionv2").weighted_rigid_align  # Boltz' function or its replacement
            x = align(x.float(), denoised.float(), atom_mask.float(), atom_mask.float()).to(denoised)
    return x + factor * ((x - denoised) / level)


def _drawn(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Noise in the default dtype, as Boltz draws it."""
    return torch.randn(shape, dtype=torch.get_default_dtype(), device=device)


def _client(name: str) -> Any:
    return importlib.import_module(f"boltz.model.{name}")


def steers(steering: dict[str, Any] | None, feats: Any) -> bool:
    """Return whether something may guide the structures. Contacts do if there are some, and so do templates that are forced."""
    try:
        if steering is None or steering["fk_steering"] or steering["physical_guidance_update"]:
            return True  # the original raises on None
        if not steering["contact_guidance_update"]:
            return False
        return bool(feats["contact_pair_index"].shape[-1] or ("template_force" in feats and feats["template_force"].any()))
    except (TypeError, KeyError, AttributeError):  # let the original say what is wrong
        return True


@replacement
def aligned(true_coords: Tensor, pred_coords: Tensor, weights: Tensor, mask: Tensor) -> Tensor | PassedOn:
    """A `weighted_rigid_align` that does not wait for the GPU. On a CPU the original computes."""
    if not true_coords.is_cuda:
        return PassedOn()
    return _align(true_coords, pred_coords, mask * weights)


@torch.no_grad()
def _align(x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
    """Points x turned and moved onto y, so that the weighted sum of squared distances is least. x, y `[*, N, 3]`."""
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
    quadratic = _quadratic(covariance.device)
    a = torch.einsum("...ij,ijab->...ab", covariance.double(), quadratic)
    size = torch.linalg.vector_norm(a, dim=(-2, -1), keepdim=True)
    unit = torch.eye(4, dtype=torch.float64, device=a.device)
    tiny = torch.finfo(torch.float64).tiny  # a covariance of 0 gets the unit
    a = a + size * unit + tiny * unit[0] * unit
    for turn in range(_SQUARINGS):
        if turn % _BETWEEN == 0:
            a = a / a.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
        a = a @ a
    longest = a.diagonal(dim1=-2, dim2=-1).argmax(-1)[..., None, None]
    q = a.take_along_dim(longest, dim=-2).squeeze(-2)
    q = q / torch.linalg.vector_norm(q, dim=-1, keepdim=True)
    return torch.einsum("...a,...b,ijab->...ij", q, q, quadratic)


@functools.cache
def _quadratic(device: torch.device) -> Tensor:
    """The coefficients `[3, 3, 4, 4]` of a rotation as a quadratic form of its quaternion (w, x, y, z)."""
    form = torch.zeros(3, 3, 4, 4, dtype=torch.float64)
    for i in range(3):
        j, k = (i + 1) % 3, (i + 2) % 3
        form[i, i] = torch.diag(form.new_tensor([1.0, *(1.0 if axis == i else -1.0 for axis in range(3))]))
        for row, column, sign in ((i, j, -1.0), (j, i, 1.0)):  # R_ij = 2 (q_i q_j - w q_k), R_ji = 2 (q_i q_j + w q_k)
            form[row, column, 1 + i, 1 + j] = form[row, column, 1 + j, 1 + i] = 1.0
            form[row, column, 0, 1 + k] = form[row, column, 1 + k, 0] = sign
    return form.to(device)
