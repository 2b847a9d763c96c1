"""The call of OpenFold's descendants: lists of biases, any leading axes, and what the originals give for masked rows."""

from typing import Any

import pytest
import torch
from torch import Tensor

from evoattn import evoformer_attention, testing
from evoattn.compat import openfold
from evoattn.compat.deepspeed import DS4Sci_EvoformerAttention
from evoattn.empty_rows import means

pytestmark = pytest.mark.usefixtures("poisoned")

MASK = "mask"
LISTS: dict[str, tuple[tuple[int, ...], list[Any]]] = {
    "a mask and a pair bias": ((2, 5), [MASK, (2, 1, 4, 7, 9)]),
    "a pair bias and a mask": ((2, 5), [(2, 1, 4, 7, 9), MASK]),
    "three, one of them per pair": ((2, 5), [MASK, (2, 1, 4, 7, 9), (2, 5, 1, 7, 9)]),
    "two of keys": ((2, 3, 5), [MASK, (9,), (2, 1, 1, 4, 7, 9)]),
    "none in between": ((5,), [None, MASK, (4, 7, 9)]),
    "no leading axes": ((), [MASK, (4, 7, 9)]),
    "of queries and keys": ((3, 5), [MASK, (3, 1, 4, 7, 1), (7, 9)]),
    "a mask alone": ((2, 5), [MASK]),
    "nothing": ((2, 5), []),
}


def original(q: Tensor, k: Tensor, v: Tensor, biases: list[Tensor | None]) -> Tensor:
    """`openfold.model.primitives._attention`."""
    s = torch.matmul(q, k.transpose(-1, -2))
    for bias in biases:
        if bias is not None:
            s = s + bias
    return torch.matmul(torch.softmax(s, -1), v)


def make(lead: tuple[int, ...], shapes: list[Any], dtype: torch.dtype = torch.float32, masked: float = -1e9) -> list[Any]:
    """q, k, v and biases that require gradients; the mask leaves the first and the last row no key."""
    rng = torch.Generator().manual_seed(len(shapes))

    def leaf(*sizes: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*sizes, generator=rng) * scale).to(dtype).requires_grad_()

    allowed = torch.rand(*lead, 1, 1, 9, generator=rng) > 0.3
    allowed.view(-1, 9)[[0, -1]] = False
    mask = torch.zeros(allowed.shape, dtype=dtype).masked_fill_(~allowed, masked).requires_grad_()
    biases = [mask if shape is MASK else None if shape is None else leaf(*shape) for shape in shapes]
    return [leaf(*lead, 4, 7, 8, scale=8**-0.5), leaf(*lead, 4, 9, 8), leaf(*lead, 4, 9, 6), biases]


def step(call: Any, q: Tensor, k: Tensor, v: Tensor, biases: list[Tensor | None]) -> list[Tensor]:
    """The output and all gradients."""
    o = call(q, k, v, biases)
    leaves = [q, k, v, *(x for x in biases if x is not None)]
    return [o, *torch.autograd.grad(o, leaves, torch.randn(o.shape, generator=torch.Generator().manual_seed(3)).to(o.dtype))]


@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_originals_answer(name: str, dtype: torch.dtype) -> None:
    """Masked rows too: the mean of v in float32, where -1e9 swallows the scores, and ordinary softmax in float64."""
    arguments = make(*LISTS[name], dtype=dtype)
    for actual, expected in zip(step(openfold.attention, *arguments), step(original, *arguments), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=2e-6 if dtype == torch.float32 else 3e-7)


