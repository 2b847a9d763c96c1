"""Triangle attention around the starting and the ending node (AlphaFold 2, algorithms 13 and 14) as one module.

Prints:
    starting and ending node differ: True
    ending node = starting node of the transposed pair representation: True
    gradient of the pair representation: [1, 12, 12, 16]
"""

import torch
from torch import Tensor, nn

from evoattn import evoformer_attention


class TriangleAttention(nn.Module):
    """Edge (i, j) attends to the edges (i, k) that share its start, or to the edges (k, j) that share its end."""

    def __init__(self, c_z: int, heads: int, channels: int, *, starting: bool) -> None:
        super().__init__()
        self.heads, self.channels, self.starting = heads, channels, starting
        self.norm = nn.LayerNorm(c_z)
        self.qkv = nn.Linear(c_z, 3 * heads * channels, bias=False)
        self.pair = nn.Linear(c_z, heads, bias=False)
        self.gate, self.out = nn.Linear(c_z, heads * channels), nn.Linear(heads * channels, c_z)

    def forward(self, z: Tensor, mask: Tensor) -> Tensor:
        """z `[*, L, L, c_z]`, mask bool `[*, L, L]` -> the update of z."""
        if not self.starting:  # the ending node: rows and columns change places, and back at the end
            z, mask = z.transpose(-2, -3), mask.transpose(-1, -2)
        z = self.norm(z)
        q, k, v = self.qkv(z).unflatten(-1, (3, self.heads, self.channels)).unbind(-3)  # [*,n,l,h,d], n = the fixed node
        pair_bias = self.pair(z).movedim(-1, -3).unsqueeze(-4)  # [*,1,h,q,k]
        o = evoformer_attention(q, k, v, mask=mask, pair_bias=pair_bias)
        update: Tensor = self.out(torch.sigmoid(self.gate(z)) * o.flatten(-2))
        return update if self.starting else update.transpose(-2, -3)


torch.manual_seed(0)
z = torch.randn(1, 12, 12, 16, requires_grad=True)
mask = torch.rand(1, 12, 12) > 0.1
start = TriangleAttention(16, heads=4, channels=8, starting=True)
end = TriangleAttention(16, heads=4, channels=8, starting=False)
end.load_state_dict(start.state_dict())

a, b = start(z, mask), end(z, mask)
turned = start(z.transpose(1, 2), mask.transpose(1, 2)).transpose(1, 2)
(dz,) = torch.autograd.grad(a + b, z, torch.randn_like(a))

print("starting and ending node differ:", not torch.allclose(a, b, atol=1e-3))
print("ending node = starting node of the transposed pair representation:", torch.allclose(b, turned, atol=1e-5))
print("gradient of the pair representation:", list(dz.shape))
