"""Three ranks train, one is killed in the middle of a step, and the other two go on.

    python examples/elastic.py

It starts its ranks itself, since torchrun would end them all as soon as one has died.
"""

import os
import signal
import tempfile

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.multiprocessing import start_processes

import pycomm


def run_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    ids = {"rank": rank, "world_size": 3}
    dist.init_process_group("pycomm", init_method=f"file://{folder}/store", **ids)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    model = pycomm.DistributedDataParallel(net, elastic=pycomm.Elastic())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    mine = slice(rank, 1400, 3)

    def die(_: torch.Tensor) -> None:
        if rank == 0 and model.elastic.step == 35:  # the leader, in mid-step
            os.kill(os.getpid(), signal.SIGKILL)

    net[0].weight.register_hook(die)
    for _ in range(60):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images[mine]), labels[mine])
        loss.backward()
        optimizer.step()
    loss = model.elastic.mean(loss)  # in place of dist.all_reduce(), which would fail
    with torch.no_grad():
        accuracy = (net(images[1400:]).argmax(1) == labels[1400:]).float().mean()
    bits = float(sum(each.detach().double().abs().sum() for each in net.parameters()))
    line = f"rank {rank}: {model.elastic.step} steps, members {model.elastic.members}, {bits!r}\n"
    print(line, end="", flush=True)  # at once: ranks write to one terminal
    if model.elastic.leader:  # rank 0 is gone: the first of those that are left
        leads = f"rank {rank} is the leader: loss {loss:.3f}, test accuracy {accuracy:.1%}"
        print(leads, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        for process in start_processes(run_rank, (folder,), 3, join=False).processes:
            process.join()
