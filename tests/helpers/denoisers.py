"""Small denoisers of Protenix, OpenDDE, OpenFold-3 and RosettaFold-3, with random weights, and samplings by them."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

STEPS = 8


def draw(seed: int, *shape: int) -> Tensor:
    """The same numbers on each device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), device="cpu").to(torch.get_default_device())


def filled(device: torch.device, kind: Callable[..., nn.Module], *arguments: Any, **named: Any) -> Any:
    """A module in eval mode, without a parameter that is 0."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        module = kind(*arguments, **named)
        for x in module.parameters():
            x.copy_(0.3 * torch.randn(x.shape, generator=generator, device="cpu"))
    return module.to(device).eval()


def module(name: str) -> Any:
    """A client's module, or the test is skipped."""
    pytest.importorskip(name.partition(".")[0], reason="the client is not installed", exc_type=ImportError)
    return pytest.importorskip(name, exc_type=ImportError)


def protenix(client: str, device: torch.device) -> tuple[Any, Callable[..., Callable[[], Any]]]:
    """A denoiser of Protenix or OpenDDE, and what makes a sampling of so many samples and residues on the default device."""
    diffusion, generator = module(f"{client}.model.modules.diffusion"), module(f"{client}.model.generator")
    blocks = {"n_blocks": 1, "n_heads": 2}
    denoiser = filled(
        device, diffusion.DiffusionModule, c_atom=8, c_atompair=4, c_token=16, c_s=12, c_z=8, c_s_inputs=20,
        atom_encoder=blocks, transformer={"n_blocks": 2, "n_heads": 4}, atom_decoder=blocks,
    )  # fmt: skip
    schedule = generator.InferenceNoiseScheduler()

    def sample(samples: int, residues: int) -> Any:
        atoms = 5 * residues
        group = torch.arange(atoms) // 5
        features = {
            "atom_to_token_idx": group,
            "ref_pos": draw(1, atoms, 3),
            "ref_charge": draw(2, atoms),
            "ref_mask": torch.ones(atoms),
            "ref_element": draw(3, atoms, 128),
            "ref_atom_name_chars": draw(4, atoms, 4, 64),
            "relp": draw(5, residues, residues, 139),
        }
        rearrange = module(f"{client}.model.modules.primitives").rearrange_qk_to_dense_trunk
        both = [features["ref_pos"], group]
        q, k, features["pad_info"] = rearrange(both, list(both), [-2, -1], [-2, -1], 32, 128, True)
        features["d_lm"] = q[0][..., None, :] - k[0][..., None, :, :]
        features["v_lm"] = (q[1][..., None] == k[1][..., None, :]).unsqueeze(-1)
        pair = denoiser.diffusion_conditioning.prepare_cache(features["relp"], draw(8, residues, residues, 8), False)
        names = ("ref_pos", "ref_charge", "ref_mask", "ref_element", "ref_atom_name_chars", "atom_to_token_idx")
        atomic = (features[name] for name in (*names, "d_lm", "v_lm", "pad_info"))
        p_lm, c_l = denoiser.atom_attention_encoder.prepare_cache(*atomic, "", pair, False)
        return functools.partial(
            generator.sample_diffusion, denoise_net=denoiser, input_feature_dict=features, N_sample=samples,
            s_inputs=draw(7, residues, 20), s_trunk=draw(6, residues, 12), z_trunk=None, pair_z=pair, p_lm=p_lm, c_l=c_l,
            noise_schedule=schedule(STEPS, torch.get_default_device()), inplace_safe=True, enable_efficient_fusion=True,
        )  # fmt: skip

    return denoiser, sample


def small(config: Any) -> Any:
    """OpenFold-3's configuration with few channels, heads and blocks."""
    widths = {
        **dict.fromkeys(("c_hidden", "c_hidden_pair_bias", "c_hidden_pair_att", "c_hidden_mul", "c_atom_pair"), 4),
        **dict.fromkeys(("no_heads", "no_heads_pair_bias", "no_heads_pair", "no_blocks"), 2),
        "c_s": 12, "c_z": 8, "c_s_input": 20, "c_token": 16, "c_a": 16, "c_atom": 8,
    }  # fmt: skip
    for name, value in config.items():
        if hasattr(value, "items"):
            small(value)
        elif name in widths:
            config[name] = widths[name]
    return config


def openfold3_config() -> Any:
    """OpenFold-3's configuration of the whole model."""
    config = module("openfold3.projects.of3_all_atom.config.model_config").model_config
    return config.copy_and_resolve_references().architecture


