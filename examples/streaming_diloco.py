"""Train with StreamingDiLoCo: a part of the model travels at a time, as int8, while you train.

    torchrun --nproc-per-node=2 examples/streaming_diloco.py

It also stops halfway, saves, and goes on from what it saved.
"""

import io

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
draw = torch.Generator().manual_seed(rank)


def build() -> tuple[nn.Module, torch.optim.Optimizer, pycomm.StreamingDiLoCo]:
    """A new model, the optimizer of this rank, and what syncs the ranks."""
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    # Each fragment leaves every 20 steps and lands 3 steps later. Large ones travel as int8.
    local = pycomm.StreamingDiLoCo(
        model, sync_every=20, fragments=4, fragment_sync_delay=3, wire_dtype="int8"
    )
    return model, optimizer, local


torch.manual_seed(0)
model, optimizer, local = build()
for step in range(200):
    if step == 100:  # each rank saves a file of its own: between syncs the ranks differ
        file = io.BytesIO()
        torch.save([each.state_dict() for each in (model, optimizer, local)], file)
        file.seek(0)
        model, optimizer, local = build()
        for each, state in zip((model, optimizer, local), torch.load(file), strict=True):
            each.load_state_dict(state)
    batch = mine[torch.randint(len(mine), (64,), generator=draw)]
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
    optimizer.step()
    local.step()  # after the optimizer's, on every rank
local.sync()  # now all ranks are equal
stats = local.stats()
with torch.no_grad():
    accuracy = (model(images[1400:]).argmax(1) == labels[1400:]).float().mean()
if rank == 0:
    each, saved = stats.sent_nbytes / stats.steps, stats.saved_nbytes / stats.steps
    print(f"{each:.0f} bytes per step instead of {each + saved:.0f}, test accuracy {accuracy:.1%}")
dist.destroy_process_group()
