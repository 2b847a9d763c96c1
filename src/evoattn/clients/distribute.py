"""Run the pair blocks of a client's model on a pair representation that is split over processes.

The features that enter the first block of a stack are the same on all processes, and so are those that leave the last one. In
between each process holds some rows of z and of s. Outside of the blocks every process computes the same.
"""

from __future__ import annotations

import collections
import functools
import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from evoattn.clients.arguments import by_name, positions
from evoattn.clients.blocks import SplitBlock
from evoattn.clients.registry import split_blocks
from evoattn.clients.replace import subclass
from evoattn.clients.snapshots import check_methods, original_of, own_method
from evoattn.clients.swap import current
from evoattn.dispatch.distributed import Split, is_distributed
from evoattn.nn.sharded import from_parts, local, with_full_parameters
from evoattn.nn.submodules import has_hooks

_ATTRIBUTE = "_evoattn_distributed"
"""The attribute of a block that holds its `_Runner`."""


def distribute(model: nn.Module, mesh: Any) -> list[str]:
    """Split the pair representation of a client's pair blocks over the processes of a mesh by rows, in place.

    These blocks are known: OpenFold-3's `PairFormerBlock` and `PairBlock`, Boltz's `PairformerLayer` and
    `PairformerNoSeqLayer`. Their layers are computed by those of `evoattn.nn`, as after `evoattn.nn.replace`. Blocks of an
    `nn.ModuleList` pass parts of z and s on to the next one: the model has to call them one after the other, and to do nothing
    with z in between.

    All processes call the model with the same features, and get the same results. Each parameter of a block gets the gradient
    from all rows, because a hook adds up the parts of the processes. So an optimizer's step is the same on all of them. Dropout
    masks are those of the first process. Blocks take no hooks that look at z, and no in-place request is followed. Between the
    blocks of a stack z is a DTensor.

    Args:
        model: the client's model, or a part of it. The same parameters on all processes, as plain tensors or as DTensors on the
            mesh. Plain parameters that are exchanged or unfrozen later are refused when gradients are recorded.
        mesh: a `torch.distributed.device_mesh.DeviceMesh` of one dimension.

    Returns:
        The names of the blocks, as `model.named_modules()` has them.

    Raises:
        ValueError: the mesh has several dimensions, no block is known, a block is distributed already, or one of its layers is
            none that `evoattn.nn` can compute: it has hooks, a forward of its own, or other modules. So has a block with a
            forward of its own, such as that of fairscale's `checkpoint_wrapper`. No block is changed then. A call raises it if
            hooks or a forward are put on a layer later. So do copying and pickling: save the `state_dict`.

    Example:
        >>> from torch import nn
        >>> import types
        >>> distribute(nn.Linear(3, 3), types.SimpleNamespace(ndim=1))
        Traceback (most recent call last):
        ...
        ValueError: no pair block of Linear is known: distribute takes models of boltz, openfold3
    """
    if mesh.ndim != 1:
        raise ValueError(f"mesh must have one dimension, got {mesh.ndim}")
    blocks = _blocks_of(model)
    if not blocks:
        clients = ", ".join(dict.fromkeys(name.partition(".")[0] for name in split_blocks()))
        raise ValueError(f"no pair block of {type(model).__name__} is known: distribute takes models of {clients}")
    passing = _passing(model, {id(module) for _, module, _ in blocks})
    runners = [_Runner(module, kind, mesh, leaves=id(module) not in passing) for _, module, kind in blocks]
    for (_, module, _), block in zip(blocks, runners, strict=True):
        setattr(module, _ATTRIBUTE, block)
        original: Any = type(module)
        module.__class__ = _distributed(original)
        block.hook(module)
    return [name for name, _, _ in blocks]


def _passing(model: nn.Module, known: set[int]) -> set[int]:
    """The ids of blocks that another block of the same stack follows, at each place where they stand."""
    stacks = [list(x) for x in model.modules() if isinstance(x, nn.ModuleList)]
    pairs = [pair for stack in stacks for pair in itertools.pairwise(stack)]
    followed = collections.Counter(id(x) for x, y in pairs if {id(x), id(y)} <= known and type(x) is type(y))
    places = collections.Counter(id(x) for _, x in model.named_modules(remove_duplicate=False))
    return {x for x, count in followed.items() if count == places[x]}


def _blocks_of(model: nn.Module) -> list[tuple[str, nn.Module, SplitBlock]]:
    blocks: list[tuple[str, nn.Module, SplitBlock]] = []
    inside: set[int] = set()
    for name, module in model.named_modules():
        kind = _kind_of(type(module))
        if kind is None or id(module) in inside:
            continue
        if _ATTRIBUTE in module.__dict__:
            raise ValueError(f"{name} is distributed already: call distribute once for a model")
        inside |= {id(x) for x in module.modules()}
        blocks.append((name, module, kind))
    return blocks


