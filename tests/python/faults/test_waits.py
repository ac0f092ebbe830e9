"""A Python handler runs at every wait of the main thread inside the library, as a signal's may.

The test build counts waits, and those with the interpreter's lock or with a LeafMutex. It does not
see two other locks, over which a thread may wait: a reducer's turn (PassLock), which refuses or
serves a handler (test_ddp_asked_during_backward.py has each method), and the lock under which a
Work's result is unpacked (PycommWork::State::finishing), for which others wait without the
interpreter's lock.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fault_ranks
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn

pytestmark = [
    pytest.mark.needs_native,
    pytest.mark.faults,
    pytest.mark.ci,
    pytest.mark.usefixtures("fault_build"),
    pytest.mark.timeout(900),
]


def layers() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40))


def mean_hook(state: Any, bucket: Any) -> Any:
    work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


mean_hook.__annotations__.clear()


def collectives(rank: int) -> None:
    other = 1 - rank
    total = torch.ones(50_000)
    dist.all_reduce(total)
    assert total.eq(2).all()
    gathered = [torch.zeros(3) for _ in range(2)]
    dist.all_gather(gathered, torch.full((3,), float(rank)))
    dist.barrier()
    work = dist.irecv(torch.zeros(3), other)
    dist.send(torch.ones(3), other)
    work.wait()
    sparse = torch.sparse_coo_tensor([[rank, 2]], [1.0, 2.0], (4,))
    dist.all_reduce(sparse)
    future = dist.all_reduce(torch.ones(3), async_op=True).get_future()
    assert future.then(lambda done: done.value()[0].sum()).wait() == 6
    with dist._coalescing_manager(async_ops=True) as window:
        for _ in range(3):
            dist.all_reduce(torch.ones(3))
    window.wait()


def train(model: Any, rank: int) -> list[float]:
    found = []
    for step in range(4):
        model.zero_grad()
        model(torch.full((2, 40), float(1 + rank + step))).square().mean().backward()
        found.append(float(next(model.parameters()).grad.sum()))
    return found


def a_handler_at_every_wait(
    rank: int, world_size: int, store: str, hooked: bool, options: dict[str, Any]
) -> tuple[int, ...]:
    fault_ranks.use_fault_build()
    dist.init_process_group("pycomm", init_method=store, rank=rank, world_size=world_size)
    import pycomm
    from pycomm._native import loader

    native: Any = loader.load()
    alone = [dist.new_group([each]) for each in range(2)][rank]
    plain, model = (
        pycomm.DistributedDataParallel(
            layers(), bucket_cap_mb=0.001, find_unused_parameters=True, **options
        )
        for _ in range(2)
    )
    if hooked:
        plain.register_comm_hook(None, mean_hook)
        model.register_comm_hook(None, mean_hook)
    wanted = train(plain, rank)
    handled = []

    def handler() -> None:
        assert model.stats().passes >= 0
        assert "accumulated" in model.communication_state_dict()
        one = torch.ones(3)
        dist.all_reduce(one, group=alone)
        assert one.eq(1).all()
        handled.append(1)

    native.watch_waits(handler)
    collectives(rank)
    found = train(model, rank)
    collectives(rank)
    extra = dist.new_group([0, 1])
    train(pycomm.DistributedDataParallel(layers(), process_group=extra, **options), rank)
    dist.destroy_process_group(extra)
    del extra
    waits, with_lock, with_mutex, errors = native.watched_waits()
    assert found == wanted
    assert not errors, errors
    return waits, with_lock, with_mutex, len(handled)


@pytest.mark.parametrize(
    ("hooked", "options"),
    [(False, {}), (True, {}), (False, {"weight": "samples"})],
    ids=["plain", "hooked", "weighed"],
)
def test_a_handler_may_run_at_every_wait(
    hooked: bool, options: dict[str, Any], tmp_path: Path
) -> None:
    args = (f"file://{tmp_path}/store", hooked, options)
    found = run_ranks(2, a_handler_at_every_wait, args=args, init="none", timeout_s=120)
    for waits, with_lock, with_mutex, handled in found.values():
        assert handled > 20 and waits >= handled
        assert (with_lock, with_mutex) == (0, 0)
