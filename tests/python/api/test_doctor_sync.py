"""Stage 3 of the doctor: how seconds of a sync become a prediction."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist
from ranks import TORCH_DDP, run_ranks

from pycomm.doctor import sync
from pycomm.doctor.sync import Sync
from pycomm.report import Bucket, Step


def step_of(*buckets: tuple[float, float]) -> Step:
    """Buckets as (launched, reduced)."""
    made = [Bucket(4, 4, 0.0, launched, reduced) for launched, reduced in buckets]
    return Step(backward_s=1.0, ended_s=9.0, buckets=tuple(made))


def test_the_sync_of_a_step_is_the_time_with_a_bucket_on_its_way() -> None:
    assert step_of((1.0, 3.0)).sync_s == 2.0
    assert step_of((1.0, 3.0), (2.0, 4.0), (2.5, 3.5)).sync_s == 3.0  # they overlap
    assert step_of((5.0, 6.0), (1.0, 3.0)).sync_s == 3.0  # backward had no bucket in between
    assert step_of().sync_s == 0.0


def test_a_prediction_has_a_part_that_every_sync_pays() -> None:
    one = Sync(wire="fp32", busy=False, seconds_per_parameter=1e-8, seconds_fixed=0.002)
    assert one.of(1e6) == pytest.approx(0.012)
    assert Sync(wire="fp32", busy=False, seconds_per_parameter=1e-8).of(1e6) == pytest.approx(0.01)


@pytest.mark.parametrize("fixed_s", [0.0, 0.004])
def test_two_sizes_tell_the_parts_of_a_sync(
    monkeypatch: pytest.MonkeyPatch, fixed_s: float
) -> None:
    per_part_s = 2e-3
    monkeypatch.setattr(sync, "_syncs", lambda parts, wire, count: fixed_s + per_part_s * parts)
    found = sync._time("int8", busy=True)
    assert (found.wire, found.busy) == ("int8", True)
    assert found.seconds_fixed == pytest.approx(fixed_s)
    assert found.of(62.5e6) == pytest.approx(fixed_s + per_part_s * 62.5e6 / sync._PART_NUMEL)


def test_a_slow_network_is_measured_with_fewer_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def syncs(parts: int, wire: str, count: int) -> float:
        asked.append(parts * count)
        return 0.8 * parts  # 10 Mbit/s

    monkeypatch.setattr(sync, "_syncs", syncs)
    found = sync._time("fp32", busy=False)
    assert sum(asked) < 12
    assert found.seconds_per_parameter == pytest.approx(0.8 / sync._PART_NUMEL)


def measured(rank: int, world_size: int, path: str) -> list[Sync]:
    store = dist.FileStore(path, world_size)
    found = sync.measure(store, rank, world_size)
    assert not dist.is_initialized()
    assert b"preflight" not in Path(path).read_bytes()  # the doctor has compared the hosts
    return found


@pytest.mark.nightly
@pytest.mark.needs_native
def test_ranks_measure_each_wire_with_idle_and_with_busy_cores(tmp_path: object) -> None:
    results = run_ranks(
        2,
        measured,
        args=(f"{tmp_path}/store",),
        init="none",
        env={"PYCOMM_PREFLIGHT": "1"},
        preload=TORCH_DDP,
    )
    first, second = results.values()
    assert first == second  # of the slowest rank
    assert [(one.wire, one.busy) for one in first] == [
        (wire, busy) for busy in (False, True) for wire in sync.WIRES
    ]
    assert all(0 < one.of(1e6) < 10 for one in first)
