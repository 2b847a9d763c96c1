"""AlphaFold 3's diffusion transformer: attention and transition under a condition, and the stack of both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evoattn.dispatch.axes import fits
from evoattn.dispatch.checks import check_mask
from evoattn.nn import diffusion_steps
from evoattn.nn.attention import add_residual, check_input
from evoattn.nn.initial import Layer, start
from evoattn.nn.pair_bias import AdaLN, AttentionPairBias, check_pairs
from evoattn.nn.project import linear, project
from evoattn.nn.submodules import call, may_skip
from evoattn.nn.transition import SwiGLU

ToKeys = Callable[[Tensor], Tensor]
"""Picks the keys `[*, K, C]` of each window of queries `[*, Q, C]`, with zeros where there is none."""


class ConditionedTransition(Layer):
    """Update each entry of a by itself, through a wider hidden layer, under a condition s.

        y = AdaLN(a, s)
        update = sigmoid(linear_g(s)) * linear_out(silu(linear_a(y)) * linear_b(y))

    Parameters have OpenFold-3's names: `layer_norm` (the adaptive norm), `swiglu.linear_a` (the one that is activated),
    `swiglu.linear_b`, `linear_out`, and the gate `linear_g`.

    Args:
        c_a: channels of a.
        c_s: channels of s.
        n: the layer has n c_a hidden channels.
        residual: whether the layer returns a + update. Else it returns the update alone.

    Example:
        >>> import torch
        >>> from evoattn.nn import ConditionedTransition
        >>> ConditionedTransition(16, 12)(torch.randn(2, 5, 16), torch.randn(2, 5, 12)).shape
        torch.Size([2, 5, 16])

    Source: Abramson et al. 2024, algorithm 25.
    """

    def __init__(self, c_a: int, c_s: int, n: int = 2, *, residual: bool = False) -> None:
        super().__init__()
        self.c_a, self.c_s, self.residual = c_a, c_s, residual
        self.layer_norm = AdaLN(c_a, c_s)
        self._make_hidden(c_a, n * c_a)
        self.linear_g, self.linear_out = nn.Linear(c_s, c_a), nn.Linear(n * c_a, c_a, bias=False)
        start(self.linear_g, "zeros", bias=-2.0)

    def _make_hidden(self, c: int, hidden: int) -> None:
        self.swiglu = SwiGLU(c, hidden, bias=False)

    def forward(self, a: Tensor, s: Tensor, mask: Tensor | None = None) -> Tensor:
        """Compute the update of a, or a + update with `residual=True`.

        Args:
            a: `[*, c_a]`.
            s: the condition, `[*, c_s]`. An axis along which it is shared has size 1.
            mask: `[*]`, a factor of the update. None: 1.

        Returns:
            `[*, c_a]` in the compute dtype, or with the residual in the dtype to which torch promotes a and the update.

        Raises:
            TypeError, ValueError: a tensor has a wrong type or shape.
        """
        check_input("a", a, 1, self.c_a)
        check_condition(s, a, self.c_s)
        check_mask("mask", mask, tuple(a.shape[:-1]))
        update = linear(self._hidden(self.layer_norm(a, s)), self.linear_out)
        update = torch.sigmoid(linear(s.to(update.dtype), self.linear_g)) * update
        update = update if mask is None else update * mask.unsqueeze(-1).to(update.dtype)
        return add_residual(a, update, residual=self.residual)

    own_forward = forward

    def _hidden(self, y: Tensor) -> Tensor:
        if not may_skip(self.swiglu, SwiGLU):
            return call(self.swiglu, y, y.dtype)
        a, b = project(y, None, self.inner)
        return F.silu(a) * b

    @property
    def inner(self) -> tuple[nn.Linear, ...]:
        """The projections of the hidden channels."""
        return self.swiglu.linear_a, self.swiglu.linear_b

    def hidden_weights(self) -> list[Tensor]:
        """The weights of the factors of the hidden channels `[n c_a, c_a]`. The first is activated."""
        return [module.weight for module in self.inner]


class ThreefoldConditionedTransition(ConditionedTransition):
    """The same with three factors, silu(a) * b * c. `linear_ba` has the rows of b, then those of a. Boltz has such layers."""

    def _make_hidden(self, c: int, hidden: int) -> None:
        self.linear_ba, self.linear_c = nn.Linear(c, 2 * hidden, bias=False), nn.Linear(c, hidden, bias=False)

    def _hidden(self, y: Tensor) -> Tensor:
        ba, c = project(y, None, self.inner)
        b, a = ba.chunk(2, -1)
        return F.silu(a) * b * c

    @property
    def inner(self) -> tuple[nn.Linear, ...]:
        """The projections of the hidden channels."""
        return self.linear_ba, self.linear_c

    def hidden_weights(self) -> list[Tensor]:
        """The weights of the factors of the hidden channels. The first is activated."""
        b, a = self.linear_ba.weight.chunk(2)
        return [a, b, self.linear_c.weight]


class DiffusionTransformerBlock(Layer):
    """One block of the diffusion transformer: `attention_pair_bias`, then `conditioned_transition`, each with its residual.

    Args:
        c_a, c_s, c_z, c_hidden, no_heads, inf: as in `AttentionPairBias`.
        n: the transition has n c_a hidden channels.
        parallel: whether the transition takes the a that the attention takes, as RosettaFold-3 has it. Else it takes the
            updated a, as in all other public programs.

    Source: Abramson et al. 2024, algorithm 23, which is parallel.
    """

    def __init__(
        self,
        c_a: int,
        c_s: int,
        c_z: int,
        c_hidden: int,
        no_heads: int,
        n: int = 2,
        inf: float = 1e9,
        *,
        parallel: bool = False,
    ) -> None:
        super().__init__()
        self.parallel = parallel
        self.attention_pair_bias = AttentionPairBias(c_a, c_z, c_hidden, no_heads, c_s, inf, residual=True)
        self.conditioned_transition = ConditionedTransition(c_a, c_s, n, residual=not parallel)

    def forward(
        self,
        a: Tensor,
        s: Tensor,
        mask: Tensor | None = None,
        *,
        pair_bias: Tensor,
        to_keys: ToKeys | None = None,
        transition_mask: Tensor | None = None,
    ) -> Tensor:
        """Compute the updated a. Arguments are as for `DiffusionTransformer`; pair_bias is that of this block."""
        updated: Tensor = self.attention_pair_bias(a, None, s, mask, pair_bias=pair_bias, to_keys=to_keys)
        if self.parallel:
            return updated + self.conditioned_transition(a, s, transition_mask)  # type: ignore[no-any-return]
        return self.conditioned_transition(updated, s, transition_mask)  # type: ignore[no-any-return]

    own_forward = forward


class DiffusionTransformer(Layer):
    """AlphaFold 3's diffusion transformer, of tokens or of windows of atoms.

    Parameters have OpenFold-3's names: `layer_norm_z`, and `blocks`, each with `attention_pair_bias` and
    `conditioned_transition`.

    Inside `evoattn.nn.sampling()`, on a GPU and without gradients, float32 is computed by fused kernels, whose products are no
    further from float64 than cuBLAS' (`evoattn.pair.linear`). With TF32 in `torch.backends.cuda.matmul`, or with
    `sampling("tf32")`, they are those of TF32. With `sampling("bf16")` the attention is one of bfloat16 too. Whatever has to be
    seen, such as hooks, and all other calls are computed by the layers.

    Args:
        c_a: channels of a.
        c_s: channels of the condition s.
        c_z: channels of the pair representation.
        c_hidden: channels of a head.
        no_heads: heads H.
        no_blocks: blocks.
        n: transitions have n c_a hidden channels.
        inf: is subtracted from the scores of a masked key.
        parallel: as in RosettaFold-3, the transition of a block takes the a that its attention takes, not the updated one.

    Example:
        >>> import torch
        >>> from evoattn.nn import DiffusionTransformer
        >>> transformer = DiffusionTransformer(c_a=16, c_s=12, c_z=8, c_hidden=8, no_heads=2, no_blocks=3)
        >>> a, s, z = torch.randn(1, 5, 10, 16), torch.randn(1, 1, 10, 12), torch.randn(1, 1, 10, 10, 8)  # 5 samples
        >>> transformer(a, s, z).shape
        torch.Size([1, 5, 10, 16])

    Source: Abramson et al. 2024, algorithm 23.
    """

    def __init__(
        self,
        c_a: int,
        c_s: int,
        c_z: int,
        c_hidden: int,
        no_heads: int,
        no_blocks: int,
        n: int = 2,
        inf: float = 1e9,
        *,
        parallel: bool = False,
    ) -> None:
        super().__init__()
        self.c_a, self.c_s, self.c_z, self.no_heads = c_a, c_s, c_z, no_heads
        self.layer_norm_z: nn.Module | None = nn.LayerNorm(c_z, bias=False)
        block = (c_a, c_s, c_z, c_hidden, no_heads, n, inf)
        self.blocks: Any = nn.ModuleList(DiffusionTransformerBlock(*block, parallel=parallel) for _ in range(no_blocks))

    def forward(
        self,
        a: Tensor,
        s: Tensor,
        z: Tensor | None = None,
        mask: Tensor | None = None,
        *,
        pair_bias: Tensor | None = None,
        to_keys: ToKeys | None = None,
        transition_mask: Tensor | None = None,
    ) -> Tensor:
        """Compute the updated a.

        Args:
            a: `[*, Q, c_a]`.
            s: the condition, `[*, Q, c_s]`. An axis along which samples share it has size 1.
            z: the pair representation, `[*, Q, K, c_z]`. An axis along which samples share it has size 1, and is never
                expanded. None if `pair_bias` is given.
            mask: `[*, K]`, 1 or True for a key that is attended. None: all are.
            pair_bias: what `self.pair_bias(z)` returned, `[no_blocks, *, H, Q, K]`, for calls that share z, such as the steps
                of a diffusion.
            to_keys: picks the keys `[*, K, c]` of each window of a tensor `[*, Q, c]`, with zeros where there is none. None:
                keys are the queries.
            transition_mask: `[*, Q]`, a factor of the updates of the transitions. None: 1.

        Returns:
            `[*, Q, c_a]` in the dtype to which torch promotes a and the updates.

        Raises:
            TypeError, ValueError: a tensor has a wrong type or shape, or arguments exclude each other.
        """
        self._check(a, s, z, mask, pair_bias, to_keys, transition_mask)
        bias = self.pair_bias(z) if z is not None else pair_bias
        fused = diffusion_steps.prepared(self.blocks, a, s, bias, mask, transition_mask)
        if fused is not None:
            bias = fused.bias(bias, diffusion_steps.in_precision)  # type: ignore[arg-type]
            return diffusion_steps.run(fused, a, s, bias, mask, to_keys, transition_mask)
        for block, block_bias in zip(self.blocks, bias.unbind(0), strict=True):  # type: ignore[union-attr]
            a = block(a, s, mask, pair_bias=block_bias, to_keys=to_keys, transition_mask=transition_mask)
        return a

    def pair_bias(self, z: Tensor) -> Tensor:
        """Compute the pair biases of all blocks, `[no_blocks, *, H, Q, K]`, of z `[*, Q, K, c_z]`."""
        check_input("z", z, 3, self.c_z)
        projections = [block.attention_pair_bias.linear_z for block in self.blocks]
        return torch.stack([x.movedim(-1, -3) for x in project(z, self.layer_norm_z, projections)])

    def _check(
        self,
        a: Tensor,
        s: Tensor,
        z: Tensor | None,
        mask: Tensor | None,
        pair_bias: Tensor | None,
        to_keys: ToKeys | None,
        transition_mask: Tensor | None,
    ) -> None:
        check_input("a", a, 2, self.c_a)
        check_condition(s, a, self.c_s)
        keys = a.shape[-2] if to_keys is None else None
        keys = check_pairs(z, pair_bias, a, self.c_z, self.no_heads, keys, blocks=(len(self.blocks),))
        check_mask("mask", mask, (*a.shape[:-2], keys))
        check_mask("transition_mask", transition_mask, tuple(a.shape[:-1]))


def check_condition(s: Tensor, a: Tensor, c_s: int) -> None:
    """Raise TypeError or ValueError unless s is `[*, c_s]` and broadcasts to the rows of a."""
    check_input("s", s, 1, c_s)
    if s.ndim != a.ndim or not fits(tuple(s.shape[:-1]), tuple(a.shape[:-1])):
        raise ValueError(f"s must broadcast to {[*a.shape[:-1], c_s]}, with as many axes, got shape {list(s.shape)}")
