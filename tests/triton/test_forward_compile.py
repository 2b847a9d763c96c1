"""Every built-in config of the forward, compiled for every supported GPU without one: registers, shared memory, instructions.

`python tests/triton/test_forward_compile.py` prints what there is and writes instructions.json anew.
"""

import dataclasses
import json
import os
import pathlib
import sys

import pytest
import torch

pytest.importorskip("triton")
sys.path.insert(0, str(pathlib.Path(__file__).parent))

import triton
from ahead_of_time import SHARED_LIMITS, TARGETS, Report, report, target

from evoattn.backends import triton as backend
from evoattn.backends.triton import launch
from evoattn.problem import Problem
from evoattn.tuning import Config
from evoattn.tuning.heuristics import forward_registers, forward_shared_bytes, forward_tiles

RECORD = pathlib.Path(__file__).parent / "instructions.json"
ROOM = 1.03
"""A loop may grow by this much before the test fails: another ptxas schedules a few instructions differently."""

OTHER_VERSION = 1.15
"""The same under another Triton than the one that made the record."""


@dataclasses.dataclass(frozen=True)
class Compiled:
    """One call whose kernel is compiled; sizes matter only by what the launcher makes of them. `spills`: bytes, by card.

    `left_over`: not the kernel of whole tiles of queries, but that of what is left over.
    """

    name: str
    dtype: torch.dtype = torch.bfloat16
    d: int = 32
    length: int = 384
    mask: bool = True
    pair_bias: torch.dtype | None = torch.bfloat16
    n: int = 384
    spills: dict[str, int] = dataclasses.field(default_factory=dict)
    left_over: bool = False

    def compile(self, arch: str) -> Report:
        """The report of a forward kernel that the launcher starts for this call."""
        q, k, v = (torch.empty(1, self.n, self.length, 4, self.d, dtype=self.dtype).transpose(2, 3) for _ in range(3))
        mask = torch.ones(1, self.n, self.length, dtype=torch.bool) if self.mask else None
        pair = None if self.pair_bias is None else torch.empty(1, 4, self.length, self.length, dtype=self.pair_bias)
        with target(arch) as compiled:
            inputs = (q, k, v, mask, None, pair)
            run = backend.plan_forward(*inputs, scale=self.d**-0.5, layout="bnlhd", config=Config())
            run(*inputs, torch.empty_like(q), torch.empty(q.shape[:-1]))
        kernels = [kernel for kernel in compiled if kernel.metadata.name == "forward_kernel"]
        assert len(kernels) == 2 or not self.left_over
        return report(kernels[-1] if self.left_over else kernels[0])


CASES = (
    Compiled("d16", d=16),
    Compiled("d32"),
    Compiled("d32_ragged", length=397),
    Compiled("d32_mask", pair_bias=None),
    Compiled("d32_float16_wide_bias", dtype=torch.float16, pair_bias=torch.float32),
    # What `heuristics` says of it: 5 to 20% faster than tiles that spill nothing
    Compiled("d48", d=48, spills={"sm_90": 40}),
    Compiled("d64", d=64, spills={"sm_90": 40}),
    Compiled("d64_mask", d=64, pair_bias=None),
    Compiled("d64_ragged", d=64, length=397, spills={"sm_90": 40}),
    Compiled("d32_left_over", length=397, left_over=True),
    Compiled("d64_left_over", d=64, length=397, left_over=True),
    Compiled("d128_left_over", d=128, length=397, left_over=True, spills={"sm_90": 16}),
    Compiled("d16_float32", dtype=torch.float32, pair_bias=torch.float32, d=16, spills={"sm_90": 40}),
    Compiled("d128", d=128),
    Compiled("d256", d=256),
    Compiled("d32_float32", dtype=torch.float32, pair_bias=torch.float32),
    # 88 bytes; 80 with two stages, when 397 took 1.08 ms; 640 with a limit of registers, and 1.66 ms
    Compiled("d32_float32_ragged", dtype=torch.float32, pair_bias=torch.float32, length=397, spills={"sm_90": 96}),
    Compiled("d128_float32", dtype=torch.float32, pair_bias=torch.float32, d=128),
    Compiled("d256_float32", dtype=torch.float32, pair_bias=torch.float32, d=256),
)


