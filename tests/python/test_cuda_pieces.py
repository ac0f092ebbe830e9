"""Large CUDA tensors through the host: copies and network at once, with a device of host memory."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from fake_cuda_device import Device
from ranks import run_ranks

import pycomm

# The first test compiles the library: some ten seconds, minutes on a busy machine.
pytestmark = pytest.mark.timeout(600)

NUMEL = 2_300_000  # nine pieces


def _group(size: int, transport: str, wire: str = "fp32") -> dist.ProcessGroup:
    options = pycomm.Options(transport=transport, wire_dtype=wire)  # type: ignore[arg-type]
    group = dist.new_group(list(range(size)), pg_options=options)
    assert isinstance(group, dist.ProcessGroup)
    return group


def _values(rank: int, numel: int = NUMEL) -> np.ndarray[Any, Any]:
    return np.random.default_rng(rank).standard_normal(numel).astype("float32")


def _same_as_cpu(rank: int, size: int, library: str, transport: str) -> dict[str, bool]:
    device = Device(Path(library))
    group = _group(size, transport)
    part = NUMEL // size
    same: dict[str, bool] = {}

    def compare(name: str, run: Any, *arrays: np.ndarray[Any, Any]) -> None:
        """``run`` on the CPU, on the device, and with rank 0's tensors on the CPU."""
        expected = [array.copy() for array in arrays]
        run(*(torch.from_numpy(array) for array in expected))
        for where, on_device in (("all", True), ("mixed", rank != 0)):
            own = [array.copy() for array in arrays]
            make = device.tensor if on_device else torch.from_numpy
            run(*(make(array) for array in own))
            device.synchronize()
            same[f"{name} {where}"] = all(
                bool(np.array_equal(a, b)) for a, b in zip(own, expected, strict=True)
            )

    average = dist.ReduceOp.AVG
    compare("all_reduce", lambda t: dist.all_reduce(t, average, group=group), _values(rank))
    compare("broadcast", lambda t: dist.broadcast(t, src=1, group=group), _values(rank))
    compare(
        "all_gather",
        lambda out, own: dist.all_gather_into_tensor(out, own, group=group),
        np.zeros(part * size, "float32"),
        _values(rank, part),
    )
    compare(
        "reduce_scatter",
        lambda out, own: dist.reduce_scatter_tensor(out, own, group=group),
        np.zeros(part, "float32"),
        _values(rank, part * size),
    )
    # Dropped at once: the memory stays, and the next operations are in order behind it.
    dropped, kept = _values(rank), _values(rank)
    dist.all_reduce(device.tensor(dropped), group=group, async_op=True)
    dist.all_reduce(device.tensor(kept), group=group)
    device.synchronize()
    same["dropped"] = bool(np.array_equal(dropped, kept))
    dist.destroy_process_group(group)
    return same


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_pieces_have_the_bits_of_cpu_tensors(fake_cuda: Path, transport: str) -> None:
    for same in run_ranks(3, _same_as_cpu, args=(str(fake_cuda), transport)).values():
        assert all(same.values()), same


def _begins_early(rank: int, size: int, library: str, transport: str) -> tuple[bool, bool, bool]:
    device = Device(Path(library))
    group = _group(size, transport)
    array = _values(rank)
    before = array.copy()
    device.library.fake_hold_copies(7)  # of nine on their way to the host
    work = dist.all_reduce(device.tensor(array), group=group, async_op=True)
    deadline = time.monotonic() + 60
    while np.array_equal(array, before) and time.monotonic() < deadline:
        time.sleep(0.02)
    arrived = not np.array_equal(array, before)
    ended = work.is_completed()
    device.library.fake_let_go()
    work.wait()
    device.synchronize()
    right = np.allclose(array, sum(_values(r) for r in range(size)), rtol=0, atol=1e-5)
    dist.destroy_process_group(group)
    return arrived, ended, bool(right)


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_a_result_begins_to_come_back_before_all_input_has_left(
    fake_cuda: Path, transport: str
) -> None:
    for arrived, ended, right in run_ranks(
        2, _begins_early, args=(str(fake_cuda), transport)
    ).values():
        assert arrived, "the first part of the result waited for the last part of the input"
        assert not ended
        assert right
