"""Which way a group's bytes go: what is asked for, what is possible, and the same results."""

from __future__ import annotations

import os
import resource
import signal
from typing import Any

import pytest
import rings
import torch
import torch.distributed as dist
from documents import blocks, read
from log_lines import LogLines
from ranks import LOOPBACK, describe_exception, free_port, run_ranks

import pycomm
from pycomm._group.creation import flight_record

pytestmark = pytest.mark.needs_native

NUMELS = (1, 2048, 2049, 1_000_003)
"""One element, what just fits a slot, what does not, several rounds with a crooked end."""


def whole_numbers(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Their sums are exact in float32."""
    return ((torch.arange(numel) * 7 + rank * 13) % 101).to(dtype)


def every_collective(rank: int, world_size: int) -> dict[str, Any]:
    for numel in NUMELS:
        inputs = [whole_numbers(peer, numel) for peer in range(world_size)]
        for op, expected in (
            (dist.ReduceOp.SUM, torch.stack(inputs).sum(0)),
            (dist.ReduceOp.MAX, torch.stack(inputs).amax(0)),
            (dist.ReduceOp.AVG, torch.stack(inputs).sum(0) / world_size),
        ):
            tensor = inputs[rank].clone()
            dist.all_reduce(tensor, op)
            torch.testing.assert_close(tensor, expected, rtol=0, atol=0)
        works = [dist.all_reduce(tensor, async_op=True) for tensor in inputs]  # not waited in order
        dist.barrier()
        for work in reversed(works):
            work.wait()
        assert all(
            torch.equal(t, whole_numbers(k, numel) * world_size) for k, t in enumerate(inputs)
        )

        root = numel % world_size
        tensor = whole_numbers(rank, numel)
        dist.broadcast(tensor, root)
        assert torch.equal(tensor, whole_numbers(root, numel))

        gathered = [torch.empty(numel) for _ in range(world_size)]
        dist.all_gather(gathered, whole_numbers(rank, numel))
        assert all(torch.equal(t, whole_numbers(k, numel)) for k, t in enumerate(gathered))

        parts = [whole_numbers(rank + part, numel) for part in range(world_size)]
        own = torch.empty(numel)
        dist.reduce_scatter(own, parts)
        assert torch.equal(
            own, sum(whole_numbers(peer + rank, numel) for peer in range(world_size))
        )
    return {one.op: one.algorithm for one in flight_record().operations if one.sequence is not None}


@pytest.mark.ci
@pytest.mark.parametrize(
    ("transport", "world_size"), [("shm", 2), rings.nightly(("shm", 3)), ("tcp", 2)]
)
def test_every_collective_gives_what_it_says(transport: str, world_size: int) -> None:
    options = {"transport": transport}
    for ways in run_ranks(world_size, every_collective, pg_options=options).values():
        shared = [op for op, algorithm in ways.items() if algorithm == "shared_memory"]
        assert bool(shared) == (transport == "shm"), ways


def inexact_sums(rank: int, world_size: int) -> list[bytes]:
    found = []
    for numel in NUMELS:
        for dtype in (torch.float32, torch.float16):
            tensor = torch.rand(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)
            dist.all_reduce(tensor)
            found.append(tensor.view(torch.uint8).numpy().tobytes())
    return found


def test_all_ranks_get_the_same_bits() -> None:
    first, *others = run_ranks(3, inexact_sums, pg_options={"transport": "shm"}).values()
    assert all(other == first for other in others)


def with_no_memory_on_rank_one(rank: int, world_size: int, transport: str) -> dict[str, Any]:
    """Rank 0 makes the memory: there, no file may have a size."""
    lines = LogLines()
    if rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, resource.RLIM_INFINITY))
    met: dict[str, Any] = {}
    try:
        group = dist.new_group(
            backend="pycomm", pg_options=pycomm.Options(transport=transport, debug="INFO")
        )
        tensor = torch.ones(1000)
        dist.all_reduce(tensor, group=group)
        met["sum"] = float(tensor[0])
    except pycomm.errors.PycommError as error:
        met["error"] = describe_exception(error)
    if rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    within_s = 20.0 if rank == 0 and "sum" in met else 0.0
    met["lines"] = lines.that_have("uses no shared memory", within_s)
    dist.barrier()
    return met


def test_without_memory_auto_falls_back_and_shm_says_why() -> None:
    auto = run_ranks(2, with_no_memory_on_rank_one, args=("auto",)).values()
    assert [met["sum"] for met in auto] == [2.0, 2.0]
    first, *others = [line for met in auto for line in met["lines"]]
    assert "uses no shared memory: rank 0 has none: no shared memory" in first and not others
    shm = run_ranks(2, with_no_memory_on_rank_one, args=("shm",)).values()
    for met in shm:
        assert "The ranks cannot share memory: rank 0 has none: no shared memory" in str(
            met["error"]
        )
        assert "UNSUPPORTED" in str(met["error"])


def different_ways(rank: int, world_size: int) -> str:
    dist.barrier()
    try:
        if rank == 0:
            dist.all_reduce(torch.ones(10))  # in shared memory
        else:
            dist.all_to_all_single(torch.empty(10), torch.ones(10))  # by links
    except pycomm.errors.CollectiveMismatchError as error:
        return str(error)
    return "no error"


def test_a_call_that_goes_another_way_is_a_mismatch() -> None:
    for text in run_ranks(2, different_ways, pg_options={"transport": "shm"}).values():
        assert "all_reduce(SUM, float32 x 10, shared_memory)" in text
        assert "all_to_all(" in text


def in_place(rank: int, world_size: int) -> dict[str, Any]:
    met: dict[str, Any] = {}
    numel = 1_000_003
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        inputs = [whole_numbers(peer, numel, dtype) for peer in range(world_size)]
        reached = pycomm.empty(numel, dtype=dtype)
        reached.copy_(inputs[rank])
        dist.all_reduce(reached)
        ordinary = inputs[rank].clone()
        dist.all_reduce(ordinary)
        assert torch.equal(reached, ordinary)
        assert dtype == torch.bfloat16 or torch.equal(reached, sum(inputs))

        reached.copy_(inputs[rank])
        gathered = pycomm.empty(world_size, numel, dtype=dtype)
        dist.all_gather_into_tensor(gathered.view(-1), reached)
        assert torch.equal(gathered, torch.stack(inputs))
        scattered = torch.empty(numel, dtype=dtype)
        dist.reduce_scatter_tensor(scattered, gathered.view(-1))
        assert torch.equal(scattered, inputs[rank] * world_size)
        dist.broadcast(reached, world_size - 1)
        assert torch.equal(reached, inputs[-1])
        # A view that shares a page with other elements; a tensor in reach on one rank only.
        gathered[rank].copy_(inputs[rank])
        dist.all_reduce(gathered[rank])
        assert torch.equal(gathered[rank], ordinary)
        some = pycomm.empty(numel, dtype=dtype) if rank == 0 else torch.empty(numel, dtype=dtype)
        some.copy_(inputs[rank])
        dist.all_reduce(some)
        assert torch.equal(some, ordinary)
    group = dist.group.WORLD
    assert group is not None
    backend = group._get_backend(torch.device("cpu"))
    met["allocates"] = backend.supports_tensor_alloc(torch.device("cpu"))
    if met["allocates"]:
        tensor = backend.allocate_tensor(5000, dtype=torch.float32, device=torch.device("cpu"))
        tensor.fill_(rank + 1)
        dist.all_reduce(tensor)
        met["sum"] = float(tensor.sum())
    dist.destroy_process_group()
    met["after"] = float(reached.sum()) == float(inputs[-1].sum())  # outlives its group
    return met


@pytest.mark.parametrize(
    ("transport", "world_size"), [("shm", 2), rings.nightly(("shm", 3)), ("tcp", 2)]
)
@pytest.mark.ci
def test_tensors_that_peers_reach_in_place(transport: str, world_size: int) -> None:
    for met in run_ranks(world_size, in_place, pg_options={"transport": transport}).values():
        assert met.pop("after")
        expected = {"allocates": transport == "shm"}
        if transport == "shm":
            expected["sum"] = 5000.0 * world_size * (world_size + 1) / 2
        assert met == expected


def test_empty_says_what_is_wrong() -> None:
    assert pycomm.empty(2, 3).shape == pycomm.empty((2, 3)).shape == (2, 3)
    assert pycomm.empty(0).numel() == 0
    assert pycomm.empty(3, dtype=torch.float64).dtype == torch.float64
    assert float(pycomm.empty(1000).abs().sum()) == 0.0
    for wrong in ((-1,), (2.0,), (True,)):
        with pytest.raises(pycomm.errors.InvalidArgumentError, match="sizes are whole numbers"):
            pycomm.empty(*wrong)  # type: ignore[arg-type]
    with pytest.raises(pycomm.errors.NoSharedMemoryError, match="among the shared tensors"):
        pycomm.empty(1 << 45)


def stopped_in_the_middle(rank: int, world_size: int) -> Any:
    tensor = pycomm.empty(1 << 22)
    tensor.fill_(1)
    dist.barrier()
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["rank 0 is through", "rank 2 is through"])
        os.kill(os.getpid(), signal.SIGKILL)
    store.set(f"rank {rank} is through", "")
    try:
        dist.all_reduce(tensor)
    except pycomm.errors.PycommError as error:
        tensor.fill_(5)  # its own again, and still what it was
        return describe_exception(error), float(tensor.sum())
    return None


def test_a_dead_peer_leaves_the_tensor_usable() -> None:
    results = run_ranks(3, stopped_in_the_middle, check=False, pg_options={"transport": "shm"})
    for rank in (0, 2):
        error, total = results[rank].value
        assert "Rank 1" in str(error)
        assert total == 5.0 * (1 << 22)


def run_document(rank: int, world_size: int) -> tuple[bool, bool]:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    namespace: dict[str, Any] = {}
    for block in blocks(read("docs/shared-memory.md"), "python"):
        exec(compile(block, "docs/shared-memory.md", "exec"), namespace)
    dist.destroy_process_group()
    gradient, weights = namespace["gradient"], namespace["weights"]
    return bool((gradient == world_size).all()), bool((weights == 1).all())


def test_the_documents_programs_run() -> None:
    rendezvous = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(free_port())}
    results = run_ranks(2, run_document, init="none", env=rendezvous, destroy=False)
    assert list(results.values()) == [(True, True)] * 2
