"""Scales, order and counts are the same on all ranks after a change of ranks, or raise an error."""

from __future__ import annotations

from typing import Any

import pytest
import ranks
import torch.distributed as dist
from ddp_rig import Layers, all_ranks, step, wrap

pytestmark = [pytest.mark.needs_native, pytest.mark.timeout(300)]


def newcomer(rank: int, world_size: int, options: dict[str, Any]) -> list[list[float]]:
    """Ranks 0 and 1 have trained; rank 2 has just made its wrapper; all meet in one group."""
    pair = dist.new_group([0, 1])
    alone = dist.new_group([2])
    model = wrap(
        Layers(), process_group=alone if rank == 2 else pair, bucket_cap_mb=0.004, **options
    )
    if rank < 2:
        for _ in range(3):
            step(model, 30.0)
    model._update_process_group(dist.group.WORLD)
    return [step(model, 0.001 * (1 + rank)) for _ in range(3)]


@pytest.mark.parametrize(
    "options",
    [{"wire_dtype": "fp16"}, {}, {"static_graph": True}],
    ids=["fp16", "own", "static_graph"],
)
def test_a_newcomer_and_ranks_that_have_trained_average_alike(options: dict[str, Any]) -> None:
    found = ranks.run_ranks(
        3,
        newcomer,
        args=(options,),
        timeout_s=100,
        init_timeout_s=20.0,
        preload=ranks.TORCH_DDP,
    ).values()
    first = found[0]
    assert all(each == first for each in found)
    assert [gradient for each in first for gradient in each] == pytest.approx([0.002] * 6, rel=0.01)


def reset_alone(rank: int, world_size: int) -> str:
    """Rank 1 alone has its first scale again."""
    model = wrap(Layers(), wire_dtype="fp16", bucket_cap_mb=0.004)
    step(model, 0.03)
    step(model, 0.03)
    if rank == 1:
        model.reducer._reset_state()
    with pytest.raises(Exception) as caught:
        found = step(model, 0.03)
        raise AssertionError(f"no error, and gradients {found}")
    return str(caught.value)


def test_ranks_that_do_not_share_their_state_get_an_error_instead_of_an_average() -> None:
    found = ranks.run_ranks(2, reset_alone, timeout_s=100, init_timeout_s=20.0, check=False)
    for rank in range(2):
        assert "COLLECTIVE_MISMATCH" in found[rank].value


def frozen_before_join(rank: int, world_size: int) -> list[float]:
    model = wrap(Layers())
    step(model, 1.0)
    model.module.first.requires_grad_(False)
    with model.join(divide_by_initial_world_size=False):
        for number in range(2 if rank == 0 else 0):
            step(model, 1.0 + number)
    return [float(each) for each in all_ranks(model.module.last.grad[:1])]


def test_ranks_without_data_cut_buckets_as_the_others_do() -> None:
    found = ranks.run_ranks(
        2, frozen_before_join, timeout_s=100, init_timeout_s=20.0, preload=ranks.TORCH_DDP
    )
    assert found[0].value[0] == 2.0