def openfold3(device: torch.device) -> tuple[Any, Callable[..., Callable[[], Any]]]:
    """A sampler of OpenFold-3, and what makes a sampling of so many samples and residues on the default device."""
    diffusion, config = module("openfold3.core.model.structure.diffusion_module"), openfold3_config()
    denoiser = filled(device, diffusion.DiffusionModule, small(config.diffusion_module))
    sampler = diffusion.SampleDiffusion(**config.sample_diffusion, diffusion_module=denoiser).eval()

    def sample(samples: int, residues: int) -> Any:
        counts = torch.tensor([3 + i % 4 for i in range(residues)])
        group, token = torch.repeat_interleave(torch.arange(residues), counts), torch.arange(residues)
        atoms = len(group)
        features = {
            "token_mask": torch.ones(residues),
            "atom_mask": (torch.arange(atoms) < atoms - 2).float(),
            "num_atoms_per_token": counts,
            "atom_to_token_index": group,
            "ref_pos": draw(1, atoms, 3),
            "ref_charge": draw(2, atoms),
            "ref_mask": torch.ones(atoms),
            "ref_element": draw(3, atoms, 119),
            "ref_atom_name_chars": draw(4, atoms, 4, 64),
            "ref_space_uid": group.clone(),
            "cyclic_mask": torch.zeros(residues, dtype=torch.bool),
            "residue_index": token,
            "token_index": token.clone(),
            "asym_id": token // 5,
            "entity_id": token * 0,
            "sym_id": token // 5,
        }
        s, s_input, z = draw(6, 1, 1, residues, 12), draw(7, 1, 1, residues, 20), draw(8, 1, 1, residues, residues, 8)
        levels = diffusion.create_noise_schedule(STEPS, 16, 160.0, 4e-4, 7, torch.float32, torch.get_default_device())
        return functools.partial(
            sampler, batch={"query_id": ["x"], **{name: x[None, None] for name, x in features.items()}},
            si_input=s_input, si_trunk=s, zij_trunk=z, noise_schedule=levels, no_rollout_samples=samples,
        )  # fmt: skip

    return sampler, sample


RF3_FEATURES = ("ref_pos", "ref_charge", "ref_mask", "ref_element", "ref_atom_name_chars")


def rf3_denoiser(device: torch.device, **encoder: Any) -> Any:
    """A denoiser of RosettaFold-3. encoder: settings of its encoder of atoms in place of the program's."""
    structure = module("rf3.model.RF3_structure")

    def transformer(heads: int, blocks: int, parallel: bool = True) -> Any:
        settings = {"n_head": heads, "no_residual_connection_between_attention_and_transition": parallel, "kq_norm": True}
        return {"n_block": blocks, "diffusion_transformer_block": settings}

    atoms = {"n_queries": 32, "n_keys": 128, "diffusion_transformer": transformer(2, 2)}
    settings = {
        "c_tokenpair": 8, "c_atom_1d_features": 3 + 1 + 1 + 5 + 12, "use_inv_dist_squared": True,
        "atom_1d_features": RF3_FEATURES, "atom_transformer": atoms, "broadcast_trunk_feats_on_1dim_old": False,
        "use_chiral_features": True, "no_grad_on_chiral_center": False,
    } | encoder  # fmt: skip
    conditioning = {"c_s_inputs": 20, "c_t_embed": 256, "relative_position_encoding": {"r_max": 32, "s_max": 2}}
    return filled(
        device, structure.DiffusionModule, sigma_data=16, c_atom=8, c_atompair=4, c_token=16, c_s=12, c_z=8, f_pred="edm",
        diffusion_conditioning=conditioning, atom_attention_encoder=settings, diffusion_transformer=transformer(4, 2),
        atom_attention_decoder={"atom_transformer": atoms},
    )  # fmt: skip


def rf3_features(residues: int) -> dict[str, Any]:
    """What the denoiser of RosettaFold-3 reads, and some of an alignment, which it does not."""
    counts = torch.tensor([3 + i % 4 for i in range(residues)])
    group, token = torch.repeat_interleave(torch.arange(residues), counts), torch.arange(residues)
    atoms = len(group)
    return {
        "atom_to_token_map": group,
        "ref_pos": draw(1, atoms, 3),
        "ref_charge": draw(2, atoms),
        "ref_mask": torch.ones(atoms),
        "ref_element": draw(3, atoms, 5),
        "ref_atom_name_chars": draw(4, atoms, 4, 3),
        "ref_space_uid": group.clone(),
        "chiral_centers": torch.tensor([[1, 0, 2, 3], [1, 2, 3, 5], [7, 6, 8, 9]]),
        "chiral_center_dihedral_angles": torch.tensor([0.6, -0.6, 0.6]),
        "residue_index": token,
        "token_index": token.clone(),
        "asym_id": token // 5,
        "entity_id": token * 0,
        "sym_id": token // 5,
        "msa": draw(5, 3, residues, 4),
    }


def rf3(device: torch.device, **encoder: Any) -> tuple[Any, Callable[..., Callable[[], Any]]]:
    """A denoiser of RosettaFold-3, and what makes a sampling of so many samples and residues on the default device."""
    denoiser, samplers = rf3_denoiser(device, **encoder), module("rf3.diffusion_samplers.inference_sampler")
    sampler = samplers.SampleDiffusion(
        num_timesteps=STEPS + 1, min_t=0, max_t=1, sigma_data=16, s_min=4e-4, s_max=160, p=7, gamma_0=0.8, gamma_min=1.0,
        noise_scale=1.003, step_scale=1.5, solver="af3",
    )  # fmt: skip

    def sample(samples: int, residues: int) -> Any:
        f = rf3_features(residues)
        s, s_inputs, z = draw(6, residues, 12), draw(7, residues, 20), draw(8, residues, residues, 8)
        return functools.partial(
            sampler.sample_diffusion_like_af3, S_inputs_I=s_inputs, S_trunk_I=s, Z_trunk_II=z, f=f, diffusion_module=denoiser,
            diffusion_batch_size=samples, coord_atom_lvl_to_be_noised=torch.zeros(samples, len(f["atom_to_token_map"]), 3),
        )  # fmt: skip

    return denoiser, sample
