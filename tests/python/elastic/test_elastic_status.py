"""`pycomm status` names the epoch and the members of a wrapper's own group."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from command import run_pycomm
from elastic_rig import Net, batch_of
from rank_child import mark
from ranks import TORCH_DDP, start_ranks

pytestmark = [pytest.mark.needs_native, pytest.mark.timeout(200)]


def status(*arguments: str) -> str:
    # Each process of this machine is asked, and some of them belong to other tests.
    done = run_pycomm(["status", "--timeout=20", *arguments], timeout_s=100)
    assert done.stderr == ""
    return done.stdout


def trains(rank: int, world_size: int, end: str) -> None:
    import pycomm

    model = pycomm.DistributedDataParallel(Net(), elastic=pycomm.Elastic())
    for step in range(10):
        model.zero_grad()
        model(batch_of(rank, step)).square().mean().backward()
        mark(f"step {step}")
        if rank == 1 and step == 4:
            time.sleep(150)
    while not Path(end).exists():
        time.sleep(0.01)


@pytest.mark.faults
def test_status_has_epoch_and_members(tmp_path: Path) -> None:
    end = tmp_path / "end"
    with start_ranks(3, trains, args=(str(end),), preload=TORCH_DDP) as running:
        running.wait_for_mark(1, "step 4")
        pids = [running.pid(rank) for rank in range(3)]
        rows = json.loads(status("--json"))["rows"]
        named = [row["group"] for row in rows if row["pid"] in pids and row["group"] != "0"]
        assert named == ["elastic epoch 1: 0, 1, 2"] * 3
        running.kill(1)
        for rank in (0, 2):
            running.wait_for_mark(rank, "step 9")
        rows = json.loads(status("--json"))["rows"]
        open_rows = [row for row in rows if row["pid"] in pids and row["state"] == "ready"]
        named = [row["group"] for row in open_rows if row["group"] != "0"]
        assert named == ["elastic epoch 2: 0, 2"] * 2
        assert "elastic epoch 2: 0, 2" in status()
        end.touch()
        results = running.collect(60)
    assert all(results[rank].ok for rank in (0, 2)), results.describe()
