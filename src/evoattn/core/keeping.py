"""A sampling: its precision, and what is made of tensors once until it ends, such as split weights and arranged biases.

They are dropped with the sampling, in which their tensors may not change. A write that torch counts, or another tensor in the
place of one, makes them anew. A CUDA graph that makes them itself keeps them as long as it exists.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from evoattn.core import attempts
from evoattn.core.precisions import check_precision

Made = TypeVar("Made")


class Fact(NamedTuple):
    """A value on the host that was read from a tensor, and how it is read."""

    tensor: Tensor
    read: Callable[[Tensor], Any]
    value: Any


class _Sampling(dict[Any, Any]):
    """A running sampling: the things that it keeps.

    Attributes:
        precision: that of the sampling.
        facts: of tensors, by name and tensor.
        records: whether a graph is recorded that makes things once.
    """

    def __init__(self, precision: str) -> None:
        super().__init__()
        self.precision = precision
        self.facts: dict[tuple[str, int], tuple[list[tuple[int, int]] | None, Fact]] = {}  # None: whatever is written to it
        self.records = False


_running: contextvars.ContextVar[_Sampling | None] = contextvars.ContextVar("sampling", default=None)


def sampling(precision: str = "exact") -> contextlib.AbstractContextManager[None]:
    """Let layers split their weights once, until the block ends.

    The weights may not change inside: a write through `.data`, or to a tensor of inference mode, is seen by nobody. Call the
    layers on one stream. What was made of a weight stays until the end, also of one that the caller has dropped. A sampling
    inside of another one shares what that has, and its precision. CUDA graphs that you record inside read what is kept: drop
    them with it. The object is good for one `with` block.

    Args:
        precision: of the fused kernels inside. Only they know it: whatever layers or a CPU compute is as outside.

            - "exact": float32, or TF32 if `torch.backends.cuda.matmul` allows it.
            - "tf32": factors of products have the 11 digits of TF32, whatever torch allows.
            - "bf16": factors of products have 11 digits too, at least those of bfloat16. Queries, keys, values, gates, hidden
              channels and pair biases are bfloat16, and so are the factors of the attention.

            Sums, the residual stream, norms, softmax and what the condition gives are float32 in each.

    Raises:
        ValueError: the precision is not known.

    Example:
        >>> from evoattn.nn import sampling
        >>> with sampling("bf16"):
        ...     pass
    """
    check_precision(precision)
    return _sampling(precision)


@contextlib.contextmanager
def _sampling(precision: str) -> Iterator[None]:
    token = _running.set(_Sampling(precision)) if _running.get() is None else None
    try:
        yield
    finally:
        if token is not None:
            _running.reset(token)


@contextlib.contextmanager
def nothing_kept() -> Iterator[None]:
    """Let nothing be kept, and nothing that is kept be used, until the block ends."""
    token = _running.set(None)
    try:
        yield
    finally:
        _running.reset(token)


def keeps() -> bool:
    """Return whether a sampling is running."""
    return _running.get() is not None


def precision() -> str:
    """The precision of the sampling that runs, "exact" if none does."""
    found = _running.get()
    return "exact" if found is None else found.precision


def made_once(
    name: str, owners: Sequence[Any], make: Callable[[], Made], holds: Callable[[Made], bool] = lambda _: True
) -> Made:
    """Return what `make` returns, which a running sampling keeps.

    Args:
        name: of what is made.
        owners: what it is made of. A tensor that was moved or written to counts as another one.
        make: makes it.
        holds: takes the result of an earlier `make`, and returns whether it is still right.
    """
    store = _running.get()
    if store is None:
        return make()
    key, tensors = (name, *map(id, owners)), [x for x in owners if isinstance(x, Tensor)]
    entry = store.get(key)
    if entry is not None and entry[1] == states(tensors) and holds(entry[2]):
        return entry[2]  # type: ignore[no-any-return]
    made = make()
    if may_keep():
        store[key] = (tuple(owners), states(tensors), made)
    return made


def may_keep() -> bool:
    """Return whether what is made now may be used by later steps.

    What a graph computes has its values at each replay alone. What a call that was given up makes has none.
    """
    store = _running.get()
    if attempts.given_up():
        return False
    return not is_capturing() or (store is not None and store.records)


@contextlib.contextmanager
def made_by_a_graph(anew: bool) -> Iterator[dict[Any, Any]]:
    """Let what is made until the block ends be kept, while a graph is recorded that makes it at each replay.

    Args:
        anew: whether the graph makes all that it reads. The running sampling drops what it has, so that weights are not split
            twice, and takes what the graph made.

    Returns:
        What the graph reads, once the block has ended.
    """
    store, made = _running.get(), dict[Any, Any]()
    if store is None:
        yield made
        return
    if anew:
        store.clear()
    store.records = True
    try:
        yield made
        made.update(store)
    except BaseException:
        store.clear()
        raise
    finally:
        store.records = False


def fact(name: str, tensor: Tensor, read: Callable[[Tensor], Any]) -> Any:
    """Return what `read` returns of a tensor. It waits for the GPU once in a sampling."""
    store = _running.get()
    if store is None or attempts.given_up():
        return read(tensor)
    found = store.facts.get((name, id(tensor)))
    if found is None or found[0] not in (None, states((tensor,))):
        found = store.facts[name, id(tensor)] = (states((tensor,)), Fact(tensor, read, read(tensor)))
    return found[1].value


def facts_of(tensor: Tensor, copy: Tensor) -> list[Fact]:
    """The facts that a sampling has read of a tensor. It takes them for those of a copy from now on."""
    store = _running.get()
    if store is None:
        return []
    found = {key: known for key, (_, known) in store.facts.items() if known.tensor is tensor}
    for (name, _), known in found.items():
        store.facts[name, id(copy)] = (None, known._replace(tensor=copy))
    return list(found.values())


def is_capturing() -> bool:
    """Return whether the current stream is recorded as a CUDA graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def states(tensors: Iterable[Tensor]) -> list[tuple[int, int]]:
    """Addresses of tensors, and their versions where torch counts these: both change if a tensor is moved or written to."""
    return [(x.data_ptr(), -1 if x.is_inference() else x._version) for x in tensors]
