"""CUDA tensors over TCP, with a device that is host memory: the copies, their order, errors.

The device's copies are two milliseconds late and nothing but events orders its streams, so whatever
forgets to wait reads old bytes.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from fake_cuda_device import Device
from ranks import run_ranks

from pycomm import errors

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "benchmarks"))
from cuda_table import CudaError, CudaTable

# The first test compiles the library: some ten seconds, minutes on a busy machine.
pytestmark = pytest.mark.timeout(600)


def _inputs(size: int, numel: int, dtype: str = "float32") -> list[np.ndarray[Any, Any]]:
    return [
        np.random.default_rng(rank).standard_normal(numel).astype(dtype) for rank in range(size)
    ]


def _collectives(rank: int, size: int, library: str) -> dict[str, Any]:
    device = Device(Path(library))
    group = dist.new_group(list(range(size)))
    results: dict[str, Any] = {}

    def ended(name: str, array: np.ndarray[Any, Any]) -> None:
        device.synchronize()
        results[name] = array.copy()

    for numel in (1, 1000, 300_000):
        array = _inputs(size, numel)[rank]
        dist.all_reduce(device.tensor(array), group=group)
        ended(f"all_reduce {numel}", array)

    array = _inputs(size, 1000)[rank]
    dist.broadcast(device.tensor(array), src=1, group=group)
    ended("broadcast", array)

    array = _inputs(size, 1000)[rank]
    dist.reduce(device.tensor(array), dst=1, group=group)
    ended("reduce", array)

    out = np.zeros(size * 100, "float32")
    source = device.tensor(_inputs(size, 100)[rank])
    dist.all_gather_into_tensor(device.tensor(out), source, group=group)
    ended("all_gather", out)

    out = np.zeros(100, "float32")
    source = device.tensor(_inputs(size, size * 100)[rank])
    dist.reduce_scatter_tensor(device.tensor(out), source, group=group)
    ended("reduce_scatter", out)

    out = np.zeros(size * 10, "int64")
    source = device.tensor(np.arange(size * 10, dtype="int64") + 1000 * rank)
    dist.all_to_all_single(device.tensor(out), source, group=group)
    ended("all_to_all", out)

    # On their way at once, with one on the CPU between them, waited for in another order.
    arrays = [_inputs(size, 5000 + i)[rank] for i in range(4)]
    works = [
        dist.all_reduce(device.tensor(array), group=group, async_op=True) for array in arrays[:2]
    ]
    on_cpu = torch.ones(7) * rank
    works.append(dist.all_reduce(on_cpu, group=group, async_op=True))
    works += [
        dist.all_reduce(device.tensor(array), group=group, async_op=True) for array in arrays[2:]
    ]
    for work in reversed(works):
        work.wait()
    device.synchronize()
    results["several"] = [array.copy() for array in arrays]
    results["on_cpu"] = on_cpu.tolist()

    # The message goes from a device to a CPU tensor.
    if rank == 0:
        dist.send(device.tensor(np.arange(5, dtype="float32")), dst=1, group=group)
    elif rank == 1:
        received = torch.zeros(5)
        dist.recv(received, src=0, group=group)
        results["received"] = received.tolist()

    # A future's callback is behind the copies of its own streams.
    array = _inputs(size, 2000)[rank]
    future = dist.all_reduce(device.tensor(array), group=group, async_op=True).get_future()
    future.wait()
    ended("future", array)

    # Dropped without wait(): the memory is told to stay until the side stream is through.
    array = _inputs(size, 2000)[rank]
    dist.all_reduce(device.tensor(array), group=group, async_op=True)
    dist.barrier(group=group)
    results["kept"] = device.library.fake_kept()
    return results


def test_collectives_of_cuda_tensors_have_the_numbers(fake_cuda: Path) -> None:
    size = 3
    ranks = run_ranks(size, _collectives, args=(str(fake_cuda),)).values()
    for rank, got in enumerate(ranks):
        for numel in (1, 1000, 300_000):
            exact = np.sum([each.astype("float64") for each in _inputs(size, numel)], axis=0)
            np.testing.assert_allclose(got[f"all_reduce {numel}"], exact, rtol=0, atol=3e-6)
            np.testing.assert_array_equal(
                got[f"all_reduce {numel}"], ranks[0][f"all_reduce {numel}"]
            )
        np.testing.assert_array_equal(got["broadcast"], _inputs(size, 1000)[1])
        if rank == 1:
            exact = np.sum([each.astype("float64") for each in _inputs(size, 1000)], axis=0)
            np.testing.assert_allclose(got["reduce"], exact, rtol=0, atol=3e-6)
        np.testing.assert_array_equal(got["all_gather"], np.concatenate(_inputs(size, 100)))
        exact = np.sum([each.astype("float64") for each in _inputs(size, size * 100)], axis=0)
        own = exact[rank * 100 : (rank + 1) * 100]
        np.testing.assert_allclose(got["reduce_scatter"], own, rtol=0, atol=3e-6)
        expected = np.concatenate(
            [np.arange(rank * 10, rank * 10 + 10) + 1000 * r for r in range(size)]
        )
        np.testing.assert_array_equal(got["all_to_all"], expected)
        for i, array in enumerate(got["several"]):
            exact = np.sum([each.astype("float64") for each in _inputs(size, 5000 + i)], axis=0)
            np.testing.assert_allclose(array, exact, rtol=0, atol=3e-6)
        assert got["on_cpu"] == [3.0] * 7
        exact = np.sum([each.astype("float64") for each in _inputs(size, 2000)], axis=0)
        np.testing.assert_allclose(got["future"], exact, rtol=0, atol=3e-6)
        assert got["kept"] > 0
    assert ranks[1]["received"] == [0.0, 1.0, 2.0, 3.0, 4.0]


def _mixed(rank: int, size: int, library: str) -> list[float]:
    device = Device(Path(library))
    group = dist.new_group(list(range(size)))
    array = np.arange(50_000, dtype="float32") * (rank + 1)
    tensor = torch.from_numpy(array) if rank == 0 else device.tensor(array)
    dist.all_reduce(tensor, group=group)
    device.synchronize()
    return [float(array[1]), float(array[-1])]


def test_ranks_with_and_without_a_device_meet_in_one_collective(fake_cuda: Path) -> None:
    values = run_ranks(3, _mixed, args=(str(fake_cuda),)).values()
    assert values == [[6.0, 6.0 * 49_999]] * 3


def _refusals(rank: int, size: int, library: str) -> list[str]:
    device = Device(Path(library))
    group = dist.new_group(list(range(size)))
    array = np.ones(4, "float32")
    told = []
    device.library.fake_capture(1)
    with pytest.raises(errors.UnsupportedError) as capture:
        dist.all_reduce(device.tensor(array), group=group)
    device.library.fake_capture(0)
    told.append(str(capture.value))
    with pytest.raises(errors.InvalidArgumentError) as mixed:
        dist.all_gather_into_tensor(
            device.tensor(np.zeros(4 * size, "float32")), device.tensor(array, 1), group=group
        )
    told.append(str(mixed.value))
    dist.all_reduce(device.tensor(array), group=group)  # nothing of the above has moved a byte
    device.synchronize()
    assert array[0] == size
    return told


def test_what_cannot_be_done_is_said_before_anything_moves(fake_cuda: Path) -> None:
    for capture, mixed in run_ranks(2, _refusals, args=(str(fake_cuda),)).values():
        assert "CUDA graph" in capture
        assert "cuda:0" in mixed and "cuda:1" in mixed


def _without_library(rank: int, size: int, library: str, missing: str) -> str:
    device = Device(Path(library))
    from pycomm import _extension

    _extension.CUDA_LIBRARY = Path(missing)
    group = dist.new_group(list(range(size)))
    with pytest.raises(errors.UnsupportedError) as error:
        dist.all_reduce(device.tensor(np.ones(4, "float32")), group=group)
    tensor = torch.ones(2)
    dist.all_reduce(tensor, group=group)
    assert tensor.tolist() == [size, size]
    return str(error.value)


def test_a_missing_library_is_named_with_what_to_do(fake_cuda: Path, tmp_path: Path) -> None:
    missing = str(tmp_path / "libpycomm_cuda.so")
    for text in run_ranks(2, _without_library, args=(str(fake_cuda), missing)).values():
        assert missing in text
        assert "PYCOMM_BUILD_CUDA=1" in text
        assert "tensor.cpu()" in text


def _peer_leaves(rank: int, size: int, library: str) -> str:
    device = Device(Path(library))
    group = dist.new_group(list(range(size)))
    dist.barrier(group=group)
    if rank == 1:
        dist.destroy_process_group(group)
        return ""
    with pytest.raises(errors.PycommError) as error:
        dist.all_reduce(device.tensor(np.ones(4, "float32")), group=group)
    return str(error.value)


def test_a_failure_of_the_group_ends_the_wait(fake_cuda: Path) -> None:
    text = run_ranks(2, _peer_leaves, args=(str(fake_cuda),)).values()[0]
    assert "PEER_LEFT" in text


def _stuck_stream(rank: int, size: int, library: str) -> str:
    device = Device(Path(library))
    group = dist.new_group(list(range(size)))
    dist.barrier()  # of the default group: both have made the other one
    options = dist.AllreduceOptions()
    if rank == 1:
        device.library.fake_hold(0)
        options.timeout = timedelta(seconds=1)
    with pytest.raises(errors.PycommError) as late:
        group.allreduce([device.tensor(np.ones(4, "float32"))], options).wait()
    device.library.fake_let_go()
    dist.destroy_process_group(group)
    return str(late.value)


def test_a_tensor_that_never_leaves_its_device_ends_at_the_deadline(fake_cuda: Path) -> None:
    for text in run_ranks(2, _stuck_stream, args=(str(fake_cuda),)).values():
        assert "TIMEOUT" in text
        assert "the tensor of rank 1" in text and "has not left its device" in text


def test_kernels_are_called_through_the_c_interface(fake_cuda: Path) -> None:
    table = CudaTable(fake_cuda)
    grads = [np.random.default_rng(i).standard_normal(5 + i).astype("float32") for i in range(300)]
    where = [(grad.ctypes.data, grad.size) for grad in grads]
    flat = np.concatenate(grads)
    bucket = np.empty(flat.size, "float16")
    stats = np.zeros(2, "uint64")
    table.pack(where, "float32", "float16", bucket.ctypes.data, factor=2.0, stats=stats.ctypes.data)
    np.testing.assert_array_equal(bucket, (flat * np.float32(2)).astype("float16"))
    assert stats[0] == 0
    largest = np.abs(flat).max()
    assert int(stats[1]) == int(np.asarray(largest).view("uint32"))
    table.unpack(where, "float32", "float16", bucket.ctypes.data, factor=0.5)
    np.testing.assert_array_equal(np.concatenate(grads), bucket.astype("float32") * np.float32(0.5))
    sources = [np.full(1000, value, "float16") for value in (2048, 1, 1)]
    table.reduce(
        "float16", "sum", sources[0].ctypes.data, [each.ctypes.data for each in sources], 1000
    )
    assert (sources[0] == 2050).all(), "added in fp32, rounded once"
    with pytest.raises(CudaError, match=r"no kernel that packs int32"):
        table.pack([(1 << 20, 4)], "int32", "float16", 1 << 20)
