"""Run the pair blocks of a client's model on a pair representation that is split over processes.

The features that enter the first block of a stack are the same on all processes, and so are those that leave the last one. In
between each process holds some rows of z and of s. Outside of the blocks every process computes the same.
"""

from __future__ import annotations

import functools
import importlib
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from evoattn.call.sharded import is_distributed
from evoattn.nn.known_blocks import END, PAIR_LAYERS, shared_mask
from evoattn.nn.project import compute_dtype_of
from evoattn.nn.replace import Ours, by_name, positions
from evoattn.nn.sharded import like, local, of_parts
from evoattn.run.split import Split

__all__ = ["distribute"]

_KEPT = "_evoattn_distributed"
"""The attribute of a block that holds its `_Block`."""


def distribute(model: nn.Module, mesh: Any) -> list[str]:
    """Split the pair representation of a client's pair blocks over the processes of a mesh by rows, in place.

    These blocks are known: OpenFold-3's `PairFormerBlock` and `PairBlock`, Boltz's `PairformerLayer` and
    `PairformerNoSeqLayer`. Their layers are computed by those of `evoattn.nn`, as after `evoattn.nn.replace`. Blocks of an
    `nn.ModuleList` pass parts of z and s on to the next one: the model has to call them one after the other, and to do nothing
    with z in between.

    All processes call the model with the same features, and get the same results. Each parameter of a block gets the gradient
    from all rows, because a hook adds up the parts of the processes. So an optimizer's step is the same on all of them. Dropout
    masks are those of the first process. Blocks take no hooks that look at z, and no in-place request is followed.

    Args:
        model: the client's model, or a part of it. The same parameters on all processes, as plain tensors. Parameters that are
            exchanged or unfrozen later are refused when gradients are recorded.
        mesh: a `torch.distributed.device_mesh.DeviceMesh` of one dimension.

    Returns:
        The names of the blocks, as `model.named_modules()` has them.

    Raises:
        ValueError: the mesh has several dimensions, no block is known, a block is distributed already, or a layer of a block is
            none that `evoattn.nn` knows. No block is changed then.

    Example:
        >>> from torch import nn
        >>> import types
        >>> distribute(nn.Linear(3, 3), types.SimpleNamespace(ndim=1))
        Traceback (most recent call last):
        ...
        ValueError: no pair block of Linear is known: distribute takes models of openfold3, boltz
    """
    if mesh.ndim != 1:
        raise ValueError(f"mesh must have one dimension, got {mesh.ndim}")
    found = _blocks_of(model)
    if not found:
        clients = ", ".join(dict.fromkeys(name.partition(".")[0] for name in _KINDS))
        raise ValueError(f"no pair block of {type(model).__name__} is known: distribute takes models of {clients}")
    passing = _passing(model, {id(module) for _, module, _ in found})
    made = [_Block(module, kind, mesh, leaves=id(module) not in passing) for _, module, kind in found]
    for (_, module, _), block in zip(found, made, strict=True):
        setattr(module, _KEPT, block)
        original: Any = type(module)
        module.__class__ = _distributed(original)
        block.hook(module)
    return [name for name, _, _ in found]


def _passing(model: nn.Module, known: set[int]) -> set[int]:
    """The blocks of stacks that another one follows, by identity."""
    stacks = [list(x) for x in model.modules() if isinstance(x, nn.ModuleList)]
    pairs = [pair for stack in stacks for pair in itertools.pairwise(stack)]
    return {id(x) for x, after in pairs if {id(x), id(after)} <= known and type(x) is type(after)}


def _blocks_of(model: nn.Module) -> list[tuple[str, nn.Module, _Kind]]:
    """The outermost known blocks."""
    found: list[tuple[str, nn.Module, _Kind]] = []
    inside: set[int] = set()
    for name, module in model.named_modules():
        kind = _kind_of(type(module))
        if kind is None or id(module) in inside:
            continue
        if _KEPT in module.__dict__:
            raise ValueError(f"{name} is distributed already")
        inside |= {id(x) for x in module.modules()}
        found.append((name, module, kind))
    return found


