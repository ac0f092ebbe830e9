"""After a failure training goes on correctly or raises: no silence, no crash."""

from __future__ import annotations

from typing import Any

import pytest
import ranks
import torch
from ddp_rig import wrap
from torch import nn

pytestmark = [pytest.mark.ci, pytest.mark.needs_native, pytest.mark.timeout(300)]

NOT_A_LEAF = "only called on leaf Variables"
EARLIER = "rank 0: an earlier backward pass failed while "


def run_alone(target: Any) -> Any:
    """In a process of its own: a crash is a result as well."""
    (value,) = ranks.run_ranks(1, target, timeout_s=120, preload=ranks.TORCH_DDP).values()
    return value


def raised_by(call: Any, *args: Any) -> str:
    with pytest.raises(RuntimeError) as caught:
        call(*args)
    return str(caught.value)


# A parameter that has become the result of an operation


class Scaled(nn.Module):
    """Its last parameter is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        scale = nn.Parameter(torch.full((4,), 2.0), requires_grad=False)
        self.scales = nn.ParameterList([scale])  # a parameter of its own would come first

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(batch)) * self.scales[0]


def expected_gradients(module: nn.Module, batch: torch.Tensor) -> list[torch.Tensor]:
    """By torch alone. They are those of one rank's mean."""
    trained = [each for each in module.parameters() if each.requires_grad]
    return list(torch.autograd.grad(module(batch).square().mean(), trained))


def not_a_leaf(rank: int, world_size: int) -> dict[str, Any]:
    ours = wrap(Scaled())
    scale = ours.module.scales[0]
    batch = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    graph = ours.module(batch)  # it keeps the accumulators alive, as does a loss that is logged
    scale.mul_(torch.ones(4, requires_grad=True))
    texts = [raised_by(ours, batch) for _ in range(3)]
    steps_then = ours.stats().steps

    scale.detach_()
    expected = expected_gradients(ours.module, batch)
    ours(batch).square().mean().backward()
    found = [each.grad for each in ours.parameters() if each.grad is not None]
    for mine, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, reference)
    assert graph.grad_fn is not None
    return {"texts": texts, "steps": (steps_then, ours.stats().steps)}


def test_a_parameter_that_is_no_leaf_is_an_error_of_every_forward_until_it_is_one() -> None:
    found = run_alone(not_a_leaf)
    assert all(NOT_A_LEAF in text for text in found["texts"]), found["texts"]
    assert found["steps"] == (0, 1)


def no_room(rank: int, world_size: int) -> list[str]:
    """The gradient of an expanded parameter would need half of all addresses."""
    module = Scaled()
    module.huge = nn.Parameter(torch.zeros(1).expand(1 << 61), requires_grad=False)
    ours = wrap(module, init_sync=False)
    batch = torch.ones(3, 4)
    ours(batch).mean().backward()
    module.huge.requires_grad_(True)
    texts = [raised_by(ours, batch)]
    module.huge.requires_grad_(False)
    texts.append(raised_by(ours, batch))
    return texts


def test_buckets_that_cannot_be_made_are_an_error_that_stays() -> None:
    first, second = run_alone(no_room)
    assert "Storage size calculation overflowed" in first
    assert f"{EARLIER}its buckets were being made: " in second
    assert "Storage size calculation overflowed" in second


# Hooks that are gone


def without_hooks(rank: int, world_size: int) -> int:
    ours = wrap(Scaled(), find_unused_parameters=True)
    batch = torch.ones(3, 4)
    for _ in range(2):
        ours._remove_autograd_hooks()
        ours.zero_grad()
        ours(batch).square().mean().backward()
    expected = expected_gradients(ours.module, batch)
    found = [each.grad for each in ours.parameters() if each.grad is not None]
    for mine, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, reference)
    return ours.stats().steps


def test_without_its_hooks_gradients_stay_local() -> None:
    assert run_alone(without_hooks) == 0


# An average that cannot be written


def second_loss(rank: int, world_size: int) -> list[str]:
    """The first bucket's average does not fit .grad: seen while backward runs, or at its end."""
    module = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3)))
    ours = wrap(module, bucket_cap_mb=1e-6, gradient_as_bucket_view=False)
    out = ours(torch.ones(2, 8))
    assert len(ours.reducer.bucket_names()) == 3

    def shrink(grad: torch.Tensor) -> None:  # the first bucket has left, and is not awaited yet
        module[2].weight.grad.data = torch.zeros(5, 8)

    handle = module[1].weight.register_hook(shrink)
    texts = [raised_by(out.sum().backward, None, True)]
    handle.remove()
    module[2].weight.grad = None
    texts.append(raised_by(out.mean().backward))
    texts.append(raised_by(ours, torch.ones(2, 8)))
    return texts


def test_a_second_loss_after_a_failure_says_that_there_was_one() -> None:
    first, second, third = run_alone(second_loss)
    assert "must match" in first
    for text in (second, third):
        assert EARLIER in text
        assert "must match" in text
