"""Batches of ``BalancedSampler`` that nothing is learnt from: they count as trained."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import pytest
import ranks
import torch
from ddp_rig import wrap
from torch import nn

pytestmark = [pytest.mark.needs_native, pytest.mark.timeout(400)]

GLOBAL_BATCH, STEPS, LOOKAHEAD = 12, 21, 4


def inputs_of(indices: list[int]) -> torch.Tensor:
    return torch.tensor(indices, dtype=torch.float64)[:, None]


def skips(rank: int, world_size: int, how: str) -> dict[str, Any]:
    """Every third batch is bad: more of them than ``lookahead`` allows to be ahead."""
    import pycomm

    torch.manual_seed(1)
    model = wrap(nn.Linear(1, 1, dtype=torch.float64), weight="samples")
    sampler = pycomm.BalancedSampler(
        range(GLOBAL_BATCH * STEPS), global_batch=GLOBAL_BATCH, model=model, lookahead=LOOKAHEAD
    )
    dealt, cursors = [], []
    for number, batch in enumerate(sampler):
        dealt += batch
        cursors.append(sampler.state_dict()["cursor"])
        model.zero_grad()
        bad = number % 3 == 1
        if bad and how == "forgotten":
            with model.no_sync():
                model(inputs_of(batch)).mean().backward()
            continue
        loss = model(inputs_of(batch)).mean()
        if bad:
            with contextlib.suppress(ValueError):
                model.no_batch()
            continue
        loss.backward()
        if number == STEPS // 2:
            state = model.communication_state_dict()
            model.load_communication_state_dict(state)
    return {"dealt": dealt, "cursors": cursors, "end": sampler.state_dict()["cursor"]}


@pytest.mark.parametrize("how", ["forgotten", "no_batch"])
def test_a_bad_batch_moves_no_other(how: str) -> None:
    found = ranks.run_ranks(2, skips, args=(how,), timeout_s=60, preload=ranks.TORCH_DDP).values()
    dealt = [index for each in found for index in each["dealt"]]
    assert sorted(dealt) == list(range(GLOBAL_BATCH * STEPS))
    for each in found:
        if how == "no_batch":
            assert each["cursors"] == list(range(STEPS))
        else:  # it is on record with the step after it
            assert all(number - at in (0, 1) for number, at in enumerate(each["cursors"]))
        assert each["end"] == STEPS


def skips_alone(rank: int, world_size: int) -> str:
    import pycomm

    model = wrap(nn.Linear(1, 1, dtype=torch.float64), weight="samples")
    sampler = pycomm.BalancedSampler(range(120), global_batch=12, model=model, lookahead=LOOKAHEAD)
    try:
        for number, batch in enumerate(itertools.islice(sampler, 6)):
            model.zero_grad()
            if number == 1 and rank == 1:
                with model.no_sync():
                    model(inputs_of(batch)).mean().backward()
                continue
            model(inputs_of(batch)).mean().backward()
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_batch_that_one_rank_alone_skips_is_a_named_error_on_all() -> None:
    """Its batches and the others' no longer belong together."""
    found = ranks.run_ranks(2, skips_alone, timeout_s=60, preload=ranks.TORCH_DDP)
    for text in found.values():
        assert "has used up 1 batches on rank 0 of the model's group and 2 on rank 1" in text


def idle(rank: int, world_size: int) -> list[int]:
    """More steps with another loader than the wrapper keeps on record."""
    import pycomm

    model = wrap(nn.Linear(1, 1, dtype=torch.float64), weight="samples")
    sampler = pycomm.BalancedSampler(range(120), global_batch=12, model=model, lookahead=LOOKAHEAD)
    dealt = []
    for epoch in range(2):
        dealt.append(0)
        for batch in sampler:
            model(inputs_of(batch)).mean().backward()
            model.zero_grad()
            dealt[-1] += len(batch)
        for _ in range(4200 if epoch == 0 else 0):
            model(inputs_of([1])).mean().backward()
            model.zero_grad()
    return [*dealt, sampler.stats().batches, model.step_log.steps]


def test_a_sampler_that_was_idle_for_thousands_of_steps_goes_on() -> None:
    found = ranks.run_ranks(2, idle, timeout_s=200, preload=ranks.TORCH_DDP)
    first, second = found.values()
    assert [a + b for a, b in zip(first[:2], second[:2], strict=True)] == [120, 120]
    assert first[2:] == second[2:] == [20, 4220]
