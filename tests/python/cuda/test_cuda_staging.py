"""CUDA tensors over TCP, with a strict device that is no GPU: the copies, their order, errors.

Nothing but events orders its streams, and which of them runs next is drawn from a seed.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rings
import torch
import torch.distributed as dist
from fake_cuda_device import Device
from ranks import run_ranks
from time_bound import assert_within

import pycomm
from pycomm import errors
from pycomm._group.creation import native_backend

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))
import native  # of tools, whose path fake_cuda_device adds
from cuda_table import CudaError, CudaTable

# The first test compiles the library: some ten seconds, minutes on a busy machine.
pytestmark = [pytest.mark.ci, pytest.mark.timeout(600)]


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

    # Dropped without wait(): record_stream keeps the memory until the side stream has finished.
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
    tensor = device.tensor(array)
    device.library.fake_begin_capture()
    with pytest.raises(errors.UnsupportedError) as capture:
        dist.all_reduce(tensor, group=group)
    assert device.library.fake_end_capture() == 1, "the capture is broken"
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


def lists_on_two_devices(group: dist.ProcessGroup, on_device: Callable[[], torch.Tensor]) -> int:
    """Refusals of lists with a CPU tensor, first or last, and a CUDA tensor of four elements."""
    ours = native_backend(group)
    refused = 0
    for cpu_first in (True, False):
        for part in (torch.ones(4), on_device()):
            mixed = [torch.ones(4), on_device()][:: 1 if cpu_first else -1]
            alike = [part.clone() if part.is_cpu else on_device() for _ in range(2)]
            calls: list[Callable[[], Any]] = [
                lambda mixed=mixed, part=part: ours.allgather([mixed], [part]),
                lambda mixed=mixed, part=part: ours.reduce_scatter([part], [mixed]),
                lambda mixed=mixed, alike=alike: ours.alltoall(alike, mixed),
                lambda mixed=mixed, alike=alike: ours.alltoall(mixed, alike),
            ]
            if group.rank() == 0:  # only the root has a list
                calls.append(lambda mixed=mixed, part=part: ours.gather([mixed], [part]))
                calls.append(lambda mixed=mixed, part=part: ours.scatter([part], [mixed]))
            for call in calls:
                with pytest.raises(errors.InvalidArgumentError, match=r"are on c.* and on c.*move"):
                    call()
                refused += 1
    return refused


def _on_two_devices(rank: int, size: int, library: str) -> int:
    device = Device(Path(library))
    group = dist.new_group(list(range(size)))
    return lists_on_two_devices(group, lambda: device.tensor(np.ones(4, "float32")))


def test_a_list_with_tensors_on_two_devices_is_refused(fake_cuda: Path) -> None:
    assert run_ranks(2, _on_two_devices, args=(str(fake_cuda),)).values() == [24, 16]


def _without_library(rank: int, size: int, library: str, missing: str) -> str:
    device = Device(Path(library))
    from pycomm._native import loader

    loader.CUDA_LIBRARY = Path(missing)
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


def test_a_library_of_another_build_is_refused_with_both_versions(
    fake_cuda: Path, tmp_path: Path
) -> None:
    old = tmp_path / "libpycomm_cuda.so"
    source = tmp_path / "old.cc"
    source.write_text(
        "static unsigned table[50] = {5, 200};\n"
        'extern "C" unsigned* pycomm_cuda_table() { return table; }\n'
    )
    command = [*native.compiler(), "-shared", "-fPIC", "-o", str(old), str(source)]
    subprocess.run(command, check=True, timeout=60)
    for text in run_ranks(2, _without_library, args=(str(fake_cuda), str(old))).values():
        assert f"{old}, which is of another build" in text
        assert "version 5, this extension's 7" in text
        assert "PYCOMM_BUILD_CUDA=1" in text


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
        assert "TIMEOUT" in text and "timed out" in text
        assert "the tensor of rank 1" in text and "has not left its device" in text


def _held_and_not(rank: int, size: int, library: str) -> list[float]:
    device = Device(Path(library))
    group = dist.new_group(list(range(size)))
    dist.barrier()  # of the default group: both have made the other one
    arrays = [np.full(10, 1.0 + k if rank == 0 else -1.0, "float32") for k in range(3)]
    tensors = [torch.from_numpy(arrays[0]), device.tensor(arrays[1]), torch.from_numpy(arrays[2])]
    device.library.fake_hold(0)
    call = dist.isend if rank == 0 else dist.irecv
    # Each rank's tensor on the device is between two on the CPU, all under one tag.
    works = [call(tensor, 1 - rank, group=group, tag=5) for tensor in tensors]
    works[0].wait()
    dist.barrier()
    time.sleep(0.1)
    device.library.fake_let_go()
    for work in works[1:]:
        work.wait()
    device.synchronize()
    dist.destroy_process_group(group)
    return [float(array[-1]) for array in arrays]


def test_a_message_of_the_cpu_does_not_overtake_one_of_the_device(fake_cuda: Path) -> None:
    for received in run_ranks(2, _held_and_not, args=(str(fake_cuda),)).values():
        assert received == [1.0, 2.0, 3.0]


def _kernels(rank: int, size: int, library: str) -> None:
    table = CudaTable(Path(library))
    device = Device(Path(library))
    grads = [np.random.default_rng(i).standard_normal(5 + i).astype("float32") for i in range(300)]
    where = [(device.memory(grad), grad.size) for grad in grads]
    flat = np.concatenate(grads)
    half = np.empty(flat.size, "float16")
    none = np.zeros(2, "uint64")
    bucket, stats = device.memory(half), device.memory(none)
    table.pack(where, "float32", "float16", bucket, factor=2.0, stats=stats)
    packed = device.read(bucket, half)
    np.testing.assert_array_equal(packed, (flat * np.float32(2)).astype("float16"))
    overflows, largest = device.read(stats, none)
    assert overflows == 0
    assert int(largest) == int(np.asarray(np.abs(flat).max()).view("uint32"))
    table.unpack(where, "float32", "float16", bucket, factor=0.5)
    back = [device.read(ptr, grad) for (ptr, _), grad in zip(where, grads, strict=True)]
    np.testing.assert_array_equal(np.concatenate(back), packed.astype("float32") * np.float32(0.5))
    rows = [np.full(1000, value, "float16") for value in (2048, 1, 1)]
    sources = [device.memory(row) for row in rows]
    table.reduce("float16", "sum", sources[0], sources, 1000)
    assert (device.read(sources[0], rows[0]) == 2050).all(), "added in fp32, rounded once"
    values, codes = device.memory(flat), device.memory(np.zeros(2 * flat.size, "uint8"))
    table.encode("bf16", values, flat.size, codes)
    table.decode("bf16", codes, flat.size, values)
    rounded = torch.from_numpy(flat).bfloat16().float().numpy()
    np.testing.assert_array_equal(device.read(values, flat), rounded)
    with pytest.raises(CudaError, match=r"no kernel that packs int32"):
        table.pack([(sources[0], 4)], "int32", "float16", bucket)
    with pytest.raises(
        CudaError, match=r"pack kernel failed.*not memory that this device gave out"
    ):
        table.pack([(half.ctypes.data, 4)], "float32", "float16", bucket)


def test_kernels_are_called_through_the_c_interface(fake_cuda: Path) -> None:
    run_ranks(1, _kernels, args=(str(fake_cuda),)).check()


def _touches(rank: int, size: int, library: str) -> None:
    device = Device(Path(library))
    ptr = device.memory(np.ones(4, "float32"))
    ctypes.string_at(ptr, 4)


def test_the_fake_device_is_strict(fake_cuda: Path) -> None:
    (touched,) = run_ranks(1, _touches, args=(str(fake_cuda),), check=False)
    assert touched.exit_code == -signal.SIGSEGV
    assert "the host has touched device memory" in touched.stderr


def _other_device(rank: int, size: int, library: str, cuda_mode: str, used: bool) -> list[Any]:
    device = Device(Path(library), nccl=cuda_mode == "nccl")
    if used:
        device.tensor(np.ones(1))
    options = pycomm.Options(cuda_mode=cuda_mode)  # type: ignore[arg-type]
    group = dist.new_group(list(range(size)), pg_options=options)
    array = np.ones(500_000, "float32")
    tensor = device.tensor(array, 1)
    before = device.library.fake_has_context(0)
    told = [device.library.fake_current_device()]
    work = dist.all_reduce(tensor, group=group, async_op=True)
    told.append(device.library.fake_current_device())
    work.wait()
    told.append(device.library.fake_current_device())
    device.synchronize(1)
    del work
    dist.destroy_process_group(group)
    del group
    gc.collect()
    told.append(device.library.fake_current_device())
    return [told, float(array[-1]), before, device.library.fake_has_context(0)]


@pytest.mark.parametrize("used", [True, False], ids=["used", "unused"])
@pytest.mark.parametrize("cuda_mode", rings.first_of(["host", "nccl"]))
def test_the_callers_current_device_stays(fake_cuda: Path, cuda_mode: str, used: bool) -> None:
    args = (str(fake_cuda), cuda_mode, used)
    for told, value, before, after in run_ranks(2, _other_device, args=args).values():
        assert told == [0] * 4
        assert value == 2.0
        assert (before, after) == (used, used), "device 0 was used, which takes some of its memory"


def _while_captured(rank: int, size: int, library: str, cuda_mode: str) -> tuple[int, list[float]]:
    device = Device(Path(library), nccl=cuda_mode == "nccl")
    options = pycomm.Options(cuda_mode=cuda_mode)  # type: ignore[arg-type]
    group = dist.new_group(list(range(size)), pg_options=options)
    arrays = [np.ones(numel, "float32") for numel in (1000, 3_000_000, 1000)]
    tensors = [device.tensor(array) for array in arrays]
    dist.all_reduce(tensors[0], group=group)
    device.synchronize()
    captures, issued, ended = (threading.Event() for _ in range(3))
    whole = []

    def capture() -> None:
        device.library.fake_begin_capture()
        captures.set()
        issued.wait(60)
        ended.wait(0.3)  # what polls would have broken the capture long since
        whole.append(device.library.fake_end_capture())

    thread = threading.Thread(target=capture)
    device.library.fake_hold(0)  # what follows is under way until it is let go
    pending = dist.all_reduce(tensors[0], group=group, async_op=True)
    thread.start()
    assert captures.wait(60)
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors[1:]]
    issued.set()
    thread.join()
    device.library.fake_let_go()
    for work in (pending, *works):
        work.wait()
    device.synchronize()
    dist.destroy_process_group(group)
    return whole[0], [float(array[-1]) for array in arrays]


@pytest.mark.parametrize("cuda_mode", rings.first_of(["host", "nccl"]))
def test_another_threads_graph_capture_stays_whole(fake_cuda: Path, cuda_mode: str) -> None:
    args = (str(fake_cuda), cuda_mode)
    for whole, values in run_ranks(2, _while_captured, args=args).values():
        assert whole == 1, "an event was queried, or memory allocated, during a capture"
        assert values == [4.0, 2.0, 2.0]


def _polls(rank: int, size: int, library: str, cuda_mode: str) -> tuple[int, float]:
    device = Device(Path(library), nccl=cuda_mode == "nccl")
    options = pycomm.Options(cuda_mode=cuda_mode)  # type: ignore[arg-type]
    group = dist.new_group(list(range(size)), pg_options=options)
    array = np.ones(1000, "float32")
    tensor = device.tensor(array)
    dist.all_reduce(tensor, group=group)
    device.synchronize()
    before = device.library.fake_queries()
    device.library.fake_hold(0)
    work = dist.all_reduce(tensor, group=group, async_op=True)
    dist.barrier()  # of another group: the device is awaited meanwhile
    time.sleep(0.2)
    asked = device.library.fake_queries() - before
    device.library.fake_let_go()
    work.wait()
    device.synchronize()
    dist.destroy_process_group(group)
    return asked, float(array[0])


@pytest.mark.parametrize("cuda_mode", rings.first_of(["host", "nccl"]))
def test_a_busy_device_is_not_polled(fake_cuda: Path, cuda_mode: str) -> None:
    args = (str(fake_cuda), cuda_mode)
    for asked, value in run_ranks(2, _polls, args=args).values():
        assert asked == 0
        assert value == 4.0


def _broken(rank: int, size: int, library: str) -> tuple[str, float]:
    device = Device(Path(library))
    group = dist.new_group(list(range(size)))
    tensor = device.tensor(np.ones(1000, "float32"))
    dist.all_reduce(tensor, group=group)
    dist.barrier()
    device.library.fake_hold(0)
    work = dist.all_reduce(tensor, group=group, async_op=True)
    if rank == 1:
        device.library.fake_break_down()
    began = time.monotonic()
    with pytest.raises(errors.PycommError) as broken:
        work.wait()
    took_s = time.monotonic() - began
    device.library.fake_let_go()
    return str(broken.value), took_s


@pytest.mark.time_bound
def test_a_device_that_breaks_fails_the_group_at_once(fake_cuda: Path) -> None:
    ended = run_ranks(2, _broken, args=(str(fake_cuda),)).values()
    for text, _ in ended:
        assert "cudaErrorLaunchFailure" in text
        assert "peer=1" in text
    assert_within(max(took_s for _, took_s in ended), 10)


def _breaks_elsewhere(rank: int, size: int, library: str, when: str) -> list[str]:
    device = Device(Path(library))
    group = dist.new_group(list(range(size)))
    array = np.ones(1000, "float32")
    dist.all_reduce(device.tensor(array, 1), group=group)
    store = dist.distributed_c10d._get_default_store()
    if when == "before the end" and rank == 1:
        store.wait(["rank 0's device is broken"], timedelta(seconds=30))
    work = dist.all_reduce(device.tensor(array, 1), group=group, async_op=True)
    assert device.library.fake_current_device() == 0
    if when != "before the end":
        work.get_future().wait()
    elif rank == 0:
        time.sleep(0.3)  # until the input has left the device: if it has not, that is what fails
    told = []
    if when != "before the end" or rank == 0:
        device.library.fake_break_down()  # torch cannot make it the current device any more
        store.set("rank 0's device is broken", "")
        for _ in range(0 if when == "dropped" else 2):
            with pytest.raises(errors.PycommError) as broken:
                work.wait()
            told.append(str(broken.value))
    else:
        with contextlib.suppress(errors.PycommError):
            work.wait()
    del work
    dist.destroy_process_group(group)
    del group
    gc.collect()
    return told


def _breaks_on_a_part(rank: int, size: int, library: str) -> list[str]:
    """Rank 0's device is broken only while the sums of a coalescing manager go back to it."""
    device = Device(Path(library))
    group = dist.new_group(list(range(size)))
    tensors = [device.tensor(np.full(1000, 1.0 + rank, "float32")) for _ in range(3)]
    dist.broadcast(tensors[0], src=1, group=group)
    device.synchronize()
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["rank 0's device is broken"], timedelta(seconds=30))
    with dist._coalescing_manager(group, torch.device("cuda"), async_ops=True) as manager:
        parts = [dist.broadcast(each, src=1, group=group, async_op=True) for each in tensors[1:]]
    if rank == 0:
        device.library.fake_break_down()
        store.set("rank 0's device is broken", "")
        give_up_s = time.monotonic() + 30
        while not all(part.is_completed() for part in parts):
            assert time.monotonic() < give_up_s
            time.sleep(0.01)
        device.library.fake_mend()
    (work,) = manager.works
    told = []
    for wait in (work.wait, work.get_future().wait):
        try:
            wait()
        except Exception as error:
            told.append(str(error))
    assert work.is_success() is not bool(told)
    dist.barrier()
    return told


