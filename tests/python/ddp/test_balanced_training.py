"""``BalancedSampler`` with the wrapper: real steps of ranks of which one is slowed."""

from __future__ import annotations

import copy
import inspect
import math
import statistics
import time
from collections.abc import Sequence
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from ddp_rig import wrap
from torch import nn
from torch.utils.data import DataLoader, Dataset

pytestmark = [pytest.mark.ci, pytest.mark.needs_native, pytest.mark.timeout(300)]

NUMEL = 4000
GLOBAL_BATCH = 48
SECONDS_PER_SAMPLE = (3e-3, 12e-3)
"""Long beside what a thread waits for its core."""


class Numbers(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __len__(self) -> int:
        return NUMEL

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        inputs = torch.randn(6, generator=generator, dtype=torch.float64)
        return inputs, inputs[:2] * 3 + index % 5


class Slowed(nn.Module):
    """Takes a given time for each sample."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = nn.Linear(6, 2, dtype=torch.float64)
        self.seconds = seconds

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds * len(inputs))  # 2 ranks on 2 cores, and whatever else runs there
        return self.layer(inputs)


def trained(rank: int, world_size: int, workers: int) -> dict[str, Any]:
    import pycomm

    net = Slowed(SECONDS_PER_SAMPLE[rank])
    model = wrap(copy.deepcopy(net), weight="samples")
    sampler = pycomm.BalancedSampler(Numbers(), global_batch=GLOBAL_BATCH, model=model, lookahead=6)
    loader = DataLoader(Numbers(), batch_sampler=sampler, num_workers=workers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    sizes = []
    for inputs, targets in loader:
        optimizer.zero_grad()
        (model(inputs) - targets).square().mean().backward()
        optimizer.step()
        sizes.append(len(inputs))
        if len(sizes) == 40:
            break
    stats = sampler.stats()
    return {
        "sizes": sizes,
        "shares": stats.shares,
        "weight": model.module.layer.weight.detach(),
        "steps": model.step_log.steps,
    }


def alone(steps: int = 40) -> torch.Tensor:
    """One process with the whole batches, in the sampler's order of indices."""
    from pycomm.balance.deal import epoch_order

    net, data = Slowed(0), Numbers()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    order = epoch_order(NUMEL, seed=0, epoch=0, shuffle=True).tolist()
    for step in range(steps):
        batch = order[step * GLOBAL_BATCH : (step + 1) * GLOBAL_BATCH]
        inputs = torch.stack([data[i][0] for i in batch])
        targets = torch.stack([data[i][1] for i in batch])
        optimizer.zero_grad()
        (net(inputs) - targets).square().mean().backward()
        optimizer.step()
    return net.layer.weight.detach()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_slow_rank_gets_fewer_samples_and_weights_are_those_of_one_process(workers: int) -> None:
    found = ranks.run_ranks(2, trained, args=(workers,), timeout_s=120, preload=ranks.TORCH_DDP)
    fast, slow = found.values()
    assert all(a + b == GLOBAL_BATCH for a, b in zip(fast["sizes"], slow["sizes"], strict=True))
    assert fast["sizes"][0] == slow["sizes"][0] == GLOBAL_BATCH // 2
    assert fast["shares"] == slow["shares"]
    # A smoke test of the clock: test_share_plan.py bounds what shares lose. 38.4 and 9.6 samples
    # would take equally long, but for what a batch costs besides on cores that others use, too.
    assert statistics.median(fast["sizes"][-15:]) > 1.2 * GLOBAL_BATCH / 2, fast["sizes"]
    assert fast["steps"] == slow["steps"] == 40
    assert torch.equal(fast["weight"], slow["weight"])
    assert torch.allclose(fast["weight"], alone(), rtol=0, atol=1e-12)


class VirtualTimes:
    """A wrapper's log whose seconds follow from the samples: no clock decides the shares."""

    def __init__(self, model: Any, per_sample: Sequence[tuple[int, Sequence[float]]]) -> None:
        self._log = model.step_log
        self._per_sample = per_sample
        self.step_log = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)

    def records(self, since: int) -> list[Any]:
        found = self._log.records(0)
        told = []
        for step in range(since, len(found)):
            seconds = [math.nan] * len(found[step].samples)
            if step > 0:
                each = next(s for begin, s in reversed(self._per_sample) if step - 1 >= begin)
                seconds = [1.0 + b * n for b, n in zip(each, found[step - 1].samples, strict=True)]
            told.append(found[step]._replace(last_seconds=seconds))
        return told


