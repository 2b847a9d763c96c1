"""Reports registers, spills, shared memory and instructions of the kernels that the compile tests compile.

    python3 dev.py instructions [sm_90 ... | hopper]

It needs no GPU. Compare the reports of two commits with `diff`: the counts belong to one version of each compiler, so no test
holds them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from tests.backends.triton import test_backward_compile, test_few_compile, test_forward_compile
from tests.helpers.ahead_of_time import TARGETS

__all__: list[str] = []


def triton_lines(arch: str) -> Iterator[str]:
    """One line for each kernel of each call. The loop is the main loop of `ahead_of_time.Report`."""
    for module in (test_forward_compile, test_backward_compile, test_few_compile):
        for case in module.CASES:
            compiled = case.compile(arch)
            for kernel in compiled if isinstance(compiled, list) else [compiled]:
                yield (
                    f"{arch:7} {case.name:26} {kernel.name:22} {kernel.registers:4} registers {kernel.spills:5} spills "
                    f"{kernel.shared:7} shared {kernel.loop:5} in loop {kernel.threads:4} threads"
                )


def hopper_lines() -> Iterator[str]:
    """One line for each variant of the forward."""
    from tests.backends.hopper.test_forward_compile import VARIANTS, variant
    from tests.helpers.machine_code import count, instructions_a_score, make

    for name in VARIANTS:
        kernel = make(variant(name, "bfloat16"))
        counts = (f"{count(kernel.instructions, start):5} {start}" for start in ("HGMMA", "WARPGROUP.DEPBAR", "LDL", "STL"))
        yield (
            f"hopper  {name:26} {instructions_a_score(kernel.instructions):7.3f} instructions a score "
            f"{kernel.shared:7} shared {' '.join(counts)}"
        )


if __name__ == "__main__":
    for chosen in sys.argv[1:] or (*TARGETS, "hopper"):
        for line in hopper_lines() if chosen == "hopper" else triton_lines(chosen):
            print(line, flush=True)
