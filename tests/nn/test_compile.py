"""What torch compiles, exports and traces: each layer, drop-in, operator and replaced block of a client, in one table.

A row is a call. A column is a way to capture it: one graph without and with gradients, for one length and for several, an
exported program for other lengths, a trace, and code of inductor. Each cell agrees with the eager call, or raises an error.
"""

from __future__ import annotations

import dataclasses
import io
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, export

import evoattn.nn as evoattn_nn
from evoattn import evoformer_attention
from evoattn.compat.cuequivariance import triangle_attention, triangle_multiplicative_update
from evoattn.compat.deepspeed import DS4Sci_EvoformerAttention
from evoattn.compat.openfold import attention
from evoattn.pair import transition, triangle_multiplication
from tests.clients.standins import CHANNELS, assert_close, filled, outcome, pair_blocks, protenix
from tests.nn.dense import Dense
from tests.nn.layer_cases import LAYERS

pytestmark = pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit.*:DeprecationWarning")

Arguments = tuple[list[Tensor], list[Tensor]]
"""Tensors that get a gradient, and the others."""

FARTHEST = 1024
"""The largest length of an exported program."""

SHORT, OTHERS = 7, (9, 5)


@dataclasses.dataclass(frozen=True)
class Row:
    """A call of the table.

    Args:
        name: for the test's name.
        make: makes the module that is captured. It takes tensors by position.
        arguments: tensors for a length.
        means: whether `torch.jit.trace` refuses it, since rows without a key have the mean of v.
        trains: whether it has gradients.
        large: whether it has the layers of a block: all but its shortest tests are slow.
        replaced: whether it is a client's block whose computation is replaced.
    """

    name: str
    make: Callable[[], nn.Module]
    arguments: Callable[[int], Arguments]
    means: bool = False
    trains: bool = True
    large: bool = False
    replaced: bool = False


class Call(nn.Module):
    """A function of tensors as a module, with the parameters of a module that it calls."""

    def __init__(self, function: Callable[..., Any], inner: nn.Module | None = None) -> None:
        super().__init__()
        self.function, self.inner = function, inner

    def forward(self, *tensors: Tensor) -> Any:
        return self.function(*tensors) if self.inner is None else self.function(self.inner, *tensors)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def masked(*shape: int) -> Tensor:
    """A mask; its first row has no key."""
    mask = (torch.rand(shape, generator=torch.Generator().manual_seed(2)) > 0.3).float()
    mask[..., -1] = 1
    mask[0, 0] = 0
    return mask


