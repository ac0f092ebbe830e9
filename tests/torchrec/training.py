"""What the tests of TorchRec train: models with raw data, sharded over ranks or in one process."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import (
    _apply_optimizer_in_backward as apply_optimizer_in_backward,
)
from torchrec.distributed import DistributedModelParallel
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from pycomm.integrations.torchrec import cpu_plan, sharders

CPU = torch.device("cpu")
STEPS = 50
BATCH = 12  # samples per rank and step
IDS = 2  # per sample and table, if they are not pooled
COLUMNS = 16
ROWS = {"user": 203, "item": 96, "place": 31}
LR = 0.1
PRELOAD = ("torchrec", "torchrec.distributed.test_utils.multi_process", "training")


@dataclasses.dataclass(frozen=True)
class Spec:
    """One training."""

    bags: bool = True
    """EmbeddingBagCollection; else EmbeddingCollection, which does not pool."""
    id_map: bool = False
    row_wise: tuple[str, ...] = ("user",)
    column_wise: tuple[str, ...] = ()
    optimizer: str = "SGD"
    wire_dtype: str | None = None
    steps: int = STEPS


SPECS = {
    "bags, by tables": Spec(row_wise=()),
    "bags, by rows": Spec(row_wise=("*",)),
    "bags, by columns": Spec(row_wise=(), column_wise=("*",)),
    "bags, all three": Spec(row_wise=("user",), column_wise=("item",)),
    "bags, row-wise Adagrad": Spec(optimizer="RowWiseAdagrad"),
    "bags, by columns, row-wise Adagrad": Spec(column_wise=("item",), optimizer="RowWiseAdagrad"),
    "bags, fp16 wire": Spec(column_wise=("item",), wire_dtype="fp16"),
    "bags, id map": Spec(id_map=True, row_wise=(), optimizer="RowWiseAdagrad"),
    "bags, id map, fp16 wire": Spec(id_map=True, row_wise=(), wire_dtype="fp16"),
    "single, by tables": Spec(bags=False, row_wise=()),
    "single, by rows": Spec(bags=False, row_wise=("*",)),
    "single, by columns": Spec(bags=False, row_wise=(), column_wise=("*",)),
    "single, row-wise Adagrad": Spec(bags=False, optimizer="RowWiseAdagrad"),
    "single, fp16 wire": Spec(bags=False, column_wise=("item",), wire_dtype="fp16"),
    "single, id map": Spec(bags=False, id_map=True, row_wise=(), optimizer="RowWiseAdagrad"),
}
# Not if the wire rounds, nor with an id map, whose slots depend on the number of ranks, nor with
# row-wise Adagrad by columns, which has one state per row and part.
AS_ONE_PROCESS = [
    name
    for name, spec in SPECS.items()
    if not spec.id_map
    and spec.wire_dtype is None
    and not (spec.column_wise and spec.optimizer == "RowWiseAdagrad")
]


class Net(nn.Module):
    """Embeddings and a dense layer over them."""

    def __init__(self, sparse: nn.Module, bags: bool) -> None:
        super().__init__()
        self.sparse = sparse
        self.bags = bags
        self.over = nn.Linear(COLUMNS * (len(ROWS) if bags else 1), 1)

    def forward(self, features: KeyedJaggedTensor, labels: torch.Tensor) -> torch.Tensor:
        found: Any = self.sparse(features)
        if isinstance(found, tuple):  # with an id map, also the ids after it
            found = found[0]
        if self.bags:
            predicted = self.over(found.values()).squeeze(1)
        else:  # IDS ids per sample and table
            values = torch.stack([found[name].values() for name in ROWS])
            predicted = self.over(values).view(len(ROWS), -1, IDS).mean((0, 2))
        return nn.functional.mse_loss(predicted, labels)


def batch_of(spec: Spec, step: int, rank: int) -> tuple[KeyedJaggedTensor, torch.Tensor]:
    """The samples of one rank and step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    lengths, values = [], []
    for rows in ROWS.values():
        if spec.bags:
            own = torch.randint(0, 4, (BATCH,), generator=generator)  # also empty bags
        else:
            own = torch.full((BATCH,), IDS)
        count = int(own.sum())
        lengths.append(own)
        if spec.id_map:
            # About twice as many ids as there are slots, so some of them are evicted.
            chosen = torch.randint(0, 2 * rows, (count,), generator=generator)
            values.append(raw_ids(rows)[chosen])
        else:
            values.append(torch.randint(0, rows, (count,), generator=generator))
    features = KeyedJaggedTensor.from_lengths_sync(
        list(ROWS), torch.cat(values), torch.cat(lengths)
    )
    return features, torch.randn(BATCH, generator=generator)