class _Block:
    """What a client's block needs on this process.

    leaves: whether z and s are gathered after the block.
    """

    def __init__(self, theirs: Any, kind: _Kind, mesh: Any, *, leaves: bool) -> None:
        self.kind, self.mesh, self.leaves, self.group = kind, mesh, leaves, mesh.get_group()
        self._ours: dict[int, Ours] = {}
        self._summed: dict[int, Tensor] = {}
        pairs = kind.pairs(theirs)
        attention = () if kind.attention is None else (getattr(theirs, kind.attention),)
        for layer in (*(getattr(pairs, name) for name in (*PAIR_LAYERS, kind.transition)), *attention):
            self.of(layer)

    def __deepcopy__(self, memo: Any) -> Any:
        raise ValueError("a distributed block cannot be copied: copy the model before evoattn.nn.distribute")

    def of(self, theirs: nn.Module) -> Any:
        """Ours of a layer of the client's, made again if its modules were exchanged."""
        kept = self._ours.get(id(theirs))
        if kept is None or not kept.holds(theirs):
            kept = Ours.of(theirs, entries=False)
            if kept is None:
                raise ValueError(f"evoattn.nn has no {type(theirs).__name__}")
            self._ours[id(theirs)] = kept
        return kept.layer

    def hook(self, theirs: nn.Module) -> None:
        """Have the gradients of the parameters summed over the processes."""
        for x in theirs.parameters():
            if x.requires_grad:
                x.register_hook(self.sum)
                self._summed[id(x)] = x

    def check_summed(self, theirs: nn.Module) -> None:
        """Raise ValueError if a parameter's gradient would be that of the rows of this process alone."""
        for name, x in theirs.named_parameters():
            if x.requires_grad and id(x) not in self._summed:
                raise ValueError(
                    f"{name} was exchanged or unfrozen after evoattn.nn.distribute, so its gradient would not be summed over "
                    "the processes: load weights and set requires_grad before"
                )

    def sum(self, dx: Tensor) -> Tensor:
        """The gradient of a parameter from all processes."""
        dx = dx.contiguous().clone()
        dist.all_reduce(dx, group=self.group)
        return dx

    def __call__(self, theirs: Any, arguments: dict[str, Any]) -> Any:
        if torch.is_grad_enabled():
            self.check_summed(theirs)
        split = Split(self.group, -3, arguments["z"].shape[-3])

        def left(x: Any, axis: int) -> Any:
            return split.leave(local(x), axis) if self.leaves else x

        given = {**arguments}
        for name, axis in (("s", -2), ("z", -3), ("pair_mask", -2), (self.kind.mask, -1)):
            if given.get(name) is not None and not is_distributed(given[name]):
                given[name] = self._entered(given[name], split, axis)
        z = self.kind.update_z(self, self.kind.pairs(theirs), split, given)
        if self.kind.update_s is None:
            return left(z, -3)
        return left(self.kind.update_s(self, theirs, {**given, "z": z}), -2), left(z, -3)

    def _entered(self, x: Tensor, split: Split, axis: int) -> Tensor:
        """The rows of this process of what all processes have."""
        from torch.distributed.tensor import Shard

        return of_parts(split.enter(x, axis), self.mesh, [Shard(x.ndim + axis)], x.shape)

    def update(
        self, pairs: Any, given: dict[str, Any], draw: Callable[[int], Tensor | None], *, mask: Any = None, **turned: bool
    ) -> Any:
        """The updated z.

        Args:
            pairs: the client's module that has the layers.
            given: z and its mask.
            draw: makes the dropout mask of the whole update by a layer, the first being 0, or None.
            mask: multiplies the update of the transition.
            turned: options of the attention around the ending node, if the client gives it a transposed z.
        """
        z = given["z"]
        for which, name in enumerate(PAIR_LAYERS):
            layer, options = self.of(getattr(pairs, name)), {}
            if turned and which == END:
                layer.starting, options = False, turned
            z = layer.add_to(z, given["pair_mask"], draw(which), in_place=False, **options)
        return self.of(getattr(pairs, self.kind.transition)).add_to(z, mask, in_place=False)


def _boltz_z(block: _Block, theirs: Any, split: Split, given: dict[str, Any]) -> Any:
    drop = importlib.import_module("boltz.model.layers.dropout").get_dropout_mask
    z = given["z"]
    z = like(local(z).to(torch.promote_types(z.dtype, torch.float32)), z)  # as theirs becomes by its dropout mask
    outline = local(z).new_empty(1).expand(z.shape)

    def draw(which: int) -> Tensor | None:
        """Theirs draws in inference too, which moves the random numbers of the diffusion."""
        mask = drop(theirs.dropout, outline, theirs.training, columnwise=which == END)
        return split.same(mask) if theirs.training and theirs.dropout else None

    return block.update(theirs, {**given, "z": z}, draw)


