"""Reads a table of a sharded TorchRec model as a whole, to save it for serving."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from pycomm._native import loader

ID_MAPS = "_managed_collision_collection._managed_collision_modules"
"""Where a managed-collision module has its id maps, by table."""
_IDS = "_mch_sorted_raw_ids"
_SLOTS = "_mch_remapped_ids_mapping"
_EMPTY_SLOT = torch.iinfo(torch.int64).max
_MIXED_IDS = "_ids"
"""Of an LRUManagedCollisionModule; -1 for none."""


class Table(NamedTuple):
    """One table, whole.

    Example::

        table = read_table(model, "user")  # on all ranks; None but on rank 0
        if table is not None:
            vectors = table.lookup(torch.tensor([3, 10**12]))  # (2, columns)
    """

    ids: torch.Tensor
    """(n,) int64, sorted: the ids that have a row of their own."""
    rows: torch.Tensor
    """(n, columns): the row of each of them."""
    unseen: torch.Tensor
    """(n, columns): the rows that all other ids share; (0, columns) if the table has no id map.
    There are as many as ranks, and id i has ``unseen[uint64(i) % ranks]``; or as many as an
    LRUManagedCollisionModule has buckets, and id i has that of its bucket."""
    by_bucket: bool = False
    """Which of the two."""

    def lookup(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows of any int64 ids: what the sharded model reads in ``eval()``.

        Raises:
            KeyError: An id has no row, and the table has no id map.
        """
        known = torch.isin(ids, self.ids)
        found = self.rows.new_empty(*ids.shape, self.rows.shape[1])
        found[known] = self.rows[torch.searchsorted(self.ids, ids[known])]
        if self.by_bucket:
            mixed = loader.load().mix_ids(ids[~known])
            found[~known] = self.unseen[mixed // (2**63 // len(self.unseen))]
        elif len(self.unseen):
            found[~known] = self.unseen[_unsigned_remainder(ids[~known], len(self.unseen))]
        elif not bool(known.all()):
            raise KeyError(f"ids without a row: {ids[~known][:5].tolist()}")
        return found


def read_table(model: nn.Module, table: str, *, dst: int = 0) -> Table | None:
    """Collects one table on one rank, to save it for serving. All ranks must call it.

    Args:
        model: The ``DistributedModelParallel``, over the default group.
        table: The table's name.
        dst: The rank that gets the table. It needs the memory for all of it.

    Returns:
        The table on rank ``dst``, None on the others.

    Raises:
        KeyError: The model has no sharded table of this name, or more than one.
        ValueError: The table's id map was not made with ``input_hash_size=0``.

    Cost: each rank sends its part once, to ``dst``.
    """
    state = model.state_dict()
    keys = [key for key in state if key.endswith(f".{table}.weight")]
    found = keys
    keys = [key for key in keys if hasattr(state[key], "local_shards")]
    if found and not keys:
        raise KeyError(
            f"the model has 0 sharded tables named {table!r}: this one is not sharded. Try: pass "
            "the DistributedModelParallel, not the model inside it"
        )
    if len(keys) != 1:
        named = sorted({key.split(".")[-2] for key in state if hasattr(state[key], "local_shards")})
        raise KeyError(
            f"the model has {len(keys)} sharded tables named {table!r}, not one. All: {named}"
        )
    mixed_keys = [key for key in state if key.endswith(f"{ID_MAPS}.{table}.{_MIXED_IDS}")]
    if mixed_keys:
        (id_map,) = (
            each for path, each in model.named_modules() if path.endswith(f"{ID_MAPS}.{table}")
        )
        return _read_mixed(state[keys[0]], state[mixed_keys[0]], id_map.buckets(), dst)
    id_keys = [key for key in state if key.endswith(f"{ID_MAPS}.{table}.{_IDS}")]
    if not id_keys:
        rows = _collect(state[keys[0]], dst)
        return None if rows is None else Table(torch.arange(len(rows)), rows, rows[:0])
    for path, id_map in model.named_modules():
        if path.endswith(f"{ID_MAPS}.{table}") and id_map.input_size() != 0:
            raise ValueError(
                f"table {table!r}: its id map was made with input_hash_size="
                f"{id_map.input_size()}, by which ids are spread over ranks by their range. "
                "Try: input_hash_size=0, by their remainder"
            )
    rows = _collect(state[keys[0]], dst)
    ids = _collect(state[id_keys[0]], dst)
    slots = _collect(state[id_keys[0].removesuffix(_IDS) + _SLOTS], dst)
    if rows is None or ids is None or slots is None:
        return None
    # The last slot of each rank's range is for the ids of this rank that have none.
    parts = state[keys[0]].metadata().shards_metadata
    last = [part.shard_offsets[0] + part.shard_sizes[0] - 1 for part in parts]
    ids, order = torch.sort(ids)
    used = ids != _EMPTY_SLOT
    return Table(ids[used], rows[slots[order][used]], rows[last])


def _read_mixed(weight: Any, mixed_ids: Any, buckets: int, dst: int) -> Table | None:
    """Of a table with an LRUManagedCollisionModule."""
    rows, mixed = _collect(weight, dst), _collect(mixed_ids, dst)
    if rows is None or mixed is None:
        return None
    used = mixed >= 0
    ids, order = torch.sort(loader.load().unmix_ids(mixed[used]))
    shared = rows.view(buckets, -1, rows.shape[1])[:, -1].clone()
    return Table(ids, rows[used][order], shared, by_bucket=True)


def _collect(sharded: Any, dst: int) -> torch.Tensor | None:
    """A ``ShardedTensor`` as a whole on rank ``dst``; None on the others."""
    rank = dist.get_rank()
    described = sharded.metadata()
    size, dtype = described.size, described.tensor_properties.dtype
    mine = {tuple(part.metadata.shard_offsets): part.tensor for part in sharded.local_shards()}
    whole = torch.empty(size, dtype=dtype) if rank == dst else None
    for part in described.shards_metadata:
        owner = part.placement.rank()
        if whole is not None:
            window = whole[
                tuple(
                    slice(offset, offset + size)
                    for offset, size in zip(part.shard_offsets, part.shard_sizes, strict=True)
                )
            ]
            if owner == dst:
                window.copy_(mine[tuple(part.shard_offsets)])
            elif window.numel():
                received = torch.empty(window.shape, dtype=window.dtype)
                dist.recv(received, owner)
                window.copy_(received)
        elif owner == rank and min(part.shard_sizes):
            dist.send(mine[tuple(part.shard_offsets)].detach().contiguous(), dst)
    return whole


def _unsigned_remainder(ids: torch.Tensor, divisor: int) -> torch.Tensor:
    """uint64(ids) % divisor: how fbgemm finds the rank of an id."""
    return (ids.remainder(divisor) + (ids < 0) * (2**64 % divisor)).remainder(divisor)
