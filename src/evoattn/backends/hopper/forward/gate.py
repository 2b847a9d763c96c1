"""The gate in the forward: O is multiplied by sigmoid(gate) in place, after the kernel that made it.

The product in that kernel's last step takes longer (notes/gate.md): its warpgroups wait there for the gate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cuda.bindings.driver as cuda
from cutlass import Float32, cute, range_constexpr
from cutlass.cute import arch
from torch import Tensor

from evoattn.backends.hopper.host.launch import Kernel, channels, plan, types
from evoattn.backends.hopper.host.prepare import loadable
from evoattn.backends.hopper.kernels.primitives import VECTOR, lanes, sigmoid
from evoattn.backends.hopper.kernels.schedule import place
from evoattn.core import layouts

__all__ = ["GateProduct", "plan_product"]

_THREADS = 128


class GateProduct(Kernel):
    """o, gate [b,n,h,q,c]: o <- o * sigmoid(gate).

    A thread has 8 channels of one query, and neighbours have the others: a block reads and writes whole rows, once.

    Args:
        dtype: cutlass type of o and the gate.
        channels: C.
    """

    def __init__(self, dtype: Any, channels: int):
        self.dtype, self.channels = dtype, channels
        self.lanes = lanes(channels)
        self.queries = _THREADS // self.lanes
        self.name_after(dtype, channels=channels)

    @cute.jit
    def __call__(self, o: cute.Tensor, gate: cute.Tensor, stream: cuda.CUstream):
        B, N, H, LQ, _ = o.shape
        self.kernel(o, gate).launch(
            grid=(B * N * H, (LQ + self.queries - 1) // self.queries, 1), block=(_THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, o: cute.Tensor, gate: cute.Tensor):
        tid, _, _ = arch.thread_idx()
        row, x, _ = arch.block_idx()
        h, n, b = place(row, o.shape[2], o.shape[1])
        q, part = x * self.queries + tid // self.lanes, tid % self.lanes
        if q < o.shape[3] and part < self.channels // VECTOR:
            of_o, of_gate = (cute.make_rmem_tensor(VECTOR, self.dtype) for _ in range(2))
            o_here, gate_here = (cute.local_tile(given[b, n, h, q, None], (VECTOR,), (part,)) for given in (o, gate))
            cute.autovec_copy(o_here, of_o)
            cute.autovec_copy(gate_here, of_gate)
            for i in range_constexpr(VECTOR):
                of_o[i] = (of_o[i].to(Float32) * sigmoid(of_gate[i].to(Float32))).to(self.dtype)
            cute.autovec_copy(of_o, o_here)

    def arguments(self) -> tuple[Any, ...]:
        """Stand-ins for the arguments of `__call__` when it is compiled, without the stream."""
        sizes = tuple(cute.sym_int() for _ in range(4))
        return channels(self.dtype, sizes, self.channels), channels(self.dtype, sizes, self.channels)


def plan_product(gate: Tensor, layout: str) -> Callable[[Tensor, Tensor], None]:
    """Plan the product: a function of (o, gate), for an o in the memory layout `layout`."""
    like, change = loadable(gate, name="gate")
    o = layouts.empty(gate.shape, layout, gate, "meta")
    kernel = plan(GateProduct(types[gate.dtype], gate.shape[-1]), gate.device, o, like)

    def run(o: Tensor, gate: Tensor) -> None:
        kernel(o.data_ptr(), (gate if change is None else change(gate)).data_ptr())

    return run
