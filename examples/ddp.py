"""Train on scikit-learn's handwritten digits with DistributedDataParallel.

    torchrun --nproc-per-node=2 examples/ddp.py

torch's own wrapper works too: torch.nn.parallel.DistributedDataParallel(model).
"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import pycomm

digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16  # 1797 images of 8 x 8 pixels
labels = torch.tensor(digits.target)
train, test = slice(0, 1400), slice(1400, None)

dist.init_process_group("pycomm")
torch.manual_seed(dist.get_rank())  # the wrapper sends rank 0's parameters to all
model = pycomm.DistributedDataParallel(
    nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
data = TensorDataset(images[train], labels[train])
sampler = DistributedSampler(data)  # a part of the images for each rank
for epoch in range(5):
    sampler.set_epoch(epoch)  # another order in each epoch
    for inputs, targets in DataLoader(data, batch_size=32, sampler=sampler):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()  # averages gradients
        optimizer.step()

with torch.no_grad():
    accuracy = (model(images[test]).argmax(1) == labels[test]).float().mean()
if dist.get_rank() == 0:  # all ranks have the same model
    print(f"test accuracy {accuracy:.1%}")
dist.destroy_process_group()
