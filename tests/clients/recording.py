"""Modules whose steps are recorded by a recorder that needs no GPU."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from evoattn.clients import graphs
from evoattn.clients.graphs import gradients
from evoattn.clients.site import Count
from tests.helpers.recorders import Traced

OF_ATTENTION = Count()


class Denoiser(nn.Module):
    """A step of two products, in eval mode. `body` is what a test wants it to do besides."""

    def __init__(self, body: Callable[..., Any] = lambda self, x, *_, **__: x) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
        self.scale, self.body = 1.0, body
        self.eval()

    def original(self, x: Tensor, z: Tensor, *args: Any, **named: Any) -> Any:
        OF_ATTENTION.count_replaced()
        return self.body(self, self.second(self.first(x) * self.scale + z), *args, **named)

    forward = original


class Watched:
    """A denoiser whose steps are recorded, and what was counted."""

    def __init__(self, body: Callable[..., Any] | None = None) -> None:
        self.recorder, self.count = Traced(), Count()
        forward = graphs.step(Denoiser.original, self.count, self.recorder)
        self.steps: graphs.Steps = forward._evoattn_steps  # type: ignore[attr-defined]
        kind = type("Denoiser", (Denoiser,), {"forward": forward})
        torch.manual_seed(0)
        self.module = kind(body) if body else kind()
        self.z = draw(1)

    def __call__(self, x: Tensor, *args: Any, **named: Any) -> Any:
        """A call without gradients."""
        with torch.no_grad():
            return self.module(x, self.z, *args, **named)

    def agrees(self, times: int = 6, *args: Any, **named: Any) -> None:
        """Calls with new tensors return what the original returns."""
        for seed in range(times):
            x = draw(seed + 2)
            with torch.no_grad():
                expected = self.module.original(x, self.z, *args, **named)
            assert torch.equal(self(x, *args, **named), expected)

    @property
    def replayed(self) -> int:
        return self.count.replaced

    @property
    def reasons(self) -> set[str]:
        return set(self.count.passed_on)


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*(shape or (3, 4)), generator=torch.Generator().manual_seed(seed))


def times(x: Tensor, by: Tensor, more: int = 1) -> Tensor:
    return x * by * more


def recordings(watched: Watched) -> int:
    return sum(kind.size is not None for known in watched.steps._known.values() for kind in known.kinds.values())


class Block(nn.Module):
    """A block of a trunk, in eval mode, which draws random numbers as Boltz' does."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.norm, self.product, self.drop, self.p = nn.LayerNorm(4), nn.Linear(4, 4), nn.Dropout(0.5), [0.25]
        self.wide = nn.Linear(4, width)
        self.register_buffer("offset", torch.rand(4))
        self.eval()

    def original(self, x: Tensor, mask: Tensor) -> Tensor:
        kept = (torch.rand(x.shape[:1]) >= 0).float()[:, None]
        return x + kept * mask * self.drop(self.product(self.norm(x))) * self.p[0] + self.offset + self.wide(x).sum(-1, True)

    forward = original


class Trunk:
    """Blocks that share recordings."""

    def __init__(self, blocks: int = 8) -> None:
        self.recorder, self.count = Traced(), Count()
        forward = graphs.step(Block.original, self.count, self.recorder, shared=True)
        self.kind = type("Block", (Block,), {"forward": forward})
        self.steps: graphs.Steps = forward._evoattn_steps  # type: ignore[attr-defined]
        torch.manual_seed(0)
        self.blocks = [self.kind() for _ in range(blocks)]
        self.mask = torch.ones(3, 1)

    def agrees(self, seed: int = 2, length: int = 3) -> None:
        """The blocks return what the originals return, and leave the same random numbers."""
        actual = expected = draw(seed, length, 4)
        if length != len(self.mask):
            self.mask = torch.ones(length, 1)
        with torch.no_grad():
            state = torch.get_rng_state()
            for block in self.blocks:
                expected = block.original(expected, self.mask)
            after = torch.get_rng_state()
            torch.set_rng_state(state)
            for block in self.blocks:
                actual = block(actual, self.mask)
        assert torch.equal(actual, expected) and torch.equal(torch.get_rng_state(), after)


saved = functools.partial(checkpoint, use_reentrant=True)


class Trained(Trunk):
    """A trunk in training mode, and a copy of it that is computed as it was."""

    def __init__(self, blocks: int = 6) -> None:
        super().__init__(blocks)
        self.twin = [copy.deepcopy(block).train() for block in self.blocks]
        for block in self.blocks:
            block.train()

    def step(self, seed: int, run: Callable[..., Tensor] = saved, length: int = 3) -> None:
        """The gradients of both are the same, and both leave the same random numbers."""
        mask = torch.ones(length, 1)
        found = []
        for blocks, way in ((self.blocks, run), (self.twin, lambda block, *args: block.original(*args))):
            torch.manual_seed(seed)
            x = draw(seed, length, 4).requires_grad_()
            y = x
            for block in blocks:
                y = way(block, y, mask)
            (y * draw(seed + 1, length, 4)).sum().backward()
            weights = [p for block in blocks for p in block.parameters()]
            found.append([y.detach(), x.grad, *(p.grad for p in weights), torch.get_rng_state()])
            for p in weights:
                p.grad = None
        for a, b in zip(*found, strict=True):
            assert (a is None and b is None) or torch.equal(a, b)

    def settled(self) -> gradients.GradientKind:
        """The kind of calls that autograd sees, after three steps."""
        for seed in range(3):
            self.step(seed)
        [kind] = [x for kinds in self.steps._kinds.values() for x in kinds.values() if isinstance(x, gradients.GradientKind)]
        assert kind.checked
        return kind

    def replayed(self, kind: gradients.GradientKind, x: Tensor) -> Tensor:
        """A replay for the first block, outside of a checkpoint."""
        return kind.replay([x, self.mask], self.steps._known[self.blocks[0]].seen, None)  # type: ignore[no-any-return]

    def update(self, scale: float) -> None:
        """Change all weights, as an optimizer does."""
        with torch.no_grad():
            for blocks in (self.blocks, self.twin):
                for block in blocks:
                    for weight in block.parameters():
                        weight.mul_(scale)
