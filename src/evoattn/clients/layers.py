"""Whole layers of a client, from norm to output, computed by `evoattn.nn`: what `patch(name, layers=True)` replaces besides."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from evoattn.clients.arguments import positions
from evoattn.clients.blocks import KnownBlock
from evoattn.clients.calls import FEW_ON_CPU, LONG, has_few_entries_on_cpu, is_float32_on_gpu, is_small_on_cpu, residues
from evoattn.clients.known import KnownLayer
from evoattn.clients.site import COMPILING, Count, PassedOn, Site, is_repeated
from evoattn.clients.swap import Swap
from evoattn.core.numerics import float32_products
from evoattn.nn import AttentionPairBias, MSAPairWeightedAveraging, OuterProductMean, Transition, TriangleMultiplication

FEW = 288
"""Residues below which blocks are left to clients: launching kernels takes longer there than running them.

A guess. At 256 residues those of `evoattn.nn` are slower in some cases, at 1,024 in none (docs/clients/speed.md). Nothing
between was measured.
"""

_FEW_IN_SINGLE_TRACK = 1024
"""Residues below which a float32 attention with pair bias is left to the client in inference, if it does not norm the pairs.

With 16 heads these are the 2^24 scores of `calls.faster_as_installed`.

200 steps of OpenFold-3's denoiser took, on an H100, 12.1 s as installed and 16.4 s patched at 152 residues, 11.9 and 15.8 s
at 304. The trunk at 152 residues took 1.5 and 2.4 s.
"""


_swaps: weakref.WeakKeyDictionary[nn.Module, Swap] = weakref.WeakKeyDictionary()
"""For each layer of a client the swap that its last call had."""

_FEW_RESIDUES = "float32 with few residues, where the client's own layer takes less of the host"

WIDE = "float32 on a GPU, where the client's own products are faster"
"""The reason why blocks, transitions and triangle multiplications are left to the client, where float16 does not multiply.

Other kernels for float32 reach less of the card than cuBLAS: ESMFold of 380 residues took 4.4 s with them and 3.9 s as
installed, on an H100.
"""


TRANSITION_ON_CPU = "a transition on a CPU, where the client's own code is as fast"
"""The reason why transitions are left to the client there, but for those in blocks.

One of Boltz of 152 residues in float32 took 253 ms as installed and 243 with evoattn, one of Protenix in bfloat16 80 and 104.
"""

TRAINED_ON_CPU = "an MSA layer that trains on a CPU, where the client's own code is as fast"
"""Its backward computes products again, which saves memory."""


def sites(
    known: Mapping[str, KnownLayer | KnownBlock], *, least: int = 0, least_trained: int | None = None, method: str = "forward"
) -> tuple[Site, ...]:
    """The `method` of layers and blocks, by the full name of the class. least, least_trained: as `layer` takes them."""
    replace = functools.partial(layer, least=least, least_trained=least_trained)
    found = {}
    for name, description in known.items():
        module, _, kind = name.rpartition(".")
        if isinstance(description, KnownBlock):
            base, counted_as = kind, "pair block"
        else:
            base, counted_as = description.base or kind, description.kind
        found[module, base] = Site(module, f"{base}.{method}", replace, kind=counted_as)
    return tuple(found.values())


def layer(original: Callable[..., Any], count: Count, least: int = 0, least_trained: int | None = None) -> Callable[..., Any]:
    """A layer's `forward` by `evoattn.nn`.

    The original computes what `evoattn.nn` does not know, with its attention replaced: methods that a subclass overrides, other
    parameters, a precision or arguments of its own. torch.compile compiles the original too.

    On a GPU a pair representation of fewer residues than `least` is left to the original: the host sets the pace there, and the
    original asks less of it. Not if the call is recorded as a CUDA graph. `least_trained` is the same while gradients are
    recorded.
    """
    names = positions(original)
    least_trained = least if least_trained is None else least_trained

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(self, *args, **kwargs)
        values = (*args, *kwargs.values())
        swap, reason = None, _too_small(values, least_trained if torch.is_grad_enabled() else least)
        if not reason and has_few_entries_on_cpu(values) and not _asks_for_kernel(names, args, kwargs):
            reason = FEW_ON_CPU
        if not reason and count.is_compiling(self, names, args, kwargs):
            reason = COMPILING
        if not reason:
            swap, reason = _current(self, values)
        if swap is not None:
            found = count.compute(swap.run, self, names, args, kwargs)
            result, why = (None, found.reason) if isinstance(found, PassedOn) else found
            if why is None:
                count.count_replaced()
                return result
            reason = why
        if reason:
            count.count_passed_on(reason)
        return original(self, *args, **kwargs)

    return forward


def _too_small(arguments: tuple[Any, ...], least: int) -> str:
    """The reason why a call of fewer residues than `least` is left to the client, or ""."""
    if not least or is_repeated() or (residues(arguments) or least) >= least:
        return ""
    return f"fewer than {least} residues, where the client's own layers take less of the host"


def _asks_for_kernel(names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a call switches on a kernel of the client's, which may fail on a CPU."""
    given = (*zip(names, args, strict=False), *kwargs.items())
    return any((x is True and name.startswith("use_")) or (type(x) is str and x != "torch") for name, x in given)


