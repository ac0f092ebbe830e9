"""A training that processes join while it runs: new ones, and those that have died before.

    export MASTER_ADDR=127.0.0.1 MASTER_PORT=0 RANK=0 WORLD_SIZE=1
    python examples/joining.py run.peers &         # begins
    python examples/joining.py run.peers --join &  # joins; as often as you like

Or one torchrun per replica, which starts a process again that has died:

    torchrun --standalone --nproc-per-node=1 --max-restarts=9 examples/joining.py run.peers
    torchrun --standalone --nproc-per-node=1 --max-restarts=9 examples/joining.py run.peers --join
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn

import pycomm

parser = argparse.ArgumentParser()
parser.add_argument("peers", help="by which processes find the members: a file, or an address")
parser.add_argument("--join", action="store_true")
parser.add_argument("--steps", type=int, default=1000)
parser.add_argument("--pause", type=float, default=0.0, help="seconds of work per step")
args = parser.parse_args()
torch.set_num_threads(1)
digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16
labels = torch.tensor(digits.target)

dist.init_process_group("pycomm")  # of this process alone
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
comes_back = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
elastic = pycomm.Elastic(peers=args.peers, state=[optimizer], join=args.join or comes_back)
model = pycomm.DistributedDataParallel(net, elastic=elastic)

members: tuple[int, ...] = ()
while model.elastic.step < args.steps:
    if model.elastic.members != members:
        members = model.elastic.members
        print(f"pid {os.getpid()}: step {model.elastic.step}, members {members}", flush=True)
    optimizer.zero_grad()
    seed = 1000 * model.elastic.step + members[model.elastic.rank]  # another batch on each
    batch = torch.randint(1400, (64,), generator=torch.Generator().manual_seed(seed))
    nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
    optimizer.step()
    time.sleep(args.pause)

with torch.no_grad():
    accuracy = (net(images[1400:]).argmax(1) == labels[1400:]).float().mean()
bits = float(sum(each.detach().double().abs().sum() for each in net.parameters()))
print(f"pid {os.getpid()}: end, test accuracy {accuracy:.1%}, {bits!r}", flush=True)
dist.destroy_process_group()
