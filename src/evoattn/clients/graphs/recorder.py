"""Recording what a function does on a GPU, to do it again with one launch."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree

from evoattn.clients.graphs.trees import NotCaptured
from evoattn.core import guards, keeping
from evoattn.core.numerics import float32_products

Recorded = TypeVar("Recorded")


@dataclasses.dataclass
class Recording:
    """A recorded call: a replay, on the current stream, writes the tensors of the result anew while it `is_valid`.

    Args:
        begin: makes what replays read and do not make: casts of weights, and what else a sampling keeps.
        kept: that, so that its memory stays.
        size: bytes of memory.
    """

    replay: Callable[[], object]
    result: Any
    is_valid: Callable[[], bool] = lambda: True
    begin: Callable[[], object] = lambda: None
    kept: object = None
    size: int = 0


class Shared:
    """Memory that all recordings of backwards on one stream share: each needs much, and only until its backward has run.

    Attributes:
        turn: of the forward whose intermediate results are there; 0: none.
        turns: that were given.
        lock: is held while a graph is replayed.
    """

    def __init__(self) -> None:
        self.turn = self.turns = 0
        self.lock = threading.Lock()
        self._pool: Any = None
        self._graphs = weakref.WeakSet[Any]()

    def pool(self, graphs: Sequence[Any], new: Callable[[], Any]) -> Any:
        """The pool for more graphs. torch gives up a pool with the last graph in it, and then takes its handle no more."""
        if not self._graphs:
            self._pool = new()
        self._graphs.update(graphs)
        return self._pool

    def leave_pool(self) -> None:
        """Take another pool from now on: a capture that was broken off may have left this one unusable."""
        self._graphs = weakref.WeakSet()

    def forget(self) -> None:
        """Have a backward that is still to come replay its forward: what that left is overwritten."""
        with self.lock:
            self.turn = 0


def modes(kind: str) -> tuple[Any, ...]:
    """The state of this thread, and of the process, that decides what torch computes on a type of device."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled(kind),
        torch.get_autocast_dtype(kind),
        torch.is_autocast_cache_enabled(),
        float32_products(),
        keeping.keeps(),
        keeping.precision(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_default_dtype(),
    )