def of_layer(case: Dense) -> Row:
    def arguments(length: int) -> Arguments:
        def sized(shape: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(length if size == SHORT else size for size in shape)

        resized = dataclasses.replace(case, inputs=tuple(sized(shape) for shape in case.inputs), mask=sized(case.mask))
        inputs, mask = resized.arguments(torch.float32)
        return [x.detach() for x in inputs], [mask]

    def make() -> nn.Module:
        return Call(lambda layer, *tensors: layer(*tensors[:-1], mask=tensors[-1]), case.layer(torch.float32).eval())

    return Row(case.name, make, arguments, not case.name.startswith(("multiplication", "transition", "MSA module")))


def of_function(name: str, function: Callable[..., Any], arguments: Callable[[int], Arguments], *, means: bool = False) -> Row:
    return Row(name, lambda: Call(function), arguments, means)


def of_block(
    name: str, make: Callable[[], nn.Module], single: int = 0, *, training: bool = False, replaced: bool = False, **options: Any
) -> Row:
    """A pair block, with a single track of some channels or none."""

    def made() -> nn.Module:
        block = filled(make()).float().train(training)
        if replaced:
            assert {"", "block"} & set(evoattn_nn.replace(block))
        return Call(lambda block, *tensors: block(*tensors, **options), block)

    def arguments(length: int) -> Arguments:
        z, mask = normal(1, length, length, CHANNELS), masked(1, length, length)
        return ([normal(1, length, single), z], [mask[:, -1], mask]) if single else ([z], [mask])

    return Row(name, made, arguments, True, "in_place" not in options, True, replaced)


def scores(*of: int) -> Callable[[int], Arguments]:
    """q, k, v and a pair bias for axes `[2, 3, *of, 8]`, of which -1 is the length, and a mask."""

    def arguments(length: int) -> Arguments:
        axes = [length if size < 0 else size for size in of]
        qkv = [normal(2, 3, *axes, 8) + number for number in range(3)]
        return [*qkv, normal(2, 1, 4, length, length)], [masked(2, 3, length)]

    return arguments


def pairs(*weights: tuple[int, ...]) -> Callable[[int], Arguments]:
    def arguments(length: int) -> Arguments:
        return [normal(2, length, length, 12), *[normal(*shape) / 4 for shape in weights]], [masked(2, length, length)]

    return arguments


class Turned(nn.Module):
    """Protenix' block with the arguments of Boltz'. It takes no mask of s."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, s: Tensor, z: Tensor, mask: Tensor, pair_mask: Tensor) -> Any:
        return self.block(s, z, pair_mask)


def added(mask: Tensor) -> Tensor:
    return 1e9 * (mask[..., None, None, :] - 1)


def of_one_tensor(q: Tensor, bias: Tensor) -> Tensor:
    return attention(q, q, q, [bias])


def multiply(call: Callable[..., Tensor], **options: Any) -> Callable[..., Tensor]:
    def run(z: Tensor, p: Tensor, g: Tensor, p_out: Tensor, g_out: Tensor, mask: Tensor) -> Tensor:
        return call(z, mask=mask, p_in_weight=p, g_in_weight=g, p_out_weight=p_out, g_out_weight=g_out, **options)

    return run


MULTIPLIED = pairs((20, 12), (20, 12), (12, 10), (12, 12))
BLOCK = (CHANNELS, 6, 4, 2)
"""Channels of z, hidden channels, and channels and heads of the attention."""

ROWS = (
    *map(of_layer, LAYERS),
    of_block("PairBlock", lambda: evoattn_nn.PairBlock(*BLOCK)),
    of_block("PairBlock, dropout", lambda: evoattn_nn.PairBlock(*BLOCK, dropout=0.2), training=True),
    of_block("PairBlock, in place", lambda: evoattn_nn.PairBlock(*BLOCK), in_place=True),
    of_block("PairformerBlock", lambda: evoattn_nn.PairformerBlock(6, CHANNELS, 3, 2, *BLOCK[1:]), 6),
    of_block("OpenFold-3's block", pair_blocks.Pairs, replaced=True),
    of_block("OpenFold-3's block, dropout", pair_blocks.Pairs, training=True, replaced=True),
    of_block("Boltz' block", pair_blocks.Layer, 6, replaced=True),
    of_block("Boltz' block, dropout", pair_blocks.Layer, 6, training=True, replaced=True),
    of_block("Protenix' block", lambda: Turned(protenix.Block(6)), 6, replaced=True),
    of_block("Protenix' block, dropout", lambda: Turned(protenix.Block(6)), 6, training=True, replaced=True),
    of_function(
        "evoformer_attention",
        lambda q, k, v, bias, mask: evoformer_attention(q, k, v, mask=mask > 0, pair_bias=bias, gate=q, return_lse=True)[0],
        scores(-1, 4),
    ),
    of_function(
        "openfold.attention",
        lambda q, k, v, bias, mask: attention(q, k, v, [added(mask), bias]),
        scores(4, -1),
        means=True,
    ),
    of_function(
        "openfold.attention, masks of queries",
        lambda q, k, v, bias, mask: attention(q, k, v, [added(mask), bias, bias[:, :, :1]]),
        scores(4, -1),
    ),
    of_function(
        "openfold.attention, q = k = v",
        of_one_tensor,
        lambda length: ([normal(2, 3, 4, length, 8)], [added(masked(2, 3, length))]),
        means=True,
    ),
    of_function(
        "DS4Sci_EvoformerAttention",
        lambda q, k, v, bias, mask: DS4Sci_EvoformerAttention(q, k, v, [added(mask), bias]),
        scores(-1, 4),
        means=True,
    ),
    of_function(
        "cuequivariance.triangle_attention",
        lambda q, k, v, bias, mask: triangle_attention(q, k, v, bias, mask[..., None, None, :]),
        scores(4, -1),
    ),
    of_function(
        "cuequivariance.triangle_attention, all results",
        lambda q, k, v, bias, mask: triangle_attention(q, k, v, bias, mask[..., None, None, :], return_aux=True),
        scores(4, -1),
    ),
    of_function("triangle_multiplicative_update", multiply(triangle_multiplicative_update), MULTIPLIED),
    of_function("triangle_multiplication", multiply(triangle_multiplication, direction="incoming", residual=True), MULTIPLIED),
    of_function(
        "transition",
        lambda x, a, b, out, mask: transition(x, mask, a_weight=a, b_weight=b, out_weight=out),
        pairs((20, 12), (20, 12), (12, 20)),
    ),
)


def each(*, slow: Callable[[Row], bool] = lambda row: False, only: Callable[[Row], bool] = lambda row: True) -> Any:
    marks = pytest.mark.slow
    rows = [pytest.param(row, id=row.name, marks=[marks] if slow(row) else []) for row in ROWS if only(row)]
    return pytest.mark.parametrize("row", rows)


def of_names(*names: str) -> Callable[[Row], bool]:
    return lambda row: row.name in names


SOME = of_names("triangle, end", "transition, SwiGLU", "openfold.attention", "Boltz' block")
"""Rows of the slowest columns."""


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins are taken for the clients' blocks, and nothing is compiled yet."""
    pair_blocks.stand_in(monkeypatch)
    protenix.stand_in(monkeypatch)
    protenix.stand_in_unfused(monkeypatch)
    torch.compiler.reset()


def run(call: Callable[..., Any], row: Row, length: int = SHORT) -> list[Tensor]:
    """The results for a length, without gradients. A call may overwrite its first tensor."""
    torch.manual_seed(3)
    inputs, others = row.arguments(length)
    with torch.no_grad():
        results = call(*inputs, *others)
    return list(results) if isinstance(results, tuple) else [results]


def train(call: nn.Module, row: Row, length: int = SHORT) -> list[Tensor]:
    """The results for a length and all gradients. The next random number, in float64, is left out: torch drops unused draws."""
    inputs, others = row.arguments(length)
    return [x for x in outcome(call, inputs, *others) if x.dtype == torch.float32]


VARIANTS = of_names(
    *("triangle, start", "multiplication, outgoing", "MSA columns, global", "transition, conditioned, of three factors"),
    *("openfold.attention, masks of queries", "cuequivariance.triangle_attention, all results"),
)
"""Rows that differ little from another one."""


@each(slow=lambda row: (row.large and row.name != "Boltz' block") or VARIANTS(row))
def test_inference_is_one_graph(row: Row) -> None:
    call = row.make()
    compiled = torch.compile(call, backend="eager", fullgraph=True)
    assert_close(run(compiled, row), run(call, row))


@each(only=lambda row: row.trains, slow=lambda row: not of_names("triangle, end", "transition, SwiGLU")(row))
def test_training_is_one_graph(row: Row) -> None:
    call = row.make()
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    assert_close(train(compiled, row), train(call, row))


@each(slow=lambda row: not of_names("transition, SwiGLU", "openfold.attention")(row))
def test_other_lengths_compile_nothing_anew(row: Row) -> None:
    call = row.make()
    compiled = torch.compile(call, backend="eager", fullgraph=True, dynamic=True)
    assert_close(run(compiled, row), run(call, row))
    with torch._dynamo.config.patch(error_on_recompile=True):
        for length in OTHERS:
            assert_close(run(compiled, row, length), run(call, row, length))


@pytest.mark.slow
@each(only=SOME)
def test_training_of_other_lengths_compiles_nothing_anew(row: Row) -> None:
    call = row.make()
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=True)
    assert_close(train(compiled, row), train(call, row))
    with torch._dynamo.config.patch(error_on_recompile=True):
        for length in OTHERS:
            assert_close(train(compiled, row, length), train(call, row, length))


