"""cuDNN's attention with a bias and its gradient, for one problem: two graphs of its frontend, as a function of torch.

The graphs are built once, as the frontend means it: a call binds addresses and launches. Rows are cuDNN's batch, so a pair
bias `[1,h,q,k]` is broadcast over them and its gradient summed over them by cuDNN itself.
"""

from __future__ import annotations

from typing import Any

import cudnn
import torch
from torch import Tensor

__all__ = ["Graphs"]


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
        self._handle = cudnn.create_handle()
        n, h, lq, d = q.shape
        given = {"q": q, "k": k, "v": v, "bias": bias}
        o, lse = torch.empty_like(q), torch.empty(n, h, lq, 1, dtype=torch.float32, device=q.device)
        scale = d**-0.5

        forward = self._graph(q.dtype)
        ins = {name: forward.tensor_like(x) for name, x in given.items()}
        outs = forward.sdpa(name="forward", **ins, attn_scale=scale, generate_stats=True)
        outs = dict(zip(("o", "lse"), outs, strict=True))
        self._forward = _Built(forward, ins | outs, {"o": o, "lse": lse}, self._handle)

        backward = self._graph(q.dtype)
        given |= {"o": o, "lse": lse, "do": torch.empty_like(q)}
        ins = {name: backward.tensor_like(x) for name, x in given.items()}
        renamed = {{"lse": "stats", "do": "dO"}.get(name, name): tensor for name, tensor in ins.items()}
        dbias = backward.tensor_like(bias)
        outs = backward.sdpa_backward(name="backward", **renamed, attn_scale=scale, dBias=dbias)
        outs = {**dict(zip(("dq", "dk", "dv"), outs, strict=True)), "dbias": dbias}
        self._backward = _Built(backward, ins | outs, {"dq": q, "dk": k, "dv": v, "dbias": bias}, self._handle)

    def _graph(self, dtype: torch.dtype) -> Any:
        types = cudnn.data_type
        io_type = {torch.bfloat16: types.BFLOAT16, torch.float16: types.HALF}[dtype]
        return cudnn.pygraph(
            handle=self._handle, io_data_type=io_type, intermediate_data_type=types.FLOAT, compute_data_type=types.FLOAT
        )

    def _on_this_stream(self, device: torch.device) -> None:
        cudnn.set_stream(handle=self._handle, stream=torch.cuda.current_stream(device).cuda_stream)

    def forward(self, **given: Tensor) -> tuple[Tensor, Tensor]:
        """q, k, v and bias to o `[n,h,q,d]` and its log-sum-exp `[n,h,q,1]`."""
        self._on_this_stream(given["q"].device)
        o, lse = self._forward(given)
        return o, lse

    def backward(self, **given: Tensor) -> tuple[Tensor, ...]:
        """The same, o, lse and do to dq, dk, dv and dbias, each laid out as what it is the gradient of."""
        self._on_this_stream(given["q"].device)
        return self._backward(given)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        """Attention with gradients for all four."""
        out: Tensor = _Attention.apply(self, q, k, v, bias)  # type: ignore[no-untyped-call]
        return out


class _Built:
    """A graph with its plan, ready to run: a call allocates the outputs like `outputs`."""

    def __init__(self, graph: Any, tensors: dict[str, Any], outputs: dict[str, Tensor], handle: Any) -> None:
        for name, like in outputs.items():
            tensor = tensors[name].set_output(True).set_dim(list(like.shape)).set_stride(list(like.stride()))
            if like.dtype == torch.float32:
                tensor.set_data_type(cudnn.data_type.FLOAT)
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        graph.check_support()
        graph.build_plans()
        self._graph, self._tensors, self._outputs, self._handle = graph, tensors, outputs, handle
        self._workspace_bytes = graph.get_workspace_size()

    def __call__(self, given: dict[str, Tensor]) -> tuple[Tensor, ...]:
        made = {name: torch.empty_like(like) for name, like in self._outputs.items()}
        first = next(iter(made.values()))
        workspace = torch.empty(self._workspace_bytes, dtype=torch.uint8, device=first.device)
        buffers = {self._tensors[name]: x.detach() for name, x in (given | made).items()}
        self._graph.execute(buffers, workspace, handle=self._handle)
        return tuple(made.values())


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
