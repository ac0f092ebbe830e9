"""Each feature in a group of one rank, and what a host's group, a sync and an outsider see."""

from __future__ import annotations

import copy
from datetime import timedelta
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as TorchDDP

pytestmark = [pytest.mark.ci, pytest.mark.needs_native, pytest.mark.timeout(400)]


def model_of(seed: int = 1) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))


def train(model: nn.Module, batch: torch.Tensor, after: Any = None) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        if after is not None:
            after.step()
    return [each.detach().clone() for each in model.parameters()]


def wrapped(group: Any, **options: Any) -> Any:
    import pycomm

    return pycomm.DistributedDataParallel(model_of(), process_group=group, **options)


def hooked(group: Any, hook: Any, wrap: Any = TorchDDP) -> Any:
    model = wrap(model_of(), process_group=group)
    model.register_comm_hook(group, hook)
    return model


def alone(rank: int, world_size: int) -> None:
    import pycomm

    group = dist.new_group([0])
    if rank != 0:
        return
    batch = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
    expected = train(model_of(), batch)

    def check(model: nn.Module, after: Any = None, near: float = 1e-5) -> None:
        for found, wanted in zip(train(model, batch, after), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=near, atol=near)

    for wire in (None, "fp16", "bf16", "int8"):
        check(wrapped(group, wire_dtype=wire), near=1e-5 if wire is None else 0.05)
    check(wrapped(group, sync_every=2))
    check(wrapped(group, weight="samples"))
    twice, once = wrapped(group, accumulate=2, weight="samples"), model_of()
    for part in (batch[:4], batch[4:]):
        for model in (twice, once):
            (model(part).square().mean() * (1.0 if model is twice else len(part) / 8)).backward()
    for found, wanted in zip(twice.parameters(), once.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad)
    with pytest.raises(ValueError, match="samples"):  # no other rank has some, either
        wrapped(group, weight="samples").no_batch()
    reduce = default_hooks.allreduce_hook
    check(hooked(group, pycomm.comm_hooks.ordered(reduce)))
    check(hooked(group, pycomm.comm_hooks.top_k(fraction=1.0)))
    check(hooked(group, reduce, pycomm.DistributedDataParallel))
    for wrap in (wrapped, lambda of: TorchDDP(model_of(), process_group=of)):
        with (model := wrap(group)).join():
            check(model)
    check(pycomm.SyncBatchNorm.convert_sync_batchnorm(model_of(), group))
    check(model := model_of(), pycomm.LocalSGD(model, sync_every=2, process_group=group))
    outer: Any = lambda tensors: torch.optim.SGD(tensors, lr=1.0)  # noqa: E731
    for kind in (pycomm.DiLoCo, pycomm.StreamingDiLoCo):
        model = model_of()
        local = kind(model, sync_every=4, process_group=group, outer_optimizer=outer)
        check(model, local)
        local.sync()
    model = model_of()
    sparse = pycomm.SparseLoCo(model, sync_every=4, process_group=group)
    train(model, batch, sparse)
    sparse.sync()
    pycomm.monitored_barrier(group)
    tensor = torch.arange(5000.0)
    pycomm.codecs.all_reduce(tensor, "int8", group=group)
    torch.testing.assert_close(tensor, torch.arange(5000.0), rtol=0.01, atol=20)
    found: list[Any] = [None]
    dist.all_gather_object(found, "x", group=group)
    dist.gather_object("y", found, dst=0, group=group)
    dist.broadcast_object_list(found, src=0, group=group)
    scattered: list[Any] = [None]
    dist.scatter_object_list(scattered, ["z"], src=0, group=group)
    assert (found, scattered) == (["y"], ["z"])
    whole, part = torch.arange(6.0), torch.zeros(6)
    dist.reduce_scatter_tensor(part, whole, group=group)
    assert part.equal(whole)
    dist.reduce_scatter(part, [whole + 1], group=group)
    assert part.equal(whole + 1)
    dist.all_to_all_single(part, whole, [6], [6], group=group)
    assert part.equal(whole)
    dist.all_to_all([part], [whole + 2], group=group)
    assert part.equal(whole + 2)
    calls = [dist.P2POp(dist.isend, torch.ones(3), 0, group)]
    calls.append(dist.P2POp(dist.irecv, into := torch.zeros(3), 0, group))
    for work in dist.batch_isend_irecv(calls):
        work.wait()
    assert into.eq(1).all()


