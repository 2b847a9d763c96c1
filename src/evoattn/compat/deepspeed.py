"""DeepSpeed's `DS4Sci_EvoformerAttention`, by the same name and with the same arguments.

    from evoattn.compat.deepspeed import DS4Sci_EvoformerAttention

Beyond the original: any length from 0 up (not only above 16), any number of channels (not only up to 64), any dtype that
evoattn takes, biases of any shape that broadcasts, any leading axes, CPU as well as GPU, and the caller's list is left as it
was.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from evoattn.api import evoformer_attention
from evoattn.dispatch.checks import check_tensors
from evoattn.empty_rows.means import EmptyRows, check_empty_rows, with_means

__all__ = ["DS4Sci_EvoformerAttention"]


def DS4Sci_EvoformerAttention(  # noqa: N802
    Q: Tensor,  # noqa: N803
    K: Tensor,  # noqa: N803
    V: Tensor,  # noqa: N803
    biases: Sequence[Tensor | None],
    *,
    empty_rows: EmptyRows = "mean",
) -> Tensor:
    """Evoformer attention as DeepSpeed4Science calls it.

    Args:
        Q: `[B, N, Lq, H, D]`, already projected; it is scaled by `D ** -0.5` here.
        K: `[B, N, Lk, H, D]`.
        V: `[B, N, Lk, H, C]`.
        biases: at most two, either may be None: first `[B, N, 1, 1, Lk]`, added for each key; second
            `[B, 1, H, Lq, Lk]`, added for each pair. Anything that broadcasts to these is welcome. Gradients
            flow to both.
        empty_rows: "mean" is what the original computes for a row that the first bias masks at every key, with -1e9 or so: the
            mean of V, since float32 scores are swallowed. "native" is the rule of `evoformer_attention`, which keeps them;
            see `evoattn.compat.openfold.attention`.

    Returns:
        `[B, N, Lq, H, C]` in Q's dtype.

    Raises:
        TypeError, ValueError: as `evoattn.evoformer_attention`; also if there are more than two biases.

    Example:
        >>> import torch
        >>> q = torch.randn(1, 8, 12, 4, 32)
        >>> DS4Sci_EvoformerAttention(q, q, q, [None, torch.randn(1, 1, 4, 12, 12)]).shape
        torch.Size([1, 8, 12, 4, 32])
    """
    if not isinstance(biases, (list, tuple)):
        raise TypeError(f"biases must be a list of at most two tensors, [mask_bias, pair_bias], got {type(biases).__name__}")
    if len(biases) > 2:
        raise ValueError(f"biases must have at most two entries, [mask_bias, pair_bias], got {len(biases)}")
    check_empty_rows(empty_rows)
    mask_bias, pair_bias = (*biases, None, None)[:2]
    check_tensors(Q=Q, K=K, V=V)
    if isinstance(mask_bias, Tensor) and mask_bias.ndim == Q.ndim and mask_bias.shape[-3:-1] != (1, 1):
        raise ValueError(
            f"biases[0] must broadcast to [B, N, 1, 1, Lk], got shape {list(mask_bias.shape)}; "
            "a bias that varies over heads or queries is biases[1]"
        )
    if empty_rows == "native":
        return evoformer_attention(Q, K, V, mask_bias=mask_bias, pair_bias=pair_bias)
    return with_means(evoformer_attention, Q, K, V, mask_bias, pair_bias, None, layout="bnlhd")
