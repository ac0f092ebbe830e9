"""LRUManagedCollisionModule beside a reference in Python, on 1, 2 and 4 ranks."""

from __future__ import annotations

import copy
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import training
from ranks import run_ranks
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.optim import (
    _apply_optimizer_in_backward as apply_optimizer_in_backward,
)
from torchrec.distributed import DistributedModelParallel
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
from torchrec.modules.mc_modules import ManagedCollisionCollection
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor
from training import CPU

from pycomm._native import loader
from pycomm.integrations._torchrec_table import _collect
from pycomm.integrations.torchrec import (
    LRUManagedCollisionModule,
    Table,
    cpu_plan,
    read_table,
    sharders,
)

pytestmark = [pytest.mark.needs_native, pytest.mark.timeout(400)]

ROWS, BUCKETS, COLUMNS, STEPS = 96, 8, 4, 12
MASK = 2**63 - 1


# ---- the reference


def mix(number: int) -> int:
    number ^= number >> 30
    number = number * 0xBF58476D1CE4E5B9 & MASK
    number ^= number >> 27
    number = number * 0x94D049BB133111EB & MASK
    return number ^ number >> 31


class Bucket:
    def __init__(self, rows: int, admit_after: int) -> None:
        self.rows, self.admit_after = rows, admit_after
        self.row_of: OrderedDict[int, int] = OrderedDict()  # the oldest use first
        self.counts: OrderedDict[int, int] = OrderedDict()

    def learn(self, ids: list[int]) -> None:
        used: set[int] = set()
        counted: set[int] = set()
        for each in ids:
            if each not in self.row_of and not self.admitted(each, counted):
                continue
            if each not in self.row_of:  # turned away below, it keeps its count
                if len(self.row_of) < self.rows - 1:
                    self.row_of[each] = len(self.row_of)
                else:
                    oldest = next(iter(self.row_of))
                    if oldest in used:
                        continue
                    row = self.row_of.pop(oldest)
                    self.row_of[each] = row
                self.counts.pop(each, None)
            elif each not in used:
                self.row_of.move_to_end(each)
            used.add(each)

    def admitted(self, each: int, counted: set[int]) -> bool:
        if self.admit_after == 1:
            return True
        if each not in self.counts and len(self.counts) == self.rows:
            oldest = next(iter(self.counts))
            if oldest in counted:
                return False
            del self.counts[oldest]
        self.counts[each] = self.counts.get(each, 0) + 1
        if each not in counted:
            self.counts.move_to_end(each)
        counted.add(each)
        return self.counts[each] >= self.admit_after


class Reference:
    def __init__(self, rows: int, buckets: int, admit_after: int) -> None:
        self.each = rows // buckets
        self.buckets = [Bucket(self.each, admit_after) for _ in range(buckets)]

    def bucket(self, mixed: int) -> int:
        return mixed * len(self.buckets) >> 63

    def learn(self, ids: list[int]) -> None:
        parts: list[list[int]] = [[] for _ in self.buckets]
        for mixed in map(mix, ids):
            parts[self.bucket(mixed)].append(mixed)
        for bucket, part in zip(self.buckets, parts, strict=True):
            bucket.learn(part)

    def row(self, number: int) -> int:
        mixed = mix(number)
        at = self.bucket(mixed)
        return at * self.each + self.buckets[at].row_of.get(mixed, self.each - 1)

    def ids(self) -> list[int]:
        found = [-1] * (self.each * len(self.buckets))
        for at, bucket in enumerate(self.buckets):
            for mixed, row in bucket.row_of.items():
                found[at * self.each + row] = mixed
        return found


# ---- the model


def make_net(admit_after: int, rows: int = ROWS, buckets: int = BUCKETS) -> nn.Module:
    torch.manual_seed(0)
    tables = [
        EmbeddingBagConfig(
            name="word", num_embeddings=rows, embedding_dim=COLUMNS, feature_names=["word"]
        )
    ]
    id_map = LRUManagedCollisionModule(rows, CPU, admit_after=admit_after, buckets=buckets)
    return nn.Sequential(
        ManagedCollisionEmbeddingBagCollection(
            EmbeddingBagCollection(tables=tables, device=CPU),
            ManagedCollisionCollection({"word": id_map}, tables),
        )
    )


def sharded(admit_after: int) -> DistributedModelParallel:
    net = make_net(admit_after)
    apply_optimizer_in_backward(RowWiseAdagrad, net.parameters(), {"lr": 0.1})
    return DistributedModelParallel(net, device=CPU, plan=cpu_plan(net), sharders=sharders())


