"""The other operators of the pair block, beside the attention.

values.py        the arguments of triangle multiplication
multiplication.py  the operator: checks, the way that a call takes, the dense reference
autograd.py      what it saves, and its gradients
torch_steps.py, triton_steps.py, kernels.py  its steps in plain torch and in Triton
"""

from evoattn.pair.multiplication import product, triangle_multiplication

__all__ = ["product", "triangle_multiplication"]
