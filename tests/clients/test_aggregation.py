"""Atoms to tokens and back, against the clients' own arithmetic, and in steps that are recorded."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evoattn.clients import aggregation, graphs, openfold3
from evoattn.clients.graphs import FIRST
from evoattn.clients.site import Count
from tests.helpers.recorders import Traced

TOKENS, COUNTS = 5, torch.tensor([3, 0, 4, 1, 2])
"""Atoms of each token, which lie one after the other. One token has none."""

GROUP = torch.repeat_interleave(torch.arange(TOKENS), COUNTS)
ATOMS = len(GROUP)


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def scattered(x: Tensor, group: Tensor, groups: int) -> Tensor:
    """Sums of the rows of groups, as the clients compute them on a CPU."""
    index = group.expand(x.shape[:-1]).unsqueeze(-1).expand_as(x).long()
    return x.new_zeros(*x.shape[:-2], groups, x.shape[-1]).scatter_add_(-2, index, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
def test_sums_are_those_of_scatter_add(batch: tuple[int, ...], dtype: torch.dtype) -> None:
    x = draw(1, *batch, ATOMS, 4).to(dtype)
    for group in (GROUP, GROUP.flip(0), GROUP.int().expand(*batch, ATOMS)):
        x32 = x.float() if dtype == torch.bfloat16 else x  # only the last sum is rounded
        assert torch.equal(aggregation.sums(x, group, TOKENS), scattered(x32, group, TOKENS).to(dtype))


def test_sums_of_samples_with_groups_of_their_own() -> None:
    x, group = draw(1, 2, 3, ATOMS, 4), torch.stack([GROUP, GROUP.flip(0)])[:, None]
    assert torch.equal(aggregation.sums(x, group, TOKENS), scattered(x, group, TOKENS))
    assert not aggregation.sums(x, group, TOKENS)[:, :, 1].any(), "a token without atoms"


def never(*_: Any, **__: Any) -> Tensor:
    raise AssertionError("the original was called")


def original(*_: Any, **__: Any) -> Tensor:
    return torch.tensor(-1.0)


def by_token(x: Tensor, group: Tensor, tokens: int) -> Tensor:
    """Protenix' mean."""
    number = scattered(x.new_ones(*group.shape, 1), group, tokens)
    return scattered(x, group, tokens) / torch.where(number < 1, 1, number)


@torch.no_grad()
def test_means_by_token() -> None:
    means, x = aggregation.means_by_token(never, Count()), draw(1, 3, ATOMS, 4)
    assert torch.equal(means(x, GROUP, n_token=TOKENS, reduce="mean"), by_token(x, GROUP, TOKENS))
    fallback = aggregation.means_by_token(original, Count())
    for args in ((x, GROUP), (x, GROUP, TOKENS, "sum"), (x.int(), GROUP, TOKENS)):
        assert fallback(*args) == -1
    with torch.enable_grad():
        assert fallback(x, GROUP, TOKENS) == -1, "gradients are those of the original"


def by_mask(token_mask: Tensor, group: Tensor, mask: Tensor, x: Tensor) -> Tensor:
    """OpenFold-3's mean."""
    tokens = token_mask.shape[-1]
    group = group * mask.int() + tokens * (1 - mask.int())
    total = scattered(x * mask[..., None], group, tokens + 1)[..., :tokens, :]
    return total / (scattered(mask[..., None], group, tokens + 1)[..., :tokens, :] + 1e-9)


@torch.no_grad()
def test_means_by_mask() -> None:
    means, x = aggregation.means_by_mask(never, Count()), draw(1, 2, 3, ATOMS, 4)
    token_mask, group, mask = torch.ones(2, 1, TOKENS), GROUP.expand(2, 1, ATOMS), torch.ones(2, 1, ATOMS)
    mask[0, 0, 3:5] = mask[1, 0, -1] = 0
    x[0, 0, 3] = torch.nan  # nobody reads a masked atom
    assert torch.equal(means(token_mask, group, mask, x, -2, "mean"), by_mask(token_mask, group, mask, x))
    low, high = x.bfloat16(), by_mask(token_mask, group, mask, x.bfloat16().float())
    assert torch.equal(means(token_mask, group, mask, low, -2, "mean"), high), "the mask's dtype is the wider one"
    fallback = aggregation.means_by_mask(original, Count())
    for more in ((), (-2, "sum")):
        assert fallback(token_mask, group, mask, x, *more) == -1
    with torch.enable_grad():
        assert fallback(token_mask, group, mask, x, -2) == -1