def ids_of(step: int, rank: int, world_size: int) -> torch.Tensor:
    """A rank's share of a step's ids: some often, most rarely, from 0 to 2^63 - 1."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 400, (64,), generator=generator) ** 2 // 400
    ids[::7] += MASK - 1000
    return ids.chunk(world_size)[rank]


def look_up(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """One id a bag."""
    features = KeyedJaggedTensor.from_lengths_sync(
        ["word"], ids, torch.ones(len(ids), dtype=torch.int64)
    )
    pooled, _ = model(features)
    found: torch.Tensor = pooled["word"]
    return found


def train(model: Any, steps: range, rank: int, world_size: int) -> None:
    for step in steps:
        (look_up(model, ids_of(step, rank, world_size)) ** 2).sum().backward()


def map_state(model: Any) -> list[int] | None:
    state = model.state_dict()
    (key,) = (key for key in state if key.endswith("._ids"))
    whole = _collect(state[key], 0)
    return None if whole is None else whole.tolist()


def steps_on_ranks(rank: int, world_size: int, admit_after: int) -> Any:
    model = sharded(admit_after)
    states = []
    for step in range(STEPS):
        train(model, range(step, step + 1), rank, world_size)
        states.append(map_state(model))
    table = read_table(model, "word")
    model.eval()
    asked = torch.arange(500)
    with torch.no_grad():
        found = look_up(model, asked).clone()
    state = model.state_dict()
    (key,) = (key for key in state if key.endswith(".weight"))
    weights = _collect(state[key], 0)
    fields = None if table is None else tuple(table)
    return states, fields, asked, found, map_state(model), weights


@pytest.mark.parametrize("admit_after", [1, 3])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_rows_are_the_references(world_size: int, admit_after: int) -> None:
    results = run_ranks(
        world_size, steps_on_ranks, args=(admit_after,), preload=training.PRELOAD
    ).values()
    states, fields, asked, found, after_eval, weights = results[0]
    reference = Reference(ROWS, BUCKETS, admit_after)
    for step, state in enumerate(states):
        reference.learn(ids_of(step, 0, 1).tolist())
        assert state == reference.ids(), f"step {step}"
    assert after_eval == states[-1], "eval() changed the map"
    table = Table(*fields)
    assert table.by_bucket
    assert len(table.unseen) == BUCKETS
    assert sorted(mix(each) for each in table.ids.tolist()) == sorted(
        each for each in reference.ids() if each >= 0
    )
    assert torch.equal(table.lookup(asked), found)
    rows = torch.tensor([reference.row(each) for each in asked.tolist()])
    assert len(rows.unique()) > 20
    assert torch.equal(found, weights[rows])


def save(rank: int, world_size: int, folder: str) -> None:
    model = sharded(2)
    train(model, range(6), rank, world_size)
    checkpoint.save({"model": model.state_dict()}, checkpoint_id=folder)


def load_and_go_on(rank: int, world_size: int, folder: str) -> Any:
    model = sharded(2)
    state = {"model": model.state_dict()}
    checkpoint.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    train(model, range(6, STEPS), rank, world_size)
    return map_state(model)


@pytest.mark.parametrize("world_size", [1, 4])
def test_a_checkpoint_goes_on_with_another_number_of_ranks(world_size: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {"args": (str(tmp_path),), "preload": training.PRELOAD}
    run_ranks(2, save, **options)
    loaded = run_ranks(world_size, load_and_go_on, **options).values()[0]
    reference = Reference(ROWS, BUCKETS, 2)
    for step in range(STEPS):
        reference.learn(ids_of(step, 0, 1).tolist())
    assert loaded == reference.ids()


# ---- one process


def jagged(ids: list[int]) -> dict[str, JaggedTensor]:
    values = torch.tensor(ids, dtype=torch.int64)
    return {"word": JaggedTensor(values=values, lengths=torch.ones(len(ids), dtype=torch.int64))}


def rows_of(id_map: LRUManagedCollisionModule, ids: list[int]) -> list[int]:
    return list(id_map(jagged(ids))["word"].values().tolist())


def test_mixing_is_undone_and_is_the_references() -> None:
    native = loader.load()
    ids = torch.tensor([0, 1, 2, MASK, 123456789])
    mixed = native.mix_ids(ids)
    assert mixed.tolist() == [mix(each) for each in ids.tolist()]
    assert torch.equal(native.unmix_ids(mixed), ids)


def test_a_new_id_has_a_row_of_its_own_at_once() -> None:
    id_map = LRUManagedCollisionModule(1600)
    assert id_map.open_slots().item() == 1600 - 16
    rows = rows_of(id_map, list(range(500)))
    assert len(set(rows)) == 500
    assert rows_of(id_map, list(range(500))) == rows
    assert id_map.open_slots().item() == 1600 - 16 - 500
    assert id_map.evict() is None
    assert id_map.turned_away == 0


def test_replaced_rows_are_told_once() -> None:
    id_map = LRUManagedCollisionModule(4, buckets=1)
    assert rows_of(id_map, [1, 2, 3]) == [0, 1, 2]
    assert rows_of(id_map, [2, 9]) == [1, 0]
    assert id_map.evict().tolist() == [0]
    assert id_map.evict() is None
    assert rows_of(id_map, [5, 6, 7, 8]) == [2, 1, 0, 3]
    assert id_map.turned_away == 1


def test_a_copy_and_a_loaded_state_go_on() -> None:
    id_map = LRUManagedCollisionModule(64, admit_after=2, buckets=2)
    rows_of(id_map, list(range(40)))
    again = copy.deepcopy(id_map)
    loaded = LRUManagedCollisionModule(64, admit_after=2, buckets=2)
    loaded.load_state_dict(id_map.state_dict())
    batch = list(range(20, 60))
    assert rows_of(again, batch) == rows_of(id_map, batch) == rows_of(loaded, batch)
    other = LRUManagedCollisionModule(64, admit_after=2, buckets=4)
    with pytest.raises(ValueError, match="another number of rows or buckets"):
        other.load_state_dict(id_map.state_dict())


def test_buffers_that_are_moved_or_written_to_are_read_again() -> None:
    id_map = LRUManagedCollisionModule(16, buckets=2)
    rows_of(id_map, list(range(40)))
    as_before = copy.deepcopy(id_map)
    id_map.share_memory()  # the same tensors, elsewhere
    written = LRUManagedCollisionModule(16, buckets=2)
    rows_of(written, [1])
    for name, buffer in id_map.named_buffers():
        written.get_buffer(name).copy_(buffer)
    for batch in ([50, 51, 3], [51, 52]):
        rows = rows_of(as_before, batch)
        assert rows_of(id_map, batch) == rows_of(written, batch) == rows
    evicted = as_before.evict()
    assert evicted is not None
    assert id_map.evict().tolist() == evicted.tolist()


def test_bad_input_is_refused() -> None:
    for options, text in (
        ({"buckets": 3}, "power of two"),
        ({"admit_after": 0}, "seen once"),
        ({"device": "cuda"}, "on the CPU only"),
    ):
        with pytest.raises(ValueError, match=text):
            LRUManagedCollisionModule(96, **options)
    with pytest.raises(ValueError, match=r"100 rows cannot be divided into 16 .*Try: 112 rows"):
        LRUManagedCollisionModule(100)
    id_map = LRUManagedCollisionModule(96)
    with pytest.raises(ValueError, match="number of ranks must divide buckets=16"):
        id_map.rebuild_with_output_id_range((0, 32), [0, 32, 64, 96])
    with pytest.raises(RuntimeError, match=r"Id -5 is negative.*2\*\*63 - 1"):
        rows_of(id_map, [3, -5])


def state_after_replacement(rank: int, world_size: int) -> list[float]:
    """Each rank's table is filled, then the same number of other ids comes, three times."""
    model = sharded(1)
    for batch in range(2):
        ids = torch.arange(rank, 600, world_size) + 1000 * batch
        for _ in range(1 + 2 * batch):
            (look_up(model, ids).sum() * world_size).backward()
    state: Any = model.fused_optimizer.state_dict()["state"]
    (found,) = state.values()
    (sums,) = (value for key, value in found.items() if key.endswith("sum") or "momentum" in key)
    return [float(value) for part in sums.local_shards() for value in part.tensor.flatten()]


def test_the_optimizers_state_of_a_replaced_id_is_reset() -> None:
    """A gradient is 1 in all columns, so a state counts the steps of a row that no others share."""
    for states in run_ranks(2, state_after_replacement, preload=training.PRELOAD).values():
        own = ROWS // BUCKETS
        alone = [value for at, value in enumerate(states) if at % own != own - 1]
        assert set(alone) == {3.0}