def test_a_coalesced_copy_that_failed_is_the_error_of_the_whole(fake_cuda: Path) -> None:
    zero, one = run_ranks(2, _breaks_on_a_part, args=(str(fake_cuda),)).values()
    assert len(zero) == 2 and all("cudaErrorLaunchFailure" in text for text in zero)
    assert one == []


def _breaks_before_the_last_drop(rank: int, size: int, library: str) -> None:
    device = Device(Path(library))
    group = dist.new_group(list(range(size)))
    tensor = device.tensor(np.ones(1000, "float32"), 1)
    work = dist.all_reduce(tensor, group=group, async_op=True)
    in_callback, may_go = threading.Event(), threading.Event()

    def callback(future: torch.futures.Future) -> None:
        in_callback.set()
        assert may_go.wait(timeout=30)

    chained = work.get_future().then(callback)
    assert in_callback.wait(timeout=30)
    del work
    device.library.fake_break_down()
    may_go.set()  # a thread of the pool, whose current device is another, drops the last reference
    del chained
    dist.destroy_process_group(group)
    del group
    gc.collect()


def test_a_future_whose_device_is_broken_ends_no_process(fake_cuda: Path) -> None:
    run_ranks(2, _breaks_before_the_last_drop, args=(str(fake_cuda),))


