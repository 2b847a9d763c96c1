"""Train a pair block to repair noisy distances, on one device, or with `--gpus N` on N: each holds some rows of pairs.

Prints:
    two thirds of the noise are more than the error: True
    a checkpointed block gives the same gradients: True
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from evoattn.nn import PairBlock

if "--gpus" in sys.argv:  # as torchrun --standalone --nproc-per-node N
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", sys.argv[2], __file__]
    os.execv(sys.executable, launch)
C, LENGTH, STEPS, NOISE = 16, 8, 60, 0.3
kind = "cuda" if torch.cuda.is_available() else "cpu"
if "RANK" not in os.environ:
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
dist.init_process_group("nccl" if kind == "cuda" else "gloo")
mesh = init_device_mesh(kind, (dist.get_world_size(),))  # and the GPU of this process
torch.manual_seed(0)  # the same parameters and examples on all processes
torch.set_num_threads(1)  # they would wait for one another
embed, block, read = nn.Linear(1, C).to(kind), PairBlock(C, C, 8, 2, 2, dropout=0.05).to(kind), nn.Linear(C, 1).to(kind)
parameters = [*embed.parameters(), *block.parameters(), *read.parameters()]


def distances(batch: int) -> tuple[DTensor, DTensor]:
    """Distances between points on a line, and the same with noise that fits no points, split by rows."""
    points = torch.rand(batch, LENGTH, device=kind)
    true = (points[:, :, None] - points[:, None]).abs()
    noisy = true + NOISE * torch.randn_like(true)
    return distribute_tensor(true, mesh, [Shard(1)]), distribute_tensor(noisy, mesh, [Shard(1)])


def step(true: DTensor, noisy: DTensor, *, checkpointed: bool = False) -> list[Tensor]:
    """The loss and its gradients. Each process makes those of its rows, and all are added up."""
    shape, stride = torch.Size((*noisy.shape, C)), (LENGTH * LENGTH * C, LENGTH * C, C, 1)
    z = DTensor.from_local(embed(noisy.to_local()[..., None]), mesh, [Shard(1)], shape=shape, stride=stride)
    z = checkpoint(block, z, use_reentrant=False) if checkpointed else block(z)
    error = (read(z.to_local())[..., 0] - true.to_local()).square().sum() / true.numel()
    sums = [error.detach(), *torch.autograd.grad(error, parameters)]
    for total in sums:
        dist.all_reduce(total)
    return sums


optimizer = torch.optim.Adam(parameters, 5e-3)
for _ in range(STEPS):
    for parameter, gradient in zip(parameters, step(*distances(8))[1:], strict=True):
        parameter.grad = gradient
    optimizer.step()
block.eval()
examples = distances(64)
plain, again = step(*examples), step(*examples, checkpointed=True)
if dist.get_rank() == 0:
    print("two thirds of the noise are more than the error:", plain[0].sqrt().item() < 2 / 3 * NOISE)
    print("a checkpointed block gives the same gradients:", all(map(torch.equal, plain, again)))
dist.destroy_process_group()
