"""What torch builds on collectives: functional collectives, compilation, autograd, profiling."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as with_autograd
from cases import case
from torch.nn.parallel import DistributedDataParallel
from training import batch_of, loss_of, make_model

import pycomm

pytestmark = [pytest.mark.needs_native, pytest.mark.nightly]


def world() -> dist.ProcessGroup:
    return cast(dist.ProcessGroup, dist.group.WORLD)


def piece(rank: int, rows: int = 4) -> torch.Tensor:
    """Small whole numbers: every sum is exact."""
    return torch.arange(rows * 3.0).reshape(rows, 3) + 100 * rank


# Functional collectives


def run_functional(rank: int, world_size: int) -> dict[str, Any]:
    group, mine = world(), piece(rank)
    coalesced = [mine, mine * 2]
    results = {
        "all_reduce": functional.all_reduce(mine, "sum", group),
        "all_reduce avg": functional.all_reduce(mine, "avg", group),
        "broadcast": functional.broadcast(mine, 1, group),
        "all_gather_tensor": functional.all_gather_tensor(mine, 0, group),
        "all_gather_tensor, dim 1": functional.all_gather_tensor(mine, 1, group),
        "reduce_scatter_tensor": functional.reduce_scatter_tensor(mine, "sum", 0, group),
        "all_to_all_single": functional.all_to_all_single(mine, None, None, group),
        "all_reduce_coalesced": functional.all_reduce_coalesced(coalesced, "sum", group),
        "all_gather_into_tensor_coalesced": functional.all_gather_into_tensor_coalesced(
            coalesced, group
        ),
        "reduce_scatter_tensor_coalesced": functional.reduce_scatter_tensor_coalesced(
            coalesced, "sum", [0, 0], group
        ),
    }
    return {
        name: [functional.wait_tensor(part) for part in result]
        if isinstance(result, list)
        else functional.wait_tensor(result)
        for name, result in results.items()
    }


FUNCTIONAL: dict[str, Callable[[int, list[torch.Tensor]], Any]] = {
    "all_reduce": lambda rank, all_: sum(all_),
    "all_reduce avg": lambda rank, all_: sum(all_) / len(all_),
    "broadcast": lambda rank, all_: all_[1],
    "all_gather_tensor": lambda rank, all_: torch.cat(all_),
    "all_gather_tensor, dim 1": lambda rank, all_: torch.cat(all_, 1),
    "reduce_scatter_tensor": lambda rank, all_: sum(all_).chunk(len(all_))[rank],
    "all_to_all_single": lambda rank, all_: torch.cat([t.chunk(len(all_))[rank] for t in all_]),
    "all_reduce_coalesced": lambda rank, all_: [sum(all_), 2 * sum(all_)],
    "all_gather_into_tensor_coalesced": lambda rank, all_: [torch.cat(all_), 2 * torch.cat(all_)],
    "reduce_scatter_tensor_coalesced": lambda rank, all_: [
        sum(all_).chunk(len(all_))[rank],
        2 * sum(all_).chunk(len(all_))[rank],
    ],
}


@pytest.mark.parametrize("name", FUNCTIONAL)
@case(run_functional)
@pytest.mark.integration("torch", "functional collective")
def test_functional(name: str, values: list[dict[str, Any]]) -> None:
    pieces = [piece(rank) for rank in range(len(values))]
    for rank, value in enumerate(values):
        wanted, got = FUNCTIONAL[name](rank, pieces), value[name]
        if not isinstance(wanted, list):
            wanted, got = [wanted], [got]
        for one, other in zip(got, wanted, strict=True):
            assert torch.equal(one, other), f"rank {rank}"


# torch.compile


def collective_block(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    hidden = torch.relu(x @ weight)
    gathered = functional.all_gather_tensor(hidden, 0, world())
    reduced = functional.reduce_scatter_tensor(gathered * 2, "sum", 0, world())
    total = functional.all_reduce(reduced.sum(0), "sum", world())
    return reduced + total


def run_compiled(rank: int, world_size: int, backend: str) -> Any:
    import torch._dynamo.utils as counters

    weight = torch.linspace(-1, 1, 9).reshape(3, 3)
    counters.counters.clear()
    compiled = torch.compile(collective_block, backend=backend, fullgraph=True)
    got = compiled(piece(rank) / 64, weight)
    wanted = collective_block(piece(rank) / 64, weight)
    graphs = counters.counters["stats"]["unique_graphs"]
    return float((got - wanted).abs().max()), float(wanted.abs().max()), graphs


def assert_compiled(values: list[Any]) -> None:
    for difference, largest, graphs in values:
        assert graphs == 1
        assert difference <= 2.0**-20 * largest and largest > 1


@case(run_compiled, "aot_eager")
@pytest.mark.integration("torch", "torch.compile (aot_eager) of a function with collectives")
def test_compiled(values: list[Any]) -> None:
    assert_compiled(values)


# With autograd


def run_with_autograd(rank: int, world_size: int) -> dict[str, Any]:
    """Each result is multiplied with weights of the rank's own; what comes back is the gradient."""

    def gradient(run: Callable[[torch.Tensor], Any]) -> torch.Tensor:
        mine = piece(rank).requires_grad_()
        result = run(mine)
        parts = result if isinstance(result, tuple | list) else [result]
        total = torch.zeros(())
        for number, part in enumerate(parts):
            if part is not None and part.requires_grad:
                total = total + (part * (1 + rank + 10 * number)).sum()
        total.backward()  # type: ignore[no-untyped-call]
        assert mine.grad is not None
        return mine.grad

    # torch's functions have the default group of when they were imported as their own default.
    group = world()

    def parts_of(x: torch.Tensor) -> list[torch.Tensor]:
        return [part.contiguous() for part in x.chunk(world_size)]

    def reduce_scatter(x: torch.Tensor) -> torch.Tensor:
        parts = parts_of(x)
        return with_autograd.reduce_scatter(torch.empty_like(parts[0]), parts, group=group)

    def all_to_all(x: torch.Tensor) -> Any:
        parts = parts_of(x)
        return with_autograd.all_to_all([torch.empty_like(p) for p in parts], parts, group=group)

    runs: dict[str, Callable[[torch.Tensor], Any]] = {
        "all_reduce": lambda x: with_autograd.all_reduce(x, group=group),
        "all_gather": lambda x: with_autograd.all_gather(x, group=group),
        "broadcast": lambda x: with_autograd.broadcast(x, 0, group=group),
        "gather": lambda x: with_autograd.gather(x, 0, group=group),
        "reduce": lambda x: with_autograd.reduce(x, 0, group=group),
        "scatter": lambda x: with_autograd.scatter(parts_of(x), 0, group=group),
        "reduce_scatter": reduce_scatter,
        "all_to_all": all_to_all,
        "all_to_all_single": lambda x: with_autograd.all_to_all_single(
            torch.empty_like(x), x, group=group
        ),
    }
    return {name: gradient(run) for name, run in runs.items()}