@pytest.mark.parametrize(("dtype", "masked"), [(torch.bfloat16, -1e9), (torch.bfloat16, -1e6), (torch.float16, -65504.0)])
def test_rows_that_16_bits_swallow(dtype: torch.dtype, masked: float) -> None:
    q, k, v, biases = make((2, 5), [MASK, (2, 1, 4, 7, 9)], dtype, masked)
    o, *_, dmask, dpair = step(openfold.attention, q, k, v, biases)
    mean = v.detach().double().mean(-2, keepdim=True)
    assert testing.relative_error(o[0, 0], mean[0, 0].expand(4, 7, 6)) < 2 * torch.finfo(dtype).eps
    swallows = torch.where(biases[0] < 0, -1e9, 0.0)  # what the mask is to 16 bits, for float32
    single = [x.detach().float().requires_grad_() for x in (q, k, v, swallows, biases[1])]
    expected = step(original, *single[:3], single[3:])
    for actual, expected_gradients in zip((dmask, dpair), expected[-2:], strict=True):
        assert testing.relative_error(actual, expected_gradients) < 4 * torch.finfo(dtype).eps


def test_keys_masked_twice_weigh_nothing() -> None:
    """Two masks of -1e9 leave a row the keys that only one of them masks."""
    q, k, v, (mask,) = make((2, 5), [MASK])
    twice = torch.zeros_like(mask)
    twice[..., 3:] = -1e9
    for actual, expected in zip(step(openfold.attention, q, k, v, [mask, twice.requires_grad_()]),
                            step(original, q, k, v, [mask, twice]), strict=True):  # fmt: skip
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("deeper", [-128.0, -2e8, -1e9])
@pytest.mark.parametrize("shape", [(2, 5, 1, 1, 9), (2, 5, 1, 7, 9)], ids=["keys", "pairs"])
def test_keys_of_the_deeper_mask_weigh_nothing(deeper: float, shape: tuple[int, ...]) -> None:
    """If masks add up to two depths in an empty row, float32 leaves the others no weight, however near the depths are."""
    q, k, v, _ = make((2, 5), [])
    pad, more = torch.zeros(shape), torch.zeros(2, 5, 1, 1, 9)
    pad[0, 0], more[0, 0, ..., 4:] = -1e9, deeper
    biases = [pad.requires_grad_(), more.requires_grad_()]
    for actual, expected in zip(step(openfold.attention, q, k, v, biases), step(original, q, k, v, biases), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_swallow_a_small_bias_of_keys_too(dtype: torch.dtype) -> None:
    """A bias of 3 on some keys, beside a mask of -4e4, is no second depth: such numbers are 32 or more apart."""
    q, k, v, _ = make((2, 5), [], dtype, -6e4)
    pad, small = torch.full((2, 5, 1, 1, 9), -4e4, dtype=dtype), torch.zeros(9, dtype=dtype)
    small[4:] = 3.0
    mean = v.detach().double().mean(-2, keepdim=True).expand(2, 5, 4, 7, 6)
    assert testing.relative_error(openfold.attention(q, k, v, [pad, small]), mean) < 2 * torch.finfo(dtype).eps
    deeper = -torch.where(small == 0, 0, 5e3).to(dtype)
    mean = v.detach().double()[..., :4, :].mean(-2, keepdim=True).expand(2, 5, 4, 7, 6)
    assert testing.relative_error(openfold.attention(q, k, v, [pad, deeper]), mean) < 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize("pair_mask", [(2, 1, 4, 7, 9), MASK, None], ids=str)
def test_queries_that_a_mask_per_pair_masks(pair_mask: Any) -> None:
    """As of atoms in windows: the mask has one head, and leaves some queries no key."""
    q, k, v, biases = make((2, 5), [None if pair_mask is None else pair_mask])
    pairs = torch.zeros(2, 5, 1, 7, 9).masked_fill_(torch.rand(2, 5, 1, 7, 9) > 0.5, -1e9)
    pairs[..., 2:4, :] = -1e9
    for actual, expected in zip(step(openfold.attention, q, k, v, [*biases, pairs.requires_grad_()]),
                            step(original, q, k, v, [*biases, pairs]), strict=True):  # fmt: skip
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=2e-6)


