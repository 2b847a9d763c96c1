"""How tensors have to lie in memory for the copy engine; asked without CuTe DSL too."""

from __future__ import annotations

from torch import Tensor

__all__ = ["loads_wide"]


def loads_wide(x: Tensor) -> bool:
    """Whether every row of channels or keys starts on 16 bytes, with stride 1 inside; a broadcast axis does not."""
    steps = x.stride()
    return x.data_ptr() % 16 == 0 and steps[-1] == 1 and all(step % 8 == 0 and step > 0 for step in steps[:-1])
