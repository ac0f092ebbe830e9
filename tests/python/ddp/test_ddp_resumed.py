"""A run that loads a state continues bit by bit; a frozen parameter keeps what its wire knows."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import ranks
import torch
from ddp_rig import wrap
from torch import nn

pytestmark = [pytest.mark.ci, pytest.mark.needs_native, pytest.mark.timeout(300)]

WIRES = (None, "fp16", "bf16", "int8", {"0.*": "fp16", "2.*": "int8", "*": "bf16"})


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    # The second layer's gradients come in another order than the reverse of registration.
    layers = nn.Sequential(nn.Linear(60, 90), nn.Tanh(), nn.Linear(90, 70), nn.Linear(70, 1))
    return layers


class Run:
    def __init__(self, seed: int, options: dict[str, Any], adam: bool) -> None:
        self.model = wrap(model_of(seed), **options)
        kind = torch.optim.AdamW if adam else torch.optim.SGD
        self.optimizer = kind(self.model.parameters(), lr=0.01)

    def state(self) -> Any:
        parts = (self.model.module, self.optimizer)
        states = [each.state_dict() for each in parts]
        return copy.deepcopy([*states, self.model.communication_state_dict()])

    def load(self, state: Any) -> None:
        self.model.module.load_state_dict(state[0])
        self.optimizer.load_state_dict(state[1])
        self.model.load_communication_state_dict(state[2])

    def step(self, rank: int, step: int, accumulate: int) -> None:
        generator = torch.Generator().manual_seed(1000 * step + rank)
        for _ in range(accumulate):
            batch = torch.randn(4, 60, generator=generator) * 10.0 ** (step % 5 - 2)
            self.model(batch).pow(2).mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def resumed(rank: int, world_size: int, seeds: range) -> None:
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)

        def pick(count: int, of: torch.Generator = generator) -> int:
            return int(torch.randint(count, (1,), generator=of))

        options: dict[str, Any] = {
            "wire_dtype": WIRES[seed % len(WIRES)],
            "accumulate": 1 + pick(2),
            "bucket_cap_mb": (0.01, 0.03, 1)[pick(3)],
            "static_graph": pick(3) == 0,
            "gradient_as_bucket_view": pick(2) == 0,
        }
        adam = pick(2) == 0
        saved_at = pick(5)
        run = Run(seed, options, adam)
        state = None
        for step in range(6):
            if step == saved_at:
                state = run.state()
            run.step(rank, step, options["accumulate"])
        again = Run(seed + 1, options, adam)
        again.load(state)
        for step in range(saved_at, 6):
            again.step(rank, step, options["accumulate"])
        for one, other in zip(run.model.parameters(), again.model.parameters(), strict=True):
            assert torch.equal(one, other), (seed, saved_at, options)
        with pytest.raises(ValueError, match="other"):
            again.model.load_communication_state_dict({**state[2], "fp16_exponents": {"other": 1}})
        with pytest.raises(ValueError, match="lacks parameter"):
            again.model.load_communication_state_dict({**state[2], "bucket_order": ["0.weight"]})


def test_a_run_that_loads_a_state_continues_bit_by_bit() -> None:
    ranks.run_ranks(2, resumed, args=(range(24),), timeout_s=200, preload=ranks.TORCH_DDP)


class UsedBackwards(nn.Sequential):
    """Its gradients come in the order of registration."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        for layer in reversed(self):
            batch = layer(batch)
        return batch


def rewound(rank: int, world_size: int) -> None:
    """To its beginning, by a wrapper of a static graph that knows its graph."""
    for accumulate in (1, 2):
        orders = []
        for rewinds in (False, True):
            net = UsedBackwards(*(nn.Linear(60, 60) for _ in range(4)))
            model = wrap(net, static_graph=True, accumulate=accumulate)
            state = model.communication_state_dict()
            for step in range(3):
                if rewinds and step == 1:
                    model.load_communication_state_dict(state)
                for _ in range(accumulate):
                    model(torch.ones(2, 60)).sum().backward()
            orders.append(model.communication_state_dict()["bucket_order"])
        assert orders[0] == orders[1], (accumulate, orders)


