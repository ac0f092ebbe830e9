"""CUDA tensors by NCCL, with a strict device that is no GPU and an NCCL that moves files.

The tests cover everything between torch's collectives and NCCL's functions: whether a group uses
NCCL, its calls, the order of streams, and that NCCL and the group fail together.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
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
from processes import thread_names
from ranks import mark, run_ranks, start_ranks
from time_bound import assert_within

import pycomm
from pycomm import errors
from pycomm._native import loader

# The first test compiles the library: some ten seconds, minutes on a busy machine.
pytestmark = [pytest.mark.ci, pytest.mark.timeout(600)]


def _group(size: int, cuda_mode: str = "auto", seconds: float = 60) -> dist.ProcessGroup:
    group = dist.new_group(
        list(range(size)),
        timeout=timedelta(seconds=seconds),
        pg_options=pycomm.Options(cuda_mode=cuda_mode),  # type: ignore[arg-type]
    )
    assert isinstance(group, dist.ProcessGroup)
    return group


def _values(rank: int, numel: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(rank).standard_normal(numel).astype("float32")


def _collectives(rank: int, size: int, library: str) -> dict[str, Any]:
    device = Device(Path(library), nccl=True)
    group = _group(size, "nccl")
    results: dict[str, Any] = {}

    def ended(name: str, array: np.ndarray[Any, Any]) -> None:
        device.synchronize()
        results[name] = array.copy()

    array = _values(rank, 30_000)
    dist.all_reduce(device.tensor(array), group=group)
    ended("all_reduce", array)
    array = _values(rank, 1000)
    dist.all_reduce(device.tensor(array), op=dist.ReduceOp.AVG, group=group)
    ended("average", array)
    array = _values(rank, 1000)
    dist.broadcast(device.tensor(array), src=1, group=group)
    ended("broadcast", array)
    array = _values(rank, 1000)
    dist.reduce(device.tensor(array), dst=1, group=group)
    ended("reduce", array)
    out = np.zeros(size * 100, "float32")
    source = device.tensor(_values(rank, 100))
    dist.all_gather_into_tensor(device.tensor(out), source, group=group)
    ended("all_gather", out)
    out = np.zeros(100, "float32")
    source = device.tensor(_values(rank, size * 100))
    dist.reduce_scatter_tensor(device.tensor(out), source, group=group)
    ended("reduce_scatter", out)
    # Rank r sends r + 1 rows to everyone.
    out = np.zeros(sum(range(1, size + 1)), "int64")
    source = device.tensor(np.full(size * (rank + 1), 1000 * rank, "int64"))
    dist.all_to_all_single(
        device.tensor(out),
        source,
        [peer + 1 for peer in range(size)],
        [rank + 1] * size,
        group=group,
    )
    ended("all_to_all", out)

    # CPU tensors of the same group go on as ever, between NCCL's.
    array = _values(rank, 500)
    work = dist.all_reduce(device.tensor(array), group=group, async_op=True)
    on_cpu = torch.full((3,), float(rank + 1))
    dist.all_reduce(on_cpu, group=group)
    results["on_cpu"] = on_cpu.tolist()
    work.wait()
    ended("beside", array)

    # A message has no NCCL: it goes through the host, and may end on the CPU.
    if rank == 0:
        dist.send(device.tensor(np.arange(5, dtype="float32")), dst=1, group=group)
    elif rank == 1:
        received = torch.zeros(5)
        dist.recv(received, src=0, group=group)
        results["received"] = received.tolist()

    array = _values(rank, 2000)
    future = dist.all_reduce(device.tensor(array), group=group, async_op=True).get_future()
    future.wait()
    ended("future", array)
    dist.destroy_process_group(group)
    return results


def test_collectives_by_nccl_have_the_numbers(fake_cuda: Path) -> None:
    size = 3
    ranks = run_ranks(size, _collectives, args=(str(fake_cuda),)).values()
    for rank, got in enumerate(ranks):
        for name, numel in (("all_reduce", 30_000), ("beside", 500), ("future", 2000)):
            exact = np.sum([_values(r, numel).astype("float64") for r in range(size)], axis=0)
            np.testing.assert_allclose(got[name], exact, rtol=0, atol=3e-6)
        exact = np.mean([_values(r, 1000).astype("float64") for r in range(size)], axis=0)
        np.testing.assert_allclose(got["average"], exact, rtol=0, atol=3e-6)
        np.testing.assert_array_equal(got["broadcast"], _values(1, 1000))
        if rank == 1:
            exact = np.sum([_values(r, 1000).astype("float64") for r in range(size)], axis=0)
            np.testing.assert_allclose(got["reduce"], exact, rtol=0, atol=3e-6)
        gathered = np.concatenate([_values(r, 100) for r in range(size)])
        np.testing.assert_array_equal(got["all_gather"], gathered)
        exact = np.sum([_values(r, size * 100).astype("float64") for r in range(size)], axis=0)
        own = exact[rank * 100 : (rank + 1) * 100]
        np.testing.assert_allclose(got["reduce_scatter"], own, rtol=0, atol=3e-6)
        expected = np.concatenate([np.full(r + 1, 1000 * r) for r in range(size)])
        np.testing.assert_array_equal(got["all_to_all"], expected)
        assert got["on_cpu"] == [6.0] * 3
    assert ranks[1]["received"] == [0.0, 1.0, 2.0, 3.0, 4.0]


def _wait_orders_only(rank: int, size: int, library: str) -> float:
    device = Device(Path(library), nccl=True)
    group = _group(size, "nccl")
    store = dist.distributed_c10d._get_default_store()
    array = np.ones(100, "float32")
    tensor = device.tensor(array)
    dist.all_reduce(tensor, group=group)
    if rank == 1:
        store.wait(["rank 0 has waited"], timedelta(seconds=60))
    dist.all_reduce(tensor, group=group, async_op=True).wait()
    if rank == 0:
        store.set("rank 0 has waited", "")
    device.synchronize()
    return float(array[0])


def test_wait_orders_streams_and_does_not_block(fake_cuda: Path) -> None:
    assert run_ranks(2, _wait_orders_only, args=(str(fake_cuda),)).values() == [4.0, 4.0]


def _begun_after_an_abort(rank: int, size: int, library: str) -> None:
    device = Device(Path(library), nccl=True)
    group = _group(size, "nccl")
    tensor = device.tensor(np.ones(100, "float32"))
    dist.all_reduce(tensor, group=group)
    dist.barrier()
    if rank == 0:
        backend = group._get_backend(torch.device("cuda"))
        backend._start_coalescing()
        collected = dist.all_reduce(tensor, group=group, async_op=True)
        backend.abort()
        future = collected.get_future()  # type: ignore[union-attr]
        backend._end_coalescing()
        for begin in (
            lambda: dist.all_reduce(tensor, group=group),
            lambda: dist.all_reduce_coalesced([tensor, tensor], group=group),
        ):
            with pytest.raises(errors.PycommError):
                begin()
        with pytest.raises(errors.PycommError, match="aborted"):
            future.wait()
    dist.barrier()


def test_nothing_is_launched_after_an_abort(fake_cuda: Path) -> None:
    """Nor in the milliseconds until the group has failed."""
    run_ranks(2, _begun_after_an_abort, args=(str(fake_cuda),))


def _shared(rank: int, size: int, library: str) -> tuple[float, str]:
    device = Device(Path(library), nccl=True)
    device.library.fake_set_uuid(b"the only one")
    array = np.ones(100, "float32")
    group = _group(size)
    dist.all_reduce(device.tensor(array), group=group)
    device.synchronize()
    group = _group(size, "nccl")
    with pytest.raises(errors.UnsupportedError) as refused:
        dist.all_reduce(device.tensor(array), group=group)
    return float(array[0]), str(refused.value)


def test_ranks_that_share_a_gpu_go_through_the_host(fake_cuda: Path) -> None:
    for value, text in run_ranks(2, _shared, args=(str(fake_cuda),)).values():
        assert value == 2.0
        assert "ranks 0 and 1 share a GPU" in text
        assert "cuda_mode='host'" in text


def _told_apart(rank: int, size: int, library: str) -> tuple[list[str], str]:
    device = Device(Path(library), nccl=True)
    device.library.fake_set_uuid(b"the only one")
    device.library.fake_nccl_groups.restype = ctypes.c_char_p
    array = np.ones(100, "float32")
    seen = []
    # As for NCCL itself, which takes ranks with different ids for ranks of different hosts.
    for ids, cuda_mode in (("distinct", "auto"), ("distinct", "nccl"), ("same", "nccl")):
        os.environ["NCCL_HOSTID"] = f"host-{rank}" if ids == "distinct" else "host"
        group = _group(size, cuda_mode)
        if ids == "same":
            with pytest.raises(errors.UnsupportedError) as refused:
                dist.all_reduce(device.tensor(array), group=group)
            return seen, str(refused.value)
        before = len(device.library.fake_nccl_groups())
        dist.all_reduce(device.tensor(array), group=group)
        device.synchronize()
        by = "nccl" if len(device.library.fake_nccl_groups()) > before else "host"
        seen.append(f"{by} {array[0]:g}")
    raise AssertionError


def test_ranks_that_share_a_gpu_use_nccl_where_it_is_told_to_take_them_apart(
    fake_cuda: Path,
) -> None:
    for seen, refused in run_ranks(2, _told_apart, args=(str(fake_cuda),)).values():
        assert seen == ["host 2", "nccl 4"]
        assert "ranks 0 and 1 share a GPU" in refused


def _without_gpu(rank: int, size: int, library: str) -> tuple[float, str]:
    # Rank 1 has no GPU: its tensors are on the CPU.
    device = Device(Path(library), nccl=rank == 0)
    group = _group(size)
    array = np.ones(100, "float32")
    tensor = device.tensor(array) if rank == 0 else torch.from_numpy(array)
    dist.all_reduce(tensor, group=group)
    device.synchronize()
    with pytest.raises(errors.UnsupportedError) as refused:
        _group(size, "nccl")
    return float(array[0]), str(refused.value)


def test_a_rank_without_a_gpu_keeps_its_group_on_the_host(fake_cuda: Path) -> None:
    for value, text in run_ranks(2, _without_gpu, args=(str(fake_cuda),)).values():
        assert value == 2.0
        assert "rank 1 has no GPU" in text


def _cpu_tensor_meets_nccl(rank: int, size: int, library: str, before: int) -> str:
    device = Device(Path(library), nccl=True)
    group = _group(size, seconds=30)
    for _ in range(before):
        dist.all_reduce(device.tensor(np.ones(4, "float32")), group=group)
    with pytest.raises(errors.CollectiveMismatchError) as mismatch:
        if rank == 0:
            dist.all_reduce(device.tensor(np.ones(4, "float32")), group=group)
            dist.barrier(group=group)
        else:
            dist.all_reduce(torch.ones(4), group=group)
    return str(mismatch.value)


@pytest.mark.parametrize("before", rings.first_of([0, 1]))
def test_a_cpu_tensor_does_not_meet_nccl(fake_cuda: Path, before: int) -> None:
    args = (str(fake_cuda), before)
    for text in run_ranks(2, _cpu_tensor_meets_nccl, args=args).values():
        assert "all_reduce" in text
        assert ("nccl" if before else "all_gather") in text


def _absent(rank: int, size: int, library: str) -> str:
    device = Device(Path(library), nccl=True)
    dist.barrier()  # the limit is also that of making the group: here both begin together
    group = _group(size, seconds=4)
    store = dist.distributed_c10d._get_default_store()
    array = np.ones(4, "float32")
    dist.all_reduce(device.tensor(array), group=group)
    if rank == 1:
        store.wait(["rank 0 knows"], timedelta(seconds=60))
        return ""
    dist.all_reduce(device.tensor(array), group=group)
    with pytest.raises(errors.PycommError) as late:
        dist.barrier(group=group)
    store.set("rank 0 knows", "")
    return str(late.value)


def test_a_rank_that_does_not_come_is_named(fake_cuda: Path) -> None:
    text = run_ranks(2, _absent, args=(str(fake_cuda),)).values()[0]
    assert "TIMEOUT" in text
    assert "rank 1" in text and "has not entered it" in text


def _coalesced(rank: int, size: int, library: str) -> dict[str, Any]:
    device = Device(Path(library), nccl=True)
    device.library.fake_nccl_groups.restype = ctypes.c_char_p
    group = _group(size, "nccl")
    backend = group._get_backend(torch.device("cuda"))
    arrays = [_values(rank, 100 + i) for i in range(4)]
    tensors = [device.tensor(array) for array in arrays]
    dist.broadcast(tensors[0], src=0, group=group)
    device.synchronize()
    before = len(device.library.fake_nccl_groups().split())
    told: dict[str, Any] = {}
    with dist._coalescing_manager(group, torch.device("cuda"), async_ops=True) as manager:
        dist.broadcast(tensors[1], src=1, group=group)
        dist.reduce(tensors[2], dst=0, group=group)
        inner = dist.broadcast(tensors[3], src=0, group=group, async_op=True)
        told["begun"] = len(device.library.fake_nccl_groups().split()) - before
        inner.wait()  # of what has not begun: as of the calls above, which torch waits for
        with pytest.raises(errors.InvalidArgumentError, match="coalescing manager"):
            inner.get_future()
        told["begun"] += len(device.library.fake_nccl_groups().split()) - before
    manager.wait()
    device.synchronize()
    told["groups"] = device.library.fake_nccl_groups().split()[before:]
    told["arrays"] = [array.copy() for array in arrays]
    # An empty one, one with a CPU tensor in it, and one more of NCCL's: nothing is left over.
    with dist._coalescing_manager(group, torch.device("cuda"), async_ops=True) as manager:
        pass
    on_cpu = torch.ones(3)
    backend._start_coalescing()
    dist.broadcast(tensors[1], src=0, group=group, async_op=True)
    dist.all_reduce(on_cpu, group=group, async_op=True)
    backend._end_coalescing().wait()
    device.synchronize()
    told["mixed"] = (on_cpu.tolist(), arrays[1].copy())
    dist.destroy_process_group(group)
    return told


def test_a_coalescing_manager_is_one_nccl_group(fake_cuda: Path) -> None:
    size = 2
    for rank, told in enumerate(run_ranks(size, _coalesced, args=(str(fake_cuda),)).values()):
        assert told["begun"] == 0, "NCCL was called before the manager's end"
        assert told["groups"] == [b"3"]
        first, second, third, fourth = told["arrays"]
        np.testing.assert_array_equal(first, _values(0, 100))
        np.testing.assert_array_equal(second, _values(1, 101))
        if rank == 0:
            exact = np.sum([_values(r, 102).astype("float64") for r in range(size)], axis=0)
            np.testing.assert_allclose(third, exact, rtol=0, atol=3e-6)
        np.testing.assert_array_equal(fourth, _values(0, 103))
        assert told["mixed"][0] == [float(size)] * 3
        np.testing.assert_array_equal(told["mixed"][1], second)


def _nccl_fails(rank: int, size: int, library: str) -> list[str]:
    device = Device(Path(library), nccl=True)
    group = _group(size)
    array = np.ones(4, "float32")
    dist.all_reduce(device.tensor(array), group=group)
    dist.barrier(group=group)  # else rank 0 may learn of the failure within the call above
    if rank == 1:
        device.library.fake_nccl_report(2)
    told = []
    with pytest.raises(errors.PycommError) as caught:  # wait() need not be the one to see it
        dist.all_reduce(device.tensor(array), group=group)
        dist.barrier(group=group)
    told.append(str(caught.value))
    with pytest.raises(errors.PycommError) as caught:
        dist.all_reduce(device.tensor(array), group=group)
    told.append(str(caught.value))
    return told


def test_what_nccl_reports_fails_the_group_on_all_ranks(fake_cuda: Path) -> None:
    for told in run_ranks(2, _nccl_fails, args=(str(fake_cuda),)).values():
        for text in told:
            assert "NCCL" in text and "ncclSystemError" in text


def _record(rank: int, size: int, library: str) -> dict[str, Any]:
    device = Device(Path(library), nccl=True)
    group = _group(size, "nccl")
    tensor = device.tensor(np.ones(40, "float32"))
    dist.all_reduce(tensor, group=group)
    device.synchronize()
    device.library.fake_hold(0)
    dist.all_reduce(tensor, group=group)
    device.library.fake_nccl_report(2)
    deadline = time.monotonic() + 10
    with pytest.raises(errors.PycommError) as failed:
        while time.monotonic() < deadline:  # of one rank, so it does not wait for anything
            dist.barrier(group=group)
    device.library.fake_let_go()
    return dict(failed.value.record)


def test_what_nccl_reports_names_its_operation(fake_cuda: Path) -> None:
    (record,) = run_ranks(1, _record, args=(str(fake_cuda),)).values()
    assert record["code"] == "SYSTEM_ERROR"
    assert (record["op"], record["dtype"], record["numel"]) == ("all_reduce", "float32", 40)
    assert record["sequence"] >= 0


def _peer_dies(rank: int, size: int, library: str) -> tuple[float, str]:
    device = Device(Path(library), nccl=True)
    group = _group(size, "nccl")
    tensor = device.tensor(np.ones(4, "float32"))
    dist.all_reduce(tensor, group=group)
    device.synchronize()
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["rank 0 waits for its device"], timedelta(seconds=30))
        time.sleep(0.5)
        os._exit(9)
    dist.all_reduce(tensor, group=group)
    store.set("rank 0 waits for its device", "")
    began = time.monotonic()
    device.synchronize()  # as loss.item() does, behind a kernel that waits for rank 1
    waited = time.monotonic() - began
    with pytest.raises(errors.PycommError) as dead:
        dist.all_reduce(tensor, group=group)
        dist.barrier(group=group)
    return waited, str(dead.value)


@pytest.mark.time_bound
def test_a_dead_peer_ends_a_device_that_is_waited_for(fake_cuda: Path) -> None:
    args = (str(fake_cuda),)
    ranks = run_ranks(2, _peer_dies, args=args, check=False, timeout_s=40)
    assert ranks[0].value is not None, ranks[0].describe()
    waited, text = ranks[0].value
    assert "PEER_DEAD" in text and "Rank 1" in text
    assert_within(waited, 15)


REFUSED = [("bool", "sum"), ("uint32", "sum"), ("uint64", "sum"), ("int32", "band")]


def _without_kernel(rank: int, size: int, library: str, algorithm: str) -> list[str]:
    device = Device(Path(library), nccl=True)
    options = pycomm.Options(cuda_mode="nccl", algorithm=algorithm)  # type: ignore[arg-type]
    group = dist.new_group(list(range(size)), pg_options=options)
    texts = []
    for dtype, op in REFUSED:
        tensor = device.tensor(np.ones(64, dtype))
        with pytest.raises(errors.UnsupportedError) as refused:
            dist.all_reduce(tensor, getattr(dist.ReduceOp, op.upper()), group=group)
        texts.append(str(refused.value))
    array = np.ones(64, "float32")
    dist.all_reduce(device.tensor(array), group=group)
    device.synchronize()
    assert array.tolist() == [float(size)] * 64, "the group lives"
    dist.destroy_process_group(group)
    return texts


@pytest.mark.parametrize("algorithm", ["ring", "direct"])
def test_an_algorithm_without_a_kernel_for_the_dtype_is_refused(
    fake_cuda: Path, algorithm: str
) -> None:
    args = (str(fake_cuda), algorithm)
    for texts in run_ranks(2, _without_kernel, args=args).values():
        for (dtype, _), text in zip(REFUSED[:3], texts[:3], strict=True):
            assert f"reduce kernel has no {dtype}" in text
            assert 'cuda_mode="host"' in text


def _raises_in_manager(rank: int, size: int, library: str, nccl: bool) -> dict[str, Any]:
    device = Device(Path(library), nccl=nccl)
    group = _group(size, "nccl" if nccl else "host")
    on = torch.device("cuda" if nccl else "cpu")
    make = device.tensor if nccl else torch.from_numpy
    arrays = [_values(rank, 100 + i) for i in range(3)]
    tensors = [make(array) for array in arrays]
    dist.broadcast(tensors[2], src=0, group=group)
    told: dict[str, Any] = {}
    with (
        pytest.raises(ZeroDivisionError),
        dist._coalescing_manager(group, on, async_ops=True),
    ):
        lost = dist.broadcast(tensors[0], src=0, group=group, async_op=True)
        raise ZeroDivisionError
    with dist._coalescing_manager(group, on, async_ops=True) as manager:
        dist.broadcast(tensors[1], src=1, group=group, async_op=True)
    manager.wait()
    if nccl:
        with pytest.raises(errors.PycommError) as never:
            lost.wait()
        told["never"] = str(never.value)
    else:
        lost.wait()  # which began at once
    group._start_coalescing(on)
    lost = dist.broadcast(tensors[0], src=0, group=group, async_op=True)
    with pytest.raises(errors.PycommError, match="share memory"):
        dist.all_reduce_coalesced([tensors[0], tensors[0][1:]], group=group)
    if nccl:
        with pytest.raises(errors.PycommError, match="a list call of its coalescing manager"):
            lost.wait()
    else:
        lost.wait()
    dist.broadcast(tensors[2], src=1, group=group)
    device.synchronize()
    told["arrays"] = [array.copy() for array in arrays]
    dist.destroy_process_group(group)
    return told


@pytest.mark.parametrize("nccl", [False, True], ids=["cpu", "nccl"])
def test_a_coalescing_body_that_raises_leaves_nothing_behind(fake_cuda: Path, nccl: bool) -> None:
    args = (str(fake_cuda), nccl)
    for rank, told in enumerate(run_ranks(2, _raises_in_manager, args=args).values()):
        np.testing.assert_array_equal(told["arrays"][0], _values(rank if nccl else 0, 100))
        np.testing.assert_array_equal(told["arrays"][1], _values(1, 101))
        np.testing.assert_array_equal(told["arrays"][2], _values(0, 102))
        if nccl:
            assert "never begun" in told["never"] and "coalescing manager" in told["never"]


def _launch_fails(rank: int, size: int, library: str, why: str) -> list[str]:
    device = Device(Path(library), nccl=True)
    group = _group(size, "nccl")
    backend = group._get_backend(torch.device("cuda"))
    tensors = [device.tensor(np.ones(4, "int32")) for _ in range(2)]
    dist.all_reduce(tensors[0], group=group)
    op = dist.ReduceOp.BAND if why == "no kernel" else dist.ReduceOp.SUM
    backend._start_coalescing()
    waited, asked = (dist.all_reduce(each, op, group=group, async_op=True) for each in tensors)
    assert waited is not None and asked is not None
    if why == "captured":
        device.library.fake_begin_capture()
    elif why == "closed":
        dist.destroy_process_group(group)
    codes = []
    for end in (backend._end_coalescing, waited.wait, lambda: asked.get_future().wait()):
        with pytest.raises(errors.PycommError) as failed:
            end()
        codes.append(failed.value.record["code"])
    if why == "captured":
        device.library.fake_end_capture()
    return codes


@pytest.mark.parametrize(
    ("why", "code"),
    [("captured", "UNSUPPORTED"), ("no kernel", "UNSUPPORTED"), ("closed", "SHUT_DOWN")],
)
def test_a_launch_that_fails_is_the_error_of_its_calls(
    fake_cuda: Path, why: str, code: str
) -> None:
    (codes,) = run_ranks(1, _launch_fails, args=(str(fake_cuda), why)).values()
    assert codes == [code] * 3


def _manager_left_open(rank: int, size: int, library: str) -> tuple[str, float]:
    device = Device(Path(library), nccl=True)
    dist.barrier()
    group = _group(size, "nccl", seconds=3)
    array = np.ones(4, "float32")
    tensor = device.tensor(array)
    dist.all_reduce(tensor, group=group)
    with (
        pytest.raises(ZeroDivisionError),
        dist._coalescing_manager(group, torch.device("cuda"), async_ops=True),
    ):
        raise ZeroDivisionError
    dist.distributed_c10d._world.pg_coalesce_state.pop(group)  # torch's own leftover
    time.sleep(3.1)  # the group's timeout is what this is about
    with pytest.raises(errors.InvalidArgumentError) as stale:
        dist.broadcast(tensor, src=0, group=group)
    dist.all_reduce(tensor, group=group)
    device.synchronize()
    return str(stale.value), float(array[0])


def test_a_manager_that_was_never_left_ends_at_the_timeout(fake_cuda: Path) -> None:
    for text, value in run_ranks(2, _manager_left_open, args=(str(fake_cuda),)).values():
        assert "coalescing manager" in text and re.search(r"\d s ago", text)
        assert value == 4.0


def _first_collective(rank: int, size: int, library: str) -> str:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
    device = Device(Path(library), nccl=True)
    group = _group(size, "nccl")
    tensor = device.tensor(np.ones(4, "float32"))
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    if rank == 1:
        store.wait(["interrupted"], timedelta(seconds=30))
        with pytest.raises(errors.PycommError) as aborted:
            dist.barrier(group=group)
        return str(aborted.value)
    mark("first collective")
    with pytest.raises(KeyboardInterrupt):
        dist.all_reduce(tensor, group=group)
    mark("interrupted")
    store.set("interrupted", "")
    return ""


@pytest.mark.alone
@pytest.mark.time_bound
def test_the_first_collective_can_be_interrupted(fake_cuda: Path) -> None:
    with start_ranks(2, _first_collective, args=(str(fake_cuda),)) as running:
        running.wait_for_mark(0, "first collective")
        running.wait_until_asleep(0)
        sent = running.kill(0, signal.SIGINT)
        running.wait_for_mark(0, "interrupted", 10)
        took_s = time.monotonic() - sent
        text = running.collect(60).check().values()[1]
        assert "ABORTED" in text and "Rank 0 was interrupted" in text
    assert_within(took_s, 5)


def _interrupted_when_over(rank: int, size: int, library: str) -> bool:
    # They share a GPU, so what the ranks settle is that tensors go through the host.
    device = Device(Path(library), nccl=True)
    device.library.fake_set_uuid(b"the same")
    group = _group(size)
    tensor = device.tensor(np.ones(4, "float32"))
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["rank 0 is in the handler"], timedelta(seconds=30))
        work = dist.all_reduce(tensor, group=group, async_op=True)
        store.set("rank 1 has settled it", "")
        store.wait(["rank 0 has ended"], timedelta(seconds=30))
        with pytest.raises(errors.PycommError, match="Rank 0 was interrupted"):
            work.wait()
        return True

    def interrupt(number: int, frame: object) -> None:
        store.set("rank 0 is in the handler", "")
        store.wait(["rank 1 has settled it"], timedelta(seconds=30))
        time.sleep(0.2)  # for this rank's own part, which another thread ends
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 1)
    try:
        with pytest.raises(KeyboardInterrupt):
            dist.all_reduce(tensor, group=group)
    finally:
        store.set("rank 0 has ended", "")
    return True


@pytest.mark.alone  # see test_a_signal_handler_destroys_the_group_in_a_collective
def test_an_interrupt_is_not_lost_if_the_operation_ends_meanwhile(fake_cuda: Path) -> None:
    assert run_ranks(2, _interrupted_when_over, args=(str(fake_cuda),)).values() == [True, True]


WHERE = ["first", "launch"]
"""Where a signal handler runs: while the ranks settle their way, and while NCCL connects them."""


def _in_handler(device: Device, where: str, rank: int, act: Callable[[], None]) -> None:
    """Makes rank 0 wait for rank 1 in its next collective; a handler that calls `act` runs then."""
    if rank == 0:
        device.library.fake_nccl_hold_launches(int(where == "launch"))
        signal.signal(signal.SIGALRM, lambda number, frame: act())
        signal.setitimer(signal.ITIMER_REAL, 1)


def _destroys_in_handler(rank: int, size: int, library: str, where: str) -> tuple[str, float]:
    device = Device(Path(library), nccl=True)
    group = _group(size, "nccl")
    tensor = device.tensor(np.ones(4, "float32"))
    store = dist.distributed_c10d._get_default_store()
    if where == "launch":
        dist.all_reduce(tensor, group=group)
        device.synchronize()
    dist.barrier()
    _in_handler(device, where, rank, lambda: dist.destroy_process_group(group))
    if rank == 1:
        store.wait(["rank 0 has ended"], timedelta(seconds=30))
        dist.destroy_process_group(group)
        return "", 0.0
    began = time.monotonic()
    with pytest.raises(errors.PycommError) as closed:  # torch's function would ask for the group
        group.allreduce([tensor], dist.AllreduceOptions())
    store.set("rank 0 has ended", "")
    return str(closed.value), time.monotonic() - began


@pytest.mark.alone  # the handler runs 1 s after it was armed: the call must have begun
@pytest.mark.time_bound
@pytest.mark.parametrize("where", rings.first_of(WHERE))
def test_a_signal_handler_destroys_the_group_in_a_collective(fake_cuda: Path, where: str) -> None:
    args = (str(fake_cuda), where)
    ranks = run_ranks(2, _destroys_in_handler, args=args, timeout_s=40)
    text, took = ranks.values()[0]
    assert "code=SHUT_DOWN" in text and "closed while" in text
    assert_within(took, 10)


def _reduces_in_handler(rank: int, size: int, library: str, where: str) -> tuple[str, float]:
    device = Device(Path(library), nccl=True)
    group = _group(size, "nccl")
    array = np.ones(4, "float32")
    tensor = device.tensor(array)
    store = dist.distributed_c10d._get_default_store()
    if where == "launch":
        dist.all_reduce(device.tensor(np.ones(4, "float32")), group=group)
        device.synchronize()
    dist.barrier()
    told: list[str] = []

    def act() -> None:
        try:
            dist.all_reduce(tensor, group=group)
        except errors.InvalidArgumentError as error:
            told.append(str(error))
        device.library.fake_nccl_hold_launches(0)
        store.set("rank 0 was in its handler", "")

    _in_handler(device, where, rank, act)
    if rank == 1:
        store.wait(["rank 0 was in its handler"], timedelta(seconds=30))
    dist.all_reduce(tensor, group=group)
    device.synchronize()
    dist.destroy_process_group(group)
    return "".join(told), float(array[0])


@pytest.mark.alone  # as the test above
@pytest.mark.parametrize("where", rings.first_of(WHERE))
def test_a_signal_handler_cannot_begin_a_collective_in_another(fake_cuda: Path, where: str) -> None:
    args = (str(fake_cuda), where)
    ranks = run_ranks(2, _reduces_in_handler, args=args, timeout_s=40).values()
    assert "signal handler" in ranks[0][0] and "set a flag" in ranks[0][0]
    assert [value for _, value in ranks] == [2.0, 2.0], "the other collective goes on"


def _after_close(rank: int, size: int, library: str) -> tuple[str, str]:
    device = Device(Path(library), nccl=True)
    device.library.fake_nccl_groups.restype = ctypes.c_char_p
    group = _group(size, "nccl")
    tensor = device.tensor(np.ones(4, "float32"))
    dist.all_reduce(tensor, group=group)
    device.synchronize()
    before = device.library.fake_nccl_groups()
    dist.destroy_process_group(group)
    if rank == 1:
        return "", ""
    with pytest.raises(errors.PycommError) as closed:  # as a reducer does, which keeps the group
        group.allreduce([tensor], dist.AllreduceOptions()).wait()
    return str(closed.value), device.library.fake_nccl_groups()[len(before) :].decode()


def test_nothing_is_launched_after_the_group_was_closed(fake_cuda: Path) -> None:
    text, launched = run_ranks(2, _after_close, args=(str(fake_cuda),)).values()[0]
    assert launched == "", "a kernel that waits for ranks which do not come"
    assert "code=SHUT_DOWN" in text and "The process group is closed" in text


def _closed_while_made(rank: int, size: int, library: str) -> tuple[list[str], list[str], str]:
    device = Device(Path(library), nccl=True)
    device.library.fake_nccl_groups.restype = ctypes.c_char_p
    group = _group(size, "nccl")
    tensor = device.tensor(np.ones(4, "float32"))
    told: list[str] = []

    def reduce() -> None:
        try:
            group.allreduce([tensor], dist.AllreduceOptions()).wait()
        except errors.PycommError as error:
            told.append(str(error))

    device.library.fake_nccl_hold_looks(1)
    first = threading.Thread(target=reduce)
    first.start()
    deadline = time.monotonic() + 20
    while not device.library.fake_nccl_look_waits() and time.monotonic() < deadline:
        time.sleep(0.01)
    dist.destroy_process_group(group)  # nobody has the communicator yet, which is made
    device.library.fake_nccl_hold_looks(0)
    first.join(20)
    assert not first.is_alive()
    return told, _threads_left("pycomm-nccl"), device.library.fake_nccl_groups().decode()


def test_a_group_that_is_closed_while_nccl_connects_launches_nothing(fake_cuda: Path) -> None:
    ((told, threads, launched),) = run_ranks(1, _closed_while_made, args=(str(fake_cuda),)).values()
    assert launched == "", "a kernel that waits for ranks which do not come"
    assert "pycomm-nccl" not in threads, "it calls CUDA until the process ends"
    assert len(told) == 1
    assert "code=SHUT_DOWN" in told[0] and "The process group is closed" in told[0]


def _threads() -> list[str]:
    return [name for name in thread_names() if name.startswith("pycomm")]


def _threads_left(name: str) -> list[str]:
    """After some time, if need be: the kernel forgets a thread later than who joins it."""
    deadline = time.monotonic() + 5
    while name in _threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    return _threads()


def _exits(
    rank: int, size: int, library: str, cuda_mode: str
) -> tuple[list[str], list[str], float]:
    device = Device(Path(library), nccl=cuda_mode == "nccl")
    group = _group(size, cuda_mode)
    tensor = device.tensor(np.ones(4, "float32"))
    dist.all_reduce(tensor, group=group)
    if cuda_mode == "nccl":
        device.library.fake_hold(0)
    # Over TCP only rank 0 begins it: its tensor is on the host, and waits for rank 1.
    work = None
    if cuda_mode == "nccl" or rank == 0:
        work = dist.all_reduce(tensor, group=group, async_op=True)
    dist.barrier()
    name = "pycomm-nccl" if cuda_mode == "nccl" else "pycomm-stager"
    deadline = time.monotonic() + 20  # a thread names itself when it first runs
    while name not in _threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    running = _threads()
    began = time.monotonic()
    loader.load().shutdown_all(2000)  # what atexit calls
    took = time.monotonic() - began
    del work
    return running, _threads_left(name), took


@pytest.mark.alone
@pytest.mark.time_bound
@pytest.mark.parametrize(
    ("cuda_mode", "name"), [("host", "pycomm-stager"), ("nccl", "pycomm-nccl")]
)
def test_threads_end_before_the_interpreter(fake_cuda: Path, cuda_mode: str, name: str) -> None:
    args = (str(fake_cuda), cuda_mode)
    ended = run_ranks(2, _exits, args=args).values()
    for running, left, _ in ended:
        assert name in running
        assert left == [], "threads that may call CUDA while its driver is unloaded"
    assert_within(max(took for _, _, took in ended), 4)
