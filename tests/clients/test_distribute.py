"""Clients' pair blocks over three processes, in stand-ins: each process finds what one finds with the client's own code."""

from __future__ import annotations

import collections
import copy
import functools
import io
import pathlib
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from evoattn.clients.known import KnownLayer
from evoattn.clients.registry import known, split_blocks
from evoattn.nn import AttentionPairBias, distribute, replace
from tests.clients.standins import CHANNELS
from tests.clients.standins.multiplications import In, Out
from tests.clients.standins.pair_blocks import Attention, Multiplied, Pairs, Wide, get_dropout_mask
from tests.helpers import distributed

if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("torch was built without gloo, which these processes talk through", allow_module_level=True)

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_module

PROCESSES, LENGTH, SINGLE = 3, 7, 6
"""The processes have 3, 3 and 1 rows."""


class Track(AttentionPairBias):
    """Stands for the attention of the single track."""

    def __init__(self) -> None:
        super().__init__(SINGLE, CHANNELS, 4, 2)


class Layer(nn.Module):
    """Stands for Boltz' layer of the trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = 0.4
        self.tri_mul_out, self.tri_mul_in = Out(), In()
        self.tri_att_start, self.tri_att_end = Attention(), Attention(starting=False)
        self.transition_z, self.transition_s = Wide(), nn.Linear(SINGLE, SINGLE)
        self.pre_norm_s, self.s_post_norm, self.attention = nn.LayerNorm(SINGLE), nn.Identity(), Track()

    def forward(
        self, s: Tensor, z: Tensor, mask: Tensor, pair_mask: Tensor, chunk_size_tri_attn: Any = None
    ) -> tuple[Tensor, Tensor]:
        for update in (self.tri_mul_out, self.tri_mul_in, self.tri_att_start, self.tri_att_end):
            dropout = get_dropout_mask(self.dropout, z, self.training, columnwise=update is self.tri_att_end)
            z = z + dropout * update(z, mask=pair_mask)
        z = z + self.transition_z(z)
        s = s + self.attention(self.pre_norm_s(s), z, mask=mask)
        return self.s_post_norm(s + self.transition_s(s)), z


class Block(nn.Module):
    """Stands for OpenFold-3's block of the trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.pair_stack, self.attn_pair_bias, self.single_transition = Pairs(), Track(), Single()

    def forward(self, s: Tensor, z: Tensor, single_mask: Tensor, pair_mask: Tensor, _mask_trans: bool = True) -> Any:
        z = self.pair_stack(z, pair_mask, _mask_trans=_mask_trans)
        s = s + self.attn_pair_bias(s, z, mask=single_mask)
        return s + self.single_transition(s, mask=single_mask if _mask_trans else None), z


class Single(nn.Linear):
    def __init__(self) -> None:
        super().__init__(SINGLE, SINGLE)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:  # type: ignore[override]
        return super().forward(x) * (1 if mask is None else mask[..., None])


