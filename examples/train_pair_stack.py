"""Train a small pair stack of whole layers, triangle attention around both nodes, to repair noisy distances.

Prints:
    two thirds of the noise are more than the error: True
    a checkpointed block gives the same gradients: True
"""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from evoattn.nn import TriangleAttention

C, LENGTH, STEPS, NOISE = 16, 8, 80, 0.3


class Block(nn.Module):
    """Two layers, each with its residual and dropout, and a transition."""

    def __init__(self) -> None:
        super().__init__()
        self.start = TriangleAttention(C, 8, 2, starting=True, dropout=0.05, residual=True)
        self.end = TriangleAttention(C, 8, 2, starting=False, dropout=0.05, residual=True)
        self.transition = nn.Sequential(nn.LayerNorm(C), nn.Linear(C, 4 * C), nn.ReLU(), nn.Linear(4 * C, C))

    def forward(self, z: Tensor, mask: Tensor) -> Tensor:
        z = self.end(self.start(z, mask), mask)
        return z + self.transition(z)  # type: ignore[no-any-return]


def distances(batch: int) -> tuple[Tensor, Tensor]:
    """Distances between points on a line, and the same with noise that fits no points."""
    points = torch.rand(batch, LENGTH)
    true = (points[:, :, None] - points[:, None]).abs()
    return true, true + NOISE * torch.randn_like(true)


def loss(true: Tensor, noisy: Tensor, checkpointed: bool = False) -> Tensor:
    z, mask = embed(noisy[..., None]), torch.ones_like(noisy)
    z = checkpoint(block, z, mask, use_reentrant=False) if checkpointed else block(z, mask)
    return (read(z)[..., 0] - true).square().mean()  # type: ignore[no-any-return]


torch.manual_seed(0)
torch.set_num_threads(1)  # tensors are so small that threads would wait for one another
embed, block, read = nn.Linear(1, C), Block(), nn.Linear(C, 1)
parameters = [*embed.parameters(), *block.parameters(), *read.parameters()]
optimizer = torch.optim.Adam(parameters, 5e-3)
for _ in range(STEPS):
    optimizer.zero_grad()
    loss(*distances(8)).backward()
    optimizer.step()

block.eval()
true, noisy = distances(64)
plain, again = (torch.autograd.grad(loss(true, noisy, checkpointed), parameters) for checkpointed in (False, True))
print("two thirds of the noise are more than the error:", loss(true, noisy).sqrt().item() < 2 / 3 * NOISE)
print("a checkpointed block gives the same gradients:", all(torch.equal(a, b) for a, b in zip(plain, again, strict=True)))