def spills(made: Report) -> int:
    """Bytes spilled, but for two registers set aside outside the loop, as `forward_registers` allows."""
    outside = not {"LDL", "STL"} & made.mix.keys()
    return 0 if outside and made.spills <= 8 else made.spills


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
@pytest.mark.parametrize("arch", TARGETS)
def test_forward_compiles(arch: str) -> None:
    record = json.loads(RECORD.read_text())
    room = ROOM if record["triton"] == triton.__version__ else OTHER_VERSION
    failures = []
    for case in CASES:
        made = case.compile(arch)
        if spills(made) > case.spills.get(arch, 0):
            failures.append(f"{case.name}: {made.spills} bytes spilled, {made.registers} registers")
        if made.shared > SHARED_LIMITS[arch]:
            failures.append(f"{case.name}: {made.shared} bytes of shared memory, {SHARED_LIMITS[arch]} there are")
        allowed = record["loops"][arch][case.name] * room
        if made.loop > allowed:
            failures.append(f"{case.name}: {made.loop} instructions in the main loop, at most {allowed:.0f} allowed")
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("shared_limit", sorted(set(SHARED_LIMITS.values())))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_configs_fit_in_shared_memory(dtype: torch.dtype, shared_limit: int) -> None:
    """The estimate that picks smaller tiles; what the compiler really takes is held to the limit above."""
    for capability in ((8, 6), (9, 0), (10, 0), None):
        for d in (8, 16, 24, 32, 48, 64, 128, 256):
            problem = Problem("cuda", capability, dtype, 1, 8, 4, 384, 384, d, d, mask=True, pair_bias=dtype)
            tiles = forward_tiles(problem, Config(), shared_limit)
            assert forward_shared_bytes(problem, tiles) <= shared_limit
            kept = forward_tiles(problem, Config(block_k=16, num_stages=1), shared_limit)
            assert (kept.block_k, kept.num_stages) == (16, 1)


def test_a_limit_of_registers_that_spills_is_not_set() -> None:
    """In float32 with 16 channels: only for whole tiles of keys and a pair bias that comes through a tensor map."""
    for lk, maps, expected in ((384, True, 168), (384, False, None), (397, True, None)):
        problem = Problem("cuda", (9, 0), torch.float32, 4, 384, 4, 384, lk, 16, 16, mask=True, pair_bias=torch.float32)
        tiles = forward_tiles(problem, Config(), SHARED_LIMITS["sm_90"])
        assert forward_registers(problem, tiles, maps=maps) == expected


def test_float32_products_follow_torch() -> None:
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    try:
        for tf32, exact, split in ((False, "ieee", "tf32x3"), (True, "tf32", "tf32")):
            matmul.allow_tf32 = tf32
            assert (launch.precision(torch.float32), launch.split_precision(torch.float32, 64)) == (exact, split)
            assert launch.split_precision(torch.float32, 128) == exact
            assert launch.split_precision(torch.bfloat16, 64) == "ieee"
    finally:
        matmul.allow_tf32 = before


if __name__ == "__main__":
    loops: dict[str, dict[str, int]] = {}
    for arch in TARGETS:
        loops[arch] = {}
        for case in CASES:
            made = case.compile(arch)
            made_of = f"{made.registers:4} registers {made.shared:7} shared {spills(made):4} spilled {made.loop:5} in loop"
            print(f"{arch:7} {case.name:22} {made_of}", flush=True)
            loops[arch][case.name] = made.loop
    RECORD.write_text(json.dumps({"triton": triton.__version__, "loops": loops}, indent=2) + "\n")
