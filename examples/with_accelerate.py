"""Train with Accelerate: make_accelerator() instead of Accelerator().

pip install accelerate==1.15.0 scikit-learn
torchrun --nproc-per-node=2 examples/with_accelerate.py
"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pycomm.integrations.accelerate import make_accelerator

digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16
labels = torch.tensor(digits.target)

accelerator = make_accelerator()  # makes the group, and raises if it would not span all ranks
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
data = DataLoader(TensorDataset(images[:1400], labels[:1400]), batch_size=32, shuffle=True)
model, optimizer, data = accelerator.prepare(net, optimizer, data)  # wraps, and shards the data
for _ in range(5):
    for inputs, targets in data:
        optimizer.zero_grad()
        accelerator.backward(nn.functional.cross_entropy(model(inputs), targets))
        optimizer.step()

with torch.no_grad():
    accuracy = (net(images[1400:]).argmax(1) == labels[1400:]).float().mean()
if accelerator.is_main_process:
    print(f"backend {dist.get_backend()}, test accuracy {accuracy:.1%}")
dist.destroy_process_group()
