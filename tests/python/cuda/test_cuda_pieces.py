"""Large CUDA tensors through the host: copies and network at once, on a device that is no GPU."""

from __future__ import annotations

import ctypes
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
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]

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
        device.fetch()
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


def _encoded(rank: int, size: int, library: str, wire: str) -> dict[str, Any]:
    device = Device(Path(library))
    group = _group(size, "auto", wire)
    counted = device.library.fake_copied
    counted.restype = ctypes.c_long
    part = 300_001  # odd: blocks of bytes begin at odd places
    whole = _values(rank) * np.float32(1e-6)
    if rank == 0:
        whole[:4] = [3.4e38, np.inf, -np.inf, np.nan]  # the first becomes infinite as bf16
    told: dict[str, Any] = {}

    def overflows() -> int:
        return int(pycomm.codec_stats(group).overflows)

    for name, op in (("sum", dist.ReduceOp.SUM), ("average", dist.ReduceOp.AVG)):
        expected = whole.copy()
        before = overflows()
        dist.all_reduce(torch.from_numpy(expected), op, group=group)
        on_cpu = overflows() - before
        got = whole.copy()
        before, bytes_before = overflows(), counted()
        dist.all_reduce(device.tensor(got), op, group=group)
        device.synchronize()
        told[name] = np.array_equal(got.view("uint32"), expected.view("uint32"))
        told[f"{name} overflows"] = (overflows() - before, on_cpu)
        told[f"{name} bytes"] = (counted() - bytes_before) / (2 * whole.nbytes)
    # What rank 0 has on the CPU meets what the others have on devices.
    got = whole.copy()
    own = torch.from_numpy(got) if rank == 0 else device.tensor(got)
    dist.all_reduce(own, dist.ReduceOp.AVG, group=group)
    device.synchronize()
    told["mixed"] = np.array_equal(got.view("uint32"), expected.view("uint32"))
    source = _values(rank, part * size)
    expected, got = np.zeros(part, "float32"), np.zeros(part, "float32")
    dist.reduce_scatter_tensor(torch.from_numpy(expected), torch.from_numpy(source), group=group)
    dist.reduce_scatter_tensor(device.tensor(got), device.tensor(source), group=group)
    device.synchronize()
    told["reduce_scatter"] = np.array_equal(got, expected)
    # Left to the CPU: exact ones, and small ones.
    for numel, op in ((part, dist.ReduceOp.MAX), (100, dist.ReduceOp.SUM)):
        expected = _values(rank, numel)
        got = expected.copy()
        dist.all_reduce(torch.from_numpy(expected), op, group=group)
        dist.all_reduce(device.tensor(got), op, group=group)
        device.synchronize()
        told[f"{op} {numel}"] = np.array_equal(got, expected)
    dist.destroy_process_group(group)
    return told


@pytest.mark.parametrize(("wire", "share"), [("fp16", 0.51), ("bf16", 0.51), ("int8", 0.26)])
def test_encoded_bytes_cross_the_bus_and_have_the_bits_of_cpu_tensors(
    fake_cuda: Path, wire: str, share: float
) -> None:
    for told in run_ranks(2, _encoded, args=(str(fake_cuda), wire)).values():
        for name in ("sum", "average"):
            counted, expected = told.pop(f"{name} overflows")
            assert counted == expected
            assert told.pop(f"{name} bytes") < share
        assert all(told.values()), told
