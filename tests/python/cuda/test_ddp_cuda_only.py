"""The wrapper over a group that serves CUDA only, as a group of torch's NCCL does.

The device is a fake.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_cuda_device
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn

# The first test compiles the library: some ten seconds, minutes on a busy machine.
pytestmark = [pytest.mark.nightly, pytest.mark.needs_native, pytest.mark.timeout(600)]


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(8, 20, generator=torch.Generator().manual_seed(100 * step + rank))


class Branches(nn.Module):
    """Which half has gradients depends on the rank and the step; both have without a choice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.halves = nn.ModuleList([nn.Linear(20, 20), nn.Linear(20, 20)])
        self.out = nn.Linear(20, 5)

    def forward(self, samples: torch.Tensor, which: int | None) -> torch.Tensor:
        # Without a choice in the opposite order: gradients come in another than buckets have.
        halves = reversed(self.halves) if which is None else [self.halves[which]]
        return self.out(sum(half(samples) for half in halves))


def over_a_group_without_cpu(rank: int, world_size: int, library: str) -> None:
    import pycomm

    fake_cuda_device.Device(Path(library))
    group = dist.new_group(backend="cuda:pycomm", pg_options=pycomm.Options(cuda_mode="host"))
    with pytest.raises(RuntimeError, match="device type cpu"):
        dist.all_reduce(torch.ones(1), group=group)

    def train(options: dict[str, Any], choose: Callable[[int, int], int | None]) -> None:
        model = pycomm.DistributedDataParallel(
            Branches().to("cuda:0"), process_group=group, bucket_cap_mb=0.001, **options
        )
        before = model.reducer.bucket_names()
        for step in range(3):
            model.zero_grad()
            loss = model(batch(rank, step).to("cuda:0"), choose(rank, step)).square().mean()
            loss.backward()
            reference = Branches()
            for each in range(world_size):
                its = reference(batch(each, step), choose(each, step)).square().mean()
                (its / world_size).backward()
            for (name, mine), wanted in zip(
                model.module.named_parameters(), reference.parameters(), strict=True
            ):
                if wanted.grad is None:
                    assert mine.grad is None, (step, name)
                else:
                    torch.testing.assert_close(mine.grad.cpu(), wanted.grad)
        if not options:
            assert model.reducer.bucket_names() != before, "the buckets were not cut anew"
        model._update_process_group(group)
        model(batch(rank, 0).to("cuda:0"), choose(0, 0)).sum().backward()

    train({}, lambda rank, step: None)
    train({"find_unused_parameters": True}, lambda rank, step: (rank + step) % 2 if step < 2 else 1)
    train({"static_graph": True}, lambda rank, step: 0)


def test_a_group_that_serves_cuda_only(fake_cuda: Path) -> None:
    run_ranks(
        2,
        over_a_group_without_cpu,
        args=(str(fake_cuda),),
        env=fake_cuda_device.preloading(fake_cuda),
        fresh=True,
        timeout_s=250,
    )


def sparse_on_a_device(rank: int, world_size: int, library: str) -> str:
    import pycomm

    fake_cuda_device.Device(Path(library))
    group = dist.new_group(pg_options=pycomm.Options(cuda_mode="host"))
    module = nn.Sequential(nn.Embedding(4, 3, sparse=True)).to("cuda:0")
    with pytest.raises(pycomm.errors.UnsupportedError) as caught:
        pycomm.DistributedDataParallel(module, process_group=group)
    return str(caught.value)


def test_sparse_gradients_on_cuda_are_refused_when_the_wrapper_is_made(fake_cuda: Path) -> None:
    environment = fake_cuda_device.preloading(fake_cuda)
    results = run_ranks(2, sparse_on_a_device, args=(str(fake_cuda),), env=environment, fresh=True)
    for said in results.values():
        assert "'0.weight'" in said and "cuda:0" in said and "sparse=False" in said
