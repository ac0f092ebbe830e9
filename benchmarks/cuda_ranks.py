"""What the tables of CUDA tensors share: ranks, groups that take turns, and clocks."""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

import pycomm

Body = Callable[[], object]
_HOST_ID = "NCCL_HOSTID"


def open_groups(names: Sequence[str]) -> dict[str, dist.ProcessGroup]:
    """`nccl` is torch's own backend, `pycomm:nccl` and `pycomm:host` are pycomm's two ways.

    `pycomm:host` goes through shared memory where the ranks share a host, `pycomm:wire` by TCP.
    """
    modes = {
        "pycomm:nccl": pycomm.Options(cuda_mode="nccl"),
        "pycomm:host": pycomm.Options(cuda_mode="host"),
        "pycomm:wire": pycomm.Options(cuda_mode="host", transport="tcp"),
    }
    groups = {}
    for name in names:
        backend = name.partition(":")[0]
        options = modes.get(name)
        group = dist.new_group(backend=backend, pg_options=options, timeout=timedelta(seconds=120))
        assert isinstance(group, dist.ProcessGroup)
        groups[name] = group
    return groups


def possible_backends(ranks: int) -> list[str]:
    """NCCL wants a GPU a rank, or takes ranks that share one for ranks of several hosts."""
    by_nccl = ["pycomm:nccl", "nccl"]
    if _HOST_ID in os.environ:
        return by_nccl
    by_host = ["pycomm:host", "pycomm:wire"]
    return [*by_host, *by_nccl] if ranks <= torch.cuda.device_count() else by_host


def blocks_of(bodies: Mapping[str, Body], blocks: int, repeats: int) -> dict[str, list[float]]:
    """Milliseconds of one run, a block each; the bodies take turns, back and forth."""
    times: dict[str, list[float]] = {name: [] for name in bodies}
    for body in bodies.values():
        for _ in range(3):
            body()
    for block in range(blocks):
        order = list(bodies) if block % 2 == 0 else list(reversed(bodies))
        for name in order:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            dist.barrier()
            torch.cuda.synchronize()
            begin.record()
            for _ in range(repeats):
                bodies[name]()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end) / repeats)
    return times


def ratio(times: Mapping[str, list[float]], name: str, base: str) -> str:
    """The median of the blocks' ratios, and where nine of ten lie."""
    pairs = sorted(a / b for a, b in zip(times[name], times[base], strict=True))
    low, high = pairs[len(pairs) // 20], pairs[-1 - len(pairs) // 20]
    return f"{statistics.median(pairs):.3f} ({low:.3f} to {high:.3f})"


def heading(command: str) -> str:
    """Command, device, torch and commit."""
    try:
        git = ["git", "rev-parse", "HEAD"]
        commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = "unknown"
    device = torch.cuda.get_device_name()
    return f"# {command}\n# {device}, torch {torch.__version__}, commit {commit}"


def _rank(
    rank: int,
    ranks: int,
    port: int,
    shared_nccl: bool,
    body: Callable[..., None],
    args: tuple[object, ...],
) -> None:
    if shared_nccl:
        os.environ.update({_HOST_ID: f"rank-{rank}", "NCCL_SOCKET_IFNAME": "lo"})
    torch.cuda.set_device(rank % torch.cuda.device_count())
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(ranks)
    )
    dist.init_process_group("pycomm")
    body(*args)
    dist.destroy_process_group()


def run(ranks: int, body: Callable[..., None], *args: object, shared_nccl: bool = False) -> None:
    """Runs `body(*args)` on so many ranks of this machine, sharing its GPUs where need be.

    `shared_nccl`: NCCL alone, which takes each rank for one of another host.
    """
    if not torch.cuda.is_available():
        print("SKIPPED: torch sees no GPU")
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    arguments = (ranks, port, shared_nccl, body, args)
    multiprocessing.spawn(_rank, arguments, nprocs=ranks)  # type: ignore[no-untyped-call]
