"""DTensors in, DTensors out: four processes on a mesh of two by two find what one does, and gather no more than they need."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import evoattn
from evoattn import testing

if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("torch was built without gloo, which these processes talk through", allow_module_level=True)
if torch.__version__.startswith("2.7"):
    pytest.skip("torch 2.7's own redistribute fails in a backward: docs/support.md", allow_module_level=True)

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.helpers import distributed

PROCESSES = 4

Placements = tuple[Placement, Placement]


@dataclasses.dataclass(frozen=True)
class Split:
    """A call, and how its tensors lie on the mesh.

    Args:
        q, k, v, mask, mask_bias, pair_bias, gate: placements.
        o, lse: those that the outputs have to have.
    """

    case: testing.Case
    q: Placements
    o: Placements
    lse: Placements
    k: Placements = (Replicate(), Replicate())
    v: Placements = (Replicate(), Replicate())
    mask: Placements = (Replicate(), Replicate())
    mask_bias: Placements = (Replicate(), Replicate())
    pair_bias: Placements = (Replicate(), Replicate())
    gate: Placements = (Replicate(), Replicate())


WHOLE = (Replicate(), Replicate())
SIZES: dict[str, Any] = {"n": 5, "h": 4, "lq": 7, "lk": 9, "d": 8, "c": 6}
BIASES: dict[str, Any] = {"mask": "random", "mask_bias": "finite", "lse_gradient": True}


def case(name: str, pair_bias: str | None = "b1hqk", **changes: Any) -> testing.Case:
    return testing.Case(name, **{**SIZES, **BIASES, "pair_bias": pair_bias, **changes})


ROWS = (Shard(1), Replicate())
SPLITS = [
    Split(case("rows"), q=ROWS, k=ROWS, v=ROWS, mask=ROWS, mask_bias=ROWS, o=ROWS, lse=ROWS),
    Split(case("rows_of_q_alone"), q=ROWS, o=ROWS, lse=ROWS),
    Split(case("rows_twice"), q=(Shard(1), Shard(1)), o=(Shard(1), Shard(1)), lse=(Shard(1), Shard(1))),
    Split(case("fewer_rows_than_processes", n=1), q=(Shard(1), Shard(1)), o=(Shard(1), Shard(1)), lse=(Shard(1), Shard(1))),
    Split(
        case("rows_and_heads"),
        q=(Shard(1), Shard(3)),
        pair_bias=(Replicate(), Shard(2)),
        o=(Shard(1), Shard(3)),
        lse=(Shard(1), Shard(2)),
    ),
    Split(
        case("heads_and_queries", layout="bnhld"),
        q=(Shard(2), Shard(3)),
        pair_bias=(Shard(2), Shard(3)),
        o=(Shard(2), Shard(3)),
        lse=(Shard(2), Shard(3)),
    ),
    Split(
        case("queries_and_batches", lead=(2,)),
        q=(Shard(2), Shard(0)),
        pair_bias=(Shard(4), Replicate()),  # along its keys: it has to be brought together
        o=(Shard(2), Shard(0)),
        lse=(Shard(3), Shard(0)),
    ),
    Split(case("heads_share_keys", kv_heads=1), q=(Shard(3), Shard(-3)), o=(Shard(3), Shard(2)), lse=(Shard(2), Shard(3))),
    Split(
        case("a_bias_of_all_batches", "11hqk", lead=(2, 3)),
        q=(Shard(0), Shard(1)),
        o=(Shard(0), Shard(1)),
        lse=(Shard(0), Shard(1)),
    ),
    Split(case("no_batch", "1h1k", lead=()), q=(Shard(0), Shard(1)), o=(Shard(0), Shard(1)), lse=(Shard(0), Shard(2))),
    Split(
        case("one_query", lq=1, kv_heads=1, pair_bias=None),
        q=(Shard(1), Shard(3)),
        o=(Shard(1), Shard(3)),
        lse=(Shard(1), Shard(2)),
    ),
    Split(
        case("channels"),
        q=(Shard(4), Replicate()),
        k=(Shard(4), Shard(1)),
        pair_bias=(Shard(2), Shard(3)),
        o=WHOLE,
        lse=WHOLE,
    ),
    Split(
        case("gate_of_rows_and_heads", gate="random"),
        q=(Shard(1), Shard(3)),
        gate=(Shard(1), Shard(3)),
        o=(Shard(1), Shard(3)),
        lse=(Shard(1), Shard(2)),
    ),
    Split(
        case("gate_of_queries", gate="random", layout="bnhld"),
        q=(Shard(2), Shard(3)),
        gate=(Replicate(), Shard(3)),
        o=(Shard(2), Shard(3)),
        lse=(Shard(2), Shard(3)),
    ),
    Split(case("gate_of_channels", gate="random"), q=ROWS, gate=(Shard(4), Shard(2)), o=ROWS, lse=ROWS),
    Split(case("a_sum", n=4), q=(Partial(), Shard(1)), o=(Replicate(), Shard(1)), lse=(Replicate(), Shard(1))),
]


def distribute(x: Tensor | None, mesh: Any, placements: Placements) -> DTensor | None:
    """A leaf. Of a sum both processes of the mesh's dimension have half."""
    if x is None:
        return None
    distributed = distribute_tensor(x, mesh, without_partial(placements))
    if without_partial(placements) != placements:
        distributed = DTensor.from_local(distributed.to_local() / 2, mesh, placements)
    return distributed.requires_grad_() if x.dtype.is_floating_point else distributed