@pytest.mark.parametrize("when", ["before the end", "after the end", "dropped"])
def test_a_device_that_torch_cannot_switch_to_ends_no_process(fake_cuda: Path, when: str) -> None:
    results = run_ranks(2, _breaks_elsewhere, args=(str(fake_cuda), when))
    assert len(results[0].value) == (0 if when == "dropped" else 2)
    for told in results.values():
        for text in told:
            assert "SYSTEM_ERROR" in text
            assert "the device is broken" in text or "cudaErrorLaunchFailure" in text


def _old_device(rank: int, size: int, library: str) -> str:
    device = Device(Path(library))
    device.library.fake_set_capability(7)
    group = dist.new_group(list(range(size)))
    with pytest.raises(errors.UnsupportedError) as refused:
        dist.all_reduce(device.tensor(np.ones(4, "float32")), group=group)
    on_cpu = torch.ones(2)
    dist.all_reduce(on_cpu, group=group)
    assert on_cpu.tolist() == [size, size]
    return str(refused.value)


def test_a_device_without_kernels_is_refused_before_anything_moves(fake_cuda: Path) -> None:
    for text in run_ranks(2, _old_device, args=(str(fake_cuda),)).values():
        assert "cuda:0 has compute capability 7.5" in text
        assert "tensor.cpu()" in text


def _without_memory(rank: int, size: int, library: str) -> list[str]:
    device = Device(Path(library))
    group = dist.new_group(list(range(size)))
    store = dist.distributed_c10d._get_default_store()
    tensor = device.tensor(np.ones(4, "float32"))
    if rank == 1:  # rank 0's cannot end before
        store.wait(["rank 0 has no memory"], timedelta(seconds=30))
        dist.all_reduce(tensor, group=group)
        return []
    work = dist.all_reduce(tensor, group=group, async_op=True)
    device.library.fake_run_out_of_memory(1)
    store.set("rank 0 has no memory", "")
    with pytest.raises(errors.PycommError) as failed:
        work.wait()
    device.library.fake_run_out_of_memory(0)
    return [str(failed.value), failed.value.record["code"]]


def test_a_host_without_memory_is_no_broken_device(fake_cuda: Path) -> None:
    text, code = run_ranks(2, _without_memory, args=(str(fake_cuda),))[0].value
    assert code == "OUT_OF_MEMORY"
    assert "No memory left" in text
    assert "nvidia-smi" not in text
