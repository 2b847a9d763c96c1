"""The ceiling's kernel: its numbers in Triton's interpreter, and that nothing but exponentials is in its loop on a GPU."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

INTERPRETED = """
import sys
sys.path.append("benchmarks")
import torch
from tests.helpers import interpreter
interpreter.patch()
from exp2_kernel import BLOCK, exp2_kernel
out = torch.empty(2 * BLOCK)
exp2_kernel[(2,)](out, 60, SIZE=BLOCK, num_warps=4)
expected = torch.tensor(0.6411857445)  # x = 2 ** -x
assert torch.allclose(out, expected.expand(2 * BLOCK), rtol=1e-6), out
"""

COMPILED = """
import re
import sys
sys.path.append("benchmarks")
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from exp2_kernel import BLOCK, exp2_kernel
source = ASTSource(exp2_kernel, {"p_out": "*fp32", "rounds": "i32", "SIZE": "constexpr"}, constexprs={"SIZE": BLOCK})
ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm["ptx"]
loop = re.search(r"\\n(\\$L__BB0_\\d+):(.*?)bra\\s+\\1;", ptx, re.DOTALL)[2]
assert loop.count("ex2.approx") == BLOCK // 128, loop
assert loop.count("\\n") < 4 * BLOCK // 128, loop
"""


@pytest.mark.parametrize(("code", "interpret"), [(INTERPRETED, "1"), (COMPILED, "0")], ids=["numbers", "instructions"])
def test_exp2_kernel_computes_powers_in_few_instructions(code: str, interpret: str) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": interpret}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
