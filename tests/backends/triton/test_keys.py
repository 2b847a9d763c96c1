"""The key under which Triton keeps a kernel is the same in every process, whichever kernels it launches before."""

import itertools

import pytest

pytest.importorskip("triton.runtime._async_compile", reason="no Triton, or one whose keys are made otherwise")

from triton.runtime.jit import JITFunction

from evoattn.backends.triton.kernels import (
    backward,
    dkdv,
    dq,
    few,
    forward,
    key_bias,
    pair_copies,
    pair_gradient,
    statistics,
)
from evoattn.kit import overlap, primitives
from evoattn.kit.launch import FlatKernel, settle_key

MODULES = (backward, dkdv, dq, few, forward, overlap, pair_copies, pair_gradient, primitives, key_bias, statistics)
FOUND = [x.jitted for module in MODULES for x in vars(module).values() if isinstance(x, FlatKernel)]
KERNELS = list({id(jitted): jitted for jitted in FOUND}.values())  # by id: the hash of one is its key, which is not settled yet


def keys(kernels: list[JITFunction]) -> dict[str, str]:
    """The key of each, computed in this order as in a new process."""
    helpers = [x for module in MODULES for x in vars(module).values() if isinstance(x, JITFunction)]
    helpers += [body for module in MODULES for x in vars(module).values() if (body := getattr(x, "body", None)) is not None]
    for function in (*helpers, *KERNELS):
        function.hash = None
        function.used_global_vals = {}
    for kernel in kernels:
        settle_key(kernel)
    return {kernel.__name__: kernel.cache_key for kernel in kernels}


def test_keys_do_not_depend_on_the_order() -> None:
    assert len(KERNELS) > 8
    first = keys(KERNELS)
    assert keys(KERNELS[::-1]) == first
    for number in range(1, len(KERNELS)):
        assert keys(KERNELS[number:] + KERNELS[:number]) == first


def test_constants_of_one_name_have_one_value() -> None:
    """Triton sorts them by name, then by where their module lies in memory."""
    keys(KERNELS)
    for kernel in KERNELS:
        values = sorted((name, str(value)) for (name, _), (value, _) in kernel.used_global_vals.items())
        for name, group in itertools.groupby(values, key=lambda each: each[0]):
            assert len(set(group)) == 1, f"{kernel.__name__}: {name}"
