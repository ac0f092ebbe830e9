"""docs/which-split.md: its formulas by hand, its tables, and the bytes that two hosts send."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from documents import ROOT, installed_environment
from hosts import Host, run_on_both, wire

from pycomm.doctor.splits import (
    FP16_NBYTES,
    ddp_nbytes,
    fsdp_nbytes,
    pipeline_nbytes,
    wire_seconds,
)

pytestmark = pytest.mark.ci


def test_the_formulas_by_hand() -> None:
    assert ddp_nbytes(62.5e6, 2) == 250e6  # each of two sends half, twice
    assert ddp_nbytes(62.5e6, 4) == 375e6  # three quarters, twice
    assert ddp_nbytes(62.5e6, 4, value_nbytes=FP16_NBYTES) == 187.5e6
    assert ddp_nbytes(64e6, 2, every=32) == 8e6
    assert ddp_nbytes(1e6, 1) == fsdp_nbytes(1e6, 1) == 0
    assert fsdp_nbytes(62.5e6, 2) == 375e6  # half, three times
    assert fsdp_nbytes(62.5e6, 2, microbatches=4) == 1500e6
    assert fsdp_nbytes(62.5e6, 4, reshard=False) == ddp_nbytes(62.5e6, 4)
    # Of 1,000 tokens of 10 values: one neighbour each, or two.
    assert [pipeline_nbytes(1000, 10, m) for m in (1, 2, 3, 8)] == [0, 40e3, 80e3, 80e3]
    assert pipeline_nbytes(1000, 10, 2, value_nbytes=FP16_NBYTES) == 20e3
    assert wire_seconds(117.7e6, 1) == pytest.approx(1.0, abs=1e-3)
    assert wire_seconds(117.7e6, 2.5) == pytest.approx(0.4, abs=1e-3)


def test_the_tables_are_computed() -> None:
    folder = str(ROOT / "tools")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    for path, text in importlib.import_module("doc_tables").which_split(ROOT).items():
        assert path.read_text() == text, f"run tools/doc_tables.py: {path} is another text"


# Bytes that leave an interface

PROGRAM = """
import json, re, sys
from pathlib import Path
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
import pycomm

STEPS, MICROBATCHES, INTERFACE = 4, 3, sys.argv[1]

def sent():
    dist.barrier()
    table = Path("/proc/self/net/dev").read_text()
    return int(re.search(rf"^ *{INTERFACE}: *(.*)$", table, re.M)[1].split()[8])

def model_of():
    return nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(4)))

def sharded(reshard):
    model = model_of()
    for layer in model:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    return fully_shard(model, mesh=mesh, reshard_after_forward=reshard)

def measured(model, passes=1):
    def step():
        for _ in range(passes):
            model(torch.ones(2, 512)).sum().backward()
        model.zero_grad()
    step()  # connections, and the first cut of the buckets
    before = sent()
    for _ in range(STEPS):
        step()
    return (sent() - before) / STEPS

dist.init_process_group("pycomm")
mesh = init_device_mesh("cpu", (2,))
print(json.dumps({
    "ddp": measured(DistributedDataParallel(model_of())),
    "pycomm's ddp": measured(pycomm.DistributedDataParallel(model_of())),
    "fsdp": measured(sharded(True)),
    "kept whole": measured(sharded(False)),
    "microbatches": measured(sharded(True), MICROBATCHES),
}), flush=True)
dist.destroy_process_group()
"""
PARAMETERS = 4 * 512 * 512
EXPECTED = {
    "ddp": ddp_nbytes(PARAMETERS, 2),
    "pycomm's ddp": ddp_nbytes(PARAMETERS, 2),
    "fsdp": fsdp_nbytes(PARAMETERS, 2),
    "kept whole": fsdp_nbytes(PARAMETERS, 2, reshard=False),
    "microbatches": fsdp_nbytes(PARAMETERS, 2, microbatches=3),
}
HEADERS = 0.05


@pytest.fixture
def both() -> Iterator[tuple[Host, Host]]:
    with wire(
        Host("alpha", "192.168.1.10", "fd77::10"), Host("beta", "192.168.1.11", "fd77::11")
    ) as hosts:
        yield hosts


@pytest.mark.needs_native
@pytest.mark.namespaces
@pytest.mark.timeout(170)
def test_two_hosts_send_as_many_bytes(both: tuple[Host, Host], tmp_path: Path) -> None:
    env = installed_environment(tmp_path / "installed")
    env |= {"MASTER_ADDR": both[0].address, "MASTER_PORT": "29500", "WORLD_SIZE": "2"}
    command = [sys.executable, "-c", PROGRAM, "eth0"]
    outcomes = run_on_both(
        [(host, command, {**env, "RANK": str(rank)}) for rank, host in enumerate(both)], tmp_path
    )
    for outcome in outcomes:
        assert outcome.returncode == 0, outcome
        found = json.loads(outcome.out)
        for name, expected in EXPECTED.items():
            assert expected <= found[name] <= (1 + HEADERS) * expected, (name, expected, found)
