"""Launches that overlap: what is complete when one starts, and that the PTX waits. Nothing here runs on a GPU."""

import contextlib
import itertools
import re
import types
import unittest.mock
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from evoattn.backends import Cotangents, Inputs, Outputs
from evoattn.backends import triton as backend
from evoattn.backends.triton import backward_plan, forward_plan, pair_in_order
from evoattn.backends.triton.kernels.pair_gradient import pair_gradient_kernel
from evoattn.core.config import Config
from evoattn.kit import cards
from evoattn.kit.launch import FlatKernel, Launch
from evoattn.kit.overlap import OVERLAPS, overlap
from tests.helpers.ahead_of_time import target

pytestmark = pytest.mark.skipif(not OVERLAPS, reason="launches do not overlap with this Triton")

HOPPER, AMPERE = (9, 0), (8, 0)
TO_LOAD, TO_STORE = 1, 2

QUIET = {"empty_strided", "as_strided"}
"""What torch may do between our launches: nothing of it runs in the stream."""

MADE = {"key_bias_p", "runs_p", "spans_p", "stats_p", "stats_distant", "pair_p", "shares"}
"""Arguments that an earlier kernel of the call may have written."""

NEEDS = (
    (True, True, True, True, True, False),
    (False, False, False, False, True, False),
    (True, False, False, False, False, False),
    (False, True, True, True, False, False),
)
PAIRS = (None, (1, 4, 1, 1), (1, 4, 0, 1), (1, 4, 0, 0), (4, 4, 0, 0))
"""Sizes of pair biases [b,h,q,k]; 0 stands for the whole length."""

CALLS = [
    (length, n, mask, mask_bias, pair, dtype)
    for length, n, mask, mask_bias, pair, dtype in itertools.product(
        (96, 100, 397), (1, 2, 8), (False, True), (False, True), PAIRS, (torch.bfloat16, torch.float32)
    )
    if pair is None or pair[0] == 1 or n == 1
]


def call(
    length: int, n: int, mask: bool, mask_bias: bool, pair: tuple[int, ...] | None, dtype: torch.dtype, device: str = "meta"
) -> tuple[Tensor | None, ...]:
    """q, k, v, mask, mask_bias, pair_bias, o, lse and reference, of which nothing is ever read."""
    b = 1 if pair is None else pair[0]
    q, k, v, o = (torch.empty(b, n, length, 4, 32, dtype=dtype, device=device).transpose(2, 3) for _ in range(4))
    of_mask = torch.empty(1, n, length, dtype=torch.bool, device=device) if mask else None
    of_bias = torch.empty(1, 1, length, device=device) if mask_bias else None
    of_pair = None if pair is None else torch.empty([size or length for size in pair], dtype=dtype, device=device)
    lse, reference = (torch.empty(b, n, 4, length, device=device) for _ in range(2))
    return q, k, v, of_mask, of_bias, of_pair, o, lse, reference


def forward(tensors: tuple[Any, ...]) -> None:
    inputs, outputs = Inputs(*tensors[:6]), Outputs(*tensors[6:])
    scale = inputs.q.shape[-1] ** -0.5
    backend.plan_forward(inputs, scale=scale, layout="bnlhd", config=Config()).run(inputs, outputs)


def backward(
    tensors: tuple[Any, ...], needs: tuple[bool, ...], deterministic: bool, cotangents: str = "do", *, gated: bool = False
) -> None:
    inputs, outputs = Inputs(*tensors[:6]), Outputs(*tensors[6:])
    if gated:
        inputs = inputs._replace(gate=torch.empty_like(outputs.o))
    of_mask, of_pair = needs[3] and inputs.mask_bias is not None, needs[4] and inputs.pair_bias is not None
    needs = (*needs[:3], of_mask, of_pair, gated)
    values = (
        Cotangents(outputs.o if "do" in cotangents else None, outputs.lse if "dlse" in cotangents else None),
        inputs,
        outputs,
    )
    options: dict[str, Any] = {"scale": 0.2, "layout": "bnlhd", "needs": needs, "deterministic": deterministic}
    of_inputs = zip((*inputs.qkv, inputs.gate), (*needs[:3], gated), strict=True)
    gradients = tuple(torch.empty_like(x) if need and x is not None else None for x, need in of_inputs)
    backend.plan_backward(*values, **options, config=Config()).run(*values, gradients)


