"""What a wrapper refuses changes nothing: a state, a comm hook, memory that there is not."""

from __future__ import annotations

import copy
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_rig import Layers, step, wrap
from ranks import TORCH_DDP, run_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import pycomm

pytestmark = [pytest.mark.needs_native, pytest.mark.timeout(300)]


def trained(seed: int) -> Any:
    torch.manual_seed(seed)
    layers = nn.Sequential(nn.Linear(80, 80), nn.Linear(80, 80))
    wires = {"0.*": "int8", "*": "fp16"}
    model = wrap(layers, wire_dtype=wires, accumulate=3, weight="samples", bucket_cap_mb=0.01)
    for _ in range(3 * seed + seed):  # a pass or two accumulate
        model(torch.randn(2, 80)).square().sum().backward()
    return model


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return bool(one == other)


def wrong_states(state: dict[str, Any]) -> dict[str, dict[str, Any]]:
    weight, unit, passes, alike, _, *more = state["weighed"]
    lacking = {f"without {key}": {**state} for key in ("accumulated", "unsynced")}
    for how, lacks in lacking.items():
        del lacks[how.removeprefix("without ")]
    return {
        **lacking,
        "more passes": {**state, "accumulated": 3},
        "fewer passes": {**state, "accumulated": -1},
        "a residual of another shape": {**state, "residuals": {"0.weight": torch.ones(3)}},
        "a residual of no parameter": {**state, "residuals": {"9.weight": torch.ones(3)}},
        "no residual": {**state, "residuals": {"0.weight": "lost"}},
        "a scale of no parameter": {**state, "fp16_exponents": {"9.weight": 3}},
        "half an order": {**state, "bucket_order": state["bucket_order"][1:]},
        "weights of no parameter": {
            **state,
            "weighed": (weight, unit, passes, alike, {"9.weight": True}, *more),
        },
        "half a row of weights": {**state, "weighed": (weight, unit)},
        "no samples": {**state, "weight_unsynced": "many"},
        "no list": {**state, "unsynced_parameters": 3},
        "used by number": {**state, "used": [3]},
    }


def states_are_refused(rank: int, world_size: int) -> list[str]:
    """Each state of another run that has one thing wrong; what went through in part."""
    model, other = trained(1), trained(2)
    before = copy.deepcopy(model.communication_state_dict())
    state = other.communication_state_dict()
    assert not same(before["residuals"], state["residuals"])
    assert before["accumulated"] != state["accumulated"]
    found = []
    for how, wrong in wrong_states(state).items():
        with pytest.raises((ValueError, TypeError, LookupError)):
            model.load_communication_state_dict(wrong)
            found.append(f"{how}: it was loaded")
        now = model.communication_state_dict()
        found += [f"{how}: {key}" for key in before if not same(before[key], now.get(key))]
    model.load_communication_state_dict(state)
    assert same(state, model.communication_state_dict())
    return found


def test_a_state_is_loaded_as_a_whole_or_not_at_all() -> None:
    for found in run_ranks(2, states_are_refused, timeout_s=100, preload=TORCH_DDP).values():
        assert not found, found


def second_hook_on_one_rank(rank: int, world_size: int) -> float:
    """Rank 1 tries to register one more hook; later hooks keep their names."""
    first = wrap(Layers())
    first.register_comm_hook(None, default_hooks.allreduce_hook)
    if rank == 1:
        with pytest.raises(RuntimeError, match="registered already"):
            first.register_comm_hook(None, default_hooks.allreduce_hook)
    second = wrap(Layers())
    second.register_comm_hook(None, default_hooks.allreduce_hook)
    return step(second, 1.0 + rank)[0]


def test_a_refused_hook_has_no_name() -> None:
    found = run_ranks(
        2, second_hook_on_one_rank, timeout_s=60, init_timeout_s=10.0, preload=TORCH_DDP
    )
    assert found.values() == [1.5, 1.5]


class Uneven(nn.Module):
    """Its buckets are more in one order of the gradients than in the other."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (2000, 10, 2000, 10, 2000, 10, 10, 10)
        self.parts = nn.ParameterList(nn.Parameter(torch.zeros(size)) for size in sizes)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = sum((part * batch).sum() for part in self.parts)  # type: ignore[assignment]
        return total


def loaded_between_forward_and_backward(rank: int, world_size: int) -> list[tuple[int, int]]:
    """By order: the buckets of the last record, and those of the wrapper."""
    sizes = [each.numel() for each in Uneven().parts]
    names = [f"parts.{index}" for index in range(len(sizes))]
    by_size = sorted(names, key=lambda name: sizes[int(name.removeprefix("parts."))])
    found = []
    for first, second in ((names, by_size), (by_size, names)):
        model = wrap(Uneven(), bucket_cap_mb=0.004)
        states = [
            {"accumulated": 0, "unsynced": 0, "bucket_order": order, "order_agreed": True}
            for order in (first, second)
        ]
        model.load_communication_state_dict(states[0])
        model.reducer.record_steps(True)
        loss = model(torch.ones(1))
        before = len(model.reducer.bucket_names())
        model.load_communication_state_dict(states[1])
        after = len(model.reducer.bucket_names())
        assert before != after
        loss.backward()
        record = model.reducer.last_step()
        found.append((after if record is None else len(record["buckets"]), after))
    return found


def test_buckets_are_cut_between_forward_and_backward() -> None:
    for found in run_ranks(
        1, loaded_between_forward_and_backward, timeout_s=60, preload=TORCH_DDP
    ).values():
        assert all(recorded == buckets for recorded, buckets in found), found


def without_memory(rank: int, world_size: int) -> str:
    """The buckets do not fit in what the process may have."""
    module = nn.Linear(1 << 12, 1 << 13)  # 128 MiB
    dist.all_reduce(torch.ones(1 << 16))
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    room = pages * resource.getpagesize() + (64 << 20)
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (room, hard))
    try:
        with pytest.raises(pycomm.errors.OutOfMemoryError) as caught:
            wrap(module, init_sync=False, broadcast_buffers=False)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    return caught.value.code


def test_no_memory_for_buckets_is_an_error_of_its_own() -> None:
    assert run_ranks(1, without_memory, timeout_s=60, preload=TORCH_DDP).values() == [
        "OUT_OF_MEMORY"
    ]
