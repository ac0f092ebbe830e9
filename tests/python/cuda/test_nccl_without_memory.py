"""One allocation of the extension fails while NCCL runs: results are right, and kernels end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import failing_memory
import numpy as np
import pytest
import torch
import torch.distributed as dist
from fake_cuda_device import Device
from ranks import run_ranks

import pycomm
from pycomm import errors

# The first test compiles the library: some ten seconds, minutes on a busy machine.
pytestmark = [pytest.mark.ci, pytest.mark.timeout(600)]

MOST = 200  # allocations


def rounds(size: int, least: int) -> Iterator[tuple[int, dist.ProcessGroup, Any]]:
    """The number of the allocation that fails, each with a group of its own, until none has failed
    on rank 0: it sets "struck" and that number. At least so many have.
    """
    store = dist.distributed_c10d._get_default_store()
    struck = True
    nth = 0
    while struck:
        nth += 1
        assert nth < MOST
        options = pycomm.Options(cuda_mode="nccl")
        wait = timedelta(seconds=20)
        group = dist.new_group(list(range(size)), timeout=wait, pg_options=options)
        assert isinstance(group, dist.ProcessGroup)
        yield nth, group, group._get_backend(torch.device("cuda"))
        struck = store.get(f"struck {nth}") == b"True"
        dist.destroy_process_group(group)
    assert nth > least, "nearly nothing allocates there"


def coalesced(rank: int, size: int, library: str) -> None:
    """Where rank 0 has not begun the first sum, its second one must not meet rank 1's first."""
    device = Device(Path(library), nccl=True)
    failing = failing_memory.Failing()
    store = dist.distributed_c10d._get_default_store()
    for nth, group, backend in rounds(size, least=3):
        arrays = [np.full(100, 1.0, "float32"), np.full(100, 10.0, "float32")]
        first, second = (device.tensor(array) for array in arrays)
        dist.all_reduce(first, group=group)
        device.synchronize()
        backend._start_coalescing()
        dist.all_reduce(first, group=group, async_op=True)
        if rank == 0:
            failing.fail(nth)
        with contextlib.suppress(Exception):
            backend._end_coalescing().wait()
        if rank == 0:
            store.set(f"struck {nth}", str(failing.stop()))
        with contextlib.suppress(errors.PycommError):  # the group has failed
            dist.all_reduce(second, group=group)
        device.synchronize()
        if arrays[1].tolist() != [20.0] * 100:
            with pytest.raises(errors.PycommError) as failed:
                dist.barrier(group=group)
            assert failed.value.record["code"] == "OUT_OF_MEMORY", f"allocation {nth}: {arrays[1]}"


def aborted(rank: int, size: int, library: str) -> None:
    """Rank 0's kernel waits for rank 1, which aborts the group. Allocations count until the kernel
    has ended.
    """
    device = Device(Path(library), nccl=True)
    failing = failing_memory.Failing()
    store = dist.distributed_c10d._get_default_store()
    for nth, group, backend in rounds(size, least=1):
        tensor = device.tensor(np.ones(100, "float32"))
        dist.all_reduce(tensor, group=group)
        device.synchronize()
        if rank == 1:
            store.wait([f"begun {nth}"])
            backend.abort()
            continue
        dist.all_reduce(tensor, group=group)
        failing.fail(nth, "pycomm-nccl")
        store.set(f"begun {nth}", "")
        device.synchronize()
        store.set(f"struck {nth}", str(failing.stop()))


@pytest.mark.parametrize("body", [coalesced, aborted])
def test_ranks_stay_in_step_and_kernels_end(body: Any, fake_cuda: Path, tmp_path: Path) -> None:
    environment = failing_memory.preloading(failing_memory.build(tmp_path))
    run_ranks(2, body, args=(str(fake_cuda),), env=environment, fresh=True, timeout_s=100)
