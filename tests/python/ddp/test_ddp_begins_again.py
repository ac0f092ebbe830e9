"""A wrapper that begins again reduces its first pass, or says that it cannot."""

from __future__ import annotations

import copy

import pytest
import ranks
import torch.distributed as dist
from ddp_rig import Layers, step, wrap

pytestmark = [pytest.mark.ci, pytest.mark.needs_native, pytest.mark.timeout(300)]


def copied(rank: int, world_size: int) -> list[list[float]]:
    model = wrap(Layers(), static_graph=True)
    step(model, float(rank))
    again = copy.deepcopy(model)
    return [step(again, float(rank)) for _ in range(2)]


def test_a_copy_reduces_its_first_pass() -> None:
    found = ranks.run_ranks(2, copied, timeout_s=100, preload=ranks.TORCH_DDP)
    assert list(found.values()) == [[[0.5, 0.5]] * 2] * 2


def other_group(rank: int, world_size: int) -> str:
    model = wrap(Layers(), sync_every=2)
    group = dist.new_group([0, 1])
    with pytest.raises(Exception, match="sync_every") as caught:
        model._update_process_group(group)
    return type(caught.value).__name__


def test_a_wrapper_that_syncs_between_hosts_keeps_its_group() -> None:
    found = ranks.run_ranks(2, other_group, timeout_s=100, preload=ranks.TORCH_DDP)
    assert set(found.values()) == {"UnsupportedError"}
