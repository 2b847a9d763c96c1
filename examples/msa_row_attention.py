"""MSA row attention with pair bias (AlphaFold 2, algorithm 7) as a module, and twenty training steps.

Prints:
    output as the input: True
    every parameter has a gradient: True
    loss fell: True
"""

import torch
from torch import Tensor, nn

from evoattn import evoformer_attention


class MSARowAttention(nn.Module):
    """Each sequence attends along its residues, biased by the pair representation."""

    def __init__(self, c_m: int, c_z: int, heads: int, channels: int) -> None:
        super().__init__()
        self.heads, self.channels = heads, channels
        self.norm_m, self.norm_z = nn.LayerNorm(c_m), nn.LayerNorm(c_z)
        self.qkv = nn.Linear(c_m, 3 * heads * channels, bias=False)
        self.pair = nn.Linear(c_z, heads, bias=False)
        self.gate, self.out = nn.Linear(c_m, heads * channels), nn.Linear(heads * channels, c_m)

    def forward(self, m: Tensor, z: Tensor, mask: Tensor) -> Tensor:
        """m `[*, N, L, c_m]`, z `[*, L, L, c_z]`, mask bool `[*, N, L]` -> the update of m."""
        m = self.norm_m(m)
        q, k, v = self.qkv(m).unflatten(-1, (3, self.heads, self.channels)).unbind(-3)  # [*,n,l,h,d]
        pair_bias = self.pair(self.norm_z(z)).movedim(-1, -3).unsqueeze(-4)  # [*,1,h,q,k], a view
        o = evoformer_attention(q, k, v, mask=mask, pair_bias=pair_bias)
        update: Tensor = self.out(torch.sigmoid(self.gate(m)) * o.flatten(-2))
        return update


torch.manual_seed(0)
module = MSARowAttention(c_m=32, c_z=16, heads=4, channels=8)
optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
m, z, target = torch.randn(1, 6, 20, 32), torch.randn(1, 20, 20, 16), torch.randn(1, 6, 20, 32)
mask = torch.rand(1, 6, 20) > 0.1

losses = []
for _ in range(20):
    optimizer.zero_grad()
    update = module(m, z, mask)
    loss = (update - target).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())

print("output as the input:", update.shape == m.shape)
print("every parameter has a gradient:", all(p.grad is not None and p.grad.abs().sum() > 0 for p in module.parameters()))
print("loss fell:", losses[-1] < 0.9 * losses[0])
