"""Diffusion transformers of Protenix, OpenDDE and OpenFold-3, of tokens and of windows of atoms, in a sampling.

The pair biases of all blocks are made once for one z, with the masks of windows added.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evoattn.clients import diffusion
from evoattn.clients.arguments import UnknownArgument, ignore
from evoattn.clients.known import KnownLayer, features, share
from evoattn.core.devices import uncast
from evoattn.core.keeping import made_once, states
from evoattn.core.numerics import float32_products
from evoattn.dispatch.axes import with_axes
from evoattn.nn import diffusion_steps
from evoattn.nn.diffusion import DiffusionTransformer
from evoattn.nn.pair_bias import AdaLN
from evoattn.nn.project import layer_norm

Made = TypeVar("Made")

_PROTENIX_INF = 1e10
"""Is subtracted from the scores of keys before the first atom of a window and after the last."""

_ADALN = "layer_norm_a layer_norm_s linear_g linear_s"
_PROTENIX_ADALN = "layer_norm_a=layernorm_a layer_norm_s=layernorm_s linear_g=linear_s linear_s=linear_nobias_s"
_PROTENIX_BLOCK = (
    "attention_pair_bias.mha.linear_*=attention_pair_bias.attention.linear_* "
    "attention_pair_bias.layer_norm_z=attention_pair_bias.layernorm_z "
    "attention_pair_bias.linear_z=attention_pair_bias.linear_nobias_z "
    "attention_pair_bias.linear_ada_out=attention_pair_bias.linear_a_last "
    "conditioned_transition.swiglu.linear_a=conditioned_transition_block.linear_nobias_a1 "
    "conditioned_transition.swiglu.linear_b=conditioned_transition_block.linear_nobias_a2 "
    "conditioned_transition.linear_out=conditioned_transition_block.linear_nobias_b "
    "conditioned_transition.linear_g=conditioned_transition_block.linear_s"
)
_OPENFOLD3_BLOCK = (
    "attention_pair_bias.mha.linear_* attention_pair_bias.linear_z attention_pair_bias.linear_ada_out "
    "conditioned_transition.swiglu.linear_a conditioned_transition.swiglu.linear_b "
    "conditioned_transition.linear_out conditioned_transition.linear_g"
)


class Denoiser(NamedTuple):
    """Facts of a call of Protenix' denoiser.

    Args:
        trunk: the single representation of the trunk.
        pairs: the pair representation of all its steps.
        one_condition: whether all samples have one noise level: the client's own loop gives them one.
        normalize: the norm that the client would apply to `pairs` first. None: each block has a norm of its own.
    """

    trunk: Tensor
    pairs: Tensor
    one_condition: bool
    normalize: nn.Module | None


denoiser_now: contextvars.ContextVar[Denoiser | None] = contextvars.ContextVar("denoiser", default=None)


def _identity(z: Tensor) -> Tensor:
    """The tensor that stands for z in all steps: z itself, or the pair representation of which it is a view."""
    denoiser = denoiser_now.get()
    if denoiser is None:
        return z
    pairs = denoiser.pairs
    same = z.data_ptr() == pairs.data_ptr() and z.numel() == pairs.numel() and z.dtype == pairs.dtype
    return pairs if same and z.is_contiguous() and pairs.is_contiguous() else z


def _make_protenix(client: Any) -> Any:
    first = client.blocks[0].attention_pair_bias
    if not all(_is_plain_protenix(block, first.cross_attention_mode) for block in client.blocks):
        raise TypeError  # said as "has other modules"
    mha = first.attention
    condition = features(first.linear_a_last, "in_features")
    c_z = features(first.linear_nobias_z, "in_features")
    made: Any = DiffusionTransformer(mha.c_q, condition, c_z, mha.c_hidden, mha.num_heads, len(client.blocks))
    made.layer_norm_z = None
    for block, own in zip(made.blocks, client.blocks, strict=True):
        attention, transition = own.attention_pair_bias, own.conditioned_transition_block
        block.attention_pair_bias.layer_norm_z = None
        share(block, own, _PROTENIX_BLOCK)
        share(block.attention_pair_bias.layer_norm_a, attention.layernorm_a, _PROTENIX_ADALN)
        share(block.conditioned_transition.layer_norm, transition.adaln, _PROTENIX_ADALN)
        if first.cross_attention_mode:
            _give_keys_a_norm(block, mha.c_q, condition, attention.layernorm_kv, _PROTENIX_ADALN, twice=True)
    return made


def _is_plain_protenix(block: Any, crosses: bool) -> bool:
    attention, path = block.attention_pair_bias, getattr(block, "drop_path", None) or block.residual_path
    return attention.has_s and attention.cross_attention_mode == crosses and type(path) is nn.Identity


def _make_openfold3(client: Any) -> Any:
    first, crosses = client.blocks[0].attention_pair_bias, client.blocks[0].use_cross_attention
    mha = first.mha
    made: Any = DiffusionTransformer(
        first.c_q, first.c_s, first.c_z, mha.c_hidden, mha.no_heads, len(client.blocks), inf=first.inf
    )
    made.window = (first.n_query, first.n_key) if crosses else None
    share(made, client, "layer_norm_z")
    for block, own in zip(made.blocks, client.blocks, strict=True):
        attention = own.attention_pair_bias
        window = (attention.n_query, attention.n_key) if own.use_cross_attention else None
        if attention.inf != first.inf or window != made.window:
            raise TypeError  # said as "has other modules"
        share(block, own, _OPENFOLD3_BLOCK)
        share(block.attention_pair_bias.layer_norm_a, attention.layer_norm_a_q if crosses else attention.layer_norm_a, _ADALN)
        share(block.conditioned_transition.layer_norm, own.conditioned_transition.layer_norm, _ADALN)
        if crosses:
            _give_keys_a_norm(block, first.c_q, first.c_s, attention.layer_norm_a_k, _ADALN, twice=False)
    return made


def _give_keys_a_norm(block: Any, channels: int, condition: int, own: nn.Module, modules: str, *, twice: bool) -> None:
    block.attention_pair_bias.layer_norm_k = AdaLN(channels, condition)
    block.attention_pair_bias.norms_keys_twice = twice
    share(block.attention_pair_bias.layer_norm_k, own, modules)


def _call_protenix(
    transformer: Any,
    a: Tensor,
    s: Tensor,
    z: Tensor,
    *,
    n_queries: int | None = None,
    n_keys: int | None = None,
    enable_efficient_fusion: bool = False,
    extra_attn_bias: Tensor | None = None,
    **switches: Any,
) -> Tensor:
    """Every token is attended, and every atom of a window. OpenDDE may add a bias `[*, L, L]` to those of tokens."""
    ignore(switches)
    if enable_efficient_fusion:
        raise UnknownArgument("a pair representation that is normalised already")
    if (transformer.blocks[0].attention_pair_bias.layer_norm_k is None) != (not n_queries or not n_keys):
        raise UnknownArgument("windows of a transformer of tokens, or none of one of atoms")
    if not n_queries or not n_keys:
        return run_tokens(transformer, a, s, z, extra=extra_attn_bias)

    windows = functools.partial(windows_around, a, n_queries, n_keys, _PROTENIX_INF)
    return run_windows(transformer, a[None], s[None], z[None], z, windows, n_queries)[0]


def windows_around(a: Tensor, queries: int, keys: int, inf: float, atoms: int) -> tuple[Tensor, Tensor]:
    """The `windows` of `run_windows`, if the keys of a window are the atoms around its middle."""
    numbers = keys_around(atoms, queries, keys, a.device)
    there = (numbers >= 0) & (numbers < atoms)
    return numbers.where(there, -1)[None], (there.to(a.dtype) - 1)[None, :, None] * inf


def keys_around(atoms: int, queries: int, keys: int, device: torch.device) -> Tensor:
    """The atoms `[W, K]` around the middle of each window of queries. Some are before the first atom, or after the last."""
    first = queries // 2 - keys // 2 + queries * torch.arange(-(-atoms // queries), device=device)
    return first[:, None] + torch.arange(keys, device=device)


def _call_openfold3(
    transformer: Any, a: Tensor, s: Tensor, z: Tensor, mask: Tensor | None = None, _mask_trans: bool = True, **switches: Any
) -> Tensor:
    ignore(switches)
    if transformer.window is None:
        if mask is not None and diffusion.attends_to_all(mask):
            mask = None
        return run_tokens(transformer, a, s, z, mask, mask if _mask_trans else None)
    if mask is None or a.ndim != 4 or mask.shape != (a.shape[0], 1, a.shape[-2]):
        raise UnknownArgument("atoms of which each sample has others")
    queries, keys = transformer.window
    own = sys.modules["openfold3.core.utils.atom_attention_block_utils"]

    def windows(atoms: int) -> tuple[Tensor, Tensor]:
        numbers = torch.arange(1, atoms + 1, device=a.device).view(1, 1, -1, 1).expand(a.shape[0], 1, -1, 1)
        _, picked, pairs = own.convert_single_rep_to_blocks(numbers, queries, keys, mask)
        return picked[:, 0, ..., 0] - 1, transformer.blocks[0].attention_pair_bias.inf * (pairs[:, 0] - 1)

    return run_windows(transformer, a, s, z, z, windows, queries, mask, mask if _mask_trans else None)


def run_tokens(
    transformer: Any,
    a: Tensor,
    s: Tensor,
    z: Tensor,
    mask: Tensor | None = None,
    transition_mask: Tensor | None = None,
    extra: Tensor | None = None,
) -> Tensor:
    """Compute a call of tokens: a `[*, L, c_a]`, s `[*, L, c_s]`, z `[*, L, L, c_z]`, masks `[*, L]`, with * broadcast.

    extra: `[*, L, L]`, is added to the pair biases.
    """
    with _as_float32(a):
        fused = _prepared(transformer, a, s, z, mask)
        if len(transformer.blocks) * transformer.no_heads * z[..., 0].numel() * z.element_size() > _most_bytes(z.device):
            raise UnknownArgument("pair biases that would take more than a quarter of the GPU's memory")
        off = None if extra is None else with_axes(extra.to(a.dtype), a.ndim).unsqueeze(-3)
        owners = [_identity(z), *_of_pair_biases(transformer), *([] if extra is None else [extra])]
        biases = latest("pair biases", transformer, owners, lambda: _projected(transformer, with_axes(z, a.ndim + 1), off))
        s = with_axes(s, a.ndim)
        mask, transition_mask = (None if x is None else with_axes(x, a.ndim - 1) for x in (mask, transition_mask))
        return diffusion_steps.run(fused, a, s, biases, mask, None, transition_mask)


def _most_bytes(device: torch.device) -> float:
    """The memory that kept pair biases may take."""
    return torch.cuda.get_device_properties(device).total_memory / 4 if device.type == "cuda" else float("inf")


def _prepared(transformer: Any, a: Tensor, s: Tensor, z: Tensor, *others: Tensor | None) -> diffusion_steps.Prepared:
    fused = diffusion.prepared(transformer, a, s, *others)
    if z.dtype != a.dtype and not getattr(transformer, "takes_low_pairs", False):
        raise UnknownArgument("a pair representation of a diffusion transformer that is not in float32")
    return fused


def run_windows(
    transformer: Any,
    a: Tensor,
    s: Tensor,
    z: Tensor,
    identity: Tensor,
    windows: Callable[[int], tuple[Tensor, Tensor]],
    size: int,
    mask: Tensor | None = None,
    transition_mask: Tensor | None = None,
) -> Tensor:
    """Compute a call of atoms.

    Args:
        transformer: the transformer.
        a: `[B, S, L, c_a]`.
        s: `[B, S, L, c_s]`, or with one entry for all samples.
        z: `[B, 1, W, Q, K, c_z]`.
        identity: the tensor that z is a view of.
        windows: returns the atom of each key `[B, W, K]`, or -1, and the mask `[B, W, Q or 1, K]` that is added to the scores.
        size: queries of a window.
        mask: what `windows` depends on.
        transition_mask: `[B, 1, L]`, a factor of the updates of the transitions.
    """
    if a.ndim != 4 or s.ndim != 4 or z.ndim != 6 or z.shape[1] != 1:
        raise UnknownArgument("atoms of which each sample has its own pair representation")
    samples, atoms = a.shape[1:3]
    with _as_float32(a):
        fused = _prepared(transformer, a, s, z, mask)

        def make() -> tuple[diffusion_steps.Keys, list[Tensor]]:
            picked, off = windows(atoms)
            biases = _projected(transformer, z[:, 0], off.unsqueeze(2))
            return diffusion_steps.Keys(_rows_of(picked, samples, size)), [x.flatten(0, 1).unsqueeze(1) for x in biases]

        owners = (identity, *_of_pair_biases(transformer), *(() if mask is None else (mask,)))
        keys, biases = latest("windows", transformer, owners, make, samples, atoms)
        factors = None if transition_mask is None else _in_windows(transition_mask.unsqueeze(-1), size)[..., 0]
        of_s, rows = _condition_of_atoms(transformer, fused, a, s, size), _in_windows(a, size)
        result: Tensor = diffusion_steps.run(fused, rows, of_s, biases, None, keys, factors)
        by_sample: Tensor = result.unflatten(0, (a.shape[0], -1)).transpose(1, 2).flatten(2, 3)
        return by_sample[:, :, :atoms]


def _condition_of_atoms(
    transformer: Any, fused: diffusion_steps.Prepared, a: Tensor, s: Tensor, size: int
) -> diffusion_steps.OfCondition | Tensor:
    """All that the condition s of atoms gives, made once for all steps that have the same s. It takes 256 MiB at most."""
    base = s if s._base is None else s._base  # clients make other views of it in each step
    settings = (fused, s.storage_offset(), s.shape, s.stride(), a.shape, float32_products())

    def make() -> diffusion_steps.OfCondition | None:
        return diffusion_steps.kept_condition(fused, _in_windows(a, size), _in_windows(s, size))

    kept = latest("condition of atoms", transformer, [base], make, *settings)
    return _in_windows(s, size) if kept is None else kept


def _in_windows(x: Tensor, size: int) -> Tensor:
    """The windows `[B W, S, size, C]` of atoms `[B, S, L, C]`, with zeros after the last."""
    windows: Tensor = F.pad(x, (0, 0, 0, -x.shape[-2] % size)).unflatten(2, (-1, size))
    return windows.transpose(1, 2).flatten(0, 1)


def _rows_of(picked: Tensor, samples: int, size: int) -> Tensor:
    """The row of each key in `_in_windows`, counted from 1, for atoms `[B, W, K]`. 0: there is none."""
    batch, windows, _ = picked.shape
    structure = torch.arange(batch, device=picked.device).view(-1, 1, 1, 1) * windows
    sample = torch.arange(samples, device=picked.device).view(-1, 1)
    picked = picked.long().unsqueeze(2)
    rows = ((structure + picked // size) * samples + sample) * size + picked % size + 1
    return rows.where(picked >= 0, 0).flatten()


def _as_float32(a: Tensor) -> contextlib.AbstractContextManager[None]:
    """No autocast, if the one that is on casts to float32, as OpenFold-3's does. All tensors here have that dtype."""
    kind = a.device.type
    if kind == "cuda" and torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.float32:
        return uncast(a.device)
    return contextlib.nullcontext()