class Recorder:
    """Records CUDA graphs, each in a memory pool of its own, so that graphs can run and be dropped independently.

    Tests have one with the same methods that needs no GPU.
    """

    kind = "cuda"
    """The type of device that it records on."""
    _capture_lock = threading.Lock()
    """Held while a graph is recorded: torch records one at a time in a process."""
    _shared: ClassVar[dict[torch.cuda.Stream, Shared]] = {}
    _broken = 0
    """Recordings of the process that failed. Graphs from before draw from a generator's state that is no longer its own."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def state(self, device: torch.device) -> tuple[Any, ...]:
        """A key of everything but arguments and weights that selects kernels: streams, precisions, autocast.

        It has the current stream, since two streams must not share the tensors that a graph reads and writes.
        """
        matmul = torch.backends.cuda.matmul
        return (
            *modes("cuda"),
            torch.cuda.current_device(),
            torch.cuda.current_stream(device),
            matmul.allow_bf16_reduced_precision_reduction,
            matmul.allow_fp16_reduced_precision_reduction,
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.mem_efficient_sdp_enabled(),
            torch.backends.cuda.math_sdp_enabled(),
            torch.backends.cuda.cudnn_sdp_enabled(),
        )

    def is_recording(self) -> bool:
        """Return whether somebody records the current stream."""
        return torch.cuda.is_current_stream_capturing()

    def seconds(self, device: torch.device) -> float:
        """The time, once the device has done what it was told."""
        torch.cuda.current_stream(device).synchronize()
        return time.perf_counter()

    def random_state(self, device: torch.device) -> Tensor:
        return torch.cuda.get_rng_state(device)

    def set_random_state(self, device: torch.device, state: Tensor) -> None:
        torch.cuda.set_rng_state(state, device)

    def record(
        self,
        run: Callable[[], Any],
        device: torch.device,
        *,
        draws: bool = False,
        once: bool = False,
        anew: bool = False,
        looks: bool = True,
    ) -> Recording:
        """Record a function, on a stream of the recorder's, or raise NotCaptured if that is known to be impossible.

        If it `draws`, each replay draws new random numbers. once: whether the recording makes only at its beginning what a
        sampling keeps, and autocast's casts of weights. Weights must not change until it begins again: a write through `.data`
        changes neither address nor version, so nobody would notice. anew: whether it makes all of that, and reads nothing that
        the running sampling has. looks: whether to look first if a recording would do the same, which takes longer than
        the recording.
        """
        return self._beside(run if looks else None, device, draws, lambda side: self._record(run, side, once, anew))

    def shared(self, device: torch.device) -> Shared:
        """The memory of recordings of backwards on the current stream."""
        return self._shared.setdefault(torch.cuda.current_stream(device), Shared())

    def record_both(
        self, forward: Callable[[], Any], backward: Callable[[Any], Any], device: torch.device
    ) -> tuple[Recording, Recording]:
        """Record a forward that autograd sees, and a function of its result that computes gradients, in `shared` memory.

        The second recording replays what the first one left last. A forward may draw random numbers.
        """

        def run() -> Any:
            return backward(forward())

        shared = self.shared(device)
        return self._beside(run, device, True, lambda side: self._record_both(forward, backward, side, shared))

    def _beside(
        self, run: Callable[[], Any] | None, device: torch.device, draws: bool, record: Callable[[torch.cuda.Stream], Recorded]
    ) -> Recorded:
        """Look at what is to be recorded, if that is given, then record on a stream of the recorder's."""
        current = torch.cuda.current_stream(device)
        side = self._streams.get(device)
        if side is None:
            side = self._streams[device] = torch.cuda.Stream(device)
        before = self.random_state(device)
        try:
            if run is not None:
                scout(run, device, draws)
            side.wait_stream(current)
            with torch.cuda.stream(side), self._capture_lock:
                return record(side)
        finally:
            self.set_random_state(device, before)
            current.wait_stream(side)

    def _record_both(
        self, forward: Callable[[], Any], backward: Callable[[Any], Any], side: torch.cuda.Stream, shared: Shared
    ) -> tuple[Recording, Recording]:
        """Two graphs with one pool: the backward finds there what autograd saved. It casts nothing, as outside of autocast."""
        graphs, is_valid = (torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()), self._validity()
        pool = shared.pool(graphs, torch.cuda.graph_pool_handle)
        _make_room(side.device)
        before = _reserved(side.device)
        try:
            with _cleared():
                with _autocast(cached=False), _capturing(graphs[0], pool, side):
                    result = forward()
                with torch.autocast("cuda", enabled=False), _capturing(graphs[1], pool, side):
                    gradients = backward(result)
        except BaseException:
            shared.leave_pool()
            raise
        first = Recording(graphs[0].replay, result, is_valid, size=_reserved(side.device) - before)
        return first, Recording(graphs[1].replay, gradients, is_valid)

    @staticmethod
    def _validity() -> Callable[[], bool]:
        """A function that tells whether no recording has failed since."""
        broken = Recorder._broken
        return lambda: Recorder._broken == broken

    def _record(self, run: Callable[[], Any], side: torch.cuda.Stream, once: bool, anew: bool) -> Recording:
        """A graph, and one that makes `once` what the first one reads.

        Autocast keeps the casts of weights until the caller leaves the outermost `torch.autocast`, and a sampling what its
        layers made until it ends. A graph that read them would then read memory that others have. So the whole call is
        recorded twice, into one pool: the first recording makes them, the second one finds them and does not repeat them.
        Nobody allocates from the pool after that, so they stay where they are.

        The same holds for what cuBLAS works in: torch makes it anew in the pool, where nobody frees it under the graph.
        """
        pool, graph, is_valid = torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph(), self._validity()
        _make_room(side.device)
        before = _reserved(side.device)
        with _cleared(), _autocast(cached=once):
            if not once:
                with _capturing(graph, pool, side):
                    result = run()
                return Recording(graph.replay, result, is_valid, size=_reserved(side.device) - before)
            begin = torch.cuda.CUDAGraph()
            with keeping.made_by_a_graph(anew) as kept, _capturing(begin, pool, side):
                run()
            begin.replay()
            with _capturing(graph, pool, side):
                result = run()
            return Recording(graph.replay, result, is_valid, begin.replay, kept, _reserved(side.device) - before)


def _autocast(*, cached: bool) -> torch.autocast:
    """Autocast as it is, with casts of weights that are `cached` inside or made at each use."""
    return torch.autocast("cuda", torch.get_autocast_dtype("cuda"), torch.is_autocast_enabled("cuda"), cache_enabled=cached)


_reserved = torch.cuda.memory_reserved
"""Bytes that torch has taken from a device, those of the pools of graphs too."""


def _make_room(device: torch.device) -> None:
    """Have torch give back the memory that it keeps for later, if it could take less from the device than it has already.

    While it records it takes memory for the pool and gives none back. `torch.cuda.graph` gives all back at each capture. The
    calls after that then wait for the device at each tensor.
    """
    free, total = torch.cuda.mem_get_info(device)
    allowed = torch.cuda.get_per_process_memory_fraction(device) * total - _reserved(device)
    if min(free, allowed) < _reserved(device):
        torch.cuda.empty_cache()


