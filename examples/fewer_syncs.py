"""Train with LocalSGD and with DiLoCo: the ranks talk every 20 steps, not in each.

torchrun --nproc-per-node=2 examples/fewer_syncs.py
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
mine = torch.arange(rank, 1400, ranks)  # this rank's training images


def train(method: type[pycomm.LocalSGD]) -> str:
    """Train a new model, and report how often and how much this rank sent."""
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))  # not wrapped
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    local = method(model, sync_every=20)  # all ranks begin with rank 0's parameters
    draw = torch.Generator().manual_seed(rank)
    for _ in range(200):
        batch = mine[torch.randint(len(mine), (64,), generator=draw)]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()  # this rank alone
        local.step()  # on every rank, equally often; each 20th call syncs
    # Before you evaluate or save: now all ranks are equal. LocalSGD averages again, its 11th sync.
    # DiLoCo has just synced in step 200, its 10th, and does nothing more.
    local.sync()
    stats = local.stats()
    with torch.no_grad():
        accuracy = (model(images[1400:]).argmax(1) == labels[1400:]).float().mean()
    return f"{stats.syncs} syncs in {stats.steps} steps, test accuracy {accuracy:.1%}"


torch.manual_seed(0)
for method in (pycomm.LocalSGD, pycomm.DiLoCo):
    result = train(method)
    if rank == 0:
        print(f"{method.__name__}: {result}")
dist.destroy_process_group()
