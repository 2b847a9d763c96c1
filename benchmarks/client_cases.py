"""The blocks of clients at their real width, with random weights, and the ways in which each is called.

Widths, chunks and switches are those of the clients' own configurations. Dropout is 0, so that two runs can be compared.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parents[1] / "tools"))  # `clients` is there

from clients.blocks import Problem, pairs

__all__ = ["CLIENTS", "GROUPS", "PASSES", "Client", "Way"]

PASSES = ("inference", "training")
GROUPS = ("base", "cuequivariance", "own")
"""Ways are measured in groups, each in a process of its own. `cuequivariance` has to be installed, which alone changes what a
client does; `own` tunes for minutes."""

Options = Mapping[str, Any]
Run = Callable[..., tuple[Tensor, Tensor]]
"""`run(module, s, z, mask, training, **options)` returns s and z, and leaves its arguments as they are."""


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to call a block.

    Args:
        switch: the setting of the client, in words.
        options: the arguments that make it.
        patched: whether `evoattn.patch` is on.
        group: one of `GROUPS`.
    """

    switch: str
    options: Options
    patched: bool = False
    group: str = "base"


@dataclasses.dataclass(frozen=True)
class Client:
    """A client's blocks.

    Args:
        name: what `evoattn.patch` takes.
        title: what pages call it.
        blocks: how many, one after the other.
        single: channels of the single track.
        pair: channels of the pair features.
        batched: whether there is a batch axis.
        autocast: whether bfloat16 is autocast around float32 weights, as the client runs it, or the dtype of all.
        make: builds the blocks.
        run: calls them.
        ways: how they are called.
        default: by pass, the switch of the client as it is installed, without optional packages.
        frugal: the options that take the least memory, for the reference.
    """

    name: str
    title: str
    blocks: int
    single: int
    pair: int
    batched: bool
    autocast: bool
    make: Callable[[int], nn.Module]
    run: Run
    ways: tuple[Way, ...]
    default: Mapping[str, str]
    frugal: Options

    def build(self) -> nn.Module:
        """The blocks in float64 on the CPU. Every parameter is random, not 0, and a bfloat16 number."""
        module = Problem(self.blocks, torch.float64).fill(self.make(self.blocks))
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.copy_(parameter.bfloat16())
        return module

    def shapes(self, residues: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of the single track and of the pair features."""
        batch = (1,) if self.batched else ()
        return (*batch, residues, self.single), (*batch, residues, residues, self.pair)

    def mask(self, residues: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """All residues are there. ESMFold's tokenizer gives whole numbers."""
        kind = torch.long if self.name == "esmfold" else dtype
        return torch.ones((1, residues) if self.batched else residues, dtype=kind, device=device)


def _esmfold(blocks: int) -> nn.Module:
    from transformers.models.esm.modeling_esmfold import EsmFoldTriangularSelfAttentionBlock

    from clients.esmfold import published_config

    config = published_config().esmfold_config.trunk
    return nn.ModuleList([EsmFoldTriangularSelfAttentionBlock(config) for _ in range(blocks)])


def _run_esmfold(module: Any, s: Tensor, z: Tensor, mask: Tensor, training: bool, **options: Any) -> tuple[Tensor, Tensor]:
    for block in module:
        s, z = block(s, z, mask=mask, **options)
    return s, z


def _openfold3(blocks: int) -> nn.Module:
    make: Any = importlib.import_module("openfold3.core.model.latent.pairformer").PairFormerStack
    return make(  # type: ignore[no-any-return]
        c_s=384,
        c_z=128,
        c_hidden_pair_bias=24,
        no_heads_pair_bias=16,
        c_hidden_mul=128,
        c_hidden_pair_att=32,
        no_heads_pair=4,
        no_blocks=blocks,
        transition_type="swiglu",
        transition_n=4,
        pair_dropout=0.0,
        fuse_projection_weights=False,
        blocks_per_ckpt=None,
        inf=1e9,
    )


def _run_openfold3(module: Any, s: Tensor, z: Tensor, mask: Tensor, training: bool, **options: Any) -> tuple[Tensor, Tensor]:
    """For inference in place, as the client does it, on a copy."""
    if not training:
        s, z = s.clone(), z.clone()
    s, z = module(s, z, mask, pairs(mask), inplace_safe=not training, **options)
    return s, z


def _boltz(blocks: int) -> nn.Module:
    make: Any = importlib.import_module("boltz.model.layers.pairformer").PairformerModule
    return make(384, 128, num_blocks=blocks, num_heads=16, dropout=0.0, v2=True)  # type: ignore[no-any-return]


def _run_boltz(module: Any, s: Tensor, z: Tensor, mask: Tensor, training: bool, **options: Any) -> tuple[Tensor, Tensor]:
    """For inference the module takes chunks of 128 rows, from 385 residues on."""
    s, z = module(s, z, mask, pairs(mask), **options)
    return s, z


def _boltzgen(blocks: int) -> nn.Module:
    make: Any = importlib.import_module("boltzgen.model.layers.pairformer").PairformerModule
    return make(384, 128, num_blocks=blocks, num_heads=16, dropout=0.0)  # type: ignore[no-any-return]


def _openfold(blocks: int) -> nn.Module:
    make: Any = importlib.import_module("openfold.model.evoformer").PairStack
    return nn.ModuleList([make(128, 128, 32, 4, 4, 0.0, False, 1e9, 1e-8) for _ in range(blocks)])


def _run_openfold(module: Any, s: Tensor, z: Tensor, mask: Tensor, training: bool, **options: Any) -> tuple[Tensor, Tensor]:
    """The pairs alone. For inference in place, as the client does it, on a copy."""
    if not training:
        z = z.clone()
    for block in module:
        z = block(z, pairs(mask), inplace_safe=not training, _mask_trans=False, **options)
    return s, z


def _protenix(blocks: int) -> nn.Module:
    os.environ.setdefault("LAYERNORM_TYPE", "torch")  # it compiles an extension otherwise
    make: Any = importlib.import_module("protenix.model.modules.pairformer").PairformerStack
    return make(n_blocks=blocks, n_heads=16, c_z=128, c_s=384, dropout=0.0)  # type: ignore[no-any-return]


def _opendde(blocks: int) -> nn.Module:
    make: Any = importlib.import_module("opendde.model.modules.pairformer").PairformerStack
    return make(n_blocks=blocks, n_heads=16, c_z=128, c_s=384)  # type: ignore[no-any-return]


def _run_protenix(module: Any, s: Tensor, z: Tensor, mask: Tensor, training: bool, **options: Any) -> tuple[Tensor, Tensor]:
    """For inference in place, as the client does it, on a copy."""
    if not training:
        s, z = s.clone(), z.clone()
    s, z = module(s, z, pairs(mask), inplace_safe=not training, **options)
    return s, z


def _both(switch: str, options: Options, group: str = "base") -> tuple[Way, Way]:
    return Way(switch, options, False, group), Way(switch, options, True, group)


_CUE = "cuequivariance"
_TORCH = {"inference": "torch", "training": "torch"}
_CHUNKS = "chunks of 128"

_ALL = (
    Client(
        "esmfold",
        "ESMFold",
        blocks=4,
        single=1024,
        pair=128,
        batched=True,
        autocast=False,
        make=_esmfold,
        run=_run_esmfold,
        ways=(*_both(_CHUNKS, {"chunk_size": 128}), *_both("no chunks", {"chunk_size": None})),
        default={"inference": _CHUNKS, "training": _CHUNKS},
        frugal={"chunk_size": 32},
    ),
    Client(
        "openfold3",
        "OpenFold-3",
        blocks=1,
        single=384,
        pair=128,
        batched=True,
        autocast=True,
        make=_openfold3,
        run=_run_openfold3,
        ways=(
            *_both("torch", {}),
            *_both("Triton kernels", {"use_triton_triangle_kernels": True}),
            *_both("cuEquivariance", {"use_cueq_triangle_kernels": True}, _CUE),
        ),
        default={"inference": "Triton kernels", "training": "torch"},
        frugal={"chunk_size": 32},
    ),
    Client(
        "boltz",
        "Boltz-2",
        blocks=1,
        single=384,
        pair=128,
        batched=True,
        autocast=True,
        make=_boltz,
        run=_run_boltz,
        ways=(*_both("torch", {}), *_both("cuEquivariance", {"use_kernels": True}, _CUE)),
        default=_TORCH,
        frugal={},
    ),
    Client(
        "protenix",
        "Protenix",
        blocks=1,
        single=384,
        pair=128,
        batched=False,
        autocast=True,
        make=_protenix,
        run=_run_protenix,
        ways=(
            *_both("torch", {}),
            Way("own Triton kernels", {"triangle_attention": "triattention"}, group="own"),
            *_both("cuEquivariance", {"triangle_attention": _CUE, "triangle_multiplicative": _CUE}, _CUE),
        ),
        default=_TORCH,
        frugal={"chunk_size": 32},
    ),
)


def _like(which: str, **differs: Any) -> Client:
    """A client whose block is that of another one."""
    (found,) = (client for client in _ALL if client.name == which)
    return dataclasses.replace(found, **differs)


_MORE = (
    _like("boltz", name="boltzgen", title="BoltzGen", make=_boltzgen),
    _like(
        "protenix",
        name="opendde",
        title="OpenDDE",
        make=_opendde,
        ways=(
            *_both("torch", {}),
            *_both("cuEquivariance", {"triangle_attention": _CUE, "triangle_multiplicative": _CUE}, _CUE),
        ),
    ),
    _like(
        "openfold3",
        name="openfold",
        title="OpenFold",
        make=_openfold,
        run=_run_openfold,
        ways=_both("torch", {}),
        default=_TORCH,
    ),
)

CLIENTS: dict[str, Client] = {client.name: client for client in (*_ALL, *_MORE)}
