"""Boltz' sampling loop on a GPU without waits: while the GPU computes a step, the host queues the next one.

As it is, each step reads its noise levels from the GPU, copies indices to it, waits for a singular value decomposition, and
asks ten times for templates that guide it, which most predictions do not have. The GPU stands still meanwhile.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from evoattn.clients import graphs
from evoattn.clients.site import Count, PassedOn, replacement
from evoattn.nn.alignment import align

DRAWS = ("compute_random_augmentation", "random_rotations", "random_quaternions", "quaternion_to_matrix", "_copysign")
"""Boltz' functions that draw a rotation and a translation. The loop draws the same numbers and calls the last two."""

_DRAWN = 16
"""Steps whose random numbers are drawn at a time."""


def schedule(original: Callable[..., Tensor], count: Count) -> Callable[..., Tensor]:
    """A `sample_schedule` whose noise levels lie on the CPU, where the loop reads them one by one."""

    def sample_schedule(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        return original(self, *args, **kwargs).cpu()

    return sample_schedule


def sampled(original: Callable[..., Any], count: Count) -> Callable[..., Any]:
    """Boltz-2's `AtomDiffusion.sample`. If steps are recorded, all of a step but its random numbers is one recording."""
    advanced = graphs.whole(_advanced, "score_model", "sample")
    loop = replacement(functools.partial(_sampled, advanced))
    run = loop(original, Count())  # the loop itself has no kernels: each call inside waits for its own, or does not
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

    The original computes with potentials, contact guidance or forced templates, in training, if gradients are recorded, or if
    somebody has exchanged the augmentation.
    """
    if self.training or torch.is_grad_enabled() or steers(steering_args, conditions.get("feats")):
        return PassedOn()
    if _client("modules.diffusionv2").compute_random_augmentation is not _client("modules.utils").compute_random_augmentation:
        return PassedOn()
    steps, chunks = num_sampling_steps or self.num_sampling_steps, multiplicity % (max_parallel_samples or multiplicity) + 1
    atom_mask = atom_mask.repeat_interleave(multiplicity, 0)
    levels = self.sample_schedule(steps)
    gammas = torch.where(levels > self.gamma_min, self.gamma_0, 0.0)
    x = levels[0].item() * _drawn((*atom_mask.shape, 3), self.device)
    numbers = _numbers(self, levels.tolist(), gammas.tolist(), x)
    for level, (turn, move, noise) in zip(numbers, _augmentations(steps, x), strict=True):
        x = advanced(self, x, turn, move, noise, level, atom_mask, chunks, conditions)
    return {"sample_atom_coords": x, "diff_token_repr": None}


def _numbers(self: Any, levels: list[float], gammas: list[float], like: Tensor) -> Tensor:
    """For each step the noise level, the size of the noise that is added to reach it, and the factor of the update."""
    rows = []
    for before, after, gamma in zip(levels[:-1], levels[1:], gammas[1:], strict=True):
        level = before * (1 + gamma)
        added = math.sqrt(self.noise_scale**2 * (level**2 - before**2))
        rows.append((level, added, self.step_scale * (after - level)))
    return torch.tensor(rows, dtype=like.dtype).to(like.device)


def _augmentations(steps: int, x: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """The rotation, translation and noise of each step for points like x, drawn in the order in which Boltz draws them.

    The rotations of several steps are made of their quaternions at once: each takes fifty small launches.
    """
    utils, count = _client("modules.utils"), x.shape[0]
    for first in range(0, steps, _DRAWN):
        drawn = [
            (
                torch.randn((count, 4), dtype=x.dtype, device=x.device),
                torch.randn((count, 1, 3), dtype=x.dtype, device=x.device),
                _drawn(x.shape, x.device),
            )
            for _ in range(min(_DRAWN, steps - first))
        ]
        quaternions = torch.cat([quaternion for quaternion, _, _ in drawn])
        size = utils._copysign(quaternions.square().sum(1).sqrt(), quaternions[:, 0])
        turns = utils.quaternion_to_matrix(quaternions / size[:, None]).split(count)
        yield from ((turn, move, noise) for turn, (_, move, noise) in zip(turns, drawn, strict=True))


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
    return align(true_coords, pred_coords, mask * weights)
