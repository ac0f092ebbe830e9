"""torch's distributed checkpoint of sharded tables, loaded by another number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import training
from ranks import run_ranks
from torch.distributed import checkpoint
from training import Spec

from pycomm.integrations._torchrec_table import _collect
from pycomm.integrations.torchrec import read_table

pytestmark = [pytest.mark.needs_native, pytest.mark.timeout(400)]

SPEC = Spec(row_wise=("user", "place"), optimizer="RowWiseAdagrad", steps=6)


def state_of(model: Any) -> dict[str, Any]:
    return {"model": model.state_dict(), "tables": model.fused_optimizer.state_dict()}


def tables_of(model: Any) -> dict[str, torch.Tensor]:
    """Whole, on rank 0."""
    found = {name: read_table(model, name) for name in training.ROWS}
    return {name: table.rows for name, table in found.items() if table is not None}


def save(rank: int, world_size: int, folder: str) -> Any:
    model = training.sharded(SPEC)
    for step in range(SPEC.steps):
        model(*training.batch_of(SPEC, step, rank)).backward()
    checkpoint.save(state_of(model), checkpoint_id=folder)
    return tables_of(model), states_of(model)


def load(rank: int, world_size: int, folder: str) -> Any:
    model = training.sharded(SPEC)
    state = state_of(model)
    checkpoint.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    model.fused_optimizer.load_state_dict(state["tables"])
    return tables_of(model), states_of(model)


def states_of(model: Any) -> dict[str, torch.Tensor | None]:
    """The optimizer's state of each table, whole, on rank 0."""
    state = model.fused_optimizer.state_dict()["state"]
    return {
        key: _collect(value, 0)
        for key, values in state.items()
        for value in values.values()
        if hasattr(value, "local_shards")
    }


@pytest.mark.parametrize("world_size", [1, 4])
def test_loaded_by_another_number_of_ranks(world_size: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {"args": (str(tmp_path),), "preload": training.PRELOAD}
    saved = run_ranks(2, save, **options).values()
    loaded = run_ranks(world_size, load, **options).values()
    for name, rows in saved[0][0].items():
        assert torch.equal(loaded[0][0][name], rows)
        assert not torch.equal(rows, training.table_values(name))  # it was trained
    states, again = saved[0][1], loaded[0][1]
    assert states.keys() == again.keys() and len(states) == len(training.ROWS)
    for key, state in states.items():
        assert int((state > 0).sum()) > 1
        assert torch.equal(again[key], state)
