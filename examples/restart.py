"""Go on from a checkpoint after a rank has died: torchrun starts all ranks again.

    torchrun --nproc-per-node=2 --max-restarts=1 examples/restart.py checkpoint.pt

In the first run, rank 1 kills itself at step 35, as the kernel's out-of-memory killer would.
"""

import os
import signal
import sys

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn

import pycomm

PATH = sys.argv[1] if len(sys.argv) > 1 else "checkpoint.pt"
digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16
labels = torch.tensor(digits.target)

dist.init_process_group("pycomm")
rank, ranks = dist.get_rank(), dist.get_world_size()
mine = slice(rank, 1400, ranks)
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
model = pycomm.DistributedDataParallel(net)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
first = 0
if os.path.exists(PATH):  # several hosts: a folder that all of them share
    saved = torch.load(PATH, weights_only=True)
    net.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    first = saved["step"]
if rank == 0:
    print(f"start at step {first}")

for step in range(first, 60):
    if step == 35 and rank == 1 and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(images[mine]), labels[mine]).backward()
    optimizer.step()
    if step % 10 == 9 and rank == 0:
        state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
        torch.save(state, PATH + ".new")
        os.replace(PATH + ".new", PATH)  # a reader sees the old file or the new one, whole

with torch.no_grad():
    accuracy = (model(images[1400:]).argmax(1) == labels[1400:]).float().mean()
if rank == 0:
    print(f"test accuracy {accuracy:.1%}")
dist.destroy_process_group()
