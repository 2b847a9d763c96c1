"""A module written for DeepSpeed's DS4Sci_EvoformerAttention, with the one import changed.

Prints:
    length 9: output [1, 4, 9, 2, 96], pair bias gradient [1, 1, 2, 9, 9]
    the list of biases is as it was: True
    either bias may be left out: True
    float32 equals dense torch: True
"""

import torch

from evoattn.compat.deepspeed import DS4Sci_EvoformerAttention  # was: from deepspeed.ops.deepspeed4science import ...

torch.manual_seed(0)
B, N, L, H, D = 1, 4, 9, 2, 96  # fewer than 16 positions and more than 64 channels, in float32

q, k, v = (torch.randn(B, N, L, H, D) for _ in range(3))
keep = torch.rand(B, N, L) > 0.2
mask_bias = 1e9 * (keep.float() - 1)[:, :, None, None, :]  # [B, N, 1, 1, L]
pair_bias = torch.randn(B, 1, H, L, L, requires_grad=True)
biases = [mask_bias, pair_bias]

o = DS4Sci_EvoformerAttention(q, k, v, biases)
(dpair_bias,) = torch.autograd.grad(o, pair_bias, torch.randn_like(o))

scores = torch.einsum("bnqhd,bnkhd->bnhqk", q, k) * D**-0.5 + mask_bias + pair_bias
dense = torch.einsum("bnhqk,bnkhc->bnqhc", scores.softmax(-1), v)
partial = [DS4Sci_EvoformerAttention(q, k, v, some) for some in ([mask_bias], [None, pair_bias], [None, None], [])]

print(f"length {L}: output {list(o.shape)}, pair bias gradient {list(dpair_bias.shape)}")
print("the list of biases is as it was:", len(biases) == 2 and biases[0] is mask_bias and biases[1] is pair_bias)
print("either bias may be left out:", all(x.shape == o.shape for x in partial))
print("float32 equals dense torch:", torch.allclose(o, dense, atol=1e-5))
