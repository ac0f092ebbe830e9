"""Two ranks, one a quarter as fast: each gets the samples that it trains in the same time.

    torchrun --nproc-per-node=2 examples/unequal_machines.py

Averages count by samples, so the weights are those of one process with all of them. The slow rank
sleeps a while for each sample; on machines that are not alike leave that out.
"""

import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pycomm

SECONDS_PER_SAMPLE = (0.0005, 0.002)
EPOCHS = 3

dist.init_process_group("pycomm")
rank = dist.get_rank()
digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16
labels = torch.tensor(digits.target)
train, test = slice(0, 1400), slice(1400, None)
data = TensorDataset(images[train], labels[train])

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
model = pycomm.DistributedDataParallel(net, weight="samples")
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
sampler = pycomm.BalancedSampler(data, global_batch=60, model=model)
for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    began = time.perf_counter()
    for inputs, targets in DataLoader(data, batch_sampler=sampler):
        optimizer.zero_grad()
        outputs = model(inputs)
        time.sleep(SECONDS_PER_SAMPLE[rank] * len(inputs))  # as if it computed
        F.cross_entropy(outputs, targets).backward()
        optimizer.step()
    if rank == 0:
        seconds = time.perf_counter() - began
        print(f"epoch {epoch}: {seconds:.2f} s, shares {list(sampler.stats().shares)}")

if rank == 0:
    correct = (model.module(images[test]).argmax(1) == labels[test]).float().mean()
    print(f"the weights count all samples alike: test accuracy {100 * correct.item():.1f}%")
dist.destroy_process_group()