def without_partial(placements: Placements) -> Placements:
    """Sums added up."""
    first, second = (Replicate() if p.is_partial() else p for p in placements)
    return first, second


def differentiate(split: Split, mesh: Any) -> dict[str, Any]:
    """The whole outputs and gradients, by name, and how the outputs and gradients lie."""
    inputs = split.case.make(seed=4)
    names = ("q", "k", "v", "mask", "mask_bias", "pair_bias", "gate")
    tensors = {name: distribute(getattr(inputs, name), mesh, getattr(split, name)) for name in names}
    options: dict[str, Any] = {"layout": split.case.layout, "return_lse": True}
    o, lse = evoattn.evoformer_attention(**tensors, **options)  # type: ignore[arg-type, call-overload]
    cotangents = [distribute_tensor(x, mesh, y.placements) for x, y in ((inputs.do, o), (inputs.dlse, lse))]
    leaves = {name: x for name, x in tensors.items() if x is not None and x.requires_grad}
    gradients = dict(zip(leaves, torch.autograd.grad((o, lse), [*leaves.values()], cotangents), strict=True))
    kept = {name: gradient.placements == without_partial(leaves[name].placements) for name, gradient in gradients.items()}
    values = {"o": o, "lse": lse, **{f"d{name}": gradient for name, gradient in gradients.items()}}
    # One process alone: it may not wait for others.
    explained = evoattn.explain(**tensors, layout=split.case.layout) if mesh.get_rank() == 0 else None  # type: ignore[arg-type]
    return {
        "values": {name: x.full_tensor().detach() for name, x in values.items()},
        "placements": (o.placements, lse.placements),
        "kept": kept,
        "scores": explained and explained.problem.scores,
    }


