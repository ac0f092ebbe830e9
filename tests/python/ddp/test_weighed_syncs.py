"""``weight="samples"`` of LocalSGD, DiLoCo and the others, beside one process in float64."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import ranks
import torch
from ddp_rig import all_ranks
from torch import nn

pytestmark = [pytest.mark.needs_native, pytest.mark.timeout(300)]

EVERY, STEPS = 4, 16
# By step and rank. In the first round the third rank has none; in the third, weights are far apart.
SAMPLES = (
    *((5, 3, 0), (1, 7, 0), (0, 6, 0), (2, 0, 0)),
    *((0, 6, 1), (32, 1, 3), (4, 4, 4), (1, 1, 9)),
    *((1000, 1, 2), (1, 1, 0), (900, 0, 1), (1, 1, 1)),
    *((2, 3, 4), (2, 3, 4), (2, 3, 4), (2, 3, 4)),
)


def make_net() -> nn.Sequential:
    torch.manual_seed(3)
    kind = torch.float64
    return nn.Sequential(nn.Linear(9, 6, dtype=kind), nn.Tanh(), nn.Linear(6, 2, dtype=kind))


def train(net: nn.Module, rank: int, step: int, samples: int) -> None:
    """A step of SGD by hand; without samples there is none."""
    if samples == 0:
        return
    generator = torch.Generator().manual_seed(1000 * step + rank)
    batch = torch.randn(samples, 9, generator=generator, dtype=torch.float64)
    net.zero_grad()
    net(batch).square().mean().backward()
    with torch.no_grad():
        for each in net.parameters():
            assert each.grad is not None
            each -= 0.1 * each.grad


class Simulated:
    """All workers in one process: the equations of docs/fewer-syncs.md, with weights."""

    def __init__(
        self, world_size: int, fragments: list[list[int]], delay: int, alpha: float, outer: Any
    ) -> None:
        self.workers = [make_net() for _ in range(world_size)]
        self.fragments, self.delay, self.alpha = fragments, delay, alpha
        self.lr, self.momentum = outer
        self.anchor = [each.detach().clone() for each in self.workers[0].parameters()]
        self.velocity = [torch.zeros_like(each) for each in self.anchor]
        self.samples = [[0.0] * world_size for _ in fragments]  # since the fragment's launch
        self.flying: Any = None

    def step(self, step: int) -> None:
        for rank, worker in enumerate(self.workers):
            train(worker, rank, step, SAMPLES[step][rank])
            for of_ranks in self.samples:
                of_ranks[rank] += SAMPLES[step][rank]
        if self.flying is not None:
            self.flying[1] -= 1
            self.land_if_due()
        stride = EVERY // len(self.fragments)
        if (step + 1) % stride == 0:
            which = step // stride % len(self.fragments)
            ends = [[each.detach().clone() for each in w.parameters()] for w in self.workers]
            self.flying = [which, self.delay, ends, self.samples[which]]
            self.samples[which] = [0.0] * len(self.workers)
            self.land_if_due()

    def land_if_due(self) -> None:
        which, left, ends, weights = self.flying
        if left > 0:
            return
        self.flying = None
        for index in self.fragments[which]:
            moved = sum(
                weight * (self.anchor[index] - end[index])
                for weight, end in zip(weights, ends, strict=True)
                if weight
            ) / sum(weights)
            self.velocity[index] = self.momentum * self.velocity[index] + moved
            ahead = moved + self.momentum * self.velocity[index]
            self.anchor[index] = self.anchor[index] - self.lr * ahead
            for worker in self.workers:
                mine = list(worker.parameters())[index].data
                mine.copy_(self.alpha * mine + (1 - self.alpha) * self.anchor[index])


ALL = [[0, 1, 2, 3]]
METHODS: dict[str, tuple[dict[str, Any], tuple[Any, ...]]] = {
    "LocalSGD": ({}, (ALL, 0, 0.0, (1.0, 0.0))),
    "DiLoCo": ({}, (ALL, 0, 0.0, (0.7, 0.9))),
    "StreamingDiLoCo": (
        {"fragments": 2, "fragment_sync_delay": 1, "fragment_update_alpha": 0.25},
        ([[0, 1], [2, 3]], 1, 0.25, (0.7, 0.9)),
    ),
}


def beside_one_process(rank: int, world_size: int, method: str) -> dict[str, Any]:
    import pycomm

    options, world = METHODS[method]
    expected = Simulated(world_size, *world)
    kind = getattr(pycomm, method)

    def made(net: nn.Module) -> Any:
        return kind(net, sync_every=EVERY, weight="samples", **options)

    net = make_net()
    local = made(net)
    worst = 0.0
    for step in range(STEPS):
        samples = SAMPLES[step][rank]
        train(net, rank, step, samples)
        expected.step(step)
        local.step(samples)
        for mine, right in zip(net.parameters(), expected.workers[rank].parameters(), strict=True):
            worst = max(worst, float((mine - right).abs().max()))
        if step % 3 == 1:  # in the middle of a round, and with a fragment in flight
            states = copy.deepcopy([net.state_dict(), local.state_dict()])
            net = make_net()
            local = made(net)
            net.load_state_dict(states[0])
            local.load_state_dict(states[1])
    local.sync()
    flat = torch.cat([each.detach().flatten() for each in net.parameters()])
    same = all(torch.equal(flat, each) for each in all_ranks(flat))
    local.sync()  # no samples, and nothing moves
    again = torch.cat([each.detach().flatten() for each in net.parameters()])
    return {"off": worst, "same": same, "again": torch.equal(flat, again)}


@pytest.mark.parametrize("method", METHODS)
def test_averages_count_by_samples_since_the_last_one(method: str) -> None:
    found = ranks.run_ranks(
        3, beside_one_process, args=(method,), timeout_s=100, preload=ranks.TORCH_DDP
    )
    for results in found.values():
        assert results["off"] < 1e-13
        assert results["same"]
        assert results["again"]


def sparse_rounds(rank: int, world_size: int) -> float:
    """What each rank has sent is the selection's; the mean of it, by hand."""
    import torch.distributed as dist

    import pycomm
    from pycomm._sparse_rows import ROW, pack, select, unpack

    net = make_net().float()
    local = pycomm.SparseLoCo(net, sync_every=EVERY, top_k=32, error_decay=0.9, weight="samples")
    worst = 0.0
    before, since = local.state_dict(), [0.0] * world_size
    for step in range(STEPS):
        of_step = SAMPLES[(step + STEPS - EVERY) % STEPS]  # so that a rank has no samples later
        samples = of_step[rank]
        with torch.no_grad():
            for each in net.parameters():
                generator = torch.Generator().manual_seed(100 * step + rank)
                each += (samples > 0) * 0.01 * torch.randn(each.shape, generator=generator)
        since = [old + of_step[r] for r, old in enumerate(since)]
        moved = {
            name: before["anchor"][name] - each.detach() for name, each in net.named_parameters()
        }
        if not local.step(samples):
            continue
        summed, sent = {}, {}
        for name, each in moved.items():
            rows = torch.zeros(-(-each.numel() // ROW), ROW)
            rows.view(-1)[: each.numel()] = 0.9 * before["error"][name] + each.flatten()
            at, values = unpack(pack(*select(rows, 32)), 32)
            decoded = torch.zeros_like(rows).scatter_add_(1, at, values).view(-1)[: each.numel()]
            summed[name], sent[name] = rows.view(-1)[: each.numel()], decoded
        of_all: list[Any] = [None] * world_size
        dist.all_gather_object(of_all, sent)
        after = local.state_dict()
        for name, mine in sent.items():
            mean = sum(w * each[name].double() for w, each in zip(since, of_all, strict=True))
            right = before["anchor"][name].double().flatten() - mean / sum(since)
            worst = max(worst, float((after["anchor"][name].flatten() - right).abs().max()))
            kept = summed[name] - (mine if since[rank] else 0.0)  # else it went nowhere
            worst = max(worst, float((after["error"][name].flatten() - kept).abs().max()))
        before, since = after, [0.0] * world_size
    return worst


def test_sparse_entries_count_by_samples_since_the_last_sync() -> None:
    found = ranks.run_ranks(3, sparse_rounds, timeout_s=100, preload=ranks.TORCH_DDP)
    assert max(found.values()) < 1e-6


def equal_samples(rank: int, world_size: int) -> list[str]:
    import pycomm

    wrong = []
    for method in ("LocalSGD", "DiLoCo", "SparseLoCo"):
        seen = []
        for weight in (None, "samples"):
            net = make_net()
            local = getattr(pycomm, method)(net, sync_every=2, weight=weight)
            for step in range(6):
                train(net, rank, step, 5)
                local.step(*(() if weight is None else (0.1,)))  # which binary cannot hold
            seen.append(torch.cat([each.detach().flatten() for each in net.parameters()]))
        if not torch.equal(*seen):
            wrong.append(method)
    return wrong


def test_equal_samples_have_the_bits_of_no_weights() -> None:
    found = ranks.run_ranks(3, equal_samples, timeout_s=100, preload=ranks.TORCH_DDP)
    assert list(found.values()) == [[]] * 3


def without_weight(rank: int, world_size: int) -> dict[str, bool]:
    """A rank without samples has NaN, in parameters that it did not train."""
    import pycomm

    found = {}
    options = {"StreamingDiLoCo": {"wire_dtype": "int8"}, "SparseLoCo": {"top_k": 16}}
    for method in ("LocalSGD", "DiLoCo", "StreamingDiLoCo", "SparseLoCo"):
        net = nn.Linear(100, 100)
        kind = getattr(pycomm, method)
        local = kind(net, sync_every=1, weight="samples", **options.get(method, {}))
        with torch.no_grad():
            for each in net.parameters():
                each += math.nan if rank == 1 else 1.0
        for samples in (0 if rank == 1 else 3, 2):  # and nothing of it is left for the next round
            local.step(samples)
        found[method] = all(bool(each.isfinite().all()) for each in net.parameters())
    return found


def test_a_rank_without_samples_counts_nothing_not_even_its_nan() -> None:
    found = ranks.run_ranks(3, without_weight, timeout_s=100, preload=ranks.TORCH_DDP)
    for results in found.values():
        assert results == dict.fromkeys(results, True)


def refusals(rank: int, world_size: int) -> dict[str, str]:
    import pycomm

    found: dict[str, str] = {}

    def tried(name: str, call: Any) -> None:
        try:
            call()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"

    for method in ("LocalSGD", "StreamingDiLoCo"):
        kind = getattr(pycomm, method)
        plain = kind(nn.Linear(2, 2), sync_every=2)
        weighed = kind(nn.Linear(2, 2), sync_every=2, weight="samples")
        tried(f"{method} not weighed", lambda plain=plain: plain.step(3))
        tried(f"{method} missing", weighed.step)
        tried(f"{method} bad", lambda weighed=weighed: weighed.step(-1))
        found[f"{method} counted"] = str(weighed.stats().steps)
    tried("weight", lambda: pycomm.DiLoCo(nn.Linear(2, 2), sync_every=2, weight="tokens"))
    tried(
        "fp16",
        lambda: pycomm.StreamingDiLoCo(
            nn.Linear(2, 2), sync_every=2, weight="samples", wire_dtype="fp16"
        ),
    )
    weight = "samples" if rank == 0 else None
    tried("differs", lambda: pycomm.DiLoCo(nn.Linear(2, 2), sync_every=2, weight=weight))
    return found


def test_what_cannot_be_is_refused_by_name() -> None:
    found, other = ranks.run_ranks(2, refusals, timeout_s=60, preload=ranks.TORCH_DDP).values()
    assert found == other
    for method in ("LocalSGD", "StreamingDiLoCo"):
        assert f'needs {method}(…, weight="samples")' in found[f"{method} not weighed"]
        assert "step(samples=len(batch))" in found[f"{method} missing"]
        assert found[f"{method} bad"] == "ValueError: samples=-1 is not a finite number from 0"
        assert found[f"{method} counted"] == "0"
    assert found["weight"].startswith("ValueError: weight='tokens'")
    assert 'wire_dtype="fp16" does not go with' in found["fp16"]
    assert "weight" in found["differs"] and "samples" in found["differs"]
