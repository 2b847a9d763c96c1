"""The drop-ins: the contracts of DeepSpeed and cuEquivariance, against float64."""

import dataclasses
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from evoattn import testing
from evoattn.compat.cuequivariance import triangle_attention
from evoattn.compat.deepspeed import DS4Sci_EvoformerAttention
from evoattn.testing.cases import CaseInputs
from evoattn.testing.oracle import Results, low_precision

pytestmark = pytest.mark.usefixtures("poisoned")


def some_rows(inputs: CaseInputs, part: slice) -> CaseInputs:
    cut = {name: getattr(inputs, name)[:, part] for name in ("q", "k", "v", "mask_bias", "do")}
    return dataclasses.replace(inputs, case=dataclasses.replace(inputs.case, n=cut["q"].shape[1]), **cut)


def by_rows(function, inputs: CaseInputs, rows: int) -> Results:
    """A dense computation of few rows n at a time: full-size problems would need many gigabytes in float64."""
    parts = [function(some_rows(inputs, slice(start, start + rows))).values for start in range(0, inputs.case.n, rows)]
    joined = {name: torch.cat([part[name] for part in parts], 1) for name in parts[0] if name != "dpair_bias"}
    joined["dpair_bias"] = torch.stack([part["dpair_bias"].double() for part in parts]).sum(0)
    return Results(joined)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [
    (1, 16, 256, 4, 32),
    pytest.param((1, 256, 256, 4, 32), marks=pytest.mark.slow),
    pytest.param((1, 512, 256, 8, 8), marks=pytest.mark.slow),
], ids=str)  # fmt: skip
def test_deepspeeds_published_test(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """The sizes, mask and bias of DeepSpeed's own unit test, and the first with fewer rows.

    Theirs compares two low-precision results within 0.01 or 0.05, absolute; here every value is within a small multiple of
    what dense low precision loses against float64.
    """
    _, n, length, h, d = shape
    case = testing.Case("published", n=n, h=h, lq=length, lk=length, d=d, dtype=dtype, mask_bias="minus_1e9", pair_bias="b1hqk")
    inputs = dataclasses.replace(case, gradients=("q", "k", "v", "pair_bias")).make(seed=0)
    leaves = {name: getattr(inputs, name).clone().requires_grad_() for name in ("q", "k", "v", "pair_bias")}
    o = DS4Sci_EvoformerAttention(leaves["q"], leaves["k"], leaves["v"], [inputs.mask_bias, leaves["pair_bias"]])
    o.backward(inputs.do)
    actual = Results({"o": o.detach(), **{f"d{name}": leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}})
    expected = by_rows(testing.oracle, inputs, 32)
    head = some_rows(inputs, slice(0, 16))
    lost = testing.errors(low_precision(head), testing.oracle(head))
    for name, error in testing.errors(actual, expected).items():
        ceiling = {torch.float16: 1e-3, torch.bfloat16: 6e-3}[dtype]
        assert error <= min(2 * lost[name], ceiling), f"{name}: {error:.1e}, dense low precision {lost[name]:.1e}"


def qkv(length: int, d: int, dtype: torch.dtype = torch.float32, n: int = 3, h: int = 2) -> list[Tensor]:
    rng = torch.Generator().manual_seed(length * d)
    return [torch.randn(1, n, length, h, d, generator=rng).to(dtype) for _ in range(3)]


def dense(q: Tensor, k: Tensor, v: Tensor, *biases: Tensor | None) -> Tensor:
    q, k, v = (x.double().transpose(2, 3) for x in (q, k, v))
    s = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    for bias in biases:
        s = s if bias is None else s + bias.double()
    return (s.softmax(-1) @ v).transpose(2, 3)


@pytest.mark.parametrize("length", [1, 2, 16, 17])
@pytest.mark.parametrize("d", [8, 96])
def test_deepspeed_without_its_limits(length: int, d: int) -> None:
    """L <= 16 and D > 64, backward included."""
    q, k, v = (x.requires_grad_() for x in qkv(length, d))
    bias = torch.randn(1, 1, 2, length, length)
    o = DS4Sci_EvoformerAttention(q, k, v, [None, bias])
    torch.testing.assert_close(o.double(), dense(q, k, v, bias), rtol=1e-5, atol=1e-5)
    cotangent = torch.randn_like(o)
    actual = torch.autograd.grad(o, (q, k, v), cotangent)
    expected_gradients = torch.autograd.grad(dense(q, k, v, bias), (q, k, v), cotangent.double())
    for value, expected in zip(actual, expected_gradients, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5)


def test_deepspeed_biases_in_every_form() -> None:
    q, k, v = qkv(9, 8)
    mask_bias, pair_bias = torch.randn(1, 3, 1, 1, 9), torch.randn(1, 1, 2, 9, 9)
    for biases in ([], [None], [None, None], [mask_bias], [mask_bias, None], [None, pair_bias], [mask_bias, pair_bias]):
        before = list(biases)
        o = DS4Sci_EvoformerAttention(q, k, v, biases)
        torch.testing.assert_close(o.double(), dense(q, k, v, *biases), rtol=1e-5, atol=1e-5)
        assert len(biases) == len(before) and all(a is b for a, b in zip(biases, before, strict=True)), (
            "the caller's list changed"
        )
    o = DS4Sci_EvoformerAttention(q, k, v, (mask_bias[:, :1], pair_bias[:, :, :1]))
    torch.testing.assert_close(o.double(), dense(q, k, v, mask_bias[:, :1], pair_bias[:, :, :1]), rtol=1e-5, atol=1e-5)


def test_deepspeed_refuses_clearly() -> None:
    q, k, v = qkv(9, 8)
    with pytest.raises(ValueError, match="at most two entries.*got 3"):
        DS4Sci_EvoformerAttention(q, k, v, [None, None, None])
    for biases in (torch.zeros(2, 1, 1), None):
        with pytest.raises(TypeError, match="biases must be a list"):
            DS4Sci_EvoformerAttention(q, k, v, biases)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="biases\\[0\\] must broadcast to .* is biases\\[1\\]"):
        DS4Sci_EvoformerAttention(q, k, v, [torch.zeros(1, 1, 2, 9, 9)])
    assert list(inspect.signature(DS4Sci_EvoformerAttention).parameters) == ["Q", "K", "V", "biases", "empty_rows"]