def exported(row: Row, call: nn.Module, *, strict: bool) -> Any:
    """A program of any length up to `FARTHEST`."""
    arguments, longer = ([*inputs, *others] for inputs, others in (row.arguments(SHORT), row.arguments(9)))
    length = Dim("length", min=2, max=FARTHEST)

    def dynamic(x: Tensor, y: Tensor) -> dict[int, Any]:
        axes = [axis for axis in range(x.ndim) if x.shape[axis] != y.shape[axis]]
        return dict.fromkeys(axes, length)

    sizes = [dynamic(x, y) for x, y in zip(arguments, longer, strict=True)]
    with torch.no_grad():
        return export(call, tuple(arguments), dynamic_shapes=(tuple(sizes),), strict=strict)


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.slow)])
@each(slow=lambda row: row.large or not SOME(row))
def test_an_exported_program_takes_other_lengths(row: Row, strict: bool) -> None:
    if row.replaced and not strict:
        pytest.skip("torch gives each module a class of its own then, so a replaced block runs the client's own forward")
    call = row.make()
    program = exported(row, call, strict=strict).module()
    for length in (SHORT, *OTHERS):
        assert_close(run(program, row, length), run(call, row, length))


@each()
def test_a_trace_takes_other_lengths_or_says_what_to_use(row: Row) -> None:
    call, memory = row.make(), io.BytesIO()
    inputs, others = row.arguments(SHORT)

    def traced() -> Any:
        with torch.no_grad():
            return torch.jit.trace(call, (*inputs, *others), check_trace=False)

    if row.means:
        with pytest.raises(RuntimeError, match='takes no mask with empty_rows="mean": pass empty_rows="native"'):
            traced()
        return
    torch.jit.save(traced(), memory)
    memory.seek(0)
    loaded = torch.jit.load(memory)
    for length in (SHORT, *OTHERS):
        assert_close(run(loaded, row, length), run(call, row, length))


