"""RosettaFold-3's denoiser in a sampling: its transformers by `evoattn.nn`, and what all steps share, computed once.

The client computes a pair representation of all pairs of atoms in each step, and reads it in windows. Here it is computed in
the windows alone. Under autocast to bfloat16, as the program samples, the kernels have the precision "bf16": factors have at
least the digits of bfloat16, and sums, norms and the residual stream of the transformers are float32.
"""

from __future__ import annotations

import contextvars
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from evoattn.clients import aggregation, diffusion, graphs
from evoattn.clients.af3_transformers import keys_around, latest, run_tokens, run_windows, windows_around
from evoattn.clients.arguments import UnknownArgument
from evoattn.clients.denoisers import checked, may_share
from evoattn.clients.known import KnownLayer, features, share
from evoattn.clients.site import Count, PassedOn, Site, replacement
from evoattn.core.devices import uncast
from evoattn.core.keeping import made_once
from evoattn.dispatch.axes import with_axes
from evoattn.nn.diffusion import DiffusionTransformer

_QUERIES, _KEYS = 32, 128
"""The sizes of a window of atoms, which the client's blocks pass by default."""

_BLOCK = (
    "attention_pair_bias.mha.linear_q=attention_pair_bias.to_q attention_pair_bias.mha.linear_k=attention_pair_bias.to_k "
    "attention_pair_bias.mha.linear_v=attention_pair_bias.to_v attention_pair_bias.mha.linear_g=attention_pair_bias.to_g.0 "
    "attention_pair_bias.mha.linear_o=attention_pair_bias.to_a attention_pair_bias.layer_norm_z=attention_pair_bias.ln_0 "
    "attention_pair_bias.linear_z=attention_pair_bias.to_b "
    "attention_pair_bias.linear_ada_out=attention_pair_bias.linear_output_project.0 "
    "conditioned_transition.swiglu.linear_a=conditioned_transition_block.linear_1 "
    "conditioned_transition.swiglu.linear_b=conditioned_transition_block.linear_2 "
    "conditioned_transition.linear_out=conditioned_transition_block.linear_3 "
    "conditioned_transition.linear_g=conditioned_transition_block.linear_output_project.0"
)
_ADALN = "layer_norm_a=ln_a layer_norm_s=ln_s linear_g=to_gain.0 linear_s=to_bias"
_HEADS = "layer_norm_q=query_layer_norm layer_norm_k=key_layer_norm"

_OF_TOKENS = ("asym_id", "entity_id", "sym_id", "residue_index", "token_index", "cyclic_asym_ids")
_OF_ATOMS = ("atom_to_token_map", "ref_atom_name_chars", "ref_pos", "ref_space_uid", "atom_level_embedding")
_OF_CHIRALITY = ("chiral_centers", "chiral_center_dihedral_angles")
"""The features that the denoiser reads, beside those that its encoder names."""

_DENOISER = "rf3.model.RF3_structure.DiffusionModule"


class AtomPairs(NamedTuple):
    """The pair representation of RosettaFold-3's atoms.

    Args:
        windows: that of each window of queries and its keys, `[W, Q, K, C]`. What is beyond the last atom has values of others.
        whole: returns that of all atoms, `[L, L, C]`, as the client's blocks take it.
    """

    windows: Tensor
    whole: Callable[[], Tensor]


def _make(client: Any) -> Any:
    first = client.blocks[0]
    parallel, attention = first.no_residual_connection_between_attention_and_transition, first.attention_pair_bias
    condition = features(attention.linear_output_project, "in_features")
    sizes = (attention.c_a, condition, attention.c_pair, attention.c, attention.n_head, len(client.blocks))
    made: Any = DiffusionTransformer(*sizes, parallel=parallel)
    made.layer_norm_z, made.takes_low_pairs = None, True
    for block, own in zip(made.blocks, client.blocks, strict=True):
        attention, transition = own.attention_pair_bias, own.conditioned_transition_block
        gates = [attention.to_g, attention.linear_output_project, attention.ada_ln_1.to_gain]
        gates += [transition.linear_output_project, transition.ada_ln.to_gain]
        if own.no_residual_connection_between_attention_and_transition is not parallel or any(
            type(x[1]) is not nn.Sigmoid for x in gates
        ):
            raise TypeError  # said as "has other modules"
        block.attention_pair_bias.layer_norm_z = None
        share(block, own, _BLOCK)
        share(block.attention_pair_bias.layer_norm_a, attention.ada_ln_1, _ADALN)
        share(block.conditioned_transition.layer_norm, transition.ada_ln, _ADALN)
        if attention.kq_norm:
            share(block.attention_pair_bias.mha, attention, _HEADS)
    return made


