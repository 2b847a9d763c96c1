"""The facts that a backward is planned from: the wishes of the call, and the variants of the kernels that serve it."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from evoattn.backends.hopper.backward.common import STEP
from evoattn.backends.hopper.backward.pair_gradient import PairGradient
from evoattn.backends.hopper.backward.variants import SHARED, key_variant, one_kernel, query_variant, skips_rows, timed
from evoattn.backends.hopper.host.clusters import resident_clusters
from evoattn.backends.hopper.host.head_groups import HeadGroups
from evoattn.backends.hopper.host.prepare import fold
from evoattn.backends.hopper.kernels.tile_sizes import ROWS
from evoattn.core import devices

__all__ = ["Facts", "fold_for_backward"]


@dataclasses.dataclass(frozen=True)
class Facts:
    """Facts that all stages of a backward share.

    Args:
        dtype: of q, k and v.
        device: where the call runs.
        d: channels.
        sizes: b, n, h, q, k.
        needs: which of q, k, v, mask bias and pair bias want a gradient.
        bias: dtype of the pair bias, or None.
        deterministic: whether sums are in a fixed order.
        factor, unit: the scale, as `fold` takes it apart.
        processors: of the device.
        fused: the tiles of the one kernel that finds all gradients, if it does.
        skips: whether the kernels leave out rows that a mask switches off.
        query, key: the variants of the kernels of the queries and of the keys; {} where that does not run.
        together: the heads that are launched together.
        clusters, key_blocks: how many clusters of the kernel of the queries run, and blocks of the other.
        gradient: how d(pair bias) is found, if it is wanted.
        gated: whether a gate multiplies O, and its pass comes first.
    """

    dtype: torch.dtype
    device: torch.device
    d: int
    sizes: tuple[int, int, int, int, int]
    needs: tuple[bool, ...]
    bias: torch.dtype | None
    deterministic: bool
    factor: float
    unit: float
    processors: int
    fused: int | None
    skips: bool
    query: dict[str, Any]
    key: dict[str, Any]
    together: HeadGroups
    clusters: int
    key_blocks: int
    gradient: PairGradient | None
    gated: bool

    @classmethod
    def of(
        cls,
        q: Tensor,
        k: Tensor,
        mask: Tensor | None,
        pair_bias: Tensor | None,
        *,
        scale: float,
        needs: tuple[bool, ...],
        deterministic: bool,
        gated: bool,
    ) -> Facts:
        """Of tensors as a backend's `plan_backward` gets them."""
        (b, n, h, lq, d), lk = q.shape, k.shape[3]
        sizes, pair = (b, n, h, lq, lk), pair_bias is not None
        exact = pair_bias is not None and pair_bias.dtype == torch.float32
        factor, unit = fold_for_backward(scale, q.dtype, pair=pair)
        processors = devices.processors(q.device)
        fused = one_kernel(needs, pair, d, sizes, processors)
        skips = not fused and skips_rows(mask is not None, needs, pair, d, sizes, exact=exact)
        first, second = _first(needs), _second(needs)
        query = (query_variant(d, lk, pair) if first and not fused else None) or {}
        key = key_variant(d, lq, pair, skips, exact=exact)

        panels, key_panels = -(-lq // ROWS), -(-lk // ROWS)
        together = HeadGroups.of(q, pair_bias if second and key["ring"] else None, key_panels * n, processors)
        heads = together.b * together.h
        cluster = query.get("cluster", 1)
        at_once = processors if cluster == 1 else resident_clusters(cluster, SHARED, q.device)
        idle = second and key["streams"] + bool(key["ring"]) < 4  # a warp of the kernel of the keys
        gradient = None if pair_bias is None or not needs[4] else PairGradient.of(pair_bias, sizes, deterministic, idle)
        return cls(
            dtype=q.dtype,
            device=q.device,
            d=d,
            sizes=sizes,
            needs=needs,
            bias=None if pair_bias is None else pair_bias.dtype,
            deterministic=deterministic,
            factor=factor,
            unit=unit,
            processors=processors,
            fused=fused,
            skips=skips,
            query=query,
            key=key,
            together=together,
            clusters=min(at_once, heads * panels * n),
            key_blocks=min(processors, heads * key_panels * n),
            gradient=gradient,
            gated=gated,
        )

    @property
    def pair(self) -> bool:
        """True if there is a pair bias."""
        return self.bias is not None

    @property
    def first(self) -> bool:
        """True if a gradient is wanted that the kernel of the queries finds."""
        return _first(self.needs)

    @property
    def second(self) -> bool:
        """The same of the kernel of the keys."""
        return _second(self.needs)

    @property
    def partial(self) -> bool:
        """True if blocks leave their parts of d(pair bias) for `PanelSum` to add up."""
        return self.gradient is not None and self.deterministic

    @property
    def added(self) -> Tensor | None:
        """The layout of the memory that blocks add their parts of d(pair bias) to, if they do."""
        return None if self.gradient is None or self.partial else self.gradient.sums

    @property
    def panels(self) -> int:
        """Panels of 64 queries of a (b, h)."""
        return -(-self.sizes[3] // ROWS)

    @property
    def key_panels(self) -> int:
        """Panels of 64 keys of a (b, h)."""
        return -(-self.sizes[4] // ROWS)

    @property
    def heads(self) -> int:
        """The number of (b, h) that are launched together."""
        return self.together.b * self.together.h

    @property
    def query_timed(self) -> bool:
        """True if the kernel of the queries counts the time in which a block changes to another panel."""
        return timed(self.heads * self.panels, self.sizes[1], self.clusters)

    @property
    def key_timed(self) -> bool:
        """The same of the kernel of the keys."""
        return timed(self.heads * self.key_panels, self.sizes[1], self.key_blocks)


def fold_for_backward(scale: float, dtype: torch.dtype, *, pair: bool) -> tuple[float, float]:
    """The factor that goes into q and the scale that the kernels take, as `fold` finds them.

    The kernel of the keys takes lse / unit in float16, up to STEP times its largest; with a pair bias lse goes to 65,504.
    """
    return fold(scale, 2.0 / STEP) if dtype == torch.float16 and pair else fold(scale)


def _first(needs: tuple[bool, ...]) -> bool:
    return needs[0] or needs[4]


def _second(needs: tuple[bool, ...]) -> bool:
    return needs[1] or needs[2] or needs[3]