def cue_inputs(seed: int = 0, lq: int = 7, lk: int = 9, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    rng = torch.Generator().manual_seed(seed)
    sizes = [(2, 3, 4, lq, 8), (2, 3, 4, lk, 8), (2, 3, 4, lk, 8), (2, 1, 4, lq, lk)]
    return [torch.randn(size, generator=rng).to(dtype) for size in sizes]


def cue_dense(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None, scale: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The definition in cuEquivariance's documentation, in float64."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    s = q.double() @ k.double().transpose(-1, -2) * scale + bias.double()
    s = s if mask is None else torch.where(mask, s, -1e9)
    return s.softmax(-1) @ v.double(), s.logsumexp(-1), s.amax(-1)


@pytest.mark.parametrize("scale", [None, 0.2])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuequivariance_drop_in_agrees_with_its_definition(dtype: torch.dtype, masked: bool, scale: float | None) -> None:
    q, k, v, _ = (x.requires_grad_() for x in cue_inputs(dtype=dtype))
    bias = cue_inputs(1)[3].requires_grad_()  # float32 beside bfloat16, as their users pass it
    mask = torch.rand(2, 3, 1, 1, 9) > 0.3
    mask[0, 1] = False  # a row with nothing to keep: equal logits, the mean of v
    mask = mask if masked else None
    o, lse, largest = triangle_attention(q, k, v, bias, mask, scale, return_aux=True)
    expected = cue_dense(q, k, v, bias, mask, scale)
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(o.double(), expected[0], **tolerance)
    for value, wanted in zip((lse, largest), expected[1:], strict=True):
        assert value.dtype == torch.float32 and value.shape == (2, 3, 4, 7) and not value.requires_grad
        torch.testing.assert_close(value.double(), wanted.detach(), rtol=1e-5, atol=1e-5)
    cotangent = torch.randn_like(o)
    actual = torch.autograd.grad(o, (q, k, v, bias), cotangent)
    expected_gradients = torch.autograd.grad(expected[0], (q, k, v, bias), cotangent.double())
    for value, wanted in zip(actual, expected_gradients, strict=True):
        torch.testing.assert_close(value.double(), wanted.double(), **{key: 2 * x for key, x in tolerance.items()})


def test_cuequivariance_with_the_native_rule() -> None:
    q, k, v, bias = cue_inputs()
    mask = torch.ones(2, 3, 1, 1, 9, dtype=torch.bool)
    mask[0, 1] = False
    o, lse, _ = triangle_attention(q, k, v, bias, mask, return_aux=True, empty_rows="native")
    assert not o[0, 1].any() and (lse[0, 1] == -torch.inf).all()
    assert torch.equal(o, triangle_attention(q, k, v, bias, mask, empty_rows="native"))
    with pytest.raises(ValueError, match="empty_rows must be"):
        triangle_attention(q, k, v, bias, mask, empty_rows=True)  # type: ignore[call-overload]


def test_cuequivariance_kv_lengths() -> None:
    q, k, v, bias = cue_inputs()
    lengths = torch.tensor([[9, 4, 0], [1, 100, 5]], dtype=torch.int32).reshape(2, 3, 1, 1, 1)
    mask = torch.arange(9) < lengths
    o, lse, largest = triangle_attention(q, k, v, bias, kv_lengths=lengths, return_aux=True)
    empty = (lengths == 0).reshape(2, 3, 1, 1)
    expected = cue_dense(q, k, v, bias, mask)
    torch.testing.assert_close(o.double(), torch.where(empty.unsqueeze(-1), 0, expected[0]), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), torch.where(empty, 0, expected[1]), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(largest.double(), torch.where(empty, 0, expected[2]), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="exclude each other"):
        triangle_attention(q, k, v, bias, mask, kv_lengths=lengths)
    with pytest.raises(TypeError, match=r"kv_lengths must be a torch\.Tensor, got list"):
        triangle_attention(q, k, v, bias, kv_lengths=[1, 2])  # type: ignore[arg-type, call-overload]
    with pytest.raises(TypeError, match="kv_lengths must be int32, got int64"):
        triangle_attention(q, k, v, bias, kv_lengths=lengths.long())
    with pytest.raises(ValueError, match=r"kv_lengths must be \[B, N, 1, 1, 1\]"):
        triangle_attention(q, k, v, bias, kv_lengths=lengths[:1])


FOUR = {"q": (3, 4, 7, 8), "k": (3, 4, 9, 8), "v": (3, 4, 9, 5), "bias": (1, 4, 7, 9)}
FOUR_AXES = r"\[B, N, H, {0}\], or \[N, H, {0}\] for B = 1"


@pytest.mark.parametrize("return_aux", [False, True])
@pytest.mark.parametrize(("name", "shape", "told"), [
    ("q", (4, 7, 8), f"q must be {FOUR_AXES.format('Q, D')}, got shape \\[4, 7, 8\\]"),
    ("q", (1, 1, 3, 4, 7, 8), f"q must be {FOUR_AXES.format('Q, D')}, got shape \\[1, 1, 3, 4, 7, 8\\]"),
    ("k", (4, 9, 8), f"k must be {FOUR_AXES.format('K, D')}, got shape \\[4, 9, 8\\]"),
    ("v", (9, 5), f"v must be {FOUR_AXES.format('K, C')}, got shape \\[9, 5\\]"),
    ("k", (2, 4, 9, 8), r"k must be \[B, N, H, K, D\] with the leading axes of q, \[3, 4, 7, 8\], got shape \[2, 4, 9, 8\]"),
    ("v", (2, 3, 4, 9, 5), r"v must be \[B, N, H, K, C\] with the leading axes of q, \[3, 4, 7, 8\], got shape \[2, 3,"),
    ("k", (3, 2, 9, 8), r"k must be \[B, N, H, K, D\] with the 4 heads of q, or 1, got shape \[3, 2, 9, 8\]"),
    ("k", (3, 4, 9, 6), r"k must have the 8 channels of q, \[B, N, H, K, D\], got shape \[3, 4, 9, 6\]"),
    ("v", (3, 4, 7, 5), r"v must have the 9 keys of k, \[B, N, H, K, C\], got shape \[3, 4, 7, 5\]"),
    ("bias", (1, 4, 9, 7), r"bias must broadcast to \[N, H, Q, K\] = \[3, 4, 7, 9\], got shape \[1, 4, 9, 7\]"),
    ("bias", (2, 1, 4, 7, 9), r"bias must broadcast to \[B, N, H, Q, K\] = \[1, 3, 4, 7, 9\], got shape \[2, 1, 4, 7, 9\]"),
    ("mask", (3, 1, 9), r"mask must be \[B, N, 1, 1, K\], or \[N, 1, 1, K\] for B = 1, got shape \[3, 1, 9\]"),
    ("mask", (9,), r"mask must be \[B, N, 1, 1, K\], or \[N, 1, 1, K\] for B = 1, got shape \[9\]"),
    ("mask", (3, 1, 1, 7), r"mask must broadcast to \[N, 1, 1, K\] = \[3, 1, 1, 9\], got shape \[3, 1, 1, 7\]"),
    ("mask", (3, 4, 1, 9), r"mask must broadcast to \[N, 1, 1, K\] = \[3, 1, 1, 9\], got shape \[3, 4, 1, 9\]"),
    ("kv_lengths", (3, 1, 1), r"kv_lengths must be \[B, N, 1, 1, 1\] = \[1, 3, 1, 1, 1\], got shape \[3, 1, 1\]"),
])  # fmt: skip
def test_cuequivariance_names_the_argument_as_it_came(name: str, shape: tuple[int, ...], told: str, return_aux: bool) -> None:
    """The message names the caller's argument and shape, not the five axes that it is brought to."""
    tensors = {key: torch.ones(size) for key, size in FOUR.items()}
    tensors[name] = torch.ones(shape, dtype=torch.int32 if name == "kv_lengths" else torch.float32)
    with pytest.raises(ValueError, match=f"^{told}"):
        triangle_attention(**tensors, return_aux=return_aux)  # type: ignore[call-overload]


@pytest.mark.parametrize(("name", "value", "told"), [
    ("bias", torch.ones(4, 7, 9) > 0, "bias must be float16, bfloat16, float32 or float64, got bool; a bool mask goes to mask"),
    ("bias", None, r"bias must be a torch\.Tensor, got NoneType"),
    ("mask", [True], r"mask must be a torch\.Tensor or None, got list"),
    ("q", None, r"q must be a torch\.Tensor, got NoneType"),
])  # fmt: skip
def test_cuequivariance_names_the_argument_of_another_type(name: str, value: Any, told: str) -> None:
    arguments: dict[str, Any] = {key: torch.ones(size) for key, size in FOUR.items()} | {name: value}
    with pytest.raises(TypeError, match=f"^{told}"):
        triangle_attention(**arguments)


@pytest.mark.parametrize("four", ["q", "k", "v", "bias"])
def test_cuequivariance_takes_four_axes_beside_five(four: str) -> None:
    tensors = {name: torch.randn(size) for name, size in FOUR.items()}
    expected = triangle_attention(**tensors)  # type: ignore[call-overload]
    mixed = {name: x if name == four else x.unsqueeze(0) for name, x in tensors.items()}
    assert torch.equal(triangle_attention(**mixed), expected)  # type: ignore[call-overload]


def test_cuequivariance_four_axes_int_masks_and_shared_bias() -> None:
    q, k, v, bias = (x[:1] for x in cue_inputs())
    mask = torch.rand(3, 1, 1, 9) > 0.3
    mask[..., 0] = True
    five = triangle_attention(q, k, v, bias, mask[None])
    torch.testing.assert_close(triangle_attention(q[0], k[0], v[0], bias[0], mask), five)
    torch.testing.assert_close(triangle_attention(q, k, v, bias, mask[None].int()), five)  # type: ignore[arg-type]
    q, k, v, bias = cue_inputs()
    torch.testing.assert_close(
        triangle_attention(q, k, v, bias[:1, :, :1]), triangle_attention(q, k, v, bias[:1, :, :1].expand(2, 1, 4, 7, 9))
    )
    names = ["q", "k", "v", "bias", "mask", "scale", "return_aux", "kv_lengths", "empty_rows"]
    assert list(inspect.signature(triangle_attention).parameters) == names


def test_cuequivariance_of_meta_tensors() -> None:
    o, lse, largest = triangle_attention(*(x.to("meta") for x in cue_inputs()), return_aux=True)
    assert o.is_meta and lse.shape == largest.shape == o.shape[:-1]


@pytest.mark.parametrize("missing", ["nothing", "mask", "kv_lengths"])
def test_cuequivariance_without_keys(missing: str) -> None:
    """Both statistics are 0 there, whatever says that there is no key."""
    arguments: dict[str, dict[str, torch.Tensor]] = {
        "nothing": {},
        "mask": {"mask": torch.ones(2, 3, 1, 1, 0, dtype=torch.bool)},
        "kv_lengths": {"kv_lengths": torch.zeros(2, 3, 1, 1, 1, dtype=torch.int32)},
    }
    o, lse, largest = triangle_attention(*cue_inputs(lk=0), **arguments[missing], return_aux=True)
    assert not o.any() and not lse.any() and not largest.any()


def test_cuequivariance_statistics_under_autocast() -> None:
    """Those of q and k as they are cast; the sum of exponentials is no less than the largest."""
    q, k, v, bias = (4 * x for x in cue_inputs())
    cast = (x.bfloat16() for x in (q, k, v))
    _, expected_lse, expected = triangle_attention(*cast, bias, return_aux=True)
    with torch.autocast("cpu", torch.bfloat16):
        _, lse, largest = triangle_attention(q, k, v, bias, return_aux=True)
    torch.testing.assert_close(lse, expected_lse)
    torch.testing.assert_close(largest, expected)
    assert (largest - lse).max() < 1e-4


@pytest.mark.parametrize(("lq", "lk"), [(0, 5), (5, 0), (1, 1)])
def test_cuequivariance_drop_in_of_few_queries_has_no_nan(lq: int, lk: int) -> None:
    q, k, v, bias = cue_inputs(lq=lq, lk=lk)
    o, lse, largest = triangle_attention(q, k, v, bias, torch.ones(2, 3, 1, 1, lk, dtype=torch.bool), return_aux=True)
    assert o.shape == q.shape and lse.shape == largest.shape == q.shape[:-1] and not o.isnan().any()


def test_the_largest_logit_is_taken_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = cue_inputs()
    _, _, unblocked = triangle_attention(*arguments, return_aux=True)
    monkeypatch.setattr("evoattn.compat.cuequivariance._BLOCK_SCORES", 1)
    _, _, blocks = triangle_attention(*arguments, return_aux=True)
    torch.testing.assert_close(blocks, unblocked)


def empty_row() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, a mask bias whose second row has no key, and a pair bias."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 6, 2, 8, dtype=torch.float64) for _ in range(3))
    mask_bias = torch.zeros(2, 4, 1, 1, 6, dtype=torch.float64)
    mask_bias[:, 1] = -1e9
    return q, k, v, mask_bias


@pytest.mark.parametrize("shape", [(1, 1, 2, 6, 6), (2, 1, 2, 6, 6), (2, 1, 1, 6, 6)])
def test_gradients_of_many_cotangents_at_once(shape: tuple[int, ...]) -> None:
    q, k, v, mask_bias = empty_row()
    pair_bias = torch.randn(shape, dtype=torch.float64)
    leaves = [x.requires_grad_() for x in (q, k, v, pair_bias)]
    o = DS4Sci_EvoformerAttention(q, k, v, [mask_bias, pair_bias])
    cotangents = torch.randn(3, *o.shape, dtype=torch.float64)
    actual = torch.autograd.grad(o, leaves, cotangents, retain_graph=True, is_grads_batched=True)
    each = [torch.autograd.grad(o, leaves, cotangent, retain_graph=True) for cotangent in cotangents]
    for one, others in zip(actual, zip(*each, strict=True), strict=True):
        torch.testing.assert_close(one, torch.stack(others), rtol=1e-9, atol=1e-9)


def test_a_second_derivative_raises() -> None:
    q, k, v, mask_bias = empty_row()
    q.requires_grad_()
    o = DS4Sci_EvoformerAttention(q, k, v, [mask_bias, None])
    (dq,) = torch.autograd.grad(o.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(dq.square().sum(), q)