def _call(transformer: Any, A_I: Tensor, S_I: Tensor, Z_II: Any, Beta_II: Any) -> Tensor:  # noqa: N803
    """A_I `[D, I, C]` of D samples that share Z_II. With a Beta_II they are atoms."""
    if A_I.ndim != 3:
        raise UnknownArgument("a diffusion transformer without an axis of samples")
    a, s = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (A_I, S_I))
    with uncast(a.device):
        if Beta_II is None:
            return run_tokens(transformer, a, s, Z_II).to(A_I.dtype)
        if not isinstance(Z_II, AtomPairs):
            raise UnknownArgument("atoms whose pair representation steps do not share")
        windows, pairs = functools.partial(windows_around, a, _QUERIES, _KEYS, 1e9), Z_II.windows
        s = with_axes(s, 3)[None]
        return run_windows(transformer, a[None], s, pairs[None, None], pairs, windows, _QUERIES)[0].to(A_I.dtype)


TRANSFORMER = KnownLayer(_make, "", _call, kind=diffusion.KIND, in_part=True)


def transformer(original: Callable[..., Any], count: Count) -> Callable[..., Any]:
    """The transformer. What the client's own computes of atoms gets the pair representation of all pairs."""

    @functools.wraps(original)
    def own(self: Any, A_I: Tensor, S_I: Tensor, Z_II: Any, Beta_II: Any) -> Any:  # noqa: N803
        return original(self, A_I, S_I, Z_II.whole() if isinstance(Z_II, AtomPairs) else Z_II, Beta_II)

    return diffusion.transformer(own, count)


class _Shared(NamedTuple):
    """Facts of a call whose steps share what they can. one_condition: whether all samples have one noise level."""

    one_condition: bool


_shared: contextvars.ContextVar[_Shared | None] = contextvars.ContextVar("shared", default=None)


def shares() -> bool:
    """Return whether the call is one inside a denoiser whose steps share what they can."""
    return _shared.get() is not None


def denoised(original: Callable[..., Any], count: Count) -> Callable[..., Any]:
    """The denoiser. In a sampling it casts what its steps share to float32 once, and lets its parts share it."""

    def forward(
        self: Any,
        X_noisy_L: Tensor,  # noqa: N803
        t: Tensor,
        f: dict[str, Any],
        S_inputs_I: Tensor,  # noqa: N803
        S_trunk_I: Tensor,  # noqa: N803
        Z_trunk_II: Tensor,  # noqa: N803
    ) -> Any:
        known = X_noisy_L.ndim == 3 and t.ndim == 1 and S_trunk_I.ndim == 2 and Z_trunk_II.ndim == 3
        if not known or self.atom_attention_encoder.broadcast_trunk_feats_on_1dim_old or not _may_share(self):
            return original(self, X_noisy_L, t, f, S_inputs_I, S_trunk_I, Z_trunk_II)
        token = _shared.set(_Shared(graphs.in_loop()))
        try:
            return original(self, X_noisy_L, t, f, *map(_single, (S_inputs_I, S_trunk_I, Z_trunk_II)))
        finally:
            _shared.reset(token)

    return forward


