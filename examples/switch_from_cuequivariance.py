"""A call written for cuEquivariance's triangle_attention, with the one import changed.

Prints:
    output [1, 10, 4, 10, 32]
    equal to dense torch: True
    logsumexp and maximum: [1, 10, 4, 10] [1, 10, 4, 10]
    lengths instead of a mask: True
"""

import torch

from evoattn.compat.cuequivariance import triangle_attention  # was: from cuequivariance_torch import triangle_attention

torch.manual_seed(0)
B, N, H, L, D = 1, 10, 4, 10, 32

q, k, v = (torch.randn(B, N, H, L, D) for _ in range(3))  # heads before lengths
bias = torch.randn(B, 1, H, L, L)
lengths = torch.randint(1, L + 1, (B, N, 1, 1, 1), dtype=torch.int32)
mask = torch.arange(L) < lengths  # [B, N, 1, 1, L], True = keep
scale = D**-0.5

o, lse, largest = triangle_attention(q, k, v, bias, mask=mask, scale=scale, return_aux=True)

scores = scale * torch.einsum("bnhqd,bnhkd->bnhqk", q, k) + bias
dense = torch.einsum("bnhqk,bnhkc->bnhqc", scores.masked_fill(~mask, -1e9).softmax(-1), v)

print("output", list(o.shape))
print("equal to dense torch:", torch.allclose(o, dense, atol=1e-5))
print("logsumexp and maximum:", list(lse.shape), list(largest.shape))
print("lengths instead of a mask:", torch.allclose(o, triangle_attention(q, k, v, bias, kv_lengths=lengths), atol=1e-6))