class _Runner:
    """A client's block on this process. If it `leaves`, z and s are gathered after it."""

    def __init__(self, client: Any, kind: SplitBlock, mesh: Any, *, leaves: bool) -> None:
        self.kind, self.mesh, self.leaves, self.group = kind, mesh, leaves, mesh.get_group()
        original: Any = original_of(type(client))
        self.original, self.forward = original, original.forward
        self.names = positions(self.forward)
        self._summed: dict[int, Tensor] = {}
        if method := own_method(client):
            raise ValueError(
                f"a {type(client).__name__} has a {method} of its own, which each process would run on all of z: distribute "
                "the model before you put it on the block, and make it without activation checkpointing by fairscale"
            )
        check_methods("", client)
        self.layers(client)

    def layers(self, client: Any) -> tuple[Any, Any]:
        """The layers of `evoattn.nn` for those of z, and for the attention of s if the block has one, or ValueError."""
        if self.original.forward is not self.forward:
            check_methods("", client)
            self.forward = self.original.forward  # `evoattn.patch` or its end
        for name in filter(None, (self.kind.pair_stack, self.kind.attention)):
            module = getattr(client, name)
            if has_hooks(module) or own_method(module):
                raise ValueError(
                    f"{name} has hooks or a method of its own, and evoattn.nn does not call it: put it on the block"
                )
        attention = self.kind.attention
        return _layer(self.pairs(client)), _layer(getattr(client, attention)) if attention else None

    def pairs(self, client: nn.Module) -> Any:
        """The module of the client that has the layers of z."""
        return getattr(client, self.kind.pair_stack) if self.kind.pair_stack else client

    def hook(self, client: nn.Module) -> None:
        """Have the gradients of the parameters summed over the processes."""
        for x in client.parameters():
            if x.requires_grad and not is_distributed(x):  # a DTensor's gradient is that of all processes
                x.register_hook(self.sum)
                self._summed[id(x)] = x

    def check_summed(self, client: nn.Module) -> None:
        """Raise ValueError if a parameter's gradient would be that of the rows of this process alone."""
        for name, x in client.named_parameters():
            if x.requires_grad and id(x) not in self._summed and not is_distributed(x):
                raise ValueError(
                    f"{name} was exchanged or unfrozen after evoattn.nn.distribute, so its gradient would not be summed over "
                    "the processes: load weights and set requires_grad before"
                )

    def sum(self, dx: Tensor) -> Tensor:
        """The gradient of a parameter from all processes."""
        dx = dx.contiguous().clone()
        dist.all_reduce(dx, group=self.group)
        return dx

    def __call__(self, client: Any, arguments: dict[str, Any]) -> Any:
        layers, attention = self.layers(client)
        if torch.is_grad_enabled():
            self.check_summed(client)
        split = Split(self.group, -3, arguments["z"].shape[-3])

        def left(x: Any, axis: int) -> Any:
            return split.leave(local(x), axis) if self.leaves else x

        arguments = {**arguments}
        for name, axis in (("s", -2), ("z", -3), ("pair_mask", -2), (self.kind.mask, -1)):
            if arguments.get(name) is not None and not is_distributed(arguments[name]):
                arguments[name] = self._entered(arguments[name], split, axis)

        def update() -> tuple[Any, Any]:
            options = {name: arguments[name] for name in ("_mask_trans",) if name in arguments}
            z = self.kind.update_z(layers, self.pairs(client), arguments["z"], arguments["pair_mask"], **options)
            update_s = self.kind.update_s
            return None if update_s is None else update_s(client, attention, **{**arguments, "z": z}), z

        s, z = with_full_parameters(client, arguments["z"], update)
        return left(z, -3) if self.kind.update_s is None else (left(s, -2), left(z, -3))

    def _entered(self, x: Tensor, split: Split, axis: int) -> Tensor:
        """The rows of this process, as a DTensor, of a tensor that is whole on all processes."""
        from torch.distributed.tensor import Shard

        return from_parts(split.enter(x, axis), self.mesh, [Shard(x.ndim + axis)], x.shape)


def _layer(client: nn.Module) -> Any:
    swap = current(client)
    if swap.layer is None:
        raise ValueError(
            swap.reason or f"evoattn.nn has no {type(client).__name__}: call distribute before you exchange layers"
        )
    if missed := swap.obstacle():
        raise ValueError(f"{missed}: put hooks and adapters on the block, or on projections and norms")
    return swap.layer


def _kind_of(kind: Any) -> SplitBlock | None:
    """Return the kind of a class, or None if the class is unknown or overrides the known forward."""
    own: Any = original_of(kind)
    for x in own.__mro__:
        known = split_blocks().get(f"{x.__module__}.{x.__qualname__}")
        if known is not None:
            return known if own.forward is x.forward else None
    return None


@functools.cache
def _distributed(original: Any) -> Any:
    """The subclass of a client's class whose forward is that of its `_Runner`."""

    @functools.wraps(original.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        runner = self.__dict__[_ATTRIBUTE]
        return runner(self, by_name(runner.names, args, kwargs))

    def reduce(self: Any, protocol: Any) -> Any:
        raise ValueError("a distributed block cannot be copied or pickled: copy the model before, or save its state_dict")

    return subclass(original, forward=forward, __reduce_ex__=reduce)
