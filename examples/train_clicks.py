"""Learn who clicks from raw 64-bit ids; each rank holds a part of the rows: docs/torchrec.md.

torchrun --nproc-per-node=2 examples/train_clicks.py pages.npz"""

import sys

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.modules import mc_embedding_modules, mc_modules
from torchrec.optim import RowWiseAdagrad

from pycomm.integrations.torchrec import cpu_plan, read_table, sharders

CPU, PAGES, SLOTS, DIM = torch.device("cpu"), 3000, 4096, 8
OUT = sys.argv[1] if len(sys.argv) > 1 else "pages.npz"


def visits(seed: int, count: int) -> tuple[KeyedJaggedTensor, torch.Tensor]:
    """Five pages that each user has seen, and whether the user then clicked."""
    draw, fixed = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(0)
    pages = torch.randint(PAGES, (count, 5), generator=draw)
    clicks = torch.randn(PAGES, generator=fixed)[pages].sum(1).sigmoid()
    ids = pages.flatten() * 0x1E3779B97F4A7C15  # any int64 will do: this wraps, to either sign
    features = KeyedJaggedTensor.from_lengths_sync(["page"], ids, torch.full((count,), 5))
    return features, (torch.rand(count, generator=draw) < clicks).float()


tables = [EmbeddingBagConfig(SLOTS, DIM, name="pages", feature_names=["page"])]
policy = mc_modules.DistanceLFU_EvictionPolicy()
id_map = mc_modules.MCHManagedCollisionModule(SLOTS, CPU, policy, 10, input_hash_size=0)
bags = mc_embedding_modules.ManagedCollisionEmbeddingBagCollection(
    EmbeddingBagCollection(tables=tables, device=CPU),
    mc_modules.ManagedCollisionCollection({"pages": id_map}, tables),
)
dist.init_process_group("pycomm")
rank, ranks = dist.get_rank(), dist.get_world_size()
_apply_optimizer_in_backward(RowWiseAdagrad, bags.parameters(), {"lr": 0.1})
plan, ours = cpu_plan(bags), sharders(wire_dtype="fp16")
bags = DistributedModelParallel(bags, device=CPU, plan=plan, sharders=ours)
dense = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(DIM, 1))
optimizer = torch.optim.Adagrad(dense.parameters(), lr=0.1)
for step in range(400):
    features, labels = visits(1 + step * ranks + rank, 512 // ranks)  # this rank's own samples
    scores = dense(bags(features)[0].values()).squeeze(1)
    optimizer.zero_grad()
    torch.nn.functional.binary_cross_entropy_with_logits(scores, labels).backward()
    optimizer.step()  # backward has updated the rows
features, labels = visits(0, 4096)
with torch.no_grad():
    scores = dense(bags.eval()(features)[0].values()).squeeze(1)
auc = (scores[labels == 1][:, None] > scores[labels == 0]).float().mean()
table = read_table(bags, "pages")
if table is not None:  # on rank 0
    np.savez(OUT, **table._asdict())
    print(f"AUC {auc:.3f}; {len(table.ids)} ids, {len(table.rows[0])} columns in {OUT}")
dist.destroy_process_group()
