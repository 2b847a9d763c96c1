"""Replace the forward of layers of clients: attention, triangle multiplication, transition.

A layer of the client stays where it is, with its parameters, their names and its hooks. Only its class changes, to a subclass
whose `forward` calls a layer of `evoattn.nn` that holds the same projection and norm modules.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from torch import nn

from evoattn.clients.arguments import positions
from evoattn.clients.registry import known
from evoattn.clients.snapshots import ATTRIBUTE, original_of
from evoattn.clients.swap import Swap, current, recognised


def replace(model: nn.Module) -> list[str]:
    """Compute the attention layers, triangle multiplications and transitions of a client's model by `evoattn.nn`, in place.

    These layers are known:

    - OpenFold 1 and 2: triangle, MSA row, MSA column, global column and template pointwise attention, triangle
      multiplication, and the transitions of pairs and of the MSA;
    - OpenFold-3: triangle, MSA row, MSA column and global column attention, attention with pair bias in the trunk and the
      diffusion transformer, triangle multiplication, and transitions;
    - Boltz-1 and Boltz-2: triangle attention, attention with pair bias, triangle multiplication, and transitions;
    - BoltzGen, Protenix, OpenDDE and RosettaFold-3: triangle attention, triangle multiplication, and transitions;
      of Protenix and OpenDDE also the single track's attention with pair bias;
    - ESMFold in transformers: triangle attention, triangle multiplication, and the transition of pairs.

    So are the pair blocks, whose layers add their updates to z themselves: of OpenFold 2 (`PairStack`), OpenFold-3
    (`PairBlock`), Boltz and BoltzGen (`PairformerLayer`, `PairformerNoSeqLayer`), Protenix and OpenDDE (`PairformerBlock`), and
    ESMFold (`EsmFoldTriangularSelfAttentionBlock`). A block that `evoattn.nn` cannot compute runs its
    own forward, with replaced layers: there is a hook on one of its layers, a forward of its own or another layer in it.
    OpenDDE's pairformer calls another method of its blocks than `forward`, so they run that, with replaced layers;
    `evoattn.patch` replaces the method.

    Transitions of more than 256 channels, such as those of the single track, are left as they are.

    Both layers hold the same parameters, under the names that they had. So optimizers, checkpoints and later moves to a device
    work as before. Arguments for chunk sizes and kernels are ignored. Only OpenFold's request to add the update of a triangle
    multiplication to its input, in place, is followed. Each replaced layer gets a subclass of its class, of the same name.

    Sub-modules may be exchanged later, as adapters do, and settings such as `inf` may be changed: each call looks at them. If
    `evoattn.nn` cannot compute a changed layer, the layer's own forward runs, and a warning says why: a sub-module that
    `evoattn.nn` does not call has hooks or a forward of its own, or a program has replaced a method of its class.

    Args:
        model: the client's model, or one of its layers.

    Returns:
        The names of the replaced layers, as `model.named_modules()` has them.

    Raises:
        ValueError: no layer of the model is known. Or a known layer has other parameters than the one of `evoattn.nn`, sets the
            precision of a projection, or overrides `forward` or another method of the class that is known, or a program has
            replaced such a method. No layer is replaced then.

    Example:
        >>> from torch import nn
        >>> replace(nn.Linear(3, 3))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        ValueError: no layer of Linear is known: replace takes models of boltz, boltzgen, ...
    """
    swaps = [(name, x, Swap(x, is_called=False)) for name, x in model.named_modules() if _is_replaced(type(x))]
    for _, _, swap in swaps:
        if swap.reason and not swap.is_block:  # a block that evoattn.nn cannot compute keeps its forward
            raise ValueError(swap.reason)
    swaps = [each for each in swaps if each[2].layer is not None]
    if not swaps:
        clients = ", ".join(dict.fromkeys(name.partition(".")[0] for name in known()))
        raise ValueError(f"no layer of {type(model).__name__} is known: replace takes models of {clients}")
    for _, module, swap in swaps:
        module.__class__ = _replaced(original_of(type(module)))
        setattr(module, ATTRIBUTE, swap)
    return [name for name, _, _ in swaps]


def _is_replaced(kind: type) -> bool:
    found = recognised(kind)
    return found is not None and not getattr(found[1], "in_part", False)


@functools.cache
def _replaced(original: Any) -> Any:
    """The subclass of a client's class whose forward is that of its swap.

    A class, because it knows the module that is called: copies, pickled layers and the replicas of DataParallel compute with
    modules of their own.
    """
    names = positions(original.forward)

    @functools.wraps(original.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        result, reason = current(self).run(self, names, args, kwargs)
        if reason is None:
            return result
        if reason and not torch.compiler.is_compiling():
            warnings.warn(f"a replaced {type(self).__name__} runs its own forward: {reason}", stacklevel=1)
        return original.forward(self, *args, **kwargs)

    def reduce(self: Any, protocol: Any) -> Any:
        reduced: Any = object.__reduce_ex__(self, 2)
        state = {name: x for name, x in reduced[2].items() if name != ATTRIBUTE}
        return (_new, (original,), state, *reduced[3:])

    def fill(self: Any, state: dict[str, Any]) -> None:
        super(kind, self).__setstate__(state)
        current(self)  # torch.compile does not make it

    kind = subclass(original, forward=forward, __reduce_ex__=reduce, __setstate__=fill, _evoattn_original=original)
    return kind


def subclass(original: Any, **members: Any) -> Any:
    """A subclass of a client's class, of the same name."""
    named = {name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(original)(original.__name__, (original,), named | members)


def _new(original: type) -> Any:
    """A replaced layer without attributes, for `copy` and `pickle` to fill."""
    kind = _replaced(original)
    return kind.__new__(kind)