def test_every_feature_in_a_group_of_one_rank() -> None:
    ranks.run_ranks(2, alone, timeout_s=200, preload=ranks.TORCH_DDP)


def elastic_alone(rank: int, world_size: int) -> None:
    import pycomm

    batch = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
    for options in ({}, {"weight": "samples"}):
        model = pycomm.DistributedDataParallel(model_of(), elastic=pycomm.Elastic(), **options)
        for found, wanted in zip(train(model, batch), train(model_of(), batch), strict=True):
            torch.testing.assert_close(found, wanted)
        group = model.elastic
        assert (group.rank, group.members, group.leader, group.step) == (0, (0,), True, 4)
        assert group.mean(3.0) == 3.0
        assert group.confirm()


def test_elastic_steps_of_one_rank() -> None:
    ranks.run_ranks(1, elastic_alone, preload=ranks.TORCH_DDP)


def reconfigured_alone(rank: int, world_size: int) -> None:
    import pycomm

    dist.init_process_group(
        "pycomm", store=dist.HashStore(), rank=0, world_size=1, pg_options=pycomm.Reconfigurable()
    )
    for uuid in (7, 8):
        pycomm.reconfigure(uuid, [pycomm.reconfigure_handle()])
        assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
        tensor = torch.arange(5.0)
        dist.all_reduce(tensor)
        assert tensor.equal(torch.arange(5.0))
    dist.destroy_process_group()


def test_a_group_of_one_rank_is_reconfigured() -> None:
    ranks.run_ranks(1, reconfigured_alone, init="none", backend=None)


def hosts_group(rank: int, world_size: int) -> None:
    import pycomm
    from pycomm._group.creation import group_options, group_timeout

    options = pycomm.Options(segment_nbytes=65536)
    group = dist.new_group([0, 1], timeout=timedelta(seconds=37), pg_options=options)
    if rank == 2:
        for call in (pycomm.last_error, pycomm.flight_record):
            with pytest.raises(ValueError, match="rank 2 is not in this group"):
                call(group)
        return
    # An overflow before the wrapper was made, in a group that does not reduce its gradients.
    pycomm.codecs.all_reduce(torch.full((8192,), 3e38), "int8", group=group)
    model = pycomm.DistributedDataParallel(
        model_of(), process_group=group, sync_every=2, wire_dtype="int8"
    )
    assert group_timeout(model.process_group) == timedelta(seconds=37)
    assert group_options(model.process_group) == options
    assert model.stats().codec_overflows == 0
    with pytest.raises(NotImplementedError, match="sync_every above 1 has a group of its own"):
        copy.deepcopy(model)


def test_the_group_of_a_host_is_like_the_wrappers() -> None:
    ranks.run_ranks(3, hosts_group, preload=ranks.TORCH_DDP)


def synced(rank: int, world_size: int) -> None:
    import pycomm

    for make in (pycomm.LocalSGD, pycomm.DiLoCo, pycomm.StreamingDiLoCo, pycomm.SparseLoCo):
        model = model_of()
        local = make(model, sync_every=4)
        torch.manual_seed(rank)
        train(model, torch.randn(16, 8) + rank, local)
        own = model[1].running_mean.clone()
        local.sync()
        every = [torch.empty(6) for _ in range(world_size)]
        dist.all_gather(every, model[1].running_mean)
        assert every[0].equal(every[1]), make
        assert rank != 0 or own.equal(every[0])


def test_a_sync_sends_rank_0s_buffers() -> None:
    ranks.run_ranks(2, synced, preload=ranks.TORCH_DDP)


def test_chunks_have_one_device() -> None:
    from pycomm._group.averaging import chunks

    tensors = [torch.ones(2), torch.ones(2, device="meta"), torch.ones(3)]
    assert [len(chunk) for chunk in chunks(tensors)] == [2, 1]