def _single(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float32 else made_once("float32", (x,), x.float)


def _may_share(module: nn.Module) -> bool:
    """`denoisers.may_share`, which looks at all modules once in a sampling."""
    if torch.is_grad_enabled() or not diffusion.may_have_kernels(module):
        return False
    return made_once("may share", (module,), lambda: may_share(module))


def _read(module: nn.Module, features: dict[str, Any], *tensors: Tensor) -> list[Tensor]:
    """The tensors that a module reads: these, the features and its parameters."""
    return [*tensors, *(x for x in features.values() if isinstance(x, Tensor)), *module.parameters()]


def conditioned(original: Callable[..., Any], count: Count) -> Callable[..., Any]:
    """The conditioning. Only the noise level is new in each step, and samples that share it share the condition `[1, I, C]`."""

    def forward(
        self: Any,
        t: Tensor,
        f: dict[str, Any],
        S_inputs_I: Tensor,  # noqa: N803
        S_trunk_I: Tensor,  # noqa: N803
        Z_trunk_II: Tensor,  # noqa: N803
    ) -> tuple[Tensor, Tensor]:
        shared, call = _shared.get(), (f, S_inputs_I, S_trunk_I, Z_trunk_II)
        if shared is None:
            return original(self, t, *call)  # type: ignore[no-any-return]

        def make() -> tuple[Tensor, Tensor]:
            return self.to_si(torch.cat([S_trunk_I, S_inputs_I], dim=-1)), original(self, t, *call)[1]

        given = {name: f[name] for name in _OF_TOKENS if name in f}
        trunk, pairs = latest("conditions", self, _read(self, given, *call[1:]), make)
        level = t[:1] if shared.one_condition else t
        single = self.process_n(self.fourier_embedding(0.25 * torch.log(level / self.sigma_data))).unsqueeze(-2) + trunk
        for layer in self.transition_2:
            single = single + layer(single)
        return single, pairs

    return forward


def encoded(original: Callable[..., Any], count: Count) -> Callable[..., Any]:
    """The encoder of atoms, whose steps share the condition and the pair representation. Only positions are new in each."""

    def forward(
        self: Any,
        f: dict[str, Any],
        R_L: Tensor,  # noqa: N803
        S_trunk_I: Tensor,  # noqa: N803
        Z_II: Tensor,  # noqa: N803
    ) -> tuple[Tensor, Tensor, Tensor, Any]:
        if not shares():
            return original(self, f, R_L, S_trunk_I, Z_II)  # type: ignore[no-any-return]
        given = {name: f[name] for name in (*self.atom_1d_features, *_OF_ATOMS) if name in f}
        owners = _read(self, given, S_trunk_I, Z_II)
        first, condition, windows = latest("atoms", self, owners, lambda: _atoms(self, f, S_trunk_I, Z_II))

        def whole() -> Tensor:
            made: Tensor = latest("pairs of all atoms", self, owners, lambda: original(self, f, R_L, S_trunk_I, Z_II)[3])
            return made

        pairs = AtomPairs(windows, whole)
        q = self.process_r(R_L) + first
        if self.use_chiral_features:
            with uncast(R_L.device):
                centers, angles = (f[name] for name in _OF_CHIRALITY)
                gradients = _chiral_gradients(R_L, centers, angles, self.no_grad_on_chiral_center)
            q = self.process_ch(gradients.nan_to_num()) + q
        q = self.atom_transformer(q, condition, pairs)
        return _means(self.process_q(q), f["atom_to_token_map"], S_trunk_I.shape[-2]).to(q.dtype), q, condition, pairs

    return forward


def _atoms(self: Any, f: dict[str, Any], s: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The embedded features of atoms, to which noisy positions are added; their condition; and their pairs in windows."""
    token = f["atom_to_token_map"].long()
    atoms = len(token)
    first = self.process_input_features(torch.cat([f[name].reshape(atoms, -1) for name in self.atom_1d_features], dim=-1))
    if self.use_atom_level_embedding:
        first = first + self.process_atom_level_embedding(f["atom_level_embedding"])
    condition = first + self.process_s_trunk(s)[token]
    numbers = torch.arange(-(-atoms // _QUERIES) * _QUERIES, device=token.device).view(-1, _QUERIES, 1)
    query = numbers.clamp(max=atoms - 1)  # [w,q,1]
    key = keys_around(atoms, _QUERIES, _KEYS, token.device).clamp(0, atoms - 1).unsqueeze(1)  # [w,1,k]
    offset = f["ref_pos"][query] - f["ref_pos"][key]
    same = (f["ref_space_uid"][query] == f["ref_space_uid"][key]).unsqueeze(-1)  # of one residue
    size = (offset * offset).sum(-1, keepdim=True) if self.use_inv_dist_squared else offset.norm(dim=-1, keepdim=True)
    pairs = self.process_d(offset) * same
    pairs = pairs + self.process_inverse_dist(1 / (1 + size)) * same
    pairs = pairs + self.process_valid_mask(same.to(pairs.dtype)) * same
    pairs = pairs + self.process_z(z)[token[query], token[key]]
    pairs = pairs + (self.process_single_l(condition)[query] + self.process_single_m(condition)[key])
    return first, condition, pairs + self.pair_mlp(pairs)


def _chiral_gradients(x: Tensor, centers: Tensor, angles: Tensor, fixed: bool) -> Tensor:
    """The gradients of the distances from the chirality of centers. Those of an atom are added in the order of the centers.

    Args:
        x: positions `[D, L, 3]`.
        centers: the atoms `[N, 4]` of each center.
        angles: their dihedral angles.
        fixed: whether the first atom of a center gets 0.
    """
    if not len(centers):
        return torch.zeros_like(x)
    own = sys.modules["rf3.loss.loss"]
    with torch.device(x.device):  # the client's function copies a matrix from the CPU otherwise
        gradients = own.calc_ddihedralmse_dxyz(*x[:, centers].unbind(-2), angles)
    if fixed:
        gradients[:, :, 0] = 0
    return aggregation.sums(gradients.flatten(1, 2), centers.flatten(), x.shape[-2])


def _means(x: Tensor, group: Tensor, groups: int) -> Tensor:
    """The mean of the rows `[*, L, C]` of each group, in float32 at least."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return aggregation.sums(x, group, groups) / aggregation.sums(x.new_ones(*group.shape, 1), group, groups).clamp_min(1)


def step(original: Callable[..., Any], count: Count) -> Callable[..., Any]:
    """The denoiser, recorded as a whole, of the features that it reads: a recording would copy those of the alignment."""
    recorded = graphs.step(original, count)

    def forward(self: Any, X_noisy_L: Tensor, t: Tensor, f: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N803
        if type(f) is dict and f"{type(self).__module__}.{type(self).__qualname__}" == _DENOISER and _may_share(self):
            names = (*self.atom_attention_encoder.atom_1d_features, *_OF_TOKENS, *_OF_ATOMS, *_OF_CHIRALITY)
            f = {name: f[name] for name in dict.fromkeys(names) if name in f}
        return recorded(self, X_noisy_L, t, f, *args, **kwargs)

    forward._evoattn_steps = recorded._evoattn_steps  # type: ignore[attr-defined]
    return forward


def sampled(original: Callable[..., Any], count: Count) -> Callable[..., Any]:
    """The sampling loop without waits of the host. Under autocast "exact" is no further from float64 than that is."""
    return graphs.loop(_sampled(original, Count()), count, _precision)  # the loop itself has no kernels


def _precision(asked: str) -> str:
    if asked != "exact" or not torch.is_autocast_enabled("cuda"):
        return asked
    return {torch.bfloat16: "bf16", torch.float16: "tf32"}.get(torch.get_autocast_dtype("cuda"), asked)


@replacement
def _sampled(
    self: Any,
    *,
    S_inputs_I: Tensor,  # noqa: N803
    S_trunk_I: Tensor,  # noqa: N803
    Z_trunk_II: Tensor,  # noqa: N803
    f: dict[str, Any],
    diffusion_module: nn.Module,
    diffusion_batch_size: int,
    coord_atom_lvl_to_be_noised: Tensor,
) -> Any:
    """The client's loop, which draws the same random numbers. It waits for the GPU once, to read the noise levels.

    The original computes if gradients are recorded, or if somebody has exchanged the augmentation.
    """
    own = sys.modules["foundry.utils.rotation_augmentation"]
    sampler = sys.modules["rf3.diffusion_samplers.inference_sampler"]
    if torch.is_grad_enabled() or sampler.centre_random_augmentation is not own.centre_random_augmentation:  # type: ignore[attr-defined]
        return PassedOn()
    levels = self._construct_inference_noise_schedule(device=S_inputs_I.device)
    raised = (levels > self.gamma_min).tolist()[1:]
    shape = (diffusion_batch_size, f["ref_element"].shape[0], 3)
    x = self._get_initial_structure(
        c0=levels[0], D=shape[0], L=shape[1], coord_atom_lvl_to_be_noised=coord_atom_lvl_to_be_noised
    )
    result: dict[str, Any] = {"X_noisy_L_traj": [], "X_denoised_L_traj": [], "t_hats": []}
    # The client draws them on the default device. If that is the CPU, and the noise is drawn on a GPU, their order is the same.
    at_once = x.device.type != "cpu" and torch.get_default_device().type == "cpu"
    turns = _turns(own, len(raised), shape[0], x.device, at_once)
    for before, after, is_raised, (turn, move) in zip(levels, levels[1:], raised, turns, strict=False):
        rows = x.reshape(-1, 3)  # one center for all samples, as the client has it
        x = own.rot_vec_mul(turn[:, None], (rows - rows.mean(dim=-2, keepdim=True)).view(x.shape)) + move
        level = before * ((self.gamma_0 if is_raised else 0) + 1)
        size = self.noise_scale * torch.sqrt(torch.square(level) - torch.square(before))
        noisy = x + size * torch.normal(mean=0.0, std=1.0, size=x.shape, device=x.device)
        conditions = {"S_inputs_I": S_inputs_I, "S_trunk_I": S_trunk_I, "Z_trunk_II": Z_trunk_II}
        denoised = diffusion_module(X_noisy_L=noisy, t=level.tile(shape[0]), f=f, **conditions)
        x = noisy + self.step_scale * (after - level) * ((noisy - denoised) / level)
        scale = torch.sqrt(level[..., None, None] ** 2 + self.sigma_data**2)
        for name, value in zip(result, (noisy / scale * self.sigma_data, denoised, level), strict=True):
            result[name].append(value)
    return {"X_L": x, **result}


def _turns(own: Any, steps: int, samples: int, device: torch.device, at_once: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """A random rotation `[D, 3, 3]` and translation `[D, 1, 3]` for each step.

    at_once: whether all are drawn and copied now, and not one when it is asked for. The numbers are the same if nobody else
    draws from the default device meanwhile.
    """

    def draw() -> tuple[Tensor, Tensor]:
        return own.uniform_random_rotation((samples,)), torch.normal(mean=0, std=1, size=(samples, 1, 3))

    if not at_once or not steps:
        return ((turn.to(device), move.to(device)) for turn, move in (draw() for _ in range(steps)))
    drawn = zip(*(draw() for _ in range(steps)), strict=True)
    return zip(*(torch.stack(x).to(device).unbind() for x in drawn), strict=True)


def layer_sites() -> tuple[Site, ...]:
    """The transformers and what steps share, and what is taken for granted of them."""
    transformers, structure = "rf3.model.layers.af3_diffusion_transformer", "rf3.model.RF3_structure"
    return (
        Site(transformers, "DiffusionTransformer.forward", transformer, kind=diffusion.KIND),
        Site(structure, "DiffusionModule.forward", denoised, counted=False),
        Site(structure, "DiffusionConditioning.forward", conditioned, counted=False),
        Site(transformers, "AtomAttentionEncoderDiffusion.forward", encoded, counted=False),
        *checked(transformers, "AtomTransformer.forward", "DiffusionTransformerBlock", "ConditionedTransitionBlock.forward"),
        *checked(structure, "AtomAttentionDecoder"),
        *checked("rf3.model.layers.layer_utils", "AdaLN.forward", "MultiDimLinear"),
        *checked("rf3.model.layers.pairformer_layers", "RelativePositionEncoding.forward"),
        *checked("rf3.loss.loss", "calc_chiral_grads_flat_impl", "calc_ddihedralmse_dxyz"),
        *checked("foundry.utils.torch", "scatter_mean"),
    )


def step_sites() -> tuple[Site, ...]:
    """The denoiser's step and the loop."""
    sampler, augmentation = "rf3.diffusion_samplers.inference_sampler", "foundry.utils.rotation_augmentation"
    return (
        Site("rf3.model.RF3_structure", "DiffusionModule.forward", step),
        Site(sampler, "SampleDiffusion.sample_diffusion_like_af3", sampled, counted=False),
        *checked(
            augmentation,
            *("centre", "centre_random_augmentation", "get_random_augmentation", "uniform_random_rotation"),
        ),
    )