class Stack(nn.Module):
    """Stands for the trunk: two blocks after one another, and one alone. Features in, features out."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(CHANNELS, CHANNELS), nn.Linear(CHANNELS, CHANNELS)
        self.blocks, self.alone = nn.ModuleList(make() for _ in range(2)), make()
        self.checkpointed: bool | None = None

    def forward(self, s: Tensor, z: Tensor, mask: Tensor, pair_mask: Tensor) -> tuple[Tensor, Tensor]:
        z = self.first(z)
        for block in self.blocks:
            if isinstance(block, Pairs):
                z = block(z, pair_mask)
            elif self.checkpointed is not None:
                s, z = checkpoint(block, s, z, mask, pair_mask, use_reentrant=self.checkpointed)
            else:
                s, z = block(s, z, mask, pair_mask)
        z = self.last(z)
        return (s, self.alone(z, pair_mask)) if isinstance(self.alone, Pairs) else self.alone(s, z, mask, pair_mask)


def stand_in() -> None:
    """Take the stand-ins for the clients' layers and blocks."""
    openfold3, boltz = "openfold3.core.model", "boltz.model"
    names = {
        Attention: f"{openfold3}.layers.triangular_attention.TriangleAttention",
        Multiplied: f"{openfold3}.layers.triangular_multiplicative_update.TriangleMultiplicativeUpdate",
        Wide: f"{openfold3}.layers.transition.SwiGLUTransition",
        Out: f"{boltz}.layers.triangular_mult.TriangleMultiplicationOutgoing",
        In: f"{boltz}.layers.triangular_mult.TriangleMultiplicationIncoming",
    }
    for kind, name in names.items():
        known()[f"{kind.__module__}.{kind.__qualname__}"] = known()[name]

    def make(client: Any) -> nn.Module:
        layer = AttentionPairBias(SINGLE, CHANNELS, 4, 2)
        layer._modules.update(client._modules)
        return layer

    known()[f"{__name__}.Track"] = KnownLayer(make, "", lambda layer, *args, **named: layer(*args, **named))
    of_pairs = f"{openfold3}.latent.base_blocks.PairBlock"
    split = split_blocks()
    known()[f"{Pairs.__module__}.Pairs"], split[f"{Pairs.__module__}.Pairs"] = known()[of_pairs], split[of_pairs]
    split[f"{__name__}.Block"] = split[f"{openfold3}.latent.pairformer.PairFormerBlock"]
    of_layer = f"{boltz}.layers.pairformer.PairformerLayer"
    known()[f"{__name__}.Layer"], split[f"{__name__}.Layer"] = known()[of_layer], split[of_layer]
    dropout = types.ModuleType(f"{boltz}.layers.pairformer")
    dropout.get_dropout_mask = get_dropout_mask  # type: ignore[attr-defined]
    sys.modules[dropout.__name__] = dropout


def stack(make: Callable[[], nn.Module]) -> Any:
    torch.manual_seed(1)
    distributed = Stack(make).double()
    for x in distributed.parameters():
        nn.init.normal_(x, std=0.3)
    return distributed


def outcome(model: nn.Module, seed: int) -> list[Tensor]:
    """Outputs, the next random number, and all gradients."""
    torch.manual_seed(2)
    s = torch.randn(1, LENGTH, SINGLE, dtype=torch.float64).requires_grad_()
    z = torch.randn(1, LENGTH, LENGTH, CHANNELS, dtype=torch.float64).requires_grad_()
    mask = (torch.arange(LENGTH) < 6).double()[None]
    cotangents = [torch.randn_like(x) for x in (s, z)]
    for x in model.parameters():
        x.grad = None
    torch.manual_seed(seed)
    distributed = model(s, z, mask, mask[:, :, None] * mask[:, None])
    after = torch.rand(3, dtype=torch.float64)
    torch.autograd.backward(distributed, cotangents)
    actual = [x.grad for x in (s, z, *model.parameters())]
    return [*(x.detach() for x in distributed), after, *(x for x in actual if x is not None)]


def worst(actual: list[Tensor], expected: list[Tensor]) -> float:
    return max(((x - y).abs().max() / y.abs().max().clamp(min=1)).item() for x, y in zip(actual, expected, strict=True))


CASES = [("Layer", Layer), ("Block", Block), ("Pairs", Pairs)]


def a_forward(mesh: Any) -> float:
    original = stack(Block).eval()
    distributed = copy.deepcopy(original)
    distribute(distributed, mesh)
    return worst(outcome(distributed, 3), outcome(original, 3))


def all_errors(mesh: Any) -> dict[str, float]:
    errors = {}
    rank = mesh.get_local_rank()
    for name, make in CASES:
        original = stack(make)
        distributed = copy.deepcopy(original)
        assert distribute(distributed, mesh) == ["blocks.0", "blocks.1", "alone"]
        expected = outcome(original.eval(), 3)
        errors[name] = worst(outcome(distributed.eval(), 3), expected)
        twice = copy.deepcopy(original)
        replace(twice)
        distribute(twice, mesh)
        errors[f"{name}, replaced"] = worst(outcome(twice, 3), expected)
        expected = outcome(original.train(), 3)
        drawn = outcome(distributed.train(), 3 + rank)  # the first process draws for all
        errors[f"{name}, training"] = worst([*drawn[:2], *drawn[3:]], [*expected[:2], *expected[3:]])
        if make is not Pairs:
            for distributed.checkpointed in (False, True):
                errors[f"{name}, checkpoint, reentrant={distributed.checkpointed}"] = worst(outcome(distributed, 3), expected)
    return errors