@contextlib.contextmanager
def _cleared() -> Iterator[None]:
    """Nothing in autocast's cache and no workspace of cuBLAS, before and after."""
    torch._C._cuda_clearCublasWorkspaces()
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()
        torch.clear_autocast_cache()


@contextlib.contextmanager
def _capturing(graph: torch.cuda.CUDAGraph, pool: Any, side: torch.cuda.Stream) -> Iterator[None]:
    """Record what the current stream, `side`, is told into a graph. If that fails, torch is as it was before."""
    generator = torch.cuda.default_generators[side.device.index]
    before, collects = generator.clone_state(), gc.isenabled()
    gc.disable()  # what it frees may be a kernel or a graph, and that breaks the capture off
    try:
        # Threads that load data may allocate memory meanwhile: "thread_local" lets them.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        yield
        graph.capture_end()
    except BaseException:
        # A capture that is broken off leaves the generator waiting for its end, so that the next random number raises, and
        # the allocator routing memory to the pool. torch does not mend that.
        with contextlib.suppress(RuntimeError):
            graph.capture_end()
        with contextlib.suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(side.device.index, pool)
        with contextlib.suppress(RuntimeError):
            generator.graphsafe_set_state(before)
        Recorder._broken += 1
        raise
    finally:
        if collects:
            gc.enable()


def scout(run: Callable[[], Any], device: torch.device, draws: bool = False) -> None:
    """Run a function, and raise NotCaptured if a recording of it would not do the same.

    A capture that fails costs more than a look: it can leave torch's allocator and generators in a state of their own. A
    function that `draws` may draw random numbers from the device's own generator.
    """
    generator = torch.cuda.default_generators[device.index] if device.type == "cuda" else None
    before = None if generator is None else generator.get_state()
    with _Scout(device, draws):
        run()
    if not draws and generator is not None and before is not None and not torch.equal(generator.get_state(), before):
        generator.set_state(before)  # an operation of a client's own, which does not say that it draws
        raise NotCaptured("it draws random numbers")


_META = torch.device("meta")
_BY_VALUE = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class _Scout(guards.Onlooker):
    """Raises at the first operation that a graph cannot repeat. Calls launch the kernels that the recording launches.

    A number that code writes into a tensor, as `x[0] = 1` does, comes as a tensor on the CPU. The kernel gets it by value, so a
    graph repeats it.
    """

    def __init__(self, device: torch.device, draws: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device, self._draws = device, draws
        self._numbers: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self:  # in inference mode nothing has taken apart what consists of operations, such as a dropout that is off
            result = func.decompose(*args, **(kwargs or {}))
        if result is not NotImplemented:
            return result
        drawn = torch.Tag.nondeterministic_seeded in func.tags and not is_off(func, args)
        leaves = _pytree.arg_tree_leaves(*args, **(kwargs or {}))
        if drawn and (not self._draws or any(isinstance(x, torch.Generator) for x in leaves)):
            raise NotCaptured(f"it draws random numbers ({func})")
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        indexed = func.overloadpacket.__name__.startswith(("index", "_index", "_unsafe_index"))
        if indexed:
            by_value = any(x.dtype in (torch.bool, torch.uint8) for x in tensors[1:])
        else:
            by_value = any(tag in func.tags for tag in _BY_VALUE)
        if by_value:
            raise NotCaptured(f"its operations depend on values ({func})")
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.lift_fresh.default and result.ndim == 0:
            self._numbers.append(result)
            return result
        if func is torch.ops.aten.fill_.Tensor and any(args[1] is x for x in self._numbers):
            tensors = tensors[:1]
        # What an attention returns of its random numbers, which it did not draw, may lie on the CPU.
        results = [] if "dropout_p" in _names(func) else _pytree.tree_leaves(result)
        devices = {x.device for x in (*tensors, *results) if isinstance(x, Tensor)}
        if not devices <= {self._device, _META}:  # plans are made with tensors without memory, which have no values
            raise NotCaptured(f"it computes on another device ({func})")
        return result


def is_off(func: Any, args: tuple[Any, ...]) -> bool:
    """Return whether an attention has dropout, and it is 0: torch counts such among what draws random numbers."""
    names = _names(func)
    if "dropout_p" not in names:
        return False
    at = names.index("dropout_p")
    return at >= len(args) or args[at] == 0


def _names(func: Any) -> list[str]:
    return [x.name for x in func._schema.arguments]
