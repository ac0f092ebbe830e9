"""Send gradients as fp16 or int8 instead of fp32, and see what that saves and costs.

torchrun --nproc-per-node=2 examples/wire_dtype.py
"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn

import pycomm

digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16
labels = torch.tensor(digits.target)

dist.init_process_group("pycomm")
rank, ranks = dist.get_rank(), dist.get_world_size()
mine = slice(rank, 1400, ranks)  # this rank's training images


def train(wire_dtype: str | None) -> str:
    """Train a new model, and report the bytes sent per step and the test accuracy."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    model = pycomm.DistributedDataParallel(net, wire_dtype=wire_dtype)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[mine]), labels[mine]).backward()
        optimizer.step()
    stats = model.stats()
    with torch.no_grad():
        accuracy = (net(images[1400:]).argmax(1) == labels[1400:]).float().mean()
    kilobytes = stats.sent_nbytes / stats.steps / 1000
    return f"{kilobytes:.1f} kB per step, test accuracy {accuracy:.1%}"


for wire_dtype in (None, "fp16", "int8"):
    result = train(wire_dtype)
    if rank == 0:
        print(f"{wire_dtype or 'fp32'}: {result}")
dist.destroy_process_group()
