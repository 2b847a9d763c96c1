"""Digests of the clients' functions in the releases that are known, as `releases.digest` makes them.

`python tools/client_sources.py NAME` prints the lines of the release that is installed.
"""

from __future__ import annotations

__all__ = ["SOURCES"]

SOURCES: dict[str, dict[str, dict[str, str]]] = {
    "alphafold3_pytorch": {
        "0.8.3": {
            "alphafold3_pytorch.attention:Attend.forward": "7f860798ffe46178",
            "alphafold3_pytorch.attention:Attend.local_attn": "497283d008f36e85",
            "alphafold3_pytorch.alphafold3:TriangleAttention.forward": "17b6b705512f1026",
            "alphafold3_pytorch.attention:Attention.forward": "5f9e7ccbaccb8ffb",
            "alphafold3_pytorch.attention:full_attn_bias_to_windowed": "8f79188f7dd5ec43",
            "alphafold3_pytorch.attention:full_pairwise_repr_to_windowed": "bba00236cbf9dad1",
        }
    },
    "boltz": {
        "2.2.1": {
            "boltz.model.layers.triangular_attention.primitives:_attention": "595e99d0da09ccd6",
            "boltz.model.layers.triangular_attention.primitives:kernel_triangular_attn": "a13942efdb4cd87e",
            "boltz.model.layers.attentionv2:AttentionPairBias.forward": "74d96d3d59227018",
            "boltz.model.layers.attention:AttentionPairBias.forward": "0cf46e443849a5af",
            "boltz.model.layers.triangular_mult:kernel_triangular_mult": "8ed271b2b4f6810f",
            "boltz.model.layers.triangular_attention.primitives:Attention.forward": "a1722baccda13296",
            "boltz.model.layers.triangular_attention.attention:TriangleAttention.forward": "c01d47c693b13f25",
            "boltz.model.layers.triangular_mult:TriangleMultiplicationOutgoing.forward": "5e04fbd6edbb00a9",
            "boltz.model.layers.triangular_mult:TriangleMultiplicationIncoming.forward": "cc5083182c328f64",
            "boltz.model.layers.transition:Transition.forward": "7fd4067e2e6ab0fd",
            "boltz.model.layers.pairformer:PairformerLayer.forward": "260280b33054d66f",
            "boltz.model.layers.pairformer:PairformerNoSeqLayer.forward": "7d60d930a82b5ae8",
            "boltz.model.loss.diffusion:weighted_rigid_align": "b88592617062c4bf",
            "boltz.model.loss.diffusionv2:weighted_rigid_align": "e32be9fa16cb4415",
            "boltz.model.modules.diffusion:AtomDiffusion.sample_schedule": "8cd4663d986af2a6",
            "boltz.model.modules.diffusionv2:AtomDiffusion.sample_schedule": "8cd4663d986af2a6",
            "boltz.model.modules.diffusion:DiffusionModule.forward": "6ce1fd42ef65015a",
            "boltz.model.modules.diffusionv2:DiffusionModule.forward": "1e04f1bc53aefcdd",
            "boltz.model.modules.diffusion:AtomDiffusion.sample": "f14dd48977bba2e1",
            "boltz.model.modules.diffusionv2:AtomDiffusion.sample": "b01913b1c31e69d9",
        }
    },
    "boltzgen": {
        "0.3.2": {
            "boltzgen.model.layers.triangular_attention.primitives:_attention": "595e99d0da09ccd6",
            "boltzgen.model.layers.triangular_attention.primitives:kernel_triangular_attn": "a13942efdb4cd87e",
            "boltzgen.model.layers.attention:AttentionPairBias.forward": "5b735a189d4d3d79",
            "boltzgen.model.layers.triangular:_kernel_triangular_mult": "4038b2a9e63b76ff",
            "boltzgen.model.layers.triangular_attention.primitives:Attention.forward": "667a0805e8d38044",
            "boltzgen.model.layers.triangular_attention.attention:TriangleAttention.forward": "c01d47c693b13f25",
            "boltzgen.model.layers.triangular:TriangleMultiplicationOutgoing.forward": "d218b0e460e19a24",
            "boltzgen.model.layers.triangular:TriangleMultiplicationIncoming.forward": "61052edc0a22aa90",
            "boltzgen.model.layers.transition:Transition.forward": "8339ff25d13a2022",
            "boltzgen.model.layers.pairformer:PairformerLayer.forward": "fcb378d0dfcdd113",
            "boltzgen.model.layers.pairformer:PairformerNoSeqLayer.forward": "353b19c2d737da2a",
            "boltzgen.model.modules.diffusion:DiffusionModule.forward": "02328783beec8241",
            "boltzgen.model.modules.diffusion:AtomDiffusion.sample": "33e530b0400efc1b",
        }
    },
    "esmfold": {
        "5.24.0": {
            "transformers.models.esm.modeling_esmfold:EsmFoldAttention.forward": "18347ce3dfbbd77f",
            "transformers.models.esm.modeling_esmfold:EsmFoldSelfAttention.forward": "e34878faf3a7ae51",
            "transformers.models.esm.modeling_esmfold:EsmFoldAttention._prep_qkv": "744219ed857c30f5",
            "transformers.models.esm.modeling_esmfold:EsmFoldAttention._wrap_up": "0d6a10dbc3b64229",
            "transformers.models.esm.modeling_esmfold:EsmFoldTriangleAttention.forward": "a1259a59359dc2d3",
            "transformers.models.esm.modeling_esmfold:EsmFoldTriangularSelfAttentionBlock.forward": "c2dcca846b7db1dc",
            "transformers.models.esm.modeling_esmfold:EsmFoldTriangleMultiplicativeUpdate.forward": "7cea02775b56f1d2",
            "transformers.models.esm.modeling_esmfold:EsmFoldResidueMLP.forward": "e72611df9846f61b",
        }
    },
    "opendde": {
        "1.2.0": {
            "opendde.model.triangular.layers:_attention": "595e99d0da09ccd6",
            "opendde.model.triangular.layers:cuequivariance_triangular_attn": "44bf9a094acff462",
            "opendde.model.modules.primitives:_attention": "8cdd042ca581b2de",
            "opendde.model.triangular.triangular:kernel_triangular_mult": "865be2809079c276",
            "opendde.model.triangular.layers:Attention.forward": "74db8b5ffdbc0585",
            "opendde.model.modules.primitives:_local_attention": "5cf317f9df2ed736",
            "opendde.model.modules.primitives:Attention.forward": "36a33032a1b586c4",
            "opendde.model.triangular.triangular:TriangleAttention.forward": "658bf808e4150b90",
            "opendde.model.triangular.triangular:TriangleMultiplicativeUpdate.forward": "ae5ef898ba582d67",
            "opendde.model.modules.transformer:AttentionPairBias.forward": "075a795538012dfc",
            "opendde.model.modules.primitives:Transition.forward": "7ae26dce582f1583",
            "opendde.model.modules.pairformer:PairformerBlock.forward_source": "ed5dea52ce0d876d",
            "opendde.model.utils:aggregate_atom_to_token": "03d83d7590eb1895",
            "opendde.model.modules.diffusion:DiffusionModule.forward": "7ebd43f2c40b02aa",
            "opendde.model.opendde:OpenDDE.sample_diffusion": "7add92a471a5d921",
        }
    },
    "openfold": {
        "2.2.0": {
            "openfold.model.primitives:_attention": "dd2783949eee38b1",
            "openfold.model.primitives:_lma": "14adb3a8446a9998",
            "openfold.model.primitives:_deepspeed_evo_attn": "5569481d4d717866",
            "openfold.model.primitives:_flash_attn": "9bf248c41c9a6130",
            "openfold.model.primitives:Attention.forward": "139d99b15d8cbc93",
            "openfold.model.primitives:GlobalAttention.forward": "9c31fbbca5ee54f5",
            "openfold.model.primitives:Attention._prep_qkv": "0a7a6bc1a1ac7d63",
            "openfold.model.primitives:Attention._wrap_up": "ccba98296441cf40",
            "openfold.model.primitives:_attention_chunked_trainable": "0add24d5765624fc",
            "openfold.utils.kernel.attention_core:AttentionCoreFunction.forward": "05941d8097ab06a6",
            "openfold.model.triangular_attention:TriangleAttention.forward": "72684400437b3deb",
            "openfold.model.triangular_multiplicative_update:TriangleMultiplicativeUpdate.forward": "f7eb25dd0430ee5d",
            "openfold.model.triangular_multiplicative_update:FusedTriangleMultiplicativeUpdate.forward": "229e3c77419e6dde",
            "openfold.model.msa:MSAAttention.forward": "d8099058152a834d",
            "openfold.model.msa:MSAColumnAttention.forward": "10cfbc0e0f35285e",
            "openfold.model.msa:MSAColumnGlobalAttention.forward": "1cc6cd21d88c71c7",
            "openfold.model.template:TemplatePointwiseAttention.forward": "7da64a8d9ffa17d7",
            "openfold.model.pair_transition:PairTransition.forward": "c63f5a9e72a2dfd1",
            "openfold.model.evoformer:MSATransition.forward": "12bbbe6c373ca8b5",
            "openfold.model.evoformer:PairStack.forward": "0201292caf2e531c",
            "openfold.model.evoformer:EvoformerBlock.forward": "1008a6a65fed606f",
            "openfold.model.evoformer:ExtraMSABlock.forward": "7e1c1a179aea124b",
        }
    },
    "openfold3": {
        "0.5.0": {
            "openfold3.core.model.primitives.attention:_attention": "3b9b2c2331db3405",
            "openfold3.core.model.primitives.attention:_lma": "d6efd48ca5ff0251",
            "openfold3.core.model.primitives.attention:_triton_evo_attn": "35e9ab18b94d84a7",
            "openfold3.core.model.primitives.attention:_cueq_triangle_attn": "58777d523200e667",
            "openfold3.core.model.primitives.attention:_deepspeed_evo_attn": "7b436774203a341e",
            "openfold3.core.model.primitives.attention:Attention.forward": "fccd73b9d91e855d",
            "openfold3.core.model.primitives.attention:GlobalAttention.forward": "2052f241f4614499",
            "openfold3.core.model.primitives.attention:attention_chunked_trainable": "26ccfc1d4688fcc6",
            "openfold3.core.model.layers.triangular_attention:TriangleAttention.forward": "60ec2cb27052b377",
            "openfold3.core.model.layers.triangular_multiplicative_update:TriangleMultiplicativeUpdate.forward": "097644d1e5e2b66e",  # noqa: E501
            "openfold3.core.model.layers.triangular_multiplicative_update:FusedTriangleMultiplicativeUpdate.forward": "1e76fc454d0550c7",  # noqa: E501
            "openfold3.core.model.layers.msa:MSAAttention.forward": "bca591f5700e8960",
            "openfold3.core.model.layers.msa:MSAColumnAttention.forward": "db2a88546812ebb9",
            "openfold3.core.model.layers.msa:MSAColumnGlobalAttention.forward": "25929cc4e39605e6",
            "openfold3.core.model.layers.attention_pair_bias:AttentionPairBias.forward": "418f02fcdc849d5b",
            "openfold3.core.model.layers.attention_pair_bias:DiffusionAttentionPairBias.forward": "60f3e2f9e4b90f1e",
            "openfold3.core.model.layers.transition:Transition.forward": "53f42d291249e756",
            "openfold3.core.model.latent.base_blocks:PairBlock.forward": "6441bc7b6b7f9f7c",
            "openfold3.core.utils.atomize_utils:aggregate_atom_feat_to_tokens": "ad694511b5a16785",
            "openfold3.core.utils.atomize_utils:broadcast_token_feat_to_atoms": "2f8ddd801916e097",
            "openfold3.core.model.layers.sequence_local_atom_attention:NoisyPositionEmbedder.forward": "351e951924e5ad43",
            "openfold3.core.model.layers.sequence_local_atom_attention:AtomAttentionDecoder.forward": "72089e6c1cca3641",
            "openfold3.core.model.structure.diffusion_module:DiffusionModule.forward": "b87924c12c871942",
            "openfold3.core.model.structure.diffusion_module:SampleDiffusion.forward": "9fe111e1db2f2008",
            "openfold3.core.model.latent.pairformer:PairFormerBlock.forward": "790b6e624d3a8eca",
        }
    },
    "protenix": {
        "2.0.0": {
            "protenix.model.triangular.layers:_attention": "595e99d0da09ccd6",
            "protenix.model.triangular.layers:cuequivariance_triangular_attn": "435bdcb0baec4fb2",
            "protenix.model.triangular.layers:_tri_attention": "f2459ad7153cb924",
            "protenix.model.triangular.layers:_deepspeed_evo_attn": "bd58c9cc8f1b43b4",
            "protenix.model.modules.primitives:_attention": "ac6ef0d0faa32b4e",
            "protenix.model.triangular.triangular:kernel_triangular_mult": "865be2809079c276",
            "protenix.model.triangular.layers:Attention.forward": "20294019c87357a5",
            "protenix.model.modules.primitives:_local_attention": "5cf317f9df2ed736",
            "protenix.model.modules.primitives:Attention.forward": "01fbcba49158c829",
            "protenix.model.triangular.triangular:TriangleAttention.forward": "658bf808e4150b90",
            "protenix.model.triangular.triangular:TriangleMultiplicativeUpdate.forward": "702cd7b595e12563",
            "protenix.model.modules.transformer:AttentionPairBias.forward": "7e6ebd82e2a2d334",
            "protenix.model.modules.primitives:Transition.forward": "e1af6829a8cf99b2",
            "protenix.model.modules.pairformer:PairformerBlock.forward": "8d2a43923504cb22",
            "protenix.model.utils:aggregate_atom_to_token": "03d83d7590eb1895",
            "protenix.model.modules.diffusion:DiffusionModule.forward": "0a16bba38e009a1a",
            "protenix.model.protenix:Protenix.sample_diffusion": "e12315d23a1f675c",
        }
    },
    "rf3": {
        "0.2.0": {
            "rf3.model.layers.attention:TriangleAttention._forward_vanilla": "5881cc1bf689d83c",
            "rf3.model.layers.attention:TriangleAttention._forward_cuequivariance": "ba03d861a3401781",
            "rf3.model.layers.pairformer_layers:AttentionPairBiasPairformerDeepspeed.forward": "e8c1808df67a6be4",
            "rf3.model.layers.af3_diffusion_transformer:AttentionPairBiasDiffusion.forward": "4d3acf37568bae61",
            "rf3.model.layers.af3_diffusion_transformer:AttentionPairBiasDiffusion.atom_attention": "cfdabdc81ff3a8dd",
            "rf3.model.layers.attention:TriangleAttention": "943d7df812f7d68a",
            "rf3.model.layers.af3_diffusion_transformer:AttentionPairBiasDiffusion": "efdb2c8d04b887b8",
            "foundry.training.checkpoint:activation_checkpointing": "fe7994286a24fb0d",
            "rf3.model.layers.attention:TriangleAttention.forward": "4d3acf37568bae61",
            "rf3.model.layers.attention:TriangleMultiplication.forward": "5fa763662cf9461d",
            "rf3.model.layers.layer_utils:Transition.forward": "4d3acf37568bae61",
            "rf3.model.layers.layer_utils:Transition": "446dda0801f25b63",
            "rf3.model.layers.af3_diffusion_transformer:DiffusionTransformer.forward": "c428e5ec31b8c837",
            "rf3.diffusion_samplers.inference_sampler:SampleDiffusion.sample_diffusion_like_af3": "6a97a6cb188bd225",
        }
    },
}
"""By client, release and site."""
