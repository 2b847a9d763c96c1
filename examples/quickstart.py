"""Evoformer attention in one call: forward, gradients of every input, and a check against dense torch.

Prints:
    output            [1, 8, 16, 4, 32]
    pair_bias gradient [1, 1, 4, 16, 16]
    equal to dense torch: True
    backend: tiled
"""

import torch

from evoattn import evoformer_attention, explain

torch.manual_seed(0)
B, N, L, H, D = 1, 8, 16, 4, 32  # batch, rows, length, heads, channels of a head

q, k, v = (torch.randn(B, N, L, H, D, requires_grad=True) for _ in range(3))
mask = torch.rand(B, N, L) > 0.2  # [b,n,k], True = attend
pair_bias = torch.randn(B, 1, H, L, L, requires_grad=True)  # [b,1,h,q,k], shared by the N rows

o = evoformer_attention(q, k, v, mask=mask, pair_bias=pair_bias)
cotangent = torch.randn_like(o)
gradients = torch.autograd.grad(o, (q, k, v, pair_bias), cotangent)

# The same, dense: all b*n*h*q*k scores at once.
scores = torch.einsum("bnqhd,bnkhd->bnhqk", q, k) * D**-0.5 + pair_bias
scores = scores.masked_fill(~mask[:, :, None, None, :], -torch.inf)
dense = torch.einsum("bnhqk,bnkhc->bnqhc", scores.softmax(-1), v)
dense_gradients = torch.autograd.grad(dense, (q, k, v, pair_bias), cotangent)

pairs = zip((o, *gradients), (dense, *dense_gradients), strict=True)
print("output           ", list(o.shape))
print("pair_bias gradient", list(gradients[-1].shape))
print("equal to dense torch:", all(torch.allclose(ours, theirs, atol=1e-5) for ours, theirs in pairs))
print("backend:", explain(q, k, v, mask=mask, pair_bias=pair_bias).backend)
