"""cuDNN's attention with a bias and its gradient, for one problem: two graphs of its frontend, as a function of torch.

The graphs are built once, as the frontend means it: a call binds addresses and launches. Rows are cuDNN's batch, so a pair
bias `[1,h,q,k]` is broadcast over them and its gradient summed over them by cuDNN itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cudnn
import torch
from torch import Tensor


class Graphs:
    """The forward and the backward of one problem.

    Args:
        q: `[n,h,q,d]`, of any strides with the channels last; the gradients get the same strides.
        k, v: `[n,h,k,d]`, likewise.
        bias: `[1,h,q,k]`, in q's dtype.

    Raises:
        Exception: cuDNN has no plan for the problem; the frontend says why.
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> None:
        n, h, lq, d = q.shape
        o, lse = torch.empty_like(q), torch.empty(n, h, lq, 1, dtype=torch.float32, device=q.device)
        inputs, scale = {"q": q, "k": k, "v": v, "bias": bias}, d**-0.5

        graph = _Graph(inputs)
        outs = graph.node.sdpa(name="forward", **graph.tensors, attn_scale=scale, generate_stats=True)
        self.forward = graph.built(dict(zip(("o", "lse"), outs, strict=True)), {"o": o, "lse": lse})

        graph = _Graph(inputs | {"o": o, "lse": lse, "do": torch.empty_like(q)})
        renamed = {{"lse": "stats", "do": "dO"}.get(name, name): tensor for name, tensor in graph.tensors.items()}
        dbias = graph.node.tensor_like(bias)
        outs = graph.node.sdpa_backward(name="backward", **renamed, attn_scale=scale, dBias=dbias)
        outs = {**dict(zip(("dq", "dk", "dv"), outs, strict=True)), "dbias": dbias}
        self.backward = graph.built(outs, {"dq": q, "dk": k, "dv": v, "dbias": bias})

    def attend(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        """Attention with gradients for all four."""
        out: Tensor = _Attention.apply(self, q, k, v, bias)  # type: ignore[no-untyped-call]
        return out


class _Graph:
    """A graph of cuDNN that reads tensors like these."""

    def __init__(self, inputs: dict[str, Tensor]) -> None:
        types, self._handle = cudnn.data_type, cudnn.create_handle()
        io_type = {torch.bfloat16: types.BFLOAT16, torch.float16: types.HALF}[inputs["q"].dtype]
        self.node = cudnn.pygraph(
            handle=self._handle, io_data_type=io_type, intermediate_data_type=types.FLOAT, compute_data_type=types.FLOAT
        )
        self.tensors: dict[str, Any] = {name: self.node.tensor_like(x) for name, x in inputs.items()}

    def built(self, outs: dict[str, Any], outputs: dict[str, Tensor]) -> Callable[..., tuple[Tensor, ...]]:
        """Build it, and give a function of named tensors to outputs like these, which each call allocates."""
        for name, like in outputs.items():
            tensor = outs[name].set_output(True).set_dim(list(like.shape)).set_stride(list(like.stride()))
            if like.dtype == torch.float32:
                tensor.set_data_type(cudnn.data_type.FLOAT)
        graph, tensors = self.node, self.tensors | outs
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        graph.check_support()
        graph.build_plans()
        workspace_bytes = graph.get_workspace_size()

        def run(**inputs: Tensor) -> tuple[Tensor, ...]:
            device = inputs["q"].device
            cudnn.set_stream(handle=self._handle, stream=torch.cuda.current_stream(device).cuda_stream)
            outs = {name: torch.empty_like(like) for name, like in outputs.items()}
            workspace = torch.empty(workspace_bytes, dtype=torch.uint8, device=device)
            graph.execute({tensors[name]: x.detach() for name, x in (inputs | outs).items()}, workspace, handle=self._handle)
            return tuple(outs.values())

        return run


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graphs: Graphs, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        o, lse = graphs.forward(q=q, k=k, v=v, bias=bias)
        ctx.graphs = graphs
        ctx.save_for_backward(q, k, v, bias, o, lse)
        return o

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bias, o, lse = ctx.saved_tensors
        (do,) = cotangents
        return (None, *ctx.graphs.backward(q=q, k=k, v=v, bias=bias, o=o, lse=lse, do=do))
