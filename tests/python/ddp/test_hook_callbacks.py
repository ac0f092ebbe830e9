"""Hooks that issue collectives in callbacks, with delays at random, beside sums by hand.

Annotations are not postponed here: torch compares a hook's with its own classes.
"""

import random
import threading
import time
from typing import Any

import pytest
import rings
import torch
import torch.distributed as dist
from callback_programs import make_groups
from ddp_rig import wrap
from ranks import TORCH_DDP, run_ranks
from test_ordered import powersgd_state, train
from torch import nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

import pycomm

pytestmark = [pytest.mark.ci, pytest.mark.needs_native]

STEPS = 30


def pause(most_s: float = 0.002) -> None:
    time.sleep(random.random() * most_s)


def two_vectors(wrapped: bool = True) -> Any:
    """Gradients of its two parameters: 1 and 100, whatever the rank."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.small = nn.Parameter(torch.zeros(1000))
            self.large = nn.Parameter(torch.zeros(1000))

        def forward(self) -> torch.Tensor:
            return self.small.sum() + 100 * self.large.sum()

    return wrap(Two())


def two_at_once(rank: int, world_size: int) -> None:
    """One sum for each gradient, and in its callback a second one of the same size."""

    def hook(state: object, bucket: GradBucket) -> Future[torch.Tensor]:
        def again(future: Any) -> torch.Tensor:
            pause()
            total = future.value()[0] / world_size
            return dist.all_reduce(total, async_op=True).get_future().wait()[0] / world_size

        futures = []
        for gradient in bucket.gradients():
            future = dist.all_reduce(gradient.clone(), async_op=True).get_future()
            pause(0.0005)
            futures.append(future.then(again))

        def put(done: Any) -> torch.Tensor:
            for gradient, part in zip(bucket.gradients(), done.value(), strict=True):
                gradient.copy_(part.value())
            return bucket.buffer()

        return torch.futures.collect_all(futures).then(put)

    model = two_vectors()
    model.register_comm_hook(None, hook)
    for _ in range(STEPS):
        model.zero_grad()
        model().backward()
        assert model.module.small.grad.eq(1).all(), model.module.small.grad[0]
        assert model.module.large.grad.eq(100).all(), model.module.large.grad[0]


@pytest.mark.parametrize("transport", rings.first_of(["shm", "tcp"]))
def test_a_hook_with_two_futures_at_once(transport: str) -> None:
    run_ranks(2, two_at_once, pg_options={"transport": transport})


def five_buckets() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(5))).double()


def two_levels(rank: int, world_size: int, whose: str) -> None:
    """Rows, then columns; beside a plain model whose gradients are averaged by hand."""
    groups = make_groups(rank)

    def hook(state: object, bucket: GradBucket) -> Future[torch.Tensor]:
        def across(future: Any) -> torch.Tensor:
            pause()
            total = future.value()[0]
            work = dist.all_reduce(total, group=groups["col"], async_op=True)
            return work.get_future().wait()[0] / world_size

        work = dist.all_reduce(bucket.buffer(), group=groups["row"], async_op=True)
        return work.get_future().then(across)

    plain = five_buckets()
    torch_ddp = whose == "torch's"
    model: Any = (
        DistributedDataParallel(five_buckets(), bucket_cap_mb=0.01)
        if torch_ddp
        else wrap(five_buckets(), bucket_cap_mb=0.01)
    )
    model.register_comm_hook(None, hook)
    for step in range(8):
        batches = [
            torch.randn(4, 64, generator=torch.Generator().manual_seed(10 * step + each)).double()
            for each in range(world_size)
        ]
        plain.zero_grad()
        sum(plain(each).square().mean() / world_size for each in batches).backward()
        model.zero_grad()
        model(batches[rank]).square().mean().backward()
        for mine, wanted in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, wanted.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("whose", ["torch's", "ours"])
def test_a_hook_of_two_levels(whose: str, transport: str) -> None:
    run_ranks(
        4,
        two_levels,
        args=(whose,),
        env={"PYCOMM_TRANSPORT": transport},  # for rows and columns, too
        preload=TORCH_DDP,
    )


def powersgd(rank: int, world_size: int, whose: str) -> list[str]:
    """What a training gives, and what one gives where each collective of the hook begins late."""
    paused: list[threading.Thread] = []
    issue = dist.all_reduce

    def issue_late(*args: Any, **kwargs: Any) -> Any:
        paused.append(threading.current_thread())
        pause()
        return issue(*args, **kwargs)

    digests = []
    for issued in (issue, issue_late):
        dist.all_reduce = issued
        make: Any = DistributedDataParallel if whose == "torch's" else wrap
        model = make(five_buckets().float(), bucket_cap_mb=0.01)
        model.register_comm_hook(powersgd_state(), powerSGD_hook.powerSGD_hook)
        digests.append(train(model, rank, STEPS))
    assert len(paused) >= 5 * 3 * (STEPS - 2)  # three for each bucket, once it compresses
    return digests


@pytest.mark.parametrize("transport", rings.first_of(["shm", "tcp"]))
@pytest.mark.parametrize("whose", ["torch's", "ours"])
def test_a_delay_within_powersgd_changes_no_bit(whose: str, transport: str) -> None:
    found = run_ranks(
        2, powersgd, args=(whose,), pg_options={"transport": transport}, preload=TORCH_DDP
    ).values()
    assert len({digest for digests in found for digest in digests}) == 1, found


def over_gloo(rank: int, world_size: int, options: dict[str, Any]) -> None:
    """gloo matches by order: what the hook, the wrapper and a layer issue must come from one."""
    threads = set()
    issue = dist.all_reduce

    def watched(*args: Any, **kwargs: Any) -> Any:
        threads.add(threading.current_thread())
        return issue(*args, **kwargs)

    def hook(state: object, bucket: GradBucket) -> Future[torch.Tensor]:
        if rank == 1:
            pause(0.003)
        return default_hooks.allreduce_hook(dist.group.WORLD, bucket)

    dist.all_reduce = watched
    torch.manual_seed(0)
    layers = [nn.Linear(64, 64) for _ in range(4)]
    net = nn.Sequential(*layers[:2], pycomm.SyncBatchNorm(64), *layers[2:])
    model = wrap(net, bucket_cap_mb=0.01, **options)
    model.register_comm_hook(None, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(STEPS):
        torch.manual_seed(100 * step + rank)
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
    assert threads <= {threading.main_thread()}
    mine = torch.cat([each.detach().flatten() for each in model.parameters()])
    every = [torch.empty_like(mine) for _ in range(world_size)]
    dist.all_gather(every, mine)
    assert all(torch.equal(each, mine) for each in every)


@pytest.mark.parametrize("option", ["find_unused_parameters", "static_graph"])
def test_a_hook_over_gloo_issues_on_the_thread_of_backward(option: str) -> None:
    run_ranks(2, over_gloo, args=({option: True},), backend="gloo", preload=TORCH_DDP)