class Block(nn.Module):
    """Gated row attention with a pair bias, as models have it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.bias = nn.Linear(16, 48), nn.Linear(16, 16), nn.Linear(6, 2)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 8)) for part in self.qkv(x).chunk(3, -1))
        o = evoattn.evoformer_attention(q, k, v, pair_bias=self.bias(z).movedim(-1, -3).unsqueeze(-4))
        return self.out(o.flatten(-2))


def train(wrap: Callable[[Block], nn.Module], rank: int = 0, processes: int = 1) -> dict[str, Tensor]:
    """The gradients of one step on a batch of which each process has its share."""
    torch.manual_seed(0)
    block = Block()
    x, z = torch.randn(PROCESSES, 3, 5, 16), torch.randn(PROCESSES, 5, 5, 6)
    share = slice(rank, None, processes)
    model = wrap(block)
    model(x[share], z[share]).square().mean().backward()
    gradients: dict[str, Any] = {name: parameter.grad for name, parameter in block.named_parameters()}
    return {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in gradients.items()}


def refused(mesh: Any) -> dict[str, str]:
    """What is said of tensors that do not lie on one mesh."""
    inputs = case("refused").make(seed=1)
    q, k, v = (distribute(x, mesh, WHOLE) for x in (inputs.q, inputs.k, inputs.v))
    other = init_device_mesh("cpu", (PROCESSES,))
    elsewhere = distribute_tensor(inputs.k, other, [Replicate()])
    said = {}
    for name, arguments in {
        "plain": ((q, inputs.k, v), {}),
        "plain q": ((inputs.q, k, v), {}),
        "plain bias": ((q, k, v), {"pair_bias": inputs.pair_bias}),
        "elsewhere": ((q, elsewhere, v), {}),
        "shape": ((q, k, v), {"mask": distribute(inputs.mask[..., :-1], mesh, WHOLE)}),  # type: ignore[index]
    }.items():
        try:
            evoattn.evoformer_attention(*arguments[0], **arguments[1])  # type: ignore[arg-type, call-overload]
        except (TypeError, ValueError) as error:
            said[name] = f"{type(error).__name__}: {error}"
    return said


def compiled(mesh: Any) -> float:
    """How far compiled code is from code that is not."""
    inputs = case("compiled", dtype=torch.float32).make(seed=1)
    q, k, v, pair_bias = (distribute(x, mesh, ROWS) for x in (inputs.q, inputs.k, inputs.v, inputs.pair_bias))

    def attend(q: Tensor, k: Tensor, v: Tensor, pair_bias: Tensor) -> Tensor:
        return evoattn.evoformer_attention(q, k, v, pair_bias=pair_bias) * 2

    step = torch.compile(attend, fullgraph=True, backend="aot_eager")
    gradients = [torch.autograd.grad(f(q, k, v, pair_bias).sum(), [q, k, v, pair_bias]) for f in (attend, step)]
    return max((x.full_tensor() - y.full_tensor()).abs().max().item() for x, y in zip(*gradients, strict=True))


QUICK = ("rows", "rows_and_heads", "heads_and_queries", "channels", "gate_of_rows_and_heads", "a_sum")
"""Names of splits that `make test` computes."""


def measure_splits(quick: bool) -> dict[str, Any]:
    """Values of the quick or the slow splits, in one of the processes."""
    mesh = init_device_mesh("cpu", (2, 2))
    return {split.case.name: differentiate(split, mesh) for split in SPLITS if (split.case.name in QUICK) == quick}


def measure() -> dict[str, Any]:
    """Values and messages, in one of the processes."""
    mesh, rank = init_device_mesh("cpu", (2, 2)), dist.get_rank()
    results = measure_splits(quick=True)
    results["refused"] = refused(mesh)
    results["compiled"] = compiled(mesh)
    results["ddp"] = train(DistributedDataParallel, rank, PROCESSES)
    results["fsdp"] = train(lambda block: fully_shard(block, mesh=init_device_mesh("cpu", (PROCESSES,))), rank, PROCESSES)
    return results


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return distributed.results(measure, tmp_path_factory.mktemp("processes"), processes=PROCESSES)[0]  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def measured_slowly(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return distributed.results(measure_splits, tmp_path_factory.mktemp("slow"), False, processes=PROCESSES)[0]  # type: ignore[no-any-return]


def check_split(split: Split, result: dict[str, Any]) -> None:
    """Outputs and gradients are those of one process, and lie where q and the inputs do."""
    testing.check(testing.Results(result["values"]), split.case.make(seed=4))
    assert result["placements"] == (split.o, split.lse)
    assert all(result["kept"].values()), result["kept"]


@pytest.mark.parametrize("split", [x for x in SPLITS if x.case.name in QUICK], ids=lambda split: split.case.name)
def test_split_calls(split: Split, measured: dict[str, Any]) -> None:
    check_split(split, measured[split.case.name])


@pytest.mark.slow
@pytest.mark.parametrize("split", [x for x in SPLITS if x.case.name not in QUICK], ids=lambda split: split.case.name)
def test_other_split_calls(split: Split, measured_slowly: dict[str, Any]) -> None:
    check_split(split, measured_slowly[split.case.name])


def test_a_process_computes_its_own_part(measured: dict[str, Any]) -> None:
    scores = 4 * 7 * 9  # heads, queries and keys of a row
    assert measured["rows"]["scores"] == 3 * scores  # of five rows two processes have three and two
    assert measured["rows_and_heads"]["scores"] == 3 * scores // 2
    assert measured["heads_and_queries"]["scores"] == 5 * 2 * 4 * 9
    assert measured["channels"]["scores"] == 5 * scores


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("plain", "TypeError: k must be a DTensor"),
        ("plain q", "TypeError: q must be a DTensor"),
        ("plain bias", "TypeError: pair_bias must be a DTensor"),
        ("elsewhere", "ValueError: k must be on the device mesh of q"),
        ("shape", "ValueError: mask must broadcast to .*= \\[1, 5, 9\\]"),
    ],
)
def test_refusals_name_the_argument(name: str, message: str, measured: dict[str, Any]) -> None:
    assert re.match(message, measured["refused"][name])


def test_compiled_code_splits_too(measured: dict[str, Any]) -> None:
    assert measured["compiled"] < 1e-5


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_models_in_parallel(name: str, measured: dict[str, Any]) -> None:
    """Parameters that are copied to, or split between, processes that each have their own sequences."""
    expected = train(lambda block: block)
    assert measured[name].keys() == expected.keys()
    for parameter, gradient in expected.items():
        torch.testing.assert_close(measured[name][parameter], gradient)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_block(reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self, block: Block) -> None:
            super().__init__()
            self.block = block

        def forward(self, x: Tensor, z: Tensor) -> Tensor:
            return checkpoint(self.block, x.requires_grad_(), z, use_reentrant=reentrant)

    for name, gradient in train(Checkpointed).items():
        torch.testing.assert_close(gradient, train(lambda block: block)[name])