def trained_by_virtual_times(rank: int, world_size: int) -> dict[str, Any]:
    import pycomm

    model = wrap(Slowed(0), weight="samples")
    # The second rank is four times as slow, and later the first is.
    times = VirtualTimes(model, [(0, (1.0, 4.0)), (50, (4.0, 1.0))])
    sampler = pycomm.BalancedSampler(Numbers(), global_batch=GLOBAL_BATCH, model=times, lookahead=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    sizes = []
    for inputs, targets in DataLoader(Numbers(), batch_sampler=sampler):
        if len(sizes) == 60:  # a step without any samples, as of a batch that is all padding
            model.samples = 0
            with pytest.raises(ValueError, match="no rank has any samples"):
                (model(inputs) - targets).square().mean().backward()
            sizes.append(len(inputs))
            continue
        optimizer.zero_grad()
        (model(inputs) - targets).square().mean().backward()
        optimizer.step()
        sizes.append(len(inputs))
        if len(sizes) == 59:
            weight = model.module.layer.weight.detach().clone()
        if len(sizes) == 80:
            break
    return {"sizes": sizes, "weight": weight, "steps": model.step_log.steps}


def test_shares_follow_virtual_times_and_a_step_without_samples_is_a_batch() -> None:
    found = ranks.run_ranks(2, trained_by_virtual_times, timeout_s=120, preload=ranks.TORCH_DDP)
    first, second = found.values()
    assert all(a + b == GLOBAL_BATCH for a, b in zip(first["sizes"], second["sizes"], strict=True))
    assert first["sizes"][40] == pytest.approx(38, abs=1)  # 1 + 38 and 1 + 4 * 10: nearly best
    assert first["sizes"][75] == pytest.approx(10, abs=1)
    assert first["steps"] == second["steps"] == 80
    assert torch.equal(first["weight"], second["weight"])
    assert torch.allclose(first["weight"], alone(59), rtol=0, atol=1e-12)


class Deep(nn.Module):
    """Not linear, so that an error of a step grows in those after it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        kind = torch.float64
        self.layers = nn.Sequential(
            nn.Linear(6, 32, dtype=kind), nn.Tanh(), nn.LayerNorm(32, dtype=kind), nn.Linear(32, 2)
        ).double()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layers(inputs)


def hundred_steps(rank: int, world_size: int) -> torch.Tensor:
    import pycomm

    model = wrap(Deep(), weight="samples")
    times = VirtualTimes(model, [(0, (1.0, 3.0, 2.0)), (40, (5.0, 1.0, 1.0))])
    sampler = pycomm.BalancedSampler(Numbers(), global_batch=36, model=times, lookahead=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    sizes = set()
    for step, (inputs, targets) in enumerate(DataLoader(Numbers(), batch_sampler=sampler)):
        optimizer.zero_grad()
        (model(inputs) - targets).square().mean().backward()
        optimizer.step()
        sizes.add(len(inputs))
        if step == 99:
            break
    assert len(sizes) > 2
    return torch.cat([each.detach().flatten() for each in model.parameters()])


def test_a_hundred_steps_are_those_of_one_process() -> None:
    from pycomm.balance.deal import epoch_order

    found = ranks.run_ranks(3, hundred_steps, timeout_s=120, preload=ranks.TORCH_DDP)
    net, data = Deep(), Numbers()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    order = epoch_order(NUMEL, seed=0, epoch=0, shuffle=True).tolist()
    for step in range(100):
        inputs, targets = zip(*(data[i] for i in order[step * 36 : step * 36 + 36]), strict=True)
        optimizer.zero_grad()
        (net(torch.stack(inputs)) - torch.stack(targets)).square().mean().backward()
        optimizer.step()
    whole = torch.cat([each.detach().flatten() for each in net.parameters()])
    for mine in found.values():
        assert torch.allclose(mine, whole, rtol=0, atol=1e-9)


# A model whose process group is another one


CAN_PERMUTE = "sort_ranks" in inspect.signature(dist.new_group).parameters
"""Older torch sorts the ranks of a group."""
REGROUPED = ([1, 2], *([[2, 1, 0]] if CAN_PERMUTE else []), [0, 1, 2])


def regrouped(rank: int, world_size: int) -> dict[str, tuple[str, int]]:
    """The error in the third step, and the position after one more with a new sampler."""
    import pycomm
    from pycomm.errors import UnsupportedError

    found = {}
    for members in REGROUPED:
        model = wrap(Slowed(0), weight="samples")
        group = dist.new_group(members, **({"sort_ranks": False} if CAN_PERMUTE else {}))

        def deals(model: Any = model) -> tuple[Any, Any]:
            sampler = pycomm.BalancedSampler(Numbers(), global_batch=12, model=model)
            return sampler, DataLoader(Numbers(), batch_sampler=sampler)

        def step(batches: Any, model: Any = model) -> None:
            inputs, targets = next(batches)
            (model(inputs) - targets).square().mean().backward()

        sampler, loader = deals()
        batches = iter(loader)
        step(batches), step(batches)
        state = sampler.state_dict()
        if rank not in members:
            continue
        model._update_process_group(group)
        error = ""
        try:
            step(batches)
        except UnsupportedError as caught:
            error = str(caught)
            sampler, loader = deals()
            sampler.load_state_dict(state)
            step(iter(loader))
            cursor = sampler.stats().cursor
            if len(members) == 2:  # `batches` lives, and is asked for no more
                for _ in range(1100 // len(loader) + 1):  # the record keeps 1,024 steps
                    for inputs, targets in loader:
                        (model(inputs) - targets).square().mean().backward()
            found[str(members)] = error, cursor
            continue
        found[str(members)] = error, sampler.stats().cursor
    return found


def test_other_ranks_than_those_a_sampler_deals_to_are_an_error_on_all() -> None:
    found = ranks.run_ranks(3, regrouped, timeout_s=200, preload=ranks.TORCH_DDP)
    for rank, results in enumerate(found.values()):
        assert list(results) == [str(members) for members in REGROUPED if rank in members]
        assert results.pop("[0, 1, 2]") == ("", 3)
        for members, (error, cursor) in results.items():
            assert f"deals to ranks [0, 1, 2], and the model's group now has {members}" in error
            assert cursor == 3