class Atoms(nn.Module):
    """A module of OpenFold-3 that calls the function with a batch that has masks."""

    def __init__(self, broadcast: Callable[..., Tensor]) -> None:
        super().__init__()
        self.broadcast = broadcast

    def forward(self, batch: dict[str, Tensor], x: Tensor, **options: Any) -> Tensor:
        return self.broadcast(batch["token_mask"], batch["counts"], x, token_dim=-2, **options)


@torch.no_grad()
def test_from_tokens_repeats_each_token_for_its_atoms() -> None:
    counts = torch.stack([COUNTS, COUNTS.clone()])[:, None]
    counts[1, 0, -1] = 1  # one atom less, which is padding
    token_mask = torch.ones(2, 1, TOKENS)
    token_mask[0, 0, 2] = 0  # four atoms less
    x, batch = draw(1, 2, 3, TOKENS, 4), {"token_mask": token_mask, "counts": counts, "atom_mask": torch.ones(2, 1, ATOMS)}
    expected = torch.zeros(2, 3, ATOMS, 4)
    for i, number in enumerate((counts * token_mask.int())[:, 0]):
        repeated = torch.repeat_interleave(x[i], number, dim=1)
        expected[i, :, : repeated.shape[1]] = repeated
    module = Atoms(aggregation.from_tokens(never, Count()))
    forward = aggregation.counting_atoms(Atoms.forward, Count())
    assert torch.equal(forward(module, batch=batch, x=x), expected) and torch.equal(forward(module, batch, x), expected)
    fallback = Atoms(aggregation.from_tokens(original, Count()))
    assert fallback.forward(batch, x) == -1, "nobody said how many atoms there are"
    assert forward(fallback, batch, x, max_num_atoms_per_token=4) == -1
    with torch.enable_grad():
        assert forward(fallback, batch, x) == -1


class Denoiser(nn.Module):
    """A step that takes atoms to tokens and back."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.mean = aggregation.means_by_token(never, Count())
        self.masked = aggregation.means_by_mask(never, Count())
        self.atoms = Atoms(aggregation.from_tokens(never, Count()))
        self.eval()

    def original(self, batch: dict[str, Tensor], x: Tensor) -> Tensor:
        tokens = self.mean(self.linear(x), batch["group"], TOKENS)
        tokens = tokens + self.masked(batch["token_mask"], batch["group"], batch["atom_mask"], x, -2)
        output: Tensor = aggregation.counting_atoms(Atoms.forward, Count())(self.atoms, batch, tokens)
        return output

    forward = original


@torch.no_grad()
def test_all_of_it_is_recorded() -> None:
    count, ones = Count(), torch.ones(1, TOKENS)
    kind = type("Denoiser", (Denoiser,), {"forward": graphs.step(Denoiser.original, count, Traced())})
    module = kind()
    batch = {"token_mask": ones, "counts": COUNTS[None], "atom_mask": torch.ones(1, ATOMS), "group": GROUP[None]}
    for seed in range(6):
        x = draw(seed, 3, ATOMS, 4)
        assert torch.equal(module(batch, x), module.original(batch, x))
    assert (count.replaced, count.passed_on) == (3, {FIRST: 3})


class Rollout(nn.Module):
    """OpenFold-3's loop, which says whether its steps will look for cyclic chains."""

    def forward(self, batch: dict[str, Any], steps: int) -> Any:
        return batch, "cyclic_mask" in batch, steps


@pytest.mark.parametrize(("cyclic", "grad", "there"), [(False, False, False), (True, False, True), (False, True, True)])
def test_the_mask_of_cyclic_chains(cyclic: bool, grad: bool, there: bool) -> None:
    """Each step of OpenFold-3 waits to see whether a chain is cyclic. Its features always have that mask."""
    run = openfold3.rollout(Rollout.forward, Count())
    batch = {"token_mask": torch.ones(1, 4), "cyclic_mask": torch.tensor([[False, False, cyclic, False]])}
    with torch.set_grad_enabled(grad):
        seen_batch, output, steps = run(Rollout(), batch=batch, steps=3)
    assert (output, steps) == (there, 3) and seen_batch["token_mask"] is batch["token_mask"]
    assert "cyclic_mask" in batch, "the caller's"
    assert run(Rollout(), batch={}, steps=3)[1] is False
