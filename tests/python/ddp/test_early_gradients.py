"""Gradients that come before backward reaches an output of forward.

They are those of parameters that the loss uses beside it. They are of the same pass, which is
counted once, and weighed once.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
from typing import Any

import pytest
import ranks
import torch
from ddp_rig import wrap
from torch import nn

pytestmark = [pytest.mark.ci, pytest.mark.needs_native, pytest.mark.timeout(300)]

OUTSIDE, RETURNED = "outside forward", "a bare leaf that forward returns"


class Scaled(nn.Module):
    """A learned noise that only the loss uses."""

    def __init__(self, where: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)).double()
        self.log_sigma = nn.Parameter(torch.full((), 0.25, dtype=torch.float64))
        self.where = where

    def forward(self, batch: torch.Tensor) -> Any:
        return (self.layers(batch), self.log_sigma if self.where == RETURNED else None)


def loss_of(model: Any, net: Scaled, number: int, rank: int, factor: float = 1.0) -> torch.Tensor:
    """``log_sigma`` is added last, so its gradient comes first."""
    generator = torch.Generator().manual_seed(100 * number + rank)
    batch = torch.randn(4, 6, generator=generator, dtype=torch.float64)
    output, returned = model(batch)
    log_sigma = net.log_sigma if returned is None else returned
    loss: torch.Tensor = output.square().mean() * torch.exp(-log_sigma) + log_sigma * (1 + rank)
    return loss * factor


def share_of(net: Scaled, number: int, rank: int) -> torch.Tensor:
    """The gradients of a plain copy."""
    single = copy.deepcopy(net)
    single.zero_grad()
    loss_of(single, single, number, rank).backward()
    return gradients(single)


def gradients(net: nn.Module) -> torch.Tensor:
    each = [torch.zeros_like(p) if p.grad is None else p.grad for p in net.parameters()]
    return torch.cat([grad.flatten() for grad in each])


def off_by(found: torch.Tensor, right: torch.Tensor) -> float:
    off = float((found - right).abs().max() / right.abs().max())
    return off if math.isfinite(off) else math.inf


def counted(rank: int, world_size: int) -> dict[Any, Any]:
    """Two reductions of each case: how far .grad is from that by hand, after every pass."""
    found: dict[Any, Any] = {}
    options = itertools.product((1, 2, 3), (False, True), (None, "samples"), (OUTSIDE, RETURNED))
    for case in options:
        accumulate, find_unused, weight, where = case
        net = Scaled(where)
        model = wrap(net, accumulate=accumulate, find_unused_parameters=find_unused, weight=weight)
        worst = 0.0
        for reduction in range(2):
            model.zero_grad()
            mine = torch.zeros(())
            numbers = [reduction * accumulate + each for each in range(accumulate)]
            for number in numbers:
                loss_of(model, net, number, rank).backward()
                mine = mine + share_of(net, number, rank)
                if number != numbers[-1]:
                    worst = max(worst, off_by(gradients(net), mine))
            everyones = [
                share_of(net, number, each) for each in range(world_size) for number in numbers
            ]
            worst = max(worst, off_by(gradients(net), sum(everyones) / world_size))
        found[case] = (worst, model.stats().steps, model.stats().passes)
    return found


def test_a_pass_with_an_early_gradient_is_counted_once() -> None:
    found = ranks.run_ranks(2, counted, timeout_s=100, preload=ranks.TORCH_DDP)
    for rank in range(2):
        for case, (off, steps, passes) in found[rank].value.items():
            assert off < 1e-12, (rank, case, off)
            assert (steps, passes) == (2, 2 * case[0]), (rank, case)


LOCALLY, ACCUMULATED = "no_sync", "accumulate"
ZERO = "zero_grad"
WEIGHTS: dict[str, tuple[tuple[float, float], ...]] = {
    "unequal": ((32.0, 1.0), (8.0, 5.0), (8.0, 7.0)),
    "falling on one rank": ((32.0, 3.0), (8.0, 3.0)),
    "none at first": ((0.0, 3.0), (8.0, 2.0)),
    "none at last": ((8.0, 3.0), (0.0, 2.0)),
    "far apart": ((1e9, 1e9), (1.0, 2.0)),
    "equal": ((4.0, 4.0), (4.0, 4.0)),
}


def weighed(rank: int, world_size: int) -> dict[Any, float]:
    """Passes whose weights differ; those without weight have gradients of NaN."""
    found: dict[Any, float] = {}
    cases = itertools.product(WEIGHTS, (LOCALLY, ACCUMULATED), (OUTSIDE, RETURNED), ("", ZERO))
    for case in cases:
        name, how, where, between = case
        weights = WEIGHTS[name]
        net = Scaled(where)
        options = {"accumulate": len(weights)} if how == ACCUMULATED else {}
        model = wrap(net, weight="samples", **options)
        if between == ZERO:
            with model.no_sync() if how == LOCALLY else contextlib.nullcontext():
                for number in range(len(weights) if how == ACCUMULATED else 2):
                    add_pass(model, net, 50 + number, rank, 3.0 + number + rank)
            model.zero_grad()
        for number, of_ranks in enumerate(weights):
            local = how == LOCALLY and number + 1 < len(weights)
            with model.no_sync() if local else contextlib.nullcontext():
                add_pass(model, net, number, rank, of_ranks[rank])
        total = sum(map(sum, weights))
        right = sum(
            len(weights) * weight / total * share_of(net, number, each)
            for number, of_ranks in enumerate(weights)
            for each, weight in enumerate(of_ranks)
        )
        assert isinstance(right, torch.Tensor)
        found[case] = off_by(gradients(net), right)
    return found


def add_pass(model: Any, net: Scaled, number: int, rank: int, weight: float) -> None:
    model.samples = weight
    loss_of(model, net, number, rank, factor=1.0 if weight else math.nan).backward()


def test_an_early_gradient_counts_with_the_weight_of_its_pass() -> None:
    found = ranks.run_ranks(2, weighed, timeout_s=100, preload=ranks.TORCH_DDP)
    for rank in range(2):
        for case, off in found[rank].value.items():
            assert off < 1e-11, (rank, case, off)