def test_the_native_rule_keeps_the_scores() -> None:
    q, k, v, (mask, pair) = make((2, 5), [MASK, (2, 1, 4, 7, 9)])
    o = openfold.attention(q, k, v, [mask, pair], empty_rows="native")
    expected = evoformer_attention(q, k, v, mask_bias=mask, pair_bias=pair, scale=1.0, layout="bnhld")
    assert torch.equal(o, expected)
    assert (o - openfold.attention(q, k, v, [mask, pair])).abs().max() > 0.1


def test_a_query_that_is_not_scaled() -> None:
    q, k, v, biases = make((2, 5), [MASK, (2, 1, 4, 7, 9)])
    for actual, expected in zip(step(lambda q, *args: openfold.attention(q * 8**0.5, *args, scaled=False), q, k, v, biases),
                            step(original, q, k, v, biases), strict=True):  # fmt: skip
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a pair bias and a mask", ((2, 5, 1, 1, 9), (2, 1, 4, 7, 9))),
        ("three, one of them per pair", ((2, 5, 1, 1, 9), (2, 5, 4, 7, 9))),
        ("two of keys", ((2, 3, 5, 1, 1, 9), (1, 2, 1, 1, 4, 7, 9))),
        ("of queries and keys", ((3, 5, 1, 1, 9), (3, 1, 4, 7, 9))),
    ],
)
def test_nothing_is_expanded_that_need_not_be(
    name: str, expected: tuple[tuple[int, ...], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}

    def attend(q: Tensor, k: Tensor, v: Tensor, **args: Any) -> Tensor:
        seen.update(args)
        return evoformer_attention(q, k, v, **args)

    monkeypatch.setattr(openfold, "evoformer_attention", attend)
    openfold.attention(*make(*LISTS[name]))
    mask, pair = (tuple(seen[x].shape) for x in ("mask_bias", "pair_bias"))
    assert mask == expected[0]
    assert [size for size in pair if size != 1] == [size for size in expected[1] if size != 1]
    if name == "a pair bias and a mask":
        assert seen["pair_bias"].untyped_storage().data_ptr() != 0 and seen["pair_bias"].is_leaf


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float64])
def test_masks_of_other_dtypes_are_added(dtype: torch.dtype) -> None:
    """What `scores += bias` does with them."""
    q, k, v, _ = make((2, 5), [])
    bias = (torch.arange(9) % 3).to(dtype)
    torch.testing.assert_close(openfold.attention(q, k, v, [bias]), original(q, k, v, [bias.float()]), rtol=1e-5, atol=2e-6)


def test_attention_under_autocast_agrees_with_openfold() -> None:
    q, k, v, biases = make((2, 5), [MASK, (2, 1, 4, 7, 9)])
    with torch.autocast("cpu", torch.bfloat16):
        o, *gradients = step(openfold.attention, q, k, v, biases)
    assert o.dtype == torch.bfloat16 and all(x.dtype == torch.float32 for x in gradients)
    expected = step(original, q, k, v, biases)
    for actual, expected_gradients in zip((o, *gradients), expected, strict=True):
        assert testing.relative_error(actual, expected_gradients) < 2e-2


