"""Shard a model's parameters, gradients and optimizer state over the ranks with FSDP2.

    torchrun --nproc-per-node=2 examples/fsdp2.py

FSDP2 is torch's own. Only the name of the backend changes.
"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import pycomm  # noqa: F401 (registers the backend)

digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16
labels = torch.tensor(digits.target)

dist.init_process_group("pycomm")
rank, ranks = dist.get_rank(), dist.get_world_size()
mine = slice(rank, 1400, ranks)  # this rank's training images

torch.manual_seed(0)  # FSDP2 sends no parameters: make them equal on all ranks
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
whole = sum(parameter.numel() for parameter in model.parameters())
mesh = init_device_mesh("cpu", (ranks,))
for layer in model:
    if isinstance(layer, nn.Linear):
        fully_shard(layer, mesh=mesh)  # gathered just before its forward, freed after it
fully_shard(model, mesh=mesh)
held = sum(parameter.to_local().numel() for parameter in model.parameters())
print(f"rank {rank} holds {held} of {whole} parameters")

optimizer = torch.optim.Adam(model.parameters(), lr=0.01)  # its state is sharded too
for _ in range(60):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(images[mine]), labels[mine]).backward()
    optimizer.step()

with torch.no_grad():
    accuracy = (model(images[1400:]).argmax(1) == labels[1400:]).float().mean()
if rank == 0:
    print(f"test accuracy {accuracy:.1%}")
dist.destroy_process_group()
