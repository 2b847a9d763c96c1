"""Whole models of full depth with random weights: what `predictions.py` and `training_steps.py` run.

Their inputs are features that a client's own pipeline made (see `prediction_features.py`); ESMFold reads a sequence. So
nothing here needs a network, trained weights or a chemistry toolkit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.abc
import importlib.machinery
import importlib.util
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from unittest.mock import MagicMock, patch

import numpy
import torch
from prediction_features import FEATURES, cropped, moved, unpacked
from prediction_runtimes import BIONEMO, Runtime
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parents[1] / "tools"))  # `clients` is there

from clients.weights import fill

__all__ = [
    *("PROGRAMS", "RECYCLES", "Denoiser", "Program", "boltz2", "boltz2_arguments", "merged", "openfold3", "protenix"),
    *("published", "tf32"),
]

RECYCLES = 3
"""The number of times that every published model runs its trunk again."""

UBIQUITIN = "MQIFVKTLTGKTITLEVEPSDTIENVKAKIQDKEGIPPDQQRLIFAGKQLEDGRTLSDYNIQKESTLHLVLRLRGG"
LETTERS = "ARNDCQEGHILKMFPSTWYV"
PREPARING = (
    *("rdkit", "omegaconf", "mashumaro", "chembl_structure_pipeline", "gemmi", "hydra", "modelcif", "ihm", "numba"),
    *("biotite", "Bio", "ml_collections", "pandas", "pdbeccdutils", "esm", "sklearn", "icecream", "tqdm"),
)
"""Packages that only prepare inputs or write structures. Where they are missing, an empty stand-in is imported."""


@dataclasses.dataclass(frozen=True)
class Program:
    """A program that predicts structures.

    Args:
        title: what tables call it.
        client: what `evoattn.patch` takes.
        distribution: the package whose version is recorded.
        lengths: residues that it is measured with.
        autocast: whether it runs under autocast to bfloat16.
        build: the model on a device.
        inputs: of so many residues, on a device.
        predict: runs the model: `predict(model, inputs, steps, recycles, samples)` returns what is compared. Without a denoiser
            steps and samples mean nothing.
        stages: by name, the part of the model and its method that are timed.
        tf32: whether its float32 products are TF32.
        kernels: switches the model's use of cuEquivariance on or off, if it has one.
        runtime: another program that runs the same model, if there is one.
        denoiser: the call that one step of the denoiser is, if that can be compared with float64.
    """

    title: str
    client: str
    distribution: str
    lengths: tuple[int, ...]
    autocast: bool
    build: Callable[[torch.device], nn.Module]
    inputs: Callable[[int, torch.device], Any]
    predict: Callable[[nn.Module, Any, int, int, int], Mapping[str, Tensor]]
    stages: Mapping[str, tuple[str, str]]
    kernels: Callable[[nn.Module, bool], None] | None = None
    tf32: bool = False
    runtime: Runtime | None = None
    denoiser: Denoiser | None = None


class Denoiser(NamedTuple):
    """The part of a model whose `method` returns the coordinates after a step, in Å; and the feature that marks real atoms."""

    part: str
    method: str
    atoms: str


class _StandIn(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports an empty module for a package of `PREPARING` that is not installed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.split(".")[0] in PREPARING else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        module = MagicMock(name=spec.name)
        module.__path__, module.__spec__, module.__name__, module.__version__ = [], spec, spec.name, "0.0"
        return module

    def exec_module(self, module: Any) -> None:
        pass


class _Settings(dict[str, Any]):
    """Settings that are read as attributes, as omegaconf's are."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(name)

    def to_dict(self) -> _Settings:
        """The settings, as ml_collections' have it."""
        return self


def _nested(value: Any) -> Any:
    """Settings in settings, all read as attributes."""
    return _Settings({name: _nested(x) for name, x in value.items()}) if isinstance(value, dict) else value


