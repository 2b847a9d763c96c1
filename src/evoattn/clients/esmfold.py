"""ESMFold in transformers: triangle attention and the attention of the sequence, both inline in a `forward`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from evoattn.clients import graphs
from evoattn.clients.calls import projected
from evoattn.clients.layers import FEW, known_sites
from evoattn.clients.site import Client, Count, Site
from evoattn.compat.openfold import attention

_MODULE = "transformers.models.esm.modeling_esmfold"


def _triangle(original: Any, count: Count) -> Any:
    def forward(self: Any, q_x: Tensor, kv_x: Tensor, biases: list[Tensor] | None = None, *args: Any, **kwargs: Any) -> Tensor:
        if args or kwargs.get("use_flash"):
            count.count_passed_on("use_flash, or options by position")
            return original(self, q_x, kv_x, biases, *args, **kwargs)  # type: ignore[no-any-return]
        count.count_replaced()
        return projected(self, q_x, kv_x, biases)

    return forward


def _sequence(original: Any, count: Count) -> Any:
    def forward(
        self: Any, x: Tensor, mask: Tensor | None = None, bias: Tensor | None = None, indices: Any = None
    ) -> tuple[Tensor, None]:
        """The maps of the attention, which the original returns second, are None: nobody in the model reads them."""
        count.count_replaced()
        q, k, v = self.proj(x).view(*x.shape[:2], self.num_heads, -1).permute(0, 2, 1, 3).chunk(3, dim=-1)
        biases = [None if bias is None else bias.permute(0, 3, 1, 2)]
        if mask is not None:
            nothing = torch.zeros((), dtype=q.dtype, device=q.device)
            biases.append(torch.where(mask[:, None, None] == 0, -torch.inf, nothing))
        # Not "mean": masked with -inf, the original's answer for a sequence without a residue is NaN.
        o = attention(self.rescale_factor * q, k, v, biases, empty_rows="native")
        y = o.transpose(1, 2).flatten(2)
        if self.gated:
            y = self.g_proj(x).sigmoid() * y
        return self.o_proj(y), None

    return forward


CLIENTS = {
    "esmfold": Client(
        "esmfold",
        "transformers",
        (
            Site(_MODULE, "EsmFoldAttention.forward", _triangle),
            Site(_MODULE, "EsmFoldSelfAttention.forward", _sequence),
            Site(_MODULE, "EsmFoldAttention._prep_qkv"),
            Site(_MODULE, "EsmFoldAttention._wrap_up"),
            Site(_MODULE, "EsmFoldTriangleAttention.forward"),
            Site(_MODULE, "EsmFoldTriangularSelfAttentionBlock.forward"),
        ),
        layers=known_sites(_MODULE, least_trained=FEW),
        steps=graphs.blocks(f"{_MODULE}:EsmFoldTriangularSelfAttentionBlock"),
    )
}