class Stream(TorchDispatchMode):
    """What a call does, in order: names of torch's operators, and launches with the memory that they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str | tuple[Launch, set[int]]] = []
        self.chain: list[Launch] = []
        self.fresh: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        self.events.append(function.overloadpacket.__name__)
        if self.events[-1] == "empty_strided":
            self.fresh.add(memory(output))
        elif self.events[-1] == "copy_":
            self.fresh.discard(memory(output))
        return output

    @property
    def launches(self) -> list[tuple[Launch, set[int]]]:
        return [event for event in self.events if not isinstance(event, str)]


def memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@contextlib.contextmanager
def recorded(capability: tuple[int, int] | None) -> Iterator[Stream]:
    """Records instead of launching."""
    stream = Stream()

    def record(self: Launch, *tensors: Tensor) -> None:
        # Launches of that kernel share the last: each writes a part of it, and reads no other.
        parts = tensors[:-1] if self.kernel is pair_gradient_kernel else tensors
        stream.events.append((self, {memory(x) for x in parts}))

    def noted(device: torch.device, *chain: Any) -> None:
        overlap(device, *chain)
        stream.chain += [launch for launch, _ in chain]

    with contextlib.ExitStack() as patches:
        for owner, attribute, value in (
            (Launch, "__call__", record),
            (forward_plan, "overlap", noted),
            (backward_plan, "overlap", noted),
            (pair_in_order, "ROWS_WORTH_SPANS", 2),
            (cards, "capability", lambda device: capability),
            (cards, "shared_memory_limit", lambda device: 232_448),
        ):
            patches.enter_context(unittest.mock.patch.object(owner, attribute, value))
        patches.enter_context(stream)
        yield stream


def check(stream: Stream) -> None:
    """That the plan knows the order of the launches, and that nobody loads what may not be there."""
    assert [launch for launch, _ in stream.launches] == stream.chain
    first, last = (stream.events.index(event) for event in (stream.launches[0], stream.launches[-1]))
    assert {event for event in stream.events[first:last] if isinstance(event, str)} <= QUIET
    complete = 0
    maker: dict[int, int] = {}
    for place, (launch, cotangents) in enumerate(stream.launches):
        assert launch.constants.get("launch_pdl", False) == (place > 0)
        wait = launch.constants["WAIT"]
        loaded = [maker[x] for x in cotangents if x in maker]
        assert wait == TO_LOAD or all(load < complete for load in loaded), launch.kernel.jitted.fn.__name__
        complete = place if wait == TO_LOAD else complete
        maker |= dict.fromkeys(cotangents & stream.fresh - maker.keys(), place)


@pytest.mark.parametrize("length", [100, *(pytest.param(x, marks=pytest.mark.slow) for x in (96, 397))])
def test_nothing_is_loaded_before_it_is_complete(length: int) -> None:
    """Memory that a call allocates is written by the first kernel that it is given to, and loaded by the others."""
    for sizes in (sizes for sizes in CALLS if sizes[0] == length):
        with recorded(HOPPER) as stream:
            forward(call(*sizes))
        check(stream)
        for needs, deterministic, cotangents in itertools.product(NEEDS, (False, True), ("do", "dlse", "do dlse")):
            if any(needs[:3]) or sizes[4] is not None:
                with recorded(HOPPER) as stream:
                    backward(call(*sizes), needs, deterministic, cotangents)
                check(stream)


@pytest.mark.parametrize("length", [pytest.param(96, marks=pytest.mark.slow), 397])
def test_what_the_gate_multiplies_is_complete(length: int) -> None:
    """The kernels load the cotangent of O that the first one has multiplied."""
    for sizes in (sizes for sizes in CALLS if sizes[0] == length and sizes[1] > 1):
        for needs, deterministic, cotangents in itertools.product(NEEDS, (False, True), ("do", "do dlse")):
            if any(needs[:3]) or sizes[4] is not None:
                with recorded(HOPPER) as stream:
                    backward(call(*sizes), needs, deterministic, cotangents, gated=True)
                check(stream)
    with target("sm_90") as kernels:
        backward(call(384, 384, True, False, (1, 4, 0, 0), torch.bfloat16), NEEDS[0], False, gated=True)
    assert {kernel.metadata.name: lines for kernel in kernels if (lines := faults(kernel.asm["ptx"]))} == {}
    dq = next(kernel for kernel in kernels if kernel.metadata.name == "dq_kernel")
    assert constant(dq, "WAIT") == TO_LOAD
    assert loaded_early(dq, MADE | {"dO_p"}) == []


def test_what_a_kernel_waits_for() -> None:
    """Leftover queries load rows while the main tiles run; dK and dV load statistics while dQ runs, unless that makes them."""
    waits: dict[tuple[str, str], list[int]] = {}
    for name, length, n, mask in (("masked", 397, 8, True), ("plain", 384, 1, False)):
        tensors = call(length, n, mask, False, (1, 4, 0, 0), torch.bfloat16)
        for run in (forward, lambda x: backward(x, NEEDS[0], False)):
            with recorded(HOPPER) as stream:
                run(tensors)
            for launch, _ in stream.launches:
                waits.setdefault((name, launch.kernel.jitted.fn.__name__), []).append(launch.constants["WAIT"])
    assert waits["masked", "forward_kernel"] == [TO_LOAD, TO_STORE]
    assert waits["masked", "dq_kernel"] == [TO_LOAD, TO_LOAD]  # the second of each is for distant queries
    assert waits["masked", "dkdv_kernel"] == [TO_STORE, TO_STORE]
    assert waits["plain", "dkdv_kernel"][0] == TO_LOAD


@pytest.mark.parametrize("capability", [AMPERE, None])
def test_other_cards_launch_one_after_another(capability: tuple[int, int] | None) -> None:
    with recorded(capability) as stream:
        forward(call(397, 8, True, False, (1, 4, 0, 0), torch.bfloat16))
        backward(call(397, 8, True, False, (1, 4, 0, 0), torch.bfloat16), NEEDS[0], True)
    assert len(stream.launches) > 8
    assert {(launch.constants["WAIT"], "launch_pdl" in launch.constants) for launch, _ in stream.launches} == {(0, False)}


def test_a_chain() -> None:
    """Who waits early lets the next one start with all before itself complete; who waits late, with what it found complete."""
    a, b, c, d, e = (Launch(FlatKernel(None), 1, (), {}, None) for _ in range(5))
    with unittest.mock.patch.object(cards, "capability", return_value=HOPPER):
        overlap(torch.device("cuda"), (a, ()), (b, ()), (c, (a,)), (d, (b,)), (e, (d,)))
    assert [x.constants["WAIT"] for x in (a, b, c, d, e)] == [TO_STORE, TO_STORE, TO_LOAD, TO_STORE, TO_LOAD]
    assert ["launch_pdl" in x.constants for x in (a, b, c, d, e)] == [False, True, True, True, True]


def faults(ptx: str) -> list[str]:
    """Why not every program waits before its first store; empty when each does."""
    lines = ptx.splitlines()

    def where(pattern: str) -> list[int]:
        return [number for number, line in enumerate(lines) if re.search(pattern, line)]

    if len(where(r"griddepcontrol\.launch_dependents")) != 1:
        return ["does not let the next kernel start"]
    waits = where(r"^\s*griddepcontrol\.wait")
    if len(waits) != 1:
        return [f"waits {len(waits)} times"]
    labels = {line.split(":")[0].strip(): number for number, line in enumerate(lines) if re.match(r"\$L__BB\w+:", line)}
    jumps = [(number, labels[lines[number].rstrip(";").split()[-1]]) for number in where(r"\bbra(\.uni)?\s+\$L")]
    return [
        *("ends without waiting" for end in where(r"^\s*(@!?%p\d+\s+)?(ret|exit);") if end < waits[0]),
        *("jumps over the wait" for jump, to in jumps if jump < waits[0] < to),
        *("stores before it waits" for store in where(r"\b(st|red|atom)\.\S*global|\.global\.shared") if store < waits[0]),
    ]


def loaded_early(kernel: Any, outputs: set[str]) -> list[str]:
    """Loads before the wait that go through arguments that an earlier kernel may have written."""
    names = kernel.src.fn.arg_names
    reached = {f"{kernel.metadata.name}_param_{i}" for i, name in enumerate(names) if name in outputs}
    early = []
    for line in kernel.asm["ptx"].split("griddepcontrol.wait")[0].splitlines():
        words = re.findall(r"%\w+|\w+_param_\d+", line.split("//")[0])
        if re.search(r"\bld\.global|\.shared\.global", line):
            early += [line for word in re.findall(r"\[\s*(%\w+)", line) if word in reached]
        elif reached & set(words[1:]):
            reached.add(words[0])
    return early


def constant(kernel: Any, name: str) -> Any:
    """What a kernel was compiled with, None where it has no such constant."""
    names = kernel.src.fn.arg_names
    return kernel.src.constants.get((names.index(name),)) if name in names else None


def compiled_for(arch: str) -> list[Any]:
    """Every kernel, with every way to wait that the backend plans for it."""
    with target(arch) as compiled:
        for mask, pair, dtype in ((True, (1, 4, 0, 0), torch.bfloat16), (False, None, torch.float32)):
            forward(call(397, 384, mask, False, pair, dtype, "cpu"))
        backward(call(397, 384, True, False, (1, 4, 0, 0), torch.bfloat16), NEEDS[0], False)
        backward(call(384, 384, True, False, (1, 4, 0, 0), torch.bfloat16), NEEDS[0], True)
        with unittest.mock.patch.object(pair_in_order, "rows_of_a_turn", lambda share, *_: min(share, 40)):
            backward(call(397, 384, True, False, (1, 4, 0, 0), torch.bfloat16), NEEDS[0], True)
        backward(call(384, 384, False, False, (1, 4, 0, 0), torch.bfloat16), NEEDS[0], True)
        backward(call(384, 1, False, True, (1, 4, 0, 0), torch.bfloat16), NEEDS[0], False, "do dlse")
    return compiled


def test_ptx_waits_before_it_loads_what_kernels_before_it_write() -> None:
    kernels = compiled_for("sm_90")
    early = {kernel.metadata.name.removesuffix("_kernel") for kernel in kernels if kernel.metadata.launch_pdl}
    assert early == {"forward", "pack", "row_spans", "statistics", "dq", "dkdv", "pair_gradient", "total"}
    assert {kernel.metadata.name: lines for kernel in kernels if (lines := faults(kernel.asm["ptx"]))} == {}
    waiting = [kernel for kernel in kernels if kernel.src.constants[(kernel.src.fn.arg_names.index("WAIT"),)] == TO_LOAD]
    assert {kernel.metadata.name for kernel in waiting} >= {"forward_kernel", "row_spans_kernel", "dq_kernel", "dkdv_kernel"}
    assert all(f"{kernel.metadata.name}_param_" in kernel.asm["ptx"] for kernel in waiting), "what loads are traced back to"
    assert {*MADE} <= {name for kernel in kernels for name in kernel.src.fn.arg_names}, "a renamed argument is not looked for"
    assert {kernel.metadata.name: lines for kernel in waiting if (lines := loaded_early(kernel, MADE))} == {}
    going_on = [kernel for kernel in kernels if constant(kernel, "GOES_ON")]
    assert len(going_on) >= 3
    assert [lines for kernel in going_on if (lines := loaded_early(kernel, {"partial"}))] == []


@pytest.mark.slow
def test_older_cards_know_nothing_of_it() -> None:
    kernels = compiled_for("sm_80")
    assert len(kernels) > 20
    assert not any("griddepcontrol" in kernel.asm["ptx"] or kernel.metadata.launch_pdl for kernel in kernels)


def test_an_early_load_is_found() -> None:
    address, load = "\tld.param.b64 %rd1, [some_kernel_param_1];", "\tld.global.b32 %r1, [ %rd2 + 0 ];"
    lines = (address, "\tadd.s64 %rd2, %rd1, 16;", load, "\tgriddepcontrol.wait;")
    kernel = types.SimpleNamespace(
        src=types.SimpleNamespace(fn=types.SimpleNamespace(arg_names=["q_p", "key_bias_p"])),
        metadata=types.SimpleNamespace(name="some_kernel"),
        asm={"ptx": "\n".join(lines)},
    )
    assert loaded_early(kernel, {"key_bias_p"}) == [load] and loaded_early(kernel, {"q_p"}) == []
    kernel.asm["ptx"] = "\n".join((address, lines[1], lines[3], load))
    assert loaded_early(kernel, {"key_bias_p"}) == []


def test_faults_are_found() -> None:
    start, wait = "\tgriddepcontrol.launch_dependents; // $0", "\tgriddepcontrol.wait; // $0"
    store, end = "\tst.global.b32 [%rd1], %r1;", "\tret;"
    assert faults("\n".join((start, wait, store, end))) == []
    assert faults("\n".join((start, store, wait, end))) == ["stores before it waits"]
    assert faults("\n".join((start, "\t@%p1 bra \t$L__BB0_2;", wait, "$L__BB0_2:", end))) == ["jumps over the wait"]
    assert faults("\n".join((start, "\t@%p1 ret;", wait, end))) == ["ends without waiting"]
    assert faults("\n".join((start, store, end))) == ["waits 0 times"]
    assert faults("\n".join((wait, store, end))) == ["does not let the next kernel start"]