class _Kept(NamedTuple):
    """A thing made of some tensors in some states, with some settings."""

    of: list[Tensor]
    states: list[tuple[int, int]]
    settings: tuple[Any, ...]
    made: Any

    def holds(self, of: list[Tensor], settings: tuple[Any, ...]) -> bool:
        if self.settings != settings or self.states != states(of):
            return False
        return all(x is y for x, y in zip(self.of, of, strict=True))


def latest(name: str, owner: nn.Module, tensors: Sequence[Tensor], make: Callable[[], Made], *settings: Any) -> Made:
    """Return what `make` returns. A sampling keeps it for the last tensors alone: some clients have new ones in each step."""
    of = list(tensors)
    kept = made_once(name, (owner,), lambda: _Kept(of, states(of), settings, make()), lambda x: x.holds(of, settings))
    made: Made = kept.made
    return made


def _projected(transformer: Any, z: Tensor, off: Tensor | None = None) -> list[Tensor]:
    """The pair biases of z, in the layout of kernels. off: is added to each."""
    normed = z if transformer.layer_norm_z is None else layer_norm(z, transformer.layer_norm_z, z.dtype)
    biases = (block.attention_pair_bias.pair_bias(normed) for block in transformer.blocks)
    return [diffusion.heads_first((x if off is None else x + off).movedim(-3, -1)) for x in biases]


def _of_pair_biases(transformer: Any) -> list[Tensor]:
    """The parameters of the pair biases of all blocks."""
    modules = [transformer.layer_norm_z]
    modules += [getattr(x.attention_pair_bias, name) for x in transformer.blocks for name in ("layer_norm_z", "linear_z")]
    return [x for module in modules if module is not None for x in module.parameters()]


PROTENIX = KnownLayer(_make_protenix, "", _call_protenix, kind=diffusion.KIND, in_part=True)
OPENFOLD3 = KnownLayer(_make_openfold3, "", _call_openfold3, kind=diffusion.KIND, in_part=True)