def raw_ids(rows: int) -> torch.Tensor:
    """2 * rows ids of either sign, spread over all of int64; the smallest is among them."""
    generator = torch.Generator().manual_seed(rows)
    ids = torch.randint(-(2**63), 2**63 - 1, (2 * rows,), generator=generator)
    ids[0] = -(2**63)
    return ids


def together(spec: Spec, step: int, world_size: int) -> tuple[KeyedJaggedTensor, torch.Tensor]:
    """The samples of all ranks as one batch."""
    parts = [batch_of(spec, step, rank) for rank in range(world_size)]
    split = [features.to_dict() for features, _ in parts]
    values = [part[name].values() for name in ROWS for part in split]
    lengths = [part[name].lengths() for name in ROWS for part in split]
    features = KeyedJaggedTensor.from_lengths_sync(
        list(ROWS), torch.cat(values), torch.cat(lengths)
    )
    return features, torch.cat([labels for _, labels in parts])


def make_net(spec: Spec) -> Net:
    """The same parameters wherever it is called, except for the tables."""
    torch.manual_seed(0)
    kind, config = EmbeddingCollection, EmbeddingConfig
    mapped: Any = ManagedCollisionEmbeddingCollection
    if spec.bags:
        kind, config = EmbeddingBagCollection, EmbeddingBagConfig
        mapped = ManagedCollisionEmbeddingBagCollection
    tables = [
        config(name=name, num_embeddings=rows, embedding_dim=COLUMNS, feature_names=[name])
        for name, rows in ROWS.items()
    ]
    sparse = kind(tables=tables, device=CPU)
    if spec.id_map:
        sparse = mapped(sparse, ManagedCollisionCollection(id_maps(tables), tables))
    return Net(sparse, spec.bags)


def id_maps(tables: list[Any]) -> dict[str, MCHManagedCollisionModule]:
    return {
        table.name: MCHManagedCollisionModule(
            zch_size=table.num_embeddings,
            device=CPU,
            eviction_policy=DistanceLFU_EvictionPolicy(),
            eviction_interval=3,
            input_hash_size=0,
        )
        for table in tables
    }


def table_values(name: str) -> torch.Tensor:
    """What the table is before training."""
    generator = torch.Generator().manual_seed(len(name))
    return torch.randn(ROWS[name], COLUMNS, generator=generator) / 4


def sharded(spec: Spec) -> DistributedModelParallel:
    net = make_net(spec)
    optimizer = RowWiseAdagrad if spec.optimizer == "RowWiseAdagrad" else torch.optim.SGD
    apply_optimizer_in_backward(optimizer, net.sparse.parameters(), table_options(spec))
    plan = cpu_plan(net, row_wise=spec.row_wise, column_wise=spec.column_wise)
    model = DistributedModelParallel(
        net, device=CPU, plan=plan, sharders=sharders(wire_dtype=spec.wire_dtype)
    )
    for key, tensor in model.state_dict().items():
        if key.endswith(".weight") and hasattr(tensor, "local_shards"):
            whole = table_values(key.split(".")[-2])
            for part in tensor.local_shards():
                (row, column), (rows, columns) = part.metadata.shard_offsets, part.tensor.shape
                part.tensor.detach().copy_(whole[row : row + rows, column : column + columns])
    return model


def table_options(spec: Spec) -> dict[str, float]:
    """The arguments of the tables' optimizer."""
    return {"lr": LR} if spec.optimizer == "SGD" else {"lr": LR, "eps": 1e-8}


def train(rank: int, world_size: int, specs: dict[str, Spec]) -> dict[str, list[float]]:
    """Each spec's losses, averaged over the ranks."""
    return {name: losses_of(rank, world_size, spec) for name, spec in specs.items()}


def losses_of(rank: int, world_size: int, spec: Spec) -> list[float]:
    model = sharded(spec)
    optimizer = torch.optim.SGD(
        [p for name, p in model.named_parameters() if "over" in name], lr=LR
    )
    losses = []
    for step in range(spec.steps):
        optimizer.zero_grad()
        loss = model(*batch_of(spec, step, rank))
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(float(mean) / world_size)
    return losses


def train_alone(spec: Spec, world_size: int) -> list[float]:
    """The same in one process without TorchRec's sharding: all ranks' samples in one batch."""
    net = make_net(spec)
    collection: Any = net.sparse
    tables = collection.embedding_bags if spec.bags else collection.embeddings
    for name, table in tables.items():
        table.weight.detach().copy_(table_values(name))
    kind = RowWiseAdagrad if spec.optimizer == "RowWiseAdagrad" else torch.optim.SGD
    optimizers = [
        kind(net.sparse.parameters(), **table_options(spec)),
        torch.optim.SGD(net.over.parameters(), LR),
    ]
    losses = []
    for step in range(spec.steps):
        net.zero_grad()
        loss = net(*together(spec, step, world_size))
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(float(loss.detach()))
    return losses
