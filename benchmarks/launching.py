"""Starts the ranks of one run as processes, collects rank 0's rows, and leaves nothing behind."""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

LOOPBACK = "127.0.0.1"


class RankFailedError(RuntimeError):
    """A rank ended badly or the run took too long."""


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel end this process when its parent ends, however the parent ends."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)  # it ended before the kernel was asked


def add_rank_options(parser: argparse.ArgumentParser) -> None:
    """Have a script take what run_ranks() adds to the command line of each rank."""
    parser.add_argument("--parent-pid", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--results-fd", type=int, help=argparse.SUPPRESS)


def ran_as_rank(options: argparse.Namespace, measure: Callable[[], object]) -> bool:
    """Measure if run_ranks() started this process, and report what that returns as a line of JSON.

    Returns:
        Whether run_ranks() did: then this process has nothing more to do.
    """
    if options.parent_pid is None:
        return False
    die_with_parent(options.parent_pid)
    found = measure()
    if options.results_fd is not None:
        os.write(options.results_fd, json.dumps(found).encode() + b"\n")
    return True


def _environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    env = dict(os.environ)
    cores = len(os.sched_getaffinity(0))
    env.setdefault("OMP_NUM_THREADS", str(max(1, cores // ranks)))
    # Both backends on the same interface; pycomm reads this name too.
    env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    env |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
    }
    return env


def run_ranks(
    ranks: int, argv: Sequence[str], timeout_s: float, on_line: Callable[[bytes], None]
) -> None:
    """Run this very script once a rank and hand every line that rank 0 reports to on_line.

    Raises:
        RankFailedError: A rank exited with another status than 0, or the time was up. All ranks
            have ended when this returns or raises.
    """
    # The store lives here, on a port that the kernel picks, so that no port can be taken already.
    timeout = timedelta(seconds=timeout_s)
    store = TCPStore(LOOPBACK, 0, None, True, timeout, wait_for_workers=False)
    script = sys.modules["__main__"].__file__
    assert script is not None
    read_fd, write_fd = os.pipe()
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(ranks):
            internal = ["--parent-pid", str(os.getpid())]
            if rank == 0:
                internal += ["--results-fd", str(write_fd)]
            processes.append(
                subprocess.Popen(
                    [sys.executable, script, *argv, *internal],
                    env=_environment(rank, ranks, store.port),
                    stdin=subprocess.DEVNULL,
                    stdout=sys.stderr.fileno(),
                    pass_fds=[write_fd] if rank == 0 else [],
                )
            )
        os.close(write_fd)
        write_fd = -1
        _wait(processes, read_fd, time.monotonic() + timeout_s, on_line)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        os.close(read_fd)
        if write_fd >= 0:
            os.close(write_fd)


def _wait(
    processes: Sequence[subprocess.Popen[bytes]],
    read_fd: int,
    deadline: float,
    on_line: Callable[[bytes], None],
) -> None:
    pending, open_pipe = b"", True
    while True:
        if open_pipe and select.select([read_fd], [], [], 0.1)[0]:
            chunk = os.read(read_fd, 1 << 16)
            open_pipe = chunk != b""
            *lines, pending = (pending + chunk).split(b"\n")
            for line in lines:
                on_line(line)
        codes = [process.poll() for process in processes]
        failed = {rank: code for rank, code in enumerate(codes) if code not in (None, 0)}
        if failed:
            listing = ", ".join(f"rank {rank} ended with {code}" for rank, code in failed.items())
            raise RankFailedError(f"{listing}; its own message is above")
        if not open_pipe and all(code == 0 for code in codes):
            return
        if time.monotonic() > deadline:
            raise RankFailedError("the run took longer than --timeout; all ranks were ended")
        if not open_pipe:
            time.sleep(0.02)  # rank 0 is leaving; there is nothing else to wait on
