"""Every kernel of the Triton backend's two passes."""

import pytest

pytest.importorskip("triton.runtime._async_compile", reason="no Triton, or one that compiles no kernel ahead")

from evoattn.backends.triton.kernels import dkdv, dq, forward, key_bias, pair_copies, pair_gradient, statistics
from evoattn.kit.launch import FlatKernel

KERNELS = [
    each
    for module in (dkdv, dq, forward, pair_copies, pair_gradient, key_bias, statistics)
    for each in vars(module).values()
    if isinstance(each, FlatKernel)
]