def gathers(mesh: Any) -> dict[str, int]:
    """Tensors that leave the blocks of a stack and a block alone: s and z, twice."""
    distributed, counts = stack(Layer).eval(), collections.Counter[str]()
    distribute(distributed, mesh)
    for name, block in (("between", distributed.blocks[0]), ("last", distributed.blocks[1]), ("alone", distributed.alone)):
        block.register_forward_hook(lambda _, __, out, name=name: counts.update({name: sum(type(x) is Tensor for x in out)}))
    with torch.no_grad():
        outcome_of = distributed(
            torch.zeros(1, LENGTH, SINGLE).double(), torch.zeros(1, LENGTH, LENGTH, CHANNELS).double(),
            torch.ones(1, LENGTH).double(), torch.ones(1, LENGTH, LENGTH).double(),
        )  # fmt: skip
    assert all(type(x) is Tensor for x in outcome_of)
    return dict(counts)


def refused(mesh: Any) -> dict[str, str]:
    distributed = stack(Layer)
    distribute(distributed, mesh)
    calls: dict[str, Callable[[], Any]] = {
        "twice": lambda: distribute(distributed, mesh),
        "copied": lambda: copy.deepcopy(distributed),
        "saved": lambda: torch.save(distributed, io.BytesIO()),
        "unknown": lambda: distribute(nn.Linear(3, 3), mesh),
    }
    for name, change in CHANGES.items():
        changed = stack(Layer)
        change(changed.alone)
        calls[name] = functools.partial(distribute, changed, mesh)
    later = copy.deepcopy(stack(Layer))
    distribute(later, mesh)
    later.alone.tri_mul_in.register_forward_hook(lambda *_: None)
    calls["a hook that comes later"] = lambda: outcome(later, 3)
    said = {}
    for name, call in calls.items():
        try:
            call()
        except ValueError as error:
            said[name] = str(error)
    assert type(changed.blocks[0]) is Layer
    return said


class Half(Attention):
    """Overrides the forward of a layer."""

    def forward(self, *args: Any, **named: Any) -> Any:
        return 0.5 * super().forward(*args, **named)


def _own_forward(module: Any) -> None:
    original = module.forward
    module.forward = lambda *args, **named: original(*args, **named)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a layer": lambda block: setattr(block, "tri_att_start", nn.Linear(3, 3)),
    "a hook on a layer": lambda block: block.tri_mul_out.register_forward_hook(lambda *_: None),
    "a hook on the attention of s": lambda block: block.attention.register_forward_hook(lambda *_: None),
    "a forward of a layer": lambda block: _own_forward(block.tri_mul_in),
    "a subclass of a layer": lambda block: setattr(block.tri_att_end, "__class__", Half),
    "a forward of a block": _own_forward,
}


def with_weights(mesh: Any) -> dict[str, float]:
    """Blocks whose weights are DTensors, in training: residuals, dropout and gradients."""
    errors = {}
    original = stack(Layer)
    expected = outcome(original.train(), 3)
    rank = mesh.get_local_rank()
    for name, first in (("before", True), ("after", False)):
        distributed = copy.deepcopy(original).train()
        if not first:
            distribute(distributed, mesh)
        for block in (*distributed.blocks, distributed.alone):
            distribute_module(block, mesh)
        if first:
            distribute(distributed, mesh)
        drawn = [x.full_tensor() if hasattr(x, "full_tensor") else x for x in outcome(distributed, 3 + rank)]
        errors[f"DTensors {name}"] = worst([*drawn[:2], *drawn[3:]], [*expected[:2], *expected[3:]])
    return errors


def compiled(mesh: Any) -> float:
    original = stack(Layer).eval()
    distributed = copy.deepcopy(original)
    distribute(distributed, mesh)
    expected = outcome(original, 3)
    torch.compiler.reset()
    actual = outcome(torch.compile(distributed, backend="aot_eager", fullgraph=True), 3)
    # without the next random number: torch drops what Boltz draws in inference and does not use
    return worst([*actual[:2], *actual[3:]], [*expected[:2], *expected[3:]])


def in_two_places(mesh: Any) -> float:
    """A block that stands twice in a stack."""
    original = stack(Layer).eval()
    original.blocks[1] = original.blocks[0]
    distributed = copy.deepcopy(original)
    distribute(distributed, mesh)
    return worst(outcome(distributed, 3), outcome(original, 3))