def _current(client: nn.Module, arguments: tuple[Any, ...]) -> tuple[Swap | None, str]:
    """The swap of a layer for a call, or None and the reason to leave the call to the client.

    A look at all modules takes the host as long as several kernels, so a layer that is left to the client anyway gets none.
    """
    swap = _swaps.get(client)
    if swap is not None:
        reason = slower_on_cpu(swap, arguments) or slower_in_float32(swap, arguments)
        if reason or swap.is_left:
            return None, reason
    if swap is None or not swap.snapshot.holds(client):
        swap = _swaps[client] = Swap(client, is_called=True)
        if reason := slower_on_cpu(swap, arguments) or slower_in_float32(swap, arguments):
            return None, reason
    return swap, ""


def _multiplies_by_float16(arguments: tuple[Any, ...]) -> bool:
    """Return whether layers compute float32 products of a call by tensor cores, and a GPU is busy with it."""
    first = next(x for x in arguments if isinstance(x, Tensor) and x.is_floating_point())
    if torch.is_grad_enabled() or first.dtype != torch.float32 or torch.is_autocast_enabled("cuda"):
        return False
    if float32_products() == "tf32" or torch.version.hip is not None:
        return False
    return is_repeated() or (residues(arguments) or FEW) >= FEW


def slower_on_cpu(swap: Swap, arguments: tuple[Any, ...]) -> str:
    """The reason why a layer is left to the client on a CPU, or ""."""
    if not isinstance(swap.layer, (AttentionPairBias, MSAPairWeightedAveraging, OuterProductMean, Transition)):
        return ""
    a = next(x for x in arguments if isinstance(x, Tensor))
    if isinstance(swap.layer, (MSAPairWeightedAveraging, OuterProductMean)):
        return TRAINED_ON_CPU if torch.is_grad_enabled() and is_small_on_cpu(a, 0) else ""
    if isinstance(swap.layer, Transition):  # of any size
        return TRANSITION_ON_CPU if is_small_on_cpu(a, 0) else ""
    return FEW_ON_CPU if is_small_on_cpu(a, a.shape[:-1].numel() * a.shape[-2] * swap.layer.no_heads) else ""


def slower_in_float32(swap: Swap, arguments: tuple[Any, ...]) -> str:
    """The reason why a float32 call on a GPU is left to the client, or ""."""
    if swap.layer is None or not is_float32_on_gpu(arguments):
        return ""
    if swap.is_block or isinstance(swap.layer, (Transition, TriangleMultiplication)):
        return "" if _multiplies_by_float16(arguments) else WIDE
    if is_repeated() or not isinstance(swap.layer, AttentionPairBias):
        return ""
    least = _FEW_IN_SINGLE_TRACK if swap.layer.layer_norm_z is None else LONG + 1
    least = FEW if torch.is_grad_enabled() else least
    return _FEW_RESIDUES if (residues(arguments, 3) or least) < least else ""
