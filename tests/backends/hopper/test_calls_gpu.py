"""The Hopper backend on a GPU: the same bits again, sizes past 32 bits, streams, CUDA graphs, calls one right after another."""

import dataclasses

import pytest
import torch
from torch import Tensor

import evoattn
from evoattn import testing
from tests.backends.hopper.gpu_calls import ON_HOPPER, WAYS, example, forward
from tests.helpers.gpu_checks import capture, check_in_turn, check_offsets, check_same_bits

pytestmark = ON_HOPPER


@pytest.mark.parametrize("length", [100, 397, 600])
def test_two_runs_are_bit_equal(length: int) -> None:
    inputs = example(lq=length, lk=length, n=150)
    check_same_bits(forward(inputs).values, forward(inputs).values)


def test_rows_of_one_block_are_bit_equal_run_after_run() -> None:
    """Where rows are short, the next row's queries arrive while a slow warp may still be reading those of the last."""
    inputs = example(n=150, h=3, lq=512, lk=65)
    mask = torch.arange(65) < torch.randint(1, 40, (150, 1), generator=torch.Generator().manual_seed(7))
    inputs = dataclasses.replace(inputs, mask=mask.view_as(inputs.mask).cuda())
    first = forward(inputs).values
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    with torch.no_grad():
        for _ in range(6000):
            o, lse = evoattn.evoformer_attention(
                inputs.q, inputs.k, inputs.v, mask=inputs.mask, pair_bias=inputs.pair_bias, backend="hopper", return_lse=True
            )
            wrong += (o != first["o"]).sum() + (lse != first["lse"]).sum()
    assert wrong == 0


@pytest.mark.parametrize("mask_bias", [None, "finite"])
@pytest.mark.parametrize(("length", "n"), [(397, 300), (1000, 100)])
def test_deterministic_gradients_are_bit_equal(length: int, n: int, mask_bias: str | None) -> None:
    inputs = example(n=n, lq=length, lk=length, mask_bias=mask_bias)
    check_same_bits(*(testing.run(inputs, "hopper", deterministic=True).values for _ in range(2)))


def test_more_rows_than_a_grid_axis_takes() -> None:
    inputs = example(n=70_000, lq=16, lk=16, h=1, d=8)
    testing.check(forward(inputs), inputs)


@pytest.mark.parametrize("length", [16, 17], ids=["copied in words", "one by one"])
def test_more_batches_of_a_pair_bias_than_a_grid_axis_takes(length: int) -> None:
    """48 channels have it laid out anew, by a kernel of its own in either pass."""
    inputs = example(lead=(70_000,), n=2, lq=length, lk=length, h=1, d=48)
    testing.check(testing.run(inputs, "hopper"), inputs)


@pytest.mark.usefixtures("most_of_the_memory")
@pytest.mark.parametrize("which", ["q", "k", "v", "pair_bias", "do"])
def test_offsets_past_2_to_31(which: str) -> None:
    check_offsets(which, "hopper")


@pytest.mark.usefixtures("most_of_the_memory", "one_kernel")
@pytest.mark.parametrize("which", ["q", "k", "v", "do"])
def test_offsets_past_2_to_31_without_a_pair_bias(which: str) -> None:
    check_offsets(which, "hopper", pair_bias=None)


@pytest.mark.usefixtures("most_of_the_memory")
@pytest.mark.parametrize("with_pair_bias", [True, False])
def test_rows_past_2_to_31_elements(with_pair_bias: bool) -> None:
    """All that a call reads and writes is longer than 2^31 elements: the last rows are those of a call of their own."""
    n, l, h, d = 66_000, 256, 4, 32
    mask = torch.rand(1, n, l, device="cuda") > 0.3
    pair = torch.randn(1, 1, h, l, l, device="cuda", dtype=torch.bfloat16) if with_pair_bias else None
    leaves = [torch.randn(1, n, l, h, d, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
    do = torch.randn_like(leaves[0])
    assert do.numel() > 2**31
    o = evoattn.evoformer_attention(*leaves, mask=mask, pair_bias=pair, backend="hopper")
    gradients = torch.autograd.grad(o, leaves, do)
    last = slice(n - 3, n)
    few = [x[:, last].detach().clone().requires_grad_() for x in leaves]
    expected = evoattn.evoformer_attention(*few, mask=mask[:, last], pair_bias=pair, backend="hopper")
    assert torch.equal(o[:, last], expected)
    for gradient, y in zip(gradients, torch.autograd.grad(expected, few, do[:, last]), strict=True):
        assert testing.relative_error(gradient[:, last], y) < 2e-3


def test_a_call_on_a_side_stream_gives_the_same_bits() -> None:
    inputs = example()
    expected = forward(inputs).values
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # the inputs arrive late on this stream, so a launch on another would read the old ones
        late = dataclasses.replace(inputs, **{name: x.clone() for name, x in inputs.differentiable.items()})
        results = forward(late).values
    stream.synchronize()
    check_same_bits(results, expected)


@pytest.mark.parametrize("length", [192, 600])
def test_graph_capture_and_replay(length: int) -> None:
    inputs = example(lq=length, lk=length)

    def step() -> Tensor:
        with torch.no_grad():
            return evoattn.evoformer_attention(
                inputs.q, inputs.k, inputs.v, mask=inputs.mask, pair_bias=inputs.pair_bias, backend="hopper"
            )

    graph, captured = capture(step)
    for x in inputs.differentiable.values():
        x.copy_(torch.randn_like(x))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, step())


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("way", WAYS, indirect=True)
@pytest.mark.parametrize("n", [8, 40])
def test_graph_of_a_training_step(n: int, way: dict, deterministic: bool) -> None:
    inputs = example(n=n, **way)
    leaves = [x.requires_grad_() for x in inputs.differentiable.values()]

    def step() -> tuple[Tensor, ...]:
        call = {"mask": inputs.mask, "pair_bias": inputs.pair_bias, "backend": "hopper", "deterministic": deterministic}
        o = evoattn.evoformer_attention(inputs.q, inputs.k, inputs.v, **call)  # type: ignore[call-overload]
        return o, *torch.autograd.grad(o, leaves, inputs.do)

    graph, captured = capture(step)
    with torch.no_grad():
        for leaf in leaves:
            leaf.copy_(torch.randn_like(leaf))
    right = step()
    for _ in range(2):  # at once: a kernel that reads too early finds words of the old inputs; again: a sum not cleared shows
        graph.replay()
        torch.cuda.synchronize()
        for value, expected in zip(captured, right, strict=True):
            if deterministic:
                assert torch.equal(value, expected)
            else:
                assert testing.relative_error(value, expected) < 5e-3


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("way", WAYS, indirect=True)
@pytest.mark.parametrize("n", [5, 40])
def test_calls_in_turn_keep_to_themselves(n: int, way: dict, deterministic: bool) -> None:
    check_in_turn(example(n=n, **way).case, "hopper", deterministic=deterministic)


def test_auto_takes_both_passes() -> None:
    inputs = example(mask_bias="finite")
    q, k, v, mask_bias, pair_bias = (x.requires_grad_() for x in inputs.differentiable.values())
    explanation = evoattn.explain(q, k, v, mask=inputs.mask, mask_bias=mask_bias, pair_bias=pair_bias)
    assert explanation.backend == "hopper" and explanation.backward_backend is None