def test_a_mask_without_empty_rows_costs_no_means(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU the mask is looked at, but never by a call that torch compiles."""

    def unexpected(*arguments: object) -> None:
        raise AssertionError("means were computed")

    q, k, v, (mask, pair) = make((2, 5), [MASK, (2, 1, 4, 7, 9)])
    partial = torch.zeros_like(mask)
    partial[..., 1:] = -1e9
    torch.compiler.reset()
    compiled = torch.compile(openfold.attention, fullgraph=True, backend="aot_eager")
    expected = compiled(q, k, v, [partial, pair])
    monkeypatch.setattr(means.Means, "apply", unexpected)
    torch.testing.assert_close(openfold.attention(q, k, v, [partial, pair]), expected)
    with pytest.raises(AssertionError, match="means were computed"):
        openfold.attention(q, k, v, [mask, pair])


def test_refusals_name_the_bias() -> None:
    q, k, v, _ = make((2, 5), [])
    with pytest.raises(ValueError, match=r"biases\[1\] must broadcast to the scores, \[2, 5, 4, 7, 9\], got shape \[3, 9\]"):
        openfold.attention(q, k, v, [None, torch.zeros(3, 9)])
    with pytest.raises(TypeError, match=r"biases\[0\] must be a torch.Tensor or None, got float"):
        openfold.attention(q, k, v, [1.0])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="biases must be a list"):
        openfold.attention(q, k, v, torch.zeros(9))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="empty_rows must be 'mean' or 'native', got 'zero'"):
        openfold.attention(q, k, v, [], empty_rows="zero")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"k must be \[\*, H, L, C\], got shape \[9, 8\]"):
        openfold.attention(q, k[0, 0, 0], v, [])
    with pytest.raises(TypeError, match="v must be a torch.Tensor, got None"):
        openfold.attention(q, k, None, [])  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "shape", "told"), [
    ("k", (2, 9, 8), r"k must be \[\*, H, K, D\] with the 4 heads of q, or 1, got shape \[2, 9, 8\]"),
    ("k", (4, 9, 6), r"k must have the 8 channels of q, \[\*, H, K, D\], got shape \[4, 9, 6\]"),
    ("k", (1, 4, 9, 8), r"k must be \[\*, H, K, D\] with the leading axes of q, \[4, 7, 8\], got shape \[1, 4, 9, 8\]"),
    ("v", (4, 7, 5), r"v must have the 9 keys of k, \[\*, H, K, C\], got shape \[4, 7, 5\]"),
    ("biases", (7,), r"biases\[0\] must broadcast to the scores, \[4, 7, 9\], got shape \[7\]"),
    ("biases", (1, 4, 7, 9), r"biases\[0\] must broadcast to the scores, \[4, 7, 9\], got shape \[1, 4, 7, 9\]"),
])  # fmt: skip
def test_refusals_without_leading_axes(name: str, shape: tuple[int, ...], told: str) -> None:
    """The message has the caller's shapes, not those with the axis that is put in front."""
    arguments: dict[str, Any] = {"q": torch.ones(4, 7, 8), "k": torch.ones(4, 9, 8), "v": torch.ones(4, 9, 5), "biases": []}
    arguments[name] = [torch.ones(shape)] if name == "biases" else torch.ones(shape)
    with pytest.raises(ValueError, match=f"^{told}"):
        openfold.attention(**arguments)


@pytest.mark.parametrize("pair", [(1, 1, 4, 7, 9), (4, 7, 9)], ids=str)
def test_deepspeed_gives_the_mean_too(pair: tuple[int, ...]) -> None:
    q, k, v, biases = make((1, 5), [MASK, pair])

    def deepspeed(q: Tensor, k: Tensor, v: Tensor, biases: list[Tensor | None]) -> Tensor:
        Q, K, V = (x.transpose(-2, -3) for x in (q * 8**0.5, k, v))
        return DS4Sci_EvoformerAttention(Q, K, V, biases).transpose(-2, -3)

    for actual, expected in zip(step(deepspeed, q, k, v, biases), step(original, q, k, v, biases), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=2e-6)
    Q, K, V = (x.transpose(-2, -3) for x in (q, k, v))
    native = DS4Sci_EvoformerAttention(Q, K, V, biases, empty_rows="native")
    assert torch.equal(native, evoformer_attention(Q, K, V, mask_bias=biases[0], pair_bias=biases[1]))


def test_deepspeed_too_has_two_depths() -> None:
    q, k, v, _ = make((1, 5), [])
    mask = torch.zeros(1, 5, 1, 1, 9)
    mask[:, 0], mask[:, 0, ..., 4:] = -1e9, -1.2e9
    Q, K, V = (x.transpose(-2, -3) for x in (q * 8**0.5, k, v))
    o = DS4Sci_EvoformerAttention(Q, K, V, [mask, None]).transpose(-2, -3)
    torch.testing.assert_close(o, original(q, k, v, [mask]), rtol=1e-5, atol=2e-6)
