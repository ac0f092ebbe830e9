"""Tables with an id map (managed collision): any int64 id, and the table read whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import training
from ranks import run_ranks
from torch.distributed.optim import (
    _apply_optimizer_in_backward as apply_optimizer_in_backward,
)
from torchrec.distributed import DistributedModelParallel
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from training import COLUMNS, CPU, Spec

from pycomm.integrations.torchrec import Table, cpu_plan, read_table, sharders

pytestmark = [pytest.mark.needs_native, pytest.mark.timeout(500)]

STEPS = 8
# Ids at both ends of int64 but for the largest, which marks an empty slot.
EXTREMES = [-(2**63), -(2**63) + 1, -1, 0, 1, 2**63 - 2]


def looked_up(model: Any, name: str, ids: torch.Tensor) -> torch.Tensor:
    """The rows of these ids, one per bag, as the sharded model looks them up."""
    empty = torch.zeros(0, dtype=torch.int64)
    values = [ids if table == name else empty for table in training.ROWS]
    lengths = [torch.full((len(ids),), int(table == name)) for table in training.ROWS]
    features = KeyedJaggedTensor.from_lengths_sync(
        list(training.ROWS), torch.cat(values), torch.cat(lengths)
    )
    model.eval()
    with torch.no_grad():
        pooled, _ = model.module.sparse(features)
    model.train()
    return pooled[name].clone()


def read_and_look_up(rank: int, world_size: int, spec: Spec) -> list[Any]:
    """(table, ids, their rows as the model has them) of each table, at rank 0."""
    model = training.sharded(spec)
    for step in range(spec.steps):
        model(*training.batch_of(spec, step, rank)).backward()
    found = []
    for name, rows in training.ROWS.items():
        ids = torch.cat([training.raw_ids(rows), torch.tensor(EXTREMES)])
        table = read_table(model, name)
        assert (table is None) == (rank != 0)
        there = looked_up(model, name, ids)
        found.append((tuple(table), ids, there) if table else None)
    other = read_table(model, "place", dst=world_size - 1)
    assert (other is None) == (rank != world_size - 1)
    return found


@pytest.mark.parametrize("world_size", [2, 3])  # 2**64 % 3 = 1: signed and unsigned differ
def test_a_table_read_whole_is_what_the_model_looks_up(world_size: int) -> None:
    spec = Spec(id_map=True, row_wise=(), optimizer="RowWiseAdagrad", steps=STEPS)
    found = run_ranks(
        world_size, read_and_look_up, args=(spec,), preload=training.PRELOAD
    ).values()[0]
    for name, (fields, ids, there) in zip(training.ROWS, found, strict=True):
        table = Table(*fields)
        assert torch.equal(table.lookup(ids), there)
        assert torch.equal(table.lookup(ids.view(2, -1)), there.view(2, -1, COLUMNS))
        # The last slot of each rank is for ids that have none.
        slots = training.ROWS[name] - world_size
        assert slots // 2 < len(table.ids) <= slots
        assert len(table.rows) == len(table.ids) == len(table.ids.unique())
        assert bool((table.ids[1:] > table.ids[:-1]).all())
        assert table.unseen.shape == (world_size, COLUMNS)
        known = torch.isin(ids, table.ids)
        assert 0 < int(known.sum()) < len(ids)


def read_without_id_map(rank: int, world_size: int) -> Any:
    spec = Spec(row_wise=("user",), column_wise=("item",))
    model = training.sharded(spec)
    found = {name: read_table(model, name) for name in training.ROWS}
    errors = []
    for name in ("nobody", "use"):
        with pytest.raises(KeyError, match="0 sharded tables named") as caught:
            read_table(model, name)
        errors.append(str(caught.value))
        assert "All: ['item', 'place', 'user']" in errors[-1]
    return {name: tuple(table) if table else None for name, table in found.items()}


def test_tables_without_id_map() -> None:
    first, *others = run_ranks(4, read_without_id_map, preload=training.PRELOAD).values()
    assert all(table is None for other in others for table in other.values())
    for name, fields in first.items():
        table = Table(*fields)
        assert torch.equal(table.ids, torch.arange(training.ROWS[name]))
        assert torch.equal(table.rows, training.table_values(name))
        assert torch.equal(table.lookup(torch.tensor([3, 0])), table.rows[[3, 0]])
        with pytest.raises(KeyError, match=r"ids without a row: \[-1\]"):
            table.lookup(torch.tensor([3, -1]))


def read_mapped_by_range(rank: int, world_size: int) -> str:
    net = training.make_net(Spec(id_map=True))
    maps = net.sparse._managed_collision_collection._managed_collision_modules
    for id_map in maps.values():
        id_map._input_hash_size = 2**62
    model = DistributedModelParallel(net, device=CPU, plan=cpu_plan(net), sharders=sharders())
    with pytest.raises(ValueError) as caught:
        read_table(model, "user")
    return str(caught.value)


@pytest.mark.filterwarnings("ignore:no optimizer")
def test_an_id_map_by_ranges_is_not_read() -> None:
    for text in run_ranks(2, read_mapped_by_range, preload=training.PRELOAD).values():
        assert text == (
            "table 'user': its id map was made with input_hash_size=4611686018427387904, by which "
            "ids are spread over ranks by their range. Try: input_hash_size=0, by their remainder"
        )


def state_after_eviction(rank: int, world_size: int, optimizer: str) -> list[float]:
    """Two batches of different ids that need all slots: the states of the optimizer's rows."""
    kind = {"RowWiseAdagrad": RowWiseAdagrad, "Adagrad": torch.optim.Adagrad}[optimizer]
    net = training.make_net(Spec(id_map=True))
    maps = net.sparse._managed_collision_collection._managed_collision_modules
    for id_map in maps.values():
        id_map._eviction_interval = 1
    apply_optimizer_in_backward(kind, net.sparse.parameters(), {"lr": 0.1})
    model = DistributedModelParallel(net, device=CPU, plan=cpu_plan(net), sharders=sharders())
    free = training.ROWS["place"] - world_size
    for batch in range(2):
        # Each rank has its own half of the slots' ids; then the same number of others.
        ids = torch.arange(rank, free, world_size) + batch * 1000
        empty = torch.zeros(0, dtype=torch.int64)
        for _ in range(1 + 2 * batch):  # seen more often than those they are to replace
            features = KeyedJaggedTensor.from_lengths_sync(
                list(training.ROWS),
                torch.cat([ids if name == "place" else empty for name in training.ROWS]),
                torch.cat(
                    [torch.full((len(ids),), int(name == "place")) for name in training.ROWS]
                ),
            )
            pooled, _ = model.module.sparse(features)
            (pooled["place"].sum() * world_size).backward()  # TorchRec divides by the ranks
    state: Any = model.fused_optimizer.state_dict()["state"]
    (found,) = (value for key, value in state.items() if key.endswith(".place.weight"))
    (sums,) = (value for key, value in found.items() if key.endswith("sum") or "momentum" in key)
    parts = [part.tensor for part in sums.local_shards()]
    dist.barrier()
    return [float(value) for part in parts for value in part.flatten()]


@pytest.mark.parametrize("optimizer", ["RowWiseAdagrad", "Adagrad"])
def test_the_optimizers_state_of_an_evicted_id_is_reset(optimizer: str) -> None:
    """A gradient is 1 in all columns, so a state counts the steps of its row: 3, not 1 + 3."""
    for states in run_ranks(
        2, state_after_eviction, args=(optimizer,), preload=training.PRELOAD
    ).values():
        assert max(states) == 3.0
