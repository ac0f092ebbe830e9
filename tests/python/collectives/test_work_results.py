"""What ``Work.result()`` gives for each collective, beside what gloo's gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

pytestmark = pytest.mark.needs_native


def full(value: float, numel: int = 4) -> torch.Tensor:
    return torch.full((numel,), float(value))


def empty(count: int, numel: int = 4) -> list[torch.Tensor]:
    return [torch.zeros(numel) for _ in range(count)]


Call = Callable[[int, Any], Any]

CALLS: dict[str, Call] = {
    "broadcast": lambda rank, group: dist.broadcast(full(rank), 1, group=group, async_op=True),
    "all_reduce": lambda rank, group: dist.all_reduce(full(rank), group=group, async_op=True),
    "all_reduce_coalesced": lambda rank, group: group.allreduce_coalesced(
        [full(rank), full(2.0 + rank, 3)]
    ),
    "reduce": lambda rank, group: dist.reduce(full(1.0 + rank), 0, group=group, async_op=True),
    "all_gather": lambda rank, group: dist.all_gather(
        empty(2), full(rank), group=group, async_op=True
    ),
    "all_gather_into_tensor": lambda rank, group: dist.all_gather_into_tensor(
        torch.zeros(8), full(rank), group=group, async_op=True
    ),
    "all_gather_coalesced": lambda rank, group: group.allgather_coalesced(
        [[torch.zeros(4), torch.zeros(3)] for _ in range(2)], [full(rank), full(rank, 3)]
    ),
    "gather": lambda rank, group: dist.gather(
        full(rank), empty(2) if rank == 0 else None, 0, group=group, async_op=True
    ),
    "scatter": lambda rank, group: dist.scatter(
        torch.zeros(4),
        [full(1.0), full(2.0)] if rank == 0 else None,
        0,
        group=group,
        async_op=True,
    ),
    "reduce_scatter": lambda rank, group: dist.reduce_scatter(
        torch.zeros(4), [full(1.0 + rank), full(3.0)], group=group, async_op=True
    ),
    "reduce_scatter_tensor": lambda rank, group: dist.reduce_scatter_tensor(
        torch.zeros(4), full(1.0 + rank, 8), group=group, async_op=True
    ),
    "all_to_all": lambda rank, group: dist.all_to_all(
        empty(2), [full(rank), full(2.0 + rank)], group=group, async_op=True
    ),
    "all_to_all_single": lambda rank, group: dist.all_to_all_single(
        torch.zeros(8), full(rank, 8), group=group, async_op=True
    ),
    "sparse_all_reduce": lambda rank, group: dist.all_reduce(
        torch.sparse_coo_tensor([[rank, 2]], [1.0, 2.0], (4,)), group=group, async_op=True
    ),
    "barrier": lambda rank, group: dist.barrier(group=group, async_op=True),
}


def plain(result: Any) -> Any:
    if isinstance(result, list | tuple):
        return [plain(each) for each in result]
    return result.to_dense().tolist()


def said(rank: int, group: Any, call: Call) -> Any:
    work = call(rank, group)
    work.wait()
    try:
        return plain(work.result())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def row_by_row(rank: int, world_size: int) -> dict[str, tuple[Any, Any]]:
    groups = [dist.new_group(backend=name) for name in ("pycomm", "gloo")]
    backends = [group._get_backend(torch.device("cpu")) for group in groups]
    found: dict[str, tuple[Any, Any]] = {}
    for name, call in CALLS.items():
        each = backends if "coalesced" in name else groups
        try:
            wanted = said(rank, each[1], call)
        except Exception as error:
            wanted = f"refused: {error}"
        found[name] = (said(rank, each[0], call), wanted)
    return found


def test_each_collectives_result_is_gloos() -> None:
    found = run_ranks(2, row_by_row, backend="gloo", only_pycomm=False).values()
    for rank, rows in enumerate(found):
        for name, (ours, gloos) in rows.items():
            if isinstance(gloos, str):
                assert name in GLOO_HAS_NONE, (name, gloos, ours)
                assert isinstance(ours, str) == ("list of lists" in gloos), (name, gloos, ours)
            elif name == "reduce" and rank != 0:
                assert ours == [[2.0] * 4], ours  # as it was; gloo leaves what it had on its way
            elif name == "all_gather_into_tensor":
                # Gloo's are views of the output's parts, by a list that it makes of them; NCCL's,
                # and ours, is the output.
                assert ours == [[value for part in gloos for value in part]], (rank, ours, gloos)
            else:
                assert ours == gloos, (rank, name, ours, gloos)


GLOO_HAS_NONE = ("all_gather_coalesced", "reduce_scatter", "reduce_scatter_tensor")
