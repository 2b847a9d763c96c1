"""The transition: an update of each entry by itself, through a wider hidden layer."""

from __future__ import annotations

import functools

import torch.nn.functional as F
from torch import Tensor, nn

from evoattn.dispatch.checks import check_mask
from evoattn.dispatch.distributed import is_distributed
from evoattn.nn.attention import add_residual, check_in_place, check_input
from evoattn.nn.initial import Layer, start
from evoattn.nn.project import compute_dtype_of, layer_norm, linear
from evoattn.nn.sharded import run_local
from evoattn.nn.submodules import call, has_hooks, is_linear, is_norm
from evoattn.pair import transition


class SwiGLU(Layer):
    """The first half of a SwiGLU transition, with OpenFold-3's names. The layer only calls it if its parts are not plain."""

    def __init__(self, c: int, hidden: int, bias: bool) -> None:
        super().__init__()
        self.linear_a, self.linear_b = nn.Linear(c, hidden, bias=bias), nn.Linear(c, hidden, bias=bias)

    def forward(self, y: Tensor) -> Tensor:
        return F.silu(linear(y, self.linear_a)) * linear(y, self.linear_b)

    own_forward = forward


class Transition(Layer):
    """Update each entry of a pair, MSA or single representation by itself, through a wider hidden layer.

    Parameters have the names of OpenFold-3 for "swiglu": `layer_norm`, `swiglu.linear_a` (the one that is activated),
    `swiglu.linear_b` and `linear_out`. For "relu" they have those of OpenFold: `layer_norm`, `linear_1` and `linear_2`.

    Args:
        c: channels of the representation.
        n: the layer has n c hidden channels.
        activation: "swiglu", silu(a) b of two projections (AlphaFold 3), or "relu" of one projection (AlphaFold 2).
        bias: whether the projections have biases. None: with "relu", as in OpenFold, not with "swiglu".
        residual: whether the layer returns x + update. Else it returns the update alone.

    Raises:
        ValueError: `activation` is not known.

    Example:
        >>> import torch
        >>> from evoattn.nn import Transition
        >>> layer = Transition(16, residual=True)
        >>> layer(torch.randn(1, 12, 12, 16)).shape
        torch.Size([1, 12, 12, 16])

    Source: Jumper et al. 2021, supplementary algorithms 9 and 15; Abramson et al. 2024, algorithm 11.
    """

    def __init__(
        self, c: int, n: int = 4, *, activation: str = "swiglu", bias: bool | None = None, residual: bool = False
    ) -> None:
        super().__init__()
        if activation not in ("swiglu", "relu"):
            raise ValueError(f"activation must be 'swiglu' or 'relu', got {activation!r}")
        self.c, self.n, self.activation, self.residual = c, n, activation, residual
        biased = activation == "relu" if bias is None else bias
        self.layer_norm = nn.LayerNorm(c)
        if activation == "swiglu":
            self.swiglu, self.linear_out = SwiGLU(c, n * c, biased), nn.Linear(n * c, c, bias=biased)
        else:
            self.linear_1, self.linear_2 = nn.Linear(c, n * c, bias=biased), nn.Linear(n * c, c, bias=biased)
        for projection in self._inner:
            start(projection, "he" if activation == "relu" else "lecun")
        start(self._last, "zeros")

    @property
    def _first(self) -> nn.Module:
        """The module of the hidden channels."""
        return self.linear_1 if self.activation == "relu" else self.swiglu

    @property
    def _last(self) -> nn.Linear:
        return self.linear_2 if self.activation == "relu" else self.linear_out

    @property
    def _inner(self) -> tuple[nn.Linear, ...]:
        """The projections of the hidden channels: a, then b if there is one."""
        return (self.linear_1,) if self.activation == "relu" else (self.swiglu.linear_a, self.swiglu.linear_b)

    def forward(self, x: Tensor, mask: Tensor | None = None, *, in_place: bool = False) -> Tensor:
        """Compute the update of x, or x + update with `residual=True`.

        Args:
            x: the representation, `[*, c]`. A DTensor may be split along any axes but the last.
            mask: `[*]`, 1 or True for an entry that counts. None: all do. A float mask is a factor of the update. A DTensor if
                x is one.
            in_place: whether x + update is written into x, in inference. Not for DTensors.

        Returns:
            `[*, c]` in the compute dtype, or with the residual in the dtype to which torch promotes x and the update.

        Raises:
            TypeError, ValueError: x or mask has a wrong type or shape, or x cannot be overwritten.
        """
        check_input("x", x, 1, self.c, distributed=True)
        check_mask("mask", mask, tuple(x.shape[:-1]))
        if in_place:
            check_in_place(self, "x", x, compute_dtype_of(x, self._first))
        if is_distributed(x) or is_distributed(mask):
            return run_local(self, x, mask, functools.partial(self._run, residual=self.residual, in_place=False))
        return self._run(x, mask, residual=self.residual, in_place=in_place)

    def add_to(self, x: Tensor, mask: Tensor | None, *, in_place: bool) -> Tensor:
        """x + update, whatever `residual` says, for a block of a client. The arguments are not checked."""
        if is_distributed(x):
            return run_local(self, x, mask, functools.partial(self._run, residual=True, in_place=False))
        return self._run(x, mask, residual=True, in_place=in_place)

    def _run(self, x: Tensor, mask: Tensor | None, *, residual: bool, in_place: bool) -> Tensor:
        if not self._is_plain():
            return add_residual(x, self._by_calls(x, mask), residual=residual, in_place=in_place)
        (a, *others), out = self._inner, self._last
        b = others[0] if others else None
        return transition(
            x,
            mask,
            activation=self.activation,
            norm_weight=self.layer_norm.weight,
            norm_bias=self.layer_norm.bias,
            a_weight=a.weight,
            a_bias=a.bias,
            b_weight=None if b is None else b.weight,
            b_bias=None if b is None else b.bias,
            out_weight=out.weight,
            out_bias=out.bias,
            eps=self.layer_norm.eps,
            residual=residual,
            out=x if in_place else None,
        )

    def _is_plain(self) -> bool:
        """Return whether the operator computes what the sub-modules define, and nobody has to see that one is called."""
        if self.activation == "swiglu":
            swiglu = self.swiglu
            if type(swiglu) is not SwiGLU or "forward" in swiglu.__dict__ or has_hooks(swiglu):
                return False
        plain = [is_linear(module) for module in (*self._inner, self._last)]  # not a generator, as in TriangleMultiplication
        return all(plain) and is_norm(self.layer_norm)

    def _by_calls(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """The update, with each sub-module called."""
        dtype = compute_dtype_of(x, self._first)
        y = layer_norm(x, self.layer_norm, dtype)
        hidden = F.relu(linear(y, self.linear_1)) if self.activation == "relu" else call(self.swiglu, y, dtype)
        update = linear(hidden, self._last)
        return update if mask is None else update * mask.unsqueeze(-1).to(dtype)