def measure(which: str) -> dict[str, Any]:
    """Errors and messages, in one of the processes."""
    stand_in()
    mesh = init_device_mesh("cpu", (PROCESSES,))
    if which == "many":
        return {**all_errors(mesh), "compiled": compiled(mesh)}
    errors = {
        "forward": a_forward(mesh),
        "two places": in_two_places(mesh),
        **with_weights(mesh),
    }
    return {"errors": errors, "gathers": gathers(mesh), "refused": refused(mesh)}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return distributed.results(measure, tmp_path_factory.mktemp("few"), "few", processes=PROCESSES)


def test_outputs_and_all_gradients(measured: list[Any]) -> None:
    for each in measured:
        assert len(each["errors"]) == 4
        for name, error in each["errors"].items():
            assert error < 1e-10, name


@pytest.mark.slow
def test_all_blocks(tmp_path: pathlib.Path) -> None:
    """In evaluation and training, checkpointed, replaced before, and compiled, which takes 10 s a block of every process."""
    for each in distributed.results(measure, tmp_path, "many", processes=PROCESSES):
        assert len(each) == 14
        for name, error in each.items():
            assert error < 1e-10, name


def test_blocks_of_a_stack_pass_on_parts(measured: list[Any]) -> None:
    assert measured[0]["gathers"] == {"between": 0, "last": 2, "alone": 2}


def test_distribute_refuses_unknown_and_distributed_blocks(measured: list[Any]) -> None:
    assert measured[0]["refused"] == {
        "twice": "blocks.0 is distributed already: call distribute once for a model",
        "copied": COPIED,
        "saved": COPIED,
        "unknown": "no pair block of Linear is known: distribute takes models of boltz, openfold3, tests",
        "a layer": "evoattn.nn has no Linear: keep the client's layers in the block, or leave it out",
        "a hook on a layer": (
            f"tri_mul_out has hooks, {NOT_CALLED}: put hooks and adapters on the block, or on projections and norms"
        ),
        "a hook on the attention of s": f"attention has hooks or a method of its own, {NOT_CALLED}: put it on the block",
        "a forward of a layer": f"a In overrides forward of {In.__module__}.In, which evoattn.nn would not call",
        "a subclass of a layer": (
            f"a Half overrides forward of {Attention.__module__}.Attention, which evoattn.nn would not call"
        ),
        "a forward of a block": (
            "a Layer has a forward of its own, which each process would run on all of z: distribute the model before you put "
            "it on the block, and make it without activation checkpointing by fairscale"
        ),
        "a hook that comes later": (
            f"tri_mul_in has hooks, {NOT_CALLED}: put hooks and adapters on the block, or on projections and norms"
        ),
    }


COPIED = "a distributed block cannot be copied or pickled: copy the model before, or save its state_dict"
NOT_CALLED = "and evoattn.nn does not call it"


def test_a_parameter_whose_gradient_would_not_be_summed() -> None:
    """It was frozen when the block was distributed, or came later."""
    module = nn.Linear(2, 2)
    module.bias.requires_grad_(False)
    block = object.__new__(sys.modules["evoattn.clients.distribute"]._Runner)
    block._summed = {}
    block.hook(module)
    block.check_summed(module)
    module.bias.requires_grad_()
    with pytest.raises(ValueError, match="bias was exchanged or unfrozen after evoattn.nn.distribute"):
        block.check_summed(module)
    module.bias.requires_grad_(False)
    module.weight = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(ValueError, match="weight was exchanged"):
        block.check_summed(module)


def test_dropout_of_what_several_processes_hold_is_refused() -> None:
    from torch.distributed.tensor import Replicate, Shard

    from evoattn.nn import sharded

    mesh = types.SimpleNamespace(size=lambda dimension: (2, 1)[dimension])
    sharded.check_dropout(types.SimpleNamespace(placements=[Shard(1), Replicate()], device_mesh=mesh))
    with pytest.raises(ValueError, match="with dropout z must be split over all dimensions of its mesh"):
        sharded.check_dropout(types.SimpleNamespace(placements=[Replicate(), Shard(0)], device_mesh=mesh))