def _boltz_s(block: _Block, theirs: Any, given: dict[str, Any]) -> Any:
    with torch.autocast(given["z"].device.type, enabled=False):
        s, z, mask = (_wide(given[name]) for name in ("s", "z", "mask"))
        held = local(s)
        normed = like(theirs.pre_norm_s(held), s)
        held = held + local(block.of(theirs.attention)(normed, z, None, mask))
        held = held + theirs.transition_s(held)
        return like(theirs.s_post_norm(held), s)


def _wide(x: Any) -> Any:
    return like(local(x).to(torch.promote_types(x.dtype, torch.float32)), x)


def _openfold3_z(block: _Block, theirs: Any, split: Split, given: dict[str, Any]) -> Any:
    z, dropout = given["z"], theirs.ps_dropout_row_layer
    if dropout.training and list(dropout.batch_dim) != [-3]:
        raise ValueError(f"dropout must be along rows, got the axes {dropout.batch_dim}")

    def draw(which: int) -> Tensor | None:
        if not dropout.training:
            return None
        outline = local(z).new_empty(1).expand(z.shape)
        dtype = compute_dtype_of(outline, *block.of(theirs.tri_att_start).mha.inputs)
        return split.same(shared_mask(outline, which, dtype, dropout.dropout))

    mask = given["pair_mask"] if given.get("_mask_trans", True) else None
    return block.update(theirs, given, draw, mask=mask, transpose_bias=True)


def _openfold3_s(block: _Block, theirs: Any, given: dict[str, Any]) -> Any:
    s, mask = given["s"], given["single_mask"]
    held = local(s) + local(block.of(theirs.attn_pair_bias)(s, given["z"], None, mask))
    counted = local(mask) if given.get("_mask_trans", True) else None
    return like(held + theirs.single_transition(held, mask=counted), s)


class _Kind(NamedTuple):
    """How a class of blocks is run.

    Args:
        pairs: finds the module that has the layers of z.
        update_z: makes the updated z.
        transition: the name of z's transition.
        mask: the argument that is the mask of s.
        attention: the name of the attention of s, if the block updates s.
        update_s: makes the updated s.
    """

    pairs: Callable[[Any], Any]
    update_z: Callable[..., Any]
    transition: str
    mask: str = ""
    attention: str | None = None
    update_s: Callable[..., Any] | None = None


def _itself(theirs: Any) -> Any:
    return theirs


def _pair_stack(theirs: Any) -> Any:
    return theirs.pair_stack


_OPENFOLD3, _BOLTZ = "openfold3.core.model.latent", "boltz.model.layers.pairformer"
_KINDS = {
    f"{_OPENFOLD3}.pairformer.PairFormerBlock": _Kind(
        _pair_stack, _openfold3_z, "pair_transition", "single_mask", "attn_pair_bias", _openfold3_s
    ),
    f"{_OPENFOLD3}.base_blocks.PairBlock": _Kind(_itself, _openfold3_z, "pair_transition"),
    f"{_BOLTZ}.PairformerLayer": _Kind(_itself, _boltz_z, "transition_z", "mask", "attention", _boltz_s),
    f"{_BOLTZ}.PairformerNoSeqLayer": _Kind(_itself, _boltz_z, "transition_z"),
}
"""By the full name of a client's class."""


def _kind_of(kind: Any) -> _Kind | None:
    """How blocks of a class are run, or None if it is not known or overrides the known forward."""
    own = vars(kind).get("_evoattn_original", kind)
    for x in own.__mro__:
        found = _KINDS.get(f"{x.__module__}.{x.__qualname__}")
        if found is not None:
            return found if own.forward is x.forward else None
    return None


@functools.cache
def _distributed(original: Any) -> Any:
    """The subclass of a client's class whose forward is ours."""
    names = positions(original.forward)

    @functools.wraps(original.forward)
    def forward(self: Any, *given: Any, **named: Any) -> Any:
        return self.__dict__[_KEPT](self, by_name(names, given, named))

    named = {"__module__": original.__module__, "__qualname__": original.__qualname__, "__doc__": original.__doc__}
    return type(original)(original.__name__, (original,), {**named, "forward": forward})