def ones(value: float, rows: int = 4) -> torch.Tensor:
    return torch.full((rows, 3), value)


# With two ranks and the weights 1 and 2 (for the n-th part 10 n more), by hand.
GRADIENTS: dict[str, list[torch.Tensor]] = {
    "all_reduce": [ones(3), ones(3)],
    "all_gather": [ones(3), ones(23)],
    "broadcast": [ones(3), ones(0)],
    "gather": [ones(1), ones(11)],
    "reduce": [ones(1), ones(1)],
    "scatter": [torch.cat([ones(1, 2), ones(2, 2)]), ones(0)],
    "reduce_scatter": [torch.cat([ones(1, 2), ones(2, 2)])] * 2,
    "all_to_all": [
        torch.cat([ones(1, 2), ones(2, 2)]),
        torch.cat([ones(11, 2), ones(12, 2)]),
    ],
    "all_to_all_single": [torch.cat([ones(1, 2), ones(2, 2)])] * 2,
}


@pytest.mark.parametrize("name", GRADIENTS)
@case(run_with_autograd)
@pytest.mark.integration("torch", "torch.distributed.nn.functional, gradient")
def test_with_autograd(name: str, values: list[dict[str, Any]]) -> None:
    for rank, value in enumerate(values):
        assert torch.equal(value[name], GRADIENTS[name][rank]), f"rank {rank}: {value[name]}"


# Profiler


def run_profiled(rank: int, world_size: int) -> list[dict[str, Any]]:
    model = DistributedDataParallel(make_model())
    ours = pycomm.DistributedDataParallel(make_model())
    with torch.profiler.profile(record_shapes=True) as profile:
        for trained in (model, ours):
            loss_of(trained, batch_of(0, rank, world_size)).backward()
        dist.barrier()
        dist.all_gather_into_tensor(torch.empty(2 * 6), torch.ones(6))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return [event for event in events if event.get("name", "").startswith("pycomm:")]


@case(run_profiled)
@pytest.mark.integration("torch", "profiler: a Chrome trace with pycomm's events and shapes")
def test_profiler(values: list[list[dict[str, Any]]]) -> None:
    for events in values:
        names = [event["name"] for event in events]
        assert names.count("pycomm:all_reduce") >= 2
        assert "pycomm:barrier" in names and "pycomm:all_gather_into_tensor" in names
        (gather,) = (e for e in events if e["name"] == "pycomm:all_gather_into_tensor")
        assert [6] in gather["args"]["Input Dims"]
        assert all(event["dur"] > 0 for event in events)