def test_a_static_graph_that_loads_its_beginning_orders_buckets_as_a_new_one() -> None:
    ranks.run_ranks(2, rewound, timeout_s=100, preload=ranks.TORCH_DDP)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.zeros(8192)) for _ in range(2))

    def forward(self, slopes: torch.Tensor) -> torch.Tensor:
        return (self.a * slopes).sum() + (self.b * slopes).sum()


def step_of(model: Any, rank: int, step: int) -> None:
    generator = torch.Generator().manual_seed(100 * step + rank)
    model.zero_grad()
    model(torch.randn(8192, generator=generator) * torch.logspace(-6, 0, 8192)).backward()


def frozen(rank: int, world_size: int) -> None:
    model = wrap(Pair(), wire_dtype="int8", bucket_cap_mb=1)
    for step in range(2):
        step_of(model, rank, step)
    before = model.communication_state_dict()["residuals"]["a"]
    assert before.any()
    model.module.a.requires_grad_(False)
    step_of(model, rank, 2)
    saved = copy.deepcopy(model.communication_state_dict())
    assert torch.equal(saved["residuals"]["a"], before)
    model.module.a.requires_grad_(True)
    model(torch.zeros(8192))
    assert torch.equal(model.communication_state_dict()["residuals"]["a"], before)
    model.module.a.requires_grad_(False)
    model(torch.zeros(8192))
    model.load_communication_state_dict(saved)
    assert torch.equal(model.communication_state_dict()["residuals"]["a"], before)
    model.scale_residuals(0.5)
    assert torch.equal(model.communication_state_dict()["residuals"]["a"], before * 0.5)


def frozen_base(rank: int, world_size: int) -> None:
    """A parameter that has never been trained has no residual."""
    module = Pair()
    module.a.requires_grad_(False)
    model = wrap(module, wire_dtype="int8")
    step_of(model, rank, 0)
    assert set(model.communication_state_dict()["residuals"]) == {"b"}


def frozen_scale(rank: int, world_size: int) -> None:
    model = wrap(Pair(), wire_dtype="fp16", bucket_cap_mb=0.01)
    for step in range(3):
        step_of(model, rank, step)
    for trained in (False, True):
        model.module.a.requires_grad_(trained)
        before = model.stats()
        step_of(model, rank, 3)
        assert model.stats().underflowed_buckets == before.underflowed_buckets


def all_frozen(rank: int, world_size: int) -> None:
    for each in (frozen, frozen_base, frozen_scale):
        each(rank, world_size)


def test_a_frozen_parameter_keeps_its_residual_and_its_scale() -> None:
    ranks.run_ranks(2, all_frozen, timeout_s=100, preload=ranks.TORCH_DDP)


class Slopes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8192))

    def forward(self, slopes: torch.Tensor) -> torch.Tensor:
        return (self.weight * slopes).sum()


def bad_neighbour(rank: int, world_size: int) -> list[tuple[float, int]]:
    """One NaN or Inf of one rank among gradients of one size, in fp16."""
    found = []
    for size in (1e5, 1e8, 1e-7):
        for bad in (float("nan"), float("inf")):
            model = wrap(Slopes(), wire_dtype="fp16")
            for _ in range(2):
                slopes = torch.full((8192,), size)
                slopes[0] = bad if rank == 0 else size
                model.zero_grad()
                model(slopes).backward()
                grad = model.module.weight.grad
                found.append((float(grad[1]) / size, int((~grad.isfinite()).sum())))
            assert model.stats().nonfinite_buckets == 2
    return found


def test_one_nan_harms_no_neighbour_in_fp16() -> None:
    found = ranks.run_ranks(2, bad_neighbour, timeout_s=100, preload=ranks.TORCH_DDP)
    for result in found.values():
        for value, not_finite in result:
            assert value == pytest.approx(1.0, rel=1e-3)
            assert not_finite == 1
