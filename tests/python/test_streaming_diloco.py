"""StreamingDiLoCo beside DiLoCo, beside its equations in float64, and when things go wrong."""

from __future__ import annotations

import copy
import io
import signal
import socket
import time
from datetime import timedelta
from typing import Any

import ddp_models
import numpy as np
import pytest
import ranks
import torch
import torch.distributed as dist
from codec_bounds import BYTES_PER_BLOCK, sum_bound
from ranks import describe_exception, mark, run_ranks, start_ranks
from time_bound import assert_within
from torch import nn

pytestmark = [pytest.mark.needs_native, pytest.mark.timeout(400)]

EVERY = 9


def loss_of(model: nn.Module, rank: int, step: int, name: str = "mlp") -> torch.Tensor:
    loss: torch.Tensor = model(ddp_models.batch_of(name, rank, step)).float().square().mean()
    return loss


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int, name: str = "mlp"
) -> None:
    optimizer.zero_grad()
    loss_of(model, rank, step, name).backward()
    optimizer.step()


def inner(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def assert_equal(first: Any, second: Any) -> None:
    for mine, other in zip(first, second, strict=True):
        assert torch.equal(mine, other)


def assert_equal_on_all_ranks(model: nn.Module, world_size: int) -> None:
    for parameter in model.parameters():
        gathered = [torch.empty_like(parameter) for _ in range(world_size)]
        dist.all_gather(gathered, parameter.detach().contiguous())
        assert all(torch.equal(gathered[0], other) for other in gathered)


# Beside DiLoCo


def beside_diloco(rank: int, world_size: int, name: str, options: dict[str, Any]) -> bool:
    import pycomm

    kinds = (pycomm.DiLoCo, pycomm.StreamingDiLoCo)
    trained = []
    for kind in kinds:
        model = ddp_models.make(name)
        optimizer = inner(model)
        local = kind(model, sync_every=3, **(options if kind is kinds[1] else {}))
        seen = []
        for step in range(8):
            train_step(model, optimizer, rank, step, name)
            assert local.step() == (step % 3 == 2)
            seen += [parameter.detach().clone() for parameter in model.parameters()]
        local.sync()  # in the middle of a round
        assert local.step() is False
        stats = local.stats()
        assert (stats.steps, stats.syncs) == (9, 3)
        trained.append((seen, stats.sent_nbytes, list(model.parameters()), local.state_dict()))
    (first, sent, last, state), (second, other_sent, other_last, other_state) = trained
    assert sent == other_sent
    same = all(torch.equal(a, b) for a, b in zip(first + last, second + other_last, strict=True))
    for key, anchor in state["anchor"].items():
        same = same and torch.equal(anchor, other_state["anchor"][key])
    return same


@pytest.mark.parametrize(("name", "world_size"), [("buckets", 3), ("mixed", 2), ("strided", 2)])
def test_one_fragment_without_delay_is_diloco_bit_by_bit(name: str, world_size: int) -> None:
    # Of three ranks the ring adds each value up in an order that its place in the buffer decides.
    found = run_ranks(world_size, beside_diloco, args=(name, {}), preload=ranks.TORCH_DDP)
    assert found.values() == [True] * world_size


def test_the_comparison_sees_another_outer_optimizer() -> None:
    found = run_ranks(2, beside_other_momentum, preload=ranks.TORCH_DDP)
    assert found.values() == [False, False]


def slower(tensors: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(tensors, lr=0.7, momentum=0.9 - 1e-7, nesterov=True)


def beside_other_momentum(rank: int, world_size: int) -> bool:
    return beside_diloco(rank, world_size, "mlp", {"outer_optimizer": slower})


# Beside the equations


def fragments_of(names: list[str], count: int) -> list[list[int]]:
    """The mlp's: its Sequential has two layers with parameters, so blocks 0 and 1."""
    assert names == ["layers.0.weight", "layers.0.bias", "layers.2.weight", "layers.2.bias"]
    return {1: [[0, 1, 2, 3]], 2: [[0, 1], [2, 3]]}[count]


class Simulated:
    """All workers in one process, in float64, as docs/fewer-syncs.md has the equations."""

    def __init__(
        self, world_size: int, fragments: int, delay: int, alpha: float | None, every: int
    ) -> None:
        self.workers = [ddp_models.make("mlp") for _ in range(world_size)]
        self.optimizers = [inner(worker) for worker in self.workers]
        names = [name for name, _ in self.workers[0].named_parameters()]
        self.fragments = fragments_of(names, fragments)
        self.anchor = [each.detach().double() for each in self.workers[0].parameters()]
        self.velocity = [torch.zeros_like(each) for each in self.anchor]
        self.every, self.delay, self.alpha = every, delay, alpha
        self.flying: tuple[int, int, list[list[torch.Tensor]]] | None = None
        self.count = 0

    def values(self, index: int) -> list[torch.Tensor]:
        return [list(worker.parameters())[index].detach().double() for worker in self.workers]

    def step(self, number: int) -> int | None:
        """The fragment that has landed."""
        for rank, (worker, optimizer) in enumerate(
            zip(self.workers, self.optimizers, strict=True)
        ):
            train_step(worker, optimizer, rank, number)
        self.count += 1
        stride = self.every // len(self.fragments)
        if self.count % stride == 0:
            which = (self.count // stride - 1) % len(self.fragments)
            self.flying = (which, self.delay, [self.values(i) for i in self.fragments[which]])
        if self.flying is None:
            return None
        which, left, starts = self.flying
        if left:
            self.flying = (which, left - 1, starts)
            return None
        self.flying = None
        self.land(which, starts, self.alpha)
        return which

    def land(self, which: int, starts: list[list[torch.Tensor]], alpha: float | None) -> None:
        for index, start in zip(self.fragments[which], starts, strict=True):
            moved = torch.stack([self.anchor[index] - each for each in start]).mean(0)
            self.velocity[index] = 0.9 * self.velocity[index] + moved
            self.anchor[index] = self.anchor[index] - 0.7 * (moved + 0.9 * self.velocity[index])
            for worker, now, then in zip(self.workers, self.values(index), start, strict=True):
                if alpha is None:
                    new = self.anchor[index] + (now - then)
                else:
                    new = alpha * now + (1 - alpha) * self.anchor[index]
                list(worker.parameters())[index].data.copy_(new)

    def sync(self) -> None:
        if self.flying is not None:
            which, _, starts = self.flying
            self.land(which, starts, self.alpha)
        for which, indices in enumerate(self.fragments):
            self.land(which, [self.values(index) for index in indices], 0.0)


def equations(
    rank: int, world_size: int, fragments: int, delay: int, alpha: float | None
) -> list[int]:
    import pycomm

    expected = Simulated(world_size, fragments, delay, alpha, every=6)
    torch.manual_seed(rank)
    model = ddp_models.make("mlp") if rank == 0 else ddp_models.make("mlp", seed=7)
    optimizer = inner(model)
    options = {"fragments": fragments, "fragment_sync_delay": delay, "sync_every": 6}
    local = pycomm.StreamingDiLoCo(model, fragment_update_alpha=alpha, **options)
    landed = []
    for step in range(14):
        which = expected.step(step)
        train_step(model, optimizer, rank, step)
        assert local.step() == (which is not None)
        if which is not None:
            landed.append(step)
        for mine, worker in zip(
            model.parameters(), expected.workers[rank].parameters(), strict=True
        ):
            torch.testing.assert_close(mine, worker, rtol=1e-4, atol=1e-5)
    expected.sync()
    local.sync()
    for mine, anchor in zip(model.parameters(), expected.anchor, strict=True):
        torch.testing.assert_close(mine.detach().double(), anchor, rtol=1e-4, atol=1e-5)
    assert_equal_on_all_ranks(model, world_size)
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    stats = local.stats()
    launches = 14 // 6 * fragments + (14 % 6) * fragments // 6
    assert stats.syncs == launches + fragments
    assert stats.steps * nbytes == stats.sent_nbytes + stats.saved_nbytes  # 2 ranks: factor 1
    return landed


@pytest.mark.parametrize(
    ("fragments", "delay", "alpha", "landed"),
    [
        (2, 0, 0.0, [2, 5, 8, 11]),
        (2, 1, None, [3, 6, 9, 12]),
        (2, 2, 0.0, [4, 7, 10, 13]),
        (2, 2, 0.25, [4, 7, 10, 13]),
        (1, 5, None, [10]),
    ],
)
def test_the_equations(
    fragments: int, delay: int, alpha: float | None, landed: list[int]
) -> None:
    arguments = (fragments, delay, alpha)
    found = run_ranks(2, equations, args=arguments, preload=ranks.TORCH_DDP).values()
    assert found == [landed, landed]


def plain(tensors: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(tensors, lr=1.0)


def int8_fragments(rank: int, world_size: int) -> None:
    """With a plain outer step of 1 the new anchor is the old one less the mean of what moved."""
    import pycomm

    model = ddp_models.make("buckets")
    optimizer = inner(model)
    local = pycomm.StreamingDiLoCo(
        model,
        sync_every=8,
        fragments=4,
        fragment_sync_delay=1,
        wire_dtype="int8",
        outer_optimizer=plain,
    )
    assert local.fragments == [[f"layers.{n}.weight", f"layers.{n}.bias"] for n in range(4)]
    parameters = dict(model.named_parameters())
    saved: dict[str, tuple[torch.Tensor, list[torch.Tensor]]] = {}
    for step in range(8):
        train_step(model, optimizer, rank, step, "buckets")
        if step % 2 == 1:  # launches
            before = local.state_dict()["anchor"]
            for name in local.fragments[step // 2]:
                moved = [torch.empty_like(before[name]) for _ in range(world_size)]
                dist.all_gather(moved, before[name] - parameters[name].detach())
                saved[name] = (before[name], moved)
        landed = local.step()
        assert landed == (step % 2 == 0 and step > 0)
        if landed:
            names = local.fragments[step // 2 - 1]
            anchor = local.state_dict()["anchor"]
            rows = torch.stack(
                [torch.cat([saved[n][1][r].flatten() for n in names]) for r in range(world_size)]
            )
            old = torch.cat([saved[name][0].flatten() for name in names]).double().numpy()
            new = torch.cat([anchor[name].flatten() for name in names]).double().numpy()
            values = rows.double().numpy()
            error = np.abs(old - values.mean(0) - new)
            encoded = values.shape[1] * 4 >= 16 << 10
            allowed = sum_bound("int8", values, world_size) if encoded else 0.0
            assert np.all(error <= allowed + 1e-6 * (np.abs(old) + np.abs(values).max()))
            if encoded:
                assert error.max() > 1e-5 * np.abs(values).max(), "nothing was rounded"
    local.sync()
    assert_equal_on_all_ranks(model, world_size)
    sizes = [sum(parameters[name].numel() for name in part) for part in local.fragments]
    block = BYTES_PER_BLOCK["int8"]
    once = sum(-(-n // 256) * block - (-n % 256) if n * 4 >= 16 << 10 else 4 * n for n in sizes)
    stats, wire = local.stats(), pycomm.codec_stats()
    # Seven fragments have landed when sync() is called and three of the four again in it.
    assert stats.syncs == 8
    assert stats.sent_nbytes == 2 * (world_size - 1) * 2 * once // world_size
    # The codec also counts a rank's own part of what it contributes, and what it passes on.
    assert 0.9 < wire.bytes_sent / stats.sent_nbytes < 1.1, (wire, stats)


def test_int8_is_within_the_codecs_bound_and_equal_on_all_ranks() -> None:
    run_ranks(3, int8_fragments, preload=ranks.TORCH_DDP)
