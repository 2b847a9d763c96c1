"""Atoms to tokens and back, as denoisers compute them, in a form that a CUDA graph can repeat.

The clients add the atoms of a token with `scatter_add`. On a GPU that adds in another order at each call, so two calls differ
in their last bits, and no replay can be compared with a call. Some clients also read sizes from the GPU. What stands here
computes in inference. Where gradients are recorded, the originals do.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from evoattn.clients.site import Count, PassedOn, replacement

_atoms: contextvars.ContextVar[int | None] = contextvars.ContextVar("atoms", default=None)
"""The number of atoms, inside calls of `counting_atoms`."""


def sums(x: Tensor, group: Tensor, groups: int) -> Tensor:
    """The sum of the rows `[*, N, C]` of each group, added in the order of the rows; 0 for a group without rows.

    `index_put_` that accumulates sorts the indices on a GPU, so its sums do not depend on the order of threads. Sums of numbers
    of 16 bits are float32 until the end.
    """
    rows = x.reshape(-1, *x.shape[-2:]).to(torch.promote_types(x.dtype, torch.float32))
    batch = torch.arange(len(rows), device=x.device)[:, None]
    at = (batch, group.expand(x.shape[:-1]).reshape(len(rows), -1).long())
    sums_by_group = rows.new_zeros(len(rows), groups, x.shape[-1]).index_put_(at, rows, accumulate=True)
    return sums_by_group.to(x.dtype).view(*x.shape[:-2], groups, x.shape[-1])


@replacement
def means_by_token(
    x_atom: Tensor, atom_to_token_idx: Tensor, n_token: int | None = None, reduce: str = "mean"
) -> Tensor | PassedOn:
    """`aggregate_atom_to_token` of Protenix and OpenDDE."""
    if torch.is_grad_enabled() or n_token is None or reduce != "mean" or not x_atom.is_floating_point():
        return PassedOn()
    number = sums(x_atom.new_ones(*atom_to_token_idx.shape, 1), atom_to_token_idx, n_token)
    return sums(x_atom, atom_to_token_idx, n_token) / number.clamp_min(1)


@replacement
def means_by_mask(
    token_mask: Tensor,
    atom_to_token_index: Tensor,
    atom_mask: Tensor,
    atom_feat: Tensor,
    atom_dim: int = -1,
    aggregate_fn: str = "mean",
    eps: float = 1e-9,
) -> Tensor | PassedOn:
    """OpenFold-3's `aggregate_atom_feat_to_tokens`, which leaves masked atoms out."""
    if torch.is_grad_enabled() or atom_dim != -2 or aggregate_fn != "mean":
        return PassedOn()
    tokens, mask = token_mask.shape[-1], atom_mask.unsqueeze(-1)
    group = torch.where(atom_mask.int() == 0, tokens, atom_to_token_index)  # one group more, for masked atoms
    masked = atom_feat * mask
    total, number = (sums(x, group, tokens + 1)[..., :tokens, :] for x in (masked, mask.to(masked.dtype)))
    return total / (number + eps)


def counting_atoms(original: Callable[..., Any], count: Count) -> Callable[..., Any]:
    """A `forward` of OpenFold-3 inside which `from_tokens` knows how many atoms there are."""

    def forward(self: Any, batch: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        token = _atoms.set(batch["atom_mask"].shape[-1])
        try:
            return original(self, batch, *args, **kwargs)
        finally:
            _atoms.reset(token)

    return forward


@replacement
def from_tokens(
    token_mask: Tensor,
    num_atoms_per_token: Tensor,
    token_feat: Tensor,
    token_dim: int = -1,
    max_num_atoms_per_token: int | None = None,
) -> Tensor | PassedOn:
    """OpenFold-3's `broadcast_token_feat_to_atoms`, which waits for the number of atoms.

    token_feat `[*, T, C]`, token_mask and num_atoms_per_token broadcast to `[*, T]`: `[*, A, C]`.
    """
    atoms = _atoms.get()
    if torch.is_grad_enabled() or atoms is None or token_dim != -2 or max_num_atoms_per_token is not None:
        return PassedOn()
    ends = (num_atoms_per_token * token_mask.int()).long().cumsum(-1)
    each = torch.arange(atoms, device=ends.device).expand(*ends.shape[:-1], atoms)
    token = torch.searchsorted(ends, each.contiguous(), right=True)  # beyond the last atom: one more, which is 0
    rows = torch.nn.functional.pad(token_feat * token_mask.unsqueeze(-1), (0, 0, 0, 1))
    return rows.take_along_dim(token.expand(*rows.shape[:-2], atoms).unsqueeze(-1), -2)
