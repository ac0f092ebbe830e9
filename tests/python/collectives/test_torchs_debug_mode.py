"""TORCH_DISTRIBUTED_DEBUG=DETAIL: torch checks each collective over gloo before pycomm runs it."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import TORCH_DDP, describe_exception, mark, run_ranks, start_ranks
from torch import nn

pytestmark = [pytest.mark.needs_native, pytest.mark.ci]

DETAIL: dict[str, Any] = {
    "env": {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"},
    "only_pycomm": False,
}


def everything(rank: int, size: int) -> None:
    import pycomm

    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert type(backend).__name__ == "_ProcessGroupWrapper" and backend.name() == "pycomm"

    # Messages between some of the ranks count for no sequence number that torch compares.
    message = torch.full((2,), float(rank))
    if rank == 0:
        dist.send(message, 1)
    elif rank == 1:
        dist.recv(message, 0)
        assert message.eq(0).all()

    mine = torch.full((size,), rank + 1.0)
    total = size * (size + 1) / 2
    summed = mine.clone()
    work = dist.all_reduce(summed, async_op=True)
    assert work is not None
    work.wait()
    assert summed.eq(total).all()
    rooted = mine.clone()
    dist.reduce(rooted, 0)
    assert rank != 0 or rooted.eq(total).all()
    whole = torch.empty(size * size)
    dist.all_gather_into_tensor(whole, mine)
    assert whole.view(size, size).eq(torch.arange(1, size + 1).view(-1, 1)).all()
    uneven = [torch.empty(each + 1) for each in range(size)]
    dist.all_gather(uneven, torch.full((rank + 1,), float(rank)))
    assert all(part.eq(each).all() for each, part in enumerate(uneven))
    part = torch.empty(1)
    dist.reduce_scatter_tensor(part, mine)
    assert part.item() == total
    dist.scatter(
        part, [torch.full((1,), float(each)) for each in range(size)] if not rank else None
    )
    assert part.item() == rank
    dist.gather(part, [torch.empty(1) for _ in range(size)] if rank == 0 else None)
    dist.broadcast(mine, 1)
    assert mine.eq(2.0).all()
    swapped = torch.empty(size)
    dist.all_to_all_single(swapped, torch.full((size,), float(rank)))
    assert swapped.tolist() == list(range(size))
    sparse = torch.sparse_coo_tensor([[rank]], [1.0], (size,))
    dist.all_reduce(sparse)
    assert sparse.to_dense().eq(1).all()
    with dist.distributed_c10d._coalescing_manager():
        dist.all_reduce(summed)
        dist.all_reduce(mine)
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, rank)
    assert objects == list(range(size))
    dist.barrier()
    pycomm.monitored_barrier(timeout=60)
    pair = dist.new_group([0, 2])
    if rank != 1:
        dist.all_reduce(part, group=pair)
        assert part.item() == 2.0
    for wrapper, options in [
        (nn.parallel.DistributedDataParallel, {}),
        (pycomm.DistributedDataParallel, {}),
        (pycomm.DistributedDataParallel, {"wire_dtype": "int8"}),
    ]:
        layer = nn.Linear(1, 1, bias=False)
        model = wrapper(layer, **options)
        for _ in range(3):
            model.zero_grad()
            model(torch.tensor([[rank + 1.0]])).sum().backward()
        assert layer.weight.grad is not None
        assert abs(float(layer.weight.grad) - 2.0) < 0.05


def test_everything_works() -> None:
    run_ranks(3, everything, preload=TORCH_DDP, **DETAIL)


def caught(call: Any) -> Any:
    try:
        call()
    except Exception as error:
        return describe_exception(error)
    return None


def mismatches(rank: int, size: int, kind: str) -> Any:
    odd = rank == 1
    tensor = torch.ones(3 if kind == "shape" and odd else 4)
    operation = dist.ReduceOp.MAX if kind == "operation" and odd else dist.ReduceOp.SUM
    if kind == "collective" and odd:
        error = caught(lambda: dist.broadcast(tensor, 0))
    else:
        error = caught(lambda: dist.all_reduce(tensor, operation))
    again = torch.ones(2)
    usable = caught(lambda: dist.all_reduce(again)) is None and again.eq(size).all().item()
    return error, usable


@pytest.mark.parametrize("kind", ["shape", "collective"])
def test_torch_finds_another_shape_and_another_collective(kind: str) -> None:
    for error, usable in run_ranks(3, mismatches, args=(kind,), **DETAIL).values():
        assert error.type_name == "RuntimeError"
        assert error.text.startswith("Detected mismatch between collectives on ranks. Rank ")
        assert "Rank 1 is running" in error.text
        assert usable, "nothing has come to pycomm, so the group goes on"


def test_pycomm_finds_what_torch_does_not_compare() -> None:
    for error, usable in run_ranks(3, mismatches, args=("operation",), **DETAIL).values():
        assert error.code == "COLLECTIVE_MISMATCH" and not usable


def lose_rank_1(rank: int, size: int) -> Any:
    import pycomm

    tensor = torch.ones(4)
    dist.all_reduce(tensor)
    if rank == 1:
        mark("ready")
        time.sleep(100)
    error = caught(lambda: dist.all_reduce(tensor))
    deadline = time.monotonic() + 30
    while pycomm.last_error() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    return error, dict(pycomm.last_error() or {})


def test_gloo_raises_the_error_of_a_death_and_pycomm_knows_the_rank() -> None:
    with start_ranks(3, lose_rank_1, **DETAIL) as running:
        running.wait_for_mark(1, "ready")
        running.kill(1)
        results = running.collect(60, grace_s=60)
    texts = ["Ranks 1 failed to pass monitoredBarrier", "from rank 0. Please check rank 0 logs"]
    for rank, text in zip((0, 2), texts, strict=True):
        error, known = results[rank].value
        assert error.type_name == "RuntimeError" and text in error.text
        assert (known["code"], known["peer"]) == ("PEER_DEAD", 1)