REFUSED = "keyword-only arguments|keyword-arg expansion|type expression|redefine method|Unknown type name"


@pytest.mark.parametrize("case", LAYERS, ids=lambda case: case.name)
def test_torch_jit_script_is_refused_by_torch(case: Dense) -> None:
    """torch's own refusal of arguments that are given by name alone, and of annotations: see docs/errors.md."""
    with pytest.raises((torch.jit.frontend.NotSupportedError, RuntimeError), match=REFUSED):
        torch.jit.script(case.layer())


needs_compiler = pytest.mark.skipif(not (shutil.which("c++") or shutil.which("g++")), reason="inductor needs a C++ compiler")


@pytest.mark.slow
@needs_compiler
@each(only=SOME)
def test_code_of_inductor_agrees_with_the_call(row: Row) -> None:
    call = row.make()
    compiled = torch.compile(call, fullgraph=True)
    assert_close(run(compiled, row), run(call, row))
    if not row.large:
        assert_close(train(compiled, row), train(call, row))


@pytest.mark.slow
@needs_compiler
@each(only=SOME)
def test_a_package_of_aot_inductor_takes_other_lengths(row: Row, tmp_path: Any) -> None:
    from torch._inductor import aoti_compile_and_package, aoti_load_package

    call = row.make()
    path = aoti_compile_and_package(exported(row, call, strict=row.replaced), package_path=str(tmp_path / "model.pt2"))
    loaded = aoti_load_package(path)
    for length in (SHORT, *OTHERS):
        assert_close(run(loaded, row, length), run(call, row, length))