def _settings(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if "__attr__" in value:
        return _Settings(value["__attr__"])
    return {name: _settings(x) for name, x in value.items()}


def published(program: str, file: str = "arguments") -> dict[str, Any]:
    """The arguments of a published model, or what training changes of them, in a file beside its features."""
    arguments: dict[str, Any] = json.loads((FEATURES / program / f"{file}.json").read_text(encoding="utf-8"))
    return arguments


def merged(arguments: Any, changes: Mapping[str, Any]) -> Any:
    """Settings of the same type with changes, which may be nested."""

    def value(name: str, x: Any) -> Any:
        return merged(arguments[name], x) if isinstance(x, Mapping) and name in arguments else x

    return type(arguments)(arguments | {name: value(name, x) for name, x in changes.items()})


def _filled(model: nn.Module) -> nn.Module:
    """The model with random weights, drawn on its device."""
    torch.manual_seed(0)
    return fill(model, lambda x: torch.randn_like(x, dtype=torch.float32))


@contextlib.contextmanager
def tf32(on: bool) -> Iterator[None]:
    """Compute float32 products on a GPU in TF32, or not. A model may change it for the process; afterwards it is as before."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = on
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _without_preparing() -> None:
    """Let programs be imported without the packages that prepare their inputs."""
    if not any(isinstance(x, _StandIn) for x in sys.meta_path):
        sys.meta_path.append(_StandIn())  # the last one: it is asked only for what nobody else finds


def boltz2(device: torch.device, changes: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """Boltz-2 of the published depth, but for changes of its arguments, or inside of those that are mappings."""
    _without_preparing()
    from boltz.model.models.boltz2 import Boltz2

    arguments = merged(boltz2_arguments(), changes)
    with device, patch("boltz.model.layers.initialize.trunc_normal_init_"):  # it takes a minute, for weights that are filled
        model = Boltz2(**arguments)
    return _filled(model).eval()


def boltz2_arguments() -> dict[str, Any]:
    """The arguments of the published model."""
    return {name: _settings(x) for name, x in published("boltz2").items()}


def _boltz2_inputs(residues: int, device: torch.device) -> dict[str, Tensor]:
    """A committed file, or a crop of the next longer one."""
    lengths = sorted(int(path.name.partition(".")[0]) for path in (FEATURES / "boltz2").glob("*.pt.xz"))
    source = next((x for x in lengths if x >= residues), residues)
    features = unpacked("boltz2", source, torch.device("cpu"))
    return moved(features if source == residues else cropped(features, residues), device)


def _boltz2_predict(model: nn.Module, inputs: Any, steps: int, recycles: int, samples: int) -> dict[str, Tensor]:
    # A copy: the model writes into the mapping.
    outputs = model(
        dict(inputs),
        recycling_steps=recycles,
        num_sampling_steps=steps,
        diffusion_samples=samples,
        max_parallel_samples=None,
        run_confidence_sequentially=True,
    )
    return {"distogram": outputs["pdistogram"], "coordinates": outputs["sample_atom_coords"]}


def _boltz2_kernels(model: nn.Module, on: bool) -> None:
    setattr(model, "use_kernels", on)  # noqa: B010


def _esmfold(device: torch.device) -> nn.Module:
    from transformers.models.esm.modeling_esmfold import EsmForProteinFolding

    from clients.esmfold import published_config

    with device:
        model = EsmForProteinFolding(published_config())
    with torch.no_grad():
        for x in model.parameters():
            if not x.any():  # it begins with 0, so that nothing would reach the output
                x.normal_(0, 0.02)
    model.esm = model.esm.half()
    outputs: nn.Module = model.eval()
    return outputs


def _esmfold_inputs(residues: int, device: torch.device) -> Tensor:
    sequence = (UBIQUITIN * math.ceil(residues / len(UBIQUITIN)))[:residues]
    return torch.tensor([[LETTERS.index(x) for x in sequence]], device=device)


def _esmfold_predict(model: nn.Module, inputs: Any, steps: int, recycles: int, samples: int) -> dict[str, Tensor]:
    outputs = model(inputs, num_recycles=recycles)
    return {"distogram": outputs["distogram_logits"], "coordinates": outputs["positions"][-1]}


def openfold3(device: torch.device, arguments: Mapping[str, Any] | None = None) -> Any:
    """OpenFold-3 as published, or of other arguments."""
    _without_preparing()
    from openfold3.projects.of3_all_atom.model import OpenFold3

    with patch("openfold3.core.model.primitives.initialization.trunc_normal_init_"):  # slow, for weights that are filled
        # On the CPU: some of its constants come from a generator of the CPU.
        model = OpenFold3(_nested(arguments or published("openfold3")))
    model = _filled(model.to(device)).eval()
    _openfold3_kernels(model, False)
    return model


def _openfold3_inputs(residues: int, device: torch.device) -> dict[str, Tensor]:
    return unpacked("openfold3", residues, device)


def _openfold3_predict(model: Any, inputs: Any, steps: int, recycles: int, samples: int) -> dict[str, Tensor]:
    """As `run_openfold predict` runs it."""
    model.shared.update(num_recycles=recycles)
    model.shared.diffusion.update(no_full_rollout_steps=steps, no_full_rollout_samples=samples)
    _, outputs = model(dict(inputs))  # a copy: the model takes features out of the mapping
    return {"distogram": outputs["distogram_logits"], "coordinates": outputs["atom_positions_predicted"]}


def _openfold3_kernels(model: Any, on: bool) -> None:
    own = not on and model.version_tensor.is_cuda  # its own Triton kernels, which are what it takes as installed
    model.settings.memory.eval.update(use_cueq_triangle_kernels=on, use_triton_triangle_kernels=own)
    model.settings.memory.train.update(use_cueq_triangle_kernels=on)


def protenix(device: torch.device, arguments: Mapping[str, Any] | None = None) -> Any:
    """Protenix as published, or of other arguments."""
    os.environ.setdefault("LAYERNORM_TYPE", "torch")  # its own is compiled at import
    _without_preparing()
    from protenix.model.protenix import Protenix

    with tf32(True), patch("protenix.model.modules.primitives.trunc_normal_init_"):  # slow, for weights that are filled
        model = Protenix(_nested(arguments or published("protenix")))  # some of its weights come from a generator of the CPU
    return _filled(model.to(device)).eval()


def _protenix_inputs(residues: int, device: torch.device) -> dict[str, Any]:
    return unpacked("protenix", residues, device)


def _protenix_predict(model: Any, inputs: Any, steps: int, recycles: int, samples: int) -> dict[str, Tensor]:
    """As `protenix pred` runs it, without dropout."""
    model.configs.sample_diffusion.update(N_step=steps, N_sample=samples)
    model.N_cycle = recycles + 1
    numpy.random.seed(1)  # Protenix draws rotations with it
    logits: list[Tensor] = []
    hook = model.distogram_head.register_forward_hook(lambda *called: logits.append(called[-1]))
    try:
        # A copy: the model writes into the mapping.
        outputs, *_ = model(dict(inputs), label_full_dict=None, label_dict=None, mode="inference", mc_dropout_apply_rate=0.0)
    finally:
        hook.remove()
    return {"distogram": logits[-1], "coordinates": outputs["coordinate"]}


def _protenix_kernels(model: Any, on: bool) -> None:
    chosen = "cuequivariance" if on else "torch"
    model.configs.update(triangle_attention=chosen, triangle_multiplicative=chosen)


PROGRAMS = {
    "boltz2": Program(
        "Boltz-2",
        "boltz",
        "boltz",
        (152, 304, 684, 988),
        True,
        boltz2,
        _boltz2_inputs,
        _boltz2_predict,
        {
            "MSA": ("msa_module", "forward"),
            "trunk": ("pairformer_module", "forward"),
            "denoiser": ("structure_module", "sample"),
            "confidence": ("confidence_module", "forward"),
        },
        _boltz2_kernels,
        runtime=BIONEMO,
        denoiser=Denoiser("structure_module", "preconditioned_network_forward", "atom_pad_mask"),
    ),
    "esmfold": Program(
        "ESMFold",
        "esmfold",
        "transformers",
        (380, 684),
        False,
        _esmfold,
        _esmfold_inputs,
        _esmfold_predict,
        {"language model": ("esm", "forward"), "trunk": ("trunk", "forward")},
    ),
    "openfold3": Program(
        "OpenFold-3",
        "openfold3",
        "openfold3",
        (152, 304, 684, 988),
        False,
        openfold3,
        _openfold3_inputs,
        _openfold3_predict,
        {
            "MSA": ("msa_module", "forward"),
            "trunk": ("pairformer_stack", "forward"),
            "denoiser": ("sample_diffusion", "forward"),
            "confidence": ("aux_heads", "forward"),
        },
        _openfold3_kernels,
        True,
    ),
    "protenix": Program(
        "Protenix",
        "protenix",
        "protenix",
        (152, 304, 684, 988),
        True,
        protenix,
        _protenix_inputs,
        _protenix_predict,
        {
            "MSA": ("msa_module", "forward"),
            "trunk": ("pairformer_stack", "forward"),
            "denoiser": ("", "sample_diffusion"),
            "confidence": ("", "run_confidence_head"),
        },
        _protenix_kernels,
        True,
    ),
}
